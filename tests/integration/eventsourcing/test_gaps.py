"""No event is lost that commits late: the library's PostgreSQL recorder, with writers that do not lock the table."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any
from uuid import uuid4

import psycopg
import pytest

from scriba.event import Event
from scriba.exceptions import ConfigurationError, SourceError
from scriba.sources.eventsourcing import LogSubscription
from scriba.sources.horizon import Horizon
from scriba.sources.starting import StartUnknown
from tests.integration.eventsourcing.conftest import Store
from tests.integration.eventsourcing.school import Dog, School
from tests.integration.eventsourcing.writers import append, crowd, raw_transaction, stored
from tests.support.processes import database_url
from tests.support.reading import positions, read_all
from tests.support.waiting import wait_until

TABLE = "school_events"
TORTURE_S = float(os.environ.get("SCRIBA_TORTURE", "0"))


@pytest.fixture
def school(postgres_store: Store) -> Any:
    """The writing application: constructing it creates the tables."""
    with closing(postgres_store.open(School)) as application:
        yield application


def fetched(subscription: LogSubscription, count: int) -> list[Event]:
    """Fetch until `count` events have come."""
    found: list[Event] = []

    def enough() -> bool:
        found.extend(subscription.fetch(100, 0.05).events)
        return len(found) >= count

    wait_until(enough, what=f"{count} events")
    return found


@pytest.mark.parametrize("topics", [None, ["nowhere:Happened"]], ids=["all", "filtered"])
def test_an_event_that_commits_late_is_waited_for(school: School, postgres_store: Store, topics: Any) -> None:
    """A smaller id that is not visible yet holds back the larger ones, and says who it waits for."""
    subscription = postgres_store.subscribe(School, topics=topics)
    with raw_transaction() as slow, raw_transaction() as quick:
        late = append(slow, postgres_store, TABLE)
        early = append(quick, postgres_store, TABLE)
        quick.commit()

        held_back = subscription.fetch(100, 0.05)
        head = subscription.head()

        assert held_back.events == []
        assert held_back.scanned < late
        assert not held_back.caught_up
        assert head is not None
        assert head.position == early
        assert "a slow writer" in head.waiting_for

        slow.commit()

    assert positions(fetched(subscription, 2)) == [late, early]
    subscription.close()


@pytest.mark.parametrize("topics", [None, ["nowhere:Happened"]], ids=["all", "filtered"])
def test_current_misses_nothing_that_is_in_flight(school: School, postgres_store: Store, topics: Any) -> None:
    """The start waits for those who are writing at the first look, and lies before what they commit."""
    with raw_transaction() as slow, raw_transaction() as quick:
        append(quick, postgres_store, TABLE)
        late = append(slow, postgres_store, TABLE)
        early = append(quick, postgres_store, TABLE)
        quick.commit()
        subscription = postgres_store.subscribe(School, topics=topics, start_from="current")
        with pytest.raises(StartUnknown, match="a slow writer") as caught:
            subscription.fetch(100, 0.0)
        assert subscription.transient(caught.value)
        head = subscription.head()
        assert head is not None
        assert "a slow writer" in head.waiting_for

        slow.commit()

    assert positions(fetched(subscription, 2)) == [late, early]
    subscription.close()


def test_wake_ends_a_start_that_waits(school: School, postgres_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stop never waits for somebody else's transaction; the next fetch goes on where it was."""
    with raw_transaction() as slow, raw_transaction() as quick:
        append(slow, postgres_store, TABLE)
        append(quick, postgres_store, TABLE)
        quick.commit()
        subscription = postgres_store.subscribe(School, start_from="current")
        monkeypatch.setattr(subscription._log, "wait", lambda _timeout: subscription.wake())
        with pytest.raises(StartUnknown):
            subscription.fetch(100, 60.0)
        monkeypatch.undo()
        slow.rollback()

    assert subscription.fetch(100, 0.0).events == []
    subscription.close()


def test_an_id_that_was_rolled_back_is_passed(school: School, postgres_store: Store) -> None:
    """A gap whose transaction has ended stays empty for ever."""
    subscription = postgres_store.subscribe(School)
    with raw_transaction() as writer:
        append(writer, postgres_store, TABLE)
        writer.rollback()
        kept = append(writer, postgres_store, TABLE)
        writer.commit()

        assert positions(fetched(subscription, 1)) == [kept]
    subscription.close()


