"""The whole path on a real PostgreSQL: table, reader, lanes, one transaction per batch, watermark."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import psycopg
import pytest
from django.db import connection, transaction
from django.db.models import F

from scriba import SERIAL, Delete, Done, Insert, RetryPolicy, Skip, Update, Upsert
from scriba.engine.runner import Fleet
from scriba.event import Event as ScribaEvent
from scriba.exceptions import ProjectionHalted
from tests.support.processes import database_url
from tests.support.waiting import wait_until
from tests.support.world import World, note
from tests.testapp.models import Applied, Counter, Event, Row


def test_a_thousand_events_reach_the_read_model_once_and_in_order(world: World) -> None:
    """Catch-up: rows, cursors, counters, watermark and head agree; the lease is released."""
    positions = world.append_many(1000)
    assert world.run(world.projection(parallelism=4)) == 0

    world.check(positions)
    assert world.segment.watermark == positions[-1]
    assert world.segment.owner == ""
    assert len(world.cursors()) == 20
    assert max(world.cursors().values()) == positions[-1]


def test_a_second_run_applies_only_what_is_new(world: World) -> None:
    """Restart resumes from the watermark."""
    first = world.append_many(100)
    world.run(world.projection())
    second = world.append_many(50)
    world.run(world.projection())

    world.check([*first, *second])
    assert world.counters()["deduplicated"] == 0


def test_events_are_applied_as_they_come(world: World) -> None:
    """A running projection sees new events by polling, without any notification."""
    with world.running(world.projection()):
        positions = world.append("a", "b")
        world.wait_applied(2)
        positions += world.append("a")
        world.wait_applied(3)

    world.check(positions)


def test_all_result_kinds_end_to_end(world: World) -> None:
    """Insert, Update, Delete, Upsert, several writes, Done and Skip do what they say, in the order of the events."""

    def handler(data: Any, meta: Any) -> Any:
        name = meta.stream_id
        match data["n"]:
            case 0:
                return Insert(Row(id=name, name="first"))
            case 1:
                return Update(Row, {"id": name}, status="updated")
            case 2:
                return Upsert(Row(id=name, name="second", status="upserted"))
            case 3:
                return [
                    Insert(Row(id=name + "x")),
                    Delete(Row, {"id": name + "x"}),
                    Update(Row, {"id": name}, amount=F("amount") + 2),
                ]
            case 4:
                Counter.objects.create(key=name, value=Row.objects.get(id=name).amount)
                return Done()
            case _:
                return Skip()

    name = world.name
    world.append(*[name] * 6)
    assert world.run(world.projection(handler)) == 0

    row = Row.objects.get(id=name)
    assert (row.name, row.status, row.amount) == ("second", "upserted", 2)
    assert Counter.objects.get(key=name).value == 2
    assert not Row.objects.filter(id=name + "x").exists()
    assert world.counters() | {"unmatched": 0} == {
        "applied": 5, "skipped": 1, "dead_lettered": 0, "deduplicated": 0, "unmatched": 0,
    }  # fmt: skip


@pytest.mark.case("C1")
def test_a_reading_handler_sees_every_earlier_event_of_its_batch(world: World) -> None:
    """Event 2's handler reads the row that event 1 of the same batch inserted."""

    def handler(data: Any, meta: Any) -> Any:
        if data["n"] == 0:
            return Insert(Counter(key=world.name, value=1))
        counter = Counter.objects.get(key=world.name)
        return Update(Counter, {"key": world.name}, value=counter.value * 2)

    world.append(*["s"] * 11)
    world.run(world.projection(handler, batch_size=50))

    assert Counter.objects.get(key=world.name).value == 1024
    world.check_conservation(11)


@pytest.mark.case("B1")
def test_one_bad_event_among_three_is_one_letter_and_the_cursor_goes_on(world: World) -> None:
    """Two rows, one dead letter with what is needed to act on it, cursor at the third."""

    def handler(data: Any, meta: Any) -> Any:
        if data["n"] == 1:
            raise LookupError("no such thing")
        return note(world.name)(data, meta)

    positions = world.append("s", "s", "s")
    world.run(world.projection(handler))

    world.check(positions, dead=[positions[1]])
    (letter,) = world.letters()
    assert (letter.error_kind, letter.error_message, letter.status) == ("LookupError", "no such thing", "open")
    assert letter.event_data == {"n": 1}
    assert "no such thing" in letter.error_stacktrace
    assert letter.event_occurred_at is not None
    assert world.cursors() == {"s": positions[2]}


