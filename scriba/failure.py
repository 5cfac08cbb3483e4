"""Database errors → transient, integrity or structural. The table is data; a message's text is never looked at.

What always holds: the SQLSTATE decides wherever there is one (it stands on the driver's error behind Django's); codes
that a project adds in ``settings.SCRIBA`` come before the table, an exact code before its class; what nobody knows is
structural, because halting loses nothing. Must not look at connections: whose error it is, is for the target to say.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from decimal import DecimalException
from typing import TYPE_CHECKING, Final

import django.db
import psycopg
from django.core.exceptions import FieldError, ObjectDoesNotExist, ValidationError
from django.db.transaction import TransactionManagementError

from scriba.conf import scriba_settings
from scriba.protocols import Failure, FailureKind

if TYPE_CHECKING:
    from scriba.conf import Settings

__all__ = ["TABLE", "classify", "is_consequence", "shown_chain", "sqlstate_of"]

_TRANSIENT: Final = FailureKind.TRANSIENT
_INTEGRITY: Final = FailureKind.INTEGRITY
_STRUCTURAL: Final = FailureKind.STRUCTURAL

#: (SQLSTATEs or the classes that two characters name, kind, bounded), from top to bottom; what is in none is structural.
#: Bounded: one slow event can repeat it for ever, so after some repeats it is that event's fault.
TABLE: Final = (
    (("57P04",), _STRUCTURAL, False),  # the database was dropped: the rest of class 57 passes
    (("25P02",), _INTEGRITY, False),  # some event left the transaction aborted: a verdict pass finds it
    (("40001", "40P01", "40003", "25006", "58030"), _TRANSIENT, False),  # 25006: until a fail-over is known everywhere
    (("25P03", "55P03", "57014"), _TRANSIENT, True),
    (("08", "53", "57"), _TRANSIENT, False),
    (("22", "23", "21000", "44000", "54000", "P0001"), _INTEGRITY, False),
)

#: Errors without an SQLSTATE, from top to bottom. The driver's own stand beside Django's: raw cursors raise them.
BY_CLASS: Final = (
    ((TransactionManagementError,), _INTEGRITY),  # a handler swallowed what broke the transaction
    ((django.db.OperationalError, psycopg.OperationalError), _TRANSIENT),  # the connection, or the pool
    ((django.db.InterfaceError, psycopg.InterfaceError), _TRANSIENT),
    ((django.db.IntegrityError, psycopg.IntegrityError), _INTEGRITY),
    ((django.db.DataError, psycopg.DataError), _INTEGRITY),  # NUL in a text: refused before it is sent
    ((django.db.ProgrammingError, psycopg.ProgrammingError), _INTEGRITY),  # a value that the driver cannot adapt
    ((django.db.InternalError, psycopg.InternalError), _STRUCTURAL),
    ((django.db.NotSupportedError, psycopg.NotSupportedError), _STRUCTURAL),
    ((django.db.DatabaseError, psycopg.DatabaseError), _INTEGRITY),  # save(force_update=True) that met no row
    ((ValidationError, FieldError, ObjectDoesNotExist), _INTEGRITY),
    ((ValueError, TypeError, OverflowError, DecimalException), _INTEGRITY),
)

_CLASS_LENGTH: Final = 2


def classify(error: BaseException) -> Failure:
    """Say what an error means that came out of a batch, its commit included."""
    driver_error = _with_sqlstate(error)
    if driver_error is not None:
        return _by_sqlstate(driver_error)
    kind = next((kind for classes, kind in BY_CLASS if isinstance(error, classes)), _STRUCTURAL)
    return Failure(kind, f"commit:{type(error).__qualname__}")


def sqlstate_of(error: BaseException) -> str | None:
    """Return the SQLSTATE of `error` or of the driver's error behind it; None when the server never answered."""
    driver_error = _with_sqlstate(error)
    return driver_error.sqlstate if driver_error is not None else None


def is_consequence(error: BaseException) -> bool:
    """Say whether `error` only tells that the transaction had been broken before: the cause is an earlier one."""
    return isinstance(error, TransactionManagementError) or sqlstate_of(error) == "25P02"


def shown_chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield `error` and what a traceback would show behind it: explicit causes, and contexts not suppressed."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _with_sqlstate(error: BaseException | None) -> psycopg.Error | None:
    """Return the first driver's error with an SQLSTATE among `error` and its explicit causes."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, psycopg.Error) and error.sqlstate:
            return error
        seen.add(id(error))
        error = error.__cause__
    return None


def _by_sqlstate(error: psycopg.Error) -> Failure:
    code = error.sqlstate or ""
    kind, bounded = _added(code, scriba_settings()) or _in_table(code)
    return Failure(kind, f"commit:{code} ({_name_of(error)})", bounded)


def _added(code: str, settings: Settings) -> tuple[FailureKind, bool] | None:
    added = {
        _TRANSIENT: settings.transient_sqlstates,
        _INTEGRITY: settings.integrity_sqlstates,
        _STRUCTURAL: settings.structural_sqlstates,
    }
    for asked in (code, code[:_CLASS_LENGTH]):
        for kind, codes in added.items():
            if asked in codes:
                return kind, False
    return None


def _in_table(code: str) -> tuple[FailureKind, bool]:
    for codes, kind, bounded in TABLE:
        if code in codes or code[:_CLASS_LENGTH] in codes:
            return kind, bounded
    return _STRUCTURAL, False


def _name_of(error: psycopg.Error) -> str:
    """Return the constraint's name, or else what the standard calls the condition."""
    if error.diag.constraint_name:
        return error.diag.constraint_name
    try:
        condition = psycopg.errors.lookup(error.sqlstate or "").__name__
    except KeyError:
        return "unknown condition"
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", condition).lower()
