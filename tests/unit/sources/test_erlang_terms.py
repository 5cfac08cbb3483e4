"""Erlang's external term format: every kind of data comes out as plain values, and nothing else ever happens."""

from __future__ import annotations

import contextlib
import math
import struct
import zlib
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scriba.sources.erlang_terms import Limits, TermError, decode_term

V = b"\x83"


def u16(value: int) -> bytes:
    return struct.pack(">H", value)


def u32(value: int) -> bytes:
    return struct.pack(">I", value)


def atom(name: str, tag: int = 100) -> bytes:
    encoded = name.encode("latin-1" if tag in {100, 115} else "utf-8")
    size = u16(len(encoded)) if tag in {100, 118} else bytes([len(encoded)])
    return bytes([tag]) + size + encoded


def binary(content: bytes | str) -> bytes:
    content = content.encode() if isinstance(content, str) else content
    return b"m" + u32(len(content)) + content


def map_of(*pairs: tuple[bytes, bytes]) -> bytes:
    return b"t" + u32(len(pairs)) + b"".join(key + value for key, value in pairs)


def struct_of(module: str, **fields: bytes) -> bytes:
    return map_of(
        (atom("__struct__"), atom(f"Elixir.{module}")), *((atom(name), value) for name, value in fields.items())
    )


def compressed(body: bytes) -> bytes:
    return V + b"P" + u32(len(body)) + zlib.compress(body)


def small(value: int) -> bytes:
    return b"a" + bytes([value])


def integer(value: int) -> bytes:
    """Encode as Erlang does: the shortest of the four kinds."""
    if 0 <= value <= 255:
        return small(value)
    if -(2**31) <= value < 2**31:
        return b"b" + struct.pack(">i", value)
    digits = abs(value).to_bytes((abs(value).bit_length() + 7) // 8, "little")
    size = b"n" + bytes([len(digits)]) if len(digits) < 256 else b"o" + u32(len(digits))
    return size + bytes([value < 0]) + digits


def encode(value: Any, atom_tag: int = 119) -> bytes:  # noqa: PLR0911 - one per kind
    """Write a value of JSON as Elixir would write the same value."""
    match value:
        case None:
            return atom("nil", atom_tag)
        case bool():
            return atom("true" if value else "false", atom_tag)
        case int():
            return integer(value)
        case float():
            return b"F" + struct.pack(">d", value)
        case str():
            return binary(value)
        case []:
            return b"j"
        case list() if all(type(item) is int and 0 <= item < 256 for item in value) and len(value) < 65_536:
            return b"k" + u16(len(value)) + bytes(value)
        case list():
            return b"l" + u32(len(value)) + b"".join(encode(item, atom_tag) for item in value) + b"j"
        case dict():
            return map_of(*((binary(key), encode(item, atom_tag)) for key, item in value.items()))
    raise AssertionError(value)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=8) | st.dictionaries(st.text(), inner, max_size=8),
    max_leaves=30,
)


# --- values -----------------------------------------------------------------------------------------------


@given(value=json_values, atom_tag=st.sampled_from([100, 115, 118, 119]), packed=st.booleans())
def test_what_json_can_say_comes_back_unchanged(value: Any, atom_tag: int, packed: bool) -> None:
    """A value of JSON, written as a term, compressed or not, decodes to exactly that value, types included."""
    body = encode(value, atom_tag)

    decoded = decode_term(compressed(body) if packed else V + body)

    assert repr(decoded) == repr(value)


@pytest.mark.parametrize(
    ("encoded", "value"),
    [
        (atom("ok", 100), "ok"),
        (atom("ok", 119), "ok"),
        (atom("größe", 100), "größe"),
        (atom("größe", 115), "größe"),
        (atom("größe", 118), "größe"),
        (atom("größe", 119), "größe"),
        (atom("nil", 100), None),
        (atom("true", 119), True),
        (atom("false", 115), False),
        (atom("Elixir.Shop.Placed", 119), "Elixir.Shop.Placed"),
        (b"h\x02" + small(1) + binary("two"), (1, "two")),
        (b"i" + u32(2) + small(1) + b"j", (1, [])),
        (b"h\x00", ()),
        (b"k\x00\x03\x01\x02\x03", [1, 2, 3]),
        (b"c" + b"1.25000000000000000000e+00".ljust(31, b"\0"), 1.25),
        (b"c" + b"-9.99999999999999999e-01".ljust(31, b"\0"), -1.0),
        (b"F" + struct.pack(">d", -0.0), -0.0),
        (b"b\xff\xff\xfe\x0c", -500),
        (b"n\x07\x00\x02\x00\x00\x00\x00\x00\x20", 9007199254740994),
        (b"n\x08\x01" + b"\xff" * 8, -(2**64 - 1)),
        (b"o" + u32(300) + b"\x00" + b"\xff" * 300, 2**2400 - 1),
        (binary(b"\xff\xfe"), b"\xff\xfe"),
        (binary("a\0b"), "a\0b"),
        (map_of((small(1), small(2))), {1: 2}),
        (map_of((atom("nil"), small(2)), (atom("true"), small(3))), {"nil": 2, "true": 3}),
    ],
)
def test_every_kind_of_data_has_a_plain_value(encoded: bytes, value: Any) -> None:
    """Atoms of all four kinds, tuples, both floats, numbers of any size, text, bytes and maps are plain values."""
    decoded = decode_term(V + encoded)

    assert repr(decoded) == repr(value)


