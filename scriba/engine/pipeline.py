"""★ An event's whole life, top to bottom: dedup, handle, commit, settle. The other half is ``targets/orm.py``.

A :class:`LaneRun` settles the events of one lane, a batch at a time, in order. It starts no thread, opens no
transaction of its own and holds no lock: everything durable happens inside ``writer.batch()``, and what it remembers
changes only after that block has been left without an error.

What always holds:

* every event of a batch is settled exactly one way, and its key's cursor moves with it, skips included;
* a failing event never holds a transaction open while it waits: what came before it is committed first;
* an error of the database is never blamed on an event before a verdict pass has found it guilty.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from scriba import signals
from scriba.engine.handling import DecodeFailed, FailReturned, HandlerCall, HandlerExited, free_locals, plain_text
from scriba.engine.letters import letter_for
from scriba.engine.outcomes import Outcomes
from scriba.engine.tally import Halt, Tally
from scriba.engine.telemetry import send
from scriba.event import SkipEvent
from scriba.exceptions import PermanentFailure, RetryAfter
from scriba.protocols import CursorRefused, Failure, FailureKind, FenceLost, Settlement, WriteFailed
from scriba.results import Fail

if TYPE_CHECKING:
    from scriba.engine.circuit import Circuit
    from scriba.engine.lanes import Routed
    from scriba.protocols import Batch, Lease, Writer
    from scriba.registry import Projection

__all__ = ["BACKOFF_S", "Halt", "LaneRun", "Step"]

logger = logging.getLogger("scriba")

#: Waits between repeats of a batch after transient errors; the last one goes on for ever.
BACKOFF_S = (0.0, 0.1, 0.5, 1.0, 5.0, 15.0, 30.0)
#: Repeats of a *bounded* transient error (one slow event repeats it for ever) before events are tried singly,
#: and before a single event is given up on.
BOUNDED_REPEATS = 4
#: Cursors remembered per lane while positions may still be repeats.
CURSORS_KEPT = 20_000


class Step(NamedTuple):
    """What one call of :meth:`LaneRun.step` did: events settled from the front, and how long to wait now."""

    settled: int
    wait_s: float = 0.0
    problem: str = ""


class LaneRun:
    """The events of one lane, settled in order on one writer. Used by one thread."""

    def __init__(  # noqa: PLR0913 - each is a collaborator or a fact of this ownership
        self,
        projection: Projection,
        writer: Writer,
        lease: Lease,
        lane: int,
        circuit: Circuit,
        *,
        ceiling: int,
        floor: Callable[[], int] = lambda: -1,
        stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        self._projection = projection
        self._identity = projection.identity
        self._writer = writer
        self._lease = lease
        self._lane = lane
        self._circuit = circuit
        self._floor = floor
        self._stopping = stopping
        self._lookup_below = ceiling  #: at or below it an event may have been settled before
        self._cursors: dict[str, int] = {}
        self._failed: tuple[int, int] = (-1, 0)  #: (position, failed attempts) of the event that waits for a retry
        self._repeats = 0
        self._bounded_repeats = 0
        self._singly = 0  #: so many events are tried one by one, to find the slow one
        self._judging = 0  #: so many events get a verdict pass next
        self._is_theirs = False  #: the last try came as far as its events: before that, no failure is one's fault
        self._blamed: tuple[int, Failure, BaseException] | None = None
        self._outcomes = Outcomes(self._identity, lane)
        self.last_commit = time.monotonic()

    # --- the main function ------------------------------------------------------------------------------

    def step(self, items: Sequence[Routed]) -> Step:
        """Try one batch of `items`; settle a prefix of them, or say how long to wait before the next try.

        Raises :class:`Halt` and :class:`~scriba.protocols.FenceLost`, after which nothing more may be tried.
        """
        batch = items[: self._batch_limit(len(items))]
        started = time.monotonic()
        try:
            tally = self._commit(batch)
        except (Halt, FenceLost):
            raise
        except CursorRefused as error:
            free_locals(error)
            self._distrust(batch)
            return self._repeat(Failure(FailureKind.TRANSIENT, "cursor moved elsewhere"), None, batch)
        except Exception as error:  # noqa: BLE001 - whatever the database said is classified, never swallowed
            step = self._after_failure(*self._failure_of(error), batch)
            free_locals(error)
            return step
        self._remember(batch, tally)
        self._outcomes.announce(tally, time.monotonic() - started)
        while tally.letters:  # each has a traceback, whose frames have the tally
            free_locals(tally.letters.pop().cause)
        if tally.halt is not None:
            raise tally.halt
        return Step(tally.settled, tally.retry[1] if tally.retry else 0.0)

    def _batch_limit(self, available: int) -> int:
        if self._singly or self._blamed:
            return 1
        return min(available, self._judging or self._projection.batch_size)

    def _commit(self, items: Sequence[Routed]) -> Tally:
        """One transaction: handle, write, move cursors, count. Returns after the commit."""
        self._is_theirs = False
        with self._writer.batch(self._lease.fence, verdict=bool(self._judging)) as batch:
            fresh = self._without_repeats(batch, items)
            held = self._held_keys(batch, fresh)
            self._is_theirs = True
            tally = self._verdicts(batch, fresh, held) if self._judging else self._apply(batch, fresh, held)
            repeats = len(items) - len(fresh)
            if repeats:
                tally = self._count_repeats(items, fresh, tally)
            if self._circuit.is_wipeout(tally.attempted, tally.wiped):
                raise self._wipeout(tally)
            counters = tally.counters
            counters.unmatched = batch.settle(
                Settlement(
                    moves=tally.moves(),
                    letters=tally.letters,
                    counters=counters,
                    segment=self._lease.segment,
                    lane=self._lane,
                )
            )
        return tally

    # --- dedup ------------------------------------------------------------------------------------------

    def _without_repeats(self, batch: Batch, items: Sequence[Routed]) -> Sequence[Routed]:
        """Leave out what was settled before. Above the ceiling nothing can be, and nothing is looked up."""
        floor = self._floor()
        if items[0].event.position > max(self._lookup_below, floor):
            return items
        doubtful = [item for item in items if floor < item.event.position <= self._lookup_below]
        cursors = {item.key: self._cursors[item.key] for item in doubtful if item.key in self._cursors}
        unknown = sorted({item.key for item in doubtful} - cursors.keys())
        if unknown:
            found = dict.fromkeys(unknown, -1) | batch.cursors(unknown)
            if len(self._cursors) + len(found) > CURSORS_KEPT:
                self._cursors.clear()
            self._cursors.update(found)
            cursors.update(found)
        return [
            item
            for item in items
            if item.event.position > floor
            and (item.event.position > self._lookup_below or item.event.position > cursors[item.key])
        ]

    def _count_repeats(self, items: Sequence[Routed], fresh: Sequence[Routed], tally: Tally) -> Tally:
        """Count the left-out events that stand before the point where the batch was cut."""
        positions = {item.event.position for item in fresh}
        cut = fresh[tally.settled].event.position if tally.settled < len(fresh) else None
        for item in items:
            if item.event.position == cut:
                break
            if item.event.position not in positions:
                tally.skips.append((item, "dedup"))
                tally.counters.skipped += 1
                tally.counters.deduplicated += 1
                tally.settled += 1
        return tally

    # --- the ordinary pass ------------------------------------------------------------------------------

    def _apply(self, batch: Batch, items: Sequence[Routed], held: set[str]) -> Tally:
        """Call the handler for each event in order; stop early where one must wait for its retry.

        `held` are the keys with an open letter under ``on_failure="park"``; a new letter adds its key.
        """
        tally = Tally()
        call, stopping = HandlerCall(self._projection, batch), self._stopping
        for item in items:
            if held and item.key in held:
                self._park(tally, item)
            elif not self._apply_one(batch, call, item, tally):
                if tally.is_cut:
                    return tally
                if self._projection.on_failure == "park":
                    held.add(item.key)
            tally.settled += 1
            if stopping():
                return tally
        return tally

    def _apply_one(self, batch: Batch, call: HandlerCall, item: Routed, tally: Tally) -> bool:
        """Settle one event, or cut the batch before it; False when it was cut, or the event became a letter."""
        if self._blamed and self._blamed[0] == item.event.position:
            self._give_up(tally, item, self._blamed[2], kind=self._blamed[1].label, wiped=False)
            return False
        call.item = item
        try:
            outcome = batch.attempt(call)
        except WriteFailed as failed:
            if not failed.guilty or failed.failure.kind is not FailureKind.INTEGRITY:
                raise
            self._give_up(tally, item, failed.__cause__ or failed, kind=failed.failure.label, wiped=True)
            return False
        except SkipEvent:
            self._skip(tally, item)
        except Exception as error:  # noqa: BLE001 - a handler may raise anything; it becomes a retry or a letter
            self._handler_failed(tally, item, error)
            return False
        else:
            if outcome:
                batch.add(outcome)
            if outcome is None or outcome:
                event, key, _error = item
                tally.applied[key] = tally.lasts[key] = event.position
                tally.firsts.setdefault(key, event.position)
                tally.attempted += 1
                tally.counters.applied += 1
            else:
                self._skip(tally, item)
        return True

    def _handler_failed(self, tally: Tally, item: Routed, error: Exception) -> None:
        """Decide between another attempt, later and in a batch of its own, and the end."""
        attempt = self._attempts_of(item) + 1
        wait_s = None if isinstance(error, PermanentFailure) else self._projection.retry.wait_after(attempt)
        if wait_s is not None:
            wait_s = error.seconds if isinstance(error, RetryAfter) else wait_s
            tally.retry = (attempt, wait_s)
            free_locals(error)
        else:
            self._give_up(tally, item, error, kind=None, wiped=isinstance(error, DecodeFailed))

    def _give_up(self, tally: Tally, item: Routed, error: BaseException, *, kind: str | None, wiped: bool) -> None:
        """End an event as a dead letter, or the projection with it under ``on_failure="halt"``."""
        cause: BaseException | Fail = error
        if isinstance(error, DecodeFailed | HandlerExited) and error.__cause__ is not None:
            cause = error.__cause__
            kind = f"decode:{type(cause).__qualname__}" if isinstance(error, DecodeFailed) else kind
        elif isinstance(error, FailReturned):
            cause = Fail(error.args[0])
        letter = letter_for(item.event, item.key, cause, self._attempts_of(item) + 1, self._identity, kind=kind)
        if self._projection.on_failure == "halt":
            tally.halt = Halt(
                f"position {item.event.position} ({item.event.type}) failed with {letter.error_kind}: {letter.message}. "
                "on_failure='halt': nothing was skipped. Fix the cause, then stop and start the projection: this very "
                "event is tried again.",
                letter.error_kind,
            )
            return
        tally.letters.append(letter)
        tally.counters.dead_lettered += 1
        tally.pass_by(item)
        if wiped:
            tally.attempted += 1
            tally.wiped += 1

    def _skip(self, tally: Tally, item: Routed) -> None:
        tally.skips.append((item, "handler"))
        tally.counters.skipped += 1
        tally.pass_by(item)

    def _park(self, tally: Tally, item: Routed) -> None:
        behind = "held behind an earlier dead letter of the same key; released in order when that one is replayed"
        letter = letter_for(item.event, item.key, Fail(behind), 0, self._identity, kind="parked", status="parked")
        tally.letters.append(letter)
        tally.counters.dead_lettered += 1
        tally.pass_by(item)

    def _held_keys(self, batch: Batch, items: Sequence[Routed]) -> set[str]:
        if self._projection.on_failure != "park" or not items:
            return set()
        return set(batch.held_keys(sorted({item.key for item in items})))

    def _attempts_of(self, item: Routed) -> int:
        position, attempts = self._failed
        return attempts if position == item.event.position else 0

    # --- the verdict pass -------------------------------------------------------------------------------

    def _verdicts(self, batch: Batch, items: Sequence[Routed], held: set[str]) -> Tally:
        """Find the guilty by halves, each half under a savepoint: k bad among n cost O(k log n) savepoints."""
        tally = Tally()
        pending = [items]
        while pending and not tally.is_cut:
            part = pending.pop()
            held_then = set(held)  # a part that is undone must not leave keys behind
            try:
                judged = batch.trial(lambda part=part, held=held_then: self._apply(batch, part, held))  # type: ignore[misc]
            except Exception as error:
                if self._failure_of(error)[0].kind is not FailureKind.INTEGRITY:
                    raise
                if len(part) > 1:
                    pending += [part[len(part) // 2 :], part[: len(part) // 2]]
                    free_locals(error)
                    continue
                judged = self._guilty(part[0], *self._failure_of(error))
                held_then |= {part[0].key} if self._projection.on_failure == "park" else set()
            held = held_then
            tally.merge(judged)
            if judged.settled < len(part):
                break
        return tally

    def _guilty(self, item: Routed, failure: Failure, cause: BaseException) -> Tally:
        verdict = Tally()
        self._give_up(verdict, item, cause, kind=failure.label, wiped=True)
        verdict.settled = 0 if verdict.is_cut else 1
        return verdict

    def _failure_of(self, error: Exception) -> tuple[Failure, BaseException]:
        if isinstance(error, WriteFailed):
            return error.failure, error.__cause__ or error
        return self._projection.target.classify(error), error

    def _wipeout(self, tally: Tally) -> Halt:
        letter = tally.letters[-1]
        return Halt(
            f"all {tally.attempted} attempted writes of a batch failed, the last one with {letter.error_kind}: {letter.message} "
            "That is no bad event but a handler, a schema or a key that no longer fits. Nothing was dead-lettered and no "
            "cursor moved; fix it, then stop and start the projection.",
            "integrity_wipeout",
        )

    # --- after a batch that did not commit ----------------------------------------------------------------

    def _after_failure(self, failure: Failure, error: BaseException, batch: Sequence[Routed]) -> Step:
        self._distrust(batch)
        send(signals.batch_failed, self._identity, count=len(batch), reason=failure.label, lane=self._lane)
        if failure.kind is FailureKind.STRUCTURAL:
            msg = f"{failure.label}: {plain_text(error)}"
            raise Halt(msg, failure.label) from error
        if failure.kind is FailureKind.INTEGRITY:
            if self._judging:  # even a pass in which each event was judged did not commit: nothing left to isolate
                return self._repeat(failure, error, batch, bounded=True)
            self._judging = len(batch)
            return Step(0)
        return self._repeat(failure, error, batch, bounded=failure.bounded and self._is_theirs)

    def _repeat(
        self, failure: Failure, error: BaseException | None, batch: Sequence[Routed], *, bounded: bool = False
    ) -> Step:
        """Say how long to wait before the same events are tried again; blame one that repeats for ever."""
        if bounded and error is not None:
            self._blamed = None  # its letter cannot be written either: it was not the event
            self._bounded_repeats += 1
            if self._bounded_repeats > BOUNDED_REPEATS:
                self._bounded_repeats = 0
                if len(batch) == 1:
                    self._blamed = (batch[0].event.position, failure, error)
                else:
                    self._singly = len(batch)
                return Step(0, problem=failure.label)
        wait_s = BACKOFF_S[min(self._repeats, len(BACKOFF_S) - 1)]
        self._repeats += 1
        return Step(0, wait_s, f"{failure.label}: {plain_text(error)}" if error else failure.label)

    def _distrust(self, batch: Sequence[Routed]) -> None:
        """Believe the database only: the batch may have been committed although its answer was lost."""
        self._cursors.clear()
        self._lookup_below = max(self._lookup_below, batch[-1].event.position)

    # --- after a batch that did ---------------------------------------------------------------------------

    def _remember(self, batch: Sequence[Routed], tally: Tally) -> None:
        self._circuit.committed(tally.attempted, tally.wiped)
        self._repeats = self._bounded_repeats = 0
        self._singly = max(0, self._singly - tally.settled)
        self._judging = max(0, self._judging - tally.settled) if self._judging else 0
        if tally.settled:
            self._blamed = None
            last = batch[tally.settled - 1].event.position
            if last <= self._lookup_below:
                self._cursors.update(tally.lasts)
            else:
                self._cursors.clear()
            self._lookup_below = max(self._lookup_below, last)  # what this lane has settled can only be a repeat
        if tally.retry is not None:
            self._failed = (batch[tally.settled].event.position, tally.retry[0])
        self.last_commit = time.monotonic()
