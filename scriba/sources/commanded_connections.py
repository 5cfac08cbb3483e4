"""Connections to a Commanded store: dedicated ones, in autocommit, that nobody else shares.

Locks and LISTEN belong to a session, so a connection that Django or a pool may close or hand to somebody else would
lose them silently. Every connection is direct psycopg, names its projection in `application_name`, and finds out
about a dead peer by TCP keepalives.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import psycopg
from django.db import connections
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

from scriba.connection import NOTICES_DEATH
from scriba.failure import classify
from scriba.protocols import FailureKind

if TYPE_CHECKING:
    from scriba.protocols import Identity

__all__ = ["Connector", "insist_on_indexes", "is_transient"]

Connection = psycopg.Connection[tuple[Any, ...]]

#: Django's own: its adapters and cursors are not ours, and it sets roles itself.
_DJANGOS: Final = ("context", "cursor_factory", "prepare_threshold")
_LONGEST_NAME: Final = 63


class Connector:
    """How one source reaches its database: an alias of Django's settings, or a connection string."""

    def __init__(self, using: str | None, dsn: str | None) -> None:
        self.using = using
        self._dsn = dsn

    @property
    def name(self) -> str:
        """The database in a word: the alias, or the name in the connection string."""
        if self.using is not None:
            return self.using
        return str(conninfo_to_dict(self._dsn or "").get("dbname", ""))

    def connect(self, identity: Identity, role: str) -> Connection:
        """Open a new connection for the projection `identity`; `role` says what for."""
        parameters = {
            **NOTICES_DEATH,
            "application_name": f"scriba {identity} {role}"[:_LONGEST_NAME],
            **self._parameters(),
        }
        set_role = parameters.pop("assume_role", None)
        connection = psycopg.connect(**parameters, autocommit=True, prepare_threshold=None)
        if set_role:
            connection.execute(sql.SQL("SET ROLE {}").format(sql.Identifier(set_role)))
        return connection

    def _parameters(self) -> dict[str, Any]:
        if self.using is None:
            return {"conninfo": self._dsn or "", **_without_overrides(self._dsn or "")}
        wrapper = connections[self.using]
        given = {key: value for key, value in wrapper.get_connection_params().items() if key not in _DJANGOS}
        return {**given, "assume_role": wrapper.settings_dict["OPTIONS"].get("assume_role")}


def _without_overrides(dsn: str) -> dict[str, Any]:
    """Return what the connection string itself says, so that it wins over our defaults."""
    return {key: value for key, value in conninfo_to_dict(dsn).items() if key in {*NOTICES_DEATH, "application_name"}}


def insist_on_indexes(connection: Connection) -> None:
    """Keep the planner from anything but an ordered range of the index, in this session only.

    Where its statistics are older than the newest events it believes that few follow the cursor, and would collect
    and sort all of them for each page.
    """
    connection.execute("SET enable_bitmapscan = off; SET enable_seqscan = off")


def is_transient(error: Exception) -> bool:
    """Say whether `error` may go away by itself: a connection or server that is away, overloaded or starting."""
    return isinstance(error, psycopg.Error) and classify(error).kind is FailureKind.TRANSIENT
