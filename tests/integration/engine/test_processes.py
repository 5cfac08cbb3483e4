"""Real processes that are killed, stopped, continued and replaced: every event exactly once, in order.

The handlers (tests/testapp/projections.py) note each application without a unique key, and are steered by files.
"""

from __future__ import annotations

import signal
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from django.db import connection

from scriba import control
from scriba.engine.partitioner import lane_of
from scriba.models import DeadLetter, Position, Segment
from tests.support.processes import Output, managed
from tests.support.waiting import wait_until
from tests.support.world import World

pytestmark = pytest.mark.django_db(transaction=True)


def world_of(name: str) -> World:
    return World(name)


def runner(name: str, *more: str) -> object:
    return managed("run_projections", name, *more)


def wait_running(name: str) -> None:
    """Wait until a live owner reports that it runs."""
    wait_until(
        lambda: Segment.objects.filter(projection_name=name, status="running").exclude(owner="").exists(),
        what=f"{name} to run",
    )


def ended(process: subprocess.Popen[str], timeout: float = 20) -> int:
    return process.wait(timeout)


@pytest.mark.case("A1")
def test_kill_9_while_a_slow_event_is_handled(tmp_path: Path) -> None:
    """The slow one at the lowest position is applied after the restart; the watermark never passed it."""
    world = world_of("noting")
    reached, release = tmp_path / "reached", tmp_path / "release"
    slow = world.append("slow", touch=str(reached), until=str(release))
    others = world.append(*(f"other{n}" for n in range(10)))
    with runner("noting") as process:
        wait_until(reached.exists, what="the slow event")
        wait_until(lambda: len(world.applied()) >= 5, what="later events of other lanes")
        watermark = world.segment.watermark
        process.kill()
    assert watermark is None or watermark < slow[0]
    release.touch()
    with runner("noting"):
        world.wait_applied(11)

    world.check([*slow, *others])


@pytest.mark.case("A2")
def test_kill_9_while_an_event_waits_for_its_retry(tmp_path: Path) -> None:
    """An event in its backoff is unsettled: the watermark stays below it, and the restart applies it."""
    world = world_of("patient")
    fixed, reached = tmp_path / "fixed", tmp_path / "reached"
    failing = world.append("slow", fail=True, touch=str(reached), fixed=str(fixed))
    others = world.append(*(f"other{n}" for n in range(10)))
    in_other_lanes = [n for n in range(10) if lane_of(f"other{n}", 4) != lane_of("slow", 4)]
    with managed("run_projections", "patient", PGAPPNAME="noon") as process:
        wait_until(reached.exists, what="the first attempt")
        wait_until(lambda: len(world.applied()) >= len(in_other_lanes), what="all later events of other lanes")
        wait_until(lambda: not _in_transaction("noon"), what="the end of all transactions: a wait holds none open")
        watermark = world.segment.watermark
        process.kill()
    assert watermark is None or watermark < failing[0]
    fixed.touch()
    with runner("patient"):
        world.wait_applied(11)

    world.check([*failing, *others])


@pytest.mark.case("A21")
def test_kill_9_while_one_stream_is_spread_over_lanes(tmp_path: Path) -> None:
    """Ordered by another key, later events of a stream are committed while an earlier one is in flight: it is not lost."""
    world = world_of("keyed")
    reached, release = tmp_path / "reached", tmp_path / "release"
    slow = world.append("s", touch=str(reached), until=str(release))
    later = world.append(*["s"] * 12)
    others = [position for n, position in enumerate(later) if lane_of(str(n), 4) != lane_of("0", 4)]
    with runner("keyed") as process:
        wait_until(reached.exists, what="the slow event")
        wait_until(lambda: set(others) <= set(world.applied()), what="later events of the same stream")
        watermark = world.segment.watermark
        process.kill()
    assert watermark is None or watermark < slow[0]
    release.touch()
    with runner("keyed"):
        wait_until(lambda: len(world.applied()) == 13, what="every event")

    assert sorted(world.applied()) == [*slow, *later]
    world.check_conservation(13)


