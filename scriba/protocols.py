"""What the engine knows of the world: Source and Target, the two extension points, and the internal Ledger.

The engine sees events, keys, cursors and letters through these shapes only: no model, no adapter, no ORM.
That is why the whole of it, threads included, runs on memory doubles in tests.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

if TYPE_CHECKING:
    from datetime import datetime

    from django.core.checks import CheckMessage

    from scriba.event import Event

T = TypeVar("T")

SLICES = 1024  #: an ordering key's hash falls into one of these; a segment owns a run of them


class Identity(NamedTuple):
    """(name, version): what cursors, watermark, letters and failure counters are kept by."""

    name: str
    version: int

    def __str__(self) -> str:
        return f"{self.name}:{self.version}"


# --- Source ---------------------------------------------------------------------------------------------


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


# --- Target ---------------------------------------------------------------------------------------------


class FailureKind(enum.Enum):
    """What an error means for the batch it hit (the table is in ``scriba/failure.py``)."""

    TRANSIENT = "transient"  #: repeat the batch
    INTEGRITY = "integrity"  #: one event's fault
    STRUCTURAL = "structural"  #: nothing will fit until somebody acts: halt


class Failure(NamedTuple):
    """An error, classified. `label` is what ``error_kind`` says: ``commit:<sqlstate> (<name>)``.

    `bounded`: transient, but may repeat for ever because of one slow event; after a few repeats its fault.
    """

    kind: FailureKind
    label: str
    bounded: bool = False


class WriteFailed(Exception):  # noqa: N818 - internal signal between target and pipeline
    """An error of the batch's own connection came up through a handler; `failure` says what it means.

    `guilty` is true when the running event itself caused it (its own statement, or a transaction that its
    handler left broken), false when it surfaced while writes of earlier events were flushed for it.
    The cause is the original exception.
    """

    def __init__(self, failure: Failure, *, guilty: bool) -> None:
        super().__init__(failure.label)
        self.failure = failure
        self.guilty = guilty


class FenceLost(Exception):  # noqa: N818 - internal signal
    """The segment belongs to another epoch: nothing of this batch may commit, and nothing after it."""


class CursorRefused(Exception):  # noqa: N818 - internal signal
    """A cursor in the database stands at or beyond this batch: roll back and start again from the database."""


class CursorMove(NamedTuple):
    """One key's part in a batch: its first and last settled position, and the last applied one (or None)."""

    key: str
    first: int
    last: int
    applied: int | None


class Letter(NamedTuple):
    """An event given up on (`status` ``open``) or held behind one (``parked``), as it will be stored.

    Texts may hold anything; the target makes them storable and bounds them. `cause` carries the exception
    for signals, never for storage.
    """

    event: Event
    key: str
    error_kind: str
    message: str
    stacktrace: str = ""
    attempts: int = 1
    status: str = "open"
    fingerprint: str = ""
    cause: BaseException | None = None


class StoredLetter(NamedTuple):
    """A dead letter as it is stored. `event` is eager: its data and metadata are the stored ones."""

    id: int
    event: Event
    key: str
    status: str
    attempts: int


class LetterWish(NamedTuple):
    """What an operator wants of a letter: a column of its row, carried out by the owner's lane."""

    letter: int
    event_position: int
    partition: str
    key: str
    wish: str  #: ``replay`` or ``discard``
    by: str = ""
    allow_out_of_order: bool = False


class Resolution(NamedTuple):
    """How a letter's row changes. `status` ``open`` keeps it, with the error of the new attempt in `failed`.

    When a letter ends (``replayed``, ``discarded``), the first one parked behind it inherits the wish *replay* in
    the same transaction: a crash between two of them leaves nothing parked behind no letter.
    """

    letter: int
    status: str
    by: str = ""
    note: str = ""
    applied: CursorMove | None = None  #: raises the key's applied position; never its cursor
    failed: Letter | None = None


