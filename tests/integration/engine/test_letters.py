"""Failures end to end: who is blamed, what is written, what waits, and what does not wait for it."""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest
from django.conf import settings
from django.db import connection
from django.test import override_settings

from scriba import Insert, RetryPolicy
from scriba.engine.partitioner import lane_of
from scriba.models import DeadLetter
from scriba.targets.orm import OrmBatch, OrmWriter
from tests.support.waiting import wait_until
from tests.support.world import World, note
from tests.testapp.models import Child, Event, Parent

BATCH = 50


@pytest.mark.case("B9")
def test_a_backoff_holds_no_transaction_and_no_other_lane(world: World) -> None:
    """While an event waits for its retry nothing of ours is in a transaction; other lanes go on, until its own is full."""
    failed = threading.Event()
    full = 2 * BATCH  # of a lane: what the reader may put there before it waits

    def handler(data: Any, meta: Any) -> Any:
        if meta.stream_id == "slow" and not failed.is_set():
            failed.set()
            raise ValueError("later")
        return note(world.name)(data, meta)

    def in_a_transaction() -> bool:
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND state LIKE 'idle in%'"
            )
            return cursor.fetchone() != (0,)

    positions = world.append("slow")
    waiting = world.projection(handler, parallelism=4, batch_size=BATCH, retry=RetryPolicy(2, (3.0,)))
    with world.running(waiting) as handle:
        assert failed.wait(10)
        others = [f"o{n}" for n in range(40) if lane_of(f"o{n}", 4) != lane_of("slow", 4)]
        positions += world.append(*others)
        wait_until(lambda: len(world.applied()) == len(others), what="all of the other lanes")
        wait_until(lambda: not in_a_transaction(), what="the end of all transactions: a wait holds none open")
        for _ in range(3):
            positions += world.append(*["slow"] * full)
        behind = world.append(*others)
        lane = handle._coordinator._term._lanes[lane_of("slow", 4)]
        wait_until(lambda: len(lane) >= full, what="the lane of the event that waits to be full")
        assert positions[0] not in world.applied()
        world.wait_applied(len(positions) + len(behind))

    world.check([*positions, *behind])


@pytest.mark.case("B12")
def test_a_connection_that_drops_while_a_letter_is_written_repeats_the_batch(world: World) -> None:
    """Repeated, not halted, and one letter: it is part of the batch's transaction like everything else."""
    world.execute("CREATE SEQUENCE drops")
    world.execute(
        "CREATE FUNCTION drop_connection() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        "IF nextval('drops') = 1 THEN PERFORM pg_terminate_backend(pg_backend_pid()); END IF; RETURN NULL; END $$"
    )
    world.execute(
        "CREATE TRIGGER dropping AFTER INSERT ON scriba_dead_letters FOR EACH ROW EXECUTE FUNCTION drop_connection()"
    )
    try:

        def handler(data: Any, meta: Any) -> Any:
            if data["n"] == 1:
                raise LookupError("bad")
            return note(world.name)(data, meta)

        positions = world.append("s", "s", "s")
        assert world.run(world.projection(handler)) == 0
    finally:
        world.execute(
            "DROP TRIGGER dropping ON scriba_dead_letters; DROP FUNCTION drop_connection; DROP SEQUENCE drops"
        )

    world.check(positions, dead=[positions[1]])
    assert len(world.letters()) == 1


@pytest.mark.case("B21")
def test_a_deferred_foreign_key_broken_by_one_event_is_found_before_the_commit(world: World) -> None:
    """A child before its parent in one batch is fine at its end; only the child without any parent is dead-lettered."""

    def handler(data: Any, meta: Any) -> Any:
        name = f"{world.name}{meta.stream_id}"
        made = {
            "child": Insert(Child(id=name, parent_id=f"{world.name}parent")),
            "parent": Insert(Parent(id=name)),
            "orphan": Insert(Child(id=name, parent_id="nobody")),
        }[meta.stream_id]
        return [made, note(world.name)(data, meta)]

    positions = world.append("parent", "child", "orphan")
    assert world.run(world.projection(handler, parallelism=1)) == 0

    world.check(positions, dead=[positions[2]])
    (letter,) = world.letters()
    assert letter.error_kind.startswith("commit:23503 (")
    assert Child.objects.filter(parent_id=f"{world.name}parent").count() == 1


@pytest.mark.case("B21")
def test_a_child_before_its_parent_in_one_batch_is_applied(world: World) -> None:
    """Django's foreign keys are deferred: they hold at the end of a batch."""

    def handler(data: Any, meta: Any) -> Any:
        name = f"{world.name}{meta.stream_id}"
        made = Insert(Parent(id=name)) if data["n"] else Insert(Child(id=name, parent_id=f"{world.name}parent"))
        return [made, note(world.name)(data, meta)]

    positions = world.append("child", "parent")
    assert world.run(world.projection(handler, parallelism=1)) == 0

    world.check(positions)


@pytest.mark.case("B22")
def test_two_rows_with_one_event_id_are_two_letters(world: World) -> None:
    """Letters are unique per position: an id that a writer used twice hides nothing."""
    from scriba.sources import TableSource

    def handler(data: Any, meta: Any) -> Any:
        raise LookupError(meta.id)

    positions = [Event.objects.create(stream_id=s, type="one-id", data={}).pk for s in ("a", "b")]
    world.run(world.projection(handler, source=TableSource(Event, id="type")))

    assert [letter.position for letter in world.letters()] == positions
    assert {letter.event_id for letter in world.letters()} == {"one-id"}
    world.check_conservation(2)


@pytest.mark.case("B10")
def test_poison_among_many_costs_few_transactions(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """1 % poison: each batch with a bad event is judged by halves in one more transaction, not event by event."""
    poison, count = 20, 2_000
    batches, trials = _counted(monkeypatch, OrmWriter, "batch"), _counted(monkeypatch, OrmBatch, "trial")

    def handler(data: Any, meta: Any) -> Any:
        if data["n"] % 100 == 50:
            return Insert(Child(id=f"{world.name}{data['n']}", parent_id="nobody"))
        return note(world.name)(data, meta)

    positions = world.append(*(f"s{n % 30}" for n in range(count)))
    assert world.run(world.projection(handler, parallelism=2, batch_size=500)) == 0

    world.check(positions, dead=positions[50::100])
    assert DeadLetter.objects.filter(projection_name=world.name).count() == poison
    assert len(batches) <= count // 50, "each batch is tried and then judged: two transactions, not one per event"
    assert len(trials) <= 2 * poison * math.ceil(math.log2(500)), "more savepoints than halving needs"


def _counted(monkeypatch: pytest.MonkeyPatch, kind: type, method: str) -> list[None]:
    """Count the calls of a method, which is called as before."""
    calls: list[None] = []
    original = getattr(kind, method)

    def counted(self: Any, *args: Any, **options: Any) -> Any:
        calls.append(None)
        return original(self, *args, **options)

    monkeypatch.setattr(kind, method, counted)
    return calls


@pytest.mark.case("D7")
def test_debug_mode_does_not_remember_every_query(world: World) -> None:
    """DEBUG=True keeps a log of queries per connection: it is emptied with each batch."""
    longest: list[int] = []

    def handler(data: Any, meta: Any) -> Any:
        longest.append(len(connection.queries_log))
        return note(world.name)(data, meta)

    with override_settings(DEBUG=True):
        assert settings.DEBUG
        positions = world.append(*(f"s{n % 5}" for n in range(600)))
        world.run(world.projection(handler, parallelism=1, batch_size=5))

    world.check(positions)
    assert max(longest) < 50
