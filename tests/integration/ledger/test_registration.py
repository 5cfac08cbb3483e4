"""What is recorded at a first start may not change under the same version."""

from __future__ import annotations

import threading

import pytest

from scriba.exceptions import ConfigurationError, ScribaError
from scriba.protocols import Recorded, Wish
from tests.integration.ledger.support import LEASE_S, RECORDED, SOON_S, Desk


@pytest.mark.case("A21")
@pytest.mark.parametrize(
    ("changed", "says"),
    [
        (
            RECORDED._replace(partition_by="shop.by_customer"),
            "partition_by was 'stream_id' and is now 'shop.by_customer'",
        ),
        (RECORDED._replace(source="other"), "source was 'events' and is now 'other'"),
        (RECORDED._replace(hash_name="siphash"), "hash_name was 'crc' and is now 'siphash'"),
    ],
)
def test_a_start_with_other_recorded_options_is_refused(desk: Desk, changed: Recorded, says: str) -> None:
    """Cursors are kept by the recorded key of the recorded source: going on would lose or repeat events."""
    ledger = desk.ledger()

    with pytest.raises(ConfigurationError) as refused:
        ledger.register(changed)

    assert says in str(refused.value)
    assert "version=2" in str(refused.value)
    assert "scriba_reset" in str(refused.value)
    ledger.register(RECORDED)


def test_registering_again_changes_nothing(desk: Desk) -> None:
    """A standby registers several times a second: rows that are there are only read."""
    desk.ledger().register(RECORDED)
    written = "SELECT xmin::text FROM scriba_projections WHERE projection_name = %s"
    before = desk.rows.rows(written, [desk.identity.name]), desk.segment("xmin::text")

    desk.ledger().register(RECORDED)

    assert (desk.rows.rows(written, [desk.identity.name]), desk.segment("xmin::text")) == before


def test_a_row_that_only_holds_a_wish_is_completed_by_the_first_start(desk: Desk) -> None:
    """An operator may pause what has never run; the wish survives the first start."""
    ledger = desk.ledger(registered=False)
    ledger.set_wish(Wish.PAUSED)

    ledger.register(RECORDED)

    assert ledger.orders().wish is Wish.PAUSED
    with pytest.raises(ConfigurationError):
        ledger.register(RECORDED._replace(source="other"))


@pytest.mark.case("A13")
def test_processes_that_register_at_the_same_moment_agree_on_one_row(desk: Desk) -> None:
    """Of two first starts with different options one is refused, whoever was faster."""
    barrier = threading.Barrier(4)
    refused: list[Exception] = []

    def register(recorded: Recorded) -> None:
        ledger = desk.ledger(registered=False)
        barrier.wait(SOON_S)
        try:
            ledger.register(recorded)
        except ConfigurationError as error:
            refused.append(error)

    options = [RECORDED, RECORDED, RECORDED._replace(source="b"), RECORDED._replace(source="b")]
    threads = [threading.Thread(target=register, args=(recorded,)) for recorded in options]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON_S)

    assert len(refused) == 2
    for table in ("scriba_projections", "scriba_segments"):
        sql = f"SELECT count(*) FROM {table} WHERE projection_name = %s"
        assert desk.rows.rows(sql, [desk.identity.name]) == [(1,)]


def test_a_segment_that_vanished_is_an_error_with_a_name(desk: Desk) -> None:
    """Deleted rows are no reason to believe that the segment is free."""
    ledger = desk.ledger(registered=False)

    with pytest.raises(ScribaError, match="no row in scriba_segments"):
        ledger.acquire("me", LEASE_S)
