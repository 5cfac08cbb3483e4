"""What happens in the shop: plain dataclasses, and one function that appends them."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal


@dataclass(frozen=True)
class OrderPlaced:
    order_id: str
    customer_id: str
    amount: Decimal


@dataclass(frozen=True)
class OrderPaid:
    order_id: str
    method: str


@dataclass(frozen=True)
class OrderShipped:
    order_id: str
    carrier: str


@dataclass(frozen=True)
class OrderCancelled:
    order_id: str
    reason: str


@dataclass(frozen=True)
class StockCounted:
    """Not about an order: no projection here cares, so their handlers skip it."""

    sku: str
    quantity: int


OrderEvent = OrderPlaced | OrderPaid | OrderShipped | OrderCancelled | StockCounted
TYPES = [OrderPlaced, OrderPaid, OrderShipped, OrderCancelled, StockCounted]


def payload(event: OrderEvent) -> dict[str, str | int]:
    """Return the JSON form of an event."""
    return {name: str(value) if isinstance(value, Decimal) else value for name, value in vars(event).items()}
