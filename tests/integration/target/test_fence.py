"""The fence: the first statement of each batch, and what it holds until the commit."""

from __future__ import annotations

import threading

import psycopg
import pytest
from django.db import connection

from scriba.protocols import CursorMove, FenceLost
from tests.integration.target.desk import Desk, row
from tests.support.waiting import in_thread, wait_until


@pytest.mark.case("A6")
def test_a_batch_of_an_older_epoch_writes_nothing(desk: Desk) -> None:
    """Whoever has lost the segment is turned away before its first handler call."""
    desk.execute("UPDATE scriba_segments SET epoch = epoch + 1 WHERE id = %s", desk.segment)
    reached = []

    with pytest.raises(FenceLost), desk.batch() as batch:
        reached.append(batch)

    assert not reached
    assert not desk.cursors()


@pytest.mark.case("A6")
def test_every_segment_of_the_fence_must_hold(desk: Desk) -> None:
    """A batch that leans on two segments is refused when one of them was taken over."""
    fence = [*desk.fence, (desk.segment + 1_000_000, 7)]

    with pytest.raises(FenceLost), desk.writer.batch(fence):
        pass


def test_the_check_is_the_first_statement(desk: Desk) -> None:
    """Not the last: a process that is frozen after its writes would hold their locks and never come to the check."""
    with desk.batch():
        pid = connection.connection.info.backend_pid
        ((state, query),) = desk.execute("SELECT state, query FROM pg_stat_activity WHERE pid = %s", pid)

    assert state == "idle in transaction"
    assert query.startswith("BEGIN; SELECT id FROM scriba_segments")
    assert query.endswith("FOR KEY SHARE")


@pytest.mark.case("A7")
def test_a_takeover_waits_for_a_batch_that_has_passed_its_check(desk: Desk) -> None:
    """FOR UPDATE is granted only when no batch of the old owner is open any more."""
    order = []
    is_open = threading.Event()

    def take_over() -> None:
        with desk.driver() as other:
            assert is_open.wait(10)
            other.execute("SELECT 1 FROM scriba_segments WHERE id = %s FOR UPDATE", [desk.segment])
            order.append("taken")

    with in_thread(take_over) as answer, desk.batch() as batch:
        is_open.set()
        waiting = "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock' AND query LIKE '%%scriba_segments%%UPDATE'"
        wait_until(lambda: desk.execute(waiting), what="the takeover to wait")
        batch.add([row("a")])
        desk.settle(batch, CursorMove("s", 1, 1, 1), applied=1)
        order.append("still open")

    assert answer == [None]
    assert order == ["still open", "taken"]
    assert desk.ids() == ["a"]


@pytest.mark.case("A6")
def test_a_heartbeat_does_not_wait_for_a_batch(desk: Desk) -> None:
    """The check leaves the columns that are no key to others: a long batch never costs the lease."""
    with desk.batch(), desk.driver() as other:
        other.execute("SET lock_timeout = '2s'")
        other.execute("UPDATE scriba_segments SET heartbeat_at = now() WHERE id = %s", [desk.segment])


@pytest.mark.case("A6")
def test_an_epoch_raised_meanwhile_is_met_by_the_next_batch(desk: Desk) -> None:
    """The first step of a takeover needs no lock that a batch holds, and turns every later batch away."""
    with desk.batch() as batch:
        with desk.driver() as other:
            other.execute("SET lock_timeout = '2s'")
            other.execute("UPDATE scriba_segments SET epoch = epoch + 1 WHERE id = %s", [desk.segment])
        batch.add([row("a")])
        desk.settle(batch, CursorMove("s", 1, 1, 1), applied=1)

    with pytest.raises(FenceLost), desk.batch():
        pass
    assert desk.ids() == ["a"]


def test_a_batch_of_pure_handlers_costs_no_more_round_trips_than_it_must(desk: Desk) -> None:
    """BEGIN with the fence; one statement per kind of write, one for cursors and one for counters, together; COMMIT."""
    with desk.batch() as batch:  # the connection, and what is learned once about a model
        batch.add([row("warm")])
        desk.settle(batch, CursorMove("s", 1, 1, 1), applied=1)

    connection.force_debug_cursor = True
    with desk.batch() as batch:
        for number in range(50):
            batch.add(batch.attempt(lambda number=number: [row(f"r{number}")]))
        desk.settle(batch, CursorMove("s", 2, 51, 51), applied=50)
        begun, written = [
            query["sql"] for query in connection.queries
        ]  # the fence is sent with what Django calls BEGIN

    assert begun == "BEGIN"
    assert [part.split()[0] for part in written.split("; ")] == ["INSERT", "UPDATE", "UPDATE"]
    assert len(desk.ids()) == 51


def test_a_foreign_error_in_the_block_comes_out_unchanged(desk: Desk) -> None:
    """What the pipeline raises inside is what it gets, and nothing is left."""
    error = psycopg.OperationalError("not of this connection")

    with pytest.raises(psycopg.OperationalError) as caught, desk.batch() as batch:
        batch.add([row("a")])
        raise error

    assert caught.value is error
    assert desk.ids() == []
