"""Up to which position an append-only table may be read without losing an event that commits late.

A sequence hands a number out when a row is inserted; the row appears at commit. A reader that asks for *greater than
the last one I saw* loses every row whose transaction was slower than a later one. No waiting time is right, and the
snapshot of the whole cluster stalls on transactions that have nothing to do with the table. The horizon knows instead:

1. `M`: the highest position that is written. Then `H`: the transactions that hold ``RowExclusiveLock`` on the table or
   on its sequence. An INSERT takes that lock on the table before it draws the number, any ``nextval`` takes it on the
   sequence, both keep it until the top-level transaction ends, and a commit is visible before its locks go. So a
   number up to `M` that is not visible yet belongs to a member of `H`, or to nobody.
2. When every member of `H` has ended (new writers do not matter), everything up to `M` is settled for ever. Several
   pairs (M, H) wait at the same time.
3. Whoever reads must read **again** after that, with a snapshot that is newer than the evidence.
4. Numbers without a hole directly behind the cursor need no evidence at all.

`M` is read strictly before `H`: the other way round, a number drawn in between would count as settled while its
transaction is not in `H`. A prepared transaction changes its name when the server restarts, so pairs outlive neither a
connection (:meth:`Horizon.forget` them, or make a new horizon, after each reconnect) nor a server that a pooler has
seen restarting.

Precondition: the number is drawn in the transaction that inserts the row, by a sequence without CACHE. What can be
checked of that is checked in :mod:`scriba.sources.table_facts`.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from scriba.durations import duration
from scriba.exceptions import SourceError

__all__ = ["NOTHING", "Horizon", "Query", "Relations", "run_length"]

NOTHING: Final = -1  #: below every position
MOST_PAIRS: Final = 32  #: pairs that wait at the same time; beyond that the youngest is replaced
SHOWN_QUERY: Final = 160  #: characters of a holder's statement that are shown

#: Runs one statement in a transaction of its own (autocommit) and returns its rows.
Query = Callable[[str, Sequence[object]], Sequence[Sequence[Any]]]


class Relations(NamedTuple):
    """What evidence is taken from. `table`, `column` and `sequence` are SQL: quoted, `sequence` with its schema.

    `locked` are the oids of the table, of its partitions and of its sequence; `lowest` is the sequence's MINVALUE.
    """

    table: str
    column: str
    sequence: str
    locked: tuple[int, ...]
    lowest: int = 1


class _Numbers(NamedTuple):
    written: int | None  #: the highest visible position
    drawn: int | None  #: the highest number handed out
    log: int  #: where the write-ahead log ends, in bytes


class _Pair(NamedTuple):
    """Everything up to `bound` is settled when no transaction of `holders` lives and the log is durable up to `log`."""

    bound: int
    holders: frozenset[str]
    log: int = 0


class Horizon:
    """The evidence about one table. Used by one thread; `query` is its connection."""

    def __init__(self, query: Query, relations: Relations) -> None:
        self._query = query
        self._relations = relations
        self._pairs: list[_Pair] = []
        self._server: object = None  #: when the server that named the holders was started
        self.settled = relations.lowest - 1  #: what is missing at or below it never comes

    def advance(self, after: int) -> bool:
        """Take evidence about what lies beyond `after`, which has been read. Return whether `settled` has moved.

        Raises :class:`~scriba.exceptions.SourceError` when the table is behind `after` or ahead of its sequence.
        """
        self.settled = before = max(self.settled, after)
        numbers = self._look_at_numbers()
        self._check_reach(numbers.drawn, after)
        if numbers.drawn is None or numbers.drawn <= self.settled:
            return False
        alive, durable_to = self._look_at_holders()
        self._add(self._pair(numbers, alive))
        self._settle(alive, durable_to)
        return self.settled > before

    def forget(self) -> None:
        """Drop what is waited for: after a reconnect, holders may have other names. What is settled stays so."""
        self._pairs.clear()

    def check(self, read_up_to: int) -> None:
        """Raise :class:`~scriba.exceptions.SourceError` when the table is behind `read_up_to`, or ahead of its sequence."""
        self._check_reach(self._look_at_numbers().drawn, read_up_to)

    def written(self) -> int:
        """Return the highest visible position; -1 for an empty table."""
        written = self._look_at_numbers().written
        return NOTHING if written is None else written

    def waiting_for(self) -> str:
        """Say who holds the horizon: process, age, state and statement of the oldest holder; "" when nobody does."""
        names = sorted({name for pair in self._pairs for name in pair.holders})
        rows = self._query(_OLDEST_HOLDER, (list(self._relations.locked), names)) if names else ()
        if not rows:
            return ""
        others = f", and {len(names) - 1} more" if len(names) > 1 else ""
        return f"what is written behind position {self.settled} waits for {_described(*rows[0])}{others}"

    # --- numbers and holders ------------------------------------------------------------------------------

    def _look_at_numbers(self) -> _Numbers:
        table, column, sequence, *_ = self._relations
        statement = _NUMBERS.format(table=table, column=column, sequence=sequence)
        in_recovery, written, last_value, is_called, log = self._query(statement, ())[0]
        if in_recovery:
            raise SourceError(_STANDBY.format(table=table))
        drawn = last_value if is_called else None
        if written is not None and written > (drawn or 0):
            raise SourceError(
                _AHEAD.format(table=table, column=column, sequence=sequence, written=written, drawn=drawn or "nothing")
            )
        return _Numbers(written, drawn, int(log))

    def _check_reach(self, drawn: int | None, read_up_to: int) -> None:
        if read_up_to > (drawn or 0):
            table, _, sequence, *_ = self._relations
            raise SourceError(
                _BEHIND.format(table=table, sequence=sequence, read_up_to=read_up_to, drawn=drawn or "nothing")
            )

    def _look_at_holders(self) -> tuple[frozenset[str], int]:
        """Return the names of those who may still commit a number, and how far the write-ahead log is durable."""
        names, durable_to, server = self._query(_HOLDERS, (list(self._relations.locked),))[0]
        if server != self._server:
            self._server = server
            self.forget()
        return frozenset(names or ()), int(durable_to)

    # --- pairs --------------------------------------------------------------------------------------------

    def _pair(self, numbers: _Numbers, alive: frozenset[str]) -> _Pair:
        written, drawn, log = numbers
        if written is not None and written > self.settled:
            return _Pair(written, alive)
        # Nothing but numbers that were drawn and may never be used. A server that crashes before the log is written
        # forgets them, and hands them out a second time: they count only once the log is durable.
        return _Pair(drawn or 0, alive, log)

    def _add(self, pair: _Pair) -> None:
        """Wait for `pair` too, unless one that waits for fewer transactions already reaches as far."""
        if any(known.bound >= pair.bound and known.log <= pair.log for known in self._pairs):
            return
        del self._pairs[MOST_PAIRS - 1 :]
        self._pairs.append(pair)

    def _settle(self, alive: frozenset[str], durable_to: int) -> None:
        """Strike those who have ended from every pair; a pair that waits for nobody settles what is below it."""
        left = [pair._replace(holders=pair.holders & alive) for pair in self._pairs]
        done = [pair.bound for pair in left if not pair.holders and pair.log <= durable_to]
        self.settled = max(self.settled, *done, NOTHING)
        self._pairs = [pair for pair in left if pair.bound > self.settled]


def run_length(after: int, positions: Sequence[int], settled: int) -> int:
    """Return how many of the ascending `positions`, read behind `after`, may be handed out.

    Those at or below `settled` may, and those that follow without a hole.
    """
    first = bisect_right(positions, settled)
    expected = max(after, settled) + 1
    for index in range(first, len(positions)):
        if positions[index] != expected:
            return index
        expected += 1
    return len(positions)


def _described(  # noqa: PLR0913 - the columns of a row
    pid: int | None, age_s: float | None, state: str | None, application: str | None, query: str | None, gid: str | None
) -> str:
    age = f"for {duration(age_s)}" if age_s is not None else "for an unknown time"
    if pid is None:
        named = f"{gid!r} (COMMIT PREPARED or ROLLBACK PREPARED ends it)" if gid else "of an unknown name"
        return f"the prepared transaction {named}, open {age}"
    by = f" of {application!r}" if application else ""
    return f"process {pid}{by}, {state or 'in an unknown state'}, its transaction open {age}: {_shown(query or '')}"


def _shown(query: str) -> str:
    """Return a statement on one line, without the values that it inserts: they may be somebody's data."""
    line = " ".join(query.split())
    statement, values, _ = (*re.split(r"\b(values)\b", line, maxsplit=1, flags=re.IGNORECASE), "", "")[:3]
    shown = f"{statement}{values}" if values else statement
    return shown if len(shown) <= SHOWN_QUERY and not values else f"{shown[:SHOWN_QUERY]} …"


