"""Four writers that make life hard for a reader: slow transactions, rollbacks, ids that commit out of order, poison.

A poison event is one that cannot be applied: an amount that is no number, one that fits in no column, or an order that
was placed before (which is only wrong for who keeps orders, not for who keeps customers).
"""

from __future__ import annotations

import random
import threading
import time
import uuid
from collections.abc import Callable
from decimal import Decimal

from django.db import connection, transaction

from example_project.shop.events import OrderCancelled, OrderEvent, OrderPaid, OrderPlaced, OrderShipped, StockCounted
from example_project.shop.models import StoredEvent

CUSTOMERS = 400
SLOW, ROLLED_BACK = 0.1, 0.05  # shares of the transactions
POISON_EVERY = 2_000


class _RolledBackOnPurpose(Exception):
    """What makes a transaction end without a trace, except for the ids that it has drawn."""


class Writer(threading.Thread):
    """Appends `count` events in transactions of a few; every so often one is slow, and one is rolled back."""

    def __init__(self, number: int, count: int, on_appended: Callable[[int], None]) -> None:
        super().__init__(name=f"writer-{number}", daemon=True)
        self.poison = 0
        self.rolled_back = 0
        self.error: BaseException | None = None
        self._count = count
        self._on_appended = on_appended
        self._random = random.Random(number)
        self._open: list[str] = []
        self._until_poison = self._random.randint(1, max(1, min(POISON_EVERY, count // 4)))  # a short run has some, too

    def run(self) -> None:
        try:
            left = self._count
            while left > 0:
                size = min(left, self._random.randint(10, 60))
                if self._append(size):
                    left -= size
                    self._on_appended(size)
        except BaseException as error:  # noqa: BLE001 - the command reports it
            self.error = error
        finally:
            connection.close()

    def _append(self, size: int) -> bool:
        """Append `size` events in one transaction; False when it was rolled back, as if it had never been."""
        before = (list(self._open), self.poison, self._until_poison)
        try:
            with transaction.atomic():
                StoredEvent.objects.bulk_create([self._next() for _ in range(size)])
                self._dawdle()
        except _RolledBackOnPurpose:
            self._open, self.poison, self._until_poison = before
            self.rolled_back += 1
            return False
        return True

    def _dawdle(self) -> None:
        """Commit late, or not at all: the ids are drawn, and others overtake."""
        fate = self._random.random()
        if fate < SLOW:
            time.sleep(self._random.uniform(0.005, 0.06))
        elif fate > 1 - ROLLED_BACK:
            raise _RolledBackOnPurpose

    def _next(self) -> StoredEvent:
        order_id, event = self._happening()
        row = StoredEvent.of(order_id, event, correlation_id=str(uuid.UUID(int=self._random.getrandbits(128))))
        if isinstance(event, OrderPlaced):
            self._until_poison -= 1
            if self._until_poison <= 0:
                self._until_poison = POISON_EVERY // 4
                self._spoil(row)
                self.poison += 1
        return row

    def _happening(self) -> tuple[str, OrderEvent]:
        choice = self._random.random()
        if choice < 0.42 or not self._open:
            order_id = f"o-{uuid.uuid4().hex[:12]}"
            self._open.append(order_id)
            customer = f"c-{self._random.randrange(CUSTOMERS)}"
            return order_id, OrderPlaced(order_id, customer, Decimal(self._random.randint(100, 90_000)) / 100)
        if choice < 0.5:
            return "stock", StockCounted(f"sku-{self._random.randrange(50)}", self._random.randrange(100))
        order_id = self._random.choice(self._open[-200:])
        if choice < 0.7:
            return order_id, OrderPaid(order_id, self._random.choice(["card", "invoice"]))
        if choice < 0.95:
            return order_id, OrderShipped(order_id, self._random.choice(["post", "bike", "drone"]))
        return order_id, OrderCancelled(order_id, "changed my mind")

    def _spoil(self, row: StoredEvent) -> None:
        kind = self._random.choice(["no number", "too large", "placed before"])
        if kind == "placed before":
            row.stream_id = row.data["order_id"] = self._open[0]
        else:
            row.data["amount"] = "twelve" if kind == "no number" else "123456789012.34"
