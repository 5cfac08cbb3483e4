"""One subscription, shared with Elixir: the same row, the same lock, and nothing that depends on the lock."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest

from scriba.exceptions import ConfigurationError, SourceError
from scriba.protocols import SourceBusy
from scriba.sources import commanded_checkpoint
from scriba.sources.commanded import CommandedSource
from scriba.sources.commanded_checkpoint import LockLost
from tests.support.commanded import source_of
from tests.support.reading import positions, read_all
from tests.support.waiting import wait_until

NAME = "accounts"
SHARED = {"checkpoint": "shared", "subscription_name": NAME}


@contextmanager
def elixir(store: Any, subscription_id: int, *, style: str = "two_int") -> Iterator[psycopg.Connection[Any]]:
    """A session that holds the lock as an Elixir node of that library version does."""
    keys = "'{schema}.subscriptions'::regclass::oid::int, %s" if style == "two_int" else "%s"
    with psycopg.connect(store.dsn, autocommit=True, application_name="an Elixir node") as session:
        taken = session.execute(
            store.sql(f"SELECT pg_try_advisory_lock({keys.replace('{schema}', store.schema)})"), (subscription_id,)
        ).fetchone()
        assert taken == (True,)
        yield session


def locks(store: Any, application: str) -> list[Any]:
    return store.run(
        "SELECT locktype, classid::bigint, objid::bigint, objsubid, mode, granted, database = (SELECT oid FROM pg_database"
        " WHERE datname = current_database()) FROM pg_locks JOIN pg_stat_activity USING (pid)"
        " WHERE locktype = 'advisory' AND application_name = %s",
        (application,),
    )


def table_oid(store: Any) -> int:
    return int(store.value(f"SELECT '{store.schema}.subscriptions'::regclass::oid::bigint"))


# --- the lock ---------------------------------------------------------------------------------------------


def test_our_lock_is_the_row_in_pg_locks_that_elixir_would_take(store: Any, subscribe: Any, identity: Any) -> None:
    """classid is the oid of the schema's `subscriptions`, objid the subscription's id, objsubid 2, exclusive."""
    for other in range(4):
        store.subscribe(f"other-{other}")
    expected = store.subscribe(NAME)

    subscribe(store, **SHARED).floor()

    assert expected == 5
    assert locks(store, f"scriba {identity} lock") == [
        ("advisory", table_oid(store), expected, 2, "ExclusiveLock", True, True)
    ]


def test_the_lock_of_an_old_store_has_one_key(make_store: Any, subscribe: Any, identity: Any) -> None:
    """Before schema version 1.1.0 the library's lock was the subscription's id alone."""
    store = make_store(version=(0, 17, 0))
    expected = store.subscribe(NAME)

    subscribe(store, **SHARED).floor()

    assert locks(store, f"scriba {identity} lock") == [("advisory", 0, expected, 1, "ExclusiveLock", True, True)]


@pytest.mark.parametrize(
    ("number", "key"), [(2_147_483_647, 2_147_483_647), (2_147_483_650, 3), (2**40, 2**40 % 2_147_483_647)]
)
def test_large_subscription_ids_are_reduced_as_the_library_does(
    store: Any, subscribe: Any, identity: Any, number: int, key: int
) -> None:
    """An id beyond four bytes is taken modulo 2147483647, and the lock is found again by the check."""
    store.run("INSERT INTO {schema}.subscriptions VALUES (%s, '$all', %s, 0)", (number, NAME))
    subscription = subscribe(store, **SHARED)
    subscription.floor()

    subscription._checkpoint._checked_at = 0.0
    subscription.fetch(1, 0.0)

    assert locks(store, f"scriba {identity} lock")[0][1:4] == (table_oid(store), key, 2)


@pytest.mark.parametrize("style", ["two_int", "legacy_bigint"])
def test_a_lock_that_elixir_holds_is_standby_and_no_error(store: Any, subscribe: Any, style: str) -> None:
    """Refused, the projection learns who holds the lock, and retries by itself within five seconds."""
    row = store.subscribe(NAME)
    options = {**SHARED, "lock_style": style}
    with elixir(store, row, style=style) as node:
        with pytest.raises(
            SourceBusy, match=rf"held by pid {node.info.backend_pid} \(application 'an Elixir node', since"
        ) as busy:
            subscribe(store, **options).floor()
        assert 0.5 < busy.value.retry_in_s < 5

    wait_until(lambda: is_free(subscribe, store, options), what="the lock")


def is_free(subscribe: Any, store: Any, options: Any) -> bool:
    try:
        subscribe(store, **options).floor()
    except SourceBusy:
        return False
    return True


def test_retries_are_spread(store: Any, subscribe: Any) -> None:
    """The waits of refused projections differ, so that a restarted fleet does not knock in step."""
    row = store.subscribe(NAME)
    waits = set()
    with elixir(store, row):
        for _ in range(10):
            with pytest.raises(SourceBusy) as busy:
                subscribe(store, **SHARED).floor()
            waits.add(round(busy.value.retry_in_s, 3))

    assert len(waits) > 5
    assert all(1 <= wait < 5 for wait in waits)


def test_elixir_is_refused_while_we_hold_it(store: Any, subscribe: Any) -> None:
    """Our lock keeps an Elixir node out, and the end of our session lets it in."""
    row = store.subscribe(NAME)
    subscription = subscribe(store, **SHARED)
    subscription.floor()

    with pytest.raises(AssertionError), elixir(store, row):
        pass
    subscription.close()
    wait_until(lambda: elixir_gets_it(store, row), what="the lock's release")


def elixir_gets_it(store: Any, row: int) -> bool:
    try:
        with elixir(store, row):
            return True
    except AssertionError:
        return False


def test_two_subscriptions_of_one_process_refuse_each_other(store: Any, subscribe: Any) -> None:
    """Each has a session of its own: one session would be given the same lock twice."""
    source = source_of(store, **SHARED)
    subscribe(store, source=source).floor()

    with pytest.raises(SourceBusy, match="application 'scriba"):
        subscribe(store, source=source).floor()


def test_looking_something_up_takes_no_lock(store: Any, subscribe: Any) -> None:
    """`read` and `locate` never compete with the owner, here or in Elixir."""
    store.append("a", 2)
    row = store.subscribe(NAME)
    with elixir(store, row):
        subscription = subscribe(store, **SHARED)

        assert subscription.read(2).position == 2
        assert subscription.locate(stream_id="a", stream_version=1) == ("", 1)
        assert subscription.head().position == 2


def test_stores_of_two_tenants_have_two_locks(make_store: Any, subscribe: Any) -> None:
    """The same subscription name in two schemas is two subscriptions: the key holds the table's oid."""
    first, second = make_store(), make_store()

    assert subscribe(first, **SHARED).floor() == 0
    assert subscribe(second, **SHARED).floor() == 0
    assert table_oid(first) != table_oid(second)


