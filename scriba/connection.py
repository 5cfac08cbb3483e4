"""A database connection of our own: one that no request, no test and no handler shares.

Ownership must outlive whatever the rest of the process does with Django's connections: a handler's transaction, a
request's ``close_old_connections``, a test that never commits, a pool of four. So it goes over a copy of the alias'
connection, in autocommit, opened at first use, closed by its owner. What always holds: a connection that broke is
closed before the error is raised again, and the next call opens a new one; a dead network breaks it within a minute,
because nobody else would end what waits for an answer that cannot come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from django.db import connections

from scriba.exceptions import ConfigurationError

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper
    from django.db.backends.utils import CursorWrapper

__all__ = ["NOTICES_DEATH", "OwnConnection", "Params", "Row"]

Row = tuple[Any, ...]
Params = Sequence[Any] | Mapping[str, Any]

#: Left out of the copy: a pool is sized for workers, and the guarded updates rely on READ COMMITTED.
_LEFT_OUT = ("pool", "isolation_level")

#: How soon a dead network is noticed, where the project's OPTIONS do not say it. Keepalives are for who waits for an
#: answer, ``tcp_user_timeout`` (milliseconds) is for what was sent and never confirmed. A Unix socket has neither.
NOTICES_DEATH: Final = {
    "connect_timeout": 10,
    "keepalives": 1,
    "keepalives_idle": 20,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
}


class OwnConnection:
    """Used by one thread at a time. `using` is a database alias."""

    def __init__(self, using: str) -> None:
        self.using = using
        self._wrapper: BaseDatabaseWrapper | None = None

    def rows(self, sql: str, params: Params = ()) -> list[Row]:
        """Execute one statement and return its rows ([] for a statement without any)."""
        with self._minded(), self._open().cursor() as cursor:
            cursor.execute(sql, params)
            return cursor.fetchall() if cursor.description else []

    @contextmanager
    def transaction(self) -> Iterator[CursorWrapper]:
        """Open one transaction and yield a cursor in it; commit on leaving, roll back on an exception."""
        with self._minded():
            wrapper = self._open()
            with wrapper.cursor() as cursor, wrapper.wrap_database_errors, wrapper.connection.transaction():
                yield cursor

    def close(self) -> None:
        """Close the connection. Twice is fine, and so is one that is broken already."""
        wrapper, self._wrapper = self._wrapper, None
        if wrapper is not None:
            wrapper.close()

    def _open(self) -> BaseDatabaseWrapper:
        if self._wrapper is None:
            self._wrapper = self._copy()
        return self._wrapper

    def _copy(self) -> BaseDatabaseWrapper:
        shared = connections[self.using]
        if shared.vendor != "postgresql":
            msg = f"the database alias {self.using!r} is {shared.display_name}; Scriba keeps its state in PostgreSQL only."
            raise ConfigurationError(msg)
        copy: Callable[[], BaseDatabaseWrapper] = shared.copy
        wrapper = copy()
        for option in _LEFT_OUT:
            wrapper.settings_dict["OPTIONS"].pop(option, None)
        wrapper.settings_dict["OPTIONS"] = NOTICES_DEATH | wrapper.settings_dict["OPTIONS"]
        wrapper.settings_dict["AUTOCOMMIT"] = True  # nobody else would commit what is said here
        wrapper.inc_thread_sharing()  # one thread at a time, but not always the one that opened it
        return wrapper

    @contextmanager
    def _minded(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            if self._is_broken():
                self.close()
            raise

    def _is_broken(self) -> bool:
        return self._wrapper is not None and self._wrapper.connection is not None and self._wrapper.connection.closed
