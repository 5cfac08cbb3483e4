"""A log in a PostgreSQL table whose ids are handed out before their transactions commit: read with evidence.

Both writers of the library (its recorder, and its Django extension) lock the table by default, commit in the order of
their ids, and leave no gap but a rollback's. With ``POSTGRES_ENABLE_DB_FUNCTIONS`` they do not lock, and a smaller id
may appear after a larger one. A reader cannot see how writers are configured, so a gap is never believed without
evidence (:mod:`scriba.sources.horizon`). Ids that follow each other without a gap need none: that is what makes the
check free in the ordinary case.

What always holds: what is handed out was read with a snapshot that is newer than the evidence for it.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from scriba.exceptions import SourceError
from scriba.sources.eventsourcing_logs import Look
from scriba.sources.horizon import NOTHING, Horizon, Relations, run_length
from scriba.sources.starting import CurrentStart

if TYPE_CHECKING:
    from eventsourcing.persistence import Notification

    from scriba.sources.eventsourcing_decoding import StoredState
    from scriba.sources.horizon import Query

__all__ = ["CheckedLog", "relations_of"]


class CheckedLog(ABC):
    """What the two logs in PostgreSQL tables have in common. `query` is the fetching thread's own connection.

    `is_filtered`: the pages leave rows out, so their gaps say nothing, and everything waits for evidence.
    """

    def __init__(self, query: Query, table: str, column: str, *, is_filtered: bool) -> None:
        relations = relations_of(query, table, column)
        self._horizon = Horizon(query, relations)
        self._current = CurrentStart(query, relations, self._horizon)
        self._is_filtered = is_filtered
        self._woken = threading.Event()

    @abstractmethod
    def _select(self, after: int, limit: int, up_to: int | None) -> Sequence[Notification | StoredState]:
        """Return at most `limit` rows after `after`, up to `up_to` if given, with a snapshot of this very moment."""

    def look(self, after: int, limit: int) -> Look:
        look = self._take(after, limit)
        if not look.found and self._horizon.advance(look.scanned):
            look = self._take(after, limit)  # again, because what was read before is older than the evidence
        return look

    def _take(self, after: int, limit: int) -> Look:
        return self._take_filtered(after, limit) if self._is_filtered else self._take_run(after, limit)

    def _take_run(self, after: int, limit: int) -> Look:
        """Hand out what is settled and what follows it without a gap."""
        found = self._select(after, limit, None)
        count = run_length(after, [stored.id for stored in found], self._horizon.settled)
        scanned = found[count - 1].id if count else after
        if count < len(found) or len(found) < limit:  # the page shows all there is up to the horizon
            scanned = max(scanned, self._horizon.settled)
        blocked = count < len(found)
        return Look(found[:count], scanned, caught_up=not blocked and len(found) < limit, blocked=blocked)

    def _take_filtered(self, after: int, limit: int) -> Look:
        """Hand out what is settled."""
        settled = self._horizon.settled
        found = self._select(after, limit, settled) if settled > after else ()
        if len(found) == limit:
            return Look(found, found[-1].id, caught_up=False)
        scanned = max(after, settled)
        blocked = self._horizon.written() > scanned
        return Look(found, scanned, caught_up=not blocked, blocked=blocked)

    def wait(self, timeout: float) -> None:
        self._woken.wait(timeout)
        self._woken.clear()

    def wake(self) -> None:
        self._woken.set()

    def head(self) -> int | None:
        written = self._horizon.written()
        return None if written == NOTHING else written

    def current(self) -> int | None:
        return self._current.position()

    def check(self, read_up_to: int) -> None:
        self._horizon.check(read_up_to)

    def waiting_for(self) -> str:
        return self._horizon.waiting_for()


def relations_of(query: Query, table: str, column: str) -> Relations:
    """Return what evidence about `table` (quoted, with its schema) is taken from.

    Raises :class:`~scriba.exceptions.SourceError` when the table cannot be read without losing events.
    """
    ((oid, sequence),) = query(_TABLE, (table, table, table, column))
    if oid is None:
        raise SourceError(_NO_TABLE.format(table=table))
    if sequence is None:
        raise SourceError(_NO_SEQUENCE.format(table=table, column=column))
    ((sequence_oid, lowest, cache),) = query(_SEQUENCE, (sequence,))
    if cache > 1:
        raise SourceError(_CACHE.format(table=table, sequence=sequence, cache=cache))
    if query(_REPLICATED, (oid,)):
        raise SourceError(_FED.format(table=table))
    partitions = [row[0] for row in query(_PARTITIONS, (table,))]
    return Relations(table, column, sequence, tuple({oid, sequence_oid, *partitions}), lowest)


_TABLE: Final = """
SELECT to_regclass(%s)::oid,
       CASE WHEN to_regclass(%s) IS NOT NULL THEN pg_get_serial_sequence(%s, %s) END
"""
_SEQUENCE: Final = "SELECT seqrelid, seqmin, seqcache FROM pg_sequence WHERE seqrelid = %s::regclass"
_REPLICATED: Final = "SELECT 1 FROM pg_subscription_rel WHERE srrelid = %s"
_PARTITIONS: Final = "SELECT relid::oid FROM pg_partition_tree(%s::regclass)"
_NO_TABLE: Final = (
    "the table {table} does not exist. The application creates it when it is first constructed with CREATE_TABLE=yes (its "
    "default), the Django extension by manage.py migrate: a reader never does."
)
_NO_SEQUENCE: Final = (
    "the column {column} of {table} draws its numbers from no sequence of its own, so it cannot be known which are still to "
    "come. Let the library create the table, or ALTER SEQUENCE … OWNED BY {table}.{column}."
)
_FED: Final = (
    "{table} is fed by logical replication: its rows were numbered on another server, and no lock here says which are still "
    "to come. Read the log on the server where the application writes."
)
_CACHE: Final = (
    "the sequence {sequence} of {table} hands out {cache} numbers at a time (CACHE), so a number may be used long after it "
    "was drawn, and events would be lost. Cure: ALTER SEQUENCE {sequence} CACHE 1;"
)
