"""Who owns a segment, for how long, and what an owner's writes may change."""

from __future__ import annotations

from datetime import UTC, datetime

import psycopg
import pytest

from scriba.protocols import FenceLost, Holder, Lease, Orders, Progress, Resume, Status, Wish
from tests.integration.ledger.support import LEASE_S, RUNNING, SOON_S, Desk
from tests.support.processes import database_url

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
ONE = datetime(2026, 1, 1, 13, tzinfo=UTC)


def test_a_live_owner_keeps_others_away(desk: Desk) -> None:
    """Who asks for an owned segment learns who has it and for how long at most; nothing changes."""
    _, lease = desk.owned("old")
    before = desk.segment("owner", "epoch", "lease_expires_at")

    answer = desk.ledger().acquire("new", LEASE_S)

    assert isinstance(answer, Holder)
    assert answer.owner == "old"
    assert 0 < answer.expires_in_s <= LEASE_S
    assert desk.segment("owner", "epoch", "lease_expires_at") == before
    assert before[:2] == ("old", lease.epoch)


def test_a_lease_that_ran_out_is_taken_over_under_a_higher_epoch(desk: Desk) -> None:
    """The database's clock alone decides; the new epoch is above every one there was."""
    _, old = desk.owned("old")
    desk.expire()

    new = desk.ledger().acquire("new", LEASE_S)

    assert isinstance(new, Lease)
    assert new.epoch > old.epoch
    assert new.fence == ((old.segment, new.epoch),)
    assert desk.segment("owner", "status") == ("new", "initializing")


def test_a_heartbeat_prolongs_the_lease_by_its_whole_length(desk: Desk) -> None:
    """An owner that reports in time is never taken over from."""
    ledger, lease = desk.owned()

    assert ledger.heartbeat(lease, 60.0, RUNNING)

    answer = desk.ledger().acquire("new", LEASE_S)
    assert isinstance(answer, Holder)
    assert 55.0 < answer.expires_in_s <= 60.0


def test_an_owner_that_comes_back_gets_its_own_segment_under_a_new_epoch(desk: Desk) -> None:
    """A pipeline that starts again in the same process need not wait, and leaves its old workers behind the fence."""
    ledger, first = desk.owned("me")

    second = ledger.acquire("me", LEASE_S)

    assert isinstance(second, Lease)
    assert second.epoch > first.epoch
    assert not ledger.heartbeat(first, LEASE_S, RUNNING)
    assert not desk.worker().passes(first)


@pytest.mark.case("A14")
def test_a_released_segment_is_free_at_once_and_says_so(desk: Desk) -> None:
    """A rolling restart has no gap of a lease: whoever listens is told, whoever asks gets it."""
    ledger, lease = desk.owned("old")
    with psycopg.connect(database_url(), autocommit=True) as listener:
        listener.execute("LISTEN scriba_wish")

        ledger.release(lease)

        told = next(listener.notifies(timeout=SOON_S, stop_after=1))
    assert told.payload == str(desk.identity)
    assert isinstance(desk.ledger().acquire("new", LEASE_S), Lease)


def test_a_late_heartbeat_does_not_bring_a_released_lease_back(desk: Desk) -> None:
    """The epoch is still the old owner's after its release, but the segment is nobody's."""
    ledger, lease = desk.owned("old")
    ledger.release(lease)

    assert not ledger.heartbeat(lease, 60.0, RUNNING)
    assert desk.segment("owner", "status") == ("", "not running")


@pytest.mark.case("A24")
def test_no_write_of_an_older_epoch_changes_anything(desk: Desk) -> None:
    """A zombie's late heartbeat, watermark, ceiling, halt and release are all refused."""
    ledger, old = desk.owned("old")
    desk.expire()
    new = desk.ledger().acquire("new", LEASE_S)
    assert isinstance(new, Lease)
    everything = ("owner", "epoch", "lease_expires_at", "status", "watermark", "ceiling", "head", "rate", "reason")
    before = desk.segment(*everything)
    news = Progress(Status.RUNNING, watermark=900, head=900, rate=9.0, reason="zombie")

    assert not ledger.heartbeat(old, 60.0, news)
    assert not ledger.save_watermark(old, news)
    assert not ledger.raise_ceiling(old, 900)
    assert not ledger.save_anchor(old, "zombie")
    assert ledger.halt(old, "zombie", "zombie") is None
    ledger.release(old)
    ledger.open_lanes(old, 3)
    with pytest.raises(FenceLost):
        ledger.resume(old)

    assert desk.segment(*everything) == before
    assert ledger.orders() == Orders(Wish.RUNNING)
    assert desk.rows.rows("SELECT count(*) FROM scriba_lanes WHERE segment_id = %s", [old.segment]) == [(0,)]


