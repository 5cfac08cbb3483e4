"""A ledger in memory: wish, lease, watermark and ceiling of one projection, with the epoch as the only fence.

Internal, like the protocol that it doubles.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from scriba.exceptions import ConfigurationError
from scriba.protocols import (
    FenceLost,
    Holder,
    Lease,
    LetterWish,
    Orders,
    Progress,
    Recorded,
    Resume,
    Wish,
)

if TYPE_CHECKING:
    from scriba.testing.memory.target import MemoryTarget

__all__ = ["MemoryLedger", "MemoryState"]


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
