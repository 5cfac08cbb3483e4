"""The life of a projection in a process, threads included, on memory doubles."""

from __future__ import annotations

import random
import threading
from dataclasses import replace
from typing import Any

import pytest

from scriba import signals
from scriba.engine.coordinator import Coordinator
from scriba.engine.runner import _quietly
from scriba.event import Event
from scriba.protocols import FailureKind, Orders, Status, Wish
from scriba.results import Insert, Skip
from scriba.testing.memory import MemoryBatch, MemoryLedger, StoreError
from scriba.testing.memory.source import MemorySubscription
from tests.support.engine import FAST, Running, conserved, events, insert_position, make_projection, memory_world
from tests.support.waiting import wait_until

#: A lease so long that no heartbeat comes by itself while a test runs, and that no outage in a test ends it.
CALM = replace(FAST, lease_s=600.0)


def streams(count: int, names: str = "abcdefg") -> list[Event]:
    return events(*(names[n % len(names)] for n in range(count)))


def test_everything_is_applied_and_the_watermark_reaches_the_head() -> None:
    """Until caught up: the outcome is 0, the watermark exact, the lease released."""
    source, target, state = memory_world(*streams(500))
    projection = make_projection(insert_position, source, target, parallelism=4, batch_size=16)
    with Running(projection, state, until_caught_up=True) as coordinator:
        assert coordinator.ended.wait(10)

    assert coordinator.outcome is not None
    assert coordinator.outcome.code == 0
    assert sorted(write.obj[1] for write in target.log) == list(range(1, 501))
    assert state.resume.watermark == 500
    assert state.owner == ""
    assert conserved(target, 500)


def test_a_source_without_any_event_is_caught_up_at_once() -> None:
    """There is nothing to settle and no watermark to save: nothing to stay for."""
    source, target, state = memory_world()
    with Running(make_projection(insert_position, source, target), state, until_caught_up=True) as coordinator:
        assert coordinator.ended.wait(10)

    assert coordinator.outcome is not None
    assert coordinator.outcome.code == 0


@pytest.mark.case("A1", "A20")
def test_a_slow_event_holds_the_watermark_until_it_is_settled() -> None:
    """Ten later events of other streams commit; the saved watermark never passes the slow one."""
    release = threading.Event()

    def handler(data: Any, meta: Any) -> Insert:
        if meta.position == 1:
            assert release.wait(10)
        return insert_position(data, meta)

    found = events("slow", *"abcdefghij")
    source, target, state = memory_world(*found)
    with Running(make_projection(handler, source, target, parallelism=8), state):
        wait_until(lambda: len(target.log) >= 5, what="later events of other lanes")
        assert all(watermark < 1 for watermark in state.watermarks)
        release.set()
        wait_until(lambda: state.resume.watermark == 11, what="the watermark at the head")

    assert state.watermarks == sorted(state.watermarks)


@pytest.mark.case("A13")
def test_two_processes_one_runs_and_one_stands_by_and_takes_over() -> None:
    """The standby takes over as soon as the owner leaves, and nothing is applied twice."""
    source, target, state = memory_world(*streams(20))
    projection = make_projection(insert_position, source, target)
    with Running(projection, state, owner="two-b") as second:
        with Running(projection, state, owner="two-a") as first:
            wait_until(lambda: {first.snapshot().status, second.snapshot().status} == {Status.RUNNING, Status.STANDBY},
                       what="one running, one standby")  # fmt: skip
            wait_until(lambda: len(target.log) == 20, what="all applied")
            owner = first if first.snapshot().status is Status.RUNNING else second
            other = second if owner is first else first
            owner.stop()
            source.append(*events("z", first=21))
            wait_until(lambda: other.snapshot().status is Status.RUNNING, what="the takeover")
            wait_until(lambda: len(target.log) == 21, what="the new event")

    assert len({write.obj for write in target.log}) == 21


