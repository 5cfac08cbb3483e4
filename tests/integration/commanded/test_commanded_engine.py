"""Projections over a Commanded store, run by the engine: exact, in order, and in turns with an Elixir handler."""

from __future__ import annotations

import threading
from typing import Any

import psycopg
import pytest

import scriba
from scriba import PermanentFailure, Skip, wait_for
from scriba.exceptions import WaitTimeout
from scriba.registry import _remember, forget
from scriba.sources import commanded_checkpoint, commanded_subscription
from tests.support.commanded import Recorded, as_json, source_of
from tests.support.waiting import wait_until
from tests.support.world import World, note
from tests.testapp.models import Applied

NAME = "accounts"
SHARED = {"checkpoint": "shared", "subscription_name": NAME}


@pytest.fixture(autouse=True)
def soon(monkeypatch: Any) -> None:
    """Refused locks are tried again soon, and held ones checked often."""
    monkeypatch.setattr(commanded_checkpoint, "RETRY_S", (0.05, 0.1))
    monkeypatch.setattr(commanded_checkpoint, "CHECK_EVERY_S", 0.05)


@pytest.fixture
def registered() -> Any:
    made: list[Any] = []

    def register(projection: Any) -> Any:
        _remember(projection)
        made.append(projection)
        return projection

    yield register
    for projection in made:
        forget(projection)


def reading(world: World, store: Any, handler: Any = None, *, source: Any = None, **options: Any) -> Any:
    names = ("parallelism", "on_failure", "event_types", "batch_size")
    mine = {name: options.pop(name) for name in names if name in options}
    return world.projection(handler, source=source or source_of(store, **options), **mine)


def lock(store: Any, subscription_id: int) -> psycopg.Connection[Any] | None:
    """Take the subscription's lock as an Elixir node would; None when it is refused."""
    session = psycopg.connect(store.dsn, autocommit=True, application_name="an Elixir node")
    statement = f"SELECT pg_try_advisory_lock('{store.schema}.subscriptions'::regclass::oid::int, %s)"
    if session.execute(statement, (subscription_id,)).fetchone() == (True,):
        return session
    session.close()
    return None


# --- the whole path ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bytea-json", "jsonb", "bytea-term"])
def test_the_real_data_is_applied_once_and_in_order(world: World, make_store: Any, name: str) -> None:
    """181 events over a hole, four lanes: each applied once, each stream in order, the watermark at the end."""
    store = make_store(seed=False, column="jsonb" if name == "jsonb" else "bytea")
    numbers = [event["event_number"] for event in store.load(name)]

    assert world.run(reading(world, store, parallelism=4)) == 0

    world.check(numbers)
    assert world.segment.watermark == 185


def test_a_backlog_and_live_appends_arrive_once(world: World, store: Any) -> None:
    """Catching up and following overlap without a seam: 5,000 old events, and 50 appends meanwhile."""
    store.fill(5_000, streams=50)
    with world.running(reading(world, store, wakeup="notify")):
        for _ in range(50):
            store.append("live", 3)
        world.wait_applied(5_150)

    world.check(range(1, 5_151))


def test_a_slow_handler_changes_no_read_position(world: World, store: Any) -> None:
    """While handlers are slow, polls, checks and acknowledgements go on, and none of them moves what is read."""
    store.append("a", 300)
    store.append("b", 300)
    gate = threading.Event()

    def slow(data: Any, meta: Any) -> Any:
        if meta.position % 100 == 0:
            gate.wait(0.02)
        return note(world.name)(data, meta)

    assert world.run(reading(world, store, slow, **SHARED, batch_size=10)) == 0

    world.check(range(1, 601))
    assert store.subscription(NAME) == (1, 600)


@pytest.mark.case("A10")
def test_connections_that_are_cut_again_and_again_cost_nothing(world: World, store: Any) -> None:
    """Every connection of the source is terminated, over and over, while events flow: exact, and no dead letter."""
    store.append("a", 500)
    kill = (
        "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity "
        "WHERE application_name LIKE 'scriba %%' AND datname = current_database()"
    )
    with world.running(reading(world, store, wakeup="notify", batch_size=20, **SHARED)):
        for round_ in range(12):
            store.append(f"s{round_ % 3}", 100)
            world.wait_applied(500 + 60 * round_)
            store.run(kill, ("",)[:0])
        world.wait_applied(1_700)

    world.check(range(1, 1_701))
    assert world.letters() == []
    assert store.subscription(NAME) == (1, 1_700)


def test_a_store_that_was_reset_halts_the_projection(world: World, store: Any, monkeypatch: Any) -> None:
    """The halt says what happened and the cure."""
    monkeypatch.setattr(commanded_subscription, "LOOK_AGAIN_S", 0.0)
    store.append("a", 5)
    with world.running(reading(world, store)):
        world.wait_applied(5)
        store.reset()
        wait_until(lambda: world.state.halt_cause, what="the halt")

    assert "was reset (its row was 0@" in world.state.halt_cause
    assert "so the cursor 5 says nothing about it" in world.state.halt_cause


