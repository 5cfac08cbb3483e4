"""Prometheus metrics (``scriba[prometheus]``): how projections are, from their rows; and what this process does, by signals.

Two parts, because two processes know different things. :class:`ProjectionCollector` reads the rows, so any process may
register it, the web process included; it says the same wherever it is asked. :func:`observe_worker` counts batches in
the process that runs them. What always holds: a scrape costs a few statements per database, whatever the number of
events; a database that is away makes ``scriba_up`` 0 and no error; labels are names and versions, never streams.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

from django.db import connections
from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from scriba import signals
from scriba.panel.reading import Card, Sheet, read_sheets
from scriba.protocols import Status

if TYPE_CHECKING:
    from scriba.protocols import Identity

__all__ = ["METRICS", "ProjectionCollector", "observe_worker", "register"]

LABELS: Final = ("projection", "version")
SIZES: Final = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000)
SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)

#: Every metric with its help text: what dashboards and alerts may name.
METRICS: Final = {
    "scriba_up": "1 when Scriba's tables in this database can be read",
    "scriba_projection_state": "1 for the state that the projection is in, 0 for the others",
    "scriba_wanted": "1 when the projection is wished running",
    "scriba_orphaned": "1 when the tables know the projection and the code of this process does not",
    "scriba_watermark": "everything delivered at or below this position is settled",
    "scriba_head": "highest readable position of the source, when the owner last looked",
    "scriba_lag_events": "positions between watermark and head; absent while nobody looks at the source",
    "scriba_lag_seconds": "age of the last settled event; 0 when nothing is unsettled, absent while nobody looks",
    "scriba_events_total": "events settled, by outcome",
    "scriba_dead_letters": "unresolved dead letters, by status",
    "scriba_batch_events": "events in one committed batch (only in the process that runs the projection)",
    "scriba_batch_seconds": "duration of one committed batch (only in the process that runs the projection)",
    "scriba_batches_failed_total": "batches that were rolled back and tried again (only in the process that runs it)",
    "scriba_handler_errors_total": "handler calls that raised (only in the process that runs the projection)",
}


def register(registry: CollectorRegistry = REGISTRY) -> None:
    """Register both parts, once per registry. A worker does it with ``run_projections --metrics-port``."""
    with _lock:
        if registry in _registered:
            return
        _registered.append(registry)
        registry.register(ProjectionCollector())
        observe_worker(registry)


class ProjectionCollector:
    """Reads the rows at each scrape. Register it where ``/metrics`` is served."""

    def describe(self) -> Iterable[Metric]:
        """Return nothing: a registry must not ask the database when the collector is registered."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of every projection in every target database."""
        sheets = read_sheets()
        if _owns_connections():
            connections.close_all()
        yield _gauge("scriba_up", ("database",), [((sheet.alias,), 0.0 if sheet.problem else 1.0) for sheet in sheets])
        cards = [card for sheet in sheets for card in sheet.cards]
        yield _gauge("scriba_projection_state", (*LABELS, "state"), _states(cards))
        yield _gauge("scriba_wanted", LABELS, [(_of(card), float(card.wish == "running")) for card in cards])
        yield _gauge("scriba_orphaned", LABELS, [(_of(card), float(card.is_orphan)) for card in cards])
        for name, attribute in _NUMBERS.items():
            known = [(_of(card), getattr(card, attribute)) for card in cards if _is_known(name, card)]
            yield _gauge(name, LABELS, [(labels, value) for labels, value in known if value is not None])
        yield _events(cards)
        yield _gauge("scriba_dead_letters", (*LABELS, "status"), _letters(sheets))


def observe_worker(registry: CollectorRegistry = REGISTRY) -> None:
    """Count batches and handler errors of this process, from the signals."""
    size = Histogram("scriba_batch_events", METRICS["scriba_batch_events"], LABELS, buckets=SIZES, registry=registry)
    seconds = Histogram(
        "scriba_batch_seconds", METRICS["scriba_batch_seconds"], LABELS, buckets=SECONDS, registry=registry
    )
    failed = Counter("scriba_batches_failed", METRICS["scriba_batches_failed_total"], LABELS, registry=registry)
    errors = Counter("scriba_handler_errors", METRICS["scriba_handler_errors_total"], LABELS, registry=registry)

    def batch(projection: Identity, duration: float, batch_size: int, **_: Any) -> None:
        size.labels(*_named(projection)).observe(batch_size)
        seconds.labels(*_named(projection)).observe(duration)

    def failure(projection: Identity, **_: Any) -> None:
        failed.labels(*_named(projection)).inc()

    def error(projection: Identity, **_: Any) -> None:
        errors.labels(*_named(projection)).inc()

    signals.batch_stopped.connect(batch, weak=False)
    signals.batch_failed.connect(failure, weak=False)
    signals.event_exception.connect(error, weak=False)


def _is_known(name: str, card: Card) -> bool:
    """Say whether a lag may be told: nobody who is halted or gone looks at the source, so a lag of zero would be a guess."""
    return card.is_at_work or bool(card.lag_events) or not name.startswith("scriba_lag")


def _owns_connections() -> bool:
    """Say whether this thread is one of a metrics server: nobody else would close what a scrape has opened."""
    return threading.current_thread() is not threading.main_thread() and not any(
        connection.in_atomic_block for connection in connections.all(initialized_only=True)
    )


def _gauge(name: str, labels: Iterable[str], values: Iterable[tuple[tuple[str, ...], float]]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, METRICS[name], labels=list(labels))
    for label_values, value in values:
        family.add_metric(label_values, value)
    return family


def _states(cards: Iterable[Card]) -> list[tuple[tuple[str, ...], float]]:
    return [((*_of(card), str(state)), float(card.status == state)) for card in cards for state in Status]


def _events(cards: Iterable[Card]) -> CounterMetricFamily:
    family = CounterMetricFamily("scriba_events", METRICS["scriba_events_total"], labels=[*LABELS, "outcome"])
    for card in cards:
        for outcome, number in card.counters.items():
            family.add_metric((*_of(card), outcome), number)
    return family


def _letters(sheets: Iterable[Sheet]) -> list[tuple[tuple[str, ...], float]]:
    return [
        ((*_of(card), status), number)
        for sheet in sheets
        for card in sheet.cards
        for status, number in card.letters.items()
    ]


def _of(card: Card) -> tuple[str, str]:
    return card.name, str(card.version)


def _named(identity: Identity) -> tuple[str, str]:
    return identity.name, str(identity.version)


_NUMBERS: Final = {
    "scriba_watermark": "watermark",
    "scriba_head": "head",
    "scriba_lag_events": "lag_events",
    "scriba_lag_seconds": "lag_seconds",
}
_lock: Final = threading.Lock()
_registered: Final[list[CollectorRegistry]] = []
