"""What a projection is said to be, from any process, whether its owner lives or not."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import scriba
from scriba.models import DeadLetter, Position
from scriba.protocols import Status, Wish
from scriba.registry import forget
from scriba.results import Skip
from scriba.testing import MemorySource
from tests.integration.control.conftest import Owner
from tests.support.world import World


def test_a_projection_that_never_ran_is_not_running_and_knows_nothing(world: World) -> None:
    """No row is needed to ask."""
    info = scriba.info(world.projection())

    assert (info.name, info.version) == world.identity
    assert (info.status, info.wish, info.owner) == (Status.NOT_RUNNING, Wish.RUNNING, "")
    assert (info.watermark, info.safe_position, info.head, info.lag, info.lag_events) == (None,) * 5
    assert info.counters == {"applied": 0, "skipped": 0, "dead_lettered": 0, "deduplicated": 0, "unmatched": 0}
    assert info.dead_letters == {"open": 0, "parked": 0, "replayed": 0, "discarded": 0}
    assert (dict(info.stream_positions), info.stream_positions_cut) == ({}, False)
    assert info.halt_reason is None
    assert (info.source, info.target) == (world.projection().source.identity(), "orm:default")


def test_what_a_live_owner_reports_is_shown(world: World, owner: Owner) -> None:
    """Status, owner, rate, reason, watermark, head and lag are the owner's last words."""
    a_minute_ago = datetime.now(UTC) - timedelta(seconds=60)
    owner.shows(Status.RUNNING, 90, watermark_at=a_minute_ago, head=100, rate=12.5, reason="waiting for backend 7")

    info = scriba.info(world.projection())

    assert (info.status, info.owner, info.rate) == (Status.RUNNING, "owner", 12.5)
    assert info.reason == "waiting for backend 7"
    assert (info.watermark, info.safe_position, info.head, info.lag_events) == (90, 90, 100, 10)
    assert info.lag_seconds is not None
    assert 60 <= info.lag_seconds < 90
    assert info.lag == timedelta(seconds=info.lag_seconds)


def test_who_is_caught_up_has_no_lag(world: World, owner: Owner) -> None:
    """The last event may be days old: nothing is unsettled, so nothing lags."""
    owner.shows(Status.RUNNING, 100, watermark_at=datetime(2020, 1, 1, tzinfo=UTC), head=100)

    info = scriba.info(world.projection())

    assert (info.lag_events, info.lag_seconds, info.lag) == (0, 0.0, timedelta(0))


@pytest.mark.parametrize("wish", ["running", "paused", "stopped"])
def test_a_projection_that_no_live_process_owns_is_not_running_whatever_was_wished(
    world: World, owner: Owner, wish: str
) -> None:
    """A row that says *running* proves nothing once its lease has run out."""
    owner.shows(Status.RUNNING, 90, head=100, rate=12.5, reason="busy")
    world.execute("UPDATE scriba_projections SET wish = %s", wish)
    owner.falls_silent()

    info = scriba.info(world.projection())

    assert (info.status, info.owner, info.rate, info.reason) == (Status.NOT_RUNNING, "", 0.0, "")
    assert (info.watermark, info.head) == (90, 100)


@pytest.mark.case("D3")
def test_a_halt_is_shown_with_its_cause_whoever_owns_it(world: World, owner: Owner) -> None:
    """A halt survives the process that met it."""
    owner.halts("no column 'total'", "commit:42703")
    owner.falls_silent()

    info = scriba.info(world.projection())

    assert (info.status, info.halt_reason, info.halt_label) == (Status.HALTED, "no column 'total'", "commit:42703")


def test_who_wished_it_and_why_is_shown(world: World, owner: Owner) -> None:
    """An operator who finds a paused projection wants to know whom to ask."""
    owner.shows(Status.PAUSED)
    scriba.pause(world.projection(), by="ann", reason="deploy 4711")

    info = scriba.info(world.projection())

    assert (info.wish, info.wish_by, info.wish_reason) == (Wish.PAUSED, "ann", "deploy 4711")


def test_an_imported_cursor_is_safe_where_it_is_higher(world: World, owner: Owner) -> None:
    """Everything at or below the floor was settled elsewhere."""
    owner.shows(Status.RUNNING, 10)
    world.execute("UPDATE scriba_projections SET floor = 400")

    assert scriba.info(world.projection()).safe_position == 400
    assert scriba.info(world.projection()).watermark == 10


def test_counters_are_summed_over_lanes_and_letters_counted_by_status(world: World, owner: Owner) -> None:
    """The numbers of this projection only."""
    owner.ledger.open_lanes(owner.lease, 2)
    world.execute(
        "UPDATE scriba_lanes SET applied = 5, skipped = 2, dead_lettered = 1, deduplicated = 1, unmatched = 3"
    )
    for position, status in enumerate(("open", "open", "parked", "discarded")):
        for version in (1, 2):
            DeadLetter.objects.create(
                projection_name=world.name, projection_version=version, position=position, status=status
            )

    info = scriba.info(world.projection())

    assert info.counters == {"applied": 10, "skipped": 4, "dead_lettered": 2, "deduplicated": 2, "unmatched": 6}
    assert info.dead_letters == {"open": 2, "parked": 1, "replayed": 0, "discarded": 1}


def test_stream_positions_are_cut_at_a_thousand(world: World, owner: Owner) -> None:
    """There may be ten million; the first thousand are listed, and it says that there are more."""

    def seed(first: int, last: int) -> None:
        Position.objects.bulk_create(
            Position(projection_name=world.name, projection_version=1, stream_id=f"s{number:05}", position=number)
            for number in range(first, last)
        )

    seed(0, 1_000)
    exactly = scriba.info(world.projection())
    seed(1_000, 1_001)
    one_more = scriba.info(world.projection())

    assert (len(exactly.stream_positions), exactly.stream_positions_cut) == (1_000, False)
    assert exactly.stream_positions["s00999"] == 999
    assert (len(one_more.stream_positions), one_more.stream_positions_cut) == (1_000, True)


def test_an_info_cannot_be_changed(world: World) -> None:
    """It is what was, not a handle."""
    with pytest.raises(FrozenInstanceError):
        scriba.info(world.projection()).status = Status.RUNNING  # type: ignore[misc]


def test_every_registered_projection_is_listed_with_its_status(world: World, owner: Owner) -> None:
    """(name, version, status), the stopped ones too, sorted."""
    owner.shows(Status.PAUSED)

    def declare(version: int) -> Any:
        @scriba.projection(world.name, source=MemorySource(), parallelism=1, version=version)
        def handler(event: Any, meta: Any) -> Any:
            return Skip()

        return handler

    handlers = [declare(2), declare(1)]
    try:
        listed = scriba.list_projections()
    finally:
        for handler in handlers:
            forget(handler)

    assert [line for line in listed if line.name == world.name] == [
        (world.name, 1, Status.PAUSED), (world.name, 2, Status.NOT_RUNNING),
    ]  # fmt: skip
    assert listed == sorted(listed)
