"""Does the read model say what the events say? Recomputed the plain way: one event after the other, in memory."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from decimal import Decimal, InvalidOperation
from typing import NamedTuple

import scriba
from example_project.bank.models import AccountBalance, AccountEvent
from example_project.shop.models import CustomerRow, OrderRow, StoredEvent
from scriba.models import DeadLetter

LARGEST = Decimal(10) ** 10  # numeric(12, 2)
AFTER = {"OrderPaid": "paid", "OrderShipped": "shipped", "OrderCancelled": "cancelled"}


class Finding(NamedTuple):
    """One thing that was checked."""

    what: str
    holds: bool
    detail: str


def verify() -> list[Finding]:
    """Recompute every read model from the events and compare, row for row; then check that nothing is unaccounted."""
    shop = Recomputed()
    orders = OrderRow.objects.values_list("customer_id", "amount", "status", "carrier", "placed_at", "id")
    customers = CustomerRow.objects.values_list("last_order_id", "last_amount", "last_order_at", "id")
    return [
        _compare("orders", shop.orders, {row[-1]: row[:-1] for row in orders}),
        _compare("customers", shop.customers, {row[-1]: row[:-1] for row in customers}),
        _compare("balances", _balances(), dict(AccountBalance.objects.values_list("account_id", "balance"))),
        _letters("orders", shop.poison["orders"]),
        _letters("customers", shop.poison["customers"]),
        _letters("balances", set()),
        _conserved("orders", StoredEvent.objects.count()),
        _conserved("customers", StoredEvent.objects.filter(type="OrderPlaced").count()),
        _conserved("balances", AccountEvent.objects.count()),
    ]


class Recomputed:
    """What the shop's read models must be: rows by key, and the positions that cannot be applied."""

    def __init__(self) -> None:
        self.orders: dict[str, tuple[object, ...]] = {}
        self.customers: dict[str, tuple[object, ...]] = {}
        self.poison: dict[str, set[int]] = {"orders": set(), "customers": set()}
        for position, kind, data, at in StoredEvent.objects.order_by("pk").values_list(
            "pk", "type", "data", "occurred_at"
        ):
            if kind == "OrderPlaced":
                self._place(position, data, at)
            elif kind in AFTER and data["order_id"] in self.orders:
                customer, amount, _status, carrier, placed_at = self.orders[data["order_id"]]
                carrier = data.get("carrier", carrier)
                self.orders[data["order_id"]] = (customer, amount, AFTER[kind], carrier, placed_at)

    def _place(self, position: int, data: dict[str, str], at: datetime) -> None:
        if not _is_amount(data["amount"]):
            self.poison["orders"].add(position)
            self.poison["customers"].add(position)
            return
        amount = Decimal(data["amount"])
        self.customers[data["customer_id"]] = (data["order_id"], amount, at)
        if data["order_id"] in self.orders:
            self.poison["orders"].add(position)
        else:
            self.orders[data["order_id"]] = (data["customer_id"], amount, "pending", "", at)


def _is_amount(text: str) -> bool:
    try:
        return Decimal(text) < LARGEST
    except InvalidOperation:
        return False


def _balances() -> dict[str, Decimal]:
    balances: dict[str, Decimal] = {}
    for account, kind, payload in AccountEvent.objects.order_by("pk").values_list(
        "account_id", "event_type", "payload"
    ):
        sign = {"MoneyDeposited": 1, "MoneyWithdrawn": -1}.get(kind, 0)
        balances[account] = balances.get(account, Decimal(0)) + sign * Decimal(payload.get("amount", 0))
    return balances


def _compare(name: str, expected: Mapping[str, object], found: Mapping[str, object]) -> Finding:
    wrong = [key for key in expected.keys() | found.keys() if expected.get(key) != found.get(key)]
    detail = f"{len(found):,} rows" if not wrong else f"{len(wrong):,} rows differ, for example {sorted(wrong)[:3]}"
    return Finding(f"{name}: the read model equals a recomputation from the events", not wrong, detail)


def _letters(name: str, poison: set[int]) -> Finding:
    found = set(
        DeadLetter.objects.filter(projection_name=name, projection_version=1).values_list("position", flat=True)
    )
    detail = (
        f"{len(found)} letters" if found == poison else f"expected {sorted(poison)[:5]}…, found {sorted(found)[:5]}…"
    )
    return Finding(f"{name}: exactly the poison events are dead letters", found == poison, detail)


def _conserved(name: str, delivered: int) -> Finding:
    counters = scriba.info(name).counters
    skipped = counters["skipped"] - counters["deduplicated"]
    settled = counters["applied"] + skipped + counters["dead_lettered"]
    detail = (
        f"{delivered:,} = {counters['applied']:,} applied + {skipped:,} skipped + {counters['dead_lettered']:,} dead-lettered"
        f" (redelivered and skipped again: {counters['deduplicated']:,})"
    )
    return Finding(f"{name}: delivered == applied + skipped + dead-lettered", settled == delivered, detail)
