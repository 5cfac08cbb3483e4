"""Dead letters: written in the batch's own transaction, so writing one must never be what makes a batch fail.

What always holds: any event with any error can be stored (texts are cleaned and bounded, payloads encoded and cut with
a mark, a ``redact`` that raises hides everything); there is one row per (projection, partition, position), and failing
again reopens it; when a letter ends, the first one parked behind it inherits the wish *replay* in the same statement's
transaction, unless it waits for another one, too. Must not decide anything: whether an event is given up on, and in which order, is the engine's business.
"""

from __future__ import annotations

import copy
import datetime as dt
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from scriba.conf import scriba_settings
from scriba.event import Event, Payload, storable_key
from scriba.positions import array_of, raise_applied
from scriba.protocols import StoredLetter
from scriba.stored_json import Cut, NotRestorable, Redacted, decode, encode, storable_text

if TYPE_CHECKING:
    from django.db.backends.utils import CursorWrapper

    from scriba.conf import Settings
    from scriba.protocols import Identity, Letter, Resolution

__all__ = ["find_letter", "held_keys", "next_parked", "resolve_letter", "write_letters"]

LONGEST_NAME: Final = 2_000  #: characters of ids, types and kinds
LONGEST_MESSAGE: Final = 10_000
LONGEST_STACKTRACE: Final = 60_000


# --- Writing --------------------------------------------------------------------------------------------


def write_letters(cursor: CursorWrapper, identity: Identity, letters: Sequence[Letter]) -> None:
    """Store `letters` (at most one per position) in one statement; one that is there already is open again."""
    if not letters:
        return
    settings = scriba_settings()
    rows = [_row(letter, settings) for letter in letters]
    columns = {name: array_of([row[name] for row in rows]) for name in rows[0]}
    cursor.execute(_WRITE, {**_named(identity), **columns})


def _row(letter: Letter, settings: Settings) -> dict[str, str | int | None]:
    event = letter.event
    data, metadata = _stored(event, settings)
    return {
        "partition": storable_text(event.partition, LONGEST_NAME),
        "position": event.position,
        "stream_id": storable_key(letter.key),
        "event_id": storable_text(event.id, LONGEST_NAME),
        "event_type": storable_text(event.type, LONGEST_NAME),
        "event_data": data,
        "event_metadata": metadata,
        "event_occurred_at": _moment(event.occurred_at),
        **_error(letter),
        "attempts": letter.attempts,
        "status": letter.status,
    }


def _error(letter: Letter) -> dict[str, str]:
    return {
        "error_kind": storable_text(letter.error_kind, LONGEST_NAME),
        "error_message": storable_text(letter.message, LONGEST_MESSAGE),
        "error_stacktrace": storable_text(letter.stacktrace, LONGEST_STACKTRACE),
        "fingerprint": storable_text(letter.fingerprint, LONGEST_NAME),
    }


def _stored(event: Event, settings: Settings) -> tuple[str, str]:
    """Return data and metadata as JSON texts."""
    try:
        data, metadata = event.stored()
    except Exception as error:  # noqa: BLE001 - a codec that breaks its promise
        data, metadata = Cut(f"the source could not say what it stored: {type(error).__qualname__}"), {}
    longest = settings.max_letter_bytes
    return encode(_redacted(event, data, settings), longest), encode(metadata, longest)


def _redacted(event: Event, data: Any, settings: Settings) -> Any:
    """Return what may be stored. A payload that is not what the event had must not be applied as if it were."""
    if settings.redact is None or isinstance(data, Cut):
        return data
    try:
        allowed = settings.redact(event.type, _copy(data))
        return data if allowed == data else Redacted(allowed)
    except (Exception, SystemExit, GeneratorExit) as error:  # noqa: BLE001 - nothing may leak, not even its message
        return Cut(f"the redaction failed: {type(error).__qualname__}")


def _copy(data: Any) -> Any:
    """Return a copy: a redaction that works in place must not change the event, whose batch may be repeated."""
    try:
        return copy.deepcopy(data)
    except Exception:  # noqa: BLE001 - no plain value
        return data


def _moment(moment: object) -> str | None:
    """Return the event's time as text; None when it is none that PostgreSQL knows."""
    if not isinstance(moment, dt.datetime):
        return None
    try:
        aware = moment if moment.utcoffset() is not None else moment.replace(tzinfo=dt.UTC)
        return aware.astimezone(dt.UTC).isoformat()
    except Exception:  # noqa: BLE001 - the first and the last day of time, a time zone that raises
        return None


