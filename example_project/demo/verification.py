"""Does the read model say what the events say? Recomputed the plain way: one event after the other, in memory."""

from __future__ import annotations

from decimal import Decimal, InvalidOperation
from typing import NamedTuple

import scriba
from example_project.bank.models import AccountBalance, AccountEvent
from example_project.shop.models import CustomerRow, OrderRow, StoredEvent
from scriba.models import DeadLetter

LARGEST = Decimal(10) ** 10


class Finding(NamedTuple):
    """One thing that was checked."""

    what: str
    holds: bool
    detail: str


def verify() -> list[Finding]:
    """Recompute every read model from the events and compare, row for row; then check that nothing is unaccounted."""
    orders, customers, poison = _recompute()
    found_orders = dict(OrderRow.objects.values_list("id", "status"))
    found_customers = dict(CustomerRow.objects.values_list("id", "last_order_id"))
    return [
        _compare("orders", orders, found_orders),
        _compare("customers", customers, found_customers),
        _compare("balances", _balances(), dict(AccountBalance.objects.values_list("account_id", "balance"))),
        _letters("orders", poison),
        _letters("customers", poison),
        _conserved("orders", StoredEvent.objects.count()),
        _conserved("customers", StoredEvent.objects.filter(type="OrderPlaced").count()),
        _conserved("balances", AccountEvent.objects.count()),
    ]


def _recompute() -> tuple[dict[str, str], dict[str, str], set[int]]:
    orders: dict[str, str] = {}
    customers: dict[str, str] = {}
    poison: set[int] = set()
    after = {"OrderPaid": "paid", "OrderShipped": "shipped", "OrderCancelled": "cancelled"}
    for position, kind, data in StoredEvent.objects.order_by("pk").values_list("pk", "type", "data"):
        if kind == "OrderPlaced":
            if not _is_amount(data["amount"]):
                poison.add(position)
                continue
            orders[data["order_id"]] = "pending"
            customers[data["customer_id"]] = data["order_id"]
        elif kind in after and data["order_id"] in orders:
            orders[data["order_id"]] = after[kind]
    return orders, customers, poison


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


def _compare(name: str, expected: dict[str, object], found: dict[str, object]) -> Finding:
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