def test_pause_takes_nothing_new_and_resume_goes_on() -> None:
    """In-flight work finishes, the source is left alone, and the wish is followed both ways."""
    source, target, state = memory_world(*streams(10))
    with Running(make_projection(insert_position, source, target), state) as coordinator:
        wait_until(lambda: len(target.log) == 10, what="the first ten")
        state.orders = Orders(Wish.PAUSED)
        wait_until(lambda: coordinator.snapshot().status is Status.PAUSED, what="paused")
        source.append(*events("a", first=11))
        assert len(target.log) == 10
        state.orders = Orders(Wish.STOPPED)
        wait_until(lambda: coordinator.snapshot().status is Status.STOPPED, what="stopped")
        assert len(target.log) == 10
        state.orders = Orders(Wish.RUNNING)
        wait_until(lambda: len(target.log) == 11, what="the event after resuming")


@pytest.mark.case("A4", "B4", "D3")
def test_a_halt_is_recorded_after_the_lanes_are_quiet_and_the_event_is_applied_after_the_fix() -> None:
    """Once the halt is recorded nothing commits; the first cause is kept; stop then start leaves it."""
    broken = threading.Event()
    broken.set()

    def fault(stage: str, batch: MemoryBatch) -> None:
        if stage == "settle" and broken.is_set() and any(write.obj[1] == 3 for write in batch.writes):
            raise StoreError(FailureKind.STRUCTURAL, "commit:42703 (undefined_column)")

    source, target, state = memory_world(*events(*"abcdefgh"), fault=fault)
    with Running(make_projection(insert_position, source, target, parallelism=4), state) as coordinator:
        wait_until(lambda: coordinator.snapshot().status is Status.HALTED, what="halted")
        applied, epoch = len(target.log), state.epoch
        assert state.orders.halt_label == "commit:42703 (undefined_column)"
        source.append(*events("a", first=9))
        assert (len(target.log), state.epoch) == (applied, epoch)
        broken.clear()
        state.orders = Orders(Wish.RUNNING)
        wait_until(lambda: len(target.log) == 9, what="everything, the halted event included")

    assert sorted(write.obj[1] for write in target.log) == list(range(1, 10))
    assert not target.letters


def test_a_lost_lease_ends_the_term_and_a_new_one_begins() -> None:
    """Another epoch appears: the term closes, and after taking the segment again nothing is applied twice."""
    source, target, state = memory_world(*streams(10))
    with Running(make_projection(insert_position, source, target), state):
        wait_until(lambda: len(target.log) == 10, what="the first ten")
        with state.lock, target.lock:
            state.epoch += 1
            target.epochs[1] = state.epoch
        source.append(*streams(30)[10:])
        wait_until(lambda: len(target.log) == 30, what="the rest")

    assert len({write.obj for write in target.log}) == 30


def test_an_outage_of_source_and_ledger_is_waited_for() -> None:
    """Connection errors of either repeat with backoff; the projection recovers in the same process."""
    source, target, state = memory_world(*streams(10))
    with Running(make_projection(insert_position, source, target), state):
        wait_until(lambda: len(target.log) == 10, what="the first ten")
        source.fail_with(ConnectionError("gone"), ConnectionError("gone"))
        state.failures += [ConnectionError("down"), ConnectionError("down")]
        source.append(*streams(20)[10:])
        wait_until(lambda: len(target.log) == 20, what="the rest after the outage")

    assert not target.letters
    assert len({write.obj for write in target.log}) == 20


@pytest.mark.case("D3")
@pytest.mark.parametrize("arrives", [True, False], ids=["answer-lost", "request-lost"])
def test_a_halt_is_told_once_although_the_database_fails_while_it_is_recorded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, *, arrives: bool
) -> None:
    """The row and the signal agree: whoever records a halt tells it, whether the answer to its recording came or not."""
    record, lost = MemoryLedger.halt, iter([ConnectionError("cut")])

    def fragile(ledger: MemoryLedger, *args: Any) -> Any:
        failure = next(lost, None)
        lease = record(ledger, *args) if arrives or failure is None else None
        if failure is not None:
            raise failure
        return lease

    monkeypatch.setattr(MemoryLedger, "halt", fragile)
    source, target, state = memory_world(*streams(3))
    source.fail_with(RuntimeError("behind its checkpoint"), RuntimeError("behind its checkpoint"))
    halts: list[str] = []
    told = threading.Event()

    def receive(reason: str, **_: Any) -> None:
        halts.append(reason)
        told.set()

    signals.projection_halted.connect(receive, weak=False)
    try:
        with Running(make_projection(insert_position, source, target), state) as coordinator:
            assert told.wait(10)
            assert coordinator.snapshot().status is Status.HALTED
    finally:
        signals.projection_halted.disconnect(receive)

    assert state.orders.halt_cause in halts
    assert len(halts) == 1
    assert caplog.text.count(" halted: ") == 1


