"""Spans of a running engine: each handler call and each batch, as a tracing backend would get them."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from scriba import Fail, RetryPolicy, Skip, signals
from scriba.sources import TableSource
from tests.support.world import World
from tests.testapp.models import Event

sdk = pytest.importorskip("opentelemetry.sdk.trace", reason="opentelemetry-sdk is not installed")
pytestmark = pytest.mark.django_db(transaction=True)

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


class Spans:
    """What was exported, by name."""

    def __init__(self, exporter: Any, tracer: Any) -> None:
        self._exporter = exporter
        self.tracer = tracer

    def named(self, name: str) -> list[Any]:
        return [span for span in self._exporter.get_finished_spans() if span.name == name]


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[Spans]:
    """Everything instrumented, with an exporter in memory; the receivers go with the test."""
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from scriba.tracing import instrument

    for name in signals.__all__:
        signal = getattr(signals, name)
        monkeypatch.setattr(signal, "receivers", [])
        signal.sender_receivers_cache.clear()
    exporter, provider = InMemorySpanExporter(), sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    instrument(provider)
    instrument(provider)  # ready() of an app may run twice
    yield Spans(exporter, provider.get_tracer("the handler's own"))
    provider.shutdown()


@pytest.fixture
def world(scratch_name: str) -> World:
    return World(scratch_name)


def traced(world: World, handler: Any, **options: Any) -> Any:
    """A projection over the event table, whose streams here are named by the traces that their events belong to."""
    return world.projection(handler, source=TableSource(Event, correlation_id="stream_id"), **options)


def test_each_call_is_a_span_that_leads_to_its_trace(spans: Spans, world: World) -> None:
    """Identity and place of the event, a link where the correlation id names a trace, none where it does not."""
    other = str(uuid.UUID(TRACE[::-1]))
    positions = world.append(TRACE, other, "checkout")

    world.run(traced(world, lambda data, meta: Skip()))

    calls = {span.attributes["scriba.position"]: span for span in spans.named(f"{world.name}:1 Happened")}
    links = {position: [f"{link.context.trace_id:032x}" for link in span.links] for position, span in calls.items()}
    assert links == {positions[0]: [TRACE], positions[1]: [TRACE[::-1]], positions[2]: []}
    assert {span.attributes["scriba.correlation_id"] for span in calls.values()} == {TRACE, other, "checkout"}
    first = calls[positions[0]]
    assert dict(first.attributes) == {
        "scriba.projection": world.name, "scriba.version": 1, "scriba.event_id": str(positions[0]),
        "scriba.event_type": "Happened", "scriba.stream_id": TRACE, "scriba.position": positions[0],
        "scriba.correlation_id": TRACE,
    }  # fmt: skip
    assert all(span.status.is_ok or span.status.is_unset for span in calls.values())


def test_a_batch_is_a_span_with_its_size_and_its_time(spans: Spans, world: World) -> None:
    """The sizes of all batches are all the events; a batch began before it ended, and not before its calls were made."""
    world.append_many(120, streams=4)

    world.run(traced(world, lambda data, meta: Skip(), batch_size=50))

    batches = spans.named(f"{world.name}:1 batch")
    assert sum(span.attributes["scriba.batch_size"] for span in batches) == 120
    assert {span.attributes["scriba.lane"] for span in batches} <= {0, 1, 2}
    assert all(span.start_time < span.end_time for span in batches)
    calls = spans.named(f"{world.name}:1 Happened")
    assert max(span.end_time for span in batches) >= max(span.end_time for span in calls)


@pytest.mark.case("B8")
def test_a_call_that_fails_is_a_span_with_its_error(spans: Spans, world: World) -> None:
    """Each attempt is one span; the letter at the end is another, which leads to the trace as well."""
    (position,) = world.append(TRACE)

    def failing(data: Any, meta: Any) -> Any:
        raise LookupError("no voucher")

    world.run(traced(world, failing, retry=RetryPolicy(attempts=2, backoff=(0.0,))))

    calls = spans.named(f"{world.name}:1 Happened")
    assert len(calls) == 2
    for span in calls:
        assert not span.status.is_ok
        assert span.status.description == "LookupError"
        (happened,) = span.events
        assert (happened.name, happened.attributes["exception.message"]) == ("exception", "no voucher")
        assert "in failing" in happened.attributes["exception.stacktrace"]
    (letter,) = spans.named(f"{world.name}:1 dead letter")
    assert letter.attributes["scriba.position"] == position
    assert letter.attributes["scriba.error_kind"] == "LookupError"
    assert f"{letter.links[0].context.trace_id:032x}" == TRACE
    assert letter.status.description == "LookupError"


@pytest.mark.case("B2")
@pytest.mark.parametrize(
    ("returned", "kind", "words"),
    [(Fail("no voucher"), "error", "no voucher"), (None, "invalid_return", "the handler returned None")],
)
def test_a_result_that_is_a_failure_is_a_span_with_its_error(
    spans: Spans, world: World, returned: Any, kind: str, words: str
) -> None:
    """Returned or raised, a failure is one; its span and its letter's call it the same. The next one is none."""
    first, second = world.append(TRACE, "other")

    world.run(traced(world, lambda data, meta: returned if meta.position == first else Skip()))

    calls = {span.attributes["scriba.position"]: span for span in spans.named(f"{world.name}:1 Happened")}
    failed = calls[first]
    assert (failed.status.status_code.name, failed.status.description) == ("ERROR", kind)
    assert words in failed.events[0].attributes["exception.message"]
    assert calls[second].status.is_unset
    (letter,) = spans.named(f"{world.name}:1 dead letter")
    assert letter.attributes["scriba.error_kind"] == kind


@pytest.mark.case("B11")
def test_an_error_that_cannot_be_shown_ends_its_span(spans: Spans, world: World) -> None:
    """Its ``__str__`` raises; the span is there all the same, with its error."""

    class Unspeakable(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    def failing(data: Any, meta: Any) -> Any:
        raise Unspeakable

    world.append("a")
    world.run(traced(world, failing))

    (span,) = spans.named(f"{world.name}:1 Happened")
    assert span.status.description is not None
    assert span.status.description.endswith("Unspeakable")


def test_what_a_handler_opens_is_inside_its_span(spans: Spans, world: World) -> None:
    """A query or a request that is traced by somebody else hangs below the event; nothing of it leaks to the next one."""
    world.append("a", "a", "b")

    def calling(data: Any, meta: Any) -> Skip:
        with spans.tracer.start_as_current_span(f"inside {meta.position}"):
            if meta.stream_id == "b":
                raise ValueError
        return Skip()

    world.run(traced(world, calling))

    for call in spans.named(f"{world.name}:1 Happened"):
        (inside,) = spans.named(f"inside {call.attributes['scriba.position']}")
        assert inside.parent.span_id == call.context.span_id
        assert call.parent is None
    assert all(span.parent is None for span in spans.named(f"{world.name}:1 batch"))
