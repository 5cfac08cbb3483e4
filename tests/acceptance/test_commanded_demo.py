"""``manage.py demo --commanded``: real events of Commanded become a read model, and the proof can fail."""

from __future__ import annotations

import pytest

from tests.acceptance.conftest import Shop


@pytest.mark.case("A11")
def test_the_store_is_projected_verified_and_shown_each_time(shop: Shop) -> None:
    """Twelve accounts, each equal to a recomputation in SQL; a second run finds nothing to do and verifies again."""
    first = shop.manage("demo", "--commanded")
    second = shop.manage("demo", "--commanded")

    for said in (first, second):
        assert "events up to number 185" in said
        assert "verified. 12 accounts equal a recomputation in SQL" in " ".join(said.split())
        for account, balance in (("1", "-318.00"), ("8", "510.50"), ("12", "671.50")):
            line = next(line for line in said.splitlines() if f" Owner {account} " in line)
            assert line.count(balance) == 2
    assert shop.count("SELECT sum(movements) FROM elixir_bank_account") == shop.count(
        "SELECT count(*) FROM eventstore.events JOIN eventstore.stream_events USING (event_id) "
        "JOIN eventstore.streams ON streams.stream_id = original_stream_id "
        "WHERE event_type = 'Elixir.Peer.MoneyMoved' AND stream_events.stream_id = 0 AND starts_with(stream_uuid, 'account-')"
    )


def test_a_wrong_row_is_found(shop: Shop) -> None:
    """The verification compares: a row that somebody changed fails it, by name."""
    shop.manage("demo", "--commanded")
    shop.execute("UPDATE elixir_bank_account SET balance = 1 WHERE account_id = '7'")

    said = shop.manage("demo", "--commanded", succeed=False)

    assert "the read model is not what the events say: 7" in said
