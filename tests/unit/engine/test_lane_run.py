"""One lane settles its events in order, exactly once, whatever fails. On memory doubles, without threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from scriba.engine.circuit import Circuit
from scriba.engine.letters import describe
from scriba.engine.pipeline import BACKOFF_S, BOUNDED_REPEATS, Halt
from scriba.engine.reader import keyed
from scriba.event import Event
from scriba.exceptions import PermanentFailure, RetryAfter
from scriba.protocols import FailureKind, FenceLost
from scriba.results import Done, Fail, Insert, Skip
from scriba.retry import RetryPolicy
from scriba.testing.memory import MemoryBatch, MemoryTarget, StoreError
from tests.support.engine import conserved, events, insert_position, lane_run, make_projection, routed, settle_all

S = "stream"


def world(handler: Callable[..., Any] = insert_position, **options: Any) -> tuple[MemoryTarget, Any]:
    target = MemoryTarget(fault=options.pop("fault", lambda stage, batch: None))
    return target, make_projection(handler, object(), target, **options)


def positions(target: MemoryTarget) -> list[int]:
    return [write.obj[1] for write in target.log]


def test_events_are_applied_in_order_and_the_cursor_follows() -> None:
    """Ten events of one stream in one batch: ten writes, one cursor at the last position."""
    target, projection = world()
    settle_all(lane_run(projection), routed(projection, events(*[S] * 10)))

    assert positions(target) == list(range(1, 11))
    assert target.cursors == {S: 10}
    assert target.batches == 1
    assert conserved(target, 10)


@pytest.mark.case("B8")
def test_a_handler_that_fails_twice_is_called_three_times_and_committed_once() -> None:
    """What came before a failing event is committed first; the event waits for each retry outside a transaction."""
    calls: list[int] = []

    def handler(data: Any, meta: Any) -> Any:
        calls.append(meta.position)
        if meta.position == 2 and calls.count(2) < 3:
            raise ValueError("not yet")
        return insert_position(data, meta)

    target, projection = world(handler, retry=RetryPolicy())
    waits = settle_all(lane_run(projection), routed(projection, events(S, S, S)))

    assert positions(target) == [1, 2, 3]
    assert calls == [1, 2, 2, 2, 3]
    assert waits == [0.1, 1.0]
    assert not target.letters


@pytest.mark.case("B8")
def test_a_handler_that_always_raises_ends_in_one_letter_of_the_original_kind() -> None:
    """Retries exhausted: the letter keeps the exception's own kind and the number of attempts; the rest goes on."""

    def handler(data: Any, meta: Any) -> Any:
        if meta.position == 2:
            raise LookupError("no such customer")
        return insert_position(data, meta)

    target, projection = world(handler, retry=RetryPolicy())
    settle_all(lane_run(projection), routed(projection, events(S, S, S)))

    assert positions(target) == [1, 3]
    assert [(letter.error_kind, letter.attempts) for letter in target.letters.values()] == [("LookupError", 3)]
    assert target.cursors == {S: 3}
    assert conserved(target, 3)


@pytest.mark.case("B8")
@pytest.mark.parametrize("raised", [PermanentFailure("never"), ValueError("no retry")])
def test_without_retries_one_call_is_enough(raised: Exception) -> None:
    """`retry=False`, or PermanentFailure under any policy: one call, one letter, and the batch is not cut."""
    calls: list[int] = []

    def handler(data: Any, meta: Any) -> Any:
        calls.append(meta.position)
        if meta.position == 1:
            raise raised
        return insert_position(data, meta)

    retry = RetryPolicy() if isinstance(raised, PermanentFailure) else RetryPolicy.parse(value=False)
    target, projection = world(handler, retry=retry)
    waits = settle_all(lane_run(projection), routed(projection, events(S, S)))

    assert (calls, waits, target.batches) == ([1, 2], [], 1)
    assert list(target.letters) == [1]


def test_retry_after_chooses_the_wait() -> None:
    """RetryAfter(seconds) replaces the policy's wait and still counts as an attempt."""
    asked = iter([RetryAfter(7.5), RetryAfter(0.25)])

    def handler(data: Any, meta: Any) -> Any:
        for error in asked:
            raise error
        return insert_position(data, meta)

    target, projection = world(handler, retry=RetryPolicy())
    waits = settle_all(lane_run(projection), routed(projection, events(S)))

    assert waits == [7.5, 0.25]
    assert positions(target) == [1]


