"""wait_for: a reader that wants to see its own write."""

from __future__ import annotations

import logging
import time
from typing import Any

import pytest
from django.db import connection, transaction

import scriba
from scriba import SERIAL
from scriba.event import Event as ScribaEvent
from scriba.exceptions import ConfigurationError, EventDeadLettered, ProjectionHalted, WaitTimeout
from scriba.models import DeadLetter, Position
from scriba.protocols import Status
from scriba.registry import Projection
from scriba.testing import MemorySource
from tests.integration.control.conftest import Owner
from tests.support.waiting import in_thread, wait_until
from tests.support.world import World
from tests.testapp.models import Event


def settle(world: World, key: str, position: int) -> None:
    Position.objects.create(projection_name=world.name, projection_version=1, stream_id=key, position=position)


def remembering(world: World, *events: ScribaEvent, **options: Any) -> Projection:
    """A projection over a source of a few events in memory."""
    return world.projection(source=MemorySource(events), **options)


ORDER_PLACED = ScribaEvent(7, "order-1", "Placed", "id-7", stream_version=3)


# --- satisfied --------------------------------------------------------------------------------------------------


def test_the_watermark_satisfies_every_position_below_it(world: World, owner: Owner) -> None:
    """Skipped, filtered and burnt positions have no cursor of their own."""
    owner.shows(Status.RUNNING, 40)

    assert scriba.wait_for(world.projection(), position=40, timeout=0) == 40
    assert scriba.wait_for(world.projection(), position=12, timeout=0) == 12
    with pytest.raises(WaitTimeout):
        scriba.wait_for(world.projection(), position=41, timeout=0)


def test_an_imported_cursor_satisfies_too(world: World, owner: Owner) -> None:
    """What was settled elsewhere is settled."""
    world.execute("UPDATE scriba_projections SET floor = 40")

    assert scriba.wait_for(world.projection(), position=40, timeout=0) == 40


@pytest.mark.parametrize(
    "event", [{"position": 7}, {"event_id": "id-7"}, {"stream_id": "order-1", "stream_version": 3}]
)
def test_the_cursor_of_the_events_key_satisfies_before_the_watermark(
    world: World, owner: Owner, event: dict[str, Any]
) -> None:
    """It commits with the read model; the watermark waits for every other stream."""
    owner.shows(Status.RUNNING, 2)
    projection = remembering(world, ORDER_PLACED)
    settle(world, "order-1", 6)
    with pytest.raises(WaitTimeout):
        scriba.wait_for(projection, **event, timeout=0.02)

    Position.objects.filter(stream_id="order-1").update(position=7)

    assert scriba.wait_for(projection, **event, timeout=5) == 7


def test_a_stream_named_beside_the_position_saves_the_look_into_the_source(world: World, owner: Owner) -> None:
    """Whoever appended the event knows its stream."""
    projection = remembering(world)  # a source that knows of nothing
    settle(world, "order-1", 7)

    assert scriba.wait_for(projection, position=7, stream_id="order-1", timeout=0) == 7


@pytest.mark.parametrize(
    ("partition_by", "key"), [(SERIAL, ""), (lambda event: f"customer of {event.stream_id}", "customer of order-1")]
)
def test_the_key_is_that_of_partition_by(world: World, owner: Owner, partition_by: Any, key: str) -> None:
    """Cursors are kept by the ordering key, so that one is looked at."""
    projection = remembering(world, ORDER_PLACED, partition_by=partition_by)
    settle(world, "order-1", 7)  # another key that happens to be called like the stream
    with pytest.raises(WaitTimeout):
        scriba.wait_for(projection, position=7, stream_id="order-1", timeout=0.02)

    settle(world, key, 7)

    assert scriba.wait_for(projection, event_id="id-7", timeout=5) == 7


def test_a_key_that_is_stored_in_another_form_is_found(world: World) -> None:
    """A key that no index row can hold is stored by its digest; waiting must ask for that."""
    stream = "s" * 5_000
    (position,) = world.append(stream)
    projection = world.projection()
    world.run(projection)
    world.execute("UPDATE scriba_segments SET watermark = 0")

    assert scriba.wait_for(projection, position=position, stream_id=stream, timeout=0) == position


# --- end to end -------------------------------------------------------------------------------------------------


def test_a_reader_sees_its_own_write(world: World) -> None:
    """Append, commit, wait, read: twenty times, while the projection runs."""
    projection = world.projection()
    with world.running(projection):
        for _ in range(20):
            (position,) = world.append("a")
            scriba.wait_for(projection, position=position)
            assert world.applied()[-1] == position


