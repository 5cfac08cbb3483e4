"""One handler call, and everything that must happen inside its attempt: decoding, and judging what it returned.

Judged inside the attempt, because what an invalid handler wrote through the ORM must be undone with it.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from scriba import signals
from scriba.engine.telemetry import event_fields, send
from scriba.event import EventMeta, SkipEvent
from scriba.exceptions import InvalidReturn, PermanentFailure
from scriba.results import ACCEPTED, Delete, Done, Fail, Insert, Skip, Update, Upsert, writes_of

if TYPE_CHECKING:
    from scriba.engine.lanes import Routed
    from scriba.event import Event
    from scriba.protocols import Batch
    from scriba.registry import Projection

__all__ = ["DecodeFailed", "FailReturned", "HandlerCall", "HandlerExited", "exited", "free_locals", "plain_text"]


_SINGLE: Final = frozenset({Delete, Insert, Update, Upsert})
_new: Final = tuple.__new__  #: past the generated constructor, which is Python: once for each event


class DecodeFailed(PermanentFailure):
    """The payload could not be decoded; the cause says why. Not retried: bytes do not get better."""


class FailReturned(Exception):  # noqa: N818 - stands for the handler's Fail(reason)
    """The handler returned ``Fail(reason)``."""


class HandlerExited(PermanentFailure):
    """The handler, or what decodes or partitions for it, raised SystemExit, CancelledError or another exception that is
    no error: a thread is not a process to leave, and no task to cancel.
    """


def exited(who: str, error: BaseException) -> HandlerExited:
    """Return what stands for `error`, which is no :class:`Exception`; raise it again when a person pressed Ctrl-C."""
    if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
        raise error
    return HandlerExited(f"{who} raised {type(error).__name__}")


class HandlerCall:
    """Calls the handler for `item`; made once per batch.

    Returns None for ``Done``, an empty sequence for a skip, and the declared writes otherwise.
    """

    __slots__ = ("_batch", "_handler", "_identity", "_is_observed", "_valid_result", "item", "replaying")

    def __init__(self, projection: Projection, batch: Batch) -> None:
        self._handler = projection.handler
        self._identity = projection.identity
        self._valid_result = projection.target.valid_result
        self._batch = batch
        self._is_observed = any(
            signal.receivers for signal in (signals.event_started, signals.event_stopped, signals.event_exception)
        )
        self.item: Routed
        self.replaying = False

    def __call__(self) -> Sequence[Any] | None:
        event, _key, error = self.item
        if error is not None:
            raise error
        codec = event.codec
        try:
            type_, data, metadata = event.payload() if codec is None else codec.decode(event)
        except SkipEvent:
            raise
        except Exception as cause:
            raise DecodeFailed(plain_text(cause)) from cause
        except BaseException as cause:
            raise exited("decoding", cause) from cause
        meta = _new(EventMeta, (
            event.id, event.stream_id, event.position, type_, metadata, event.occurred_at,
            event.correlation_id, event.causation_id, event.stream_version, self.replaying,
        ))  # fmt: skip
        if self._is_observed:
            return self._observed(event, data, meta)
        returned = self._call(data, meta)
        if type(returned) in _SINGLE and self._valid_result(returned):  # the usual, quickly
            return (returned,)
        return self._judge(returned)

    def _call(self, data: Any, meta: EventMeta) -> Any:
        try:
            return self._handler(data, meta)
        except Exception:
            raise
        except BaseException as error:
            raise exited("the handler", error) from error

    def _observed(self, event: Event, data: Any, meta: EventMeta) -> Sequence[Any] | None:
        fields = event_fields(event)
        started = time.monotonic()
        send(signals.event_started, self._identity, monotonic_time=started, system_time=time.time(), **fields)
        try:
            returned = self._call(data, meta)
        except Exception as error:
            now = time.monotonic()
            send(
                signals.event_exception, self._identity, duration=now - started, monotonic_time=now, kind="error",
                reason=error, stacktrace=error.__traceback__, **fields,
            )  # fmt: skip
            raise
        now = time.monotonic()
        reason: Exception | None = None
        try:
            return self._judge(returned)
        except Exception as error:
            reason = error
            raise
        finally:
            send(
                signals.event_stopped, self._identity, duration=now - started, monotonic_time=now, reason=reason, **fields
            )  # fmt: skip

    def _judge(self, returned: Any) -> Sequence[Any] | None:
        writes = writes_of(returned)
        if writes and self._valid_result(returned):
            return writes
        if isinstance(returned, Done):
            return None
        if isinstance(returned, Fail):
            raise FailReturned(returned.reason)
        if writes is None or writes:
            raise InvalidReturn(f"the handler returned {_shown(returned)}; accepted: {ACCEPTED}.")
        if self._batch.wrote:
            kind = "Skip()" if isinstance(returned, Skip) else "[]"
            raise InvalidReturn(
                f"the handler wrote through the ORM and then returned {kind}; return Done() to keep what it wrote."
            )
        return writes


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - a repr that raises must not hide the mistake
        text = f"an object of type {type(value).__qualname__}"
    return text if len(text) <= 200 else text[:200] + "…"  # noqa: PLR2004


def plain_text(error: BaseException | None) -> str:
    """Return an exception's words on one line, also when its ``__str__`` raises."""
    try:
        return " ".join(str(error).split())
    except Exception:  # noqa: BLE001 - an exception whose __str__ raises
        return f"(an {type(error).__qualname__} that cannot be shown)"


def free_locals(error: BaseException | None) -> None:
    """Let go what the frames behind `error` hold: a batch's events and texts. What it says, and where, stays.

    Most tracebacks are part of a cycle (a frame that keeps the error which it raises), so all of that would otherwise
    wait for the cyclic collector, which looks at the number of objects and never at their size.
    """
    waiting, seen = [error], set[int]()
    while waiting:
        link = waiting.pop()
        if link is not None and id(link) not in seen:
            seen.add(id(link))
            traceback.clear_frames(link.__traceback__)
            waiting += [link.__cause__, link.__context__]
