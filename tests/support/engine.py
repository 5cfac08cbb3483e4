"""The engine on memory doubles: what unit and property tests build their schedules from."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable
from typing import Any

from scriba.conf import Settings
from scriba.engine.circuit import Circuit
from scriba.engine.coordinator import Coordinator
from scriba.engine.lanes import Routed
from scriba.engine.pipeline import LaneRun
from scriba.engine.reader import keyed
from scriba.event import Event
from scriba.protocols import Identity, Lease
from scriba.registry import Projection
from scriba.results import Insert
from scriba.retry import RetryPolicy
from scriba.testing.memory import MemoryLedger, MemorySource, MemoryState, MemoryTarget

FAST = Settings(lease_s=1.0, drain_timeout_s=5.0, busy_poll_s=0.005, idle_poll_s=0.02)
_numbers = itertools.count(1)


def events(*streams: str, first: int = 1) -> list[Event]:
    """One event per name, at consecutive positions."""
    return [Event(position, stream, "Happened", f"id-{position}", {"n": position})
            for position, stream in enumerate(streams, first)]  # fmt: skip


def insert_position(data: Any, meta: Any) -> Insert:
    """The plainest handler: its write says which event of which stream it came from."""
    del data
    return Insert((meta.stream_id, meta.position))


def make_projection(handler: Callable[..., Any], source: Any, target: Any, **options: Any) -> Projection:
    """Build a projection without registering it."""
    defaults: dict[str, Any] = {"parallelism": 2, "retry": RetryPolicy(attempts=1, backoff=()), "lag_interval": 0.0}
    return Projection(f"memory-{next(_numbers)}", 1, handler, source, target, **{**defaults, **options})


def lane_run(projection: Projection, *, ceiling: int = -1, circuit: Circuit | None = None, **options: Any) -> LaneRun:
    """One lane on the projection's target, without threads."""
    writer = projection.target.open(projection.identity)
    return LaneRun(projection, writer, Lease(1, "test", 0), 0, circuit or Circuit(), ceiling=ceiling, **options)


def routed(projection: Projection, found: Iterable[Event]) -> list[Routed]:
    return [keyed(projection, event) for event in found]


def settle_all(run: LaneRun, items: list[Routed], *, most_steps: int = 200) -> list[float]:
    """Step until everything is settled, without waiting; return the waits that were asked for."""
    waits = []
    for _ in range(most_steps):
        if not items:
            return waits
        step = run.step(items)
        items = items[step.settled :]
        if step.wait_s:
            waits.append(step.wait_s)
    msg = f"{len(items)} events still unsettled after {most_steps} steps"
    raise AssertionError(msg)


class Running:
    """A coordinator in its thread, on memory; a context manager that always ends it."""

    def __init__(self, projection: Projection, state: MemoryState, *, owner: str = "one", **options: Any) -> None:
        settings = options.pop("settings", FAST)
        self.coordinator = Coordinator(
            projection, open_ledger=lambda: MemoryLedger(state), settings=settings, owner=owner, **options
        )
        self.thread = threading.Thread(target=self.coordinator.run, daemon=True)

    def __enter__(self) -> Coordinator:
        self.thread.start()
        return self.coordinator

    def __exit__(self, *exc: object) -> None:
        self.coordinator.stop()
        self.thread.join(10)
        assert not self.thread.is_alive(), "the coordinator did not end"


def memory_world(*found: Event, **target_options: Any) -> tuple[MemorySource, MemoryTarget, MemoryState]:
    """Return a source with `found`, an empty target, and the ledger's shared state."""
    target = MemoryTarget(**target_options)
    return MemorySource(found), target, MemoryState(target)


def conserved(target: MemoryTarget, delivered: int) -> bool:
    """The conservation check: every delivered event is settled exactly one way."""
    counters = target.counters
    return delivered == counters.applied + counters.skipped + counters.dead_lettered


__all__ = [
    "FAST", "Identity", "Running", "conserved", "events", "insert_position", "lane_run", "make_projection",
    "memory_world", "routed", "settle_all",
]  # fmt: skip
