"""A million events that nobody wants: the watermark passes them, memory does not grow, and no restart reads them again."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from django.db.models import Q

from scriba.sources import TableSource
from scriba.sources.table_subscription import SCANNED_ROWS, TableSubscription, _PageConnection
from tests.integration.sources.conftest import run
from tests.integration.sources.reading import Reader
from tests.integration.sources.shapes import PlainEvent
from tests.support.backlog import MOST_MEMORY, Held, backlog_is_passed, memory
from tests.support.world import World

LIMIT = 1_000


@pytest.fixture(params=[100_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def backlog(request: Any, plain: Any) -> int:
    """So many events of one type, written in SQL."""
    run("ALTER TABLE shapes_plainevent DROP CONSTRAINT shapes_plainevent_event_id_key")  # half of what filling costs
    fill(request.param, "unwanted")
    run("ANALYZE shapes_plainevent")
    return int(request.param)


def fill(count: int, event_type: str) -> int:
    """Append; return the last position."""
    run(
        "INSERT INTO shapes_plainevent (event_id, stream_id, event_type, data, occurred_at) "
        "SELECT gen_random_uuid(), 'stream-' || n %% 100, %s, '{}', now() FROM generate_series(1, %s) n",
        event_type,
        count,
    )
    return int(run("SELECT max(id) FROM shapes_plainevent")[0][0])


def by_type() -> TableSource:
    return TableSource(PlainEvent).narrow({"counted"})


def by_filter() -> TableSource:
    return TableSource(PlainEvent, filter=Q(event_type="counted"))


@pytest.mark.case("A19")
@pytest.mark.parametrize("make_source", [by_type, by_filter])
def test_a_filtered_backlog_is_scanned_in_bounded_pages_and_flat_memory(backlog, make_source, monkeypatch):
    """Each page moves on by a bounded number of positions and brings nothing of what is left out."""
    rows: list[int] = []
    page = _PageConnection.page

    def counted(self, statement, parameters):
        found = page(self, statement, parameters)
        rows.append(len(found))
        return found

    monkeypatch.setattr(_PageConnection, "page", counted)
    wanted = fill(1, "counted")
    reader = Reader(make_source())
    steps = [0]
    with memory() as peak:
        while len(steps) == 1 or not reader.last.caught_up:
            reader.look(limit=LIMIT)
            steps.append(reader.last.scanned)
        assert peak() < MOST_MEMORY

    assert reader.seen == [wanted]
    assert steps[-1] == wanted
    assert all(0 <= after - before <= SCANNED_ROWS for before, after in itertools.pairwise(steps))
    assert len(steps) <= backlog // SCANNED_ROWS + 4
    assert max(rows) <= 1, "rows that nobody wants have left the server"


@pytest.mark.case("A19")
@pytest.mark.django_db(transaction=True)
def test_a_projection_passes_a_filtered_backlog(backlog, scratch_name, monkeypatch):
    """The watermark moves while nothing is handled, lag is right on the way and at the end, a restart reads none of it."""
    world = World(scratch_name)
    projection = world.projection(source=TableSource(PlainEvent), event_types=frozenset({"counted"}))
    held = Held(monkeypatch, TableSubscription, passing=3)
    with memory() as peak:
        backlog_is_passed(world, projection, held, lambda: fill(1, "counted"), most_step=SCANNED_ROWS)
        assert peak() < MOST_MEMORY
