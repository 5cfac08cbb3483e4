"""A writer at work: one projection's rows, the read models of the test app, and what is durable afterwards."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psycopg
from django.db import connections

from scriba.connection import OwnConnection
from scriba.engine.letters import letter_for
from scriba.event import Event
from scriba.models import Lane, Segment
from scriba.protocols import Counters, CursorMove, Identity, Letter, Settlement
from scriba.results import Fail, Insert
from scriba.targets import OrmTarget
from scriba.targets.orm import OrmBatch, OrmWriter
from tests.support.leftovers import forget
from tests.support.processes import database_url
from tests.testapp.models import Applied, Child, Counter, Parent, Row

__all__ = ["Desk", "own_connection", "row"]

_READ_MODELS = (Child, Parent, Row, Counter, Applied)


class Desk:
    """Everything it opened is closed, everything that was written is deleted."""

    def __init__(self, name: str, using: str = "default") -> None:
        self.identity = Identity(name, 1)
        self.using = using
        self.target = OrmTarget(using)
        self.rows = OwnConnection(using)
        self.segment = Segment.objects.using(using).create(projection_name=name, projection_version=1, epoch=7).pk
        self.fence = [(self.segment, 7)]
        self.writer = self.target.open(self.identity)
        self._positions = itertools.count(1)

    def open(self) -> OrmWriter:
        return self.target.open(self.identity)

    @contextmanager
    def batch(self, *, verdict: bool = False) -> Iterator[OrmBatch]:
        with self.writer.batch(self.fence, verdict=verdict) as batch:
            yield batch

    def settle(
        self, batch: OrmBatch, *moves: CursorMove, letters: Sequence[Letter] = (), lane: int = 0, **counters: int
    ) -> int:
        return batch.settle(Settlement(moves, letters, Counters(**counters), self.segment, lane))

    def event(self, position: int | None = None, **fields: Any) -> Event:
        position = next(self._positions) if position is None else position
        defaults = {"stream_id": "s", "type": "Happened", "id": f"id-{position}", "raw": {"n": position}}
        return Event(position, **{**defaults, **fields})

    def letter(self, event: Event, error: Any = None, key: str = "s", attempts: int = 1, **options: Any) -> Letter:
        return letter_for(event, key, error or Fail("no"), attempts, self.identity, **options)

    # --- what is durable ----------------------------------------------------------------------------------

    def cursors(self) -> dict[str, int]:
        sql = "SELECT stream_id, position FROM scriba_positions WHERE projection_name = %s"
        return dict(self.rows.rows(sql, [self.identity.name]))

    def applied_positions(self) -> dict[str, int | None]:
        sql = "SELECT stream_id, applied_position FROM scriba_positions WHERE projection_name = %s"
        return dict(self.rows.rows(sql, [self.identity.name]))

    def seed(self, **cursors: int) -> None:
        for key, position in cursors.items():
            self.rows.rows(
                "INSERT INTO scriba_positions (projection_name, projection_version, stream_id, position) "
                "VALUES (%s, %s, %s, %s)",
                [*self.identity, key, position],
            )

    def letters(self, columns: str = "position, error_kind, status") -> list[Any]:
        sql = f"SELECT {columns} FROM scriba_dead_letters WHERE projection_name = %s ORDER BY partition, position"
        return self.rows.rows(sql, [self.identity.name])

    def counters(self, lane: int = 0) -> dict[str, int]:
        names = ("applied", "skipped", "dead_lettered", "deduplicated", "unmatched")
        return Lane.objects.using(self.using).filter(segment_id=self.segment, lane=lane).values(*names).get()

    def ids(self, model: Any = Row) -> list[str]:
        """The keys that are committed, whatever this thread's connection sees."""
        return [
            key for (key,) in self.rows.rows(f"SELECT {model._meta.pk.column} FROM {model._meta.db_table} ORDER BY 1")
        ]

    def execute(self, sql: str, *params: Any) -> list[Any]:
        return self.rows.rows(sql, params)

    def driver(self) -> psycopg.Connection:
        """Another client's connection, with a transaction of its own."""
        return psycopg.connect(database_url(self.using))

    def close(self) -> None:
        self.writer.close()
        self.execute("SET lock_timeout = '5s'")  # a transaction that a failing test has left open
        for model in _READ_MODELS:
            self.execute(f"DELETE FROM {model._meta.db_table}")
        forget(self.identity.name, self.rows.rows)
        self.rows.close()


@contextmanager
def own_connection(alias: str) -> Iterator[Any]:
    """Let this thread work on a copy of its connection, which is in nobody's transaction."""
    kept = connections[alias]
    own = connections[alias] = kept.copy()
    try:
        yield own
    finally:
        own.close()
        connections[alias] = kept


def row(key: str, **values: Any) -> Insert:
    return Insert(Row(id=key, **values))
