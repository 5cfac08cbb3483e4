"""What a failure says of itself: kind, message, traceback, fingerprint. Pure, and never raises.

Kinds: ``error`` for a returned ``Fail``, ``invalid_return``, the qualified name of a raised exception; the pipeline
names ``decode:<class>``, ``commit:<sqlstate> (<name>)`` and ``parked`` itself.
"""

from __future__ import annotations

import hashlib
import traceback
from typing import TYPE_CHECKING, Final, NamedTuple

from scriba.exceptions import InvalidReturn
from scriba.protocols import Letter
from scriba.results import Fail

if TYPE_CHECKING:
    from scriba.event import Event
    from scriba.protocols import Identity

__all__ = ["Description", "describe", "letter_for"]

LONGEST_MESSAGE: Final = 10_000
LONGEST_TRACEBACK: Final = 50_000


class Description(NamedTuple):
    """A failure in words. `frame` is where it came from: file and function of the innermost frame."""

    kind: str
    message: str
    stacktrace: str
    frame: str


def letter_for(  # noqa: PLR0913 - an event, a failure, and what is known about both
    event: Event,
    key: str,
    error: BaseException | Fail,
    attempts: int,
    identity: Identity,
    *,
    kind: str | None = None,
    status: str = "open",
) -> Letter:
    """Return the dead letter of `event`. `kind` overrides what the failure calls itself."""
    described = describe(error)
    kind = kind or described.kind
    return Letter(
        event,
        key,
        kind,
        described.message,
        described.stacktrace,
        attempts,
        status,
        _fingerprint(identity, kind, event.type, described.frame),
        error if isinstance(error, BaseException) else None,
    )


def describe(error: BaseException | Fail) -> Description:
    """Put a failure into words, also one whose ``__str__`` raises."""
    if isinstance(error, Fail):
        return Description("error", _cut(_words(error.reason), LONGEST_MESSAGE), "", "")
    kind = "invalid_return" if isinstance(error, InvalidReturn) else _qualified_name(type(error))
    return Description(kind, _cut(_words(error), LONGEST_MESSAGE), _traceback(error), _frame(error))


def _qualified_name(kind: type[BaseException]) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _words(reason: object) -> str:
    try:
        return str(reason)
    except Exception as error:  # noqa: BLE001 - an object that cannot be shown must not hide the failure
        return f"(a {type(reason).__qualname__} whose __str__ raised {type(error).__qualname__})"


def _traceback(error: BaseException) -> str:
    try:
        return _cut("".join(traceback.format_exception(error)), LONGEST_TRACEBACK)
    except Exception:  # noqa: BLE001 - formatting calls user code (__str__, __repr__)
        return "".join(traceback.format_tb(error.__traceback__))


def _frame(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].name}" if frames else ""


def _fingerprint(identity: Identity, kind: str, event_type: str, frame: str) -> str:
    """Equal failures share it, so that ten thousand of them are one line. No line number: deployments move those."""
    text = "\0".join([identity.name, str(identity.version), kind, event_type, frame])
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:16]


def _cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[:longest]} … ({len(text) - longest} more characters)"
