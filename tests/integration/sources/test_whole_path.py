"""A projection over an event table, from the append to the row: in a process, and in a test's own transaction."""

from __future__ import annotations

import dataclasses

import psycopg
import pytest
from django.db import transaction

from scriba import Insert, Skip, info, projection, start_projection, wait_for
from scriba.registry import forget
from scriba.sources import TableSource
from scriba.testing import drain
from tests.support.processes import database_url
from tests.support.waiting import wait_until
from tests.testapp.models import Applied, Event


@dataclasses.dataclass(frozen=True)
class Counted:
    number: int


@pytest.fixture
def counting(scratch_name):
    source = TableSource("testapp.Event", types={"counted": Counted}, unknown_type="skip")

    @projection(scratch_name, source=source, parallelism=2)
    def handler(event, meta):
        if event.number < 0:
            return Skip()
        return Insert(Applied(projection=scratch_name, stream_id=meta.stream_id, position=meta.position))

    yield handler
    forget(handler)


def counted(number: int, stream: str = "s") -> int:
    return Event.objects.create(stream_id=stream, type="counted", data={"number": number}).pk


def applied(name: str) -> list[int]:
    return list(Applied.objects.filter(projection=name).order_by("position").values_list("position", flat=True))


@pytest.mark.case("A25")
@pytest.mark.django_db(transaction=True)
def test_a_wait_for_a_burnt_position_returns(counting, scratch_name):
    """A caller whose transaction was rolled back after all waits for a number that never comes, and is not kept waiting."""
    with start_projection(counting):
        first = counted(1)
        with transaction.atomic():
            burnt = counted(2)
            transaction.set_rollback(True)
        assert wait_for(counting, position=burnt, timeout=20) == burnt
        assert wait_for(counting, position=first, timeout=20) == first
        last = counted(3)
        assert wait_for(counting, event_id=str(last), timeout=20) == last
        wait_until(lambda: applied(scratch_name) == [first, last], what="both events")


@pytest.mark.django_db(transaction=True)
def test_a_projection_that_starts_at_current_waits_for_the_writers_it_meets(scratch_name):
    """Stopped before the start is known, it has remembered none; started again, it delivers what was in flight."""

    @projection(scratch_name, source=TableSource(Event, start_from="current"), parallelism=1)
    def handler(event, meta):
        return Insert(Applied(projection=scratch_name, stream_id=meta.stream_id, position=meta.position))

    insert = "INSERT INTO testapp_event (stream_id, type, data, metadata, occurred_at) VALUES ('s', 'counted', '{}', '{}', now()) RETURNING id"
    try:
        counted(1)
        with psycopg.connect(database_url()) as slow:
            late = slow.execute(insert).fetchone()[0]
            early = counted(2)
            with start_projection(handler):
                wait_until(lambda: "idle in transaction" in info(handler).reason, what="the wait for the writer")
            assert info(handler).watermark is None
            with start_projection(handler):
                wait_until(lambda: "idle in transaction" in info(handler).reason, what="the wait for the writer")
                slow.commit()
                assert wait_for(handler, position=early, timeout=20) == early
        assert applied(scratch_name) == [late, early]
    finally:
        forget(handler)


@pytest.mark.django_db
def test_drain_filters_as_a_running_projection_does(scratch_name):
    """`event_types` may name a class of the type map, whose events are stored under another name."""

    @projection(
        scratch_name, source=TableSource(Event, types={"counted": Counted}), parallelism=1, event_types=[Counted]
    )
    def handler(event, meta):
        return Insert(Applied(projection=scratch_name, stream_id=meta.stream_id, position=meta.position))

    wanted = counted(1)
    Event.objects.create(stream_id="s", type="Counted", data={"number": 1, "named": "as the class"})
    Event.objects.create(stream_id="s", type="other", data={})
    try:
        assert drain(handler).applied == 2
    finally:
        forget(handler)
    assert applied(scratch_name)[0] == wanted


@pytest.mark.django_db
def test_drain_reads_inside_the_tests_transaction(counting, scratch_name):
    """A TestCase's uncommitted events are projected on its own connection; a second drain finds only what is new."""
    first = counted(1)
    counted(-1)
    Event.objects.create(stream_id="s", type="unknown", data={})
    assert drain(counting).delivered == 3
    second = counted(2, "t")
    drained = drain(counting)
    assert (drained.applied, drained.dead_lettered) == (1, 0)
    assert applied(scratch_name) == [first, second]
