"""Events that the Django extension of the library ``eventsourcing`` wrote: its table as a source, read by SQL.

The extension's package is not needed and never imported: its pins hold Django and the library back, and its recorder
cannot be followed. What is needed of the library is the mapper, to turn stored states into domain events.

One table holds the events of all applications, which share its ids: for one application gaps are normal. So evidence
(:mod:`scriba.sources.eventsourcing_gaps`) is taken about the whole table, and what belongs to other applications
moves the watermark without being handed out.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final, cast

from django.core.checks import Error
from django.db import connections

from scriba.connection import OwnConnection
from scriba.exceptions import ConfigurationError
from scriba.sources.eventsourcing import LogSubscription, checked_start
from scriba.sources.eventsourcing_applications import ApplicationLoader, alias_problem, require_library, topics_of
from scriba.sources.eventsourcing_decoding import MapperCodec, StoredState
from scriba.sources.eventsourcing_errors import is_transient
from scriba.sources.eventsourcing_gaps import CheckedLog
from scriba.sources.eventsourcing_logs import Look, parsed_id

if TYPE_CHECKING:
    from uuid import UUID

    from django.core.checks import CheckMessage

    from scriba.protocols import Identity, Shard
    from scriba.sources.eventsourcing_logs import Log
    from scriba.sources.horizon import Query

__all__ = ["DjangoEventSourcingSource"]

#: The mapper is built by an application without a store: the events are read here, by SQL.
IN_MEMORY: Final[Mapping[str, str]] = {"PERSISTENCE_MODULE": "eventsourcing.popo", "IS_SNAPSHOTTING_ENABLED": "no"}


class DjangoEventSourcingSource:
    """The events of one application in the table of the library's Django extension.

    `application_name`
        What the extension wrote into the column of that name: the application's `name`. May be left out when
        `application` is given.
    `application`
        The application class, or a path to it, whose mapper decodes: its transcodings, compressor and cipher. Without
        it the library's defaults are used, with compressor and cipher of the environment. No store is opened with it.
    `env`
        Overrides of the application's environment, stronger than ``os.environ``.
    `using`
        The database alias that holds the table. Must be PostgreSQL, and the primary server.
    `table`
        The name of the table, with its schema if it needs one.
    `topics`, `start_from`
        As for :class:`~scriba.sources.eventsourcing.EventSourcingSource`, and so is everything about ``meta`` and
        about dead letters of an encrypted store.

    The extension's writers send no notices: the table is polled. Gap checking is always on, because nothing here can
    tell whether every writer takes the extension's lock.
    """

    def __init__(  # noqa: PLR0913 - options of a source
        self,
        application_name: str | None = None,
        *,
        application: object = None,
        env: Mapping[str, str] | None = None,
        using: str = "default",
        table: str = "stored_events",
        topics: Collection[Any] | None = None,
        start_from: str | int = "origin",
    ) -> None:
        where = type(self).__name__
        if application_name is None and application is None:
            msg = f"{where}: name the application that wrote the events: application_name=… or application=…."
            raise ConfigurationError(msg)
        self._given_name = application_name
        self._loader = None if application is None else ApplicationLoader(application, env, where=where)
        self._env = env
        self._using = using
        self._table = table
        self._topics = topics_of(topics, where)
        self._start_from = checked_start(start_from, where)

    @property
    def application_name(self) -> str:
        """The name that the rows carry."""
        return self._given_name if self._given_name is not None else self._application_loader().name()

    def subscribe(self, identity: Identity, shards: Sequence[Shard]) -> LogSubscription:
        """Open connections of our own to the alias, and build the mapper."""
        del identity
        return self._open(shards[0], OwnTableLog)

    def subscribe_inline(self, identity: Identity, shards: Sequence[Shard]) -> LogSubscription:
        """Read on the calling thread's Django connection, without evidence: a test's own rows are visible and ordered."""
        del identity
        return self._open(shards[0], InlineTableLog)

    def identity(self) -> str:
        return f"eventsourcing_django:{self.application_name}"

    def checks(self) -> list[CheckMessage]:
        try:
            require_library()
        except ConfigurationError as error:
            return [Error(str(error), hint='pip install "scriba[eventsourcing]"', id="scriba.E201")]
        try:
            self._application_loader().find()
        except ConfigurationError as error:
            return [Error(str(error), hint="Give the application's class, or the path to it.", id="scriba.E202")]
        problem = alias_problem(self._using)
        return [Error(problem[0], hint=problem[1], id="scriba.E203")] if problem else []

    def transient(self, error: Exception) -> bool:
        """Say whether `error` may go away by itself: a lost or refused connection, a server that restarts."""
        return is_transient(error)

    def _open(self, shard: Shard, make_log: type[OwnTableLog | InlineTableLog]) -> LogSubscription:
        with ExitStack() as opened:
            application = self._application_loader().construct(forced=IN_MEMORY)
            opened.callback(application.close)
            log: Log = make_log(self._using, self._table, self.application_name, self._topics)
            opened.callback(log.close)
            codec = MapperCodec(application.mapper, self.application_name)
            subscription = LogSubscription(log, codec, shard, self._start_from, judge=self.transient)
            subscription.closing = opened.pop_all()
        return subscription

    def _application_loader(self) -> ApplicationLoader:
        if self._loader is not None:
            return self._loader
        require_library()
        from eventsourcing.application import Application  # noqa: PLC0415 - an extra, loaded when it is in use

        # A class of that name, so that settings with its prefix (BANK_CIPHER_KEY) are found.
        plain = type("Application", (Application,), {"name": self._given_name})
        return ApplicationLoader(plain, self._env, where=type(self).__name__)


class Rows:
    """The statements on the extension's table, for one application."""

    def __init__(self, using: str, table: str, application_name: str, topics: Sequence[str]) -> None:
        quote = connections[using].ops.quote_name
        self.table = ".".join(quote(part) for part in table.split("."))
        self._application_name = application_name
        self._topics = list(topics)

    def page(self, query: Query, after: int, limit: int, up_to: int | None) -> list[StoredState]:
        """Return the application's rows after `after`, in order."""
        conditions, parameters = ["application_name = %s", "id > %s"], [self._application_name, after]
        if up_to is not None:
            conditions.append("id <= %s")
            parameters.append(up_to)
        if self._topics:
            conditions.append("topic = ANY(%s)")
            parameters.append(self._topics)
        statement = f"{self._select} WHERE {' AND '.join(conditions)} ORDER BY id LIMIT %s"
        return [_stored(row) for row in query(statement, [*parameters, limit])]

    def at(self, query: Query, position: int) -> StoredState | None:
        """Return the application's row with this id; None for another application's."""
        rows = query(f"{self._select} WHERE application_name = %s AND id = %s", (self._application_name, position))
        return _stored(rows[0]) if rows else None

    def locate(self, query: Query, originator_id: str, version: int) -> int | None:
        key = parsed_id(originator_id)
        if isinstance(key, str):  # the extension's column holds UUIDs only
            return None
        condition = "application_name = %s AND originator_id = %s AND originator_version = %s"
        rows = query(f"SELECT id FROM {self.table} WHERE {condition}", (self._application_name, key, version))
        return rows[0][0] if rows else None

    @property
    def _select(self) -> str:
        return f"SELECT id, originator_id, originator_version, topic, state FROM {self.table}"


