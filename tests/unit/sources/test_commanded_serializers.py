"""What the columns of a Commanded store stand for, serializer by serializer."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scriba.event import Event
from scriba.exceptions import ConfigurationError, SourceError
from scriba.sources.commanded_serializers import SerializedColumn, checked_serializer, codec_for
from scriba.sources.decoding import Decoding
from scriba.sources.erlang_terms import TermError


def decoded(serializer: Any, raw: Any, kind: str = "T") -> Any:
    return SerializedColumn(serializer, "jsonb" if isinstance(raw, str) else "bytea").load(raw, kind)


TERM = b"\x83t\x00\x00\x00\x01d\x00\x01ka\x07"
BIG = 2**70 + 1


@pytest.mark.parametrize(
    ("raw", "value"),
    [
        (b'{"a": 1}', {"a": 1}),
        ('{"a": 1}', {"a": 1}),
        ('"{\\"a\\": 1}"', {"a": 1}),
        ('"null"', None),
        ('"just text"', "just text"),
        ('"{not json"', "{not json"),
        (b'"text"', "text"),
        (b"null", None),
        (TERM, {"k": 7}),
        (b'{"text": "a\\u0000b"}', {"text": "a\0b"}),
        (b'{"big": 1180591620717411303425}', {"big": BIG}),
        ('{"big": 1180591620717411303425}', {"big": BIG}),
        (b'{"nested": [{"list": [[], {}]}]}', {"nested": [{"list": [[], {}]}]}),
        ("{}".encode("utf-8-sig")[3:], {}),
    ],
)
def test_auto_recognises_each_value(raw: Any, value: Any) -> None:
    """JSON in bytea, jsonb, JSON text inside a jsonb string, and terms are told apart value by value."""
    assert decoded("auto", raw) == value


@pytest.mark.parametrize(
    ("name", "raw", "value"),
    [
        ("json", b'{"a": 1}', {"a": 1}),
        ("json", '"{\\"a\\": 1}"', {"a": 1}),
        ("json", '{"a": 1}', {"a": 1}),
        ("jsonb", '{"a": 1}', {"a": 1}),
        ("jsonb", '"{\\"a\\": 1}"', '{"a": 1}'),
        ("term", TERM, {"k": 7}),
    ],
)
def test_a_named_serializer_insists(name: str, raw: Any, value: Any) -> None:
    """A named serializer reads its own form, and a jsonb string stays a string where jsonb is what was asked for."""
    assert decoded(name, raw) == value


@pytest.mark.parametrize(
    ("name", "raw", "error"),
    [
        ("auto", b"\xff\xfe", ValueError),
        ("auto", b"", ValueError),
        ("auto", b"\x83\xf0", TermError),
        ("json", '"text"', ValueError),
        ("json", TERM, ValueError),
        ("term", b'{"a": 1}', TermError),
        ("auto", b"[" * 100_000, RecursionError),
        ("auto", b"1" * 5_000, ValueError),
    ],
)
def test_what_cannot_be_decoded_raises(name: str, raw: bytes, error: type[Exception]) -> None:
    """An undecodable value is an ordinary exception: that event's dead letter."""
    with pytest.raises(error):
        decoded(name, raw)


def test_a_callable_gets_bytes_and_the_type() -> None:
    """A serializer of the user's gets the bytes (of jsonb: the text's) and the event type, or None for metadata."""
    seen = []
    codec = codec_for(lambda raw, kind: seen.append((raw, kind)), "bytea", "public", Decoding("test"))

    codec.decode(Event(1, "s", "T", raw=b"\x01", raw_metadata=b"\x02"))
    codec.decode(Event(1, "s", "U", raw="{}", raw_metadata=None))

    assert sorted(seen, key=str) == [(b"\x01", "T"), (b"\x02", None), (b"{}", "U")]


@pytest.mark.parametrize(("option", "says"), [("jsn", "did you mean 'json'"), (7, "accepted: auto, json, jsonb, term")])
def test_an_unknown_serializer_is_refused(option: Any, says: str) -> None:
    """A wrong name is refused where it is written, with the closest one."""
    with pytest.raises(ConfigurationError, match=says):
        checked_serializer(option)


def test_a_serializer_that_cannot_have_written_the_column_is_refused() -> None:
    """Terms are never in jsonb columns, jsonb never in bytea: said at the start, not as a dead letter per event."""
    with pytest.raises(SourceError, match=r"shop\.events\.data is of type jsonb"):
        codec_for("term", "jsonb", "shop", Decoding("test"))
    with pytest.raises(SourceError, match=r"shop\.events\.data is of type bytea"):
        codec_for("jsonb", "bytea", "shop", Decoding("test"))
    for option in ("auto", "json", lambda raw, kind: raw):
        codec_for(option, "bytea", "shop", Decoding("test"))
        codec_for(option, "jsonb", "shop", Decoding("test"))


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists, max_leaves=8))
def test_a_dead_letter_keeps_json_as_json(value: Any) -> None:
    """What the column holds as JSON is stored as that JSON value, so that operators can read it."""
    text = json.dumps(value)

    for raw, column in ((text, "jsonb"), (text.encode(), "bytea")):
        kept = SerializedColumn("auto", column)
        assert kept.stored(raw) == value
        assert kept.load(kept.restored(kept.stored(raw)), "T") == kept.load(raw, "T")


def test_a_dead_letter_keeps_bytes_as_bytes() -> None:
    """Terms, broken text, and everything under a serializer of the user's are kept untouched."""
    auto, own = SerializedColumn("auto", "bytea"), SerializedColumn(lambda raw, kind: raw, "bytea")
    for column, raw in ((auto, TERM), (auto, b"\xff{"), (auto, None), (own, b"{}")):
        assert column.stored(raw) == raw
        assert column.restored(column.stored(raw)) == raw
