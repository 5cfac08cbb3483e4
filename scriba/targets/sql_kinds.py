"""What kind of statement a handler is about to execute: a read, a write, or control of the transaction.

Decided by its words, before it is sent. What always holds: whatever begins or ends a transaction is seen, also behind
comments and as the second of several statements; what is not known to read is a write. A function that writes behind
a SELECT cannot be seen.
"""

from __future__ import annotations

import enum
import re
from functools import lru_cache
from typing import Any, Final

from psycopg.sql import Composable

__all__ = ["Kind", "kind_of"]

LONGEST_REMEMBERED: Final = 2_000


class Kind(enum.IntEnum):
    """The greatest of several statements counts."""

    READ = 0
    WRITE = 1
    CONTROL = 2


def kind_of(query: Any) -> Kind:
    """Return the kind of `query`: text, bytes, or one of psycopg's composed queries."""
    if isinstance(query, Composable):
        query = query.as_string(None)
    elif isinstance(query, bytes):
        query = query.decode("utf-8", "replace")
    text = str(query)
    return _remembered(text) if len(text) <= LONGEST_REMEMBERED else _kind_of_text(text)


def _kind_of_text(text: str) -> Kind:
    bare = _NOT_WORDS.sub(" ", text)
    return max((_kind_of_statement(statement) for statement in bare.split(";") if statement.strip()), default=Kind.READ)


_remembered = lru_cache(maxsize=512)(_kind_of_text)


def _kind_of_statement(statement: str) -> Kind:
    if _CONTROL.match(statement):
        return Kind.CONTROL
    if _READ.match(statement):
        return Kind.READ
    if _MAY_CONTAIN_WRITES.match(statement):
        return Kind.WRITE if _WRITES_INSIDE.search(statement) else Kind.READ
    return Kind.WRITE


#: Comments, texts, quoted names and dollar-quoted texts: words in there are no commands.
_NOT_WORDS: Final = re.compile(
    r"""--[^\n]*|/\*.*?\*/|[eE]'(?:[^'\\]|\\.|'')*'|'(?:[^']|'')*'|"(?:[^"]|"")*"|\$(\w*)\$.*?\$\1\$""", re.DOTALL
)
_CONTROL: Final = re.compile(
    r"[\s(]*(?:COMMIT|END|ABORT|BEGIN|START\s+TRANSACTION|PREPARE\s+TRANSACTION|SET\s+TRANSACTION"
    r"|ROLLBACK(?!\s+(?:(?:WORK|TRANSACTION)\s+)?TO\b))\b",
    re.IGNORECASE,
)
_READ: Final = re.compile(
    r"[\s(]*(?:SELECT|VALUES|TABLE|SHOW|SET|RESET|FETCH|MOVE|CLOSE|SAVEPOINT|RELEASE|ROLLBACK|LOCK|LISTEN|UNLISTEN"
    r"|DISCARD|PRAGMA)\b",
    re.IGNORECASE,
)
_MAY_CONTAIN_WRITES: Final = re.compile(r"[\s(]*(?:WITH|EXPLAIN|DECLARE|COPY)\b", re.IGNORECASE)
#: Not the UPDATE of FOR UPDATE and FOR NO KEY UPDATE; COPY … FROM reads a file or the client into a table.
_WRITES_INSIDE: Final = re.compile(
    r"\bINSERT\s+INTO\b|(?<!\bFOR\s)(?<!\bKEY\s)\bUPDATE\b|\bDELETE\s+FROM\b|\bMERGE\s+INTO\b|\bFROM\s+(?:STDIN|PROGRAM)\b"
    r"|\A\s*COPY\s+(?![\s(])[^(]*(?:\([^)]*\)\s*)?\bFROM\b",
    re.IGNORECASE,
)
