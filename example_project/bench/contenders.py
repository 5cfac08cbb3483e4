"""The contenders: the same events into the same rows, each as it is honestly written.

Each runs in a process of its own, is warmed up where that helps it, and returns what it cost. The loops and the floor
keep no checkpoint, no dead letters and no fence: all that Scriba does beside is on Scriba's account, its start included.
"""

from __future__ import annotations

import importlib
import json
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from decimal import Decimal
from typing import Any

import psycopg
from django.db import connection, transaction

from example_project.bench.measuring import Cost, Meter, watched_memory
from example_project.bench.models import BenchEvent, BenchRow
from example_project.bench.workload import ADDED, CHANGED, EVENTS, TABLE
from scriba import EventMeta, Insert, RetryPolicy, Skip, Update, projection, start_projection
from scriba.engine.collector import spared_collector
from scriba.signals import batch_stopped
from scriba.sources import TableSource

try:
    import orjson

    load_json: Callable[[Any], Any] = orjson.loads
except ImportError:
    load_json = json.loads

LONGEST_S = 900.0


# --- loops in Django ------------------------------------------------------------------------------------


def naive(events: int) -> Cost:
    """One atomic() per event, get and save."""
    meter = _warm()
    for event in BenchEvent.objects.filter(pk__lte=events).order_by("pk").iterator():
        with transaction.atomic():
            data = event.data
            if event.type == ADDED:
                BenchRow(
                    id=data["item"], stream_id=event.stream_id, status=data["status"], amount=Decimal(data["amount"]),
                    quantity=data["quantity"], note=data["note"], position=event.pk,
                ).save()  # fmt: skip
            elif event.type == CHANGED:
                row = BenchRow.objects.get(pk=data["item"])
                row.status, row.amount, row.position = data["status"], Decimal(data["amount"]), event.pk
                row.save()
    return meter.cost(events)


def lean(events: int) -> Cost:
    """One atomic() per event, and one statement in it."""
    meter = _warm()
    found = BenchEvent.objects.filter(pk__lte=events).order_by("pk").values_list("pk", "stream_id", "type", "data")
    for position, stream, kind, data in found.iterator():
        with transaction.atomic():
            if kind == ADDED:
                BenchRow.objects.create(
                    id=data["item"], stream_id=stream, status=data["status"], amount=Decimal(data["amount"]),
                    quantity=data["quantity"], note=data["note"], position=position,
                )  # fmt: skip
            elif kind == CHANGED:
                BenchRow.objects.filter(pk=data["item"]).update(
                    status=data["status"], amount=Decimal(data["amount"]), position=position
                )
    return meter.cost(events)


def _warm() -> Meter:
    """Connect, and let Django compile and cache what it will."""
    list(BenchRow.objects.filter(pk="none"))
    BenchRow.objects.filter(pk="none").update(status="", amount=Decimal(0), position=0)
    with transaction.atomic():
        row = BenchRow(id="none", stream_id="", status="", amount=Decimal(0), quantity=0, note="", position=0)
        row.save()
        row.delete()
    return Meter()


# --- the floor ------------------------------------------------------------------------------------------

_INSERT = (
    f"INSERT INTO {TABLE} (id, stream_id, status, amount, quantity, note, position) SELECT * FROM unnest"
    "(%s::text[], %s::text[], %s::text[], %s::numeric[], %s::int[], %s::text[], %s::bigint[])"
)
_UPDATE = (
    f"UPDATE {TABLE} AS t SET status = v.status, amount = v.amount, position = v.position"
    " FROM unnest(%s::text[], %s::text[], %s::numeric[], %s::bigint[]) AS v(id, status, amount, position)"
    " WHERE t.id = v.id AND t.id = ANY(%s::text[])"
)


