"""Writers of a notification log that do what the library may do, one step at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from uuid import UUID, uuid4

import psycopg
from eventsourcing.persistence import StoredEvent

from tests.integration.eventsourcing.conftest import Store
from tests.support.processes import database_url

__all__ = ["append", "crowd", "raw_transaction", "stored"]


def stored(
    topic: str = "nowhere:Happened", state: bytes = b"{}", originator_id: UUID | None = None, version: int = 1
) -> StoredEvent:
    return StoredEvent(originator_id or uuid4(), version, topic, state)


@contextmanager
def raw_transaction(application_name: str = "a slow writer") -> Iterator[psycopg.Connection[Any]]:
    """A writer without the library's table lock: what ``POSTGRES_ENABLE_DB_FUNCTIONS`` makes of every writer."""
    with psycopg.connect(database_url(), application_name=application_name) as connection:
        yield connection
        connection.rollback()


def append(connection: psycopg.Connection[Any], store: Store, table: str, event: StoredEvent | None = None) -> int:
    """Insert one event in the open transaction of `connection`; return its id."""
    event = event or stored()
    found = connection.execute(
        f"INSERT INTO {store.env['POSTGRES_SCHEMA']}.{table} (originator_id, originator_version, topic, state)"
        " VALUES (%s, %s, %s, %s) RETURNING notification_id",
        (event.originator_id, event.originator_version, event.topic, event.state),
    ).fetchone()
    assert found is not None
    return int(found[0])


def crowd(write: Callable[[int], None], writers: int = 4) -> list[threading.Thread]:
    """Start `writers` threads that call `write` with their number, all at the same moment."""
    gate = threading.Barrier(writers)

    def run(number: int) -> None:
        gate.wait()
        write(number)

    threads = [threading.Thread(target=run, args=(number,), name=f"writer {number}") for number in range(writers)]
    for thread in threads:
        thread.start()
    return threads
