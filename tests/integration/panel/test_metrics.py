"""Metrics and spans: the rows as gauges in any process, batches and handler calls in the one that runs them."""

from __future__ import annotations

import json
import re
import socket
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from scriba import signals
from scriba.protocols import Identity, Status
from scriba.registry import find
from tests.integration.panel.conftest import Scene
from tests.support.processes import managed
from tests.support.waiting import wait_until
from tests.support.world import World

prometheus = pytest.importorskip("prometheus_client", reason="prometheus-client is not installed")
HOWTO = Path(__file__).resolve().parents[3] / "docs" / "howto"


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Receivers that a test connects go with it."""
    for name in signals.__all__:
        monkeypatch.setattr(getattr(signals, name), "receivers", [])
        getattr(signals, name).sender_receivers_cache.clear()


@pytest.mark.django_db(databases=["default", "other"])
def test_the_rows_are_gauges_in_any_process(scene: Scene) -> None:
    """State, watermark, head, lag, events and letters, without a worker in this process."""
    from scriba.metrics import ProjectionCollector

    scene.busy_night()
    registry = prometheus.CollectorRegistry()
    registry.register(ProjectionCollector())
    stock = {"projection": "stock", "version": "1"}

    def value(name: str, **labels: str) -> float | None:
        found: float | None = registry.get_sample_value(name, labels)
        return found

    assert value("scriba_up", database="default") == 1
    assert value("scriba_projection_state", state="paused", **stock) == 1
    assert value("scriba_projection_state", state="running", **stock) == 0
    assert value("scriba_projection_state", state="halted", projection="search", version="1") == 1
    assert value("scriba_wanted", **stock) == 0
    assert value("scriba_watermark", **stock) == 1_481_900
    assert value("scriba_head", **stock) == 1_482_113
    assert value("scriba_lag_events", **stock) == 213
    assert (value("scriba_lag_seconds", **stock) or 0) > 700
    assert value("scriba_events_total", outcome="applied", **stock) == 1_481_900
    assert value("scriba_dead_letters", status="open", projection="invoices", version="1") == 1_207
    assert value("scriba_dead_letters", status="parked", projection="invoices", version="2") == 41


@pytest.mark.django_db(databases=["default", "other"])
def test_a_lag_that_nobody_knows_is_not_zero(scene: Scene) -> None:
    """Whoever is halted or gone does not look at the source: at best its last look is a lower bound."""
    from scriba.metrics import ProjectionCollector

    scene.rows(scene.declare("halted"), watermark=100, head=100, halt_cause="no such column")
    scene.rows(scene.declare("gone"), live=False, watermark=90, head=100)
    scene.rows(scene.declare("idle"), watermark=100, head=100)
    registry = prometheus.CollectorRegistry()
    registry.register(ProjectionCollector())

    found = {
        name: registry.get_sample_value("scriba_lag_events", {"projection": name, "version": "1"})
        for name in ("halted", "gone", "idle")
    }

    assert found == {"halted": None, "gone": 10, "idle": 0}


@pytest.mark.django_db(databases=["default", "other"])
def test_an_orphan_is_marked_so_that_nobody_is_woken(scene: Scene) -> None:
    """It is wished running, as every projection is at first, and nobody will ever run it: the alerts leave it out."""
    import yaml

    from scriba.metrics import ProjectionCollector

    scene.rows(scene.declare("orders"))
    scene.rows(Identity("old_report", 1), live=False, owner="")
    registry = prometheus.CollectorRegistry()
    registry.register(ProjectionCollector())
    (group,) = yaml.safe_load((HOWTO / "alerts.yml").read_text())["groups"]

    marked = [
        registry.get_sample_value("scriba_orphaned", {"projection": name, "version": "1"})
        for name in ("orders", "old_report")
    ]

    assert marked == [0, 1]
    for rule in group["rules"]:
        if "scriba_wanted" in rule["expr"]:
            assert "unless on (projection, version) min by (projection, version) (scriba_orphaned) == 1" in rule["expr"]


@pytest.mark.django_db(transaction=True)
def test_a_worker_counts_batches_and_errors(quiet: None, scratch_name: str) -> None:
    """Histograms of size and duration, from the signals of real batches."""
    from scriba.metrics import observe_worker

    world, registry = World(scratch_name), prometheus.CollectorRegistry()
    observe_worker(registry)

    def handler(data: Any, meta: Any) -> Any:
        from scriba import Skip

        return 1 / 0 if meta.stream_id == "bad" else Skip()

    world.append("a", "b", "bad")
    world.run(world.projection(handler))

    labels = {"projection": world.name, "version": "1"}
    assert registry.get_sample_value("scriba_batch_events_sum", labels) == 3
    assert (registry.get_sample_value("scriba_batch_seconds_count", labels) or 0) >= 1
    assert registry.get_sample_value("scriba_handler_errors_total", labels) == 1


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
def test_a_worker_serves_every_metric() -> None:
    """What Prometheus scrapes from a running process: its rows, its batches and its failures, under the documented names."""
    from prometheus_client.parser import text_string_to_metric_families

    from scriba.metrics import METRICS

    world, port = World("noting"), free_port()
    (*_, last) = world.append("a", "b") + world.append("bad", fail=True)
    labels = {"projection": "noting", "version": "1"}
    samples: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
    families: set[str] = set()

    def value(name: str, **more: str) -> float | None:
        return samples.get((name, frozenset((labels | more).items())))

    def is_settled() -> bool:
        text = scraped(port)
        samples.clear()
        for family in text_string_to_metric_families(text):
            families.add(family.name)
            samples.update({(one.name, frozenset(one.labels.items())): one.value for one in family.samples})
        is_counted = value("scriba_batch_events_sum") == 3  # sent after the commit, which the rows tell of first
        return is_counted and value("scriba_watermark") == last and value("scriba_dead_letters", status="open") == 1

    with managed("run_projections", "noting", "--metrics-port", str(port)) as process:
        wait_until(is_settled, timeout=30, what="the letter, the watermark and the batches in the metrics")
        process.terminate()
        assert process.wait(30) == 0

    assert {name.removesuffix("_total") for name in METRICS} <= families
    assert value("scriba_events_total", outcome="applied") == 2
    assert value("scriba_events_total", outcome="dead_lettered") == 1
    assert value("scriba_lag_events") == 0
    assert value("scriba_wanted") == 1
    assert (value("scriba_batch_seconds_count") or 0) >= 1
    assert value("scriba_handler_errors_total") == 2, "one for each attempt"
    assert samples["scriba_up", frozenset({("database", "default")})] == 1


def free_port() -> int:
    with socket.socket() as held:
        held.bind(("localhost", 0))
        return int(held.getsockname()[1])


def scraped(port: int) -> str:
    try:
        with urllib.request.urlopen(f"http://localhost:{port}/metrics", timeout=10) as answer:
            return str(answer.read().decode())
    except OSError:
        return ""


def test_every_metric_is_in_the_catalogue() -> None:
    """The help texts name what is really exported, and the page names them all."""
    from scriba.metrics import METRICS

    page = (HOWTO / "alerting.md").read_text()

    assert {name for name in METRICS if f"`{name}`" not in page} == set()


@pytest.mark.parametrize("name", ["grafana-dashboard.json", "alerts.yml"])
def test_dashboard_and_alerts_name_only_metrics_that_exist(name: str) -> None:
    """A panel or an alert on a metric that nobody exports would be silent for ever."""
    import yaml

    from scriba.metrics import METRICS

    text = (HOWTO / name).read_text()
    loaded = json.loads(text) if name.endswith(".json") else yaml.safe_load(text)
    exported = set(METRICS) | {
        f"{known}_{part}"
        for known in ("scriba_batch_events", "scriba_batch_seconds")
        for part in ("bucket", "sum", "count")
    }
    expressions = re.findall(r"\bscriba_[a-z_]+\b", " ".join(_expressions(loaded)))

    assert expressions
    assert set(expressions) <= exported
    states = set(re.findall(r'state=~?"([^"]+)"', " ".join(_expressions(loaded))))
    assert {state for alternatives in states for state in alternatives.split("|")} <= {str(status) for status in Status}


def _expressions(node: Any) -> list[str]:
    if isinstance(node, dict):
        own = [str(value) for key, value in node.items() if key == "expr"]
        return own + [found for value in node.values() for found in _expressions(value)]
    return [found for value in node for found in _expressions(value)] if isinstance(node, list) else []


# --- spans --------------------------------------------------------------------------------------------------------


def test_handler_calls_and_batches_are_spans(quiet: None) -> None:
    """With the event's identity, its error, and a link to the trace that its correlation id names."""
    pytest.importorskip("opentelemetry.sdk.trace", reason="opentelemetry-sdk is not installed")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from scriba.engine.telemetry import event_fields, send
    from scriba.event import Event
    from scriba.tracing import instrument

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    instrument(provider)
    identity = Identity("orders", 1)
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    good = event_fields(Event(7, "order-1", "OrderPlaced", "e-7", correlation_id=trace))
    bad = event_fields(Event(8, "order-1", "OrderShipped", "e-8", correlation_id="checkout"))

    send(signals.event_started, identity, monotonic_time=0.0, system_time=0.0, **good)
    send(signals.event_stopped, identity, duration=0.1, monotonic_time=0.1, **good)
    send(signals.event_started, identity, monotonic_time=0.0, system_time=0.0, **bad)
    send(
        signals.event_exception,
        identity,
        duration=0.1,
        monotonic_time=0.1,
        kind="error",
        reason=ValueError("no"),
        stacktrace=None,
        **bad,
    )
    send(signals.batch_stopped, identity, duration=0.25, batch_size=2, lane=1)

    first, second, batch = exporter.get_finished_spans()
    assert first.name == "orders:1 OrderPlaced"
    assert first.attributes["scriba.position"] == 7
    assert f"{first.links[0].context.trace_id:032x}" == trace
    assert (second.links, second.attributes["scriba.correlation_id"]) == ((), "checkout")
    assert not second.status.is_ok
    assert batch.end_time - batch.start_time == 250_000_000
    assert batch.attributes["scriba.batch_size"] == 2


@pytest.mark.django_db(databases=["default", "other"])
def test_a_database_that_is_away_is_a_number_too(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scrape never fails because of it: that is what the alert is for."""
    from django.db import OperationalError

    from scriba.metrics import ProjectionCollector
    from scriba.panel import reading

    def away(alias: str) -> None:
        raise OperationalError("connection refused")

    scene.declare("orders")
    assert find("orders")
    monkeypatch.setattr(reading, "_sheet", away)
    registry = prometheus.CollectorRegistry()
    registry.register(ProjectionCollector())

    assert registry.get_sample_value("scriba_up", {"database": "default"}) == 0
