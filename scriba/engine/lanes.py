"""The ordered queues between reader and workers, and the gapless watermark that follows from them.

An event stays in its lane until it is settled durably: the first one in the queue is the lane's oldest unsettled
position, and a worker that dies leaves its events where its successor finds them.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import accumulate, islice, takewhile
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from scriba.event import Event

__all__ = ["Lane", "Routed", "Watermark", "linger_after"]

BATCH_BYTES: Final = 8_000_000  #: payloads of one batch; its handlers' writes are as large as they make them
MOST_LINGER_S: Final = 0.025


class Routed(NamedTuple):
    """An event with its ordering key, or with the error that `partition_by` raised for it."""

    event: Event
    key: str
    error: Exception | None = None


class Lane:
    """One bounded queue, filled by the reader and served by one worker."""

    def __init__(self, number: int, capacity: int) -> None:
        self.number = number
        self._capacity = capacity
        self._queue: deque[Routed] = deque()
        self._jobs: deque[Any] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._last = -1
        self._bytes = 0

    def put(self, items: Sequence[Routed], timeout: float) -> bool:
        """Append `items` as soon as the lane is below its capacity; False when it stayed full for `timeout` s.

        All or nothing: a lane holds at most its capacity and one page. Items at or below the last position that was
        ever put here are left out: a connection that breaks while a page is routed lets the page be read again, and
        what this lane holds or has settled already must not come a second time.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._closed or len(self._queue) < self._capacity, timeout):
                return False
            if items[0].event.position <= self._last:
                items = [item for item in items if item.event.position > self._last]
            if not items:
                return True
            self._last = items[-1].event.position
            self._queue.extend(items)
            self._bytes += sum([item.event.size for item in items])
            self._changed.notify_all()
        return True

    def post(self, job: Any) -> None:
        """Hand the worker something to do between its batches."""
        with self._changed:
            self._jobs.append(job)
            self._changed.notify_all()

    def take(self, limit: int, linger_s: float = 0.0) -> tuple[Sequence[Any], Sequence[Routed]] | None:
        """Wait for work and return (jobs, at most `limit` items from the front); None once the lane is closed.

        The items stay in the lane until :meth:`settle`. Never waits to fill a batch, except for `linger_s` when
        something is there but no whole batch. Large events make a batch smaller: at most BATCH_BYTES, or one event.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._queue or self._jobs)
            if linger_s:
                self._changed.wait_for(lambda: self._closed or self._jobs or self._has_batch(limit), linger_s)
            if self._closed:
                return None
            jobs = list(self._jobs)
            self._jobs.clear()
            return jobs, self._front(limit)

    def _has_batch(self, limit: int) -> bool:
        return len(self._queue) >= limit or self._bytes >= BATCH_BYTES

    def _front(self, limit: int) -> list[Routed]:
        items = list(islice(self._queue, limit))
        if self._bytes > BATCH_BYTES:
            sizes = accumulate(item.event.size for item in items)
            fitting = sum(1 for _ in takewhile(lambda size: size <= BATCH_BYTES, sizes))
            del items[max(fitting, 1) :]
        return items

    def settle(self, count: int) -> None:
        """Take the first `count` items out: they are settled durably."""
        with self._changed:
            take = self._queue.popleft
            self._bytes -= sum([take().event.size for _ in range(count)])
            self._changed.notify_all()

    def close(self) -> None:
        """Let the worker leave after the batch it is in; what is queued was never handled."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def wait_empty(self, timeout: float) -> bool:
        """Wait until nothing is unsettled; False after `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._queue, timeout)

    def wait_below(self, size: int, timeout: float) -> None:
        """Wait until fewer than `size` bytes are unsettled here, at most `timeout` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._bytes < size, timeout)

    @property
    def oldest(self) -> int | None:
        """The oldest unsettled position, or None."""
        with self._changed:
            return self._queue[0].event.position if self._queue else None

    @property
    def bytes(self) -> int:
        return self._bytes

    def __len__(self) -> int:
        return len(self._queue)


def linger_after(took_s: float, settled: int, waiting: int) -> float:
    """Return how long the next batch may wait for company, after one that took `took_s` and left `waiting` events.

    Nothing when it left none: events that come one by one are committed one by one, at once. When commits come back to
    back, half a commit's time in exchange for fewer of them: at most that much is added to a latency that consists of
    such commits already. There is nothing to tune: a slow disk lingers longer than a fast one.
    """
    return min(took_s / 2, MOST_LINGER_S) if settled and waiting else 0.0


class Watermark:
    """One less than the smallest unsettled position, or the last position whose page is fully routed."""

    def __init__(self, lanes: Iterable[Lane], start: int) -> None:
        self._lanes = list(lanes)
        self._routed = start
        self._last = start

    def routed(self, scanned: int) -> None:
        """Learn that every event at or below `scanned` is in its lane. Called by the reader only."""
        self._routed = max(self._routed, scanned)

    def value(self) -> int:
        """Return the watermark. Never above an unsettled event, never back.

        The routed position is read *before* the lanes: an event at or below it was in its lane by then, so a lane
        found empty afterwards has settled it. The other order would let the watermark lead.
        """
        routed = self._routed
        oldest = [position for lane in self._lanes if (position := lane.oldest) is not None]
        self._last = max(self._last, min([routed, *(position - 1 for position in oldest)]))
        return self._last

    @property
    def last_routed(self) -> int:
        return self._routed
