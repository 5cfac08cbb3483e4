"""Any Python value as JSON that PostgreSQL can store, and back where that makes sense. Encoding never fails.

JSON values stay as they are, so that operators can query them. Whatever JSON has no word for becomes an object with
one key that begins with ``$``::

    {"$bytes": base64}  {"$decimal": "1.10"}  {"$uuid": …}  {"$datetime": …}  {"$date": …}  {"$time": …}
    {"$timedelta": [days, seconds, microseconds]}  {"$tuple": […]}  {"$set": […]}  {"$frozenset": […]}
    {"$float": "nan"}  {"$int": hexadecimal, when too long}  {"$text": escaped, for NUL and lone surrogates}
    {"$pairs": [[key, value], …]}, for a dict whose keys are no plain texts
    {"$object": class, "fields": {…}} or {"$object": class, "repr": …}, of anything else
    {"$cut": reason, …}, where something was left out
    {"$redacted": …}, what a redaction has left of it

The last three do not come back: :func:`decode` raises :class:`NotRestorable` for the whole.
"""

from __future__ import annotations

import base64
import dataclasses
import datetime as dt
import json
import math
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any, Final, NamedTuple
from uuid import UUID

__all__ = ["Cut", "NotRestorable", "Redacted", "decode", "encode", "storable_text"]

DEEPEST: Final = 60  #: levels of containers
LONGEST_INT_BITS: Final = 4096  #: longer ones are slow in decimal, and Python refuses them at 4,300 digits
LONGEST_REPR: Final = 2_000


class NotRestorable(ValueError):  # noqa: N818 - says what it is
    """A part of the value was cut or stored as a description only: half of it must never be applied."""


class Cut(NamedTuple):
    """Stands where something could not be stored, and says why."""

    reason: str


class Redacted(NamedTuple):
    """What a redaction has left: good to look at, never to apply."""

    value: Any


def encode(value: Any, longest: int) -> str:
    """Return `value` as JSON text of at most `longest` bytes; what is longer is cut, with a mark."""
    text = json.dumps(_plain(value, frozenset(), DEEPEST), ensure_ascii=False, allow_nan=False)
    size = len(text.encode())
    return text if size <= longest else _shortened(text, size, longest)


def decode(stored: Any) -> Any:
    """Return the value behind what :func:`encode` made and PostgreSQL gave back (parsed JSON).

    Raises :class:`NotRestorable` when a part of it cannot be rebuilt.
    """
    if isinstance(stored, list):
        return [decode(item) for item in stored]
    if not isinstance(stored, dict):
        return stored
    tag = next((key for key in stored if key[:1] == "$"), None)
    if tag is None:
        return {key: decode(item) for key, item in stored.items()}
    if tag in _NO_WAY_BACK:
        raise NotRestorable(_NO_WAY_BACK[tag].format(stored[tag]))
    decoder = _BY_TAG.get(tag)
    return stored if decoder is None else decoder(stored[tag])


def storable_text(value: object, longest: int) -> str:
    """Return `value` as text that PostgreSQL can store: NUL and lone surrogates escaped, cut with a mark."""
    try:
        text = str(value)
    except Exception:  # noqa: BLE001 - a __str__ that raises
        text = f"({type(value).__qualname__} cannot be shown)"
    text = text if len(text) <= longest else text[:longest] + " … (cut)"
    return text.replace("\x00", "\\x00").encode("utf-8", "backslashreplace").decode("utf-8")


# --- Encoding -------------------------------------------------------------------------------------------


def _plain(value: Any, above: frozenset[int], depth: int) -> Any:
    """Return `value` in JSON's own words. `above` are the containers around it: one inside itself has no end."""
    if value is None or value is True or value is False:
        return value
    try:
        encoder = _BY_TYPE.get(type(value))
        if encoder:
            return encoder(value)
        if id(value) in above:
            return {"$cut": "contains itself"}
        if depth == 0:
            return {"$cut": f"deeper than {DEEPEST} levels"}
        inner = above | {id(value)}
        return _container(value, lambda item: _plain(item, inner, depth - 1))
    except Exception as error:  # noqa: BLE001 - an object that fights back must not keep its letter from being stored
        return {"$cut": f"not encodable: {type(error).__qualname__}"}


def _container(value: Any, plain: Callable[[Any], Any]) -> Any:
    for kind, encoder in _BY_KIND:
        if isinstance(value, kind):
            return encoder(value, plain)
    return _object(value, plain)


def _text(value: str) -> Any:
    if value.isascii():
        return value if "\x00" not in value else {"$text": json.dumps(value)[1:-1]}
    try:
        value.encode()
    except UnicodeEncodeError:
        return {"$text": json.dumps(value)[1:-1]}
    return value if "\x00" not in value else {"$text": json.dumps(value)[1:-1]}


def _int(value: int) -> Any:
    return value if value.bit_length() <= LONGEST_INT_BITS else {"$int": hex(value)}


def _float(value: float) -> Any:
    return value if math.isfinite(value) else {"$float": str(value)}


