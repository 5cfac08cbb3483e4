"""Decoding keeps every JSON value, through a dead letter and back."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from scriba.event import Event
from scriba.sources import decoding
from scriba.sources.decoding import Decoding, JsonColumn, PayloadCodec, load_json

texts = st.text(st.characters(codec=None), max_size=30)
values: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(texts, inner, max_size=5),
    max_leaves=20,
)
CODEC = PayloadCodec(JsonColumn(), JsonColumn(), Decoding("Source"))
BINARY = PayloadCodec(JsonColumn(is_binary=True), JsonColumn(), Decoding("Source"))


@given(values, st.booleans())
def test_both_parsers_read_the_same(value, ascii_only):
    """An installed orjson changes the speed, never a value."""
    text = json.dumps(value, ensure_ascii=ascii_only)
    assert load_json(text) == json.loads(text) == value
    if ascii_only:
        assert load_json(text.encode()) == value


@given(values)
def test_the_standard_library_alone_is_enough(value):
    """Nothing depends on orjson being there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoding, "orjson", None)
        assert load_json(json.dumps(value)) == value


@given(values, st.dictionaries(texts, values, max_size=3))
def test_a_letter_restores_what_was_stored(data, metadata):
    """Stored, written as JSON into a letter, read back and restored: the handler gets the same payload."""
    for codec, raw in ((CODEC, json.dumps(data)), (BINARY, json.dumps(data).encode())):
        event = Event(1, "s", "t", "1", raw, json.dumps(metadata), codec=codec)
        kept_data, kept_metadata = json.loads(json.dumps(event.stored()))
        restored = codec.restore(event._replace(raw=kept_data, raw_metadata=kept_metadata, codec=None))
        assert restored.payload() == event.payload()


@given(texts)
@example("null")  # a letter cannot tell it from SQL's NULL, and neither can a handler
def test_stored_never_raises(raw):
    """Whatever a text column holds, a letter can keep it, and gets it back unchanged."""
    event = Event(1, "s", "t", "1", raw, raw, codec=CODEC)
    data, metadata = event.stored()
    restored = CODEC.restore(event._replace(raw=data, raw_metadata=metadata, codec=None))
    if isinstance(data, bytes):
        assert restored.raw == raw
    else:
        assert _same(JsonColumn().load(restored.raw, ""), load_json(raw))


@given(st.binary(max_size=40))
@example(b"null")
def test_stored_never_raises_for_bytes(raw):
    """The same for a binary column."""
    event = Event(1, "s", "t", "1", raw, None, codec=BINARY)
    data, _ = event.stored()
    restored = BINARY.restore(event._replace(raw=data, codec=None))
    assert restored.raw == raw or _same(JsonColumn(is_binary=True).load(restored.raw, ""), load_json(raw))


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, float) and isinstance(right, float) and math.isnan(left):
        return math.isnan(right)
    return left == right