class OwnTableLog(CheckedLog):
    """Reads on connections of its own: one for the fetching thread, one that the other threads take turns with."""

    def __init__(self, using: str, table: str, application_name: str, topics: Sequence[str]) -> None:
        self._rows = Rows(using, table, application_name, topics)
        self._reading = OwnConnection(using)
        self._aside = OwnConnection(using)
        self._turn = threading.Lock()
        try:
            super().__init__(self._reading.rows, self._rows.table, "id", is_filtered=True)
        except BaseException:
            self.close()
            raise

    def _select(self, after: int, limit: int, up_to: int | None) -> Sequence[StoredState]:
        return self._rows.page(self._reading.rows, after, limit, up_to)

    def at(self, position: int) -> StoredState | None:
        with self._turn:
            return self._rows.at(self._aside.rows, position)

    def locate(self, originator_id: str, version: int) -> int | None:
        with self._turn:
            return self._rows.locate(self._aside.rows, originator_id, version)

    def original_id(self, text: str) -> UUID | str:
        return parsed_id(text)

    def close(self) -> None:
        self._reading.close()
        with self._turn:
            self._aside.close()


class InlineTableLog:
    """Reads on the calling thread's Django connection, inside whatever transaction is open there."""

    def __init__(self, using: str, table: str, application_name: str, topics: Sequence[str]) -> None:
        self._rows = Rows(using, table, application_name, topics)
        self._using = using

    def look(self, after: int, limit: int) -> Look:
        head = self.head()
        found = self._rows.page(self._query, after, limit, None)
        if len(found) == limit:
            return Look(found, found[-1].id, caught_up=False)
        return Look(found, max(after, -1 if head is None else head, found[-1].id if found else after), caught_up=True)

    def wait(self, timeout: float) -> None: ...

    def wake(self) -> None: ...

    def head(self) -> int | None:
        highest: int | None = self._query(f"SELECT max(id) FROM {self._rows.table}", ())[0][0]
        return highest

    def current(self) -> int | None:
        head = self.head()
        return -1 if head is None else head

    def check(self, read_up_to: int) -> None: ...

    def waiting_for(self) -> str:
        return ""

    def at(self, position: int) -> StoredState | None:
        return self._rows.at(self._query, position)

    def locate(self, originator_id: str, version: int) -> int | None:
        return self._rows.locate(self._query, originator_id, version)

    def original_id(self, text: str) -> UUID | str:
        return parsed_id(text)

    def close(self) -> None: ...

    def _query(self, statement: str, parameters: Sequence[object]) -> Sequence[Sequence[Any]]:
        with connections[self._using].cursor() as cursor:
            cursor.execute(statement, cast("Sequence[Any]", parameters))
            rows: Sequence[Sequence[Any]] = cursor.fetchall()
        return rows


def _stored(row: Sequence[Any]) -> StoredState:
    position, originator_id, version, topic, state = row
    return StoredState(position, originator_id, version, topic, bytes(state))