def test_pause_and_resume_are_told_although_the_heartbeats_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """What happened is told by signals, whether or not the tables could be told at that moment."""
    told: list[str] = []
    beat, out_of_reach = MemoryLedger.heartbeat, threading.Event()

    def fragile(ledger: MemoryLedger, *args: Any) -> bool:
        if out_of_reach.is_set():
            raise ConnectionError("gone")
        return beat(ledger, *args)

    def paused(**_: Any) -> None:
        told.append("paused")

    def resumed(**_: Any) -> None:
        told.append("resumed")

    monkeypatch.setattr(MemoryLedger, "heartbeat", fragile)
    source, target, state = memory_world(*streams(3))
    signals.projection_paused.connect(paused)
    signals.projection_resumed.connect(resumed)
    with Running(make_projection(insert_position, source, target), state, settings=CALM) as coordinator:
        wait_until(lambda: len(target.log) == 3, what="the first three")
        out_of_reach.set()
        state.orders = Orders(Wish.PAUSED)
        wait_until(lambda: coordinator.snapshot().status is Status.PAUSED, what="paused")
        wait_until(lambda: told, what="the first signal")
        state.orders = Orders(Wish.RUNNING)
        wait_until(lambda: coordinator.snapshot().status is Status.RUNNING, what="running again")
        wait_until(lambda: len(told) == 2, what="the second signal")

    assert told == ["paused", "resumed"]


@pytest.mark.case("D4")
def test_a_process_told_to_leave_shows_that_it_drains() -> None:
    """From the moment it is told, not from the next heartbeat: the row says *draining* while a handler is waited for."""
    reached, release = threading.Event(), threading.Event()

    def handler(data: Any, meta: Any) -> Insert:
        reached.set()
        assert release.wait(10)
        return insert_position(data, meta)

    source, target, state = memory_world(*events("a"))
    with Running(make_projection(handler, source, target), state, settings=CALM) as coordinator:
        assert reached.wait(10)
        wait_until(lambda: state.progress and state.progress.status is Status.RUNNING, what="the row says running")
        coordinator.stop()
        wait_until(lambda: state.progress and state.progress.status is Status.DRAINING, what="the row says draining")
        assert not coordinator.ended.is_set()
        release.set()

    assert len(target.log) == 1


@pytest.mark.case("D5")
def test_a_handler_late_after_a_stop_wish_commits_nothing_any_more(caplog: pytest.LogCaptureFixture) -> None:
    """*Stopped* is a promise: what did not come back in time is refused, and a start handles its event afresh."""
    begun, release = threading.Event(), threading.Event()
    calls: list[int] = []

    def handler(data: Any, meta: Any) -> Insert:
        calls.append(meta.position)
        if len(calls) == 1:
            begun.set()
            assert release.wait(20)
        return insert_position(data, meta)

    source, target, state = memory_world(*streams(1))
    projection = make_projection(handler, source, target, parallelism=1)
    with Running(projection, state, settings=replace(FAST, drain_timeout_s=0.1)) as coordinator:
        assert begun.wait(10)
        straggler = next(
            thread for thread in threading.enumerate() if thread.name == f"scriba {projection.identity} lane-0"
        )
        epoch = state.epoch
        state.orders = Orders(Wish.STOPPED)
        wait_until(lambda: coordinator.snapshot().status is Status.STOPPED, what="stopped")
        assert state.epoch > epoch
        release.set()
        straggler.join(10)
        assert not target.log
        state.orders = Orders(Wish.RUNNING)
        wait_until(lambda: state.resume.watermark == 1, what="the event, handled afresh")

    assert len(target.log) == 1
    assert len(calls) == 2
    assert "a handler that did not come back must not commit any more" in caplog.text
    assert "another process may own it now" not in caplog.text


