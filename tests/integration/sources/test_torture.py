"""Eight writers who do everything that writers do, and a reader who must miss nothing and reorder nothing.

A few short seeds run by default; SCRIBA_TORTURE=20 runs so many, longer ones.
"""

from __future__ import annotations

import os
import random
import threading
import uuid
from collections import defaultdict
from collections.abc import Callable

import psycopg
import pytest

from scriba.protocols import Shard
from scriba.sources import TableSource
from tests.integration.sources.conftest import run
from tests.integration.sources.reading import IDENTITY, append
from tests.integration.sources.shapes import PlainEvent
from tests.support.processes import database_url

WRITERS = 8
SEEDS = int(os.environ.get("SCRIBA_TORTURE", "3"))
TRANSACTIONS = 300 if "SCRIBA_TORTURE" in os.environ else 30
LONGEST_S = 0.12
COLUMNS = "(event_id, stream_id, event_type, data)"


class Writer(threading.Thread):
    """Appends in every way, takes its time inside the transaction, and gives up now and then."""

    def __init__(self, number: int, seed: int) -> None:
        super().__init__(name=f"writer {number}")
        self.number = number
        self.random = random.Random(f"{seed}/{number}")
        self.version = 0
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            with psycopg.connect(database_url(), autocommit=True) as connection:
                for count in range(TRANSACTIONS):
                    self.transact(connection, f"{self.number}-{count}")
        except BaseException as error:
            self.failure = error

    def transact(self, connection: psycopg.Connection, gid: str) -> None:
        ways: list[Callable[[psycopg.Connection], None]] = [
            self.single, self.single, self.single, self.several, self.by_select, self.by_copy, self.drawn_first, self.with_savepoint,
        ]  # fmt: skip
        version = self.version
        connection.execute("BEGIN")
        self.random.choice(ways)(connection)
        connection.execute(
            "SELECT pg_sleep(%s)", (self.random.choice((0, 0, 0.001, LONGEST_S * self.random.random())),)
        )
        end = self.random.random()
        if end < 0.1:
            connection.execute("ROLLBACK")
            self.version = version
        elif end < 0.2:
            connection.execute(f"PREPARE TRANSACTION '{gid}'")
            connection.execute(f"COMMIT PREPARED '{gid}'")
        else:
            connection.execute("COMMIT")

    def single(self, connection: psycopg.Connection) -> None:
        self.version += 1
        append(connection, f"stream-{self.number}", version=self.version)

    def several(self, connection: psycopg.Connection) -> None:
        for _ in range(self.random.randint(2, 4)):
            self.single(connection)
            connection.execute("SELECT pg_sleep(%s)", (0.005 * self.random.random(),))

    def by_select(self, connection: psycopg.Connection) -> None:
        connection.execute(
            f"INSERT INTO shapes_plainevent {COLUMNS} SELECT gen_random_uuid(), 'bulk', 't', '{{}}' FROM generate_series(1, 20)"
        )

    def by_copy(self, connection: psycopg.Connection) -> None:
        with connection.cursor().copy(f"COPY shapes_plainevent {COLUMNS} FROM STDIN") as copy:
            for _ in range(10):
                copy.write_row((str(uuid.uuid4()), "copied", "t", "{}"))

    def drawn_first(self, connection: psycopg.Connection) -> None:
        drawn = connection.execute("SELECT nextval('shapes_plainevent_id_seq')").fetchone()[0]
        connection.execute("SELECT pg_sleep(%s)", (0.02 * self.random.random(),))
        connection.execute(
            "INSERT INTO shapes_plainevent (id, event_id, stream_id, event_type, data) VALUES (%s, gen_random_uuid(), 'd', 't', '{}')",
            (drawn,),
        )

    def with_savepoint(self, connection: psycopg.Connection) -> None:
        connection.execute("SAVEPOINT s")
        append(connection, "undone")
        connection.execute("ROLLBACK TO SAVEPOINT s")
        connection.execute("SELECT pg_sleep(%s)", (0.02 * self.random.random(),))
        self.single(connection)


class Tail(threading.Thread):
    """Reads until it is told that the writers are done and nothing is left; reconnects now and then."""

    def __init__(self, seed: int) -> None:
        super().__init__(name="tail")
        self.random = random.Random(seed)
        self.source = TableSource(PlainEvent)
        self.events: list[tuple[int, str, int | None]] = []
        self.done = threading.Event()
        self.failure: BaseException | None = None

    def run(self) -> None:
        resume: int | None = None
        try:
            while True:
                last = self.done.is_set()
                subscription = self.source.subscribe(IDENTITY, [Shard(resume=resume)])
                for _ in range(self.random.randint(1, 200)):
                    page = subscription.fetch(self.random.choice((1, 7, 1_000)), 0.005)
                    assert all((resume or -1) < event.position <= page.scanned for event in page.events)
                    self.events += [(event.position, event.stream_id, event.stream_version) for event in page.events]
                    resume = page.scanned
                subscription.close()
                if last and page.caught_up:
                    break
        except BaseException as error:
            self.failure = error


@pytest.mark.case("A25")
@pytest.mark.parametrize("seed", range(SEEDS))
def test_nothing_is_lost_doubled_or_reordered(plain, seed):
    """Single inserts, bulk, COPY, early draws, savepoints, two phases, rollbacks, slow commits: the log is read exactly."""
    tail, writers = Tail(seed), [Writer(number, seed) for number in range(WRITERS)]
    for thread in (tail, *writers):
        thread.start()
    for writer in writers:
        writer.join()
    tail.done.set()
    tail.join()
    assert [thread.failure for thread in (tail, *writers) if thread.failure] == []
    written = [row[0] for row in run("SELECT id FROM shapes_plainevent ORDER BY id")]
    assert [event[0] for event in tail.events] == written
    versions: dict[str, list[int]] = defaultdict(list)
    for _, stream, version in tail.events:
        if version is not None:
            versions[stream].append(version)
    assert versions == {stream: list(range(1, len(found) + 1)) for stream, found in versions.items()}
    assert len(versions) == WRITERS
