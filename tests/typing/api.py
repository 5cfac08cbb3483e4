"""User code that type checkers read: ``mypy --strict`` must accept it, and nothing runs it.

Each name of the public API is used as its reference page shows it. `assert_type` pins what users see.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, assert_type

from django.db.models import F, Model, Q, QuerySet

from scriba import (
    SERIAL,
    BulkResult,
    ConfigurationError,
    Delete,
    Done,
    Event,
    EventDeadLettered,
    EventMeta,
    Fail,
    Info,
    Insert,
    InvalidState,
    OrmTarget,
    PermanentFailure,
    ProjectionHalted,
    RetryAfter,
    RetryPolicy,
    ScribaError,
    Skip,
    SourceError,
    UnknownProjection,
    Update,
    Upsert,
    WaitTimeout,
    dead_letters,
    discard,
    discard_all,
    forget,
    info,
    list_projections,
    pause,
    projection,
    purge_resolved,
    replay,
    replay_all,
    reset,
    resume,
    start,
    start_projection,
    stop,
    wait_for,
)
from scriba.models import DeadLetter
from scriba.protocols import Status
from scriba.results import Result
from scriba.sources import TableSource


class Placed:
    order_id: int


class StoredEvent(Model):
    class Meta:
        app_label = "typing"


class OrderRow(Model):
    class Meta:
        app_label = "typing"


# --- a function, and a class -------------------------------------------------------------------------------------


@projection(
    "orders",
    version=2,
    source=TableSource(StoredEvent, types=[Placed]),
    target=OrmTarget(using="default"),
    parallelism=4,
    partition_by=lambda event: event.stream_id,
    event_types=[Placed, "Shipped"],
    retry=RetryPolicy(attempts=2, backoff=[0.5]),
    on_failure="park",
    models=[OrderRow],
    batch_size=100,
    lag_interval=0,
)
def orders(event: object, meta: EventMeta) -> Result:
    if meta.replaying:
        return Skip()
    match event:
        case Placed(order_id=order_id):
            return [Insert(OrderRow(pk=order_id)), Update(OrderRow, {"pk": order_id}, count=F("count") + 1)]
        case str():
            return Upsert(OrderRow(), unique_fields=["id"], update_fields=["status"])
        case int():
            return Delete(OrderRow, Q(pk=1))
        case float():
            return Done()
    if meta.stream_version is None:
        raise RetryAfter(5.0)
    if meta.occurred_at is None:
        raise PermanentFailure("no time")
    return Fail("unknown")


@projection("everything", source=TableSource(StoredEvent), parallelism=1, partition_by=SERIAL, retry=False)
class Everything:
    def handle(self, event: dict[str, Any], meta: EventMeta) -> Result:
        del meta
        return Update.all(OrderRow, seen=True) if event else Delete.all(OrderRow)


# The decorated function keeps its type: calling it in a unit test is checked.
assert_type(orders(Placed(), EventMeta("", "", 1, "", {}, None)), Result)


# --- from anywhere -----------------------------------------------------------------------------------------------


def operate() -> None:
    pause(orders, by="me", reason="deploy", wait=True, timeout=5)
    resume("orders")
    stop(("orders", 2))
    start(Everything)
    forget("orders_of_old", by="me")
    forget(("orders", 1), "archive")
    reset(orders, dead_letters=True, truncate=[OrderRow], by="me")

    seen = info(orders)
    assert_type(seen, Info)
    assert_type(seen.lag_events, int | None)
    assert_type(seen.watermark, int | None)
    for name, version, status in list_projections():
        assert_type(name, str)
        assert_type(version, int)
        assert_type(status, Status)

    letters = dead_letters(orders, status="open")
    assert_type(letters, QuerySet[DeadLetter, DeadLetter])
    for letter in letters:
        replay(letter, allow_out_of_order=True)
        discard(letter, by="me")
    result = replay_all(letters, by="me", on_progress=lambda so_far: print(len(so_far.wished)))
    assert_type(result, BulkResult)
    assert_type(result.refused, list[int])
    discard_all(letters.filter(pk__in=result.refused), by="me")
    assert_type(purge_resolved(letters, older_than=timedelta(days=90)), int)

    assert_type(wait_for(orders, position=7, timeout=1.0), int)
    with start_projection(orders, parallelism=32) as handle:
        assert_type(handle.wait(timeout=10), bool)


def key(event: Event) -> str:
    return f"{event.stream_id}/{event.data}"


def react(error: ScribaError) -> str:
    match error:
        case InvalidState(state=state):
            return state
        case WaitTimeout(position=position, reached=reached):
            return f"{position} {reached}"
        case EventDeadLettered(letter_id=letter_id):
            return str(letter_id)
        case ConfigurationError() | UnknownProjection() | ProjectionHalted() | SourceError():
            return "no"
    return ""
