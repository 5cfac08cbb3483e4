"""Which of a handler's queries read one row by its whole key, and nothing else.

Such a read sees the same whether writes on other rows are still buffered or not, so it needs no flush before it; and
a handler that fetches the row it is about to change is the most usual one. Decided by the text that Django's compiler
makes of ``get(pk=…)``, ``filter(pk=…).first()`` and ``exists()``. What always holds: a text of any other shape is no
row read, whatever it means.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final, NamedTuple

__all__ = ["RowRead", "row_read"]

_NAME: Final = r'"(?:[^"%]|"")+"'
_COLUMN: Final = rf"{_NAME}\.{_NAME}(?: AS {_NAME})?"
_ANY_ROW: Final = '%s AS "a"'  #: of exists(): a number that is a parameter
_READ: Final = re.compile(
    rf"SELECT (?P<found>{_ANY_ROW}|{_COLUMN}(?:, {_COLUMN})*) FROM (?P<table>{_NAME})"
    rf" WHERE (?P=table)\.(?P<key>{_NAME}) = %s"
    r"(?: ORDER BY (?P=table)\.(?P=key) (?:ASC|DESC))?(?: LIMIT [0-9]+)?"
)


class RowRead(NamedTuple):
    """A table and its column that is compared with the last of so many parameters, both as they stand in SQL."""

    table: str
    key: str
    parameters: int


@lru_cache(maxsize=1_000)
def row_read(sql: str) -> RowRead | None:
    """Return what `sql` reads if it reads plain columns of the rows of one table that have one value in one column."""
    match = _READ.fullmatch(sql)
    if match is None:
        return None
    table, columns = match["table"], match["found"]
    if columns == _ANY_ROW:
        return RowRead(table, match["key"], 2)
    own = all(column.startswith(f"{table}.") for column in columns.split(", "))
    return RowRead(table, match["key"], 1) if own else None
