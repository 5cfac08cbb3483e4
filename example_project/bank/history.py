"""What happened at the bank: a few accounts and their movements, appended for the demo."""

from __future__ import annotations

from example_project.bank.models import AccountEvent

__all__ = ["open_accounts"]

OWNERS = ("alma", "bruno", "carla")
MOVEMENTS = 50


def open_accounts() -> int:
    """Open the accounts that are not there yet, and move money; return how many events were appended."""
    known = set(AccountEvent.objects.filter(event_type="AccountOpened").values_list("account_id", flat=True))
    opened = [
        AccountEvent(account_id=name, event_type="AccountOpened", payload={"owner": name.title()})
        for name in OWNERS
        if name not in known
    ]
    moved = [_movement(number) for number in range(MOVEMENTS)]
    return len(AccountEvent.objects.bulk_create([*opened, *moved]))


def _movement(number: int) -> AccountEvent:
    kind = "MoneyWithdrawn" if number % 5 == 4 else "MoneyDeposited"
    return AccountEvent(account_id=OWNERS[number % 3], event_type=kind, payload={"amount": f"{10 + number}.50"})
