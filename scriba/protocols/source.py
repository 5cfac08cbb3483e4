"""The first extension point: where events come from.

A source is pulled, so that back-pressure is natural and a double is easy to write. What always holds: a page says how
far it has *scanned*, and nothing at or below that is handed out later.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from scriba.protocols.identity import SLICES

if TYPE_CHECKING:
    from datetime import datetime

    from django.core.checks import CheckMessage

    from scriba.event import Event
    from scriba.protocols.identity import Identity

__all__ = ["Head", "Page", "Shard", "Source", "SourceBusy", "Subscription"]


class Shard(NamedTuple):
    """The share of a source that one segment reads: `resume` is the position to continue *after*.

    `resume` None means: never read before, begin where the source's `start_from` says. After a reconnect what lies
    at or below `resume` may still be in flight: only what is at or below `settled` is durably settled. `anchor` is
    what an earlier subscription said about itself (see `Subscription`); empty when none did.
    """

    partition: str = ""
    slice_from: int = 0
    slice_to: int = SLICES - 1
    resume: int | None = None
    settled: int | None = None
    anchor: str = ""


class Page(NamedTuple):
    """What one fetch found.

    `events` are in position order per partition, each above everything fetched before. `scanned` is how far
    the source has looked: it moves even when nothing matched, and nothing at or below it will ever be handed
    out later. `caught_up` is true when the source knew of nothing beyond `scanned` at that moment.
    """

    events: Sequence[Event]
    scanned: int
    caught_up: bool
    partition: str = ""


class Head(NamedTuple):
    """The highest readable position of a source and the time of that event, if it has one.

    `waiting_for` says in words what holds back positions that are written but not yet safe to read.
    """

    position: int
    occurred_at: datetime | None = None
    waiting_for: str = ""


class SourceBusy(Exception):  # noqa: N818 - a state of the world, not a mistake
    """Raised by `subscribe`: somebody else holds what this source may be read with by one reader only.

    The projection becomes *standby*, shows `holder`, and tries again after `retry_in_s` seconds.
    """

    def __init__(self, holder: str, retry_in_s: float) -> None:
        super().__init__(f"held by {holder}")
        self.holder = holder
        self.retry_in_s = retry_in_s


class Source(Protocol):
    """Where events come from. An object of configuration: no connection before `subscribe`."""

    def subscribe(self, identity: Identity, shards: Sequence[Shard]) -> Subscription:
        """Open a subscription for one run of a projection. Called in the thread that will fetch."""
        ...

    def identity(self) -> str:
        """Return a short text that names what is read: recorded, so that a projection never starts on another."""
        ...

    def checks(self) -> list[CheckMessage]:
        """Return what ``manage.py check`` should say about this source."""
        ...


class Subscription(Protocol):
    """An open reading of a source. `fetch`, `head`, `ack` and `close` are called from one thread.

    `read`, `locate` and `restore` may be called from others; `wake` from any.
    """

    def fetch(self, limit: int, timeout: float) -> Page:
        """Return at most `limit` events; when there is nothing new, wait up to `timeout` seconds for a hint.

        A source that polls keeps `timeout` from a look that found the end to the next one: under a steady trickle it
        would otherwise look again at once, each time for next to nothing.

        How far the very first page has scanned is remembered as the projection's start: a source that does not know
        yet where *current* is returns none, but waits, or raises what `transient` accepts.

        Any exception that `transient` accepts is repeated by the engine with backoff after `close` and a new
        `subscribe`; :class:`~scriba.exceptions.SourceError` and everything else halts the projection.
        """
        ...

    def head(self, partition: str = "") -> Head | None:
        """Return the highest readable position, or None for an empty source."""
        ...

    def ack(self, watermark: int, partition: str = "") -> None:
        """Learn that everything at or below `watermark` is settled durably. Never a gap."""
        ...

    def read(self, position: int, partition: str = "") -> Event | None:
        """Return the event at `position` (for the replay of a dead letter), or None when it is gone."""
        ...

    def restore(self, event: Event) -> Event:
        """Return `event`, rebuilt from a dead letter's stored data, so that it decodes like a fetched one."""
        ...

    def locate(
        self, event_id: str | None = None, stream_id: str | None = None, stream_version: int | None = None
    ) -> tuple[str, int] | None:
        """Return (partition, position) of an event named by its id, or by stream and version."""
        ...

    def transient(self, error: Exception) -> bool:
        """Say whether `error`, raised by this subscription, may go away by itself (a lost connection)."""
        ...

    def wake(self) -> None:
        """Make a waiting `fetch` return now. Thread-safe."""
        ...

    def close(self) -> None:
        """Release everything. Twice is fine."""
        ...

    # Optional: ``floor() -> int | None``. Events at or below it were settled elsewhere (the checkpoint of a
    # subscription that is shared with another system): they are counted as ``dedup`` without a look.
    #
    # Optional: ``anchor() -> str``. What the positions are counted in, in a few words: it changes when the store
    # begins to count anew, so that old positions mean other events. The engine keeps it beside the watermark and
    # hands it back with the next shard; empty: not known yet.
