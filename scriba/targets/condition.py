"""Whether a batch's transaction can still commit, and why not: Django's notes, the driver's and the server's together.

Each of the three can be wrong about the others after a handler has been at work: a block that was left open, a rollback
that Django only remembers, a driver that still copies. Must not change anything but Django's own notes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from psycopg.pq import TransactionStatus

from scriba.failure import classify
from scriba.protocols import Failure, FailureKind
from scriba.targets.connections import driver_blocks

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

__all__ = ["Condition"]

_INTRANS: Final = int(TransactionStatus.INTRANS)


class Condition:
    """Of the transaction that is open on `connection` now: how deep it is in blocks is how deep it has to be later."""

    def __init__(self, connection: BaseDatabaseWrapper) -> None:
        self._connection = connection
        self._driver: Any = connection.connection
        self._server: Any = self._driver.pgconn
        self._depth = self._depth_now()

    def is_good(self) -> bool:
        """Say whether the transaction could commit as it is."""
        connection, driver, server = self._connection, self._driver, self._server
        blocks, savepoints = self._depth
        return (
            not connection.needs_rollback
            and len(connection.atomic_blocks) == blocks
            and len(connection.savepoint_ids) == savepoints
            and connection.connection is driver
            and server.transaction_status == _INTRANS
            and not server.pipeline_status
            and not driver_blocks(driver)
        )

    def status(self) -> TransactionStatus:
        connection, driver = self._connection, self._driver
        if connection.connection is not driver or connection.closed_in_transaction or driver.closed:
            return TransactionStatus.UNKNOWN
        return TransactionStatus(driver.pgconn.transaction_status)

    def lost(self, cause: BaseException) -> Failure | None:
        """Say why no savepoint can help any more; None when one can."""
        status = self.status()
        if status is TransactionStatus.UNKNOWN:
            known = classify(cause)
            return known if known.kind is FailureKind.TRANSIENT else _CLOSED
        if status is TransactionStatus.IDLE or self._depth_now() < self._depth:
            return _ENDED
        if status is TransactionStatus.ACTIVE or self._has_open_driver_blocks():
            return _LEFT_OPEN
        return None

    def leave_blocks(self) -> None:
        """Let Django forget the blocks that a handler has left open, and the rollback that it was asked for."""
        connection, (blocks, savepoints) = self._connection, self._depth
        connection.set_rollback(False)
        del connection.atomic_blocks[blocks:]
        del connection.savepoint_ids[savepoints:]

    def what_is_wrong(self) -> str:
        if self._depth_now() != self._depth:
            return "the handler left an atomic() block open, or closed one that was not its own."
        if self._connection.needs_rollback:
            return (
                "the handler asked for a rollback: set_rollback(True), or an error that it swallowed inside atomic()."
            )
        return f"the handler left its transaction {self.status().name}: an error swallowed, a copy() or stream() unfinished."

    def _depth_now(self) -> tuple[int, int]:
        return len(self._connection.atomic_blocks), len(self._connection.savepoint_ids)

    def _has_open_driver_blocks(self) -> bool:
        return bool(self._driver.pgconn.pipeline_status or driver_blocks(self._driver))


_ENDED: Final = Failure(FailureKind.STRUCTURAL, "commit:25P01 (no_active_sql_transaction)")
#: Bounded: when no error explains it, the handler does this each time.
_CLOSED: Final = Failure(FailureKind.TRANSIENT, "commit:08003 (connection_does_not_exist)", bounded=True)
_LEFT_OPEN: Final = Failure(FailureKind.TRANSIENT, "commit:25000 (invalid_transaction_state)", bounded=True)
