"""The internal protocol: wish, lease, watermark, ceiling and halt of a projection. Not an extension point.

What always holds: every write to a segment carries the epoch, and one of another epoch changes nothing.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from scriba.protocols.identity import SLICES

if TYPE_CHECKING:
    from datetime import datetime

    from scriba.protocols.target import Fence, LetterWish

__all__ = ["Holder", "Lease", "Ledger", "Orders", "Progress", "Recorded", "Resume", "Status", "Wish"]


class Wish(enum.StrEnum):
    """What operators want of a projection: a row that workers follow."""

    RUNNING = "running"
    PAUSED = "paused"
    STOPPED = "stopped"


class Status(enum.StrEnum):
    """What a projection is (contract §3)."""

    INITIALIZING = "initializing"
    RUNNING = "running"
    PAUSED = "paused"
    DRAINING = "draining"
    STOPPED = "stopped"
    STANDBY = "standby"
    NOT_RUNNING = "not running"
    HALTED = "halted"


class Recorded(NamedTuple):
    """The options that may not change under one version: a start with others is refused."""

    partition_by: str
    source: str
    hash_name: str


class Orders(NamedTuple):
    """The projection's row: what is wished, and whether it is halted.

    `waited_for`: somebody is in ``wait_for`` right now, so the watermark should trail as little as it can.
    """

    wish: Wish
    halt_cause: str = ""
    halt_label: str = ""
    reset_count: int = 0
    waited_for: bool = False


class Lease(NamedTuple):
    """Ownership of one segment. `fence` goes into every batch."""

    segment: int
    owner: str
    epoch: int
    partition: str = ""
    slice_from: int = 0
    slice_to: int = SLICES - 1

    @property
    def fence(self) -> Fence:
        return ((self.segment, self.epoch),)


class Holder(NamedTuple):
    """Who owns the segment instead of us, and for how many more seconds at most."""

    owner: str
    expires_in_s: float


class Resume(NamedTuple):
    """Where a new owner continues. Read only after the takeover is complete.

    `watermark` None: never run. `ceiling`: nothing above it was ever handed out. `floor`: everything at or
    below it counts as settled elsewhere (an imported cursor). `anchor`: what positions are counted in, in the
    source's own words.
    """

    watermark: int | None
    ceiling: int
    floor: int
    anchor: str = ""


class Progress(NamedTuple):
    """What an owner reports with a heartbeat or a watermark write."""

    status: Status
    watermark: int | None = None
    watermark_at: datetime | None = None
    head: int | None = None
    head_at: datetime | None = None
    rate: float = 0.0
    reason: str = ""


class Ledger(Protocol):
    """Wish, lease, watermark, ceiling and halt of one projection. Internal: not an extension point.

    Used from the coordinator's and the lease's thread, each with its own instance. Every write to the
    segment carries the epoch; a write of another epoch changes nothing and returns False.
    """

    def register(self, recorded: Recorded) -> None:
        """Create the projection's rows if they are missing; refuse a start with other recorded options.

        Raises :class:`~scriba.exceptions.ConfigurationError` that names what changed and the cure.
        """
        ...

    def orders(self) -> Orders:
        """Read the wish and the halt."""
        ...

    def set_wish(self, wish: Wish, *, by: str = "", reason: str = "") -> None:
        """Set the wish without asking for the state (``--start``; a start after a stop clears a halt)."""
        ...

    def acquire(self, owner: str, lease_s: float) -> Lease | Holder:
        """Take the segment if it is free or its lease ran out (takeover in two steps), or say who holds it."""
        ...

    def resume(self, lease: Lease) -> Resume:
        """Read where to continue. Raises :class:`FenceLost` when the epoch is not ours any more."""
        ...

    def open_lanes(self, lease: Lease, lanes: int) -> None:
        """Make sure that each lane of the segment has its counter row."""
        ...

    def heartbeat(self, lease: Lease, lease_s: float, progress: Progress) -> bool:
        """Prolong the lease and report. False: it is not ours any more."""
        ...

    def raise_ceiling(self, lease: Lease, ceiling: int) -> bool:
        """Durably promise that no handed-out event passes `ceiling` (never lowered). False: fenced."""
        ...

    def save_watermark(self, lease: Lease, progress: Progress) -> bool:
        """Durably move the watermark (never back). False: fenced."""
        ...

    def save_anchor(self, lease: Lease, anchor: str) -> bool:
        """Durably keep what the source says that positions are counted in. False: fenced."""
        ...

    def halt(self, lease: Lease, cause: str, label: str) -> Lease | None:
        """Record a halt (the first cause is kept) and raise the epoch, so that nothing commits after it.

        Returns the lease under its new epoch, which stays with the owner; None when the epoch is not ours.
        """
        ...

    def letter_wishes(self, limit: int) -> Sequence[LetterWish]:
        """Return the oldest wishes that operators have written on unresolved letters, by position."""
        ...

    def release(self, lease: Lease) -> None:
        """Give the segment up at once, so that a standby need not wait for the lease to run out."""
        ...

    def announce(self) -> None:
        """Wake those who wait for an event of the projection: there is something new for them to see."""
        ...

    def sample(self, lease: Lease, progress: Progress) -> bool:
        """Note how far it is, for the charts; old notes are forgotten. False: fenced, nothing was noted."""
        ...

    def counters(self, lease: Lease) -> Mapping[str, int]:
        """Return the sums of the lanes' counters of this segment."""
        ...

    def transient(self, error: Exception) -> bool:
        """Say whether `error`, raised by this ledger, may go away by itself."""
        ...

    def close(self) -> None:
        """Close the connection. Twice is fine."""
        ...
