"""Accounts, from a Commanded event store. ``manage.py demo --commanded`` fills the store and runs this."""

from __future__ import annotations

from django.db.models import F

from example_project.elixir_bank.events import AccountClosed, AccountOpened, BalanceWentNegative, MoneyMoved
from example_project.elixir_bank.models import Account
from scriba import EventMeta, Insert, Skip, Update, projection
from scriba.sources.commanded import CommandedSource

#: Usually a database of its own (``using="events"``); here a schema beside the read models. A class stands for the
#: type of its name, ``Elixir.Peer.`` in front or not.
STORE = CommandedSource(
    using="default",
    schema="eventstore",
    stream_prefix="account-",
    types=[AccountOpened, MoneyMoved, BalanceWentNegative, AccountClosed],
)


@projection("accounts", source=STORE, parallelism=2, models=[Account])
def accounts(event: object, meta: EventMeta) -> object:  # noqa: ARG001 - a handler takes both
    """One row per account; a stream is one account, so ``F()`` meets no other lane."""
    match event:
        case AccountOpened(account_id=account_id, owner=owner):
            return Insert(Account(account_id=account_id, owner=owner.name))
        case MoneyMoved(account_id=account_id, amount=amount):
            moved = {"balance": F("balance") + amount, "movements": F("movements") + 1}
            return Update(Account, {"account_id": account_id}, **moved)
        case BalanceWentNegative(account_id=account_id):
            return Update(Account, {"account_id": account_id}, overdrafts=F("overdrafts") + 1)
        case AccountClosed(account_id=account_id):
            return Update(Account, {"account_id": account_id}, is_open=False)
    return Skip()
