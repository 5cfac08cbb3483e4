"""Letters keep any payload: a rule for all values, without a database."""

from __future__ import annotations

import datetime as dt
import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from scriba.stored_json import NotRestorable, decode, encode, storable_text

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=()))  # NUL and lone surrogates included
    | st.binary()
    | st.decimals(allow_nan=False)
    | st.uuids()
    | st.dates()
    | st.times().map(lambda time: time.replace(fold=0))
    | st.datetimes(timezones=st.just(dt.UTC) | st.none()).map(lambda time: time.replace(fold=0))
    | st.timedeltas()
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(SCALARS | st.sampled_from(["$bytes", "$cut", "$pairs", ""]), inner)
        | st.lists(inner).map(tuple)
        | st.sets(SCALARS)
        | st.frozensets(SCALARS)
    ),
    max_leaves=20,
)


@given(VALUES)
def test_what_is_stored_comes_back_as_it_was(value: Any) -> None:
    """Types included; the text is what PostgreSQL accepts as jsonb: no NUL, no lone surrogate, no NaN."""
    text = encode(value, 10_000_000)

    assert "\\u0000" not in text.replace("\\\\", "")
    text.encode()
    found = decode(json.loads(text, parse_constant=_refuse))
    assert (found, _types(found)) == (value, _types(value))


@given(VALUES, st.integers(min_value=100, max_value=2_000))
def test_a_limit_is_kept_and_what_was_cut_does_not_come_back(value: Any, limit: int) -> None:
    """Either all of it, or none: never a half."""
    text = encode(value, limit)

    assert len(text.encode()) <= limit
    try:
        assert decode(json.loads(text)) == value
    except NotRestorable:
        assert len(encode(value, 10_000_000).encode()) > limit


@given(st.text(st.characters(exclude_categories=())), st.integers(min_value=0, max_value=50))
def test_any_text_becomes_storable(text: str, longest: int) -> None:
    """Bounded, and without what PostgreSQL refuses; ordinary texts stay as they are."""
    stored = storable_text(text, longest)

    assert "\x00" not in stored
    stored.encode()
    if len(text) <= longest and text.isascii() and "\x00" not in text:
        assert stored == text


def _types(value: Any) -> Any:
    """Return the shape of a value: equal values may differ in type (1, 1.0 and True), letters must not confuse them."""
    if isinstance(value, dict):
        return sorted((repr((_types(key), key)), repr(_types(item))) for key, item in value.items())
    if isinstance(value, list | tuple):
        return type(value).__name__, [_types(item) for item in value]
    if isinstance(value, set | frozenset):
        return type(value).__name__, sorted(repr((_types(item), item)) for item in value)
    return type(value).__name__


def _refuse(constant: str) -> None:
    raise AssertionError(constant)
