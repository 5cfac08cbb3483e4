"""What the Elixir application wrote, as far as this read model is concerned: other fields are ignored."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal


@dataclass(frozen=True)
class Owner:
    name: str
    vip: bool


@dataclass(frozen=True)
class AccountOpened:
    account_id: str
    owner: Owner


@dataclass(frozen=True)
class MoneyMoved:
    account_id: str
    amount: Decimal


@dataclass(frozen=True)
class BalanceWentNegative:
    account_id: str


@dataclass(frozen=True)
class AccountClosed:
    account_id: str
    reason: str
