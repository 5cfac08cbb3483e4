"""The column types of PostgreSQL that folding understands: which Python values each takes, and as which text.

Always holds: the text is what the type's input function reads as the very value that the ORM would have stored; a
value that could mean two things (a number that is none) raises :class:`NotFoldable`. Must not
know fields or models.
"""

from __future__ import annotations

import datetime
import decimal
import ipaddress
import json
import re
import uuid
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from psycopg import Binary
from psycopg.types.json import Jsonb
from psycopg.types.numeric import Int2, Int4, Int8

__all__ = ["KEY_KINDS", "KINDS", "TEXT", "TIMESTAMP", "Kind", "NotFoldable"]


class NotFoldable(Exception):  # noqa: N818 - a verdict, not a mistake
    """This value is the ORM's to write: an expression, or a type that the column is not known to take."""


class Kind(NamedTuple):
    """A column type: which Python values it takes, as which text, and whether a text is surely accepted."""

    texts: Mapping[type, Callable[[Any], str]]
    accepts: Callable[[str], bool]
    fields: frozenset[str] = frozenset()  #: Django's fields that hand these values over unchanged


def _float(value: float) -> str:
    return repr(value + 0.0)  # the ORM writes a bare -0.0, which the server reads as 0


def _decimal(value: decimal.Decimal) -> str:
    if not value.is_finite():
        raise NotFoldable
    return str(value)


def _interval(value: datetime.timedelta) -> str:
    # Every part has its own sign: right under each IntervalStyle.
    return f"{value.days:+d} day {value.seconds:+d} second {value.microseconds:+d} microsecond"


def _bytes(value: Binary) -> str:
    return "\\x" + bytes(value.obj).hex()


def _json(value: Jsonb) -> str:
    text = (value.dumps or json.dumps)(value.obj)
    return text if isinstance(text, str) else text.decode()


def _always(_text: str) -> bool:
    return True


def _storable_text(text: str) -> bool:
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:  # a lone surrogate
            return False
    return "\0" not in text


def _storable_json(text: str) -> bool:
    refused = ("\\u0000", "\\ud", "\\uD", "NaN", "Infinity")
    return not any(part in text for part in refused) and _storable_text(text)


def _is_moment(text: str) -> bool:
    return _MOMENT.fullmatch(text) is not None


def _is_clock(text: str) -> bool:
    return len(text) <= len("00:00:00.000000")  # no offset, which the server reads and drops


def _number_up_to(bits: int) -> Callable[[str], bool]:
    return lambda text: -(2**bits) <= int(text) < 2**bits


#: Without an offset the session's zone counts, as it does for the ORM; the server knows no offset of 15 hours or more.
_MOMENT: Final = re.compile(r"[0-9-]{10} [0-9:]{8}(\.[0-9]{6})?([+-](0[0-9]|1[0-4]):(00|30|45))?")

TIMESTAMP: Final = "timestamp with time zone"
_INT_TEXTS: Final[Mapping[type, Callable[[Any], str]]] = {
    kind: lambda value: str(int(value)) for kind in (Int2, Int4, Int8)
} | {int: str}
_INT_FIELDS: Final = frozenset(
    {f"{prefix}IntegerField" for prefix in ("", "Small", "Big", "Positive", "PositiveSmall", "PositiveBig")}
    | {"AutoField", "BigAutoField", "SmallAutoField"}
)
TEXT: Final = Kind({str: str}, _storable_text, frozenset({"CharField", "SlugField", "TextField"}))

KINDS: Final[Mapping[str, Kind]] = {
    "smallint": Kind(_INT_TEXTS, _number_up_to(15), _INT_FIELDS),
    "integer": Kind(_INT_TEXTS, _number_up_to(31), _INT_FIELDS),
    "bigint": Kind(_INT_TEXTS, _number_up_to(63), _INT_FIELDS),
    "text": TEXT,
    "character varying": TEXT,
    "boolean": Kind({bool: {True: "t", False: "f"}.__getitem__}, _always, frozenset({"BooleanField"})),
    "double precision": Kind({float: _float}, _always, frozenset({"FloatField"})),
    "numeric": Kind({decimal.Decimal: _decimal}, lambda _text: False, frozenset({"DecimalField"})),
    "date": Kind({datetime.date: str}, _always, frozenset({"DateField"})),
    TIMESTAMP: Kind({datetime.datetime: str}, _is_moment, frozenset({"DateTimeField"})),
    "time without time zone": Kind({datetime.time: str}, _is_clock, frozenset({"TimeField"})),
    "interval": Kind({datetime.timedelta: _interval}, _always, frozenset({"DurationField"})),
    "uuid": Kind({uuid.UUID: lambda value: value.hex}, _always, frozenset({"UUIDField"})),
    "inet": Kind({ipaddress.IPv4Address: str, ipaddress.IPv6Address: str}, _always),
    "bytea": Kind({Binary: _bytes}, _always),
    "jsonb": Kind({Jsonb: _json}, _storable_json),
}

#: The types whose equal values always have equal texts here (a timestamp after it is moved to UTC).
KEY_KINDS: Final = frozenset({"smallint", "integer", "bigint", "text", "character varying", "uuid", "date", TIMESTAMP})