@pytest.mark.case("A25")
def test_the_watermark_passes_a_burnt_id_at_the_end(school: School, postgres_store: Store) -> None:
    """Somebody may wait for it; without a later event nothing else would move the watermark there."""
    subscription = postgres_store.subscribe(School)
    with raw_transaction() as writer:
        burnt = append(writer, postgres_store, TABLE)
        writer.rollback()

        wait_until(lambda: subscription.fetch(100, 0.05).scanned >= burnt, what="the burnt id to be passed")
    subscription.close()


def test_ids_without_a_gap_need_no_evidence(
    school: School, postgres_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catching up with writers that lock the table costs not one look at the locks."""
    fido = school.enrol("Fido")
    for number in range(40):
        school.teach(fido, f"trick {number}")
    subscription = postgres_store.subscribe(School)
    looks: list[int] = []
    advance = Horizon.advance
    monkeypatch.setattr(Horizon, "advance", lambda self, after: looks.append(after) or advance(self, after))

    found = [event for _ in range(4) for event in subscription.fetch(10, 0.0).events]

    assert len(found) == 40
    assert looks == []
    subscription.close()


def test_gap_checking_cannot_be_switched_off(school: School, postgres_store: Store) -> None:
    """Writers may be configured differently from us, and nobody would notice what is lost."""
    with pytest.raises(ConfigurationError, match="cannot be switched off"):
        postgres_store.subscribe(School, gaps="ordered")


def test_a_sequence_that_hands_out_numbers_in_advance_is_refused(school: School, postgres_store: Store) -> None:
    """Such numbers are used long after they were drawn."""
    schema = postgres_store.env["POSTGRES_SCHEMA"]
    with raw_transaction() as connection:
        connection.execute(f"ALTER SEQUENCE {schema}.{TABLE}_notification_id_seq CACHE 20")
        connection.commit()

        with pytest.raises(SourceError, match="CACHE 1"):
            postgres_store.subscribe(School)


def test_a_table_that_is_fed_by_replication_is_refused(school: School, postgres_store: Store) -> None:
    """Its rows arrive in the order of commits elsewhere, with ids that were drawn elsewhere."""
    table = f"{postgres_store.env['POSTGRES_SCHEMA']}.{TABLE}"
    with psycopg.connect(database_url(), autocommit=True, options="-c allow_system_table_mods=on") as direct:
        direct.execute("INSERT INTO pg_subscription_rel VALUES (1, %s::regclass, 'r', NULL)", (table,))
        try:
            with pytest.raises(SourceError, match="logical replication"):
                postgres_store.subscribe(School)
        finally:
            direct.execute("DELETE FROM pg_subscription_rel WHERE srrelid = %s::regclass", (table,))


def test_a_long_wait_for_a_writer_is_not_a_busy_one(
    school: School, postgres_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first looks come soon after each other, later ones at the reader's own pace; an event starts anew."""
    subscription = postgres_store.subscribe(School)
    waits: list[float] = []
    monkeypatch.setattr(subscription._log, "wait", waits.append)
    with raw_transaction() as slow, raw_transaction() as quick:
        append(slow, postgres_store, TABLE)
        append(quick, postgres_store, TABLE)
        quick.commit()
        subscription.fetch(10, 0.0)

        for _ in range(8):
            assert subscription.fetch(10, 0.25).events == []
        assert waits == [0.01, 0.02, 0.04, 0.08, 0.16, 0.25, 0.25, 0.25]

        slow.commit()
        assert len(fetched(subscription, 2)) == 2
    assert subscription._held_back_s < 0.01
    subscription.close()


def test_a_table_that_is_missing_is_named(postgres_store: Store) -> None:
    """With the way to make it: a reader never does."""
    with pytest.raises(SourceError, match=r"school_events.* does not exist.*CREATE_TABLE"):
        postgres_store.subscribe(School)


def test_four_writers_with_database_functions_lose_nothing(
    postgres_store: Store, record_property: Callable[[str, object], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """In the mode in which the library's own subscription loses events, every event is handed out once, in order.

    How many the library's subscription misses in the same run is recorded and printed, not judged.
    """
    env = {**postgres_store.env, "POSTGRES_ENABLE_DB_FUNCTIONS": "y", "POSTGRES_POOL_SIZE": "6"}
    school = School(env=env)
    ours = postgres_store.subscribe(School, env={"POSTGRES_ENABLE_DB_FUNCTIONS": "y"})
    theirs, stop_theirs = _library_subscription(school)
    written: list[list[int]] = [[] for _ in range(4)]
    ends = time.monotonic() + TORTURE_S

    def write(number: int) -> None:
        count = 0
        while count < 60 or time.monotonic() < ends:
            originator = uuid4()
            burst = [stored(version=version, originator_id=originator) for version in range(1, 41)]
            written[number] += school.recorder.insert_events(burst) or []
            count += 1

    writers = crowd(write)
    found: list[int] = []
    while any(writer.is_alive() for writer in writers):
        found += positions(list(ours.fetch(500, 0.01).events))
    expected = sorted(position for each in written for position in each)
    wait_until(lambda: found.extend(positions(list(ours.fetch(500, 0.05).events))) or len(found) >= len(expected),
               what="every event")  # fmt: skip

    assert found == expected
    stop_theirs(expected[-1])
    missed = len(set(expected) - set(theirs))
    record_property("missed by the library's own subscription", f"{missed} of {len(expected)}")
    with capsys.disabled():
        print(f"\n  {len(expected)} events: ours missed 0, the library's own subscription {missed}")
    ours.close()
    school.close()


def _library_subscription(school: School) -> tuple[list[int], Callable[[int], None]]:
    """Follow the log as the library does; return what it saw so far, and how to end it."""
    seen: list[int] = []
    subscription = school.recorder.subscribe()

    def follow() -> None:
        with subscription:
            for notification in subscription:
                seen.append(notification.id)  # noqa: PERF401 - looked at while it grows

    thread = threading.Thread(target=follow, name="the library's subscription")
    thread.start()

    def stop(last: int) -> None:
        patience = time.monotonic() + 3
        wait_until(lambda: last in seen or time.monotonic() > patience, what="the library's subscription")
        subscription.stop()
        thread.join(10)

    return seen, stop


@pytest.mark.case("A10")
def test_a_reader_whose_connections_are_cut_goes_on(school: School, postgres_store: Store) -> None:
    """Every cut is transient; opened again behind what was routed, nothing is missing and nothing comes twice."""
    fido = school.enrol("Fido")
    found: list[int] = []
    subscription = postgres_store.subscribe(School)
    for number in range(10):
        school.teach(fido, f"trick {number}")
        _cut_readers()
        try:
            found += positions(list(subscription.fetch(100, 0.0).events))
            subscription.head()
        except Exception as error:
            assert subscription.transient(error), error
            subscription.close()
            subscription = postgres_store.subscribe(School, resume=found[-1] if found else None)

    wait_until(lambda: found.extend(positions(read_all(subscription))) or len(found) >= 11, what="the rest")
    assert found == list(range(1, 12))
    subscription.close()


def _cut_readers() -> None:
    with psycopg.connect(database_url(), autocommit=True) as connection:
        connection.execute(
            "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity"
            " WHERE application_name LIKE 'scriba test:1%' AND datname = current_database()"
        )


class Watched(threading.Event):
    """Says when somebody begins to wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.is_waited_for = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        self.is_waited_for.set()
        return super().wait(timeout)


def test_a_notice_ends_the_wait(school: School, postgres_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's writers say when they have written; nobody waits for the poll interval."""
    subscription = postgres_store.subscribe(School)
    log: Any = subscription._log
    hints: list[None] = []
    monkeypatch.setattr(log, "wake", lambda: (hints.append(None), log._woken.set()))
    log.wait(0.0)
    wait_until(lambda: hints, what="the hint that listening has begun")
    assert subscription.fetch(10, 0.0).caught_up
    log._woken = Watched()
    found: list[Event] = []
    waiting = threading.Thread(target=lambda: found.extend(subscription.fetch(10, 60.0).events), daemon=True)
    waiting.start()
    wait_until(log._woken.is_waited_for.is_set, what="the reader to wait")

    school.save(Dog("Fido"))

    waiting.join(20)
    assert [event.type for event in found] == ["Dog.Enrolled"]
    subscription.close()


def test_without_notices_events_are_found_by_polling(school: School, postgres_store: Store) -> None:
    """Polling always works; it also needs one connection less."""
    subscription = postgres_store.subscribe(School, wakeup="poll")

    school.save(Dog("Fido"))

    assert [event.type for event in fetched(subscription, 1)] == ["Dog.Enrolled"]
    assert subscription._log._ear is None  # type: ignore[attr-defined]
    subscription.close()
