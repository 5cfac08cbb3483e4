"""A source in memory: what users put in is what a projection gets."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Final

from scriba.conf import scriba_settings
from scriba.event import Event
from scriba.protocols import Head, Identity, Page, Shard

if TYPE_CHECKING:
    from django.core.checks import CheckMessage

__all__ = ["MemorySource"]

SHARE_IN_A_PAGE: Final = 4  #: a page may hold this part of the bytes in flight


class MemorySource:
    """Events in a list, in position order. `append` wakes readers; `fail_with` breaks their next fetch.

    `start_from` is what it is everywhere: ``"origin"``, ``"current"`` (behind the last event at the first fetch), or the
    position to begin after.
    """

    def __init__(self, events: Iterable[Event] = (), *, start_from: str | int = "origin", name: str = "memory") -> None:
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
        start: str | int = shard.resume if shard.resume is not None else source.start_from
        self._after = (start if isinstance(start, int) else -1) - source.rewind
        self._is_current_unknown = start == "current"
        self._woken = False
        self._closed = False

    def fetch(self, limit: int, timeout: float) -> Page:
        source = self._source
        with source._changed:  # noqa: SLF001 - one double in two halves
            self._find_current()
            source._changed.wait_for(lambda: self._woken or self._has_news(), timeout)  # noqa: SLF001
            self._woken = False
            if source._failures:  # noqa: SLF001
                raise source._failures.pop(0)  # noqa: SLF001
            found = [event for event in source.events if event.position > self._after][: limit + 1]
            page = found[: min(limit, _light_enough(found))]
            more = len(found) > len(page)
            scanned = page[-1].position if page else self._after
            if not more:
                scanned = max(scanned, source._scanned_to)  # noqa: SLF001
        self._after = scanned
        return Page(page, scanned, caught_up=not more)

    def _find_current(self) -> None:
        if self._is_current_unknown and self._source.events:
            self._after = self._source.events[-1].position
        self._is_current_unknown = False

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


def _light_enough(events: Sequence[Event]) -> int:
    """Return how many of `events` fit into a page by their bytes: one at least."""
    budget = scriba_settings().max_bytes_in_flight // SHARE_IN_A_PAGE
    return max(1, bisect_right(list(accumulate(event.size for event in events)), budget))