# --- Resolving ------------------------------------------------------------------------------------------


def resolve_letter(cursor: CursorWrapper, identity: Identity, done: Resolution) -> None:
    """Write what became of a letter, take its wish away, and hand it on when the letter has ended or moved."""
    params = {
        **_named(identity),
        "letter": done.letter,
        "status": done.status,
        "by": storable_text(done.by, LONGEST_NAME),
    }
    if done.key is not None:
        _move(cursor, params, done.key)
        return
    if done.failed is not None:
        cursor.execute(_FAIL_AGAIN, {**params, **_error(done.failed), "attempts": done.failed.attempts})
    cursor.execute(_RESOLVE, {**params, "note": storable_text(done.note, LONGEST_MESSAGE)})
    if done.applied is not None:
        raise_applied(cursor, identity, done.applied)
    if done.status in {"replayed", "discarded"}:
        cursor.execute(_HAND_ON, {**params, "left": None})


def _move(cursor: CursorWrapper, params: dict[str, Any], key: str) -> None:
    """Let a letter wait under another key, its wish with it, and hand the wish on to the one that it was in front of."""
    cursor.execute(_KEY, params)
    (left,) = cursor.fetchone()
    cursor.execute(_MOVE, {**params, "key": storable_key(key)})
    cursor.execute(_HAND_ON, {**params, "left": left})


# --- Reading --------------------------------------------------------------------------------------------


def held_keys(cursor: CursorWrapper, identity: Identity, keys: Sequence[str]) -> set[str]:
    """Return those of `keys` that have an unresolved letter."""
    by_stored = {storable_key(key): key for key in keys}
    cursor.execute(_HELD, {**_named(identity), "keys": array_of(list(by_stored))})
    return {by_stored[stored] for (stored,) in cursor.fetchall()}


def find_letter(cursor: CursorWrapper, identity: Identity, letter: int) -> StoredLetter | None:
    """Lock and return an unresolved letter; None when it is resolved or gone."""
    cursor.execute(_FIND, {**_named(identity), "letter": letter})
    row = cursor.fetchone()
    return _letter(row) if row else None


def next_parked(cursor: CursorWrapper, identity: Identity, key: str, partition: str, after: int) -> StoredLetter | None:
    """Return the first letter of `key` that is parked behind position `after`."""
    place: dict[str, Any] = {
        "key": storable_key(key),
        "partition": storable_text(partition, LONGEST_NAME),
        "after": after,
    }
    cursor.execute(_NEXT_PARKED, {**_named(identity), **place})
    row = cursor.fetchone()
    return _letter(row) if row else None


class _Unrestorable:
    """The codec of a letter whose payload cannot be rebuilt: replaying it needs the source."""

    def __init__(self, reason: str, stored: tuple[Any, Any]) -> None:
        self._reason = reason
        self._stored = stored

    def decode(self, event: Event) -> Payload:
        msg = f"the stored payload of position {event.position} cannot be replayed ({self._reason}), and its source has it no more."
        raise NotRestorable(msg)

    def stored(self, event: Event) -> tuple[Any, Any]:
        del event
        return self._stored


def _letter(row: Sequence[Any]) -> StoredLetter:
    letter, position, partition, key, event_id, event_type, occurred_at, status, attempts, behind, *payload = row
    data, metadata = (json.loads(text) if text is not None else None for text in payload)
    event = Event(position, key, event_type, event_id, occurred_at=occurred_at, partition=partition)
    try:
        event = event._replace(raw=decode(data), raw_metadata=decode(metadata))
    except Exception as error:  # noqa: BLE001 - cut, only described, or written by somebody else
        event = event._replace(codec=_Unrestorable(str(error), (data, metadata)))
    return StoredLetter(letter, event, key, status, attempts, behind)


def _named(identity: Identity) -> dict[str, Any]:
    return {"name": identity.name, "version": identity.version}


_TYPES: Final[Mapping[str, str]] = {
    "partition": "text", "position": "bigint", "stream_id": "text", "event_id": "text", "event_type": "text",
    "event_data": "text", "event_metadata": "text", "event_occurred_at": "timestamptz", "error_kind": "text",
    "error_message": "text", "error_stacktrace": "text", "fingerprint": "text", "attempts": "int", "status": "text",
}  # fmt: skip
_JSON: Final = frozenset({"event_data", "event_metadata"})
_OURS: Final = "projection_name = %(name)s AND projection_version = %(version)s"
_UNRESOLVED: Final = "status IN ('open', 'parked')"

