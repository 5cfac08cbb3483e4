"""The second extension point: where read models live, and everything that commits in one transaction with them.

What always holds: a batch's writes, cursors, dead letters and counters commit together, or not at all, and only while
the fence holds.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

if TYPE_CHECKING:
    from django.core.checks import CheckMessage

    from scriba.event import Event
    from scriba.protocols.identity import Identity

__all__ = [
    "Batch", "Counters", "CursorMove", "CursorRefused", "Failure", "FailureKind", "Fence", "FenceLost", "Letter",
    "LetterWish", "Resolution", "Settlement", "StoredLetter", "Target", "WriteFailed", "Writer",
]  # fmt: skip

T = TypeVar("T")


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
    """A dead letter as it is stored. `event` is eager: its data and metadata are the stored ones.

    `behind`: the first letter of the key before it that is unresolved, if there is one.
    """

    id: int
    event: Event
    key: str
    status: str
    attempts: int
    behind: int | None = None


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

    With a `key` the letter goes on waiting under that key, with its wish, and the one parked behind it under the key
    that it leaves inherits a wish likewise.
    """

    letter: int
    status: str
    by: str = ""
    note: str = ""
    applied: CursorMove | None = None  #: raises the key's applied position; never its cursor
    failed: Letter | None = None
    key: str | None = None  #: the ordering key that the event turned out to have


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