# --- losing it --------------------------------------------------------------------------------------------


@pytest.fixture
def checked_often(monkeypatch: Any) -> None:
    monkeypatch.setattr(commanded_checkpoint, "CHECK_EVERY_S", 0.0)


def terminate(store: Any, application: str) -> None:
    store.run("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = %s", (application,))


@pytest.mark.case("A10")
@pytest.mark.usefixtures("checked_often")
@pytest.mark.parametrize("call", ["fetch", "ack"])
def test_a_terminated_session_is_noticed(store: Any, subscribe: Any, identity: Any, call: str) -> None:
    """Without its backend the lock is gone; the next call raises what the engine repeats, and another may take over."""
    store.append("a", 3)
    subscription = subscribe(store, **SHARED)
    subscription.floor()
    terminate(store, f"scriba {identity} lock")
    wait_until(lambda: not locks(store, f"scriba {identity} lock"), what="the end of the session")

    with pytest.raises(psycopg.OperationalError) as caught:
        subscription.fetch(10, 0.0) if call == "fetch" else subscription.ack(3)

    assert subscription.transient(caught.value)
    subscription.close()
    assert positions(read_all(subscribe(store, **SHARED))) == [1, 2, 3]


@pytest.mark.usefixtures("checked_often")
def test_a_lock_that_vanished_is_noticed(store: Any, subscribe: Any) -> None:
    """A session that still answers but no longer holds the key stops handing out work."""
    store.append("a", 3)
    subscription = subscribe(store, **SHARED)
    subscription.floor()
    subscription._checkpoint._connection.execute("SELECT pg_advisory_unlock_all()")

    with pytest.raises(
        LockLost, match=r"the lock of the subscription 'accounts' on \$all in schema .* is lost"
    ) as caught:
        subscription.fetch(10, 0.0)

    assert subscription.transient(caught.value)


def test_the_lock_is_checked_once_a_second(store: Any, subscribe: Any, monkeypatch: Any) -> None:
    """Not at every fetch, and not later than a second after the last time."""
    clock = iter([100.0, 100.5, 100.9, 101.0, 101.5, 102.1])
    subscription = subscribe(store, **SHARED)
    subscription.floor()
    asked = []
    monkeypatch.setattr(commanded_checkpoint, "_value", lambda *_: asked.append(1) or True)
    subscription._checkpoint._checked_at = 100.0
    monkeypatch.setattr(commanded_checkpoint.time, "monotonic", lambda: next(clock))

    counts = []
    for _ in range(6):
        subscription._checkpoint.check()
        counts.append(len(asked))

    assert counts == [0, 0, 0, 1, 1, 2]


