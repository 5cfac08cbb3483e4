"""Array literals give back exactly what they were built from."""

from __future__ import annotations

import pytest

from scriba.targets.literals import array_literal


@pytest.mark.parametrize(
    ("values", "literal"),
    [
        ([], "{}"),
        ([""], '{""}'),
        ([None], "{NULL}"),
        (["NULL", None, "null"], '{"NULL",NULL,"null"}'),
        (["a", "b"], '{"a","b"}'),
        (["a,b", "{}", " "], '{"a,b","{}"," "}'),
        (['"', "\\", '\\"'], '{"\\"","\\\\","\\\\\\""}'),
        (['"', None, "\\"], '{"\\"",NULL,"\\\\"}'),
        (["a\0b", "c"], '{"a\0b","c"}'),  # the driver refuses it, as it refuses the value itself
    ],
)
def test_quoting(values, literal):
    """Every value is quoted, NULL never is, and quotes and backslashes are escaped."""
    assert array_literal(values) == literal