#: A wish on the row stays: it may have been written since, and what it asks for is still to be done.
_WRITE: Final = f"""
INSERT INTO scriba_dead_letters AS known (projection_name, projection_version, {", ".join(_TYPES)}, occurred_at)
SELECT %(name)s, %(version)s, {", ".join(f"{name}::jsonb" if name in _JSON else name for name in _TYPES)}, now()
FROM unnest({", ".join(f"%({name})s::{kind}[]" for name, kind in _TYPES.items())}) AS given ({", ".join(_TYPES)})
ORDER BY position
ON CONFLICT (projection_name, projection_version, partition, position) DO UPDATE
SET {", ".join(f"{name} = excluded.{name}" for name in _TYPES if name not in {"partition", "position", "attempts"})},
    attempts = known.attempts + excluded.attempts, occurred_at = excluded.occurred_at,
    resolved_at = NULL, resolved_by = '', note = ''
"""

_FAIL_AGAIN: Final = f"""
UPDATE scriba_dead_letters
SET error_kind = %(error_kind)s, error_message = %(error_message)s, error_stacktrace = %(error_stacktrace)s,
    fingerprint = %(fingerprint)s, attempts = %(attempts)s, occurred_at = now()
WHERE id = %(letter)s AND {_OURS}
"""

_RESOLVE: Final = f"""
UPDATE scriba_dead_letters
SET status = %(status)s, wish = '', wish_by = '', wished_at = NULL, allow_out_of_order = false, note = %(note)s,
    resolved_at = CASE WHEN %(status)s IN ('open', 'parked') THEN NULL ELSE now() END,
    resolved_by = CASE WHEN %(status)s IN ('open', 'parked') THEN '' ELSE %(by)s END
WHERE id = %(letter)s AND {_OURS}
"""

_KEY: Final = f"SELECT stream_id FROM scriba_dead_letters WHERE id = %(letter)s AND {_OURS}"
_MOVE: Final = f"""
UPDATE scriba_dead_letters SET stream_id = %(key)s, status = %(status)s, note = '' WHERE id = %(letter)s AND {_OURS}
"""

#: What a letter waits for: the first unresolved one of its key in front of it.
_EARLIER: Final = """
  SELECT earlier.id FROM scriba_dead_letters AS earlier
  WHERE earlier.projection_name = {letter}.projection_name AND earlier.projection_version = {letter}.projection_version
    AND earlier.stream_id = {letter}.stream_id AND earlier.partition = {letter}.partition
    AND earlier.position < {letter}.position AND earlier.status IN ('open', 'parked')
  ORDER BY earlier.position LIMIT 1"""

_HAND_ON: Final = f"""
UPDATE scriba_dead_letters AS next
SET wish = 'replay', wish_by = %(by)s, wished_at = now()
FROM scriba_dead_letters AS ended
WHERE ended.id = %(letter)s AND next.wish = '' AND next.id = (
  SELECT id FROM scriba_dead_letters
  WHERE {_OURS} AND status = 'parked'
    AND stream_id = COALESCE(%(left)s::text, ended.stream_id) AND partition = ended.partition
    AND position > ended.position
  ORDER BY position LIMIT 1)
  AND NOT EXISTS ({_EARLIER.format(letter="next")})
"""

_HELD: Final = f"""
SELECT DISTINCT stream_id FROM scriba_dead_letters
WHERE {_OURS} AND {_UNRESOLVED} AND stream_id = ANY(%(keys)s::text[])
"""

#: JSON as text: what parses it must not depend on how this connection was set up.
_COLUMNS: Final = (
    "id, position, partition, stream_id, event_id, event_type, event_occurred_at, status, attempts, "
    f"({_EARLIER.format(letter='letter')}) AS behind, event_data::text, event_metadata::text"
)
_FIND: Final = f"""
SELECT {_COLUMNS} FROM scriba_dead_letters AS letter WHERE id = %(letter)s AND {_OURS} AND {_UNRESOLVED} FOR UPDATE
"""
_NEXT_PARKED: Final = f"""
SELECT {_COLUMNS} FROM scriba_dead_letters AS letter
WHERE {_OURS} AND status = 'parked' AND stream_id = %(key)s AND partition = %(partition)s AND position > %(after)s
ORDER BY position LIMIT 1
"""
