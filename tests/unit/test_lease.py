"""The keeper of a lease, on a memory ledger and a clock that only moves when told."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from scriba.engine import lease as lease_module
from scriba.engine.lease import LeaseKeeper
from scriba.protocols import Identity, Lease, Ledger, Progress, Status
from scriba.testing.memory import MemoryLedger, MemoryState, MemoryTarget
from tests.support.waiting import wait_until

LEASE_S = 15.0
SOON_S = 5.0  # far longer than anything here takes; only a failing test waits so long


class Clock:
    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


class World:
    """One segment, its owner, and the keeper of that owner's lease."""

    def __init__(
        self,
        lease_s: float = LEASE_S,
        clock: Callable[[], float] | None = None,
        ledger: type[MemoryLedger] = MemoryLedger,
    ) -> None:
        self.clock = Clock()
        self.state = MemoryState(MemoryTarget())
        self.ledger = ledger(self.state, clock=clock or self.clock)
        self.lost = 0
        self.told = threading.Event()
        claim = self.ledger.acquire("me", lease_s)
        assert isinstance(claim, Lease)
        self.lease = claim
        self.keeper = LeaseKeeper(
            self.open_ledger,
            claim,
            lease_s,
            lambda: Progress(Status.RUNNING, watermark=7),
            self.on_lost,
            identity=Identity("orders", 1),
            clock=clock or self.clock,
        )

    def open_ledger(self) -> Ledger:
        return self.ledger

    def on_lost(self) -> None:
        self.lost += 1
        self.told.set()

    def somebody_else_takes_over(self) -> None:
        self.state.expires_at = 0.0
        self.ledger.acquire("somebody else", LEASE_S)


@contextmanager
def started(keeper: LeaseKeeper) -> Iterator[LeaseKeeper]:
    keeper.start()
    try:
        yield keeper
    finally:
        keeper.stop()


def test_beats_three_times_per_lease_and_reports_the_progress() -> None:
    """A heartbeat prolongs the lease by its whole length and carries what the owner reports."""
    world = World()
    world.clock.now += 4.0

    wait_s = world.keeper.beat(world.ledger)

    assert wait_s == LEASE_S / 3
    assert world.state.expires_at == world.clock.now + LEASE_S
    assert world.state.progress == Progress(Status.RUNNING, watermark=7)
    assert world.keeper.check() == LEASE_S


def test_counts_the_lease_from_before_the_heartbeat_was_sent() -> None:
    """The answer may have been long on its way: the lease must not end later here than in the database."""
    world = World()

    class Slow(MemoryLedger):
        def heartbeat(self, lease: Lease, lease_s: float, progress: Progress) -> bool:
            held = super().heartbeat(lease, lease_s, progress)
            world.clock.now += 6.0
            return held

    world.keeper.beat(Slow(world.state, clock=world.clock))

    assert world.keeper.check() == LEASE_S - 6.0


def test_a_transient_error_is_tried_again_soon_until_the_lease_is_over() -> None:
    """An outage shorter than the lease costs nothing; a longer one loses the lease, by the local clock."""
    world = World()
    world.state.failures = [ConnectionError("gone")] * 8

    waits = [world.keeper.beat(world.ledger) for _ in range(8)]

    assert waits == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, LEASE_S / 3, LEASE_S / 3]
    assert world.keeper.is_held
    world.clock.now += LEASE_S
    assert not world.keeper.is_held
    assert world.keeper.check() is None
    assert world.lost == 1


def test_a_heartbeat_that_gets_through_again_resets_the_retries() -> None:
    """After an outage the next one starts with short waits again."""
    world = World()
    world.state.failures = [ConnectionError("gone"), ConnectionError("gone")]
    world.keeper.beat(world.ledger)
    world.keeper.beat(world.ledger)

    assert world.keeper.beat(world.ledger) == LEASE_S / 3
    world.state.failures = [ConnectionError("gone")]
    assert world.keeper.beat(world.ledger) == 0.1


def test_another_epoch_means_lost_at_once_and_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The database says that somebody else owns the segment: no waiting for the lease's end, no second report."""
    monkeypatch.setattr(lease_module, "RENEWAL_GRACE_S", 0.0)
    world = World()
    world.somebody_else_takes_over()

    assert world.keeper.beat(world.ledger) is None
    world.clock.now += LEASE_S
    assert world.keeper.check() is None

    assert world.lost == 1
    assert not world.keeper.is_held


