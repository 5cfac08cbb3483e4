"""The peer: the projection runner of the library `eventsourcing`, as its documentation shows it.

A tracking recorder that writes a row and the position in one transaction, a projection with one method for each event,
a runner. It gets the same events, in the same order, from an application's log that is filled beforehand.
"""

from __future__ import annotations

from decimal import Decimal
from typing import Any
from uuid import NAMESPACE_URL, uuid5

from eventsourcing.application import Application
from eventsourcing.dispatch import singledispatchmethod
from eventsourcing.domain import Aggregate
from eventsourcing.persistence import Tracking, TrackingRecorder
from eventsourcing.postgres import PostgresTrackingRecorder
from eventsourcing.projection import Projection, ProjectionRunner

from example_project.bench.measuring import Arrivals, Cost, Meter, at_rate, start_child
from example_project.bench.models import BenchEvent
from example_project.bench.workload import ADDED, CHANGED, PADDING, TABLE
from scriba.sources.eventsourcing import database_env

WARM_UP = 100
CHUNK = 500


class Item(Aggregate):
    class Added(Aggregate.Event):
        stream_id: str
        item: str
        status: str
        amount: Decimal
        quantity: int
        note: str
        position: int

    class Changed(Aggregate.Event):
        item: str
        status: str
        amount: Decimal
        quantity: int
        note: str
        position: int

    class Noted(Aggregate.Event):
        item: str
        status: str
        amount: Decimal
        quantity: int
        note: str
        position: int


class Shelf(Application):
    """Its log holds the same events as the benchmark's table."""


class Rows(PostgresTrackingRecorder, TrackingRecorder):
    def add(self, event: Item.Added, tracking: Tracking) -> None:
        with self.datastore.transaction(commit=True) as cursor:
            self._insert_tracking(cursor, tracking)
            cursor.execute(
                f"INSERT INTO {TABLE} (id, stream_id, status, amount, quantity, note, position)"
                " VALUES (%s, %s, %s, %s, %s, %s, %s)",
                (event.item, event.stream_id, event.status, event.amount, event.quantity, event.note, event.position),
                prepare=True,
            )

    def change(self, event: Item.Changed, tracking: Tracking) -> None:
        with self.datastore.transaction(commit=True) as cursor:
            self._insert_tracking(cursor, tracking)
            cursor.execute(
                f"UPDATE {TABLE} SET status = %s, amount = %s, position = %s WHERE id = %s",
                (event.status, event.amount, event.position, event.item),
                prepare=True,
            )


class ItemRows(Projection[Rows]):
    name = "itemrows"

    @singledispatchmethod
    def process_event(self, domain_event: Any, tracking: Tracking) -> None:
        self.view.insert_tracking(tracking)

    @process_event.register
    def added(self, domain_event: Item.Added, tracking: Tracking) -> None:
        self.view.add(domain_event, tracking)

    @process_event.register
    def changed(self, domain_event: Item.Changed, tracking: Tracking) -> None:
        self.view.change(domain_event, tracking)


def eventsourcing(events: int) -> Cost:
    """Run until the last of `events`; measured from the end of the warm-up on."""
    env = database_env()
    _fill(Shelf(env=env), events)
    with ProjectionRunner(application_class=Shelf, projection_class=ItemRows, view_class=Rows, env=env) as runner:
        runner.wait(WARM_UP, timeout=60)
        started_at = runner.view.max_tracking_id(runner.app_name) or 0
        meter = Meter()
        runner.wait(events, timeout=600)
        return meter.cost(events - started_at)


def tail(rate: int, count: int) -> Cost:
    """Run while another process appends to the application's log, which notifies by itself."""
    env = database_env()
    _fill(Shelf(env=env), 0)
    arrivals = Arrivals(count)

    class NotedRows(Rows):
        def add(self, event: Item.Added, tracking: Tracking) -> None:
            super().add(event, tracking)  # in a transaction that is committed by now
            arrivals.note(event.position)

    append = start_child(_append_at, rate, count)
    with ProjectionRunner(application_class=Shelf, projection_class=ItemRows, view_class=NotedRows, env=env) as runner:
        meter = Meter()
        arrivals.wait(lambda: runner.run_forever(timeout=0.0))
        meter.ended()
        cost = meter.cost(count)
    return arrivals.judged(cost, *append())


def _append_at(rate: int, count: int) -> tuple[dict[int, float], float]:
    shelf = Shelf(env={**database_env(), "CREATE_TABLE": "no"})  # the runner makes them, at this very moment

    def append(number: int) -> int:
        added = Item.Added(
            originator_id=uuid5(NAMESPACE_URL, f"s-{number}"), originator_version=1,
            timestamp=Aggregate.Event.create_timestamp(), stream_id=f"s-{number}", item=f"i-{number:09d}",
            status="open", amount=Decimal("9.99"), quantity=1, note=f"{PADDING} {number}", position=number,
        )  # fmt: skip
        shelf.recorder.insert_events([shelf.mapper.to_stored_event(added)])
        return number

    return at_rate(rate, count, append)


def _fill(shelf: Shelf, events: int) -> None:
    """Write the first `events` of the benchmark's table into the application's log, once for each run."""
    with shelf.factory.datastore.transaction(commit=True) as cursor:  # type: ignore[attr-defined]
        cursor.execute("TRUNCATE shelf_events RESTART IDENTITY")
        cursor.execute("DROP TABLE IF EXISTS itemrows_tracking")
    versions: dict[str, int] = {}
    chunk: list[Any] = []
    for event in BenchEvent.objects.filter(pk__lte=events).order_by("pk").iterator():
        version = versions[event.stream_id] = versions.get(event.stream_id, 0) + 1
        data = {name: value for name, value in event.data.items() if name != "amount"}
        common: dict[str, Any] = {
            "originator_id": uuid5(NAMESPACE_URL, event.stream_id), "originator_version": version,
            "timestamp": Aggregate.Event.create_timestamp(), "amount": Decimal(event.data["amount"]),
            "position": event.pk, **data,
        }  # fmt: skip
        if event.type == ADDED:
            made: Any = Item.Added(stream_id=event.stream_id, **common)
        else:
            made = Item.Changed(**common) if event.type == CHANGED else Item.Noted(**common)
        chunk.append(shelf.mapper.to_stored_event(made))
        if len(chunk) == CHUNK:
            shelf.recorder.insert_events(chunk)
            chunk = []
    if chunk:
        shelf.recorder.insert_events(chunk)