@pytest.mark.parametrize("where", ["leave", "lane", "lease-watch", "listen"])
def test_whatever_fails_a_coordinator_ends_and_holds_no_lease(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """A process that runs other projections lives on: it must neither wait for this one nor keep its segment."""
    source, target, state = memory_world(*streams(3))
    projection = make_projection(insert_position, source, target)
    start = threading.Thread.start

    def no_more(thread: threading.Thread) -> None:
        if f"{projection.identity} {where}" in thread.name:
            raise RuntimeError("can't start new thread")
        start(thread)

    def broken(*_: Any) -> Any:
        raise RuntimeError("no way")

    monkeypatch.setattr(threading.Thread, "start", no_more)
    if where == "leave":
        monkeypatch.setattr("scriba.engine.reader.Reader.leave", broken)
    running = Running(projection, state, **({"listen": broken} if where == "listen" else {}))
    coordinator = running.coordinator
    running.thread = threading.Thread(target=_quietly(coordinator.run, projection.identity), daemon=True)
    with running:
        if where == "leave":
            wait_until(lambda: len(target.log) == 3, what="all events")
            coordinator.stop()
        assert coordinator.ended.wait(10)

    assert coordinator.outcome is not None
    assert coordinator.outcome.code == 1
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if name.startswith(f"scriba {projection.identity} ")]


def test_a_heartbeat_that_can_never_get_through_ends_the_coordinator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Taking the segment again would only fail again, at once and for ever: the error is raised instead."""
    monkeypatch.setattr(MemoryLedger, "heartbeat", _forbidden)
    source, target, state = memory_world(*streams(3))
    running = Running(make_projection(insert_position, source, target), state)
    coordinator = running.coordinator
    running.thread = threading.Thread(target=_quietly(coordinator.run, coordinator.projection.identity), daemon=True)
    with running:
        assert coordinator.ended.wait(10)

    assert coordinator.outcome is not None
    assert coordinator.outcome.code == 1
    assert "permission denied" in coordinator.outcome.reason
    assert state.epoch == 1


def _forbidden(*_: Any) -> bool:
    raise RuntimeError("permission denied for table scriba_segments")


def test_a_source_that_cannot_be_read_correctly_halts() -> None:
    """An error that will not go away is a halt with its message, not a loop."""
    source, target, state = memory_world(*streams(3))
    source.fail_with(RuntimeError("the table is behind its checkpoint"))
    with Running(make_projection(insert_position, source, target), state) as coordinator:
        wait_until(lambda: coordinator.snapshot().status is Status.HALTED, what="halted")

    assert "behind its checkpoint" in state.orders.halt_cause


def test_event_types_are_filtered_and_still_move_the_watermark() -> None:
    """A source that cannot filter is filtered by the reader; filtered events are not delivered."""
    found = [event._replace(type="Wanted" if event.position % 2 else "Other") for event in streams(10)]
    source, target, state = memory_world(*found)
    projection = make_projection(insert_position, source, target, event_types=frozenset({"Wanted"}))
    with Running(projection, state, until_caught_up=True) as coordinator:
        assert coordinator.ended.wait(10)

    assert sorted(write.obj[1] for write in target.log) == [1, 3, 5, 7, 9]
    assert state.resume.watermark == 10
    assert conserved(target, 5)


@pytest.mark.case("A22")
def test_the_first_position_is_durable_before_anything_is_handed_out() -> None:
    """A crash before the first watermark must not resolve the start a second time."""
    source, target, state = memory_world(*streams(5))
    seen: list[int | None] = []

    def handler(data: Any, meta: Any) -> Insert:
        seen.append(state.resume.watermark)
        return insert_position(data, meta)

    with Running(make_projection(handler, source, target), state, until_caught_up=True) as coordinator:
        assert coordinator.ended.wait(10)

    assert None not in seen


def test_nothing_is_handed_out_above_the_durable_ceiling() -> None:
    """The ceiling is raised before events beyond it are handed out: above it, a successor looks nothing up."""
    source, target, state = memory_world(*streams(50))
    seen: list[tuple[int, int]] = []

    def handler(data: Any, meta: Any) -> Insert:
        seen.append((meta.position, state.resume.ceiling))
        return insert_position(data, meta)

    with Running(make_projection(handler, source, target), state, until_caught_up=True) as coordinator:
        assert coordinator.ended.wait(10)

    assert len(seen) == 50
    assert all(position <= ceiling for position, ceiling in seen)


@pytest.mark.case("A10")
@pytest.mark.parametrize("seed", range(8))
def test_a_connection_that_breaks_while_a_page_is_routed_brings_nothing_twice(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some lanes have the page's events already when the page is read again: nothing is handled a second time."""
    monkeypatch.setattr("scriba.engine.reader.HEAD_EVERY_S", 0.0)
    source, target, state = memory_world(*streams(60))
    chance, subscribe = random.Random(seed), source.subscribe

    def fragile(identity: Any, shards: Any) -> Any:
        subscription = subscribe(identity, shards)
        head = subscription.head

        def look(partition: str = "") -> Any:
            if chance.random() < 0.3:
                raise ConnectionError("broken in the middle of a page")
            return head(partition)

        subscription.head = look  # type: ignore[method-assign]
        return subscription

    source.subscribe = fragile  # type: ignore[method-assign]
    monkeypatch.setattr("scriba.engine.reader.BACKOFF_S", (0.0,))
    with Running(make_projection(insert_position, source, target, parallelism=4), state):
        wait_until(lambda: len(target.log) >= 60, what="all events")
        source.append(*streams(120)[60:])
        wait_until(lambda: state.resume.watermark == 120, what="the watermark")

    assert sorted(write.obj[1] for write in target.log) == list(range(1, 121))
    assert conserved(target, 120)