def test_an_error_that_will_not_pass_loses_the_lease(caplog: pytest.LogCaptureFixture) -> None:
    """A dropped table, or a bug in what is reported, is not repeated for ever in silence."""
    world = World()
    world.state.failures = [ValueError("no such column")]

    with caplog.at_level(logging.ERROR, logger="scriba"):
        assert world.keeper.beat(world.ledger) is None

    assert world.lost == 1
    assert "no such column" in caplog.text


def test_goes_on_under_the_epoch_that_a_halt_has_raised() -> None:
    """The owner itself raised the epoch; a heartbeat caught between the raise and the news is no loss."""
    world = World()
    halted = world.ledger.halt(world.lease, "cause", "label")
    assert halted is not None
    news = threading.Timer(0.0, world.keeper.renew, [halted])

    class NewsWhileWaiting(MemoryLedger):
        def heartbeat(self, lease: Lease, lease_s: float, progress: Progress) -> bool:
            held = super().heartbeat(lease, lease_s, progress)
            if not held:
                news.start()
            return held

    ledger = NewsWhileWaiting(world.state, clock=world.clock)
    assert world.keeper.beat(ledger) == 0.0
    assert world.keeper.beat(ledger) == LEASE_S / 3
    assert world.lost == 0
    assert world.keeper.lease is halted


def test_a_heartbeat_that_hangs_is_noticed_by_the_clock() -> None:
    """In a dead network a heartbeat neither fails nor returns; its owner is told when the lease is over."""
    clock = Clock()
    hangs, may_go = threading.Event(), threading.Event()

    class Hanging(MemoryLedger):
        def heartbeat(self, lease: Lease, lease_s: float, progress: Progress) -> bool:
            del lease, lease_s, progress
            clock.now += LEASE_S
            hangs.set()
            may_go.wait(3 * SOON_S)
            return False

    world = World(lease_s=0.05, clock=clock, ledger=Hanging)
    with started(world.keeper):
        assert hangs.wait(SOON_S)
        assert world.told.wait(SOON_S)
        assert not may_go.is_set()
        may_go.set()
    assert world.lost == 1


def test_its_threads_are_named_after_projection_and_role_and_end_with_stop() -> None:
    """Whoever looks at a process sees whose threads they are; none is left behind."""
    world = World()
    names = {"scriba orders:1 lease", "scriba orders:1 lease-watch"}

    with started(world.keeper):
        assert names <= {thread.name for thread in threading.enumerate()}

    assert not names & {thread.name for thread in threading.enumerate()}
    world.keeper.stop()
    assert world.lost == 0


def test_keeps_beating_in_its_own_thread_and_closes_its_ledger() -> None:
    """The lease stays alive without anybody's help, over a ledger that the keeper opened and closes."""
    beats, closed = threading.Semaphore(0), threading.Event()

    class Counting(MemoryLedger):
        def heartbeat(self, lease: Lease, lease_s: float, progress: Progress) -> bool:
            held = super().heartbeat(lease, lease_s, progress)
            beats.release()
            return held

        def close(self) -> None:
            closed.set()

    world = World(lease_s=0.03, ledger=Counting)
    with started(world.keeper):
        for _ in range(4):
            assert beats.acquire(timeout=SOON_S)
        assert world.lost == 0
    assert closed.is_set()


def test_nothing_is_reported_after_stop() -> None:
    """An owner that has left is not told that it lost what it gave back."""
    world = World()
    with started(world.keeper):
        pass
    world.clock.now += LEASE_S

    assert world.keeper.check() is None
    assert world.lost == 0


def test_what_changes_between_two_heartbeats_is_reported_at_once() -> None:
    """Telling waits for nobody, and what changes while a heartbeat is on its way causes another one."""
    first_is_out, answer = threading.Event(), threading.Event()
    beats: list[Progress] = []

    class Slow(MemoryLedger):
        def heartbeat(self, lease: Lease, lease_s: float, progress: Progress) -> bool:
            beats.append(progress)
            first_is_out.set()
            assert answer.wait(SOON_S)
            return super().heartbeat(lease, lease_s, progress)

    world = World(ledger=Slow)
    with started(world.keeper):
        assert first_is_out.wait(SOON_S)
        world.keeper.tell()
        answer.set()
        wait_until(lambda: len(beats) == 2, what="the second heartbeat, a third of the lease before its time")
