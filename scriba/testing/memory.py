"""Memory doubles of the protocols: the whole engine, threads included, runs on them without a database.

:class:`MemorySource` and :class:`MemoryTarget` are for users' tests too; :class:`MemoryLedger` is internal, like the
protocol it doubles. They keep what the real ones guarantee: one transaction per batch, cursors that refuse to be
passed twice, a fence by epoch.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from scriba.event import Event
from scriba.exceptions import ConfigurationError
from scriba.protocols import (
    Counters,
    CursorRefused,
    Failure,
    FailureKind,
    Fence,
    FenceLost,
    Head,
    Holder,
    Identity,
    Lease,
    Letter,
    LetterWish,
    Orders,
    Page,
    Progress,
    Recorded,
    Resolution,
    Resume,
    Settlement,
    Shard,
    StoredLetter,
    Wish,
)

if TYPE_CHECKING:
    from django.core.checks import CheckMessage

__all__ = ["MemoryLedger", "MemorySource", "MemoryState", "MemoryTarget", "StoreError"]

T = TypeVar("T")


# --- source ---------------------------------------------------------------------------------------------


class MemorySource:
    """Events in a list, in position order. `append` wakes readers; `fail_with` breaks their next fetch."""

    def __init__(self, events: Iterable[Event] = (), *, start_from: int | None = None, name: str = "memory") -> None:
        self.events: list[Event] = []
        self.acked: list[int] = []
        self.start_from = start_from
        self.rewind = 0  #: so many positions are handed out again after each subscribe
        self._name = name
        self._changed = threading.Condition()
        self._scanned_to = -1
        self._failures: list[Exception] = []
        self.append(*events)

    def append(self, *events: Event) -> None:
        """Add events behind the last one."""
        with self._changed:
            for event in events:
                if self.events and event.position <= self.events[-1].position:
                    msg = f"position {event.position} is not above {self.events[-1].position}"
                    raise ValueError(msg)
                self.events.append(event)
            self._changed.notify_all()

    def scan_to(self, position: int) -> None:
        """Declare that positions up to `position` hold nothing more: what a filter leaves out."""
        with self._changed:
            self._scanned_to = max(self._scanned_to, position)
            self._changed.notify_all()

    def fail_with(self, *errors: Exception) -> None:
        """Let each of the next fetches raise one of `errors`."""
        with self._changed:
            self._failures += errors
            self._changed.notify_all()

    def subscribe(self, identity: Identity, shards: Sequence[Shard]) -> MemorySubscription:
        del identity
        return MemorySubscription(self, shards[0])

    def identity(self) -> str:
        return self._name

    def checks(self) -> list[CheckMessage]:
        return []

    def transient(self, error: Exception) -> bool:
        return isinstance(error, ConnectionError)


class MemorySubscription:
    def __init__(self, source: MemorySource, shard: Shard) -> None:
        self._source = source
        start = shard.resume if shard.resume is not None else source.start_from
        self._after = (-1 if start is None else start) - source.rewind
        self._woken = False
        self._closed = False

    def fetch(self, limit: int, timeout: float) -> Page:
        source = self._source
        with source._changed:  # noqa: SLF001 - one double in two halves
            source._changed.wait_for(lambda: self._woken or self._has_news(), timeout)  # noqa: SLF001
            self._woken = False
            if source._failures:  # noqa: SLF001
                raise source._failures.pop(0)  # noqa: SLF001
            found = [event for event in source.events if event.position > self._after][: limit + 1]
            page, more = found[:limit], len(found) > limit
            scanned = page[-1].position if page else self._after
            if not more:
                scanned = max(scanned, source._scanned_to)  # noqa: SLF001
        self._after = scanned
        return Page(page, scanned, caught_up=not more)

    def _has_news(self) -> bool:
        source = self._source
        last = source.events[-1].position if source.events else -1
        return bool(source._failures) or max(last, source._scanned_to) > self._after  # noqa: SLF001

    def head(self, partition: str = "") -> Head | None:
        del partition
        last = self._source.events[-1] if self._source.events else None
        return Head(last.position, last.occurred_at) if last else None

    def ack(self, watermark: int, partition: str = "") -> None:
        del partition
        self._source.acked.append(watermark)

    def read(self, position: int, partition: str = "") -> Event | None:
        found = (event for event in self._source.events if (event.position, event.partition) == (position, partition))
        return next(found, None)

    def restore(self, event: Event) -> Event:
        return event

    def locate(
        self, event_id: str | None = None, stream_id: str | None = None, stream_version: int | None = None
    ) -> tuple[str, int] | None:
        for event in self._source.events:
            if (
                event.id == event_id
                if event_id
                else (event.stream_id, event.stream_version) == (stream_id, stream_version)
            ):
                return event.partition, event.position
        return None

    def transient(self, error: Exception) -> bool:
        return self._source.transient(error)

    def wake(self) -> None:
        with self._source._changed:  # noqa: SLF001
            self._woken = True
            self._source._changed.notify_all()  # noqa: SLF001

    def close(self) -> None:
        self._closed = True


# --- target ---------------------------------------------------------------------------------------------


class StoreError(Exception):
    """What the memory target's "database" raises; `kind` is how it is classified."""

    def __init__(self, kind: FailureKind = FailureKind.TRANSIENT, label: str = "", *, bounded: bool = False) -> None:
        super().__init__(label or kind.value)
        self.failure = Failure(kind, label or kind.value, bounded=bounded)


