"""Which errors of the library ``eventsourcing`` and of the drivers beneath it may go away by themselves.

Decided by SQLSTATE, by SQLite's result code, or by class; never by the text of a message.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from typing import Final

import psycopg

from scriba.sources.starting import StartUnknown

__all__ = ["is_transient"]

#: Classes 08, 53, 57 (connection, resources, shutdown) and codes that another try may not meet again.
TRANSIENT_CLASSES: Final = ("08", "53", "57")
TRANSIENT_STATES: Final = ("40001", "40P01", "25P03", "55P03", "58030")
DATABASE_DROPPED: Final = "57P04"
TRANSIENT_SQLITE: Final = (
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_PROTOCOL,
)


def is_transient(error: BaseException) -> bool:
    """Judge the first error of the cause chain that a driver raised; without one, judge the library's own classes."""
    if isinstance(error, StartUnknown):
        return True
    for cause in _causes(error):
        if isinstance(cause, psycopg.Error):
            return _is_transient_postgres(cause)
        if isinstance(cause, sqlite3.Error):
            # The low byte is the primary result code; the rest says more about it.
            return getattr(cause, "sqlite_errorcode", 0) & 0xFF in TRANSIENT_SQLITE
        if isinstance(cause, ConnectionError | TimeoutError):
            return True  # not every OSError: the library raises it for a missing setting
    return _is_lost_connection(error)


def _is_transient_postgres(error: psycopg.Error) -> bool:
    state = error.sqlstate
    if state is None:  # no answer came: refused, closed, timed out, or no connection left in the pool
        return isinstance(error, psycopg.OperationalError | psycopg.InterfaceError)
    return state != DATABASE_DROPPED and (state[:2] in TRANSIENT_CLASSES or state in TRANSIENT_STATES)


def _is_lost_connection(error: BaseException) -> bool:
    from eventsourcing.persistence import InterfaceError, OperationalError  # noqa: PLC0415 - an extra, loaded late

    return isinstance(error, InterfaceError | OperationalError)


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__
