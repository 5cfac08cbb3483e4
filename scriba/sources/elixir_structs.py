"""What an Elixir struct becomes in Python: a plain dict, or the text that the JSON serializer would have written.

Decimal, Date, Time, NaiveDateTime and DateTime are the structs of Elixir whose JSON form is a text; every other one
is its fields, without the module's name. A struct that only claims to be one of these stays a dict.
"""

from __future__ import annotations

from decimal import Decimal, DecimalException
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["plain_struct"]


def plain_struct(name: Any, fields: dict[Any, Any]) -> Any:
    """Return the plain value of the struct `name` (``"Elixir.Decimal"``) with these `fields`."""
    text = _TEXTS.get(name) if isinstance(name, str) else None
    if text is None:
        return fields
    try:
        return text(fields)
    except (KeyError, TypeError, ValueError, DecimalException):
        return fields


def _decimal(fields: Mapping[Any, Any]) -> str:
    sign = {1: 0, -1: 1}[fields["sign"]]
    coefficient = fields["coef"]
    if coefficient in ("NaN", "inf"):
        return "NaN" if coefficient == "NaN" else ("-Infinity" if sign else "Infinity")
    digits = tuple(map(int, str(_whole(coefficient))))
    return str(Decimal((sign, digits, _whole(fields["exp"], -(10**9), 10**9))))


def _date(fields: Mapping[Any, Any]) -> str:
    year = _whole(fields["year"], low=-9999, high=9999)
    month, day = _whole(fields["month"], 1, 12), _whole(fields["day"], 1, 31)
    return f"{'-' if year < 0 else ''}{abs(year):04}-{month:02}-{day:02}"


def _time(fields: Mapping[Any, Any]) -> str:
    hour, minute, second = (
        _whole(fields["hour"], 0, 23),
        _whole(fields["minute"], 0, 59),
        _whole(fields["second"], 0, 60),
    )
    value, precision = fields["microsecond"]
    fraction = f"{_whole(value, 0, 999_999):06}"[: _whole(precision, 0, 6)]
    return f"{hour:02}:{minute:02}:{second:02}{'.' if fraction else ''}{fraction}"


def _naive(fields: Mapping[Any, Any]) -> str:
    return f"{_date(fields)}T{_time(fields)}"


def _zoned(fields: Mapping[Any, Any]) -> str:
    offset = _whole(fields["utc_offset"], -86_400, 86_400) + _whole(fields["std_offset"], -86_400, 86_400)
    if offset == 0 and fields["time_zone"] == "Etc/UTC":
        return f"{_naive(fields)}Z"
    hours, minutes = divmod(abs(offset) // 60, 60)
    return f"{_naive(fields)}{'-' if offset < 0 else '+'}{hours:02}:{minutes:02}"


def _whole(value: Any, low: int = 0, high: int = 10**4300) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(value)
    return value


_TEXTS: Final[Mapping[str, Callable[[Mapping[Any, Any]], str]]] = {
    "Elixir.Decimal": _decimal,
    "Elixir.Date": _date,
    "Elixir.Time": _time,
    "Elixir.NaiveDateTime": _naive,
    "Elixir.DateTime": _zoned,
}