class MemoryTarget:
    """A target whose read model is `log`: (key, position, writes) in commit order.

    `fault` is called with a stage (``begin``, ``add``, ``settle``, ``commit``, ``answer``) and the batch; what it
    raises is raised there (``answer``: after the commit has taken effect).
    """

    def __init__(self, *, fault: Callable[[str, MemoryBatch], None] = lambda *_: None) -> None:
        self.log: list[Any] = []
        self.cursors: dict[str, int] = {}
        self.letters: dict[int, Letter] = {}  #: by position, which is a letter's id here
        self.wishes: dict[int, LetterWish] = {}
        self.notes: dict[int, str] = {}
        self.applied: dict[str, int] = {}
        self.counters = Counters()
        self.epochs: dict[int, int] = {}
        self.batches = 0
        self.fault = fault
        self.lock = threading.RLock()

    def open(self, identity: Identity, *, inline: bool = False) -> MemoryWriter:
        del identity, inline
        return MemoryWriter(self)

    def valid_result(self, result: object) -> bool:
        del result
        return True

    def classify(self, error: Exception) -> Failure:
        if isinstance(error, StoreError):
            return error.failure
        return Failure(FailureKind.STRUCTURAL, type(error).__qualname__)

    def identity(self) -> str:
        return "memory"

    def checks(self, models: Collection[Any]) -> list[CheckMessage]:
        del models
        return []

    def wish(self, position: int, wish: str = "replay", *, allow_out_of_order: bool = False) -> None:
        """Write an operator's wish on the letter at `position`."""
        with self.lock:
            key = self.letters[position].key
            self.wishes[position] = LetterWish(position, position, "", key, wish, "operator", allow_out_of_order)

    def stored(self, position: int) -> StoredLetter | None:
        letter = self.letters.get(position)
        if letter is None or letter.status not in {"open", "parked"}:
            return None
        return StoredLetter(position, letter.event, letter.key, letter.status, letter.attempts)

    def next_parked(self, key: str, after: int) -> StoredLetter | None:
        parked = (at for at, letter in sorted(self.letters.items()) if (letter.key, letter.status) == (key, "parked"))
        return next((self.stored(at) for at in parked if at > after), None)


class MemoryWriter:
    def __init__(self, target: MemoryTarget) -> None:
        self._target = target

    @contextmanager
    def batch(self, fence: Fence, *, verdict: bool = False) -> Iterator[MemoryBatch]:
        del verdict
        target = self._target
        batch = MemoryBatch(target)
        target.fault("begin", batch)
        yield batch
        target.fault("commit", batch)
        with target.lock:
            for segment, epoch in fence:
                if target.epochs.get(segment, epoch) != epoch:
                    raise FenceLost
            batch.apply()
        target.fault("answer", batch)

    def next_parked(self, key: str, partition: str, after: int) -> StoredLetter | None:
        del partition
        with self._target.lock:
            return self._target.next_parked(key, after)

    def close(self) -> None:
        pass


