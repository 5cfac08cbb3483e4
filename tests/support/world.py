"""A world to run projections in: events in a real table, read models in real tables, and the conservation check."""

from __future__ import annotations

import itertools
from collections import Counter as Multiset
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from django.db import connections, transaction

from scriba.engine.runner import Fleet, RunningProjection, start_in_background
from scriba.models import DeadLetter, Lane, Position, ProjectionState, Segment
from scriba.protocols import Identity
from scriba.registry import Projection
from scriba.results import Insert
from scriba.retry import RetryPolicy
from scriba.sources import TableSource
from scriba.targets import OrmTarget
from tests.support.waiting import wait_until
from tests.testapp.models import Applied, Event

__all__ = ["World", "note"]

_numbers = itertools.count(1)


def note(name: str) -> Callable[[Any, Any], Insert]:
    """Return the plainest handler that is not idempotent: one row per application."""

    def handler(data: Any, meta: Any) -> Insert:
        del data
        return Insert(Applied(projection=name, stream_id=meta.stream_id, position=meta.position))

    return handler


class World:
    """One projection's surroundings. Made afresh for each test by the fixture `world`."""

    def __init__(self, name: str | None = None, *, using: str = "default") -> None:
        self.name = name or f"w{next(_numbers)}"
        self.using = using

    # --- events -------------------------------------------------------------------------------------------

    def append(self, *streams: str, type: str = "Happened", **data: Any) -> list[int]:
        """Append one event per stream name in one transaction; return their positions."""
        rows = [Event(stream_id=stream, type=type, data={"n": n, **data}) for n, stream in enumerate(streams)]
        with transaction.atomic(using=self.using):
            Event.objects.using(self.using).bulk_create(rows)
        return [row.pk for row in rows]

    def append_many(self, count: int, streams: int = 20) -> list[int]:
        return self.append(*(f"s{n % streams}" for n in range(count)))

    # --- projections --------------------------------------------------------------------------------------

    def projection(self, handler: Callable[..., Any] | None = None, **options: Any) -> Projection:
        """Build a projection over the event table without registering it."""
        defaults: dict[str, Any] = {
            "source": TableSource(Event, using=self.using),
            "target": OrmTarget(using=self.using),
            "parallelism": 3,
            "retry": RetryPolicy(attempts=1, backoff=()),
            "lag_interval": 0.0,
            "batch_size": 100,
            "version": 1,
        }
        return Projection(name=self.name, handler=handler or note(self.name), **{**defaults, **options})

    def run(self, projection: Projection, timeout: float = 60) -> int:
        """Run until caught up, in this process; return the exit code."""
        fleet = Fleet([projection], until_caught_up=True)
        fleet.start()
        wait_until(lambda: fleet.has_ended, timeout=timeout, what=f"{projection.identity} to catch up")
        return fleet.exit_code

    @contextmanager
    def running(self, projection: Projection) -> Iterator[RunningProjection]:
        """Run in the background; drained at the end (a halt is the test's own business)."""
        handle = start_in_background(projection)
        try:
            yield handle
        finally:
            handle._fleet.stop()
            wait_until(lambda: handle._coordinator.ended.is_set(), what="the projection to end")

    # --- what is there ------------------------------------------------------------------------------------

    def applied(self, stream: str | None = None) -> list[int]:
        """Positions in the order in which they were applied (one list; of one stream if named)."""
        rows = Applied.objects.using(self.using).filter(projection=self.name)
        rows = rows.filter(stream_id=stream) if stream is not None else rows
        return list(rows.order_by("pk").values_list("position", flat=True))

    def letters(self, **filters: Any) -> list[DeadLetter]:
        found = DeadLetter.objects.using(self.using).filter(projection_name=self.name, **filters)
        return list(found.order_by("position"))

    def cursors(self) -> dict[str, int]:
        found = Position.objects.using(self.using).filter(projection_name=self.name)
        return dict(found.values_list("stream_id", "position"))

    @property
    def segment(self) -> Segment:
        """The projection's segment, as soon as a first start has made it."""
        rows = Segment.objects.using(self.using).filter(projection_name=self.name, projection_version=1)
        wait_until(rows.exists, what=f"the segment of {self.name}")
        return Segment.objects.using(self.using).get(projection_name=self.name, projection_version=1)

    @property
    def state(self) -> ProjectionState:
        return ProjectionState.objects.using(self.using).get(projection_name=self.name, projection_version=1)

    def counters(self) -> dict[str, int]:
        names = ("applied", "skipped", "dead_lettered", "deduplicated", "unmatched")
        rows = Lane.objects.using(self.using).filter(segment__projection_name=self.name).values(*names)
        return {name: sum(row[name] for row in rows) for name in names}

    # --- what must hold -----------------------------------------------------------------------------------

    def check(self, positions: Sequence[int], *, dead: Sequence[int] = (), skipped: Sequence[int] = ()) -> None:
        """Every event settled exactly one way, each stream in order, and the counters say the same.

        `positions` are all events of the source; `dead` and `skipped` those that must not be applied.
        """
        expected = set(positions) - set(dead) - set(skipped)
        applied = self.applied()
        doubled = {position for position, count in Multiset(applied).items() if count > 1}
        assert not doubled, f"applied more than once: {sorted(doubled)}"
        assert set(applied) == expected, (
            f"missing {sorted(expected - set(applied))}, extra {sorted(set(applied) - expected)}"
        )
        rows = Applied.objects.using(self.using).filter(projection=self.name).order_by("pk")
        by_stream: dict[str, list[int]] = {}
        for stream, position in rows.values_list("stream_id", "position"):
            by_stream.setdefault(stream, []).append(position)
        assert all(order == sorted(order) for order in by_stream.values()), "a stream was applied out of order"
        self.check_conservation(len(set(positions)))

    def check_conservation(self, distinct: int) -> None:
        """delivered == applied + skipped + dead-lettered, redeliveries counted as deduplicated skips."""
        counters = self.counters()
        settled = counters["applied"] + counters["skipped"] - counters["deduplicated"] + counters["dead_lettered"]
        assert settled == distinct, f"{distinct} events, but {counters}"

    def wait_applied(self, count: int, timeout: float = 30) -> None:
        wait_until(lambda: len(self.applied()) >= count, timeout=timeout, what=f"{count} applied events")

    def execute(self, sql: str, *params: Any) -> None:
        with connections[self.using].cursor() as cursor:
            cursor.execute(sql, params)

    @property
    def identity(self) -> Identity:
        return Identity(self.name, 1)
