"""A subscription that is shared with Elixir: the same row, the same advisory lock, either side can take over.

The lock says who *should* work, nothing more. A backend that was terminated takes its lock along while the node that
held it works on, so correctness never depends on it: the projection's own epoch and cursors decide. The row's
`last_seen` is a copy of our watermark for the other side, written after the commit and never backwards.

One connection holds one lock: the same session would be given it twice. No transaction stays open on it.
"""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from psycopg import sql

from scriba.exceptions import SourceError
from scriba.protocols import SourceBusy

if TYPE_CHECKING:
    from collections.abc import Callable

    from scriba.sources.commanded_connections import Connection

__all__ = ["LOCK_STYLES", "LockLost", "SharedCheckpoint", "SubscriptionName", "delete_subscription", "holder_of"]

CHECK_EVERY_S: Final = 1.0  #: how often the server is asked whether this session still holds the lock
RETRY_S: Final = (1.0, 4.0)  #: a refused lock is tried again after a time at random between these
_TRIES: Final = 5  #: a row that changes its id between two looks, so many times in a row, is a fight


class LockLost(Exception):  # noqa: N818 - a state of the world, not a mistake
    """The lock or the row behind it is gone: stop reading, and begin again from what is durable."""


class SubscriptionName(NamedTuple):
    """Which row is meant: the stream that is subscribed to, and the name of the handler."""

    schema: str
    stream: str
    name: str

    def __str__(self) -> str:
        return f"{self.name!r} on {self.stream} in schema {self.schema!r}"

    @property
    def table(self) -> sql.Identifier:
        return sql.Identifier(self.schema, "subscriptions")


class _Row(NamedTuple):
    id: int
    last_seen: int


class SharedCheckpoint:
    """The lock, held, and the row behind it. Made by :meth:`claim`; used by one thread at a time."""

    def __init__(self, connection: Connection, name: SubscriptionName, style: str, row: _Row) -> None:
        self._connection = connection
        self._name = name
        self._lock = _LOCKS[style]
        self._row = row
        self._checked_at = time.monotonic()
        self._acked = row.last_seen

    @classmethod
    def claim(
        cls, connection: Connection, name: SubscriptionName, style: str, start: Callable[[], int]
    ) -> SharedCheckpoint:
        """Take the subscription for this session; create its row, at `start()`, when there is none.

        Raises :class:`~scriba.protocols.SourceBusy` when another session holds the lock, and
        :class:`~scriba.exceptions.SourceError` when the role may not use the table.
        """
        _check_privileges(connection, name)
        for _ in range(_TRIES):
            row = _read(connection, name) or _create(connection, name, start())
            if row is None:
                continue
            lock = _LOCKS[style]
            if not _value(connection, lock.take, name, row.id):
                raise _busy(connection, name, style, row.id)
            # Deleted and created again between our look and the lock, the row has another id, and so another lock.
            current = _read(connection, name)
            if current is not None and current.id == row.id:
                return cls(connection, name, style, current)
            _value(connection, lock.release, name, row.id)
        msg = f"the subscription {name} is deleted and created again all the time; who does that?"
        raise LockLost(msg)

    @property
    def last_seen(self) -> int:
        """The last number that either side has acknowledged, read while the lock was held."""
        return self._acked

    def check(self) -> None:
        """Once a second, ask whether this session still holds the lock. Raises :class:`LockLost`."""
        now = time.monotonic()
        if now - self._checked_at < CHECK_EVERY_S:
            return
        if not _value(self._connection, self._lock.held, self._name, self._row.id):
            msg = f"the lock of the subscription {self._name} is lost"
            raise LockLost(msg)
        self._checked_at = now

    def ack(self, position: int) -> None:
        """Let the other side know that everything up to `position` is settled. Never moves the row back.

        Raises :class:`LockLost` when the row is gone: whoever creates it again gets another lock.
        """
        if position <= self._acked:
            return
        cursor = self._connection.execute(
            sql.SQL("UPDATE {} SET last_seen = greatest(coalesce(last_seen, 0), %s) WHERE subscription_id = %s").format(
                self._name.table
            ),
            (position, self._row.id),
        )
        if cursor.rowcount == 0:
            msg = f"the subscription {self._name} was deleted while this projection used it"
            raise LockLost(msg)
        self._acked = position

    def close(self) -> None:
        """Release the lock by ending the session. Twice is fine."""
        self._connection.close()


def delete_subscription(connection: Connection, name: SubscriptionName, style: str, *, force: bool) -> bool:
    """Delete the row, unless somebody holds its lock (or `force`). Return whether there was one.

    Raises :class:`~scriba.protocols.SourceBusy` when it is held.
    """
    row = _read(connection, name)
    if row is None:
        return False
    lock = _LOCKS[style]
    if not force and not _value(connection, lock.take, name, row.id):
        raise _busy(connection, name, style, row.id)
    try:
        connection.execute(sql.SQL("DELETE FROM {} WHERE subscription_id = %s").format(name.table), (row.id,))
    finally:
        if not force:
            _value(connection, lock.release, name, row.id)
    return True


# --- the row ----------------------------------------------------------------------------------------------