@pytest.mark.case("A25")
def test_waiting_for_a_burnt_position_returns(world: World) -> None:
    """An id that was drawn and rolled back will never be an event; the watermark passes it."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT nextval(pg_get_serial_sequence(%s, 'id'))", [Event._meta.db_table])
        (burnt,) = cursor.fetchone()
    (last,) = world.append("a")
    projection = world.projection()
    with world.running(projection):
        assert scriba.wait_for(projection, position=burnt) == burnt
        assert scriba.wait_for(projection, position=last) == last


def test_waiting_for_an_event_that_the_source_filters_out_returns(world: World) -> None:
    """Its key has no cursor; the watermark moves over it, sooner because somebody waits."""
    (unwanted,) = world.append("a", type="Unwanted")
    projection = world.projection(event_types=frozenset({"Wanted"}))
    with world.running(projection):
        assert scriba.wait_for(projection, position=unwanted) == unwanted
    assert world.applied() == []


def test_an_event_that_is_appended_while_somebody_waits_is_found(world: World) -> None:
    """By its id, the source is asked again and again."""
    source = MemorySource()
    projection = world.projection(source=source)
    with world.running(projection), in_thread(lambda: scriba.wait_for(projection, event_id="id-7")) as answer:
        wait_until(lambda: scriba.info(projection).status == Status.RUNNING, what="it to run")
        source.append(ORDER_PLACED)
    assert answer == [7]


# --- the owner is told --------------------------------------------------------------------------------------------


def test_the_owner_learns_that_somebody_waits(world: World, owner: Owner) -> None:
    """Its watermark trails less for as long as that lasts, and no longer."""
    assert not owner.ledger.orders().waited_for

    with pytest.raises(WaitTimeout):
        scriba.wait_for(world.projection(), position=1, timeout=0.02)

    assert owner.ledger.orders().waited_for
    world.execute("UPDATE scriba_projections SET waited_at = waited_at - interval '1 minute'")
    assert not owner.ledger.orders().waited_for


def test_many_that_wait_write_at_most_once_a_second(world: World, owner: Owner) -> None:
    """A thousand web requests must not fight over one row."""

    def wait() -> Any:
        with pytest.raises(WaitTimeout):
            scriba.wait_for(world.projection(), position=1, timeout=0.02)
        return world.state.waited_at

    assert wait() == wait()


def test_waiting_inside_a_transaction_does_not_lock_the_row(world: World, owner: Owner) -> None:
    """The owner writes a halt into it; a slow request must not hold that up."""
    with transaction.atomic():
        with pytest.raises(WaitTimeout):
            scriba.wait_for(world.projection(), position=1, timeout=0.02)
        owner.ledger._connection.rows("SELECT 1 FROM scriba_projections FOR UPDATE NOWAIT")
    assert world.state.waited_at is None


# --- not satisfied ------------------------------------------------------------------------------------------------


def test_the_time_runs_out_with_what_is_known(world: World, owner: Owner) -> None:
    """Which position, how far it is, what it is doing, and why: enough to act on."""
    owner.shows(Status.PAUSED, 3, reason="paused on request")

    started = time.monotonic()
    with pytest.raises(WaitTimeout, match="paused on request") as late:
        scriba.wait_for(world.projection(), position=9, timeout=0.1)

    assert 0.1 <= time.monotonic() - started < 3
    assert (late.value.position, late.value.reached) == (9, 3)


def test_an_event_that_the_source_does_not_know_is_said_to_be_unknown(world: World, owner: Owner) -> None:
    """The commonest mistake is waiting inside the transaction that appends the event."""
    with pytest.raises(WaitTimeout, match=r"'id-8'.*committed\?") as unknown:
        scriba.wait_for(remembering(world, ORDER_PLACED), event_id="id-8", timeout=0.02)
    assert unknown.value.position is None


@pytest.mark.parametrize("status", ["open", "parked", "discarded"])
def test_an_event_that_was_given_up_on_is_an_error(world: World, owner: Owner, status: str) -> None:
    """The cursor has passed it, but the read model will not show it."""
    owner.shows(Status.RUNNING, 40)
    letter = DeadLetter.objects.create(projection_name=world.name, projection_version=1, position=7, status=status)

    with pytest.raises(EventDeadLettered, match="position 7") as given_up:
        scriba.wait_for(world.projection(), position=7)

    assert given_up.value.letter_id == letter.pk
    letter.status = "replayed"
    letter.save()
    assert scriba.wait_for(world.projection(), position=7, timeout=0) == 7


def test_a_halt_ends_the_waiting_unless_the_event_was_settled_before(world: World, owner: Owner) -> None:
    """Nothing will come after a halt, but what is there is there."""
    owner.shows(Status.RUNNING, 40)
    owner.halts("no column 'total'")

    assert scriba.wait_for(world.projection(), position=40) == 40
    with pytest.raises(ProjectionHalted, match="no column 'total'"):
        scriba.wait_for(world.projection(), position=41)


def test_a_halt_that_comes_while_somebody_waits_ends_the_waiting(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """Without the halt the wait would last a minute."""
    caplog.set_level(logging.CRITICAL, logger="scriba")
    projection = world.projection(handler=lambda data, meta: 1 / 0, on_failure="halt")
    (position,) = world.append("a")
    with world.running(projection), pytest.raises(ProjectionHalted, match="ZeroDivisionError"):
        scriba.wait_for(projection, position=position, timeout=60)


@pytest.mark.parametrize(
    "named",
    [
        {},
        {"position": 1, "event_id": "a"},
        {"stream_id": "a"},
        {"stream_version": 1},
        {"event_id": "a", "stream_id": "a"},
        {"position": 1, "stream_id": "a", "stream_version": 1},
    ],
)
def test_an_event_is_named_in_exactly_one_way(world: World, named: dict[str, Any]) -> None:
    """What names no event, or two, is a mistake and not a wait."""
    with pytest.raises(ConfigurationError, match="one way"):
        scriba.wait_for(world.projection(), **named)
