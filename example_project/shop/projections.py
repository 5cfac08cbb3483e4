"""The shop's read models, each kept by one function."""

from __future__ import annotations

from example_project.shop.events import TYPES, OrderCancelled, OrderPaid, OrderPlaced, OrderShipped
from example_project.shop.models import CustomerRow, OrderRow, StoredEvent
from scriba import Event, EventMeta, Insert, Skip, Update, Upsert, projection
from scriba.sources import TableSource

#: Polled; a writer that wants the last milliseconds calls ``notify_appended`` in its transaction.
EVENTS = TableSource(StoredEvent, types=TYPES, wakeup="notify")


@projection("orders", source=EVENTS, parallelism=4, models=[OrderRow])
def orders(event: object, meta: EventMeta) -> object:
    """One row per order, through its life."""
    match event:
        case OrderPlaced(order_id=order_id, customer_id=customer_id, amount=amount):
            return Insert(
                OrderRow(
                    id=order_id, customer_id=customer_id, amount=amount, status="pending", placed_at=meta.occurred_at
                )
            )
        case OrderPaid(order_id=order_id):
            return Update(OrderRow, {"id": order_id}, status="paid")
        case OrderShipped(order_id=order_id, carrier=carrier):
            return Update(OrderRow, {"id": order_id}, status="shipped", carrier=carrier)
        case OrderCancelled(order_id=order_id):
            return Update(OrderRow, {"id": order_id}, status="cancelled")
    return Skip()


def by_customer(event: Event) -> str:
    """Keep order by customer: a customer's orders are different streams, and the latest one must win."""
    return str(event.data.customer_id)


@projection(
    "customers",
    source=EVENTS,
    parallelism=2,
    partition_by=by_customer,
    event_types=[OrderPlaced],
    models=[CustomerRow],
)
def customers(event: object, meta: EventMeta) -> object:
    """The latest order of each customer."""
    match event:
        case OrderPlaced(order_id=order_id, customer_id=customer_id, amount=amount):
            return Upsert(
                CustomerRow(id=customer_id, last_order_id=order_id, last_amount=amount, last_order_at=meta.occurred_at)
            )
    return Skip()