def _bytes(value: bytes | bytearray | memoryview) -> Any:
    return {"$bytes": base64.b64encode(value).decode("ascii")}


_BY_TYPE: Final[Mapping[type, Callable[[Any], Any]]] = {
    str: _text,
    int: _int,
    float: _float,
    bytes: _bytes,
    bytearray: _bytes,
    memoryview: _bytes,
    Decimal: lambda value: {"$decimal": str(value)},
    UUID: lambda value: {"$uuid": str(value)},
    dt.datetime: lambda value: {"$datetime": value.isoformat()},
    dt.date: lambda value: {"$date": value.isoformat()},
    dt.time: lambda value: {"$time": value.isoformat()},
    dt.timedelta: lambda value: {"$timedelta": [value.days, value.seconds, value.microseconds]},
    Cut: lambda value: {"$cut": _text(value.reason)},
}


def _mapping(value: Mapping[Any, Any], plain: Callable[[Any], Any]) -> Any:
    if all(type(key) is str and key[:1] != "$" and type(_text(key)) is str for key in value):
        return {key: plain(item) for key, item in value.items()}
    return {"$pairs": [[plain(key), plain(item)] for key, item in value.items()]}


def _list(value: list[Any], plain: Callable[[Any], Any]) -> Any:
    return [plain(item) for item in value]


def _tuple(value: tuple[Any, ...], plain: Callable[[Any], Any]) -> Any:
    if hasattr(value, "_fields"):
        return _fields(value, dict(zip(value._fields, value, strict=False)), plain)
    return {"$tuple": [plain(item) for item in value]}


def _set(value: set[Any], plain: Callable[[Any], Any]) -> Any:
    return {"$set": [plain(item) for item in value]}


def _frozenset(value: frozenset[Any], plain: Callable[[Any], Any]) -> Any:
    return {"$frozenset": [plain(item) for item in value]}


#: In this order. Subclasses of the simple types (enumerations among them) are kept as what they are made of.
_BY_KIND: Final[tuple[tuple[type, Callable[[Any, Callable[[Any], Any]], Any]], ...]] = (
    (Redacted, lambda value, plain: {"$redacted": plain(value.value)}),
    (Mapping, _mapping),
    (list, _list),
    (tuple, _tuple),
    (set, _set),
    (frozenset, _frozenset),
    (str, lambda value, _: _text(str.__str__(value))),
    (int, lambda value, _: _int(int.__int__(value))),
    (float, lambda value, _: _float(float.__float__(value))),
    (bytes, lambda value, _: _bytes(bytes(value))),
)


def _object(value: Any, plain: Callable[[Any], Any]) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return _fields(value, {name: getattr(value, name, None) for name in names}, plain)
    return {"$object": _name(value), "repr": _text(_repr(value))}


def _fields(value: Any, fields: Mapping[str, Any], plain: Callable[[Any], Any]) -> Any:
    return {"$object": _name(value), "fields": {name: plain(item) for name, item in fields.items()}}


def _name(value: Any) -> str:
    return storable_text(f"{type(value).__module__}.{type(value).__qualname__}", LONGEST_REPR)


def _repr(value: Any) -> str:
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - a __repr__ that raises
        return "(cannot be shown: its __repr__ raises)"
    return text if len(text) <= LONGEST_REPR else text[:LONGEST_REPR] + " …"


def _shortened(text: str, size: int, longest: int) -> str:
    """Return an object that holds the beginning of `text`, whose quotes and backslashes count twice in there."""
    reason = f"{size} bytes, of which the first are kept"
    head = text[:longest]
    while True:
        short = json.dumps({"$cut": reason, "head": head}, ensure_ascii=False)
        if len(short.encode()) <= longest or not head:
            return short
        head = head[: len(head) * 3 // 4]


# --- Decoding -------------------------------------------------------------------------------------------


def _pairs(stored: list[Any]) -> dict[Any, Any]:
    return {decode(key): decode(item) for key, item in stored}


_NO_WAY_BACK: Final[Mapping[str, str]] = {
    "$cut": "it was not stored completely: {}",
    "$object": "only a description of a {} was stored",
    "$redacted": "it was redacted",
}
_BY_TAG: Final[Mapping[str, Callable[[Any], Any]]] = {
    "$bytes": base64.b64decode,
    "$decimal": Decimal,
    "$uuid": UUID,
    "$datetime": dt.datetime.fromisoformat,
    "$date": dt.date.fromisoformat,
    "$time": dt.time.fromisoformat,
    "$timedelta": lambda parts: dt.timedelta(*parts),
    "$tuple": lambda items: tuple(decode(item) for item in items),
    "$set": lambda items: {decode(item) for item in items},
    "$frozenset": lambda items: frozenset(decode(item) for item in items),
    "$float": float,
    "$int": lambda digits: int(digits, 16),
    "$text": lambda escaped: json.loads(f'"{escaped}"'),
    "$pairs": _pairs,
}
