"""Balances. The handler gets plain dicts (no ``types=``) and matches on ``meta.type``."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

from django.db.models import F

from example_project.bank.models import AccountBalance, AccountEvent
from scriba import EventMeta, Insert, Skip, Update, projection
from scriba.sources import TableSource

#: The table was there before Scriba: one field's name has to be told, the others are guessed.
EVENTS = TableSource(AccountEvent, stream_id="account_id")


@projection("balances", source=EVENTS, parallelism=2, on_failure="park", models=[AccountBalance])
def balances(event: dict[str, Any], meta: EventMeta) -> object:
    """One row per account. A stream is one account, so ``F()`` is only for show: nobody else writes its row."""
    account = {"account_id": meta.stream_id}
    match meta.type:
        case "AccountOpened":
            return Insert(AccountBalance(account_id=meta.stream_id, owner=event["owner"]))
        case "MoneyDeposited":
            return Update(AccountBalance, account, balance=F("balance") + Decimal(event["amount"]))
        case "MoneyWithdrawn":
            return Update(AccountBalance, account, balance=F("balance") - Decimal(event["amount"]))
        case "AccountClosed":
            return Update(AccountBalance, account, is_open=False)
    return Skip()
