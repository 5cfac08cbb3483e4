"""``manage.py demo --commanded``: events that the real Commanded wrote, a projection over them, and the proof."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from django.core.management import call_command
from django.core.management.base import CommandError
from django.db import connection
from rich.table import Table

from example_project.elixir_bank.models import Account

if TYPE_CHECKING:
    from rich.console import Console

STORE = Path(__file__).parent / "store"
#: Straight from the rows of the store, by the database alone: neither Scriba nor any decoder of ours takes part.
RECOMPUTED = """
    SELECT payload ->> 'account_id',
           coalesce(sum((payload ->> 'amount')::numeric) FILTER (WHERE event_type = 'Elixir.Peer.MoneyMoved'), 0),
           count(*) FILTER (WHERE event_type = 'Elixir.Peer.MoneyMoved'),
           (array_agg((payload ->> 'balance')::numeric ORDER BY link.stream_version DESC)
               FILTER (WHERE event_type = 'Elixir.Peer.MoneyMoved'))[1]
      FROM eventstore.stream_events AS link
      JOIN eventstore.events USING (event_id)
      JOIN eventstore.streams ON streams.stream_id = link.original_stream_id,
           LATERAL (SELECT convert_from(data, 'UTF8')::jsonb AS payload) AS decoded
     WHERE link.stream_id = 0 AND stream_uuid LIKE 'account-%'
     GROUP BY 1
"""


class Expected(NamedTuple):
    """What the events say of one account: their sum, their number, and the balance that Elixir itself wrote last."""

    total: Decimal
    movements: int
    last_balance: Decimal | None


def run(console: Console) -> None:
    """Fill the store if it is empty, run the projection to its end, verify, and print the table."""
    head = load()
    console.print(f"a Commanded event store in the schema 'eventstore': events up to number {head}")
    call_command("run_projections", "accounts", until_caught_up=True)  # not wait_for: that is about one event
    expected = recomputed()
    console.print(table(expected))
    wrong = differences(expected)
    if wrong:
        message = f"the read model is not what the events say: {', '.join(wrong)}"
        raise CommandError(message)
    console.print(
        f"[bold green]verified.[/bold green] {len(expected)} accounts equal a recomputation in SQL, and the balances that "
        "the Elixir application wrote into its own events"
    )


def load() -> int:
    """Write the rows, unless there are some; return the highest readable number."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM eventstore.events")
        if cursor.fetchone() == (0,):
            cursor.execute((STORE / "events.sql").read_text().replace("%", "%%"), [])
        cursor.execute("SELECT max(stream_version) FROM eventstore.stream_events WHERE stream_id = 0")
        return int(cursor.fetchone()[0])


def recomputed() -> dict[str, Expected]:
    with connection.cursor() as cursor:
        cursor.execute(RECOMPUTED.replace("%", "%%"), [])
        return {account: Expected(*rest) for account, *rest in cursor.fetchall()}


def differences(expected: dict[str, Expected]) -> list[str]:
    """Return the accounts whose row is not what the events say, missing and superfluous ones included."""
    found = {row.account_id: Expected(row.balance, row.movements, row.balance) for row in Account.objects.all()}
    return sorted(
        account for account in expected.keys() | found.keys() if not _agree(expected.get(account), found.get(account))
    )


def _agree(expected: Expected | None, found: Expected | None) -> bool:
    if expected is None or found is None:
        return False
    return expected == found or (expected.last_balance is None and expected[:2] == found[:2])


def table(expected: dict[str, Expected]) -> Table:
    shown = Table("account", "owner", "movements", "balance", "the events say", "overdrafts", "open", title="accounts")
    for row in sorted(Account.objects.all(), key=lambda row: int(row.account_id)):
        says = expected.get(row.account_id)
        total = "—" if says is None else f"{says.total:.2f}"
        shown.add_row(
            row.account_id,
            row.owner,
            str(row.movements),
            f"{row.balance:.2f}",
            total,
            str(row.overdrafts),
            "yes" if row.is_open else "no",
        )
    return shown
