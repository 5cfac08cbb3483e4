"""``kill -9`` in the middle of the demo: whoever goes on ends in the exact read model."""

from __future__ import annotations

import pytest

from tests.acceptance.conftest import Shop
from tests.support.waiting import wait_until


@pytest.mark.case("A8")
def test_killed_and_started_again_it_ends_in_the_exact_read_model(shop: Shop) -> None:
    """Three times the process dies while writers append; the last one drains, and every row is right."""
    with shop.managed("demo", "--append-only", "--events", "6000") as appending:
        for goal in (300, 1500, 3500):
            with shop.managed("run_projections") as running:
                shop.wait_settled("orders", goal)
                running.kill()
        assert appending.wait(60) == 0
    shop.manage("run_projections", "--until-caught-up")

    assert "verified." in shop.manage("demo", "--verify-only")
    assert shop.settled("orders") >= 6000


@pytest.mark.case("A5")
def test_a_standby_takes_over_from_a_killed_owner(shop: Shop) -> None:
    """The demo's own projections stand by while another process owns them, and go on when it is killed."""
    with shop.managed("run_projections") as owner:
        owned = "SELECT count(*) FROM scriba_segments WHERE owner LIKE %s AND status = 'running' AND projection_name <> 'accounts'"
        wait_until(
            lambda: shop.count(owned, f"%:{owner.pid}:%") == 3, timeout=60, what="an owner of all three projections"
        )
        with shop.managed("demo", "--events", "4000", "--no-latency") as demo:
            shop.wait_settled("orders", 500)
            owner.kill()
            said = demo.communicate(timeout=120)[0]

    assert demo.returncode == 0, said
    assert "verified." in said
