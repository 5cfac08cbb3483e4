"""A bank as the library's users write one: accounts, money, transfers; two aggregates saved together."""

from __future__ import annotations

from decimal import Decimal
from uuid import UUID

from eventsourcing.application import Application
from eventsourcing.domain import Aggregate, event

__all__ = ["Account", "AccountClosed", "Bank", "InsufficientFunds"]


class AccountClosed(Exception):
    """Nothing may happen on a closed account."""


class InsufficientFunds(Exception):
    """More would be taken than there is."""


class Account(Aggregate):
    class Opened(Aggregate.Created):
        holder: str
        email: str

    class Moved(Aggregate.Event):
        amount: Decimal

    class LimitChanged(Aggregate.Event):
        overdraft: Decimal

    class Closed(Aggregate.Event):
        pass

    @event(Opened)
    def __init__(self, holder: str, email: str) -> None:
        self.holder = holder
        self.email = email
        self.balance = Decimal(0)
        self.overdraft = Decimal(0)
        self.is_closed = False

    def move(self, amount: Decimal) -> None:
        if self.is_closed:
            raise AccountClosed
        if self.balance + amount < -self.overdraft:
            raise InsufficientFunds
        self._move(amount)

    @event(Moved)
    def _move(self, amount: Decimal) -> None:
        self.balance += amount

    @event(LimitChanged)
    def allow_overdraft(self, overdraft: Decimal) -> None:
        self.overdraft = overdraft

    @event(Closed)
    def close(self) -> None:
        self.is_closed = True


class Bank(Application):
    def open(self, holder: str, email: str) -> UUID:
        account = Account(holder, email)
        self.save(account)
        return account.id

    def move(self, account_id: UUID, amount: Decimal) -> int:
        """Book `amount`; return the notification id, which a web request would wait for."""
        account = self.repository.get(account_id)
        account.move(amount)
        return self.save(account)[-1].notification.id

    def transfer(self, debited: UUID, credited: UUID, amount: Decimal) -> int:
        """Both sides in one transaction of the store."""
        giver, taker = self.repository.get(debited), self.repository.get(credited)
        giver.move(-amount)
        taker.move(amount)
        return self.save(giver, taker)[-1].notification.id

    def allow_overdraft(self, account_id: UUID, overdraft: Decimal) -> None:
        account = self.repository.get(account_id)
        account.allow_overdraft(overdraft)
        self.save(account)

    def close_account(self, account_id: UUID) -> None:
        account = self.repository.get(account_id)
        account.close()
        self.save(account)
