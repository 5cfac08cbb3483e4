"""reset: forget everything, in one transaction, against whoever may still be alive."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from django.db import IntegrityError, connections

import scriba
from scriba.control import Forgotten
from scriba.exceptions import ConfigurationError, InvalidState
from scriba.ledger import PgLedger
from scriba.models import DeadLetter, Lane
from scriba.protocols import Holder, Progress, Recorded, Status
from tests.integration.control.conftest import Owner
from tests.integration.ledger.support import Worker, is_waiting
from tests.support.waiting import in_thread, wait_until
from tests.support.world import World
from tests.testapp.models import Applied, Child, Counter, Parent, Row


@pytest.mark.case("D6")
def test_a_reset_projection_starts_again_from_the_beginning(world: World) -> None:
    """Cursors, watermark, ceiling and counters are gone: every event comes again, and into an emptied read model once."""
    positions = world.append_many(60, streams=6)
    projection = world.projection(models=(Applied,))
    world.run(projection)

    forgotten = scriba.reset(projection, truncate=True)

    assert forgotten == Forgotten(cursors=6, dead_letters=0, read_model_rows=60)
    assert (world.segment.watermark, world.segment.ceiling, world.cursors()) == (None, None, {})
    assert not any(world.counters().values())
    assert world.state.reset_count == 1
    world.run(projection)
    world.check(positions)
    assert world.counters()["applied"] == 60


@pytest.mark.case("D6")
def test_a_projection_that_never_ran_has_nothing_to_forget(world: World) -> None:
    """No error, only zeros."""
    assert scriba.reset(world.projection()) == Forgotten(0, 0, 0)


@pytest.mark.case("D6", "A24")
@pytest.mark.parametrize("status", ["initializing", "running", "paused", "draining"])
def test_a_reset_is_refused_while_a_live_process_may_work(world: World, owner: Owner, status: str) -> None:
    """Only a stopped or halted owner is at rest; a refused reset changes nothing."""
    owner.shows(Status(status), 50)
    before = world.segment.epoch

    with pytest.raises(InvalidState, match="stop it first") as refused:
        scriba.reset(world.projection())

    assert refused.value.state == status
    assert (world.segment.epoch, world.segment.watermark, world.state.reset_count) == (before, 50, 0)


@pytest.mark.case("D6")
@pytest.mark.parametrize("bring", [lambda owner: owner.shows(Status.STOPPED, 50), Owner.halts, Owner.falls_silent])
def test_a_reset_is_done_when_nobody_works(world: World, owner: Owner, bring: Callable[[Owner], None]) -> None:
    """A live owner that is stopped or halted stays, under an epoch that is not its own any more."""
    bring(owner)

    scriba.reset(world.projection())

    assert not owner.ledger.heartbeat(owner.lease, 1.0, Progress(Status.STOPPED))
    assert world.state.reset_count == 1


@pytest.mark.case("A24")
def test_what_a_zombie_writes_after_a_reset_is_refused(world: World, owner: Owner) -> None:
    """Its late watermark and ceiling would skip events that must come again."""
    owner.shows(Status.RUNNING, 50)
    owner.falls_silent()

    scriba.reset(world.projection())

    assert not owner.ledger.save_watermark(owner.lease, Progress(Status.RUNNING, watermark=60))
    assert not owner.ledger.raise_ceiling(owner.lease, 1_000)
    assert (world.segment.watermark, world.segment.ceiling) == (None, None)


@pytest.mark.case("A6", "A24")
def test_a_batch_frozen_behind_its_check_does_not_outlive_a_reset(world: World, owner: Owner) -> None:
    """Its cursors and rows would be there again after everything was forgotten."""
    owner.falls_silent()
    zombie = Worker()
    assert zombie.passes(owner.lease)
    zombie.writes(world.identity, "a")

    scriba.reset(world.projection())

    assert not zombie.commits()
    assert world.cursors() == {}
    zombie.close()


@pytest.mark.case("A24")
def test_who_takes_the_segment_while_a_reset_waits_for_it_is_left_alone(world: World, owner: Owner) -> None:
    """The look before the lock is not enough: the reset looks again once it has the row to itself."""
    owner.falls_silent()
    door = Worker()
    door.execute("SELECT pg_advisory_xact_lock_shared(%s, 0)", [1_396_920_905])  # worn like a reset: nobody ends it
    door.execute("SELECT 1 FROM scriba_segments WHERE id = %s FOR UPDATE", [owner.lease.segment])
    resetting: list[int] = []

    def reset() -> Forgotten:
        with connections["default"].cursor() as cursor:
            cursor.execute("SELECT pg_backend_pid()")
            resetting.append(cursor.fetchone()[0])
        return scriba.reset(world.projection())

    with in_thread(reset) as answer:
        wait_until(lambda: resetting and is_waiting(owner.ledger._connection, resetting[0]), what="the reset to wait")
        door.execute(
            "UPDATE scriba_segments SET owner = 'new', status = 'running', lease_expires_at = now() + interval '1 h'"
        )
        assert door.commits()

    assert isinstance(answer[0], InvalidState)
    assert answer[0].state == "running"
    door.close()


def test_a_takeover_waits_for_a_reset_that_takes_long(
    world: World, owner: Owner, caplog: pytest.LogCaptureFixture
) -> None:
    """A reset of millions of cursors is not ended by a standby that is in a hurry."""
    owner.falls_silent()
    deleting, may_go = threading.Event(), threading.Event()
    world.append("a")

    def block(execute, sql, params, many, context):
        if sql.startswith("DELETE FROM scriba_positions"):
            deleting.set()
            may_go.wait(30)
        return execute(sql, params, many, context)

    def reset() -> Forgotten:
        with connections["default"].execute_wrapper(block):
            return scriba.reset(world.projection())

    standby = PgLedger(world.identity, world.using)
    with in_thread(reset) as forgotten:
        assert deleting.wait(10)
        with in_thread(lambda: standby.acquire("standby", 30.0)) as answer:
            wait_until(
                lambda: "the reset of backend" in caplog.text or "ended" in caplog.text, what="a look at the reset"
            )
            assert not answer
            may_go.set()

    assert forgotten == [Forgotten(0, 0, 0)]
    assert not isinstance(answer[0], Holder | Exception), answer
    standby.close()


def test_letters_are_discarded_or_deleted(world: World) -> None:
    """Their events come again; an open letter that stayed would keep its key parked. What was resolved stays as it was."""

    def letter(position: int, status: str) -> None:
        DeadLetter.objects.create(
            projection_name=world.name, projection_version=1, position=position, status=status, wish="replay"
        )

    world.projection()
    for position, status in enumerate(("open", "parked", "replayed")):
        letter(position, status)

    assert scriba.reset(world.projection()).dead_letters == 2
    kept = [(letter.status, letter.resolved_by, letter.wish) for letter in world.letters()]
    assert kept == [("discarded", "reset", ""), ("discarded", "reset", ""), ("replayed", "", "replay")]

    assert scriba.reset(world.projection(), dead_letters=True).dead_letters == 3
    assert world.letters() == []


def test_recorded_options_may_change_after_a_reset(world: World, owner: Owner) -> None:
    """Nothing is left that was written under the old ones."""
    owner.shows(Status.STOPPED)
    world.execute("UPDATE scriba_projections SET floor = 40")
    other = Recorded("SERIAL", "other events", "crc")
    with pytest.raises(ConfigurationError):
        owner.ledger.register(other)

    scriba.reset(world.projection())

    owner.ledger.register(other)
    assert world.state.floor is None


def test_the_wish_and_a_halt_survive_a_reset(world: World, owner: Owner) -> None:
    """A reset forgets what was projected, not what an operator decided."""
    owner.halts("cause")
    scriba.stop(world.projection(), by="ann")

    scriba.reset(world.projection())

    assert (world.state.wish, world.state.wish_by, world.state.halt_cause) == ("stopped", "ann", "cause")


def test_other_versions_and_projections_are_not_touched(world: World) -> None:
    """One identity is forgotten."""
    other = World(world.name + "-other")
    other_version = world.projection(version=2)
    world.append_many(20)
    for projection in (world.projection(), other_version, other.projection()):
        world.run(projection)

    scriba.reset(world.projection())

    assert world.segment.watermark is None
    assert scriba.info(other_version).counters["applied"] == 20
    assert other.segment.watermark is not None
    assert len(other.cursors()) == 20
    assert Lane.objects.filter(segment=other.segment, applied__gt=0).exists()


# --- read models ------------------------------------------------------------------------------------------------


def test_named_models_are_emptied_and_no_others(world: World) -> None:
    """In the same transaction, and counted."""
    Row.objects.create(id="a")
    Counter.objects.create(key="a")

    assert scriba.reset(world.projection(), truncate=[Row]) == Forgotten(0, 0, 1)

    assert not Row.objects.exists()
    assert Counter.objects.exists()


def test_truncating_without_declared_models_is_refused(world: World) -> None:
    """True means "those of the decorator"; there are none."""
    with pytest.raises(ConfigurationError, match="models"):
        scriba.reset(world.projection(), truncate=True)


def test_a_row_that_still_refers_to_a_read_model_undoes_the_whole_reset(world: World) -> None:
    """Nothing is half forgotten."""
    Child.objects.create(id="c", parent=Parent.objects.create(id="p"))
    world.append_many(10)
    world.run(world.projection())

    with pytest.raises(IntegrityError):
        scriba.reset(world.projection(), truncate=[Parent])

    assert Parent.objects.exists()
    assert len(world.cursors()) == 10
    assert world.state.reset_count == 0
    assert scriba.reset(world.projection(), truncate=[Parent, Child]).read_model_rows == 2