#: One statement: its snapshot is older than `last_value`, so a visible position above that was never drawn.
_NUMBERS: Final = """
SELECT pg_is_in_recovery(), (SELECT max({column}) FROM {table}), last_value, is_called,
       CASE WHEN pg_is_in_recovery() THEN 0 ELSE pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0') END
FROM {sequence}
"""
#: ``IS DISTINCT FROM``, because a prepared transaction has no process.
_LOCKED: Final = """
    locks.locktype = 'relation' AND locks.mode = 'RowExclusiveLock' AND locks.granted
    AND locks.database = (SELECT oid FROM pg_database WHERE datname = current_database())
    AND locks.relation = ANY(%s::oid[]) AND locks.pid IS DISTINCT FROM pg_backend_pid()
"""
_HOLDERS: Final = f"""
SELECT array_agg(DISTINCT locks.virtualtransaction), pg_wal_lsn_diff(pg_current_wal_flush_lsn(), '0/0'),
       pg_postmaster_start_time()
FROM pg_locks AS locks WHERE {_LOCKED}
"""
_OLDEST_HOLDER: Final = f"""
SELECT locks.pid, extract(epoch FROM clock_timestamp() - coalesce(activity.xact_start, prepared.prepared))::float8,
       activity.state, activity.application_name, activity.query, prepared.gid
FROM pg_locks AS locks
LEFT JOIN pg_stat_activity AS activity ON activity.pid = locks.pid
LEFT JOIN pg_locks AS owned ON owned.locktype = 'transactionid' AND owned.mode = 'ExclusiveLock'
    AND owned.virtualtransaction = locks.virtualtransaction AND locks.pid IS NULL
LEFT JOIN pg_prepared_xacts AS prepared ON prepared.transaction = owned.transactionid
WHERE {_LOCKED} AND locks.virtualtransaction = ANY(%s)
ORDER BY coalesce(activity.xact_start, prepared.prepared) LIMIT 1
"""
_STANDBY: Final = (
    "{table} is read from a standby, where the locks of writers are invisible: events that commit late would be lost. "
    "Name the alias of the primary server in using=…"
)
_AHEAD: Final = (
    "{table} has the position {written}, but its sequence {sequence} has handed out only {drawn}: rows were inserted with "
    "explicit positions (an import, loaddata). Numbers below are still to come and would be taken for lost ones. Cure, "
    "while nobody appends: SELECT setval('{sequence}', (SELECT max({column}) FROM {table}));"
)
_BEHIND: Final = (
    "the projection has read {table} up to position {read_up_to}, but its sequence {sequence} has handed out only {drawn}: "
    "the table was restored or truncated, or the sequence was set back. Events that get the same positions again would be "
    "taken for old ones. Restore the read model to the same moment, or rebuild it: a new version of the projection, or "
    "manage.py scriba_reset."
)
