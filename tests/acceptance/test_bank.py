"""The bank: balances from movements, and an account that waits behind an event that cannot be applied."""

from __future__ import annotations

from decimal import Decimal

from tests.acceptance.conftest import Shop


def append(shop: Shop, account: str, kind: str, **payload: str) -> None:
    shop.execute(
        "INSERT INTO bank_accountevent (account_id, event_type, payload, created_at) VALUES (%s, %s, %s::jsonb, now())",
        account, kind, "{" + ", ".join(f'"{name}": "{value}"' for name, value in payload.items()) + "}",
    )  # fmt: skip


def balances(shop: Shop) -> dict[str, Decimal]:
    return dict(shop.execute("SELECT account_id, balance FROM bank_accountbalance"))


def project(shop: Shop) -> None:
    shop.manage("run_projections", "balances", "--until-caught-up")


def test_balances_follow_movements(shop: Shop) -> None:
    """Deposits add, withdrawals subtract, each once, also when they come in several runs."""
    append(shop, "alma", "AccountOpened", owner="Alma")
    append(shop, "alma", "MoneyDeposited", amount="100.00")
    project(shop)
    append(shop, "alma", "MoneyWithdrawn", amount="30.50")
    append(shop, "bruno", "AccountOpened", owner="Bruno")
    append(shop, "alma", "AccountClosed")
    project(shop)
    project(shop)

    assert balances(shop) == {"alma": Decimal("69.50"), "bruno": Decimal("0.00")}
    assert shop.execute("SELECT is_open FROM bank_accountbalance WHERE account_id = 'alma'") == [(False,)]


def test_a_broken_movement_parks_its_account_only(shop: Shop) -> None:
    """What cannot be applied stops its account and no other; discarded, it lets the rest of the account follow, in order."""
    for account in ("alma", "bruno"):
        append(shop, account, "AccountOpened", owner=account)
        append(shop, account, "MoneyDeposited", amount="10.00")
    append(shop, "alma", "MoneyDeposited", amount="a lot")
    append(shop, "alma", "MoneyDeposited", amount="5.00")
    append(shop, "bruno", "MoneyDeposited", amount="7.00")
    project(shop)

    assert balances(shop) == {"alma": Decimal("10.00"), "bruno": Decimal("17.00")}
    assert dict(shop.execute("SELECT status, count(*) FROM scriba_dead_letters GROUP BY 1")) == {"open": 1, "parked": 1}

    shop.manage("scriba_dead_letters", "discard", "--projection", "balances", "--kind", "decimal*", "--no-input")
    project(shop)

    assert balances(shop) == {"alma": Decimal("15.00"), "bruno": Decimal("17.00")}