def test_a_struct_is_its_fields() -> None:
    """A struct loses its module's name, as in JSON; the same key in a plain map of strings is a key like any other."""
    encoded = struct_of("Shop.Placed", owner=struct_of("Shop.Owner", vip=atom("false")))

    assert decode_term(V + encoded) == {"owner": {"vip": False}}
    assert decode_term(V + map_of((binary("__struct__"), binary("x")))) == {"__struct__": "x"}


def decimal(sign: int, coef: bytes, exp: int) -> bytes:
    return struct_of("Decimal", sign=integer(sign), coef=coef, exp=integer(exp))


NOON = {
    "hour": small(12), "minute": small(5), "second": small(9), "microsecond": b"h\x02" + integer(815_721) + small(6),
}  # fmt: skip
DAY = {"year": integer(2026), "month": small(11), "day": small(3), "calendar": atom("Elixir.Calendar.ISO")}


def zoned(zone: str, utc_offset: int, std_offset: int) -> bytes:
    return struct_of(
        "DateTime",
        **DAY,
        **NOON,
        time_zone=binary(zone),
        utc_offset=integer(utc_offset),
        std_offset=integer(std_offset),
    )


@pytest.mark.parametrize(
    ("encoded", "text"),
    [
        (decimal(1, integer(1050), -2), "10.50"),
        (decimal(-1, integer(5), 0), "-5"),
        (decimal(1, integer(1), 3), "1E+3"),
        (decimal(1, integer(10**30 + 1), -3), "1000000000000000000000000000.001"),
        (decimal(1, atom("NaN"), 0), "NaN"),
        (decimal(-1, atom("inf"), 0), "-Infinity"),
        (struct_of("Date", **DAY), "2026-11-03"),
        (struct_of("Date", **{**DAY, "year": integer(-7)}), "-0007-11-03"),
        (struct_of("Time", **NOON), "12:05:09.815721"),
        (struct_of("Time", **{**NOON, "microsecond": b"h\x02" + small(0) + small(0)}), "12:05:09"),
        (struct_of("Time", **{**NOON, "microsecond": b"h\x02" + integer(120_000) + small(3)}), "12:05:09.120"),
        (struct_of("NaiveDateTime", **DAY, **NOON), "2026-11-03T12:05:09.815721"),
        (zoned("Etc/UTC", 0, 0), "2026-11-03T12:05:09.815721Z"),
        (zoned("Europe/Berlin", 3600, 3600), "2026-11-03T12:05:09.815721+02:00"),
        (zoned("America/St_Johns", -12_600, 0), "2026-11-03T12:05:09.815721-03:30"),
        (zoned("Europe/London", 0, 0), "2026-11-03T12:05:09.815721+00:00"),
    ],
)
def test_decimals_and_times_are_the_texts_that_json_would_hold(encoded: bytes, text: str) -> None:
    """Decimal, Date, Time, NaiveDateTime and DateTime become their JSON text, whichever serializer wrote them."""
    assert decode_term(V + encoded) == text


@given(value=st.decimals(allow_nan=False, allow_infinity=False))
def test_a_decimal_keeps_its_digits_and_its_scale(value: Decimal) -> None:
    """The text of a Decimal names the same number with the same number of decimal places."""
    sign, digits, exponent = value.as_tuple()
    assert isinstance(exponent, int)
    coefficient = int("".join(map(str, digits)))

    decoded = decode_term(V + decimal(-1 if sign else 1, integer(coefficient), exponent))

    assert Decimal(decoded).as_tuple() == Decimal((sign, tuple(map(int, str(coefficient))), exponent)).as_tuple()


@pytest.mark.parametrize(
    "encoded",
    [
        decimal(7, integer(1), 0),
        decimal(1, binary("many"), 0),
        decimal(1, integer(1), 10**15),
        struct_of("Date", year=integer(2026)),
        struct_of("Date", **{**DAY, "month": small(13)}),
        struct_of("Time", **{**NOON, "microsecond": small(1)}),
        struct_of("Time", **{**NOON, "hour": b"j"}),
    ],
)
def test_a_struct_that_only_claims_to_be_a_time_or_a_number_stays_a_dict(encoded: bytes) -> None:
    """A foreign or broken struct of a well-known name is no error: the handler gets its fields."""
    assert isinstance(decode_term(V + encoded), dict)