@pytest.mark.case("B2")
@pytest.mark.parametrize(
    "returned", [None, True, object(), ("insert", object()), (x for x in ()), [Skip()], [Insert(1), Fail("no")], "row"]
)
def test_a_return_that_is_no_result_is_a_letter_that_names_the_accepted_shapes(returned: Any) -> None:
    """A handler that falls off its end must never become a silent skip; its neighbours are applied."""

    def handler(data: Any, meta: Any) -> Any:
        return returned if meta.position == 2 else insert_position(data, meta)

    target, projection = world(handler, retry=RetryPolicy())
    settle_all(lane_run(projection), routed(projection, events(S, S, S)))

    assert positions(target) == [1, 3]
    (letter,) = target.letters.values()
    assert letter.error_kind == "invalid_return"
    assert "Insert(obj)" in letter.message
    assert "Skip()" in letter.message


def test_fail_is_retried_and_then_a_letter_of_kind_error() -> None:
    """Fail(reason) takes the way of an exception; the letter says the reason."""
    target, projection = world(lambda data, meta: Fail("credit limit"), retry=RetryPolicy())
    waits = settle_all(lane_run(projection), routed(projection, events(S)))

    (letter,) = target.letters.values()
    assert (letter.error_kind, letter.message, letter.attempts) == ("error", "credit limit", 3)
    assert waits == [0.1, 1.0]


def test_skips_move_the_cursor_and_done_counts_as_applied() -> None:
    """Every settled event moves its key's cursor: a redelivered skip must not be handled after later events."""
    target, projection = world(lambda data, meta: Skip() if meta.stream_id == "a" else Done())
    settle_all(lane_run(projection), routed(projection, events("a", "b", "a")))

    assert target.cursors == {"a": 3, "b": 2}
    assert (target.counters.applied, target.counters.skipped) == (1, 2)


@pytest.mark.case("A11")
@pytest.mark.parametrize("ceiling", [-1, 10])
def test_a_redelivered_event_is_skipped_as_dedup(ceiling: int) -> None:
    """What was settled before, in this run or an earlier one, is counted as dedup and not handled again."""
    target, projection = world()
    first = lane_run(projection, ceiling=-1)
    settle_all(first, routed(projection, events(S, "t", S)))
    second = first if ceiling == -1 else lane_run(projection, ceiling=ceiling)
    settle_all(second, routed(projection, events(S, "t", S, S)))

    assert positions(target) == [1, 2, 3, 4]
    assert (target.counters.skipped, target.counters.deduplicated) == (3, 3)
    assert conserved(target, 7)


def test_events_at_or_below_the_floor_are_settled_elsewhere() -> None:
    """An imported cursor: no look-up, no handler, counted as dedup."""
    target, projection = world()
    settle_all(lane_run(projection, floor=lambda: 2), routed(projection, events(S, S, S)))

    assert positions(target) == [3]
    assert target.counters.deduplicated == 2


@pytest.mark.case("A3", "B7")
@pytest.mark.parametrize("stage", ["begin", "add", "settle", "commit"])
def test_a_transient_error_repeats_the_batch_with_growing_waits(stage: str) -> None:
    """Nothing is dead-lettered and order is kept; the waits escalate and are capped."""
    failures = iter(range(8))

    def fault(at: str, batch: MemoryBatch) -> None:
        del batch
        if at == stage:
            for _ in failures:
                raise StoreError(FailureKind.TRANSIENT, "commit:40P01")

    target, projection = world(fault=fault)
    waits = settle_all(lane_run(projection), routed(projection, events(S, "t", S)))

    assert positions(target) == [1, 2, 3]
    assert waits == [*BACKOFF_S[1:], BACKOFF_S[-1]]
    assert not target.letters


@pytest.mark.case("A23")
def test_a_commit_whose_answer_was_lost_is_not_applied_again() -> None:
    """The batch had committed; repeated as part of a larger batch, only what is new is applied."""
    lost = iter([True])

    def fault(at: str, batch: MemoryBatch) -> None:
        if at == "answer" and next(lost, False):
            raise StoreError(FailureKind.TRANSIENT, "commit:08006")

    target, projection = world(fault=fault)
    run, items = lane_run(projection), routed(projection, events(S, "t", S, S))
    assert run.step(items[:2]).settled == 0
    settle_all(run, items)

    assert positions(target) == [1, 2, 3, 4]
    assert target.counters.deduplicated == 2


