"""Schedules that need an exact interleaving on a real server: who is where is decided by signals, never by luck."""

from __future__ import annotations

import functools
import itertools
import threading
from collections import Counter as Multiset
from typing import Any

import pytest
from django.conf import settings
from django.db import connection
from django.db.models import F
from django.test import override_settings

from scriba import Done, Fail, Insert, Skip, signals
from scriba.engine.partitioner import lane_of
from scriba.engine.runner import Fleet
from tests.support.waiting import wait_until
from tests.support.world import World, note
from tests.testapp.models import Applied, Child, Counter, Parent

LANES = 3


def streams_in_different_lanes(count: int) -> list[str]:
    """Return names of streams, each in a lane of its own."""
    by_lane: dict[int, str] = {}
    for number in itertools.count():
        by_lane.setdefault(lane_of(f"s{number}", LANES), f"s{number}")
        if len(by_lane) >= count:
            return list(by_lane.values())[:count]
    raise AssertionError


def start_again(world: World, projection: Any) -> None:
    """Stop and start after a halt, as an operator does, and run until everything is settled."""
    world.execute("UPDATE scriba_projections SET wish = 'stopped' WHERE projection_name = %s", world.name)
    fleet = Fleet([projection], until_caught_up=True)
    fleet.wish_running()
    fleet.start()
    wait_until(lambda: fleet.has_ended, timeout=30, what="the run after the fix")


def lane_threads(world: World) -> list[str]:
    return [thread.name for thread in threading.enumerate() if world.name in thread.name and " lane-" in thread.name]


def reached(world: World, watermark: int) -> bool:
    return bool(world.segment.watermark == watermark)


@pytest.mark.case("A4")
def test_after_a_recorded_halt_the_transaction_of_another_lane_commits_no_more(world: World) -> None:
    """A lane that is still in its handler when the halt is recorded has lost: its event comes again after the fix."""
    bad, held = streams_in_different_lanes(2)
    entered, release, is_fixed = threading.Event(), threading.Event(), threading.Event()

    def handler(data: Any, meta: Any) -> Any:
        if meta.stream_id == held and not is_fixed.is_set():
            Applied.objects.count()  # the transaction is open, and holds its share of the segment's row
            entered.set()
            assert release.wait(30)
        if meta.stream_id == bad and not is_fixed.is_set():
            assert entered.wait(30)
            raise LookupError("a case nobody thought of")
        return note(world.name)(data, meta)

    positions = world.append(bad, held, bad, held)
    projection = world.projection(handler, parallelism=LANES, on_failure="halt")
    with override_settings(SCRIBA={**settings.SCRIBA, "drain_timeout_s": 0.2}), world.running(projection):
        wait_until(lambda: world.state.halt_cause, what="the halt")
        assert not release.is_set()
        release.set()
        wait_until(lambda: not lane_threads(world), what="the lane that was left behind")
        assert (world.applied(), world.cursors(), sum(world.counters().values())) == ([], {}, 0)
    is_fixed.set()
    start_again(world, projection)

    world.check(positions)
    assert world.letters() == []


@pytest.mark.case("A3", "A17")
def test_a_deadlock_between_two_lanes_is_repeated_in_order(world: World) -> None:
    """Each lane holds one row and wants the other's, while later events of both streams wait: one is repeated, none lost."""
    left, right = streams_in_different_lanes(2)
    keys = {left: f"{world.name}left", right: f"{world.name}right"}
    Counter.objects.bulk_create(Counter(key=key) for key in keys.values())
    both_hold, calls = threading.Barrier(2), Multiset[int]()

    def handler(data: Any, meta: Any) -> Any:
        calls[meta.position] += 1
        mine, other = keys[meta.stream_id], keys[right if meta.stream_id == left else left]
        Counter.objects.filter(key=mine).update(value=F("value") + 1)
        if meta.position in first and calls[meta.position] == 1:
            both_hold.wait(30)
        Counter.objects.filter(key=other).update(value=F("value") + 1)
        Applied.objects.create(projection=world.name, stream_id=meta.stream_id, position=meta.position)
        return Done()

    positions = world.append(*[left, right] * 20)
    first = positions[:2]
    assert world.run(world.projection(handler, parallelism=LANES, batch_size=5)) == 0

    world.check(positions)
    assert max(calls[position] for position in first) >= 2, "nobody was repeated: there was no deadlock"
    assert set(Counter.objects.filter(key__in=keys.values()).values_list("value", flat=True)) == {len(positions)}
    assert world.letters() == []


@pytest.mark.case("A11")
@pytest.mark.parametrize("by", [1, 1_000, None])
def test_a_rewound_source_applies_nothing_twice(world: World, by: int | None) -> None:
    """By one event, by a thousand, to the beginning: each redelivered event is skipped as `dedup`, and said to be."""
    positions = world.append_many(1_200, streams=30)
    projection = world.projection(parallelism=LANES)
    assert world.run(projection) == 0
    rewound = positions if by is None else positions[-by:]
    world.execute("UPDATE scriba_segments SET watermark = %s WHERE projection_name = %s", rewound[0] - 1, world.name)
    new = world.append("s1", "new")
    skipped: list[tuple[int, str]] = []

    def note_skip(sender: Any, *, position: int, reason: str, **_: Any) -> None:
        skipped.append((position, reason))

    signals.event_skipped.connect(note_skip)
    try:
        assert world.run(projection) == 0
    finally:
        signals.event_skipped.disconnect(note_skip)

    world.check([*positions, *new])
    assert sorted(skipped) == [(position, "dedup") for position in rewound]
    assert world.counters()["deduplicated"] == len(rewound)