# --- the row ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("start_from", "expected"), [("origin", 0), ("current", 5), (3, 3)])
def test_a_missing_row_is_created_at_the_start(store: Any, subscribe: Any, start_from: Any, expected: int) -> None:
    """Whoever inserts the row decides where the subscription begins."""
    store.append("a", 5)

    subscription = subscribe(store, **SHARED, start_from=start_from)

    assert subscription.floor() == expected
    assert store.subscription(NAME) == (1, expected)
    assert positions(read_all(subscription)) == list(range(expected + 1, 6))


def test_a_row_that_exists_decides_alone(store: Any, subscribe: Any) -> None:
    """`start_from` counts only when the row is created: Elixir's last number is where we go on."""
    store.append("a", 5)
    store.subscribe(NAME, 2)

    subscription = subscribe(store, **SHARED, start_from=4)

    assert subscription.floor() == 2
    assert positions(read_all(subscription)) == [3, 4, 5]


def test_a_row_without_a_number_begins_at_the_origin(store: Any, subscribe: Any) -> None:
    """`last_seen` NULL counts as 0."""
    store.append("a", 2)
    store.subscribe(NAME, None)

    assert positions(read_all(subscribe(store, **SHARED))) == [1, 2]


def test_two_that_create_the_row_at_once_get_one_row(store: Any, subscribe: Any) -> None:
    """The unique index decides; the loser reads the winner's row, and is refused its lock."""
    answers: list[Any] = []
    barrier = threading.Barrier(4)
    sources = [source_of(store, **SHARED, start_from=number) for number in range(4)]
    store.append("a", 9)

    def claim(source: CommandedSource) -> None:
        subscription = subscribe(store, source=source)
        barrier.wait(10)
        try:
            answers.append(subscription.floor())
        except SourceBusy as busy:
            answers.append(busy)

    threads = [threading.Thread(target=claim, args=(source,)) for source in sources]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)

    assert sum(isinstance(answer, SourceBusy) for answer in answers) == 3
    assert store.value("SELECT count(*) FROM {schema}.subscriptions") == 1


@pytest.mark.case("A5", "A22")
@pytest.mark.parametrize(("watermark", "last_seen", "first"), [(2, 4, 5), (4, 2, 5), (3, 3, 4)])
def test_the_larger_of_both_checkpoints_is_where_it_goes_on(
    store: Any, subscribe: Any, watermark: int, last_seen: int, first: int
) -> None:
    """What either side has settled is not delivered again, and the row is brought up to our own watermark."""
    store.append("a", 6)
    store.subscribe(NAME, last_seen)

    subscription = subscribe(store, **SHARED, resume=watermark, settled=watermark)

    assert subscription.floor() == first - 1
    assert positions(read_all(subscription))[0] == first
    assert store.subscription(NAME) == (1, first - 1)


@pytest.mark.case("A10")
@pytest.mark.parametrize("exists", [True, False])
def test_what_is_in_flight_is_not_taken_for_settled(store: Any, subscribe: Any, exists: bool) -> None:
    """After a reconnect reading goes on behind what was handed out, but only what is settled is said to be settled."""
    store.append("a", 9)
    if exists:
        store.subscribe(NAME, 2)

    subscription = subscribe(store, **SHARED, resume=7, settled=3)

    assert subscription.floor() == 3
    assert positions(read_all(subscription)) == [8, 9]
    assert store.subscription(NAME) == (1, 3)


def test_ack_moves_the_row_forward_only(store: Any, subscribe: Any) -> None:
    """`last_seen` is never lowered, whatever the other side has written meanwhile, and an old number is no write."""
    store.append("a", 9)
    subscription = subscribe(store, **SHARED)
    subscription.floor()

    subscription.ack(4)
    assert store.subscription(NAME) == (1, 4)
    store.run("UPDATE {schema}.subscriptions SET last_seen = 8")
    subscription.ack(6)
    assert store.subscription(NAME) == (1, 8)
    subscription.ack(9)
    assert store.subscription(NAME) == (1, 9)


def test_ack_without_news_writes_nothing(store: Any, subscribe: Any) -> None:
    """The same or a smaller number costs no statement."""
    store.append("a", 9)
    subscription = subscribe(store, **SHARED)
    subscription.floor()
    subscription.ack(5)
    version = store.value("SELECT xmin::text FROM {schema}.subscriptions")

    subscription.ack(5)
    subscription.ack(3)

    assert store.value("SELECT xmin::text FROM {schema}.subscriptions") == version


def test_in_own_mode_nothing_is_written(store: Any, subscribe: Any) -> None:
    """With `checkpoint="own"` the store is only read: no row, no lock."""
    store.append("a", 3)
    subscription = subscribe(store)
    read_all(subscription)

    subscription.ack(3)

    assert subscription.floor() is None
    assert store.value("SELECT count(*) FROM {schema}.subscriptions") == 0