@pytest.mark.case("D5")
def test_a_handler_that_does_not_return_is_left_behind_and_named() -> None:
    """After the drain timeout the process may leave; the outcome is not 0 and says which thread is busy."""
    begun, release = threading.Event(), threading.Event()

    def handler(data: Any, meta: Any) -> Insert:
        begun.set()
        release.wait(20)
        return insert_position(data, meta)

    source, target, state = memory_world(*streams(1))
    running = Running(make_projection(handler, source, target, parallelism=1), state, drain_timeout_s=0.2)
    with running as coordinator:
        assert begun.wait(10)
        coordinator.stop()
        assert coordinator.ended.wait(10)
    release.set()

    assert coordinator.outcome is not None
    assert coordinator.outcome.code == 1
    assert "lane-0" in coordinator.outcome.reason


@pytest.mark.case("A12")
def test_a_halt_of_one_projection_leaves_the_other_alone() -> None:
    """Cursors, letters, circuit and halt are separate per identity."""
    source, good, good_state = memory_world(*streams(10))
    _, bad, bad_state = memory_world()

    def broken(data: Any, meta: Any) -> Insert:
        return insert_position(data, meta)

    def fault(stage: str, batch: MemoryBatch) -> None:
        if stage == "settle":
            raise StoreError(FailureKind.STRUCTURAL, "commit:42P01")

    bad.fault = fault
    with (
        Running(make_projection(broken, source, bad), bad_state) as halted,
        Running(make_projection(insert_position, source, good), good_state),
    ):
        wait_until(lambda: halted.snapshot().status is Status.HALTED, what="one halted")
        wait_until(lambda: good_state.resume.watermark == 10, what="the other caught up")

    assert len(good.log) == 10
    assert bad.log == []


def test_the_source_learns_only_what_is_saved() -> None:
    """ack never runs ahead of the durable watermark."""
    source, target, state = memory_world(*streams(50))
    with Running(make_projection(insert_position, source, target), state):
        wait_until(lambda: bool(source.acked) and source.acked[-1] == 50, what="the last ack")

    assert all(acked in state.watermarks for acked in source.acked)


