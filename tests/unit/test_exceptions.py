"""The error tree: everything Scriba raises on purpose has one root, and carries what its reader needs."""

from __future__ import annotations

import inspect

import pytest

from scriba import exceptions
from scriba.exceptions import (
    EventDeadLettered,
    InvalidState,
    RetryAfter,
    ScribaError,
    WaitTimeout,
    did_you_mean,
)

ERRORS = [error for _, error in inspect.getmembers(exceptions, inspect.isclass) if issubclass(error, Exception)]


@pytest.mark.parametrize("error", ERRORS)
def test_every_error_has_one_root(error: type[Exception]) -> None:
    """``except ScribaError`` catches everything that Scriba raises on purpose."""
    assert issubclass(error, ScribaError)


@pytest.mark.parametrize("error", ERRORS)
def test_every_error_is_drawn_in_the_tree(error: type[Exception]) -> None:
    """The module's drawing is complete, and each error is exported."""
    assert error.__name__ in str(exceptions.__doc__)
    assert error.__name__ in exceptions.__all__


def test_an_invalid_state_carries_the_state() -> None:
    """Callers decide by the attribute, people read the sentence."""
    error = InvalidState("halted")

    assert error.state == "halted"
    assert "halted" in str(error)


def test_waiting_errors_carry_what_was_waited_for() -> None:
    """A caller of wait_for can tell how far the projection is, or which letter to look at."""
    timeout = WaitTimeout("late", position=7, reached=5)
    dead = EventDeadLettered("dead", letter_id=3)

    assert (timeout.position, timeout.reached) == (7, 5)
    assert dead.letter_id == 3


def test_retry_after_says_how_long() -> None:
    """The engine reads the seconds; the log shows a sentence even when the handler gave none."""
    assert RetryAfter(2.5).seconds == 2.5
    assert str(RetryAfter(2.5)) == "retry after 2.5 s"


def test_a_close_word_is_suggested() -> None:
    """One clear suggestion when there is one."""
    assert did_you_mean("orderz", ["orders", "totals"]) == "; did you mean 'orders'?"


def test_all_words_are_listed_when_none_is_close() -> None:
    """Otherwise the accepted words, sorted."""
    assert did_you_mean("xyz", {"totals", "orders"}) == "; accepted: orders, totals."