@pytest.mark.case("B3", "B10")
def test_integrity_errors_are_bisected_to_the_guilty() -> None:
    """k bad events among n cost O(k log n) trials; everybody else is applied, in order, in one transaction."""
    bad = {17, 40}
    trials: list[int] = []

    def fault(at: str, batch: MemoryBatch) -> None:
        if at == "trial":
            trials.append(1)
        if at in {"trial", "settle"} and any(write.obj[1] in bad for write in batch.writes):
            raise StoreError(FailureKind.INTEGRITY, "commit:23505 (unique)")

    target, projection = world(fault=fault)
    settle_all(lane_run(projection), routed(projection, events(*[S] * 64)))

    assert positions(target) == [n for n in range(1, 65) if n not in bad]
    assert {at: letter.error_kind for at, letter in target.letters.items()} == dict.fromkeys(
        bad, "commit:23505 (unique)"
    )
    assert target.batches == 1
    assert len(trials) <= 2 * 2 * 7
    assert conserved(target, 64)


@pytest.mark.case("B5")
def test_a_wipeout_halts_and_dead_letters_nothing() -> None:
    """Every attempted write of a batch failed: the schema no longer fits. No cursor moves."""

    def fault(at: str, batch: MemoryBatch) -> None:
        if at in {"trial", "settle"} and batch.writes:
            raise StoreError(FailureKind.INTEGRITY, "commit:23502 (not null)")

    target, projection = world(fault=fault)
    with pytest.raises(Halt, match="23502"):
        settle_all(lane_run(projection), routed(projection, events(S, S, "t")))

    assert (target.log, target.letters, target.cursors) == ([], {}, {})


@pytest.mark.case("B6")
@pytest.mark.parametrize(("between", "halts"), [("skip", True), ("nothing", True), ("success", False)])
def test_single_event_batches_halt_at_the_third_failure_in_a_row(between: str, *, halts: bool) -> None:
    """A success between resets the count; skips neither count nor reset."""

    def handler(data: Any, meta: Any) -> Any:
        return Skip() if meta.stream_id == "skip" else insert_position(data, meta)

    def fault(at: str, batch: MemoryBatch) -> None:
        if at in {"trial", "settle"} and any(write.obj[0] == "bad" for write in batch.writes):
            raise StoreError(FailureKind.INTEGRITY, "commit:23502 (not null)")

    target, projection = world(handler, fault=fault, batch_size=1)
    middle = {"skip": ["skip"], "nothing": [], "success": ["good"]}[between]
    items = routed(projection, events("bad", *middle, "bad", *middle, "bad"))
    run = lane_run(projection)
    if halts:
        with pytest.raises(Halt):
            settle_all(run, items)
        assert len(target.letters) == 2
    else:
        settle_all(run, items)
        assert len(target.letters) == 3


@pytest.mark.case("B4")
def test_a_structural_error_halts_at_once() -> None:
    """Zero rows, zero letters, cursors unmoved; the cause is the error's own words."""

    def fault(at: str, batch: MemoryBatch) -> None:
        if at == "settle":
            raise StoreError(FailureKind.STRUCTURAL, "commit:42703 (undefined_column)")

    target, projection = world(fault=fault)
    with pytest.raises(Halt) as halted:
        settle_all(lane_run(projection), routed(projection, events(S, S)))

    assert halted.value.label == "commit:42703 (undefined_column)"
    assert (target.log, target.letters, target.cursors) == ([], {}, {})


def test_an_error_that_repeats_for_one_slow_event_is_bounded_and_then_its_fault() -> None:
    """57014 and its like: the batch is repeated, then tried singly, then the slow event alone is given up on."""

    def fault(at: str, batch: MemoryBatch) -> None:
        if at == "settle" and any(write.obj[1] == 2 for write in batch.writes):
            raise StoreError(FailureKind.TRANSIENT, "commit:57014 (query_canceled)", bounded=True)

    target, projection = world(fault=fault)
    waits = settle_all(lane_run(projection), routed(projection, events(S, S, S)))

    assert positions(target) == [1, 3]
    assert [letter.error_kind for letter in target.letters.values()] == ["commit:57014 (query_canceled)"]
    assert len(waits) <= 2 * BOUNDED_REPEATS


@pytest.mark.case("B7")
def test_a_wait_for_the_fence_is_no_events_fault_however_long_it_takes() -> None:
    """A migration holds the segment's table, and lock_timeout ends each try: no event was so much as looked at."""
    locked = iter(range(5 * BOUNDED_REPEATS))

    def fault(at: str, batch: MemoryBatch) -> None:
        if at == "begin" and next(locked, None) is not None:
            raise StoreError(FailureKind.TRANSIENT, "commit:55P03 (lock_not_available)", bounded=True)

    target, projection = world(fault=fault)
    waits = settle_all(lane_run(projection), routed(projection, events(S, S, S)))

    assert positions(target) == [1, 2, 3]
    assert not target.letters
    assert waits[-1] == BACKOFF_S[-1]


