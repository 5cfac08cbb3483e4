"""An open reading of a Commanded store.

Pages come by *number greater than the cursor*. The cursor is the number of the last row that was read, never a sum:
hard-deleted numbers stay missing, and nobody waits for them. A cursor beyond the store's own counter means that the
store was reset or restored, and everything stops: going on would skip events or apply them twice.

A single stream is read by its own versions. The number then is the stream's version, and a stream that was deleted
and created again, whose versions begin at 1 once more, stops the projection.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import psycopg

from scriba.conf import scriba_settings
from scriba.event import Event
from scriba.exceptions import SourceError
from scriba.listening import Ear, is_pooled
from scriba.log_fields import about
from scriba.protocols import Head, Page
from scriba.sources.commanded_checkpoint import SharedCheckpoint, SubscriptionName
from scriba.sources.commanded_connections import insist_on_indexes
from scriba.sources.commanded_serializers import codec_for
from scriba.sources.commanded_store import ALL, Statements, inspect_store

if TYPE_CHECKING:
    from scriba.protocols import Identity, Shard
    from scriba.sources.commanded import CommandedSource
    from scriba.sources.commanded_connections import Connection

__all__ = ["CommandedSubscription"]

logger = logging.getLogger("scriba")

PAGE_BYTES: Final = 8_000_000  #: a page holds at most so many bytes of payload, or one event
FIRST_ROWS: Final = 128  #: rows of the first page; doubled while pages are small, cut back when one is heavy
LOOK_AGAIN_S: Final = 1.0  #: how often an idle reader compares its cursor with the store's counter


class _Stream(NamedTuple):
    """What is read: a stream's key, its counter, whether it may be read, and which of its name it is."""

    id: int
    version: int
    is_deleted: bool
    anchor: str


