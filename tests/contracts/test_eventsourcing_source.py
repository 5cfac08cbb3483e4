"""EventSourcingSource and DjangoEventSourcingSource keep the contract of every source, on real stores."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any
from uuid import NAMESPACE_URL, UUID, uuid5

import psycopg
import pytest

pytest.importorskip("eventsourcing", reason='pip install "scriba[eventsourcing]"')
if version("eventsourcing").startswith("9.4"):
    pytest.skip("originator ids that are no UUIDs need eventsourcing 9.5", allow_module_level=True)

from eventsourcing.application import Application
from eventsourcing.persistence import StoredEvent
from eventsourcing.utils import register_topic

from scriba.sources.eventsourcing import EventSourcingSource
from scriba.sources.eventsourcing_tables import DjangoEventSourcingSource
from scriba.testing.sources import SourceContract
from tests.integration.eventsourcing.conftest import (  # noqa: F401 - fixtures
    Store,
    UmaServer,
    postgres_store,
    sqlite_store,
    umadb_server,
    umadb_store,
)
from tests.integration.eventsourcing.test_django_tables import Table, table  # noqa: F401 - a fixture
from tests.support.processes import database_url


@dataclass(frozen=True)
class Counted:
    """An event whose stream is named by a text, as the contract names its streams."""

    originator_id: str
    originator_version: int
    padding: str


@dataclass(frozen=True)
class CountedByUUID(Counted):
    originator_id: UUID  # type: ignore[assignment]


register_topic("contract:counted", Counted)
register_topic("contract:counted-by-uuid", CountedByUUID)


class Counting(Application):
    pass


class EventSourcingContract(SourceContract):
    """Appends through the application's own mapper and recorder."""

    store: Store
    writer: Any

    def open(self, store: Store) -> Iterator[None]:
        self.store = Store(store.name, {**store.env, "ORIGINATOR_ID_TYPE": "text"}, store.options)
        self.writer = self.store.open(Counting)
        self.versions: dict[str, int] = {}
        yield
        self.writer.close()

    def make_source(self, **options: Any) -> Any:
        return self.store.source(Counting, **options)

    def append(
        self, count: int = 1, *, type: str = "counted", stream_id: str = "stream-1", padding: int = 0
    ) -> list[int]:
        return [self.record(self.event(type, stream_id, padding)) for _ in range(count)]

    def event(self, kind: str, stream_id: str, padding: int) -> StoredEvent:
        self.versions[stream_id] = number = self.versions.get(stream_id, 0) + 1
        state = self.writer.mapper.to_stored_event(Counted(stream_id, number, "x" * padding)).state
        return StoredEvent(stream_id, number, f"contract:{kind}", state)

    def record(self, event: StoredEvent) -> int:
        (position,) = self.writer.recorder.insert_events([event])
        return position

    def first_version(self) -> int:
        return 1


class TestOnPostgres(EventSourcingContract):
    """The library's PostgreSQL recorder: evidence about gaps, notices."""

    @pytest.fixture(autouse=True)
    def an_empty_store(self, postgres_store: Store) -> Iterator[None]:  # noqa: F811 - a fixture
        yield from self.open(postgres_store)

    def break_connection(self, subscription: Any) -> None:
        with subscription._log._recorder.datastore.get_connection() as connection:
            pooled = connection.info.backend_pid
        cut = (
            "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity"
            " WHERE pid = %s OR (application_name LIKE 'scriba contract%%' AND datname = current_database())"
        )
        with psycopg.connect(database_url(), autocommit=True) as connection:
            connection.execute(cut, (pooled,))


class TestOnSQLite(EventSourcingContract):
    @pytest.fixture(autouse=True)
    def an_empty_store(self, sqlite_store: Store) -> Iterator[None]:  # noqa: F811 - a fixture
        yield from self.open(sqlite_store)

    def break_connection(self, subscription: Any) -> None:
        """There is nothing between a process and its file that could be cut."""


class TestOnUmaDB(EventSourcingContract):
    """A third-party store, known by nothing but the library's interface."""

    @pytest.fixture(autouse=True)
    def an_empty_store(self, umadb_server: UmaServer, umadb_store: Store) -> Iterator[None]:  # noqa: F811 - fixtures
        self.server = umadb_server
        yield from self.open(umadb_store)

    def break_connection(self, subscription: Any) -> None:
        self.server.stop()
        with pytest.raises(Exception) as caught:
            subscription.fetch(1, 0.0)
        assert subscription.transient(caught.value)
        self.server.start()


class TestOnDjangoTable(EventSourcingContract):
    """The Django extension's table, shared with another application; its streams are named by UUIDs only."""

    @pytest.fixture(autouse=True)
    def an_empty_store(self, table: Table) -> None:  # noqa: F811 - a fixture
        self.table = table
        self.writer = Counting()
        self.versions = {}

    def make_source(self, **options: Any) -> DjangoEventSourcingSource:
        return self.table.source(application=Counting, **options)

    def record(self, event: StoredEvent) -> int:
        other = StoredEvent(uuid5(NAMESPACE_URL, f"{event}"), 1, event.topic, b"of another application")
        self.table.write("Other", [other])
        stream = uuid5(NAMESPACE_URL, str(event.originator_id))
        ours = StoredEvent(stream, event.originator_version, f"{event.topic}-by-uuid", event.state)
        (position,) = self.table.write("Counting", [ours])
        return position

    def break_connection(self, subscription: Any) -> None:
        pids = [
            log.rows("SELECT pg_backend_pid()")[0][0] for log in (subscription._log._reading, subscription._log._aside)
        ]
        with psycopg.connect(database_url(), autocommit=True) as connection:
            connection.execute("SELECT pg_terminate_backend(pid, 5000) FROM unnest(%s::int[]) AS pid", (pids,))

    def test_an_event_is_located_by_stream_and_version(self) -> None:
        """As for every source, by the UUIDs that this table holds."""
        self.append(1, stream_id="stream-2")
        appended = self.append(2, stream_id="stream-1")
        subscription = self._subscribe()
        stream = str(uuid5(NAMESPACE_URL, "stream-1"))
        assert subscription.locate(stream_id=stream, stream_version=2) == ("", appended[1])
        assert subscription.locate(stream_id=stream, stream_version=3) is None
        subscription.close()


def test_an_event_sourcing_source_is_a_source() -> None:
    """Both forms have what the protocol asks for."""
    for kind in (EventSourcingSource, DjangoEventSourcingSource):
        assert all(callable(getattr(kind, name)) for name in ("subscribe", "identity", "checks", "transient"))