@pytest.mark.case("A5")
def test_a_takeover_applies_nothing_again_although_the_watermark_trails() -> None:
    """The owner has committed 1..100 and dies; the new one starts from an older watermark and repeats none."""
    world = world_of("noting")
    first = world.append_many(100)
    with runner("noting") as owner, runner("noting"):
        world.wait_applied(100)
        owner.kill()
        world.execute("UPDATE scriba_segments SET watermark = %s WHERE projection_name = 'noting'", first[89])
        more = world.append_many(20)
        world.wait_applied(120)

    world.check([*first, *more])


@pytest.mark.case("A6")
def test_a_stopped_owner_that_continues_writes_nothing_more() -> None:
    """SIGSTOP past the lease, takeover, SIGCONT: both processes live on, one of them as standby, totals exact."""
    world = world_of("noting")
    positions = world.append_many(50)
    with runner("noting") as owner:
        world.wait_applied(50)
        wait_running("noting")
        epoch = world.segment.epoch
        with runner("noting"):
            owner.send_signal(signal.SIGSTOP)
            positions += world.append_many(50)
            world.wait_applied(100)
            assert world.segment.epoch > epoch
            owner.send_signal(signal.SIGCONT)
            positions += world.append_many(50)
            world.wait_applied(150)
            control.stop("noting", wait=True)

    world.check(positions)


@pytest.mark.case("A6", "A24")
def test_a_stopped_owner_does_not_survive_a_reset() -> None:
    """Stopped past its lease; reset meanwhile; continued: it must not go on from its memory, but from zero."""
    world = world_of("noting")
    positions = world.append_many(40)
    with runner("noting") as owner:
        world.wait_applied(40)
        wait_running("noting")
        owner.send_signal(signal.SIGSTOP)
        wait_until(lambda: control.info("noting").status == "not running", what="the lease to run out")
        control.stop("noting")
        control.reset("noting")
        world.execute("DELETE FROM testapp_applied")
        control.start("noting")
        owner.send_signal(signal.SIGCONT)
        positions += world.append_many(40)
        world.wait_applied(80)

    world.check(positions)


@pytest.mark.case("A6")
def test_a_stopped_owner_does_not_overtake_a_parked_key(tmp_path: Path) -> None:
    """While it was stopped the new owner parked a key: the old one must not apply that key's next event."""
    world = world_of("parking")
    first = world.append("a", "b")
    with runner("parking") as owner:
        world.wait_applied(2)
        wait_running("parking")
        with runner("parking"):
            owner.send_signal(signal.SIGSTOP)
            bad = world.append("a", fail=True, fixed=str(tmp_path / "never"))
            wait_until(lambda: world.letters(), what="the dead letter")
            owner.send_signal(signal.SIGCONT)
            behind = world.append("a", "b", "a")
            wait_until(lambda: len(world.letters()) == 3 and len(world.applied()) == 3, what="the parked events")

    assert [letter.status for letter in world.letters()] == ["open", "parked", "parked"]
    assert world.applied() == [*first, behind[1]]
    world.check_conservation(len(first) + len(bad) + len(behind))


@pytest.mark.case("A6")
def test_a_stopped_owner_does_not_go_on_behind_a_halt(tmp_path: Path) -> None:
    """While it was stopped the new owner halted: nothing is applied by anybody until a human acts, and then everything."""
    world = world_of("halting")
    fixed = tmp_path / "fixed"
    positions = world.append("a", "b")
    with runner("halting") as owner:
        output = Output(owner)
        world.wait_applied(2)
        wait_running("halting")
        with runner("halting"):
            owner.send_signal(signal.SIGSTOP)
            positions += world.append("a", fail=True, fixed=str(fixed))
            wait_until(lambda: world.state.halt_cause, what="the halt")
            positions += world.append("b", "b", "a")
            owner.send_signal(signal.SIGCONT)
            output.until("standby: owned")
            assert world.applied() == positions[:2]
            fixed.touch()
            control.stop("halting", wait=True)
            control.start("halting")
            world.wait_applied(6)

    world.check(positions)
    assert world.letters() == []