def test_a_store_that_was_reset_while_nobody_looked_halts_too(world: World, store: Any) -> None:
    """Reset, and grown past the watermark before the next start: what positions were counted in is kept with them."""
    store.append("a", 5)
    projection = reading(world, store)
    assert world.run(projection) == 0
    store.reset()
    store.append("b", 50)

    assert world.run(projection) == 1

    assert "was reset (its row was 0@" in world.state.halt_cause
    assert world.applied() == [1, 2, 3, 4, 5]


@pytest.mark.usefixtures("transactional_db")
def test_after_a_reset_of_both_it_begins_at_one(world: World, store: Any, registered: Any) -> None:
    """A projection that was made to forget reads a store that was reset from its first event."""
    store.append("a", 5)
    projection = registered(reading(world, store))
    assert world.run(projection) == 0
    store.reset()
    store.append("b", 3)

    scriba.reset(world.name)
    assert world.run(projection) == 0

    assert world.applied() == [1, 2, 3, 4, 5, 1, 2, 3]


def test_events_of_other_types_move_the_watermark(world: World, store: Any) -> None:
    """`event_types` filters inside the database; the watermark passes what was left out."""
    store.append("a", [Recorded(type="Elixir.Shop.Placed"), *[Recorded(type="Elixir.Shop.Other")] * 50])

    assert world.run(reading(world, store, event_types=frozenset({"Placed"}))) == 0

    assert world.applied() == [1]
    assert world.segment.watermark == 51


# --- what goes wrong --------------------------------------------------------------------------------------


@pytest.mark.case("B11")
def test_a_payload_that_cannot_be_decoded_is_one_dead_letter(world: World, store: Any) -> None:
    """Broken JSON, a broken term, and a NUL: only the undecodable ones are dead letters, with what was stored."""
    store.append("a", [Recorded(data=data) for data in (b"{}", b"\xff{", b"\x83\xf0", b'{"text": "a\\u0000b"}')])

    assert world.run(reading(world, store)) == 0

    world.check([1, 2, 3, 4], dead=[2, 3])
    assert [letter.error_kind for letter in world.letters()] == ["decode:UnicodeDecodeError", "decode:TermError"]


@pytest.mark.case("B1", "B11")
def test_a_handler_that_fails_dead_letters_the_event_with_its_traceback(world: World, store: Any) -> None:
    """One bad event does not stop the stream; its payload, NUL included, and the traceback are kept."""
    store.append("a", as_json({"n": 1}, {"n": "two\0"}, {"n": 3}))

    def handler(data: Any, meta: Any) -> Any:
        if not isinstance(data["n"], int):
            raise PermanentFailure(f"no number: {data['n']!r}")
        return note(world.name)(data, meta)

    assert world.run(reading(world, store, handler)) == 0

    world.check([1, 2, 3], dead=[2])
    (letter,) = world.letters()
    assert "no number" in letter.error_message
    assert "PermanentFailure" in letter.error_stacktrace
    assert letter.event_type == "Elixir.Shop.Placed"


# --- in turns with Elixir ---------------------------------------------------------------------------------


def test_while_elixir_holds_the_lock_it_is_standby_and_says_who(world: World, store: Any) -> None:
    """Refused is no error: the state names the holder, and once the lock is free the projection runs by itself."""
    store.append("a", 3)
    node = lock(store, store.subscribe(NAME, 1))
    assert node is not None
    with world.running(reading(world, store, **SHARED)):
        wait_until(lambda: world.segment.status == "standby", what="standby")
        assert f"held by pid {node.info.backend_pid} (application 'an Elixir node'" in world.segment.reason
        assert world.applied() == []

        store.run("UPDATE {schema}.subscriptions SET last_seen = 2")
        node.close()
        world.wait_applied(1)

    assert world.applied() == [3]
    assert store.subscription(NAME) == (1, 3)


@pytest.mark.case("A14", "D4")
def test_elixir_takes_over_only_what_is_not_in_flight(world: World, store: Any) -> None:
    """On the way out the lock is kept until the last event is committed, and `last_seen` is exact before it is free."""
    store.append("a", 3)
    entered, gate = threading.Event(), threading.Event()

    def handler(data: Any, meta: Any) -> Any:
        if meta.position == 3:
            entered.set()
            gate.wait(20)
        return note(world.name)(data, meta)

    with world.running(reading(world, store, handler, batch_size=1, **SHARED)) as handle:
        assert entered.wait(20)
        handle._fleet.stop()
        pause = threading.Event()
        for _ in range(20):
            assert lock(store, 1) is None
            pause.wait(0.01)
        gate.set()
        wait_until(handle._coordinator.ended.is_set, what="the end")

    node = lock(store, 1)
    assert node is not None
    node.close()
    assert world.applied() == [1, 2, 3]
    assert store.subscription(NAME) == (1, 3)