@dataclass(slots=True)
class Counters:
    """How the events of a batch were settled. `deduplicated` is the part of `skipped` that had been settled
    before; `unmatched` counts declared updates and deletes that matched no row.
    """

    applied: int = 0
    skipped: int = 0
    dead_lettered: int = 0
    deduplicated: int = 0
    unmatched: int = 0


Fence = Sequence[tuple[int, int]]  #: (segment id, epoch) pairs, all of which must still hold


@dataclass(slots=True)
class Settlement:
    """Everything that commits beside the read-model rows."""

    moves: Sequence[CursorMove] = ()
    letters: Sequence[Letter] = ()
    counters: Counters = field(default_factory=Counters)
    segment: int = 0
    lane: int = 0


class Target(Protocol):
    """Where read models live. An object of configuration: no connection before `open`."""

    def open(self, identity: Identity, *, inline: bool = False) -> Writer:
        """Return a writer for the calling thread.

        `inline` is for tests that live inside a transaction of their own: no durable block, no fence, and
        ``on_commit`` callbacks are run by the writer.
        """
        ...

    def valid_result(self, result: object) -> bool:
        """Say whether `result` is something this target can apply."""
        ...

    def classify(self, error: Exception) -> Failure:
        """Say what an error of this target means (one that came out of a batch, its commit included)."""
        ...

    def identity(self) -> str:
        """Return a short text that names the target, for `info`."""
        ...

    def checks(self, models: Collection[Any]) -> list[CheckMessage]:
        """Return what ``manage.py check`` should say about this target and the read models named."""
        ...


class Writer(Protocol):
    """One worker's connection to the target. Used by one thread."""

    def batch(self, fence: Fence, *, verdict: bool = False) -> AbstractContextManager[Batch]:
        """Open one transaction, check the fence first, yield the batch, and commit on leaving.

        Any exception inside rolls everything back and is raised again unchanged. An exception raised by
        leaving may mean that the commit happened all the same: read the cursors before repeating anything.
        """
        ...

    def next_parked(self, key: str, partition: str, after: int) -> StoredLetter | None:
        """Return the first parked letter of `key` behind position `after`. Outside of a batch."""
        ...

    def close(self) -> None:
        """Close the connection. Twice is fine."""
        ...


class Batch(Protocol):
    """One open transaction."""

    @property
    def wrote(self) -> bool:
        """Whether the handler of the running (or last) attempt has itself executed a write on this connection."""
        ...

    def cursors(self, keys: Sequence[str]) -> dict[str, int]:
        """Return the durable cursors of those of `keys` that have one."""
        ...

    def held_keys(self, keys: Sequence[str]) -> set[str]:
        """Return those of `keys` that have an open or parked letter (asked under ``on_failure="park"``)."""
        ...

    def attempt(self, call: Callable[[], T]) -> T:
        """Run one handler call. When it raises, nothing it wrote is left and its exception is raised again.

        The handler's first statement flushes what earlier events declared and sets a savepoint. Raises
        :class:`WriteFailed` when the batch's own connection failed underneath it.
        """
        ...

    def add(self, result: Any) -> int:
        """Buffer the declared writes of `result`; may flush. Return how many writes it declared.

        An error it raises belongs to some event of the batch, not necessarily to this one.
        """
        ...

    def trial(self, run: Callable[[], T]) -> T:
        """Run `run` (several events) under a savepoint, flush, and force deferred constraints now.

        On an exception everything since is undone and it is raised again. Only in a verdict pass.
        """
        ...

    def letter(self, letter: int) -> StoredLetter | None:
        """Lock and return an unresolved letter (open or parked); None when it is resolved or gone."""
        ...

    def applied_beyond(self, key: str, position: int) -> bool:
        """Say whether an event of `key` behind `position` has been applied."""
        ...

    def resolve(self, resolution: Resolution) -> None:
        """Flush, then write what became of a letter, and take its wish away."""
        ...

    def settle(self, settlement: Settlement) -> int:
        """Flush, then write cursors, letters and counters. Last call. Return the unmatched writes.

        Raises :class:`CursorRefused` when a cursor is not where this batch expects it.
        """
        ...


# --- Ledger (internal) ----------------------------------------------------------------------------------


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
