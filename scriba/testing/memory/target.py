"""A target in memory: a read model that is a list, with one transaction per batch and cursors that refuse a repeat."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from scriba.protocols import (
    Counters,
    CursorRefused,
    Failure,
    FailureKind,
    Fence,
    FenceLost,
    Identity,
    Letter,
    LetterWish,
    Resolution,
    Settlement,
    StoredLetter,
)

if TYPE_CHECKING:
    from django.core.checks import CheckMessage

__all__ = ["MemoryBatch", "MemoryTarget", "StoreError"]

T = TypeVar("T")


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
        unresolved = (at for at, other in sorted(self.letters.items()) if other.status in {"open", "parked"})
        behind = next((at for at in unresolved if at < position and self.letters[at].key == letter.key), None)
        return StoredLetter(position, letter.event, letter.key, letter.status, letter.attempts, behind)

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
        if done.key is not None:
            target.letters[done.letter] = old._replace(key=done.key, status=done.status)
            target.wishes[done.letter] = target.wishes[done.letter]._replace(key=done.key)
            self._hand_on(done, old.key)
            return
        target.log.extend(self._writes)
        target.letters[done.letter] = (done.failed or old)._replace(status=done.status)
        target.notes[done.letter] = done.note
        target.wishes.pop(done.letter, None)
        if done.applied is not None:
            key, position = done.applied.key, done.applied.last
            target.applied[key] = max(target.applied.get(key, -1), position)
        if done.status in {"replayed", "discarded"}:
            self._hand_on(done, old.key)

    def _hand_on(self, done: Resolution, key: str) -> None:
        following = self._target.next_parked(key, done.letter)
        if following is not None and following.behind is None:
            wish = LetterWish(following.id, following.id, "", key, "replay", done.by)
            self._target.wishes.setdefault(following.id, wish)