class MemoryBatch:
    def __init__(self, target: MemoryTarget) -> None:
        self._target = target
        self._writes: list[Any] = []
        self._settlement: Settlement | None = None
        self._resolution: Resolution | None = None

    @property
    def wrote(self) -> bool:
        return False

    @property
    def writes(self) -> Sequence[Any]:
        """What was declared so far, for faults that look at it."""
        return self._writes

    def cursors(self, keys: Sequence[str]) -> dict[str, int]:
        with self._target.lock:
            return {key: self._target.cursors[key] for key in keys if key in self._target.cursors}

    def held_keys(self, keys: Sequence[str]) -> set[str]:
        with self._target.lock:
            held = {letter.key for letter in self._target.letters.values() if letter.status in {"open", "parked"}}
        return held & set(keys)

    def attempt(self, call: Callable[[], T]) -> T:
        return call()

    def add(self, result: Any) -> int:
        self._target.fault("add", self)
        self._writes.extend(result)
        return len(result)

    def trial(self, run: Callable[[], T]) -> T:
        before = len(self._writes)
        try:
            done = run()
            self._target.fault("trial", self)
        except BaseException:
            del self._writes[before:]
            raise
        return done

    def letter(self, letter: int) -> StoredLetter | None:
        with self._target.lock:
            return self._target.stored(letter)

    def applied_beyond(self, key: str, position: int) -> bool:
        return self._target.applied.get(key, -1) > position

    def resolve(self, resolution: Resolution) -> None:
        self._target.fault("resolve", self)
        self._resolution = resolution

    def settle(self, settlement: Settlement) -> int:
        self._target.fault("settle", self)
        self._settlement = settlement
        return 0

    def apply(self) -> None:
        """Commit: all or nothing, under the target's lock."""
        target, settlement = self._target, self._settlement
        if self._resolution is not None:
            self._apply_resolution(self._resolution)
            return
        if settlement is None:
            return
        for move in settlement.moves:
            if target.cursors.get(move.key, -1) >= move.first:
                raise CursorRefused
        target.log.extend(self._writes)
        target.cursors.update((move.key, move.last) for move in settlement.moves)
        target.applied.update((move.key, move.applied) for move in settlement.moves if move.applied is not None)
        target.letters.update((letter.event.position, letter) for letter in settlement.letters)
        for name in ("applied", "skipped", "dead_lettered", "deduplicated", "unmatched"):
            setattr(target.counters, name, getattr(target.counters, name) + getattr(settlement.counters, name))
        target.batches += 1

    def _apply_resolution(self, done: Resolution) -> None:
        target, old = self._target, self._target.letters[done.letter]
        target.log.extend(self._writes)
        target.letters[done.letter] = (done.failed or old)._replace(status=done.status)
        target.notes[done.letter] = done.note
        target.wishes.pop(done.letter, None)
        if done.applied is not None:
            key, position = done.applied.key, done.applied.last
            target.applied[key] = max(target.applied.get(key, -1), position)
        following = target.next_parked(old.key, done.letter)
        if done.status in {"replayed", "discarded"} and following is not None:
            target.wishes[following.id] = LetterWish(following.id, following.id, "", old.key, "replay", done.by)


# --- ledger (internal) ----------------------------------------------------------------------------------


class MemoryState:
    """The rows that several :class:`MemoryLedger` share: one projection, one segment."""

    def __init__(self, target: MemoryTarget) -> None:
        self.target = target
        self.lock = threading.RLock()
        self.recorded: Recorded | None = None
        self.orders = Orders(Wish.RUNNING)
        self.owner = ""
        self.epoch = 0
        self.expires_at = 0.0
        self.resume: Resume = Resume(None, -1, -1)
        self.watermarks: list[int] = []
        self.progress: Progress | None = None
        self.samples: list[Progress] = []
        self.announcements = 0
        self.failures: list[Exception] = []