@pytest.mark.case("A20")
def test_no_watermark_that_was_ever_written_had_passed_an_unsettled_event(world: World) -> None:
    """The server itself looks at every write of it, through a catch-up with failures and skips; idle, it is at the end."""
    world.execute("CREATE TABLE looks (watermark bigint, leads boolean)")
    world.execute(
        "CREATE FUNCTION look_at_watermark() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        "INSERT INTO looks SELECT NEW.watermark, EXISTS (SELECT FROM testapp_event AS event WHERE "
        "event.id <= NEW.watermark AND (event.data->>'n')::int %% 7 <> 3 AND NOT EXISTS ("
        "SELECT FROM testapp_applied AS applied WHERE applied.position = event.id)); RETURN NULL; END $$"
    )
    world.execute(
        "CREATE TRIGGER looking AFTER UPDATE OF watermark ON scriba_segments FOR EACH ROW "
        "WHEN (NEW.watermark IS DISTINCT FROM OLD.watermark) EXECUTE FUNCTION look_at_watermark()"
    )

    def handler(data: Any, meta: Any) -> Any:
        if data["n"] % 7 == 3:
            return Skip() if data["n"] % 2 else Fail("told to fail")
        return note(world.name)(data, meta)

    positions: list[int] = []
    try:
        with world.running(world.projection(handler, parallelism=4, batch_size=20)):
            for _ in range(4):
                positions += [position for _ in range(4) for position in world.append_many(150)]
                at_end = functools.partial(reached, world, positions[-1])
                wait_until(at_end, timeout=60, what="the watermark at the end")
        with connection.cursor() as cursor:
            cursor.execute("SELECT count(*), count(*) FILTER (WHERE leads) FROM looks")
            looks, leads = cursor.fetchone()
    finally:
        world.execute("DROP TRIGGER looking ON scriba_segments; DROP FUNCTION look_at_watermark; DROP TABLE looks")
    assert looks >= 4
    assert leads == 0
    world.check_conservation(len(positions))


@pytest.mark.case("B24")
@pytest.mark.parametrize(
    "statement",
    [
        "SELECT pg_terminate_backend(pg_backend_pid())",
        "DO $$ BEGIN RAISE EXCEPTION 'x' USING ERRCODE = '40P01'; END $$",
    ],
)
def test_a_reading_handler_that_meets_a_passing_error_is_called_again(world: World, statement: str) -> None:
    """A server that restarts under a SELECT, or a deadlock: no bad event, although there are no retries."""
    met: list[int] = []

    def handler(data: Any, meta: Any) -> Any:
        if meta.position == positions[2] and meta.position not in met:
            met.append(meta.position)
            with connection.cursor() as cursor:
                cursor.execute(statement)
        return note(world.name)(data, meta)

    positions = world.append(*["s"] * 5)
    assert world.run(world.projection(handler, retry=False)) == 0

    assert met == [positions[2]]
    world.check(positions)
    assert world.letters() == []


@pytest.mark.case("B17")
def test_a_handler_that_tries_to_leave_ends_its_event_and_nobody_else(world: World) -> None:
    """In its thread KeyboardInterrupt is no person at the keyboard: one letter each, the process and its others go on."""
    leaving = [SystemExit, KeyboardInterrupt, GeneratorExit]

    def leave(data: Any, meta: Any) -> Any:
        if data["n"] < len(leaving):
            raise leaving[data["n"]]
        return note(world.name)(data, meta)

    other = World(f"{world.name}-other")
    positions = world.append(*["s"] * 5)
    leaver = world.projection(leave, parallelism=1)
    fleet = Fleet([leaver, other.projection(parallelism=1)], until_caught_up=True)
    fleet.start()
    wait_until(lambda: fleet.has_ended, what="both to end")

    assert [outcome.code for outcome in fleet.outcomes] == [0, 0]
    world.check(positions, dead=positions[:3])
    assert [letter.error_kind for letter in world.letters()] == ["SystemExit", "KeyboardInterrupt", "GeneratorExit"]
    other.check(positions)


@pytest.mark.case("B21")
def test_a_child_in_a_batch_before_its_parents_is_the_only_guilty_one(world: World) -> None:
    """Foreign keys hold at the end of a batch: what comes too early for that is a letter, and its parent is applied."""

    def handler(data: Any, meta: Any) -> Any:
        name = f"{world.name}{meta.stream_id}"
        made = Child(id=name, parent_id=f"{world.name}parent") if data["n"] == 0 else Parent(id=name)
        return [Insert(made), note(world.name)(data, meta)]

    positions = world.append("child", "parent")
    assert world.run(world.projection(handler, parallelism=1, batch_size=1)) == 0

    world.check(positions, dead=positions[:1])
    assert [letter.error_kind.partition(" ")[0] for letter in world.letters()] == ["commit:23503"]
    assert Parent.objects.filter(id=f"{world.name}parent").exists()
