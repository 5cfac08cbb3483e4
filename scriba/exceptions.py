"""Every error Scriba raises on purpose.

::

    ScribaError
    ├── ConfigurationError      an option is wrong; found when the decorator runs or at start-up
    ├── UnknownProjection       no projection of that name and version is registered
    ├── InvalidState            the command does not fit the projection's state
    ├── ProjectionHalted        a projection that was waited for is halted
    ├── WaitTimeout             wait_for: the time ran out
    ├── EventDeadLettered       wait_for: the event was given up on
    ├── SourceError             the source cannot be read correctly; the projection halts
    └── HandlerError            raised by handlers, or about what they returned
        ├── PermanentFailure    do not retry: dead-letter at once
        │   └── InvalidReturn   the handler returned something that is no result
        └── RetryAfter          retry, after this many seconds
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "ConfigurationError",
    "EventDeadLettered",
    "HandlerError",
    "InvalidReturn",
    "InvalidState",
    "PermanentFailure",
    "ProjectionHalted",
    "RetryAfter",
    "ScribaError",
    "SourceError",
    "UnknownProjection",
    "WaitTimeout",
    "did_you_mean",
]


class ScribaError(Exception):
    """The root of the tree."""


class ConfigurationError(ScribaError):
    """An option is wrong. The message names the value, the accepted ones, and the cure."""


class UnknownProjection(ScribaError):  # noqa: N818 - the contract's name
    """No projection of that name and version is registered."""


class InvalidState(ScribaError):  # noqa: N818 - the contract's name
    """A command met a projection in a state that does not allow it; `state` says which."""

    def __init__(self, state: str, message: str = "") -> None:
        super().__init__(message or f"not possible while the projection is {state}")
        self.state = state


class ProjectionHalted(ScribaError):  # noqa: N818 - a state, not a mistake
    """A projection is halted; the message carries the recorded cause."""


class WaitTimeout(ScribaError):  # noqa: N818 - the contract's name
    """`wait_for` gave up; `position` is what was waited for, `reached` how far the projection is."""

    def __init__(self, message: str, *, position: int | None = None, reached: int | None = None) -> None:
        super().__init__(message)
        self.position = position
        self.reached = reached


class EventDeadLettered(ScribaError):  # noqa: N818 - the contract's name
    """The event that `wait_for` waited for was given up on; `letter_id` is its dead letter."""

    def __init__(self, message: str, *, letter_id: int | None = None) -> None:
        super().__init__(message)
        self.letter_id = letter_id


class SourceError(ScribaError):
    """A source cannot be read without losing or repeating events. The projection halts with this message."""


class HandlerError(ScribaError):
    """Raised by a handler on purpose, or about what it returned."""


class PermanentFailure(HandlerError):  # noqa: N818 - the contract's name
    """Raise it in a handler: the event is dead-lettered at once, without retries."""


class InvalidReturn(PermanentFailure):
    """The handler returned something that is no result, or a result that contradicts itself."""


class RetryAfter(HandlerError):  # noqa: N818 - the contract's name
    """Raise it in a handler: the event is tried again after `seconds` instead of the policy's wait."""

    def __init__(self, seconds: float, message: str = "") -> None:
        super().__init__(message or f"retry after {seconds} s")
        self.seconds = seconds


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return the tail of an error message: the closest accepted word, or all of them."""
    known = sorted(known)
    close = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; accepted: {', '.join(known)}."