# --- hostile input ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("encoded", "says"),
    [
        (b"", "begins with byte 131"),
        (b'{"a": 1}', "begins with byte 131"),
        (V, "begins with byte 131"),
        (V + b"m" + u32(10) + b"abc", "cut off"),
        (V + b"b\x00", "cut off"),
        (V + b"t" + u32(1), "more than the remaining bytes"),
        (V + small(1) + b"x", "follow the end"),
        (V + b"l" + u32(2**32 - 1) + b"j", "more than the remaining bytes"),
        (V + b"i" + u32(2**32 - 1), "more than the remaining bytes"),
        (V + b"l" + u32(1) + small(1) + small(2), "improper list"),
        (V + b"\xf0", "tag 240"),
        (V + b"X" + b"\0" * 30, "a process"),
        (V + b"q" + atom("os") + atom("cmd") + small(1), "a function"),
        (V + b"M" + u32(1) + b"\x03\xe0", "a bit string"),
        (V + b"F" + struct.pack(">d", math.nan), "not a number"),
        (V + b"F" + struct.pack(">d", math.inf), "not a number"),
        (V + b"c" + b"inf".ljust(31, b"\0"), "is no float"),
        (V + b"c" + b"1_0.0e+00".ljust(31, b"\0"), "is no float"),
        (V + b"c" + b"9.0e+999".ljust(31, b"\0"), "is no float"),
        (V + b"w\x02\xff\xff", "not UTF-8"),
        (V + b"o" + u32(5000) + b"\0" * 5001, "4,300 digits"),
        (V + map_of((atom("a"), small(1)), (binary("a"), small(2))), "two keys"),
        (V + map_of((small(1), small(1)), (b"F" + struct.pack(">d", 1.0), small(2))), "two keys"),
        (V + map_of((map_of(), small(1))), "key of a dict"),
        (V + b"P" + u32(4) + b"not zlib", "cannot be decompressed"),
        (V + b"P\0", "cut off before its size"),
        (V + b"P" + u32(99) + zlib.compress(small(1)), "does not hold"),
        (V + b"P" + u32(1) + zlib.compress(small(1)), "does not hold"),
        (compressed(small(1)) + b"tail", "does not hold"),
    ],
)
def test_what_is_no_readable_term_says_why(encoded: bytes, says: str) -> None:
    """Truncated, trailing, foreign, improper or contradictory bytes raise one kind of error that names the reason."""
    with pytest.raises(TermError, match=says):
        decode_term(encoded)


def test_nesting_is_bounded() -> None:
    """A term nested as deep as the limit is read; one level more is refused, before Python's own limit is met."""

    def nested(levels: int) -> bytes:
        return V + (b"l" + u32(1)) * levels + b"j" + b"j" * levels

    decode_term(nested(128))
    with pytest.raises(TermError, match="deeper than 128"):
        decode_term(nested(129))
    with pytest.raises(TermError, match="deeper than 128"):
        decode_term(V + b"h\x01" * 100_000 + b"j")


def test_a_decompression_bomb_is_never_inflated() -> None:
    """A compressed term is refused by its announced size, and never inflated beyond what it announced."""
    with pytest.raises(TermError, match="announces 100000000 bytes"):
        decode_term(V + b"P" + u32(100_000_000) + b"")
    bomb = zlib.compress(b"\0" * 50_000_000)
    with pytest.raises(TermError, match="does not hold the 10 bytes"):
        decode_term(V + b"P" + u32(10) + bomb)


def test_the_number_of_values_is_bounded() -> None:
    """A few kilobytes that stand for millions of small values are refused when the budget is spent."""
    limits = Limits(max_terms=1_000)

    with pytest.raises(TermError, match="more than 1000 values"):
        decode_term(compressed(b"l" + u32(5_000) + b"j" * 5_001), limits)
    with pytest.raises(TermError, match="more than 1000 values"):
        decode_term(V + b"k" + u16(5_000) + b"\x01" * 5_000, limits)


def test_the_size_is_bounded() -> None:
    """A term larger than the limit is refused without a look at its content."""
    with pytest.raises(TermError, match="at most 100 are read"):
        decode_term(V + binary(b"x" * 200), Limits(max_bytes=100))


@given(noise=st.binary(max_size=200), packed=st.booleans())
def test_noise_is_a_value_or_a_term_error(noise: bytes, packed: bool) -> None:
    """Any bytes at all either decode or raise a TermError: nothing else ever comes out of the decoder."""
    with contextlib.suppress(TermError):
        decode_term(compressed(noise) if packed else V + noise)


@given(value=json_values, data=st.data())
def test_a_damaged_term_is_a_value_or_a_term_error(value: Any, data: st.DataObject) -> None:
    """A good term with a few bytes changed, removed or added decodes to something or raises a TermError."""
    damaged = bytearray(V + encode(value))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(damaged)))
        match data.draw(st.sampled_from(["change", "cut", "insert"])):
            case "change" if at < len(damaged):
                damaged[at] = data.draw(st.integers(0, 255))
            case "cut":
                del damaged[at : at + 3]
            case _:
                damaged[at:at] = data.draw(st.binary(min_size=1, max_size=4))
    with contextlib.suppress(TermError):
        decode_term(bytes(damaged))
