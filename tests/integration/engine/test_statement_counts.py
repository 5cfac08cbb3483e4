"""What a batch costs, counted and not timed: the same on every machine.

A statement is one call of the driver's ``execute``; a round trip is one wait of the driver for an answer (BEGIN and
COMMIT have their own). What a connection asks once, when it first meets a table, is asked before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
from django.db import connection

from scriba import Insert, Skip, Update
from scriba.engine.circuit import Circuit
from scriba.engine.pipeline import LaneRun
from scriba.engine.reader import keyed
from scriba.models import Segment
from scriba.protocols import Shard
from scriba.targets.shapes import shape_of
from tests.support.world import World
from tests.testapp.models import Counter, Row

EVENTS, STREAMS = 500, 100


class Count:
    """What went over the wire while :func:`counted` was open."""

    def __init__(self) -> None:
        self.statements: list[str] = []
        self.round_trips = 0


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Count]:
    count = Count()
    execute, wait = psycopg.Cursor.execute, psycopg.Connection.wait

    def counting_execute(self: Any, query: Any, *args: Any, **options: Any) -> Any:
        count.statements.append(str(query).strip()[:60])
        return execute(self, query, *args, **options)

    def counting_wait(self: Any, *args: Any, **options: Any) -> Any:
        count.round_trips += 1
        return wait(self, *args, **options)

    with monkeypatch.context() as patched:
        patched.setattr(psycopg.Cursor, "execute", counting_execute)
        patched.setattr(psycopg.Connection, "wait", counting_wait)
        yield count


def handler(data: Any, meta: Any) -> Any:
    """Writes two models; half of the streams have their rows already."""
    turn, name = divmod(data["n"], STREAMS)[0], meta.stream_id
    if turn == 0 and int(name[1:]) % 2:
        return [Insert(Row(id=name, name="new")), Insert(Counter(key=name, value=1))]
    if turn == 4:
        return Skip()
    return [Update(Row, {"id": name}, status=f"turn {turn}"), Update(Counter, {"key": name}, value=turn)]


def fetched(world: World, projection: Any) -> list[Any]:
    subscription = projection.source.subscribe(projection.identity, [Shard(resume=world.first - 1)])
    found: list[Any] = []
    try:
        while len(found) < world.count:
            found += subscription.fetch(1000, 1.0).events
    finally:
        subscription.close()
    return found


@pytest.fixture
def written(world: World) -> World:
    Row.objects.bulk_create(Row(id=f"s{n}", name="old") for n in range(0, STREAMS, 2))
    Counter.objects.bulk_create(Counter(key=f"s{n}", value=0) for n in range(0, STREAMS, 2))
    positions = world.append_many(EVENTS, STREAMS)
    world.first, world.count = positions[0], EVENTS
    return world


def lane_of(world: World, projection: Any) -> tuple[LaneRun, Any]:
    segment = Segment.objects.create(projection_name=world.name, projection_version=1)
    lease: Any = SimpleNamespace(segment=segment.pk, fence=((segment.pk, segment.epoch),))
    writer = projection.target.open(projection.identity)
    return LaneRun(projection, writer, lease, 0, Circuit(), ceiling=-1), writer


def test_a_batch_costs_a_handful_of_statements(written: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """500 events of 100 streams into two models: a fence; an insert and an update for each; cursors; a commit. The very
    first batch of a lane makes its counters and its cursors, too.
    """
    projection = written.projection(handler, batch_size=EVENTS)
    items = [keyed(projection, event) for event in fetched(written, projection)]
    run, _writer = lane_of(written, projection)
    for model in (Row, Counter):
        shape_of(connection, model)

    with counted(monkeypatch) as count:
        step = run.step(items)

    assert step.settled == EVENTS
    assert len(count.statements) <= 8, count.statements
    assert count.round_trips <= 11
    assert Row.objects.filter(status="turn 3").count() == STREAMS
    assert Counter.objects.filter(value=3).count() == STREAMS
    assert len(written.cursors()) == STREAMS


def test_a_batch_of_twice_the_size_costs_no_more_statements(written: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a batch costs does not depend on how many events, keys or rows are in it."""
    projection = written.projection(handler, batch_size=EVENTS)
    items = [keyed(projection, event) for event in fetched(written, projection)]
    run, _writer = lane_of(written, projection)
    small, rest = items[: 2 * STREAMS], items[2 * STREAMS :]
    for model in (Row, Counter):
        shape_of(connection, model)

    with counted(monkeypatch) as first:
        assert run.step(small).settled == len(small)
    with counted(monkeypatch) as second:
        assert run.step(rest).settled == len(rest)

    assert len(first.statements) <= 8
    assert len(second.statements) <= 6


def test_a_handler_that_reads_its_row_costs_one_statement_per_read(
    written: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row is read once, before anything waits to be written to it: no flush and no savepoint comes between."""
    for name in (f"s{n}" for n in range(1, STREAMS, 2)):
        Row.objects.create(id=name, name="old")

    def reading(data: Any, meta: Any) -> Any:
        if data["n"] >= STREAMS:
            return Skip()
        return Update(Row, {"id": meta.stream_id}, status=f"was {Row.objects.get(pk=meta.stream_id).name}")

    projection = written.projection(reading, batch_size=EVENTS)
    items = [keyed(projection, event) for event in fetched(written, projection)]
    run, _writer = lane_of(written, projection)
    shape_of(connection, Row)

    with counted(monkeypatch) as count:
        step = run.step(items)

    assert step.settled == EVENTS
    assert len(count.statements) <= STREAMS + 5, count.statements[-8:]
    assert Row.objects.filter(status="was old").count() == STREAMS


def test_reading_costs_one_statement_per_page(written: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening a table takes some questions; after that a page of events is one statement, and pages grow."""
    projection = written.projection(handler)
    subscription = projection.source.subscribe(projection.identity, [Shard(resume=written.first - 1)])
    try:
        seen = len(subscription.fetch(1000, 1.0).events)
        with counted(monkeypatch) as count:
            while seen < EVENTS:
                seen += len(subscription.fetch(1000, 1.0).events)
    finally:
        subscription.close()

    assert seen == EVENTS
    assert len(count.statements) <= 4, count.statements