@pytest.mark.case("B3")
def test_a_duplicate_key_is_isolated_to_its_event(world: World) -> None:
    """Rows 1 and 3, a letter at 2 that names the constraint."""

    def handler(data: Any, meta: Any) -> Any:
        code = {0: "x", 1: "x", 2: "y"}[data["n"]]
        return [Insert(Row(id=f"{world.name}{data['n']}", code=world.name + code)), note(world.name)(data, meta)]

    positions = world.append("s", "s", "s")
    world.run(world.projection(handler))

    world.check(positions, dead=[positions[1]])
    (letter,) = world.letters()
    assert letter.error_kind.startswith("commit:23505 (")
    assert "code" in letter.error_kind


@pytest.mark.case("B4")
def test_a_missing_column_halts_once_and_the_event_is_applied_after_the_fix(world: World) -> None:
    """Zero rows, zero letters, cursors unmoved, the cause recorded; stop, start, and everything is there."""
    positions = world.append_many(30)
    world.execute("ALTER TABLE testapp_applied RENAME COLUMN stream_id TO stream")
    try:
        assert world.run(world.projection()) == 1
        assert "42703" in world.state.halt_cause
        assert (world.letters(), world.cursors()) == ([], {})
    finally:
        world.execute("ALTER TABLE testapp_applied RENAME COLUMN stream TO stream_id")
    assert world.run(world.projection()) == 1, "a halt survives a restart"
    world.execute("UPDATE scriba_projections SET wish = 'stopped' WHERE projection_name = %s", world.name)
    fleet = Fleet([world.projection()], until_caught_up=True)
    fleet.wish_running()
    fleet.start()
    wait_until(lambda: fleet.has_ended, what="the run after the fix")

    world.check(positions)


@pytest.mark.case("B5")
def test_a_column_that_is_never_filled_halts_and_dead_letters_nothing(world: World) -> None:
    """Every write of a batch fails on integrity: no bad event but a handler that no longer fits."""
    positions = world.append_many(20)
    world.execute("ALTER TABLE testapp_applied ADD COLUMN needed int NOT NULL DEFAULT 0")
    world.execute("ALTER TABLE testapp_applied ALTER COLUMN needed DROP DEFAULT")
    try:
        assert world.run(world.projection()) == 1
        assert world.state.halt_label == "integrity_wipeout"
        assert (world.letters(), world.cursors()) == ([], {})
    finally:
        world.execute("ALTER TABLE testapp_applied DROP COLUMN needed")
    world.execute(
        "UPDATE scriba_projections SET halt_cause = '', halted_at = NULL WHERE projection_name = %s", world.name
    )
    assert world.run(world.projection()) == 0

    world.check(positions)


@pytest.mark.case("A16")
def test_one_cursor_per_stream_with_the_right_value(world: World) -> None:
    """Ten events of one stream in one batch, and one event each of two thousand streams."""
    ten = world.append(*["ten"] * 10)
    many = world.append(*(f"m{n}" for n in range(2000)))
    world.run(world.projection(parallelism=4, batch_size=500))

    world.check([*ten, *many])
    cursors = world.cursors()
    assert cursors["ten"] == ten[-1]
    assert len(cursors) == 2001


@pytest.mark.case("A17")
def test_two_lanes_that_update_the_same_rows_in_opposite_order_both_apply(world: World) -> None:
    """A deadlock is repeated, never dead-lettered; order per stream is kept."""
    names = [f"{world.name}{n}" for n in range(6)]
    Counter.objects.bulk_create(Counter(key=name) for name in names)

    def handler(data: Any, meta: Any) -> Any:
        order = names if meta.stream_id < "m" else names[::-1]
        return [note(world.name)(data, meta), *(Update(Counter, {"key": name}, value=F("value") + 1) for name in order)]

    positions = world.append(*(name for _ in range(15) for name in ("a", "b", "c", "x", "y", "z")))
    world.run(world.projection(handler, parallelism=4, batch_size=7))

    world.check(positions)
    assert set(Counter.objects.filter(key__in=names).values_list("value", flat=True)) == {len(positions)}


@pytest.mark.case("A21")
def test_a_stream_in_several_lanes_loses_nothing_and_a_changed_key_is_refused(world: World) -> None:
    """`partition_by` another key; the same version with another ordering key does not start."""
    positions = world.append_many(200, streams=1)

    def by_n(event: ScribaEvent) -> str:
        return str(event.data["n"] % 7)

    projection = world.projection(partition_by=by_n, parallelism=4, batch_size=5)
    assert world.run(projection) == 0
    assert set(world.cursors()) == {str(n) for n in range(7)}
    assert sorted(world.applied()) == positions
    world.check_conservation(200)
    assert world.run(world.projection(partition_by=SERIAL)) == 2


def test_serial_keeps_global_order(world: World) -> None:
    """One lane, whatever the parallelism."""
    positions = world.append_many(300)
    world.run(world.projection(partition_by=SERIAL, parallelism=4))

    assert world.applied() == positions


