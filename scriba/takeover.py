"""Getting a segment's row for oneself, although transactions of others still lean on it.

Every batch holds ``FOR KEY SHARE`` on its segment's row from its first statement to its commit. Whoever takes the
segment over needs ``FOR UPDATE`` on it, once: when that is granted, no batch of an older epoch is open any more. A
batch whose process is frozen, or whose network is gone, would never end; so after a short patience the transactions
in the way are ended by the server. Only row locks are fought over: a migration that locks the table is waited for,
and so is a reset, which wears a mark.

The waiting statement keeps its place in the queue while a second connection ends those in front of it. (Giving up
and asking again, as ``lock_timeout`` would, starts from the back each time.)
"""

from __future__ import annotations

import logging
import secrets
import threading
from typing import TYPE_CHECKING, Final, Self

from scriba.connection import OwnConnection, Params, Row
from scriba.log_fields import about

if TYPE_CHECKING:
    from types import TracebackType

    from django.db.backends.utils import CursorWrapper

    from scriba.protocols import Identity

__all__ = ["Eviction", "insist", "wear_reset_mark"]

logger = logging.getLogger("scriba")

PATIENCE_S: Final = 0.2  #: an ordinary batch, a heartbeat, another taker are gone by then
LOOK_EVERY_S: Final = 0.05
JOIN_S: Final = 0.5  #: for a look that is on its way; one in a dead network is left behind
LONGEST_WAIT_S: Final = 10.0  #: then the statement fails with 57014 and is tried again by the caller
RESET_MARK: Final = 1_396_920_905  #: first key of the advisory lock that exempts a transaction from eviction


def insist(  # noqa: PLR0913 - a statement, where, and for whom
    cursor: CursorWrapper,
    sql: str,
    params: Params,
    *,
    using: str,
    identity: Identity | None = None,
    patience_s: float = PATIENCE_S,
) -> list[Row]:
    """Execute `sql` inside the open transaction of `cursor`; end whoever makes it wait for a row lock.

    `identity`: the projection whose segment it is about, for the log.
    Raises ``OperationalError`` (57014) when the way is not free after ten seconds.
    """
    cursor.execute("SELECT pg_backend_pid(), current_setting('statement_timeout')")
    pid, timeout_before = cursor.fetchone() or (0, "0")
    _set_timeout(cursor, f"{LONGEST_WAIT_S:g}s")
    mark = f"/* scriba takeover {secrets.token_hex(8)} */"
    with Eviction(using, pid, mark, identity=identity, patience_s=patience_s):
        cursor.execute(f"{mark} {sql}", params)
        rows: list[Row] = cursor.fetchall()
    _set_timeout(cursor, timeout_before)
    return rows


def wear_reset_mark(cursor: CursorWrapper) -> None:
    """Let nobody end this transaction for holding a segment's row: a reset may take long."""
    cursor.execute("SELECT pg_advisory_xact_lock_shared(%s, 0)", [RESET_MARK])


def _set_timeout(cursor: CursorWrapper, value: str) -> None:
    cursor.execute("SELECT set_config('statement_timeout', %s, true)", [value])  # true: for this transaction only


class Eviction:
    """While it is entered: ends the transactions for whose row locks backend `pid` waits with the statement `mark`.

    The mark tells our statement from another one that the same backend may run a moment later (for another client,
    behind a pooler).
    """

    def __init__(
        self,
        using: str,
        pid: int,
        mark: str,
        *,
        identity: Identity | None = None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._connection = OwnConnection(using)
        self._identity = identity
        self._pid = pid
        self._mark = mark
        self._patience_s = patience_s
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"scriba takeover {pid}", daemon=True)
        self._complained = False

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join(JOIN_S)
        if self._thread.is_alive():
            # The statement has its answer, and its transaction holds the row: it goes on. A look that is answered late
            # ends nobody, because nobody waits with this mark any more.
            logger.warning(
                "%s is late: its connection hangs; it ends with it", self._thread.name, extra=about(self._identity)
            )

    def _run(self) -> None:
        wait_s = self._patience_s
        try:
            while not self._done.wait(wait_s):
                wait_s = LOOK_EVERY_S
                self._look()
        finally:
            self._connection.close()

    def _look(self) -> None:
        try:
            found = self._connection.rows(_EVICT, {"pid": self._pid, "mark": self._mark, "reset": RESET_MARK})
        except Exception as error:  # noqa: BLE001 - the waiting statement has its own end; this is only its help
            self._complain("cannot end the transactions that hold a segment's row (%s)", error)
            return
        for pid, user, application, ended in found:
            if ended:
                logger.warning(
                    "ended backend %s (%s, %s): it held a segment that is taken over",
                    pid,
                    user,
                    application,
                    extra=about(self._identity, pid=pid),
                )
            else:
                self._complain("waiting for the reset of backend %s", pid)

    def _complain(self, message: str, detail: object) -> None:
        if not self._complained:
            self._complained = True
            logger.warning(message, detail, extra=about(self._identity))


#: One look: who is in front of us, and (unless it is a reset) its end. A prepared transaction has no backend to end.
_EVICT: Final = """
SELECT blocker.pid, blocker.usename, blocker.application_name,
       CASE WHEN EXISTS (SELECT FROM pg_locks AS held
                         WHERE held.pid = blocker.pid AND held.locktype = 'advisory' AND held.granted
                           AND held.classid = %(reset)s::oid AND held.objsubid = 2)
            THEN false ELSE pg_terminate_backend(blocker.pid) END
FROM pg_stat_activity AS waiter
CROSS JOIN LATERAL unnest(pg_blocking_pids(waiter.pid)) AS front (pid)
JOIN pg_stat_activity AS blocker ON blocker.pid = front.pid
WHERE waiter.pid = %(pid)s AND strpos(waiter.query, %(mark)s) > 0
  AND waiter.wait_event_type = 'Lock' AND waiter.wait_event IN ('transactionid', 'tuple')
"""
