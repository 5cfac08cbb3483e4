"""PD2 and PD3: the read model is never ahead of its cursors, and resuming from them changes nothing."""

from __future__ import annotations

import itertools
import threading

import pytest
from django.db import connection
from hypothesis import given
from hypothesis import strategies as st

from scriba.models import Position, Segment
from tests.support.profiles import runs
from tests.support.world import World
from tests.testapp.models import Applied, Event

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.timeout(1200)]

_names = (f"pd{n}" for n in itertools.count(1))

AHEAD = """
SELECT count(*) FROM testapp_applied AS row WHERE row.projection = %s AND NOT EXISTS (
  SELECT FROM scriba_positions AS cursor WHERE cursor.projection_name = row.projection
  AND cursor.stream_id = row.stream_id AND cursor.position >= row.position)
"""


@runs(200)
@given(
    streams=st.lists(st.sampled_from("abcdef"), min_size=1, max_size=60),
    batch=st.integers(1, 20),
    lanes=st.integers(1, 4),
)
def test_no_row_without_a_cursor_at_or_above_its_event(streams: list[str], batch: int, lanes: int) -> None:
    """PD2, sampled all through the run: rows and cursors commit together."""
    Event.objects.all().delete()
    world = World(next(_names))
    positions = world.append(*streams)
    done, ahead = threading.Event(), []

    def sample() -> None:
        with connection.cursor() as cursor:
            while not done.is_set():
                cursor.execute(AHEAD, [world.name])
                ahead.append(cursor.fetchone()[0])
        connection.close()

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        assert world.run(world.projection(batch_size=batch, parallelism=lanes)) == 0
    finally:
        done.set()
        sampler.join()

    assert set(ahead) <= {0}
    world.check(positions)


@runs(100)
@given(
    streams=st.lists(st.sampled_from("abcdef"), min_size=1, max_size=60),
    back=st.one_of(st.none(), st.integers(0, 60)),
    batch=st.integers(1, 20),
)
def test_resuming_from_any_earlier_point_changes_nothing(streams: list[str], back: int | None, batch: int) -> None:
    """PD3: the source is rewound (by some, or to zero); cursors refuse what was settled, rows and cursors stay."""
    Event.objects.all().delete()
    world = World(next(_names))
    positions = world.append(*streams)
    world.run(world.projection(batch_size=batch))
    rows = list(Applied.objects.filter(projection=world.name).order_by("pk").values_list("pk", "position"))
    cursors = dict(Position.objects.filter(projection_name=world.name).values_list("stream_id", "position"))
    mark = None if back is None else positions[-1] - back
    Segment.objects.filter(projection_name=world.name).update(watermark=mark)

    assert world.run(world.projection(batch_size=batch, parallelism=2)) == 0

    assert list(Applied.objects.filter(projection=world.name).order_by("pk").values_list("pk", "position")) == rows
    assert dict(Position.objects.filter(projection_name=world.name).values_list("stream_id", "position")) == cursors
    world.check(positions)
