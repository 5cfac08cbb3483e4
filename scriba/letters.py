"""Dead letters as rows: writing one can never itself fail the batch.

Whatever an event or an exception holds (NUL, lone surrogates, NaN, bytes, Decimal, sets, objects, five megabytes) is
made storable first. Letters are unique per (projection, partition, position) and written by upsert: an event that
fails again after a reset reopens its row.
"""

from __future__ import annotations

import base64
import dataclasses
import datetime as dt
import decimal
import enum
import json
import math
import uuid
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from scriba.conf import scriba_settings
from scriba.event import Event
from scriba.protocols import StoredLetter

if TYPE_CHECKING:
    from django.db.backends.utils import CursorWrapper

    from scriba.protocols import Identity, Letter, Resolution

__all__ = ["held_keys", "jsonable", "lock", "next_parked", "resolve", "storable", "store", "stored_data"]

ROWS_AT_ONCE: Final = 200
DEEPEST: Final = 30
LONGEST_NAME: Final = 2_000

#: How values without a JSON form are written, so that a person and `stored_data` can read them back.
_TAGS: Final = ("$bytes", "$decimal", "$uuid", "$datetime", "$date", "$time", "$timedelta", "$float", "$set", "$tuple")


# --- writing --------------------------------------------------------------------------------------------


def store(cursor: CursorWrapper, identity: Identity, letters: Sequence[Letter]) -> None:
    """Write `letters` in the batch's transaction; a position that has a letter already is reopened."""
    for start in range(0, len(letters), ROWS_AT_ONCE):
        rows = [_row(identity, letter) for letter in letters[start : start + ROWS_AT_ONCE]]
        values = ", ".join([_VALUES] * len(rows))
        cursor.execute(f"{_INSERT} VALUES {values} {_ON_CONFLICT}", [value for row in rows for value in row])


def resolve(cursor: CursorWrapper, identity: Identity, done: Resolution) -> None:
    """Write what became of a letter and take its wish away; its end passes the wish to the next one behind it."""
    failed = done.failed
    cursor.execute(
        "UPDATE scriba_dead_letters SET status = %(status)s, wish = '', wished_at = NULL, allow_out_of_order = false, "
        "  note = %(note)s, "
        "  resolved_at = CASE WHEN %(ended)s THEN now() END, resolved_by = CASE WHEN %(ended)s THEN %(by)s ELSE '' END "
        "WHERE id = %(id)s RETURNING stream_id, partition, position",
        {"status": done.status, "note": storable(done.note), "ended": done.status in _ENDED, "by": storable(done.by), "id": done.letter},
    )
    row = cursor.fetchone()
    if failed is not None:
        cursor.execute(
            "UPDATE scriba_dead_letters SET error_kind = %s, error_message = %s, error_stacktrace = %s, fingerprint = %s, "
            "  attempts = %s, occurred_at = now() WHERE id = %s",
            [storable(failed.error_kind), storable(failed.message), storable(failed.stacktrace), failed.fingerprint,
             failed.attempts, done.letter],
        )  # fmt: skip
    if row is not None and done.status in _ENDED:
        cursor.execute(
            "UPDATE scriba_dead_letters SET wish = 'replay', wish_by = %s, wished_at = now() WHERE id = ("
            "  SELECT id FROM scriba_dead_letters WHERE projection_name = %s AND projection_version = %s "
            "  AND stream_id = %s AND partition = %s AND position > %s AND status = 'parked' ORDER BY position LIMIT 1)",
            [storable(done.by), *identity, *row],
        )


# --- reading --------------------------------------------------------------------------------------------


def held_keys(cursor: CursorWrapper, identity: Identity, keys: Sequence[str]) -> set[str]:
    """Return those of `keys` that have an open or parked letter."""
    cursor.execute(
        "SELECT DISTINCT stream_id FROM scriba_dead_letters WHERE projection_name = %s AND projection_version = %s "
        "AND stream_id = ANY(%s) AND status IN ('open', 'parked')",
        [*identity, list(keys)],
    )
    return {key for (key,) in cursor.fetchall()}