@pytest.mark.case("B7")
def test_an_event_whose_letter_cannot_be_written_either_is_not_to_blame() -> None:
    """A lock on the tables of cursors fails whatever is settled: once it is gone, the event is handled like any other."""
    locked = iter(range(2 * BOUNDED_REPEATS))

    def fault(at: str, batch: MemoryBatch) -> None:
        if at == "settle" and next(locked, None) is not None:
            raise StoreError(FailureKind.TRANSIENT, "commit:55P03 (lock_not_available)", bounded=True)

    target, projection = world(fault=fault)
    settle_all(lane_run(projection), routed(projection, events(S)))

    assert positions(target) == [1]
    assert not target.letters


def test_park_holds_the_rest_of_a_key_and_lets_others_flow() -> None:
    """Later events of the key are stored behind the letter, in this batch and in later ones."""

    def handler(data: Any, meta: Any) -> Any:
        if meta.position == 1:
            raise ValueError("bad")
        return insert_position(data, meta)

    target, projection = world(handler, on_failure="park", batch_size=3)
    settle_all(lane_run(projection), routed(projection, events("a", "b", "a", "b", "a")))

    assert positions(target) == [2, 4]
    assert {at: letter.status for at, letter in target.letters.items()} == {1: "open", 3: "parked", 5: "parked"}
    assert target.cursors == {"a": 5, "b": 4}
    assert conserved(target, 5)


def test_park_reaches_into_the_verdict_pass() -> None:
    """An integrity error found by bisection parks the later events of its key in the same pass."""

    def fault(at: str, batch: MemoryBatch) -> None:
        if at in {"trial", "settle"} and any(write.obj[1] == 1 for write in batch.writes):
            raise StoreError(FailureKind.INTEGRITY, "commit:23505 (unique)")

    target, projection = world(fault=fault, on_failure="park")
    settle_all(lane_run(projection), routed(projection, events("a", "b", "a", "b")))

    assert positions(target) == [2, 4]
    assert {at: letter.status for at, letter in target.letters.items()} == {1: "open", 3: "parked"}


@pytest.mark.case("B14")
def test_a_half_that_is_undone_parks_nobody() -> None:
    """A letter of an undone half never was: its event is tried again and is the open one, not parked behind nothing."""

    def handler(data: Any, meta: Any) -> Any:
        if meta.stream_id == "a":
            raise PermanentFailure("told to fail")
        return insert_position(data, meta)

    def fault(at: str, batch: MemoryBatch) -> None:
        if at in {"trial", "settle"} and any(write.obj[1] == 2 for write in batch.writes):
            raise StoreError(FailureKind.INTEGRITY, "commit:23505 (unique)")

    target, projection = world(handler, fault=fault, on_failure="park")
    settle_all(lane_run(projection), routed(projection, events("a", "b", "a", "c")))

    assert {at: letter.status for at, letter in target.letters.items()} == {1: "open", 2: "open", 3: "parked"}
    assert positions(target) == [4]


def test_halt_on_failure_commits_what_came_before_and_skips_nothing() -> None:
    """`on_failure="halt"`: no letter, the cursor stands before the event, which is tried again after the fix."""

    def handler(data: Any, meta: Any) -> Any:
        if meta.position == 2:
            raise ValueError("look at me")
        return insert_position(data, meta)

    target, projection = world(handler, on_failure="halt")
    with pytest.raises(Halt, match="look at me"):
        settle_all(lane_run(projection), routed(projection, events(S, S, S)))

    assert positions(target) == [1]
    assert (target.letters, target.cursors) == ({}, {S: 1})


def test_a_payload_that_cannot_be_decoded_is_one_events_letter() -> None:
    """decode:<class>, not retried, neighbours applied."""

    class Broken:
        def decode(self, event: Event) -> Any:
            raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")

        def stored(self, event: Event) -> tuple[Any, Any]:
            return b"\xff", {}

    found = events(S, S, S)
    found[1] = found[1]._replace(codec=Broken())
    target, projection = world(retry=RetryPolicy())
    waits = settle_all(lane_run(projection), routed(projection, found))

    assert positions(target) == [1, 3]
    assert [letter.error_kind for letter in target.letters.values()] == ["decode:UnicodeDecodeError"]
    assert waits == []