class CommandedSubscription:
    """One run's reading of one store. Made by :meth:`~scriba.sources.commanded.CommandedSource.subscribe`.

    The reading begins with the first `floor` or `fetch`: until then no lock is taken and nothing is listened to, so
    that whoever only looks something up (`read`, `locate`) never competes with the owner.
    """

    def __init__(self, source: CommandedSource, identity: Identity, shard: Shard) -> None:
        self._source = source
        self._identity = identity
        self._resume = shard.resume
        self._settled = shard.settled
        self._anchor = shard.anchor
        self._is_reading = False
        self._hint = threading.Event()
        self._checkpoint: SharedCheckpoint | None = None
        self._ear: Ear | None = None
        self._rows = FIRST_ROWS
        self._looked_at = 0.0
        self._drained_at: float | None = None  #: when the last look was, if it found the end
        self._complained = False
        self._connection = source.connector.connect(identity, "reader")
        try:
            self._is_pooled = is_pooled(self._connection)
            if not self._is_pooled:  # through a pooler the settings would reach other sessions
                insist_on_indexes(self._connection)
            self._shape = inspect_store(self._connection, source.schema)
            self._codec = codec_for(source.serializer, self._shape.column, source.schema, source.decoding)
            self._statements = Statements(self._shape, is_filtered=source.is_filtered)
            self._cursor = -1 if shard.resume is None else shard.resume
        except BaseException:
            self.close()
            raise

    def _begin(self) -> None:
        """Take the lock, listen, and only then decide where to begin: what comes after that is heard of."""
        source, cursor = self._source, self._resume
        if self._shape.remark:
            logger.warning("%s: %s", self._identity, self._shape.remark, extra=about(self._identity))
        if source.checkpoint == "shared":
            self._checkpoint = self._claim()
            cursor = max(self._checkpoint.last_seen, -1 if cursor is None else cursor)
        if source.wakeup == "notify":
            self._listen()
        self._cursor = self._start() if cursor is None else cursor
        self._check_cursor()
        if self._checkpoint is not None and self._settled is not None:
            # Never the cursor: after a reconnect, what lies below it may still be in flight.
            self._checkpoint.ack(self._settled)
        self._is_reading = True

    # --- protocol -----------------------------------------------------------------------------------------

    def fetch(self, limit: int, timeout: float) -> Page:
        """See :class:`~scriba.protocols.Subscription`. Raises SourceBusy while somebody else holds the lock.

        After a look that has found the end, the next one comes `timeout` later, or when a notice does.
        """
        self._watch()
        if self._drained_at is None:
            page = self._page(limit)
            if page.events or self._drained_at is None:
                return page
        self._hint.wait(self._drained_at + timeout - time.monotonic())
        # Cleared before the look, never before the wait: a hint that came in between must not be lost.
        self._hint.clear()
        return self._page(limit)

    def head(self, partition: str = "") -> Head | None:
        """Return the highest readable number: not the store's counter, which hard deletes leave too high."""
        del partition
        stream = self._find_stream()
        if stream is None:
            return None
        if stream.is_deleted:
            return Head(
                max(self._cursor, 0), None, f"{self._source.stream} was deleted: nothing more will come from it"
            )
        row = self._row(self._statements.head, {"stream": stream.id})
        return None if row is None else Head(row[0], _utc(row[1]))

    def ack(self, watermark: int, partition: str = "") -> None:
        """In shared mode, tell the other side; otherwise the engine's own rows are all there is."""
        del partition
        if self._checkpoint is not None:
            self._checkpoint.check()
            self._checkpoint.ack(watermark)

    def floor(self) -> int | None:
        """Take the lock, and return what either side has settled: the larger of `last_seen` and our own watermark.

        Never more: events at or below it that are still in flight would be lost.
        """
        self._watch()
        return None if self._checkpoint is None else self._checkpoint.last_seen

    def anchor(self) -> str:
        """Return which stream, of all that ever had this name, the positions count: its key and its birth."""
        return self._anchor

    def read(self, position: int, partition: str = "") -> Event | None:
        """Return the event at `position`; None when it was hard-deleted."""
        del partition
        stream = self._find_stream()
        row = stream and self._row(self._statements.one, {"stream": stream.id, "position": position})
        return self._event(row) if row else None

    def restore(self, event: Event) -> Event:
        """Return `event` with what a dead letter kept of it, in the form in which the column held it."""
        return self._codec.restore(event)

    def locate(
        self, event_id: str | None = None, stream_id: str | None = None, stream_version: int | None = None
    ) -> tuple[str, int] | None:
        """Return ("", number) of an event, by index; None for one that is not there."""
        stream = self._find_stream()
        if stream is None:
            return None
        parameters: dict[str, Any] = {"stream": stream.id, "name": stream_id, "version": stream_version}
        if event_id is None:
            row = self._row(self._statements.position_of_version, parameters)
        else:
            key = _as_uuid(event_id)
            row = key and self._row(self._statements.position_of_id, {**parameters, "event_id": key})
        return ("", row[0]) if row else None

    def transient(self, error: Exception) -> bool:
        """Say whether `error` may go away by itself."""
        return self._source.transient(error)

    def wake(self) -> None:
        """Make a waiting `fetch` look again now."""
        self._hint.set()

    def close(self) -> None:
        """Release lock, ear and connections. Twice is fine."""
        if self._ear is not None:
            self._ear.close()
        if self._checkpoint is not None:
            self._checkpoint.close()
        with suppress(psycopg.Error):
            self._connection.close()

    # --- pages --------------------------------------------------------------------------------------------

    def _page(self, limit: int) -> Page:
        stream = self._find_stream()
        if stream is None or stream.is_deleted:
            self._drained_at = time.monotonic()
            return Page([], self._cursor, caught_up=True)
        asked = min(limit, self._rows)
        rows = self._read_rows(stream, asked)
        number, looked = rows[-1][12:] if rows else (0, 0)
        is_cut = number < looked
        self._rows = max(1, 2 * len(rows)) if is_cut else min(2 * asked, max(limit, FIRST_ROWS))
        if rows:
            self._cursor = rows[-1][0]
        else:
            self._check_cursor(at_most_every_s=LOOK_AGAIN_S)
        wanted = [self._event(row) for row in rows if row[11]] if self._source.is_filtered else self._events(rows)
        is_drained = looked < asked and not is_cut
        self._drained_at = time.monotonic() if is_drained else None
        return Page(wanted, self._cursor, caught_up=is_drained)

    def _read_rows(self, stream: _Stream, limit: int) -> list[Any]:
        parameters = {
            "stream": stream.id,
            "cursor": self._cursor,
            "limit": limit,
            "budget": min(PAGE_BYTES, scriba_settings().max_bytes_in_flight),
            "types": self._source.event_types,
            "prefix": self._source.stream_prefix,
        }
        with self._connection.cursor(binary=True) as cursor:
            return cursor.execute(self._statements.page, parameters).fetchall()

    def _events(self, rows: list[Any]) -> list[Event]:
        codec = self._codec
        return [
            Event(
                position, stream, kind, key, data, metadata, _utc(at), version, correlation, causation, "", size, codec
            )
            for position, stream, kind, key, data, metadata, at, version, correlation, causation, size, *_ in rows
        ]

    def _event(self, row: Any) -> Event:
        return self._events([row])[0]

    # --- the stream and the cursor ------------------------------------------------------------------------

    def _find_stream(self) -> _Stream | None:
        """Return what is read; None for a single stream that does not exist (yet)."""
        return _ALL_EVENTS if self._source.stream == ALL else self._look()

    def _look(self) -> _Stream | None:
        """Look the stream up, and make sure that it is the one that was read before.

        A reset of the store, and a stream that is hard-deleted and created again, begin to count at 1 once more.
        Their rows are new ones.
        """
        row = self._row(self._statements.stream, {"name": self._source.stream})
        if row is None:
            return None
        stream = _Stream(*row)
        if self._anchor not in {"", stream.anchor}:
            raise SourceError(self._counts_anew(stream))
        self._anchor = stream.anchor
        if stream.is_deleted and not self._complained:
            self._complained = True
            logger.warning(
                "%s: the stream %r was deleted; nothing more will come from it", self._identity, self._source.stream,
                extra=about(self._identity),
            )  # fmt: skip
        return stream

    def _counts_anew(self, stream: _Stream) -> str:
        what = (
            f"the event store in schema {self._source.schema!r} was reset"
            if self._source.stream == ALL
            else f"the stream {self._source.stream!r} was deleted and created again"
        )
        return (
            f"{what} (its row was {self._anchor} and is now {stream.anchor}): numbers begin at 1 again, so the cursor "
            f"{self._cursor} says nothing about it. Rebuild the read model: a new version of the projection, or manage.py "
            "scriba_reset. If it holds the same events under the same numbers (a copy), say so: UPDATE scriba_segments SET "
            f"anchor = '' WHERE projection_name = '{self._identity.name}'"
        )

    def _check_cursor(self, *, at_most_every_s: float = 0.0) -> None:
        """Compare the cursor with the counter that only grows: above it, this is another store than before."""
        now = time.monotonic()
        if now - self._looked_at < at_most_every_s:
            return
        self._looked_at = now
        stream = self._look()
        counter = 0 if stream is None else stream.version
        if self._cursor <= counter or self._shape.in_recovery:  # a replica may be behind: it will come
            return
        msg = (
            f"this projection has read up to number {self._cursor}, but {self._source.stream} in schema "
            f"{self._source.schema!r} ends at {counter}: the event store was reset or restored. Events that get the same "
            "numbers again would be taken for old ones. Restore the read model to the same moment, or rebuild it: a new "
            "version of the projection, or manage.py scriba_reset."
        )
        raise SourceError(msg)

    def _start(self) -> int:
        """Return the number after which a projection begins that never ran: `start_from`."""
        start = self._source.start_from
        if start == "origin":
            return 0
        if start != "current":
            return int(start)
        stream = self._look()
        return 0 if stream is None else stream.version

    # --- lock and ear -------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Begin to read, or make sure that we still may."""
        if not self._is_reading:
            self._begin()
        elif self._checkpoint is not None:
            self._checkpoint.check()

    def _claim(self) -> SharedCheckpoint:
        connection = self._session("lock", required=True)
        source = self._source
        name = SubscriptionName(source.schema, source.stream, source.subscription_name or self._identity.name)
        try:
            return SharedCheckpoint.claim(
                connection,
                name,
                source.lock_style or self._shape.lock_style,
                self._first_seen,
            )
        except BaseException:
            connection.close()
            raise

    def _first_seen(self) -> int:
        """Return the number for a row that has to be created: what is settled, or where a first run begins."""
        if self._settled is not None:
            return self._settled
        return self._start() if self._resume is None else 0

    def _listen(self) -> None:
        source, shape = self._source, self._shape
        if source.session is None and (shape.in_recovery or self._is_pooled):
            what = "a replica" if shape.in_recovery else "a connection pooler"
            logger.warning(
                "%s: LISTEN does not work through %s: polling only (session= may name a direct connection)",
                self._identity, what, extra=about(self._identity),
            )  # fmt: skip
            return
        self._ear = Ear(lambda: self._session("listener"), shape.channel, self._hint.set, str(self._identity))
        self._ear.start()

    def _session(self, role: str, *, required: bool = False) -> Connection:
        """Open a connection that is a session of its own, as locks and LISTEN need it."""
        connection = self._source.session_connector.connect(self._identity, role)
        if required and self._source.session is None and is_pooled(connection):
            connection.close()
            msg = (
                "checkpoint='shared' holds a lock of its session, and this connection goes through a pooler, which may "
                "hand the session to others. Name a direct connection, or a pool in session mode, with session= (an alias "
                "or a connection string); or use checkpoint='own', which needs no lock."
            )
            raise SourceError(msg)
        return connection

    # --- helpers ------------------------------------------------------------------------------------------

    def _row(self, statement: Any, parameters: dict[str, Any]) -> Any:
        with self._connection.cursor(binary=True) as cursor:
            return cursor.execute(statement, parameters).fetchone()


_ALL_EVENTS: Final = _Stream(0, 0, is_deleted=False, anchor="")


def _utc(at: datetime | None) -> datetime | None:
    return None if at is None else at.astimezone(UTC)


def _as_uuid(text: str) -> uuid.UUID | None:
    try:
        return uuid.UUID(text)
    except ValueError:
        return None
