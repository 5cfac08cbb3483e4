"""Four writers that make life hard for a reader: slow transactions, rollbacks, ids that commit out of order, poison.

A poison event is one that cannot be applied: an amount that is no number, one that fits in no column, or an order that
was placed before (which is only wrong for who keeps orders, not for who keeps customers).
"""

from __future__ import annotations

import multiprocessing
import random
import signal
import threading
import time
import uuid
from collections.abc import Callable
from decimal import Decimal
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from django.db import connection, connections, transaction

from example_project.shop.events import OrderCancelled, OrderEvent, OrderPaid, OrderPlaced, OrderShipped, StockCounted
from example_project.shop.models import StoredEvent

CUSTOMERS = 400
SLOW, ROLLED_BACK = 0.1, 0.05  # shares of the transactions
POISON_EVERY = 2_000


class Written(NamedTuple):
    """What the writers have to say at their end. `error` is empty when all went well."""

    rolled_back: int
    poison: int
    error: str


class Writers:
    """`count` writers that append `events` together, in a process of their own: as writers are, they are none of the
    projections' threads. They begin when they are told to.
    """

    def __init__(self, events: int, count: int) -> None:
        connections.close_all()  # a fork must not share one
        context = multiprocessing.get_context("fork")
        self._begin = context.Event()
        self._appended: Any = context.Value("q", 0)
        self._receiver, sender = context.Pipe(duplex=False)
        arguments = (events, count, self._begin, self._appended, sender)
        self._process = context.Process(target=_write, args=arguments, name="writers", daemon=True)
        self._process.start()
        sender.close()

    def begin(self) -> None:
        self._begin.set()

    @property
    def appended(self) -> int:
        """Events that are committed."""
        return int(self._appended.value)

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()

    def end(self) -> Written:
        """Wait for the last commit."""
        try:
            written: Written = self._receiver.recv()
        except EOFError:
            written = Written(0, 0, "the writers' process ended without a word")
        self._process.join()
        return written


def _write(events: int, count: int, begin: Any, appended: Any, sender: Connection) -> None:
    """What the writers' process does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a person's Ctrl-C is meant for the command, which ends this process

    def on_appended(size: int) -> None:
        with appended.get_lock():
            appended.value += size

    share, rest = divmod(events, count)
    writers = [Writer(number, share + (number < rest), on_appended) for number in range(count)]
    begin.wait()
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    errors = [f"{writer.name} failed: {writer.error}" for writer in writers if writer.error is not None]
    sender.send(
        Written(sum(each.rolled_back for each in writers), sum(each.poison for each in writers), "; ".join(errors))
    )


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
