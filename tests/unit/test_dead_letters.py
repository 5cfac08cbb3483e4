"""What a failure says of itself: kind, message, traceback, fingerprint. Never an error of its own."""

from __future__ import annotations

from typing import Any

import pytest

from scriba.engine.letters import INNERMOST_FRAMES, LONGEST_MESSAGE, describe, letter_for
from scriba.event import Event
from scriba.exceptions import InvalidReturn, PermanentFailure
from scriba.protocols import Identity
from scriba.results import Fail

EVENT = Event(7, "stream", "Happened", "id-7", {"n": 1})
IDENTITY = Identity("orders", 2)


class Refused(Exception):
    pass


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (ValueError("no such thing"), "ValueError", "no such thing"),
        (KeyError("key"), "KeyError", "'key'"),
        (Refused("not today"), f"{__name__}.Refused", "not today"),
        (Refused(), f"{__name__}.Refused", f"{__name__}.Refused"),
        (PermanentFailure("never"), "scriba.exceptions.PermanentFailure", "never"),
        (InvalidReturn("None"), "invalid_return", "None"),
        (Fail("credit limit"), "error", "credit limit"),
        (Fail({"reason": 3}), "error", "{'reason': 3}"),
        (Fail(ValueError("wrapped")), "error", "ValueError: wrapped"),
        (SystemExit(3), "SystemExit", "3"),
    ],
    ids=repr,
)
def test_kind_and_message(error: Any, kind: str, message: str) -> None:
    """``error`` for Fail, ``invalid_return``, the qualified name of anything raised (builtins without their module)."""
    found = describe(error)

    assert (found.kind, found.message) == (kind, message)


@pytest.mark.case("B11")
@pytest.mark.parametrize("error", [Unspeakable(), Fail(Unspeakable()), Fail(Fail(Unspeakable()))])
def test_what_cannot_be_said_is_said_so(error: Any) -> None:
    """An exception whose ``__str__`` raises has a letter like any other."""
    assert "cannot be shown" in describe(error).message or "Unspeakable" in describe(error).message


def test_texts_are_bounded() -> None:
    """A message of a million characters, and a recursion a thousand frames deep."""

    def recurse(depth: int) -> None:
        if depth == 0:
            raise ValueError("x" * 1_000_000)
        recurse(depth - 1)

    try:
        recurse(500)
    except ValueError as error:
        found = describe(error)

    assert len(found.message) < LONGEST_MESSAGE + 20
    assert found.stacktrace.count('File "') <= INNERMOST_FRAMES + 1


def test_the_stacktrace_shows_where_and_what_caused_it() -> None:
    """As Python prints it, causes included."""

    def handler() -> None:
        try:
            raise KeyError("deep")
        except KeyError as error:
            raise Refused("outer") from error

    with pytest.raises(Refused) as caught:
        handler()

    found = describe(caught.value)
    assert "KeyError: 'deep'" in found.stacktrace
    assert "in handler" in found.stacktrace
    assert found.frame.endswith("test_the_stacktrace_shows_where_and_what_caused_it.<locals>.handler")


def test_a_letter_says_everything_about_its_event_and_failure() -> None:
    """A given kind wins; the exception itself goes along for signals."""
    error = raised(ValueError("no"))
    letter = letter_for(EVENT, "key", error, 3, IDENTITY, kind="commit:23505 (unique)", status="parked")

    assert letter[:4] == (EVENT, "key", "commit:23505 (unique)", "no")
    assert (letter.attempts, letter.status) == (3, "parked")
    assert letter.cause is error
    assert letter_for(EVENT, "key", Fail("reason"), 1, IDENTITY).cause is None
    assert letter_for(EVENT, "key", Fail(error), 1, IDENTITY).cause is error


def test_equal_failures_share_a_fingerprint() -> None:
    """Whatever position, stream and message; not those of another type, kind, place or projection."""

    def here(message: str) -> BaseException:
        return raised(ValueError(message))

    def there() -> BaseException:
        return raised_elsewhere()

    def print_of(error: Any, event: Event = EVENT, identity: Identity = IDENTITY, **options: Any) -> str:
        return letter_for(event, "key", error, 1, identity, **options).fingerprint

    same = print_of(here("one"))
    assert print_of(here("two"), EVENT._replace(position=9, stream_id="other")) == same
    others = {
        print_of(here("one"), EVENT._replace(type="Other")),
        print_of(here("one"), identity=IDENTITY._replace(version=3)),
        print_of(here("one"), kind="commit:ValueError"),
        print_of(there()),
        print_of(Fail("one")),
    }
    assert len(others) == 5
    assert same not in others


def raised_elsewhere() -> BaseException:
    try:
        raise ValueError("one")
    except ValueError as error:
        return error


def test_an_event_type_that_is_no_text_has_a_fingerprint_too() -> None:
    """Sources are free in what they call a type."""
    assert letter_for(EVENT._replace(type=None), "key", Fail("x"), 1, IDENTITY).fingerprint  # type: ignore[arg-type]
