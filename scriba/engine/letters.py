"""From an event and what went wrong with it to the :class:`~scriba.protocols.Letter` that the target will store.

What always holds: describing an error never raises, whatever its ``__str__`` does; texts are bounded; equal failures
of one projection share a fingerprint, so that a thousand of them are one line. Knows no model and no database: making
texts and payloads storable is the target's business.
"""

from __future__ import annotations

import hashlib
import traceback
from types import TracebackType
from typing import TYPE_CHECKING, Final, NamedTuple

from scriba.exceptions import InvalidReturn
from scriba.protocols import Letter
from scriba.results import Fail

if TYPE_CHECKING:
    from scriba.event import Event
    from scriba.protocols import Identity

__all__ = ["Description", "describe", "letter_for"]

LONGEST_MESSAGE: Final = 10_000
LONGEST_STACKTRACE: Final = 50_000
INNERMOST_FRAMES: Final = 40  #: of each exception in the chain; a recursion has a thousand
CUT: Final = " … (cut)"
#: Frames of these packages are the way to the failure, not its place.
PASSED_THROUGH: Final = ("scriba.", "django.", "psycopg.", "psycopg_pool.")


class Description(NamedTuple):
    """An error in words. `frame` names the innermost function outside of the machinery, without line numbers."""

    kind: str
    message: str
    stacktrace: str
    frame: str


def letter_for(  # noqa: PLR0913 - each is a column of the letter
    event: Event,
    key: str,
    error: BaseException | Fail,
    attempts: int,
    identity: Identity,
    *,
    kind: str | None = None,
    status: str = "open",
) -> Letter:
    """Return the letter of an `event` that was given up on (``open``) or is held behind one (``parked``).

    `kind` overrides what the error itself would be called (``commit:…``, ``decode:…``).
    """
    found = describe(error)
    kind = kind or found.kind
    cause = error.reason if isinstance(error, Fail) else error
    return Letter(
        event,
        key,
        error_kind=kind,
        message=found.message,
        stacktrace=found.stacktrace,
        attempts=attempts,
        status=status,
        fingerprint=_fingerprint(identity, kind, event.type, found.frame),
        cause=cause if isinstance(cause, BaseException) else None,
    )


def describe(error: BaseException | Fail) -> Description:
    """Put an exception, or the reason of a ``Fail``, into words. Never raises."""
    if isinstance(error, Fail):
        return _described_fail(error.reason)
    kind = "invalid_return" if isinstance(error, InvalidReturn) else _qualified_name(type(error))
    return Description(kind, _words(error) or kind, _stacktrace(error), _frame(error))


def _described_fail(reason: object) -> Description:
    if isinstance(reason, BaseException):
        found = describe(reason)
        return found._replace(kind="error", message=_bounded(f"{found.kind}: {found.message}", LONGEST_MESSAGE))
    return Description("error", _words(reason), "", "")


def _qualified_name(kind: type) -> str:
    """Return a class's name with its module, which builtins do without."""
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _words(thing: object) -> str:
    try:
        return _bounded(str(thing), LONGEST_MESSAGE)
    except Exception:  # noqa: BLE001 - an exception whose __str__ raises
        return f"({type(thing).__qualname__} cannot be shown: its __str__ raises)"


def _stacktrace(error: BaseException) -> str:
    try:
        lines = traceback.format_exception(type(error), error, error.__traceback__, limit=-INNERMOST_FRAMES)
        return _bounded("".join(lines), LONGEST_STACKTRACE)
    except Exception:  # noqa: BLE001 - a source file that cannot be read, an exception that lies about itself
        return ""


def _frame(error: BaseException) -> str:
    """Return where the error was raised: the innermost frame that is nobody's library, or else the innermost."""
    innermost = own = ""
    step: TracebackType | None = error.__traceback__
    while step is not None:
        frame = step.tb_frame
        module = str(frame.f_globals.get("__name__", "?"))
        innermost = f"{module}.{frame.f_code.co_qualname}"
        if not module.startswith(PASSED_THROUGH):
            own = innermost
        step = step.tb_next
    return own or innermost


def _fingerprint(identity: Identity, kind: str, event_type: object, frame: str) -> str:
    said = "\x00".join((str(identity), kind, _words(event_type), frame))
    return hashlib.sha256(said.encode("utf-8", "backslashreplace")).hexdigest()[:16]


def _bounded(text: str, longest: int) -> str:
    return text if len(text) <= longest else text[:longest] + CUT