def test_rows_and_signals_agree() -> None:
    """Skips, letters and batches are announced after the commit, once each."""
    got: list[tuple[str, Any]] = []

    def record(name: str) -> Any:
        def receiver(sender: Any, **fields: Any) -> None:
            got.append((name, fields))

        return receiver

    def handler(data: Any, meta: Any) -> Any:
        if meta.position == 2:
            raise ValueError("bad")
        return Skip() if meta.position == 3 else insert_position(data, meta)

    names = ("event_skipped", "dead_lettered", "batch_stopped", "projection_started", "event_exception")
    receivers = {name: record(name) for name in names}
    for name, receiver in receivers.items():
        getattr(signals, name).connect(receiver)
    try:
        source, target, state = memory_world(*events("a", "b", "c"))
        with Running(make_projection(handler, source, target), state, until_caught_up=True) as coordinator:
            assert coordinator.ended.wait(10)
    finally:
        for name, receiver in receivers.items():
            getattr(signals, name).disconnect(receiver)

    by_name = {name: [fields for got_name, fields in got if got_name == name] for name in names}
    assert [fields["position"] for fields in by_name["event_skipped"]] == [3]
    assert [(fields["position"], fields["error_kind"]) for fields in by_name["dead_lettered"]] == [(2, "ValueError")]
    assert sum(fields["batch_size"] for fields in by_name["batch_stopped"]) == 3
    assert len(by_name["projection_started"]) == 1
    assert len(by_name["event_exception"]) == 1


def test_a_transition_that_is_not_in_the_table_is_a_bug() -> None:
    """The life is a table: a step that is not in it raises instead of being recorded."""
    source, target, state = memory_world()
    del state
    coordinator = Coordinator(
        make_projection(insert_position, source, target), open_ledger=lambda: None, settings=None, owner="x",  # type: ignore[arg-type, return-value]
        drain_timeout_s=1.0,
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="no transition"):
        coordinator._become(Status.RUNNING)


@pytest.mark.case("A4", "D5")
def test_a_handler_late_at_a_halt_that_could_not_be_recorded_commits_nothing_beside_the_next_term(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The epoch is raised before anybody goes on, although what should have raised it met an outage."""
    record, lost = MemoryLedger.halt, iter([ConnectionError("cut")])

    def fragile(ledger: MemoryLedger, *args: Any) -> Any:
        failure = next(lost, None)
        if failure is not None:
            raise failure
        return record(ledger, *args)

    monkeypatch.setattr(MemoryLedger, "halt", fragile)
    begun, again, release = threading.Event(), threading.Event(), threading.Event()
    epochs: list[int] = []

    def handler(data: Any, meta: Any) -> Insert:
        epochs.append(state.epoch)
        if len(epochs) > 1:
            again.set()
            return insert_position(data, meta)
        begun.set()
        assert release.wait(20)
        return insert_position(data, meta)

    source, target, state = memory_world(*streams(1))
    projection = make_projection(handler, source, target, parallelism=1)
    with Running(projection, state, settings=replace(FAST, drain_timeout_s=0.1)) as coordinator:
        assert begun.wait(10)
        source.fail_with(RuntimeError("behind its checkpoint"))
        assert again.wait(10)
        release.set()
        wait_until(lambda: coordinator.snapshot().watermark == 1, what="the event, handled afresh")

    assert epochs[1] > epochs[0]
    assert len(target.log) == 1


@pytest.mark.case("D8")
def test_a_paused_projection_whose_source_was_cut_carries_wishes_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Paused is not gone: the source is looked after, and a letter is replayed with the event that it has."""
    is_bad, cut = threading.Event(), threading.Event()
    is_bad.set()
    head = MemorySubscription.head

    def fragile(subscription: MemorySubscription, partition: str = "") -> Any:
        if cut.is_set():
            cut.clear()
            raise ConnectionError("gone")
        return head(subscription, partition)

    def handler(data: Any, meta: Any) -> Insert:
        if is_bad.is_set():
            raise LookupError
        return insert_position(data, meta)

    monkeypatch.setattr("scriba.engine.reader.HEAD_EVERY_S", 0.02)
    monkeypatch.setattr(MemorySubscription, "head", fragile)
    source, target, state = memory_world(*streams(1))
    with Running(make_projection(handler, source, target), state) as coordinator:
        wait_until(lambda: target.letters, what="the letter")
        state.orders = Orders(Wish.PAUSED)
        wait_until(lambda: coordinator.snapshot().status is Status.PAUSED, what="paused")
        cut.set()
        wait_until(lambda: not cut.is_set(), what="the cut")
        is_bad.clear()
        target.wish(1)
        wait_until(lambda: target.letters[1].status == "replayed", what="the replay")
        wait_until(lambda: not coordinator.snapshot().in_flight, what="quiet")
        assert coordinator.snapshot().status is Status.PAUSED

    assert len(target.log) == 1