@pytest.mark.case("A21")
def test_a_payload_that_partition_by_cannot_decode_is_a_decoding_letter() -> None:
    """The reader decodes for `partition_by`; what fails there is named and settled as if the worker had met it."""

    class Broken:
        def decode(self, event: Event) -> Any:
            raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")

        def stored(self, event: Event) -> tuple[Any, Any]:
            return b"\xff", {}

    found = events(S, S, S)
    found[1] = found[1]._replace(codec=Broken())
    target, projection = world(retry=RetryPolicy(), partition_by=lambda event: str(event.data["n"] % 2))
    waits = settle_all(lane_run(projection), routed(projection, found))

    assert positions(target) == [1, 3]
    assert [letter.error_kind for letter in target.letters.values()] == ["decode:UnicodeDecodeError"]
    assert waits == []


def test_a_wrong_key_that_breaks_every_payload_halts() -> None:
    """Decode failures count as failed attempts: when all of a batch fail, it is no bad event."""

    class Broken:
        def decode(self, event: Event) -> Any:
            raise ValueError("bad decrypt")

        def stored(self, event: Event) -> tuple[Any, Any]:
            return b"", {}

    target, projection = world()
    with pytest.raises(Halt):
        settle_all(lane_run(projection), routed(projection, [e._replace(codec=Broken()) for e in events(S, S)]))

    assert not target.letters


@pytest.mark.case("B17")
@pytest.mark.parametrize("raised", [SystemExit, GeneratorExit, asyncio.CancelledError])
def test_a_handler_that_tries_to_leave_is_one_events_fault(raised: type[BaseException]) -> None:
    """A thread is not a process to leave: no endless loop, one letter of that kind."""

    def handler(data: Any, meta: Any) -> Any:
        if meta.position == 1:
            raise raised
        return insert_position(data, meta)

    target, projection = world(handler, retry=RetryPolicy())
    settle_all(lane_run(projection), routed(projection, events(S, S)))

    assert positions(target) == [2]
    assert [letter.error_kind for letter in target.letters.values()] == [describe(raised()).kind]


@pytest.mark.case("B17")
def test_a_codec_that_tries_to_leave_is_one_events_fault() -> None:
    """Decoding is code of the team, too, and runs in the same thread."""

    class Leaving:
        def decode(self, event: Event) -> Any:
            raise asyncio.CancelledError

        def stored(self, event: Event) -> tuple[Any, Any]:
            return event.raw, {}

    target, projection = world(retry=RetryPolicy())
    first, second = events(S, S)
    settle_all(lane_run(projection), routed(projection, [first._replace(codec=Leaving()), second]))

    assert positions(target) == [2]
    assert [letter.error_kind for letter in target.letters.values()] == [describe(asyncio.CancelledError()).kind]


@pytest.mark.case("B17")
def test_a_partition_by_that_tries_to_leave_is_one_events_fault() -> None:
    """It runs in the reader's thread, on which all lanes depend."""

    def leave(event: Event) -> str:
        if event.position == 1:
            raise SystemExit
        return event.stream_id

    target, projection = world(partition_by=leave, retry=RetryPolicy())
    settle_all(lane_run(projection), [keyed(projection, event) for event in events(S, S)])

    assert positions(target) == [2]
    assert [letter.error_kind for letter in target.letters.values()] == ["SystemExit"]


@pytest.mark.case("A24")
def test_a_lost_fence_ends_the_lane() -> None:
    """Nothing of the batch commits under another epoch, and nothing is tried again."""
    target, projection = world()
    run = lane_run(projection)
    target.epochs[1] = 7
    with pytest.raises(FenceLost):
        run.step(routed(projection, events(S)))

    assert target.log == []


def test_stopping_cuts_the_batch_after_the_event_at_hand() -> None:
    """A drain need not wait for a thousand slow handlers: what was handled commits, the rest was never begun."""
    stopping = iter([False, True])
    target, projection = world()
    run = lane_run(projection, stopping=lambda: next(stopping))
    step = run.step(routed(projection, events(S, S, S)))

    assert step.settled == 2
    assert positions(target) == [1, 2]
    assert target.cursors == {S: 2}


def test_the_circuit_is_shared_by_lanes() -> None:
    """Three lone failures in a row halt, in whichever lanes they happen."""
    circuit = Circuit()
    assert not circuit.is_wipeout(1, 1)
    circuit.committed(1, 1)
    circuit.committed(1, 1)
    assert circuit.is_wipeout(1, 1)
    circuit.committed(5, 1)
    assert not circuit.is_wipeout(1, 1)
    assert circuit.is_wipeout(2, 2)
    assert not circuit.is_wipeout(3, 2)