def raw(events: int, batch: int) -> Cost:
    """psycopg on one connection: a page, one insert, one update, a commit. No engine at all."""
    with connection.cursor() as cursor:
        parameters = cursor.connection.info.get_parameters()
        password = cursor.connection.info.password
    with psycopg.connect(**parameters, password=password or None, autocommit=True) as driver:
        meter = Meter()
        for after in range(0, events, batch):
            rows = driver.execute(
                f"SELECT id, stream_id, type, data::text FROM {EVENTS} WHERE id > %s AND id <= %s ORDER BY id",
                (after, min(after + batch, events)),
                binary=True,
            ).fetchall()
            made, changed = _folded(rows)
            with driver.transaction(), driver.pipeline():
                if made:
                    driver.execute(_INSERT, [list(column) for column in zip(*made.values(), strict=True)])
                if changed:
                    columns = [list(column) for column in zip(*changed.values(), strict=True)]
                    driver.execute(_UPDATE, [list(changed), *columns, list(changed)])
        return meter.cost(events)


def _folded(rows: Sequence[Any]) -> tuple[dict[str, list[Any]], dict[str, tuple[Any, ...]]]:
    made: dict[str, list[Any]] = {}
    changed: dict[str, tuple[Any, ...]] = {}
    for position, stream, kind, text in rows:
        if kind == ADDED:
            data = load_json(text)
            item = data["item"]
            made[item] = [
                item, stream, data["status"], data["amount"], data["quantity"], data["note"], position
            ]  # fmt: skip
        elif kind == CHANGED:
            data = load_json(text)
            item = data["item"]
            if item in made:
                row = made[item]
                row[2], row[3], row[6] = data["status"], data["amount"], position
            else:
                changed[item] = (data["status"], data["amount"], position)
    return made, changed


# --- Scriba ---------------------------------------------------------------------------------------------


def declared(data: Any, meta: EventMeta) -> object:
    """The handler: what any user would write."""
    if "poison" in data:
        message = f"no sense can be made of event {meta.position}"
        raise ValueError(message)
    if meta.type == ADDED:
        return Insert(
            BenchRow(
                id=data["item"], stream_id=meta.stream_id, status=data["status"], amount=Decimal(data["amount"]),
                quantity=data["quantity"], note=data["note"], position=meta.position,
            )
        )  # fmt: skip
    if meta.type == CHANGED:
        return Update(
            BenchRow, {"id": data["item"]},
            status=data["status"], amount=Decimal(data["amount"]), position=meta.position,
        )  # fmt: skip
    return Skip()


def reading(data: Any, meta: EventMeta) -> object:
    """The same, but for reading the row that it changes through the ORM."""
    if meta.type == CHANGED:
        BenchRow.objects.get(pk=data["item"])
    return declared(data, meta)


def scriba(
    events: int, lanes: int, handler: Callable[..., Any] = declared, *, samples: bool = False, **options: Any
) -> Cost:
    """Everything on: fence, dedup, cursors, dead letters, signals. Its start is inside the measured time."""
    options = {"retry": RetryPolicy(attempts=1, backoff=())} | options
    made = projection("bench", source=TableSource(BenchEvent), parallelism=lanes, models=[BenchRow], **options)(handler)
    done, batches = threading.Event(), [0]
    total = [0]
    lock = threading.Lock()

    def count(batch_size: int, **_rest: Any) -> None:
        with lock:
            batches[0] += 1
            total[0] += batch_size
            if total[0] == events:
                meter.ended()
                done.set()
            elif batches[0] == 1:
                meter.extra["first_commit_s"] = meter.since()

    batch_stopped.connect(count, weak=False)
    with connection.cursor() as cursor:  # the driver and Django are loaded; the connection is this thread's
        cursor.execute("SELECT 1")
    importlib.import_module("scriba.engine.runner")  # as in a process that runs projections, and so is the collector
    with spared_collector():
        meter = Meter()
        with watched_memory(meter) if samples else nullcontext(), start_projection(made) as handle:
            for _ in range(int(LONGEST_S * 2)):
                if done.wait(0.5) or handle.wait(0):  # raises what it ended with
                    break
            cost = meter.cost(events)
    if total[0] != events:
        message = f"{total[0]} of {events} events were settled"
        raise RuntimeError(message)
    cost.extra["batch"] = events / batches[0]
    return cost
