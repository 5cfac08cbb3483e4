"""OpenTelemetry spans (``scriba[otel]``) for batches and handler calls, from the signals.

A handler's span carries event id, type, stream and position, and the event's correlation id; one that has the form of a
trace id (32 hexadecimal digits, a UUID) is a link to that trace as well, so that one is found from the other. It is the
current span while the handler runs: what the handler or an instrumented driver opens is its child. A batch's span is
made when the batch has committed, with the times that it had. What always holds: without :func:`instrument` nothing is
imported from OpenTelemetry and nothing is sent; a thread's current span is what it was before each call.
"""

from __future__ import annotations

import re
import threading
import time
from typing import TYPE_CHECKING, Any, Final

from opentelemetry import context, trace
from opentelemetry.trace import (
    Link,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    Tracer,
    TracerProvider,
)

from scriba import signals
from scriba.engine.handling import FailReturned
from scriba.exceptions import InvalidReturn

if TYPE_CHECKING:
    from scriba.protocols import Identity

__all__ = ["instrument"]

_NANO: Final = 1_000_000_000
_TRACE_ID: Final = re.compile("[0-9a-f]{32}")
_SPAN_BITS: Final = 2**64 - 1


def instrument(provider: TracerProvider | None = None) -> None:
    """Send spans of this process' projections to `provider` (the global one when left out). A second call changes nothing."""
    spans = _Spans(trace.get_tracer("scriba", tracer_provider=provider))
    for signal, receiver in (
        (signals.event_started, spans.started),
        (signals.event_stopped, spans.stopped),
        (signals.event_exception, spans.raised),
        (signals.batch_stopped, spans.batch),
        (signals.dead_lettered, spans.letter),
    ):
        signal.connect(receiver, weak=False, dispatch_uid="scriba.tracing")


class _Spans:
    """Opens and closes spans in the thread that runs the handler."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._open = threading.local()

    def started(self, projection: Identity, **event: Any) -> None:
        self._end()  # one that the thread never heard the end of
        span = self._tracer.start_span(
            f"{projection} {event['event_type']}",
            kind=SpanKind.CONSUMER,
            attributes=_attributes(projection, event),
            links=_links(event.get("correlation_id")),
        )
        self._open.span = span
        self._open.token = context.attach(trace.set_span_in_context(span))

    def stopped(self, reason: BaseException | None = None, **_: Any) -> None:
        self._end(reason)

    def raised(self, reason: BaseException, **_: Any) -> None:
        self._end(reason)

    def batch(self, projection: Identity, duration: float, batch_size: int, lane: int, **_: Any) -> None:
        ended = time.time_ns()
        attributes = {**_identified(projection), "scriba.batch_size": batch_size, "scriba.lane": lane}
        began = ended - int(duration * _NANO)
        self._tracer.start_span(f"{projection} batch", start_time=began, attributes=attributes).end(ended)

    def letter(self, projection: Identity, error_kind: str, **event: Any) -> None:
        attributes = {**_attributes(projection, event), "scriba.error_kind": error_kind}
        links = _links(event.get("correlation_id"))
        span = self._tracer.start_span(f"{projection} dead letter", attributes=attributes, links=links)
        span.set_status(Status(StatusCode.ERROR, error_kind))
        span.end()

    def _end(self, reason: BaseException | None = None) -> None:
        span: Span | None = getattr(self._open, "span", None)
        if span is None:
            return
        self._open.span = None
        context.detach(self._open.token)
        try:
            if reason is not None:
                span.set_status(Status(StatusCode.ERROR, _kind(reason)))
                span.record_exception(reason)
        finally:  # an exception that cannot be shown ends its span all the same
            span.end()


def _kind(reason: BaseException) -> str:
    """Return what went wrong; a result that stands for a failure is called what its dead letter calls it."""
    if isinstance(reason, FailReturned):
        return "error"
    return "invalid_return" if isinstance(reason, InvalidReturn) else type(reason).__qualname__


def _identified(projection: Identity) -> dict[str, Any]:
    return {"scriba.projection": projection.name, "scriba.version": projection.version}


def _attributes(projection: Identity, event: dict[str, Any]) -> dict[str, Any]:
    known = {
        "scriba.event_id": event.get("event_id"),
        "scriba.event_type": event.get("event_type"),
        "scriba.stream_id": event.get("stream_id"),
        "scriba.position": event.get("position"),
        "scriba.correlation_id": event.get("correlation_id"),
    }
    return _identified(projection) | {name: value for name, value in known.items() if value}


def _links(correlation_id: str | None) -> list[Link]:
    digits = str(correlation_id or "").replace("-", "").lower()
    if not _TRACE_ID.fullmatch(digits) or not int(digits, 16):
        return []
    trace_id = int(digits, 16)
    context = SpanContext(
        trace_id, trace_id & _SPAN_BITS or 1, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED)
    )
    return [Link(context, {"scriba.correlation_id": str(correlation_id)})]
