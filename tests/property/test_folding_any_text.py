"""Array literals, read by a reader of our own, for all strings that there are."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from scriba.targets.literals import array_literal
from tests.support.profiles import runs


def read(literal: str) -> list[str | None]:
    """Read a one-dimensional array literal as PostgreSQL does, where every value is quoted or NULL."""
    assert literal[0] == "{"
    assert literal[-1] == "}"
    values: list[str | None] = []
    rest = literal[1:-1]
    while rest:
        if rest.startswith("NULL"):
            values.append(None)
            rest = rest[4:]
        else:
            assert rest[0] == '"'
            value, at = "", 1
            while rest[at] != '"':
                at += rest[at] == "\\"
                value += rest[at]
                at += 1
            values.append(value)
            rest = rest[at + 1 :]
        assert not rest or (rest[0] == "," and len(rest) > 1)
        rest = rest[1:]
    return values


AWKWARD = st.text(st.sampled_from("\"\\,{}\0 NUL\n'%é😀"), max_size=8)


@given(st.lists(st.none() | st.text() | AWKWARD | st.just("NULL")))
@runs(5000)
def test_what_goes_in_comes_out(values):
    """Reading a literal gives back the list it was built from, NUL and lone surrogates included."""
    assert read(array_literal(values)) == values
