"""Database errors → transient, integrity, structural: by SQLSTATE, by class where there is none, never by text."""

from __future__ import annotations

from decimal import InvalidOperation

import django.db
import psycopg
import pytest
from django.core.exceptions import FieldError, ObjectDoesNotExist, ValidationError
from django.db.transaction import TransactionManagementError
from django.test import override_settings

from scriba.failure import TABLE, classify, is_consequence, shown_chain, sqlstate_of
from scriba.protocols import FailureKind

TRANSIENT, INTEGRITY, STRUCTURAL = FailureKind.TRANSIENT, FailureKind.INTEGRITY, FailureKind.STRUCTURAL


def driver_error(sqlstate: str) -> psycopg.Error:
    try:
        return psycopg.errors.lookup(sqlstate)("words that mean nothing")
    except KeyError:
        error = psycopg.errors.DatabaseError("an unknown code")
        error.sqlstate = sqlstate
        return error


def wrapped(sqlstate: str, kind: type[Exception] = django.db.DatabaseError) -> Exception:
    """Return an error as Django raises it: its own class in front, the driver's as the cause."""
    error = kind("in front")
    error.__cause__ = driver_error(sqlstate)
    return error


EXPECTED = {
    "57P04": TRANSIENT,  # replaced below: the one exception of its class
    "25P02": INTEGRITY,
    **dict.fromkeys(("40001", "40P01", "40003", "25006", "25P03", "55P03", "58030"), TRANSIENT),
    **dict.fromkeys(("08000", "08006", "53300", "53100", "57P01", "57P02", "57P03", "57014"), TRANSIENT),
    **dict.fromkeys(("22001", "22P05", "22012", "23502", "23503", "23505", "23514", "23P01"), INTEGRITY),
    **dict.fromkeys(("21000", "44000", "54000", "P0001"), INTEGRITY),
    **dict.fromkeys(
        ("42703", "42P01", "42501", "40002", "25001", "55000", "XX000", "0A000", "P0002", "ZZ999"), STRUCTURAL
    ),
} | {"57P04": STRUCTURAL}


@pytest.mark.parametrize("code", EXPECTED)
def test_the_sqlstate_decides(code: str) -> None:
    """Whatever class Django or the driver has put around it."""
    for error in (
        driver_error(code),
        wrapped(code),
        wrapped(code, django.db.OperationalError),
        wrapped(code, ValueError),
    ):
        assert classify(error).kind is EXPECTED[code]


def test_only_what_one_event_can_repeat_for_ever_is_bounded() -> None:
    """A statement timeout, a lock timeout, an idle transaction: after some repeats they are that event's fault."""
    bounded = {code for code in EXPECTED if classify(driver_error(code)).bounded}

    assert bounded == {"57014", "25P03", "55P03"}


def test_every_code_of_the_table_has_one_row() -> None:
    """Looked at from the top, but no code stands in two rows."""
    codes = [code for row, *_ in TABLE for code in row]

    assert len(codes) == len(set(codes))


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (django.db.OperationalError("the connection is closed"), TRANSIENT),
        (psycopg.OperationalError("could not connect"), TRANSIENT),
        (psycopg.errors.ConnectionTimeout("timed out"), TRANSIENT),
        (django.db.InterfaceError("connection already closed"), TRANSIENT),
        (psycopg.InterfaceError("closed"), TRANSIENT),
        (django.db.IntegrityError("its SQLSTATE was lost"), INTEGRITY),
        (django.db.DataError("PostgreSQL text fields cannot contain NUL (0x00) bytes"), INTEGRITY),
        (psycopg.DataError("cannot dump NUL"), INTEGRITY),
        (psycopg.ProgrammingError("cannot adapt type 'object'"), INTEGRITY),
        (TransactionManagementError("an error occurred in the current transaction"), INTEGRITY),
        (django.db.DatabaseError("Forced update did not affect any rows."), INTEGRITY),
        (django.db.InternalError("?"), STRUCTURAL),
        (django.db.NotSupportedError("?"), STRUCTURAL),
        (ValidationError("no"), INTEGRITY),
        (ValueError("no"), INTEGRITY),
        (UnicodeEncodeError("utf-8", "\ud800", 0, 1, "no"), INTEGRITY),
        (TypeError("no"), INTEGRITY),
        (OverflowError("no"), INTEGRITY),
        (InvalidOperation("no"), INTEGRITY),
        (ObjectDoesNotExist("no"), INTEGRITY),
        (FieldError("no"), INTEGRITY),
        (RuntimeError("?"), STRUCTURAL),
        (KeyError("?"), STRUCTURAL),
        (MemoryError(), STRUCTURAL),
    ],
    ids=repr,
)
def test_without_an_sqlstate_the_class_decides(error: Exception, kind: FailureKind) -> None:
    """A connection passes, a value is its event's fault, and what nobody knows halts."""
    failure = classify(error)

    assert failure == (kind, f"commit:{type(error).__qualname__}", False)


def test_labels_name_the_condition_in_the_standards_words() -> None:
    """Or say that there is none."""
    assert classify(driver_error("40P01")).label == "commit:40P01 (deadlock_detected)"
    assert classify(driver_error("22P05")).label == "commit:22P05 (untranslatable_character)"
    assert classify(driver_error("ZZ999")).label == "commit:ZZ999 (unknown condition)"


@pytest.mark.parametrize(
    ("settings", "code", "kind"),
    [
        ({"transient_sqlstates": ["P0002"]}, "P0002", TRANSIENT),
        ({"transient_sqlstates": ["XX"]}, "XX000", TRANSIENT),
        ({"integrity_sqlstates": ["42501"]}, "42501", INTEGRITY),
        ({"structural_sqlstates": ["23"]}, "23505", STRUCTURAL),
        ({"structural_sqlstates": ["23"], "transient_sqlstates": ["23505"]}, "23505", TRANSIENT),
        ({"structural_sqlstates": ["23"], "transient_sqlstates": ["23505"]}, "23503", STRUCTURAL),
    ],
)
def test_codes_of_the_settings_come_first(settings: dict[str, list[str]], code: str, kind: FailureKind) -> None:
    """An exact one before a class; read live."""
    with override_settings(SCRIBA=settings):
        assert classify(driver_error(code)).kind is kind


def test_the_nearest_explicit_cause_with_an_sqlstate_counts() -> None:
    """What was merely being handled meanwhile does not."""
    outer = RuntimeError("outer")
    outer.__cause__ = wrapped("23505")
    context_only = RuntimeError("outer")
    context_only.__context__ = wrapped("23505")

    assert sqlstate_of(outer) == "23505"
    assert sqlstate_of(context_only) is None


def test_errors_that_only_follow_from_a_broken_transaction_are_known() -> None:
    """Their cause is an earlier error."""
    assert is_consequence(TransactionManagementError())
    assert is_consequence(wrapped("25P02"))
    assert not is_consequence(wrapped("23505"))


def test_a_chain_is_followed_as_a_traceback_shows_it() -> None:
    """Causes, contexts that are not suppressed, and no circle twice."""
    first, second, third = ValueError("1"), KeyError("2"), TypeError("3")
    first.__cause__, second.__context__, third.__context__ = second, third, first

    assert list(shown_chain(first)) == [first, second, third]
    second.__suppress_context__ = True
    assert list(shown_chain(first)) == [first, second]
