"""What an error of the database means: repeat, one event's fault, or halt. Decided by SQLSTATE, never by message text.

The table below is looked at from top to bottom; ``settings.SCRIBA`` may add codes or two-letter classes, which go
first. The SQLSTATE is on the driver's error behind Django's (``exc.__cause__``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from decimal import DecimalException
from typing import Final

import psycopg
from django.core.exceptions import FieldError, ObjectDoesNotExist, ValidationError
from django.db import DatabaseError, DataError, InterfaceError, OperationalError
from django.db.transaction import TransactionManagementError

from scriba.conf import scriba_settings
from scriba.protocols import Failure, FailureKind

__all__ = ["VALUE_ERRORS", "chain", "classify", "driver_error", "sqlstate_of"]

#: Errors of a value, raised before any SQL: one event's fault when they come up while its result is written.
VALUE_ERRORS: Final = (
    ValueError, TypeError, OverflowError, DecimalException, ValidationError, ObjectDoesNotExist, FieldError,
)  # fmt: skip

#: (codes or classes, kind, bounded), in order. Bounded: may repeat for ever because of one slow event.
TABLE: Final = (
    (("57P04",), FailureKind.STRUCTURAL, False),  # the database was dropped
    (("25P02",), FailureKind.INTEGRITY, False),  # the event whose handler left the transaction so
    (("40001", "40P01", "40003", "25006", "58030"), FailureKind.TRANSIENT, False),
    (("25P03", "55P03", "57014"), FailureKind.TRANSIENT, True),
    (("08", "53", "57"), FailureKind.TRANSIENT, False),
    (("22", "23", "21000", "44000", "54000", "P0001"), FailureKind.INTEGRITY, False),
)

CLASS_LENGTH: Final = 2


def classify(error: BaseException) -> Failure:
    """Return what `error`, or the driver's error behind it, means for the batch that it hit."""
    driver = driver_error(error)
    code = sqlstate_of(error)
    if code is not None:
        kind, bounded = _of_code(code)
        return Failure(kind, f"commit:{code} ({_name(driver, code)})", bounded)
    label = f"commit:{type(driver or error).__name__}"
    if isinstance(error, DataError) or isinstance(driver, psycopg.DataError):
        return Failure(FailureKind.INTEGRITY, label)  # NUL in a text: refused by the driver, without a SQLSTATE
    if isinstance(error, OperationalError | InterfaceError) or isinstance(
        driver, psycopg.OperationalError | psycopg.InterfaceError
    ):
        return Failure(FailureKind.TRANSIENT, label)  # connection or pool: closed, timed out
    if isinstance(error, TransactionManagementError):
        return Failure(FailureKind.INTEGRITY, label)  # a handler swallowed an error of its own query
    if isinstance(error, VALUE_ERRORS) and not isinstance(error, DatabaseError):
        return Failure(FailureKind.INTEGRITY, label)
    return Failure(FailureKind.STRUCTURAL, label)


def driver_error(error: BaseException) -> psycopg.Error | None:
    """Return the driver's error in the chain of causes of `error`, if there is one."""
    return next((link for link in chain(error) if isinstance(link, psycopg.Error)), None)


def sqlstate_of(error: BaseException) -> str | None:
    """Return the SQLSTATE in the chain of causes of `error`, if there is one."""
    codes = (getattr(link, "sqlstate", None) for link in chain(error))
    return next((code for code in codes if isinstance(code, str)), None)


def chain(error: BaseException) -> Iterator[BaseException]:
    """Yield `error`, what caused it, and what was being handled when it was raised."""
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        link = pending.pop()
        if link is None or id(link) in seen:
            continue
        seen.add(id(link))
        yield link
        pending += [None if link.__suppress_context__ else link.__context__, link.__cause__]


def _of_code(code: str) -> tuple[FailureKind, bool]:
    settings = scriba_settings()
    added = (
        (settings.transient_sqlstates, FailureKind.TRANSIENT, False),
        (settings.integrity_sqlstates, FailureKind.INTEGRITY, False),
        (settings.structural_sqlstates, FailureKind.STRUCTURAL, False),
    )
    for codes, kind, bounded in (*added, *TABLE):
        if code in codes or code[:CLASS_LENGTH] in codes:
            return kind, bounded
    return FailureKind.STRUCTURAL, False


def _name(error: psycopg.Error | None, code: str) -> str:
    """Return the constraint that was violated, or the condition's name."""
    constraint = error.diag.constraint_name if error is not None else None
    if constraint:
        return constraint
    try:
        return re.sub(r"(?<!^)(?=[A-Z])", "_", psycopg.errors.lookup(code).__name__).lower()
    except KeyError:
        return type(error).__name__ if error is not None else "unknown"