def lock(cursor: CursorWrapper, letter: int) -> StoredLetter | None:
    """Lock and return an unresolved letter; None when it is resolved or gone."""
    cursor.execute(f"{_SELECT} WHERE id = %s AND status IN ('open', 'parked') FOR UPDATE", [letter])
    return _stored(cursor.fetchone())


def next_parked(cursor: CursorWrapper, identity: Identity, key: str, partition: str, after: int) -> StoredLetter | None:
    """Return the first parked letter of `key` behind position `after`."""
    cursor.execute(
        f"{_SELECT} WHERE projection_name = %s AND projection_version = %s AND stream_id = %s AND partition = %s "
        "AND position > %s AND status = 'parked' ORDER BY position LIMIT 1",
        [*identity, key, partition, after],
    )
    return _stored(cursor.fetchone())


def _stored(row: tuple[Any, ...] | None) -> StoredLetter | None:
    if row is None:
        return None
    letter, position, stream, partition, event_id, event_type, data, metadata, occurred_at, status, attempts = row
    event = Event(
        position, stream, event_type, event_id, stored_data(json.loads(data) if data else None),
        stored_data(json.loads(metadata) if metadata else {}), occurred_at, partition=partition,
    )  # fmt: skip
    return StoredLetter(letter, event, stream, status, attempts)


def stored_data(value: Any) -> Any:
    """Return what :func:`jsonable` made of a value, with tagged values turned back."""
    if isinstance(value, dict):
        if len(value) == 1:
            ((tag, text),) = value.items()
            if tag in _BACK:
                return _BACK[tag](text)
        return {key: stored_data(item) for key, item in value.items()}
    return [stored_data(item) for item in value] if isinstance(value, list) else value


# --- making things storable -------------------------------------------------------------------------------


def storable(text: str, longest: int | None = None) -> str:
    """Return `text` as PostgreSQL can store it: NUL and lone surrogates written out, cut with a mark if too long."""
    if "\0" in text:
        text = text.replace("\0", "\\x00")
    try:
        text.encode()
    except UnicodeEncodeError:
        text = text.encode("utf-8", "backslashreplace").decode()
    return text if longest is None or len(text) <= longest else f"{text[:longest]} … (cut)"


def jsonable(value: Any, within: tuple[int, ...] = ()) -> Any:  # noqa: C901, PLR0911, PLR0912 - one line per kind of value
    """Return `value` in JSON types; what has no JSON form is tagged, what is unknown is its ``repr``.

    `within` are the ids of the containers around it: one that holds itself ends there.
    """
    if value is None or isinstance(value, bool | int) and not isinstance(value, enum.Enum):
        return value
    if isinstance(value, str):
        return storable(str(value))
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": repr(value)}
    if id(value) in within or len(within) > DEEPEST:
        return "… (recursive)" if id(value) in within else "… (too deep)"
    within = (*within, id(value))
    if isinstance(value, Mapping):
        return {_text(key): jsonable(item, within) for key, item in value.items()}
    if isinstance(value, bytes | bytearray | memoryview):
        return {"$bytes": base64.b64encode(bytes(value)).decode()}
    if isinstance(value, decimal.Decimal):
        return {"$decimal": str(value)}
    if isinstance(value, uuid.UUID):
        return {"$uuid": str(value)}
    if isinstance(value, dt.datetime):
        return {"$datetime": value.isoformat()}
    if isinstance(value, dt.date):
        return {"$date": value.isoformat()}
    if isinstance(value, dt.time):
        return {"$time": value.isoformat()}
    if isinstance(value, dt.timedelta):
        return {"$timedelta": [value.days, value.seconds, value.microseconds]}
    if isinstance(value, enum.Enum):
        return jsonable(value.value, within)
    if isinstance(value, set | frozenset):
        return {"$set": sorted((jsonable(item, within) for item in value), key=repr)}
    if isinstance(value, tuple):
        return {"$tuple": [jsonable(item, within) for item in value]}
    if isinstance(value, list):
        return [jsonable(item, within) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: jsonable(getattr(value, field.name, None), within) for field in dataclasses.fields(value)}
    return _text(value)