class MemoryLedger:
    """One thread's ledger over a shared :class:`MemoryState`."""

    def __init__(self, state: MemoryState, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._state = state
        self._clock = clock

    def register(self, recorded: Recorded) -> None:
        self._enter()
        if self._state.recorded not in {None, recorded}:
            msg = f"recorded options changed from {self._state.recorded} to {recorded}"
            raise ConfigurationError(msg)
        self._state.recorded = recorded

    def orders(self) -> Orders:
        self._enter()
        return self._state.orders

    def set_wish(self, wish: Wish, *, by: str = "", reason: str = "") -> None:
        del by, reason
        with self._state.lock:
            left = self._state.orders.wish is Wish.STOPPED and wish is Wish.RUNNING
            orders = self._state.orders
            self._state.orders = Orders(wish) if left else orders._replace(wish=wish)

    def acquire(self, owner: str, lease_s: float) -> Lease | Holder:
        self._enter()
        state = self._state
        with state.lock, state.target.lock:
            left = state.expires_at - self._clock()
            if state.owner not in {"", owner} and left > 0:
                return Holder(state.owner, left)
            state.owner, state.epoch, state.expires_at = owner, state.epoch + 1, self._clock() + lease_s
            state.target.epochs[1] = state.epoch
            return Lease(1, owner, state.epoch)

    def resume(self, lease: Lease) -> Resume:
        self._enter()
        self._check(lease)
        return self._state.resume

    def open_lanes(self, lease: Lease, lanes: int) -> None:
        del lanes
        self._check(lease)

    def heartbeat(self, lease: Lease, lease_s: float, progress: Progress) -> bool:
        self._enter()
        with self._state.lock:
            if lease.epoch != self._state.epoch:
                return False
            self._state.expires_at = self._clock() + lease_s
            self._state.progress = progress
            return True

    def raise_ceiling(self, lease: Lease, ceiling: int) -> bool:
        with self._state.lock:
            if lease.epoch != self._state.epoch:
                return False
            resume = self._state.resume
            self._state.resume = resume._replace(ceiling=max(resume.ceiling, ceiling))
            return True

    def save_watermark(self, lease: Lease, progress: Progress) -> bool:
        self._enter()
        with self._state.lock:
            if lease.epoch != self._state.epoch:
                return False
            resume = self._state.resume
            if progress.watermark is not None:
                known = -1 if resume.watermark is None else resume.watermark
                self._state.resume = resume._replace(watermark=max(known, progress.watermark))
                self._state.watermarks.append(progress.watermark)
            return True

    def save_anchor(self, lease: Lease, anchor: str) -> bool:
        with self._state.lock:
            if lease.epoch != self._state.epoch:
                return False
            self._state.resume = self._state.resume._replace(anchor=anchor)
            return True

    def halt(self, lease: Lease, cause: str, label: str) -> Lease | None:
        with self._state.lock, self._state.target.lock:
            if lease.epoch != self._state.epoch:
                return None
            if not self._state.orders.halt_cause:
                self._state.orders = self._state.orders._replace(halt_cause=cause, halt_label=label)
            self._state.epoch += 1
            self._state.target.epochs[1] = self._state.epoch
            return lease._replace(epoch=self._state.epoch)

    def letter_wishes(self, limit: int) -> Sequence[LetterWish]:
        with self._state.target.lock:
            return [wish for _, wish in sorted(self._state.target.wishes.items())][:limit]

    def release(self, lease: Lease) -> None:
        with self._state.lock:
            if lease.epoch == self._state.epoch:
                self._state.owner, self._state.expires_at = "", 0.0

    def announce(self) -> None:
        self._enter()
        with self._state.lock:
            self._state.announcements += 1

    def sample(self, lease: Lease, progress: Progress) -> bool:
        self._enter()
        with self._state.lock:
            if lease.epoch != self._state.epoch:
                return False
            self._state.samples.append(progress)
            return True

    def counters(self, lease: Lease) -> Mapping[str, int]:
        del lease
        counters = self._state.target.counters
        return {name: getattr(counters, name) for name in ("applied", "skipped", "dead_lettered", "deduplicated")}

    def transient(self, error: Exception) -> bool:
        return isinstance(error, ConnectionError)

    def close(self) -> None:
        pass

    def _enter(self) -> None:
        with self._state.lock:
            if self._state.failures:
                raise self._state.failures.pop(0)

    def _check(self, lease: Lease) -> None:
        if lease.epoch != self._state.epoch:
            raise FenceLost