def _check_privileges(connection: Connection, name: SubscriptionName) -> None:
    row = connection.execute(
        "SELECT current_user::text, pg_is_in_recovery(), oid IS NOT NULL, has_table_privilege(oid, 'SELECT'),"
        " has_table_privilege(oid, 'UPDATE') FROM (SELECT (SELECT pg_class.oid FROM pg_class JOIN pg_namespace"
        " ON pg_namespace.oid = relnamespace WHERE nspname = %s AND relname = 'subscriptions') AS oid) AS found",
        (name.schema,),
    ).fetchone()
    role, in_recovery, exists, may_read, may_write = row or ("", False, False, False, False)
    if in_recovery:
        msg = "checkpoint='shared' needs the primary: a replica has locks of its own. Name the primary with session=."
        raise SourceError(msg)
    if not exists:
        msg = f"schema {name.schema!r} has no table subscriptions; checkpoint='own' does without it."
        raise SourceError(msg)
    if not (may_read and may_write):
        msg = (
            f"the role {role!r} may not share the subscription {name}. Grant it: GRANT SELECT, INSERT, UPDATE ON "
            f"{name.schema}.subscriptions TO {role}; GRANT USAGE ON SEQUENCE "
            f"{name.schema}.subscriptions_subscription_id_seq TO {role}; or use checkpoint='own'."
        )
        raise SourceError(msg)


def _read(connection: Connection, name: SubscriptionName) -> _Row | None:
    row = connection.execute(
        sql.SQL(
            "SELECT subscription_id, coalesce(last_seen, 0) FROM {} WHERE stream_uuid = %s AND subscription_name = %s"
        ).format(name.table),
        (name.stream, name.name),
    ).fetchone()
    return None if row is None else _Row(*row)


def _create(connection: Connection, name: SubscriptionName, start: int) -> _Row | None:
    """Insert the row; None when somebody else did at the same moment: whoever inserts first decides the start."""
    row = connection.execute(
        sql.SQL(
            "INSERT INTO {} (stream_uuid, subscription_name, last_seen) VALUES (%s, %s, %s)"
            " ON CONFLICT (stream_uuid, subscription_name) DO NOTHING RETURNING subscription_id, last_seen"
        ).format(name.table),
        (name.stream, name.name, start),
    ).fetchone()
    return None if row is None else _Row(*row)


# --- the lock ---------------------------------------------------------------------------------------------


class _Lock(NamedTuple):
    """One form of the advisory lock: how it is taken, released, and found in ``pg_locks``."""

    take: str
    release: str
    held: str
    holder: str


def _lock(keys: str, found: str) -> _Lock:
    ours = f"locktype = 'advisory' AND granted AND database = (SELECT oid FROM pg_database WHERE datname = current_database()) AND {found}"
    return _Lock(
        f"SELECT pg_try_advisory_lock({keys})",
        f"SELECT pg_advisory_unlock({keys})",
        f"SELECT EXISTS (SELECT FROM pg_locks WHERE pid = pg_backend_pid() AND {ours})",
        f"SELECT pid, application_name, backend_start FROM pg_locks LEFT JOIN pg_stat_activity USING (pid) WHERE {ours}",
    )


_ID: Final = "%(id)s::bigint"
#: The library's own rule for ids that do not fit into four bytes.
_ID4: Final = f"(CASE WHEN {_ID} > 2147483647 THEN {_ID} %% 2147483647 ELSE {_ID} END)::int"
_LOCKS: Final = {
    # The server computes the key from the table's name: right on every server, and after a dump and restore.
    "two_int": _lock(
        f"(%(table)s::regclass::oid)::int, {_ID4}",
        f"classid = %(table)s::regclass::oid AND objid = ({_ID4})::oid AND objsubid = 2",
    ),
    "legacy_bigint": _lock(
        _ID, f"classid = (({_ID}) >> 32)::int::oid AND objid = (({_ID}) & 4294967295)::oid AND objsubid = 1"
    ),
}
LOCK_STYLES: Final = tuple(_LOCKS)


def _value(connection: Connection, statement: str, name: SubscriptionName, row_id: int) -> Any:
    row = connection.execute(statement, _keys(connection, name, row_id)).fetchone()
    return row is not None and row[0]


def _busy(connection: Connection, name: SubscriptionName, style: str, row_id: int) -> SourceBusy:
    holder = holder_of(connection, name, style, row_id) or "a session that has just ended"
    return SourceBusy(holder, random.uniform(*RETRY_S))  # noqa: S311 - spreads those who wait


def holder_of(connection: Connection, name: SubscriptionName, style: str, row_id: int) -> str:
    """Say who holds the lock of a subscription; empty when nobody does."""
    row = connection.execute(_LOCKS[style].holder, _keys(connection, name, row_id)).fetchone()
    if row is None:
        return ""
    pid, application, started = row
    since = "" if started is None else f", since {started:%Y-%m-%d %H:%M:%S %Z}"
    return f"pid {pid} (application {application or 'without a name'!r}{since})"


def _keys(connection: Connection, name: SubscriptionName, row_id: int) -> dict[str, Any]:
    return {"table": name.table.as_string(connection), "id": row_id}
