"""`drain`: run a projection in the calling thread, on the test's own connection.

A worker thread has its own connection and sees none of the rows that an ordinary ``TestCase`` has not committed. So
`drain` takes the same path as a worker (source, pipeline, target) without threads, leases and waits, inside the
test's transaction.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from django.db import connections

from scriba.engine.circuit import Circuit
from scriba.engine.coordinator import narrowed
from scriba.engine.lanes import Routed
from scriba.engine.pipeline import Halt, LaneRun
from scriba.engine.reader import keyed
from scriba.exceptions import ProjectionHalted
from scriba.protocols import Lease, Shard
from scriba.registry import Projection, find

if TYPE_CHECKING:
    from scriba.protocols import Page, Subscription

__all__ = ["Drained", "drain"]

PAGE = 500
MOST_REPEATS = 3  #: an error that repeats inside one test transaction will not go away
EVERYTHING = 2**63 - 1


class Drained(NamedTuple):
    """What one :func:`drain` settled. `skipped` includes `deduplicated` (settled by an earlier drain)."""

    applied: int
    skipped: int
    dead_lettered: int
    deduplicated: int
    unmatched: int

    @property
    def delivered(self) -> int:
        return self.applied + self.skipped + self.dead_lettered


def drain(p: object) -> Drained:
    """Project everything the source has, now, and return how it was settled.

    `p` is the decorated function, a name (version 1) or (name, version). Retries happen without their waits. Calling
    it again projects only what came since. Raises :class:`~scriba.exceptions.ProjectionHalted` where a running
    projection would halt, and :class:`~scriba.exceptions.UnknownProjection`.
    """
    projection = find(p)
    alias = getattr(projection.target, "using", "default")
    lease = _lease_on(projection, alias)
    before = _counters(lease, alias)
    writer = projection.target.open(projection.identity, inline=True)
    source: Any = narrowed(projection)
    shard = Shard(lease.partition, lease.slice_from, lease.slice_to, None)
    subscribe = getattr(source, "subscribe_inline", source.subscribe)
    subscription = subscribe(projection.identity, [shard])
    try:
        run = LaneRun(projection, writer, lease, 0, Circuit(), ceiling=EVERYTHING)
        watermark = _drain(projection, subscription, run)
        _remember(lease, alias, watermark)
    finally:
        subscription.close()
        writer.close()
    return Drained(*(after - first for after, first in zip(_counters(lease, alias), before, strict=True)))


def _drain(projection: Projection, subscription: Subscription, run: LaneRun) -> int:
    watermark, caught_up = -1, False
    while not caught_up:
        page: Page = subscription.fetch(PAGE, 0.0)
        _settle(run, [keyed(projection, event) for event in page.events if _wanted(projection, event.type)])
        caught_up = page.caught_up or page.scanned <= watermark
        watermark = max(watermark, page.scanned)
    return watermark


def _settle(run: LaneRun, items: list[Routed]) -> None:
    repeats = 0
    while items:
        try:
            step = run.step(items)
        except Halt as halt:
            raise ProjectionHalted(str(halt)) from halt
        items = items[step.settled :]
        repeats = repeats + 1 if step.problem and not step.settled else 0
        if repeats > MOST_REPEATS:
            msg = f"the same events failed {repeats} times: {step.problem}"
            raise ProjectionHalted(msg)


def _wanted(projection: Projection, event_type: str) -> bool:
    known = projection.event_types
    return known is None or hasattr(projection.source, "narrow") or event_type in known  # a source that narrows has


def _lease_on(projection: Projection, alias: str) -> Lease:
    """Create the projection's rows on the test's connection; nobody else can own them there."""
    from scriba.models import ProjectionState, Segment  # noqa: PLC0415 - needs the app registry

    key: dict[str, Any] = {"projection_name": projection.name, "projection_version": projection.version}
    ProjectionState.objects.using(alias).get_or_create(**key)
    segment, _ = Segment.objects.using(alias).get_or_create(**key, partition="", slice_from=0)
    return Lease(segment.pk, "drain", segment.epoch)


def _counters(lease: Lease, alias: str) -> tuple[int, ...]:
    from scriba.models import Lane  # noqa: PLC0415 - needs the app registry

    names = Drained._fields
    rows = Lane.objects.using(alias).filter(segment_id=lease.segment).values_list(*names)
    return tuple(map(sum, zip(*rows, strict=True))) if rows else (0,) * len(names)


def _remember(lease: Lease, alias: str, watermark: int) -> None:
    from scriba.models import Segment  # noqa: PLC0415 - needs the app registry

    if watermark >= 0 and connections[alias].is_usable():
        Segment.objects.using(alias).filter(pk=lease.segment).update(watermark=watermark, ceiling=watermark)