@pytest.mark.case("A10")
def test_terminated_connections_are_replaced_and_nothing_is_lost(world: World) -> None:
    """Connections of the process are ended at random, thirty times and more, under load: exact, no dead letter."""
    positions: list[int] = []
    done = threading.Event()
    killed = 0

    def kill() -> None:
        nonlocal killed
        with psycopg.connect(database_url(), autocommit=True) as killer:
            while not done.wait(0.05):
                killed += len(
                    killer.execute(
                        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() "
                        "AND pid <> pg_backend_pid() AND application_name <> 'test' ORDER BY random() LIMIT 2"
                    ).fetchall()
                )

    connection.close()
    with psycopg.connect(f"{database_url()}&application_name=test", autocommit=True) as writer:
        with world.running(world.projection(parallelism=4, batch_size=10, retry=RetryPolicy())):
            killing = threading.Thread(target=kill)
            killing.start()
            try:
                for n in itertools.count():
                    if n >= 400 and killed >= 30:
                        break
                    row = writer.execute(
                        "INSERT INTO testapp_event (stream_id, type, data, metadata, occurred_at) "
                        "VALUES (%s, 'Happened', '{}', '{}', now()) RETURNING id", [f"s{n % 9}"],
                    ).fetchone()  # fmt: skip
                    positions.append(row[0])  # type: ignore[index]
            finally:
                done.set()
                killing.join()
            connection.close()
            world.wait_applied(len(positions), timeout=60)

    world.check(positions)
    assert world.letters() == []


@pytest.mark.case("A12")
def test_two_versions_and_a_halting_neighbour_are_separate(world: World) -> None:
    """Cursors, watermarks, letters and halts are kept per (name, version)."""
    positions = world.append_many(50)

    def broken(data: Any, meta: Any) -> Any:
        return Insert(Counter(key=None))

    good, bad = world.projection(), world.projection(broken, version=2)
    fleet = Fleet([good, bad], until_caught_up=True)
    fleet.start()
    wait_until(lambda: fleet.has_ended, what="both to end")

    assert [outcome.code for outcome in fleet.outcomes] == [0, 1]
    assert sorted(world.applied()) == positions
    assert world.segment.watermark == positions[-1]


def test_a_held_back_transaction_is_waited_for_and_not_lost(world: World) -> None:
    """The lower id commits last: nothing above it is delivered before, nothing is skipped."""
    late_done, early_open = threading.Event(), threading.Event()
    late: list[int] = []

    def slow_writer() -> None:
        with transaction.atomic():
            late.append(Event.objects.create(stream_id="late", type="Happened", data={}).pk)
            early_open.set()
            assert late_done.wait(30)
        connection.close()

    with world.running(world.projection()):
        writer = threading.Thread(target=slow_writer)
        writer.start()
        assert early_open.wait(10)
        positions = world.append("a", "b")
        wait_until(lambda: "wait" in world.segment.reason or world.segment.reason != "", what="the reason to be shown")
        assert world.applied() == []
        late_done.set()
        writer.join()
        world.wait_applied(3)

    world.check([*late, *positions])


@pytest.mark.case("A15")
def test_on_commit_hooks_run_once_after_the_commit_and_never_for_a_failed_attempt(world: World) -> None:
    """A hook that raises is logged and does not swallow those of others; the failed attempt's hook never runs."""
    ran: list[Any] = []
    durable: list[bool] = []
    calls: dict[int, int] = {}

    def handler(data: Any, meta: Any) -> Any:
        n = data["n"]
        calls[n] = calls.get(n, 0) + 1
        attempt = calls[n]

        def hook() -> None:
            ran.append((n, attempt))
            durable.append(Applied.objects.filter(projection=world.name, position=meta.position).exists())
            if n == 0:
                raise RuntimeError("a hook that fails")

        transaction.on_commit(hook)
        if n == 1 and attempt == 1:
            raise ValueError("once")
        return note(world.name)(data, meta)

    positions = world.append("s", "s", "s")
    world.run(world.projection(handler, retry=RetryPolicy(2, (0.0,))))

    world.check(positions)
    assert sorted(ran) == [(0, 1), (1, 2), (2, 1)]
    assert durable == [True, True, True]


def test_start_projection_hands_back_a_halt(world: World) -> None:
    """The handle's wait raises what ended the projection."""
    world.append("s")

    def stubborn(data: Any, meta: Any) -> Any:
        raise ValueError("never")

    with world.running(world.projection(stubborn, on_failure="halt")) as handle:
        wait_until(lambda: world.segment.status == "halted", what="halted")
        handle._fleet.stop()
        with pytest.raises(ProjectionHalted, match="never"):
            handle.wait(10)
