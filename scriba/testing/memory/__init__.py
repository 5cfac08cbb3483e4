"""Memory doubles of the protocols: the whole engine, threads included, runs on them without a database.

:class:`MemorySource` and :class:`MemoryTarget` are for users' tests too; :class:`MemoryLedger` is internal, like the
protocol it doubles. They keep what the real ones guarantee: one transaction per batch, cursors that refuse to be
passed twice, a fence by epoch.
"""

from scriba.testing.memory.ledger import MemoryLedger, MemoryState
from scriba.testing.memory.source import MemorySource
from scriba.testing.memory.target import MemoryBatch, MemoryTarget, StoreError

__all__ = ["MemoryBatch", "MemoryLedger", "MemorySource", "MemoryState", "MemoryTarget", "StoreError"]
