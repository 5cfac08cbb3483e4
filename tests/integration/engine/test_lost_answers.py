"""A COMMIT whose answer is lost may have happened: believe the database, never the connection."""

from __future__ import annotations

import threading
from typing import Any

import psycopg
import pytest
from django.db import OperationalError
from django.db.backends.base.base import BaseDatabaseWrapper

from scriba.protocols import CursorMove, CursorRefused, Identity, Settlement
from scriba.targets import OrmTarget
from tests.support.processes import database_url
from tests.support.waiting import wait_until
from tests.support.world import World


@pytest.mark.case("A23")
def test_a_commit_that_happened_is_not_repeated_as_part_of_a_larger_batch(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection is cut after the server has committed, while more events of the same keys are waiting."""
    positions = world.append(*"aabba")
    real_commit = BaseDatabaseWrapper._commit
    lost = threading.Event()

    def commit(connection: Any) -> Any:
        is_worker = "lane-0" in threading.current_thread().name
        real_commit(connection)
        if is_worker and not lost.is_set():
            positions.extend(_append_from_elsewhere(*"abab"))
            wait_until(lambda: handle._coordinator._term.in_flight == 9, what="more events of the same keys")
            lost.set()
            connection.connection.close()
            raise OperationalError("server closed the connection unexpectedly")

    with monkeypatch.context() as patch:
        patch.setattr(BaseDatabaseWrapper, "_commit", commit)
        with world.running(world.projection(parallelism=1)) as handle:
            world.wait_applied(9)
            wait_until(lambda: world.segment.watermark == positions[-1], what="the watermark")

    assert lost.is_set()
    world.check(positions)
    assert world.counters()["deduplicated"] == 5


def _append_from_elsewhere(*streams: str) -> list[int]:
    """Append over a connection of its own: the worker's is in the middle of its commit."""
    sql = (
        "INSERT INTO testapp_event (stream_id, type, data, metadata, occurred_at) "
        "SELECT unnest(%s::text[]), 'Happened', '{}', '{}', now() RETURNING id"
    )
    with psycopg.connect(database_url(), autocommit=True) as writer:
        return [row[0] for row in writer.execute(sql, [list(streams)]).fetchall()]


@pytest.mark.case("A23")
def test_a_cursor_inside_a_batch_refuses_the_whole_batch(world: World) -> None:
    """Moving forward is not enough: a cursor that stands at or beyond the batch's first position rolls it back."""
    world.run(world.projection())
    segment = world.segment
    fence = ((segment.pk, segment.epoch),)
    writer = OrmTarget().open(Identity(world.name, 1))
    try:
        with writer.batch(fence) as batch:
            batch.settle(Settlement([CursorMove("k", 1, 5, 5)], segment=segment.pk))
        for first, last in ((3, 9), (5, 6), (1, 5)):
            with pytest.raises(CursorRefused), writer.batch(fence) as batch:
                batch.settle(
                    Settlement([CursorMove("j", 1, 1, 1), CursorMove("k", first, last, last)], segment=segment.pk)
                )
        with writer.batch(fence) as batch:
            batch.settle(Settlement([CursorMove("k", 6, 9, None)], segment=segment.pk))
    finally:
        writer.close()

    assert world.cursors() == {"k": 9}