def test_watermark_and_ceiling_only_rise(desk: Desk) -> None:
    """A write that comes late moves neither back, and the watermark's time stays with the watermark."""
    ledger, lease = desk.owned()

    assert ledger.save_watermark(lease, Progress(Status.RUNNING, watermark=10, watermark_at=ONE))
    assert ledger.save_watermark(lease, Progress(Status.RUNNING, watermark=9, watermark_at=NOON))
    assert ledger.heartbeat(lease, LEASE_S, Progress(Status.RUNNING, watermark=8, watermark_at=NOON))
    assert ledger.raise_ceiling(lease, 50)
    assert ledger.raise_ceiling(lease, 40)

    assert desk.segment("watermark", "watermark_at", "ceiling") == (10, ONE, 50)
    assert ledger.resume(lease) == Resume(10, 50, -1)


def test_a_heartbeat_without_news_keeps_what_was_reported(desk: Desk) -> None:
    """An owner that has no pipeline at the moment does not erase how far it was."""
    ledger, lease = desk.owned()
    ledger.heartbeat(lease, LEASE_S, Progress(Status.RUNNING, 10, NOON, 20, ONE, 2.5, "catching up"))

    ledger.heartbeat(lease, LEASE_S, Progress(Status.PAUSED, reason="paused on request"))

    known = desk.segment("status", "watermark", "watermark_at", "head", "head_at", "rate", "reason")
    assert known == ("paused", 10, NOON, 20, ONE, 0.0, "paused on request")


def test_saving_the_watermark_is_no_heartbeat(desk: Desk) -> None:
    """It neither prolongs the lease nor changes what the projection is said to be."""
    ledger, lease = desk.owned()
    before = desk.segment("lease_expires_at", "status", "reason")

    assert ledger.save_watermark(lease, Progress(Status.RUNNING, watermark=3, reason="no"))

    assert desk.segment("lease_expires_at", "status", "reason") == before


# --- where a new owner continues --------------------------------------------------------------------------------


@pytest.mark.case("A5")
def test_a_new_owner_continues_at_the_watermark_and_looks_up_to_the_ceiling(desk: Desk) -> None:
    """What the dead owner may have committed above its watermark lies at or below its ceiling."""
    ledger, old = desk.owned("old")
    ledger.save_watermark(old, Progress(Status.RUNNING, watermark=90))
    ledger.raise_ceiling(old, 1_000)
    desk.expire()

    standby = desk.ledger()
    new = standby.acquire("new", LEASE_S)

    assert isinstance(new, Lease)
    assert standby.resume(new) == Resume(90, 1_000, -1)


@pytest.mark.case("A22")
def test_the_first_ceiling_is_the_highest_seeded_cursor(desk: Desk) -> None:
    """Carried-over positions count: the window between them and the subscription must be looked up."""
    desk.seed(a=7, b=2**62, c=0)
    ledger, lease = desk.owned()

    assert ledger.resume(lease) == Resume(None, 2**62, -1)
    assert desk.segment("ceiling") == 2**62


@pytest.mark.case("A22")
def test_the_cursors_are_only_looked_at_before_the_first_event(desk: Desk) -> None:
    """With ten million streams a look at all cursors costs seconds; the ceiling makes a second one needless."""
    desk.seed(a=7)
    ledger, lease = desk.owned()
    ledger.resume(lease)
    desk.seed(b=900)

    assert ledger.resume(lease).ceiling == 7


def test_an_imported_cursor_is_the_floor(desk: Desk) -> None:
    """Everything at or below it was settled elsewhere."""
    ledger, lease = desk.owned()
    desk.rows.rows("UPDATE scriba_projections SET floor = 41 WHERE projection_name = %s", [desk.identity.name])

    assert ledger.resume(lease) == Resume(None, -1, 41)


def test_what_positions_are_counted_in_is_kept_beside_the_watermark(desk: Desk) -> None:
    """In the source's own words, whatever characters those have; the next owner hands it back to the source."""
    ledger, lease = desk.owned()

    assert ledger.save_anchor(lease, "stream 7\x00")

    assert ledger.resume(lease) == Resume(None, -1, -1, "stream 7\\x00")