@pytest.mark.case("A13", "A14")
def test_both_sides_take_turns_without_a_gap_or_a_repeat(world: World, store: Any) -> None:
    """Scriba, Elixir, Scriba on one subscription: every event is applied by exactly one of them."""
    row = store.subscribe(NAME)
    elixirs: list[int] = []

    def elixir_works(upto: int) -> None:
        node = lock(store, row)
        assert node is not None
        seen = store.subscription(NAME)[1]
        for number in range(seen + 1, upto + 1):
            elixirs.append(number)
            store.run("UPDATE {schema}.subscriptions SET last_seen = %s WHERE subscription_name = %s", (number, NAME))
        node.close()

    projection = reading(world, store, **SHARED)
    for turn in range(4):
        store.append("a", 10)
        if turn % 2:
            elixir_works(10 * (turn + 1))
        else:
            assert world.run(projection) == 0

    assert world.applied() == [*range(1, 11), *range(21, 31)]
    assert elixirs == [*range(11, 21), *range(31, 41)]
    assert world.segment.watermark in {30, 40}


@pytest.mark.case("A6")
def test_a_lock_that_is_stolen_stops_the_reading(world: World, store: Any) -> None:
    """The session is terminated and somebody else takes the lock: the projection becomes standby, nothing doubles."""
    store.append("a", 5)
    with world.running(reading(world, store, **SHARED)):
        world.wait_applied(5)
        node = None
        while node is None:
            store.run(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = %s",
                (f"scriba {world.identity} lock",),
            )
            node = lock(store, 1)
        wait_until(lambda: world.segment.status == "standby", what="standby")
        store.append("a", 5)
        store.run("UPDATE {schema}.subscriptions SET last_seen = 8")
        node.close()
        world.wait_applied(7)

    assert world.applied() == [1, 2, 3, 4, 5, 9, 10]


@pytest.mark.case("A10")
@pytest.mark.parametrize("row_is_deleted", [False, True])
def test_a_reconnect_while_events_are_in_flight_loses_none(world: World, store: Any, row_is_deleted: bool) -> None:
    """Events that wait in lanes while the source reconnects are neither acknowledged nor passed over."""
    store.append("a", 40)
    entered, gate = threading.Event(), threading.Event()

    def handler(data: Any, meta: Any) -> Any:
        if meta.position == 11:
            entered.set()
            gate.wait(20)
        return note(world.name)(data, meta)

    with world.running(reading(world, store, handler, batch_size=10, **SHARED)):
        assert entered.wait(20)
        wait_until(lambda: store.subscription(NAME) == (1, 10), what="the acknowledgement of the first batch")
        if row_is_deleted:
            store.run("DELETE FROM {schema}.subscriptions")
        store.run(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name LIKE %s",
            (f"scriba {world.identity}%",),
        )
        row = 2 if row_is_deleted else 1
        wait_until(lambda: store.subscription(NAME) == (row, 10) and lock(store, row) is None, what="the new lock")
        store.append("a", 5)
        gate.set()
        world.wait_applied(45)
        wait_until(lambda: store.subscription(NAME) == (row, 45), what="the last acknowledgement")

    world.check(range(1, 46))


def test_a_deleted_subscription_is_created_again_where_we_are(world: World, store: Any) -> None:
    """A row that vanishes under a running projection costs nothing: a new one begins at our own watermark."""
    store.append("a", 5)
    with world.running(reading(world, store, **SHARED)):
        world.wait_applied(5)
        wait_until(lambda: store.subscription(NAME) == (1, 5), what="the acknowledgement")
        store.run("DELETE FROM {schema}.subscriptions")
        store.append("a", 5)
        world.wait_applied(10)
        wait_until(lambda: store.subscription(NAME) == (2, 10), what="the new row")

    world.check(range(1, 11))


# --- waiting ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, SHARED])
def test_a_reader_waits_for_a_stream_version(world: World, store: Any, registered: Any, options: Any) -> None:
    """The substitute for `consistency: :strong`: stream and version name the event; it takes no lock from the owner."""
    projection = registered(reading(world, store, **options))
    store.append("other", 3)
    store.append("account-1", 2)
    with pytest.raises(WaitTimeout):
        wait_for(world.name, stream_id="account-1", stream_version=2, timeout=0.05)

    with world.running(projection):
        assert wait_for(world.name, stream_id="account-1", stream_version=2, timeout=20) == 5
        assert world.applied("account-1") == [4, 5]
        key = str(store.event_ids("account-1")[0])
        assert wait_for(world.name, event_id=key, timeout=20) == 4
        with pytest.raises(WaitTimeout, match="has no 'account-1' version 9"):
            wait_for(world.name, stream_id="account-1", stream_version=9, timeout=0.05)


def test_a_skipped_event_is_waited_for_too(world: World, store: Any, registered: Any) -> None:
    """An event that the handler skips, or the source filters out, counts as settled."""
    projection = registered(
        reading(world, store, lambda data, meta: Skip(), event_types=frozenset({"Elixir.Shop.Placed"}))
    )
    store.append("a", [Recorded(), Recorded(type="Other")])

    with world.running(projection):
        for version in (1, 2):
            assert wait_for(world.name, stream_id="a", stream_version=version, timeout=20) == version
    assert not Applied.objects.filter(projection=world.name).exists()