@pytest.mark.case("A7")
def test_an_owner_frozen_inside_its_transaction_is_ended_by_the_takeover(tmp_path: Path) -> None:
    """It holds its share lock and written rows; the takeover is bounded, terminates it, and totals are exact."""
    world = world_of("writing")
    reached, release = tmp_path / "reached", tmp_path / "release"
    positions = world.append("a", touch=str(reached), until=str(release))
    with runner("writing") as owner:
        wait_until(reached.exists, what="rows written in an open transaction")
        owner.send_signal(signal.SIGSTOP)
        release.touch()
        positions += world.append("a", "b")
        started = time.monotonic()
        with runner("writing"):
            world.wait_applied(3)
            assert time.monotonic() - started < 15
            owner.send_signal(signal.SIGCONT)
            positions += world.append("a")
            world.wait_applied(4)
            wait_until(lambda: world.segment.watermark == positions[-1], what="the watermark")

    world.check(positions)


@pytest.mark.case("A13")
def test_two_processes_that_start_together_one_runs_one_stands_by() -> None:
    """Never both: every event once, and the one that waits says whom it waits for."""
    world = world_of("noting")
    positions = world.append_many(200)
    with ExitStack() as stack:
        processes = [stack.enter_context(managed("run_projections", "noting", PGAPPNAME=f"twin{n}")) for n in range(2)]
        world.wait_applied(200)
        wait_until(lambda: all(_looks_at_the_lease(f"twin{n}") for n in range(2)), what="both to look at the lease")
        positions += world.append_many(100)
        world.wait_applied(300)
        owner_pid = world.segment.owner.split(":")[1]
        assert owner_pid in {str(process.pid) for process in processes}
        for process in processes:
            process.terminate()
        codes = [ended(process) for process in processes]

    assert codes == [0, 0]
    world.check(positions)


@pytest.mark.case("A14")
def test_a_rolling_restart_has_a_gap_below_a_second() -> None:
    """The new process starts, the old one gets SIGTERM: an event appended right then is applied within a second."""
    world = world_of("noting")
    positions = world.append_many(20)
    with runner("noting") as old:
        world.wait_applied(20)
        wait_running("noting")
        with managed("run_projections", "noting", PGAPPNAME="new"):
            wait_until(lambda: _looks_at_the_lease("new"), what="the new process to stand by")
            old.terminate()
            positions += world.append("now")
            started = time.monotonic()
            world.wait_applied(21)
            gap_s = time.monotonic() - started
            assert ended(old) == 0

    assert gap_s < 1.0, f"the gap was {gap_s:.2f} s"
    world.check(positions)


