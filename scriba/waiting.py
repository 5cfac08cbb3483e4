"""`wait_for`: let a reader see its own write.

An event is settled when its key's cursor has reached it, or the watermark has. The cursor commits together with the
read model, so it answers first; the watermark answers for events that were filtered out and for positions that hold
no event at all. Neither is announced by the lanes (a NOTIFY per commit would serialise them). Instead the owner is told
that somebody waits; for as long as that is so, it announces what it has committed, and its watermark trails less.

No announcement can be missed: we listen before we look, and the owner's first announcement comes when it has learnt
that somebody waits, so what was committed before is found by the look that it causes. And nothing depends on it: both
are looked at in any case, in short steps that grow (behind a pooler in transaction mode, inside a transaction, with an
owner that cannot be told).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from django.db import connections, transaction

from scriba.event import ordering_key_in, storable_key
from scriba.exceptions import ConfigurationError, EventDeadLettered, ProjectionHalted, WaitTimeout
from scriba.info import alias_of, read_state
from scriba.ledger import SETTLED_CHANNEL, WISH_CHANNEL
from scriba.listening import BorrowedEar
from scriba.protocols import Shard
from scriba.registry import find

if TYPE_CHECKING:
    from collections.abc import Callable

    from scriba.protocols import Subscription
    from scriba.registry import Projection

__all__ = ["is_so_within", "refuse_to_wait_in_transaction", "wait_for"]

QUIET_S: Final = 0.01  #: most events are settled by then; listening from the start would cost more than it saves
FIRST_STEP_S: Final = 0.01
LONGEST_STEP_S: Final = 0.1  #: while no announcement has come: perhaps none can
LONGEST_HEARD_STEP_S: Final = 1.0  #: once one has
LOOK_EVERY_S: Final = 0.05  #: after a command, whether it is followed
TELL_EVERY_S: Final = 1.0
WAYS: Final = frozenset(
    map(frozenset, ({"position"}, {"position", "stream_id"}, {"event_id"}, {"stream_id", "stream_version"}))
)


class _Place(NamedTuple):
    """Where the event stands: its position, and its ordering key when that is known."""

    position: int
    partition: str = ""
    key: str | None = None


def wait_for(  # noqa: PLR0913 - the contract's signature
    p: object,
    *,
    position: int | None = None,
    event_id: str | None = None,
    stream_id: str | None = None,
    stream_version: int | None = None,
    timeout: float = 5.0,
) -> int:
    """Wait until the projection `p` has settled an event, and return the event's position.

    It is settled when those before it of its ordering key are; in other lanes, events before it may still be on their way.
    Name the event by `position`, by `event_id`, or by `stream_id` and `stream_version` (a `stream_id` beside
    `position` is a hint that makes the answer faster). Call it after the transaction that appended the event has
    committed: before, the event does not exist for the projection. `timeout` is in seconds.

    Raises :class:`~scriba.exceptions.WaitTimeout`; :class:`~scriba.exceptions.EventDeadLettered` when the event was
    given up on; :class:`~scriba.exceptions.ProjectionHalted` when the projection halted before it;
    :class:`~scriba.exceptions.UnknownProjection`.
    """
    _check(position, event_id, stream_id, stream_version)
    wait = _Wait(find(p), timeout)
    try:
        if position is not None:
            return wait.until_settled(_Place(position, key=wait.key_of(stream_id)))
        return wait.until_settled(wait.until_located(event_id, stream_id, stream_version))
    finally:
        wait.close()


def _check(position: int | None, event_id: str | None, stream_id: str | None, stream_version: int | None) -> None:
    """Refuse what names no event, or names it twice."""
    given = {"position": position, "event_id": event_id, "stream_id": stream_id, "stream_version": stream_version}
    names = frozenset(name for name, value in given.items() if value is not None)
    if names not in WAYS:
        msg = (
            "wait_for needs the event named in one way: position=… (with or without stream_id=…), event_id=…, or "
            f"stream_id=… with stream_version=…; given: {', '.join(sorted(names)) or 'nothing'}."
        )
        raise ConfigurationError(msg)


class _Wait:
    """One call: its deadline, its growing steps, and a subscription where one is needed to find the event."""

    def __init__(self, projection: Projection, timeout: float) -> None:
        self._projection = projection
        self._alias = alias_of(projection)
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout
        self._step_s = FIRST_STEP_S
        self._told_at = 0.0
        self._subscription: Subscription | None = None
        self._ear: BorrowedEar | None = None
        self._longest_step_s = LONGEST_STEP_S

    def until_located(self, event_id: str | None, stream_id: str | None, stream_version: int | None) -> _Place:
        """Ask the source where the event stands, again and again while it knows nothing of it."""
        subscription = self._subscribed()
        while (found := subscription.locate(event_id, stream_id, stream_version)) is None:
            wanted = f"event {event_id!r}" if event_id is not None else f"{stream_id!r} version {stream_version}"
            self._rest(f"{self._projection.source.identity()} has no {wanted}: is its transaction committed?")
        partition, position = found
        return _Place(position, partition, self._key_at(position, partition))

    def until_settled(self, place: _Place) -> int:
        while not self._is_settled(place):
            if place.key is None:
                place = place._replace(key=self._key_at(place.position, place.partition))
            self._tell()
            if self._ear is None:
                self._rest("", place, QUIET_S)
                # To listen first and to look afterwards: what is committed in between is not missed.
                self._ear = BorrowedEar(self._alias, SETTLED_CHANNEL, str(self._projection.identity))
            else:
                self._rest("", place)
        return place.position

    def key_of(self, stream_id: str | None) -> str | None:
        """Return the ordering key of a stream, when it is the stream itself."""
        if stream_id is None or self._projection.partition_by is not None:
            return None
        return ordering_key_in("", stream_id)

    def close(self) -> None:
        if self._ear is not None:
            self._ear.close()
        if self._subscription is not None:
            self._subscription.close()

    def _key_at(self, position: int, partition: str) -> str | None:
        """Return the ordering key of the event at `position`; None when there is no event (burnt, filtered out)."""
        from scriba.engine.reader import keyed  # noqa: PLC0415 - the engine is not needed by those who only start and stop

        event = self._subscribed().read(position, partition)
        return None if event is None else keyed(self._projection, event).key

    def _subscribed(self) -> Subscription:
        if self._subscription is None:
            self._subscription = self._projection.source.subscribe(self._projection.identity, [Shard()])
        return self._subscription

    def _is_settled(self, place: _Place) -> bool:
        cursor, watermark, cause, letter = self._look(place)
        if max(cursor, watermark) >= place.position:
            if letter is not None:
                msg = f"{self._projection.identity} gave up on the event at position {place.position}: dead letter {letter}"
                raise EventDeadLettered(msg, letter_id=letter)
            return True
        if cause:
            msg = f"{self._projection.identity} is halted before position {place.position}: {cause}"
            raise ProjectionHalted(msg)
        return False

    def _look(self, place: _Place) -> tuple[int, int, str, int | None]:
        with connections[self._alias].cursor() as cursor:
            key = None if place.key is None else storable_key(place.key)
            cursor.execute(_LOOK, self._identity() | place._asdict() | {"key": key})
            found: tuple[int, int, str, int | None] = cursor.fetchone() or (-1, -1, "", None)
        return found

    def _identity(self) -> dict[str, Any]:
        return {"name": self._projection.name, "version": self._projection.version}

    def _tell(self) -> None:
        """Let the owner know that somebody waits.

        Inside a transaction it could not know before the end, and would meet our row lock; there the watermark keeps
        its ordinary pace.
        """
        connection = connections[self._alias]
        if connection.in_atomic_block or time.monotonic() - self._told_at < TELL_EVERY_S:
            return
        self._told_at = time.monotonic()
        with connection.cursor() as cursor:
            notice = {"channel": WISH_CHANNEL, "payload": str(self._projection.identity)}
            cursor.execute(_TELL, self._identity() | notice)

    def _rest(self, problem: str, place: _Place | None = None, longest_s: float = float("inf")) -> None:
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            raise self._timed_out(problem, place)
        wait_s = min(self._step_s, left_s, longest_s)
        if self._ear is None:
            time.sleep(wait_s)  # noqa: TID251 - the caller waits in its own thread
        elif self._ear.wait(wait_s):
            self._longest_step_s = LONGEST_HEARD_STEP_S
        self._step_s = min(self._step_s * 1.5, self._longest_step_s)

    def _timed_out(self, problem: str, place: _Place | None) -> WaitTimeout:
        state = read_state(self._projection.identity, self._alias)
        wanted = f"position {place.position}" if place else "the event"
        msg = (
            f"{self._projection.identity} had not settled {wanted} after {self._timeout:g} s. "
            + (problem or f"It is {state.status}, its watermark is {state.watermark}. {state.reason}")
        )  # fmt: skip
        return WaitTimeout(msg.strip(), position=place.position if place else None, reached=state.watermark)


def refuse_to_wait_in_transaction(alias: str) -> None:
    """Raise where nothing that is wished could be seen, and so be followed, before the end of the transaction."""
    if connections[alias].in_atomic_block:
        msg = "wait=True inside a transaction waits in vain: nobody sees the wish before the transaction has committed."
        raise transaction.TransactionManagementError(msg)


def is_so_within(is_so: Callable[[], bool], timeout: float) -> bool:
    """Look again and again until `is_so`; False when it was not within `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not is_so():
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            return False
        time.sleep(min(LOOK_EVERY_S, left_s))  # noqa: TID251 - the caller waits in its own thread
    return True


_LOOK: Final = """
SELECT COALESCE((SELECT position FROM scriba_positions
                 WHERE projection_name = %(name)s AND projection_version = %(version)s AND stream_id = %(key)s), -1),
       GREATEST(segment.watermark, projection.floor, -1), projection.halt_cause,
       (SELECT id FROM scriba_dead_letters
        WHERE projection_name = %(name)s AND projection_version = %(version)s AND partition = %(partition)s
          AND position = %(position)s AND status <> 'replayed')
FROM scriba_projections AS projection
LEFT JOIN scriba_segments AS segment USING (projection_name, projection_version)
WHERE projection_name = %(name)s AND projection_version = %(version)s
ORDER BY segment.partition = %(partition)s DESC, slice_from LIMIT 1
"""
_TELL: Final = """
WITH told AS (
  UPDATE scriba_projections SET waited_at = now()
  WHERE projection_name = %(name)s AND projection_version = %(version)s
    AND (waited_at IS NULL OR waited_at < now() - interval '1 second')
  RETURNING 1)
SELECT pg_notify(%(channel)s, %(payload)s) FROM told
"""