def _text(value: Any) -> str:
    try:
        return storable(value if isinstance(value, str) else repr(value), LONGEST_NAME)
    except Exception as error:  # noqa: BLE001 - a __repr__ that raises must not keep a letter from being written
        return f"({type(value).__qualname__} whose __repr__ raised {type(error).__qualname__})"


def _row(identity: Identity, letter: Letter) -> list[Any]:
    event = letter.event
    data, metadata = _contents(letter)
    return [
        *identity, storable(event.partition), event.position, storable(letter.key), storable(event.id),
        storable(event.type), data, metadata, event.occurred_at, storable(letter.error_kind),
        storable(letter.message), storable(letter.stacktrace), letter.fingerprint, letter.attempts, letter.status,
    ]  # fmt: skip


def _contents(letter: Letter) -> tuple[str, str]:
    """Return (data, metadata) as JSON texts, redacted and bounded."""
    settings = scriba_settings()
    try:
        data, metadata = letter.event.stored()
    except Exception as error:  # noqa: BLE001 - a codec's stored() must not keep a letter from being written
        data, metadata = {"$unreadable": type(error).__qualname__}, {}
    if settings.redact is not None:
        try:
            data = settings.redact(letter.event.type, data)
        except Exception as error:  # noqa: BLE001 - a redaction that fails must not leak what it should have hidden
            data = {"$redact_failed": type(error).__qualname__}
    return _bounded(data, settings.max_letter_bytes), _bounded(metadata, settings.max_letter_bytes)


def _bounded(value: Any, most_bytes: int) -> str:
    text = _dumps(value)
    size = len(text.encode("utf-8", "replace"))
    if size <= most_bytes:
        return text
    return _dumps({"$cut": text[: most_bytes // 4], "$bytes_in_all": size})


def _dumps(value: Any) -> str:
    try:
        return json.dumps(jsonable(value), ensure_ascii=False, allow_nan=False)
    except Exception as error:  # noqa: BLE001 - for example a mapping whose items() raises
        return json.dumps({"$unreadable": type(error).__qualname__})


_BACK: Final[Mapping[str, Any]] = {
    "$bytes": base64.b64decode,
    "$decimal": decimal.Decimal,
    "$uuid": uuid.UUID,
    "$datetime": dt.datetime.fromisoformat,
    "$date": dt.date.fromisoformat,
    "$time": dt.time.fromisoformat,
    "$timedelta": lambda parts: dt.timedelta(*parts),
    "$float": float,
    "$set": lambda items: {stored_data(item) for item in items},
    "$tuple": lambda items: tuple(stored_data(item) for item in items),
}
_ENDED: Final = ("replayed", "discarded")
_SELECT: Final = (
    "SELECT id, position, stream_id, partition, event_id, event_type, event_data::text, event_metadata::text, "
    "event_occurred_at, status, attempts FROM scriba_dead_letters"
)
_INSERT: Final = """
INSERT INTO scriba_dead_letters AS letter
    (projection_name, projection_version, partition, position, stream_id, event_id, event_type, event_data,
     event_metadata, event_occurred_at, error_kind, error_message, error_stacktrace, fingerprint, attempts, status)
"""
_VALUES: Final = "(%s, %s, %s, %s, %s, %s, %s, %s::jsonb, %s::jsonb, %s::timestamptz, %s, %s, %s, %s, %s, %s)"
_ON_CONFLICT: Final = """
ON CONFLICT (projection_name, projection_version, partition, position) DO UPDATE SET
    stream_id = excluded.stream_id, event_id = excluded.event_id, event_type = excluded.event_type,
    event_data = excluded.event_data, event_metadata = excluded.event_metadata,
    event_occurred_at = excluded.event_occurred_at, error_kind = excluded.error_kind,
    error_message = excluded.error_message, error_stacktrace = excluded.error_stacktrace,
    fingerprint = excluded.fingerprint, attempts = letter.attempts + excluded.attempts, status = excluded.status,
    occurred_at = now(), resolved_at = NULL, resolved_by = '', wish = '', wished_at = NULL, note = ''
"""