def _looks_at_the_lease(application: str) -> bool:
    """Whether a process has come so far as to ask who owns the segment (its signal handlers are installed by then)."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE application_name = %s "
            "AND (query LIKE '%%lease_expires_at%%' OR query LIKE '%%SET watermark%%'))",
            [application],
        )
        return bool(cursor.fetchone()[0])


@pytest.mark.case("D2")
def test_a_pause_survives_the_death_of_the_process() -> None:
    """Paused, killed, restarted: still paused; resumed, it goes on."""
    world = world_of("noting")
    positions = world.append_many(10)
    with runner("noting") as process:
        world.wait_applied(10)
        control.pause("noting", wait=True)
        process.kill()
    positions += world.append_many(10)
    with runner("noting"):
        wait_until(lambda: control.info("noting").status == "paused", what="the restored pause")
        assert len(world.applied()) == 10
        control.resume("noting")
        world.wait_applied(20)

    world.check(positions)


@pytest.mark.case("D4")
def test_sigterm_in_a_batch_lets_its_handler_finish(tmp_path: Path) -> None:
    """What is being handled is committed before the process leaves with exit code 0; what waits behind it is not begun."""
    world = world_of("noting")
    reached, release = tmp_path / "reached", tmp_path / "release"
    positions = world.append("a", touch=str(reached), until=str(release)) + world.append(*["a"] * 5)
    with runner("noting") as process:
        wait_until(reached.exists, what="the handler")
        process.send_signal(signal.SIGTERM)
        Output(process).until("draining")
        wait_until(lambda: control.info("noting").status == "draining", what="another process to see that it drains")
        release.touch()
        assert ended(process) == 0
    assert world.applied() == positions[: len(world.applied())] != []
    with runner("noting"):
        world.wait_applied(6)

    world.check(positions)


@pytest.mark.case("D4")
@pytest.mark.parametrize(("signals", "accepted"), [(1, {0}), (2, {0, 1})])
def test_sigterm_in_a_commit_loses_and_doubles_nothing(signals: int, accepted: set[int]) -> None:
    """A deferred trigger slows COMMIT; the signal comes in the middle of it: exit 0, the commit stands. Twice: no less."""
    world = world_of("noting")
    world.execute(
        "CREATE OR REPLACE FUNCTION slow_commit() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN PERFORM pg_sleep(0.8); RETURN NULL; END $$"
    )
    world.execute(
        "CREATE CONSTRAINT TRIGGER slow AFTER INSERT ON testapp_applied DEFERRABLE INITIALLY DEFERRED "
        "FOR EACH ROW EXECUTE FUNCTION slow_commit()"
    )
    try:
        positions = world.append("a")
        with runner("noting") as process:
            wait_until(lambda: _active("COMMIT"), what="a COMMIT in progress")
            for _ in range(signals):
                process.send_signal(signal.SIGTERM)
            code = ended(process)
        assert signals > 1 or world.applied() == positions
    finally:
        world.execute("DROP TRIGGER slow ON testapp_applied")
    assert code in accepted
    positions += world.append("a", "b")
    with runner("noting"):
        world.wait_applied(3)

    world.check(positions)


def _in_transaction(application: str) -> bool:
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE application_name = %s AND state LIKE 'idle in transaction%%'",
            [application],
        )
        return bool(cursor.fetchone()[0])


def _active(query: str) -> bool:
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() AND state = 'active' AND query = %s)",
            [query],
        )
        return bool(cursor.fetchone()[0])


@pytest.mark.case("D5")
def test_a_handler_that_hangs_is_left_after_the_drain_timeout(tmp_path: Path) -> None:
    """The thread is named, the exit code is not 0, and its event is applied by the next process."""
    world = world_of("noting")
    reached, release = tmp_path / "reached", tmp_path / "release"
    positions = world.append("a", touch=str(reached), until=str(release))
    with runner("noting", "--drain-timeout", "0.5") as process:
        wait_until(reached.exists, what="the handler")
        process.terminate()
        output, _ = process.communicate(timeout=20)
    assert process.returncode == 1
    assert "lane-" in output
    release.touch()
    with runner("noting"):
        world.wait_applied(1)

    world.check(positions)


@pytest.mark.case("D6")
def test_reset_is_refused_while_running_and_replays_from_zero_when_stopped() -> None:
    """Refused while a live owner runs; afterwards cursors and counters are zero and everything is applied again."""
    world = world_of("noting")
    positions = world.append_many(30)
    with runner("noting"):
        world.wait_applied(30)
        wait_running("noting")
        with pytest.raises(control.InvalidState):
            control.reset("noting")
        control.stop("noting", wait=True)
        control.reset("noting")
        assert not Position.objects.filter(projection_name="noting").exists()
        world.execute("DELETE FROM testapp_applied")
        control.start("noting")
        world.wait_applied(30)
        wait_until(lambda: world.segment.watermark == positions[-1], what="the watermark")

    world.check(positions)
    assert not DeadLetter.objects.filter(projection_name="noting").exists()