def test_each_lane_has_one_counter_row_and_the_sums_are_of_this_segment(desk: Desk) -> None:
    """More lanes after a restart add rows; none is lost or doubled."""
    ledger, lease = desk.owned()
    ledger.open_lanes(lease, 2)
    ledger.open_lanes(lease, 3)
    desk.rows.rows("UPDATE scriba_lanes SET applied = lane + 1, skipped = 10 WHERE segment_id = %s", [lease.segment])

    lanes = desk.rows.rows("SELECT lane FROM scriba_lanes WHERE segment_id = %s ORDER BY lane", [lease.segment])

    assert lanes == [(0,), (1,), (2,)]
    assert ledger.counters(lease) == {
        "applied": 6, "skipped": 30, "dead_lettered": 0, "deduplicated": 0, "unmatched": 0,
    }  # fmt: skip


# --- halts ------------------------------------------------------------------------------------------------------


@pytest.mark.case("A4", "D3")
def test_a_halt_is_recorded_once_and_nothing_of_the_old_epoch_commits_after_it(desk: Desk) -> None:
    """The first cause is kept, the epoch rises each time, and the lease stays with the owner."""
    ledger, lease = desk.owned()

    first = ledger.halt(lease, "no column 'total'", "commit:42703")
    assert first is not None
    second = ledger.halt(first, "something later", "other")

    assert second is not None
    assert lease.epoch < first.epoch < second.epoch
    assert ledger.orders() == Orders(Wish.RUNNING, "no column 'total'", "commit:42703")
    assert ledger.heartbeat(second, LEASE_S, RUNNING)
    assert not ledger.heartbeat(lease, LEASE_S, RUNNING)
    assert not desk.worker().passes(lease)
    assert isinstance(desk.ledger().acquire("new", LEASE_S), Holder)


@pytest.mark.case("A4", "D5")
def test_a_halt_ends_a_batch_that_did_not_come_back(desk: Desk) -> None:
    """A lane that hangs in its handler passed its check before the halt; it must not commit after it."""
    ledger, lease = desk.owned()
    hanging = desk.worker()
    assert hanging.passes(lease)

    assert ledger.halt(lease, "cause", "label")

    assert not hanging.commits()


def test_a_cause_that_postgres_cannot_store_is_recorded_all_the_same(desk: Desk) -> None:
    """NUL bytes, lone surrogates and megabytes must not be the reason why a halt is not recorded."""
    ledger, lease = desk.owned()

    assert ledger.halt(lease, "a\x00b\ud800" + "c" * 1_000_000, "")

    cause = ledger.orders().halt_cause
    assert cause.startswith("a\\x00b\\ud800ccc")
    assert len(cause) < 20_000


# --- the wish ---------------------------------------------------------------------------------------------------


def test_without_a_row_a_projection_is_wished_running(desk: Desk) -> None:
    """Nobody has to start what nobody has stopped."""
    assert desk.ledger(registered=False).orders() == Orders(Wish.RUNNING)


def test_a_wish_is_recorded_with_who_and_why(desk: Desk) -> None:
    """The row is there before the projection ever ran, and keeps what it was told by whom."""
    ledger = desk.ledger(registered=False)

    ledger.set_wish(Wish.PAUSED, by="ann", reason="deploy")

    row = "SELECT wish, wish_by, wish_reason FROM scriba_projections WHERE projection_name = %s"
    assert desk.rows.rows(row, [desk.identity.name]) == [("paused", "ann", "deploy")]
    assert ledger.orders() == Orders(Wish.PAUSED)


@pytest.mark.case("D3")
def test_only_a_start_after_a_stop_leaves_a_halt(desk: Desk) -> None:
    """``--start`` on a halted projection is no answer to the halt; stop and start is one."""
    ledger, lease = desk.owned()
    ledger.halt(lease, "cause", "label")

    ledger.set_wish(Wish.RUNNING)
    assert ledger.orders().halt_cause == "cause"
    ledger.set_wish(Wish.STOPPED)
    assert ledger.orders().halt_cause == "cause"
    ledger.set_wish(Wish.RUNNING)

    assert ledger.orders() == Orders(Wish.RUNNING)
    assert desk.rows.rows(
        "SELECT halted_at FROM scriba_projections WHERE projection_name = %s", [desk.identity.name]
    ) == [(None,)]
