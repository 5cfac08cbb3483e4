"""What the engine knows of the world: Source and Target, the two extension points, and the internal Ledger.

The engine sees events, keys, cursors and letters through these shapes only: no model, no adapter, no ORM.
That is why the whole of it, threads included, runs on memory doubles in tests.
"""

from scriba.protocols.identity import SLICES, Identity
from scriba.protocols.ledger import Holder, Lease, Ledger, Orders, Progress, Recorded, Resume, Status, Wish
from scriba.protocols.source import Head, Page, Shard, Source, SourceBusy, Subscription
from scriba.protocols.target import (
    Batch,
    Counters,
    CursorMove,
    CursorRefused,
    Failure,
    FailureKind,
    Fence,
    FenceLost,
    Letter,
    LetterWish,
    Resolution,
    Settlement,
    StoredLetter,
    Target,
    WriteFailed,
    Writer,
)

__all__ = [
    "SLICES", "Batch", "Counters", "CursorMove", "CursorRefused", "Failure", "FailureKind", "Fence", "FenceLost", "Head",
    "Holder", "Identity", "Lease", "Ledger", "Letter", "LetterWish", "Orders", "Page", "Progress", "Recorded", "Resolution",
    "Resume", "Settlement", "Shard", "Source", "SourceBusy", "Status", "StoredLetter", "Subscription", "Target", "Wish",
    "WriteFailed", "Writer",
]  # fmt: skip