def test_a_row_deleted_under_us_stops_us(store: Any, subscribe: Any) -> None:
    """Deleted and created again, the row has another id and another lock: we stop, and begin again with the new one."""
    store.append("a", 3)
    subscription = subscribe(store, **SHARED)
    read_all(subscription)
    subscription.ack(1)
    store.run("DELETE FROM {schema}.subscriptions")
    fresh = store.subscribe(NAME, 0)

    with pytest.raises(LockLost, match="was deleted while this projection used it") as caught:
        subscription.ack(3)

    assert subscription.transient(caught.value)
    assert store.subscription(NAME) == (fresh, 0)
    subscription.close()
    with elixir(store, fresh), pytest.raises(SourceBusy):
        subscribe(store, **SHARED, resume=3).floor()


def test_a_row_that_changes_between_look_and_lock_is_read_again(store: Any, subscribe: Any, monkeypatch: Any) -> None:
    """The id is compared after the lock is held: a lock on a row that is gone protects nothing."""
    store.subscribe(NAME, 1)
    read, calls = commanded_checkpoint._read, []

    def read_and_replace(connection: Any, name: Any) -> Any:
        row = read(connection, name)
        calls.append(row)
        if len(calls) == 1:
            store.run("DELETE FROM {schema}.subscriptions")
            store.subscribe(NAME, 0)
        return row

    monkeypatch.setattr(commanded_checkpoint, "_read", read_and_replace)
    subscription = subscribe(store, **SHARED)
    subscription.floor()

    assert [row.id for row in calls] == [1, 2, 2, 2]
    assert [lock[2] for lock in store.run(
        "SELECT locktype, classid, objid FROM pg_locks WHERE locktype = 'advisory' AND classid = %s", (table_oid(store),)
    )] == [2]  # fmt: skip


def test_a_row_that_never_stays_is_given_up_on_for_now(store: Any, subscribe: Any, monkeypatch: Any) -> None:
    """Somebody who deletes the row again and again gets a clear message, and the engine tries later."""
    read = commanded_checkpoint._read

    def delete_and_read(connection: Any, name: Any) -> Any:
        store.run("DELETE FROM {schema}.subscriptions")
        return read(connection, name)

    monkeypatch.setattr(commanded_checkpoint, "_read", delete_and_read)
    subscription = subscribe(store, **SHARED)

    with pytest.raises(LockLost, match="is deleted and created again all the time") as caught:
        subscription.floor()

    assert subscription.transient(caught.value)


def test_a_store_without_subscriptions_cannot_be_shared(store: Any, subscribe: Any) -> None:
    """Where the table is missing it is said, with the mode that does without it."""
    store.run("DROP TABLE {schema}.subscriptions")

    with pytest.raises(SourceError, match="has no table subscriptions; checkpoint='own' does without it"):
        subscribe(store, **SHARED).floor()


def test_a_single_stream_is_shared_by_its_versions(store: Any, subscribe: Any) -> None:
    """A subscription to one stream has a row of its own; its `last_seen` is the stream's version."""
    store.append("other", 7)
    store.append("a", 3)
    subscription = subscribe(store, **SHARED, stream="a")

    assert positions(read_all(subscription)) == [1, 2, 3]
    subscription.ack(3)

    assert store.subscription(NAME, "a") == (1, 3)
    assert store.subscription(NAME) is None


def test_the_name_is_the_projections_unless_given(store: Any, subscribe: Any, identity: Any) -> None:
    """Without `subscription_name` the projection's own name is used, as an Elixir handler uses its own."""
    subscribe(store, checkpoint="shared").floor()

    assert store.subscription(identity.name) == (1, 0)


def test_a_name_without_sharing_is_refused() -> None:
    """An option that would have no effect is an error."""
    with pytest.raises(ConfigurationError, match="subscription_name is for checkpoint='shared'"):
        CommandedSource(dsn="", subscription_name="x")


# --- deleting ---------------------------------------------------------------------------------------------


def test_a_subscription_is_deleted_offline(store: Any) -> None:
    """An operator can let a subscription begin anew without any subscriber running, on either side."""
    store.subscribe(NAME, 7)
    source = source_of(store, **SHARED)

    assert source.delete_subscription(NAME)
    assert store.subscription(NAME) is None
    assert not source.delete_subscription(NAME)


def test_a_subscription_in_use_is_not_deleted_unless_forced(store: Any, subscribe: Any) -> None:
    """While somebody holds the lock it is refused, with the holder's name; force deletes it all the same."""
    subscribe(store, **SHARED).floor()
    source = source_of(store, **SHARED)

    with pytest.raises(SourceBusy, match="application 'scriba"):
        source.delete_subscription(NAME)
    assert store.subscription(NAME) is not None
    assert source.delete_subscription(NAME, force=True)
    assert store.subscription(NAME) is None
