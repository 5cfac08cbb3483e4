"""Reading `$all`: every event once, in order, over holes, however the store was written, bounded in rows and bytes."""

from __future__ import annotations

import itertools
import json
import threading
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any

import psycopg
import pytest

from scriba.engine.reader import PAGE
from scriba.exceptions import SourceError
from scriba.sources import commanded_subscription
from tests.support.backlog import MOST_MEMORY, Held, backlog_is_passed, memory
from tests.support.commanded import Recorded, Store, as_json, source_of
from tests.support.reading import positions, read_all
from tests.support.world import World


@pytest.mark.case("A18")
def test_an_empty_store_is_caught_up(store: Any, subscribe: Any) -> None:
    """Nothing to read is no error: no head, no events, and the first one arrives when it comes."""
    subscription = subscribe(store)

    page = subscription.fetch(10, 0.0)

    assert page == ([], 0, True, "")
    assert subscription.head() is None
    store.append("cart-1")
    assert positions(read_all(subscription)) == [1]


@pytest.mark.parametrize("limit", [1, 2, 3, 1_000])
def test_holes_are_read_over(store: Any, subscribe: Any, limit: int) -> None:
    """Hard-deleted numbers are missing for ever: pages of any size deliver every other event once, and go on."""
    for stream in ("a", "gone-1", "b", "gone-2", "gone-3", "c"):
        store.append(stream, 2)
    store.hard_delete("gone-1")
    store.hard_delete("gone-2")
    store.hard_delete("gone-3")

    events = read_all(subscribe(store), limit)

    assert positions(events) == [1, 2, 5, 6, 11, 12]


def test_a_cursor_on_a_number_that_was_deleted_goes_on(store: Any, subscribe: Any) -> None:
    """A restart from a number that no longer exists continues behind it, without a repeat."""
    store.append("gone", 5)
    store.append("kept", 3)
    store.hard_delete("gone")

    events = read_all(subscribe(store, resume=4))

    assert positions(events) == [6, 7, 8]


def test_a_hard_deleted_tail_leaves_no_lag(store: Any, subscribe: Any) -> None:
    """The store's counter stays above the last readable number; head is the readable one, and reading is caught up."""
    store.append("kept", 3)
    store.append("gone", 3)
    store.hard_delete("gone")
    subscription = subscribe(store)

    page = subscription.fetch(100, 0.0)

    assert (page.scanned, subscription.head().position) == (3, 3)
    assert subscription.fetch(100, 0.0).caught_up


def test_a_tail_that_is_deleted_after_it_was_read_is_no_reset(store: Any, subscribe: Any) -> None:
    """A cursor above the last readable number, but not above the counter, is where it should be."""
    store.append("kept", 3)
    store.append("gone", 3)
    store.hard_delete("gone")

    subscription = subscribe(store, resume=6)

    assert subscription.fetch(100, 0.0) == ([], 6, True, "")
    store.append("kept")
    assert positions(read_all(subscription)) == [7]


def test_a_store_that_was_reset_stops_the_projection(store: Any, subscribe: Any, monkeypatch: Any) -> None:
    """A cursor above the counter halts at the start: the same numbers would be other events."""
    store.append("a", 5)
    reading = subscribe(store)
    read_all(reading)
    anchor = reading.anchor()
    store.reset()
    store.append("b", 2)

    with pytest.raises(SourceError, match=r"read up to number 5, .* ends at 2: the event store was reset or restored"):
        subscribe(store, resume=5).fetch(10, 0.0)
    with pytest.raises(SourceError, match=r"was reset \(its row was 0@\d+ and is now 0@\d+\)"):
        subscribe(store, resume=5, anchor=anchor).fetch(10, 0.0)
    monkeypatch.setattr(commanded_subscription, "LOOK_AGAIN_S", 0.0)
    with pytest.raises(SourceError, match="was reset"):
        reading.fetch(10, 0.0)


def test_a_store_that_was_reset_and_has_grown_past_the_cursor_stops_it_too(store: Any, subscribe: Any) -> None:
    """The counter says nothing then; the birth of `$all` does, and it survives restarts beside the watermark."""
    store.append("a", 5)
    reading = subscribe(store)
    read_all(reading)
    anchor = reading.anchor()
    assert positions(read_all(subscribe(store, resume=3, anchor=anchor))) == [4, 5]
    store.reset()
    store.append("b", 9)

    with pytest.raises(SourceError, match="was reset"):
        subscribe(store, resume=5, anchor=anchor).fetch(10, 0.0)
    assert positions(read_all(subscribe(store, resume=5))) == [6, 7, 8, 9]


def test_an_append_of_2500_events_arrives_whole_and_in_order(store: Any, subscribe: Any) -> None:
    """One transaction of three batches is seen entirely or not at all, with its versions in order."""
    writer = psycopg.connect(store.dsn)
    reading = subscribe(store)
    store.append("big", 2_500, into=writer)
    assert read_all(reading) == []

    writer.commit()
    writer.close()

    events = read_all(reading)
    assert positions(events) == list(range(1, 2_501))
    assert [event.stream_version for event in events] == list(range(1, 2_501))


def test_order_is_by_number_never_by_time(store: Any, subscribe: Any) -> None:
    """Events whose times run backwards, or lie where Python has no time, still arrive by their numbers."""
    start = datetime(2026, 1, 1, tzinfo=UTC)
    store.append("a", [Recorded(created_at=start - timedelta(days=day)) for day in range(5)])
    store.run(
        "INSERT INTO {schema}.events (event_id, event_type, data, created_at) VALUES (%s, 'T', %s, 'infinity')",
        (key := uuid.uuid4(), b"{}"),
    )
    store.run("INSERT INTO {schema}.stream_events VALUES (%s, 0, 6, 1, 6)", (key,))
    store.run("UPDATE {schema}.streams SET stream_version = 6 WHERE stream_id = 0")

    events = read_all(subscribe(store))

    assert positions(events) == [1, 2, 3, 4, 5, 6]
    assert [event.occurred_at for event in events] == [start - timedelta(days=day) for day in range(5)] + [None]
    assert all(event.occurred_at.tzinfo is UTC for event in events[:5])


def test_links_are_not_delivered_twice(store: Any, subscribe: Any) -> None:
    """An event that is linked into other streams is once in `$all`, under its own stream."""
    store.append("a", 2)
    store.append("b", 2)
    store.link("view", [*store.event_ids("a"), *store.event_ids("b")])
    store.append("a")

    events = read_all(subscribe(store))

    assert [(event.position, event.stream_id) for event in events] == [(1, "a"), (2, "a"), (3, "b"), (4, "b"), (5, "a")]


def test_hard_deleting_a_stream_of_links_removes_the_originals(store: Any, subscribe: Any) -> None:
    """The library's trap: the original events are gone everywhere, and reading goes on over the hole."""
    store.append("a", 2)
    store.append("b", 1)
    store.link("view", store.event_ids("a"))
    store.hard_delete("view")

    assert positions(read_all(subscribe(store))) == [3]


def test_names_and_types_may_be_long_and_contain_anything(store: Any, subscribe: Any) -> None:
    """Commas, quotes, percent signs, emoji, 300 characters: names come back as they were written."""
    names = ["a,b,c", 'it\'s "quoted"', "100%s %(x)s", "größe 🧾", "x" * 300, " ", "$all "]
    for name in names:
        store.append(name, [Recorded(type=f"Elixir.{name}")])

    events = read_all(subscribe(store, wakeup="notify"))

    assert [event.stream_id for event in events] == names
    assert [event.type for event in events] == [f"Elixir.{name}" for name in names]


def test_a_nul_in_a_payload_is_read(store: Any, subscribe: Any) -> None:
    r"""JSON in bytea may hold \u0000, which jsonb could not."""
    store.append("a", as_json({"text": "a\0b"}))

    (event,) = read_all(subscribe(store))

    assert event.payload().data == {"text": "a\0b"}


@pytest.mark.parametrize("column", ["bytea", "jsonb"])
def test_metadata_is_always_a_mapping(make_store: Any, subscribe: Any, column: str) -> None:
    """SQL NULL, JSON null, an object, and what is no object: the handler always gets a mapping."""
    store = make_store(column=column)
    store.append("a", [Recorded(metadata=metadata) for metadata in (None, "null", '{"user": "x"}', "[1]", '"text"')])

    found = [event.payload().metadata for event in read_all(subscribe(store))]

    assert found == [{}, {}, {"user": "x"}, {"metadata": [1]}, {"metadata": "text"}]


def test_ids_and_version_are_passed_on(store: Any, subscribe: Any) -> None:
    """Event id, correlation and causation id are texts, or None; the stream's own version is there."""
    ids = [uuid.uuid4() for _ in range(3)]
    store.append("a", [Recorded(), Recorded(event_id=ids[0], causation_id=ids[1], correlation_id=ids[2])])

    first, second = read_all(subscribe(store))

    assert (first.causation_id, first.correlation_id, first.stream_version) == (None, None, 1)
    assert (second.id, second.causation_id, second.correlation_id) == tuple(map(str, ids))
    assert second.stream_version == 2


# --- bounds -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("column", ["bytea", "jsonb"])
@pytest.mark.parametrize("is_compressible", [True, False])
def test_pages_are_bounded_by_bytes(make_store: Any, subscribe: Any, column: str, is_compressible: bool) -> None:
    """Events of megabytes come a few at a time, also where the database holds them compressed; small ones come by rows."""
    store = make_store(column=column)
    noise = Random(1)
    text = "x" * 5_000_000 if is_compressible else noise.randbytes(2_500_000).hex()
    store.append("a", 200)
    store.append("a", as_json(*[{"text": text, "n": n} for n in range(7)]))
    store.append("a", 200)
    subscription = subscribe(store)

    sizes, found = [], []
    while not (page := subscription.fetch(1_000, 0.0)).caught_up or page.events:
        found += positions(page.events)
        sizes.append(sum(event.size for event in page.events))

    assert found == list(range(1, 408))
    assert max(sizes) <= commanded_subscription.PAGE_BYTES
    assert sum(sizes) > 7 * 5_000_000


def test_one_event_larger_than_a_page_is_a_page(store: Any, subscribe: Any, monkeypatch: Any) -> None:
    """The bound never keeps an event from being read."""
    monkeypatch.setattr(commanded_subscription, "PAGE_BYTES", 1_000)
    store.append("a", as_json("x" * 5_000, {}, "y" * 5_000))

    assert positions(read_all(subscribe(store))) == [1, 2, 3]


@pytest.fixture(scope="module", params=[100_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def backlog(request: Any, store_dsn: str) -> Iterator[Store]:
    """A store with so many events of one type, written in SQL; tests append their own types behind them."""
    store = Store(store_dsn, f"backlog_{request.param}").create()
    store.fill(request.param, payload="{}")
    yield store
    store.drop()
    store.close()


@pytest.mark.case("A19")
def test_a_filtered_backlog_is_scanned_in_bounded_pages_and_flat_memory(backlog: Store, subscribe: Any) -> None:
    """Events of other types never leave the database, and `scanned` passes them all the same, a page at a time."""
    wanted = backlog.append("other", [Recorded(type="Elixir.Shop.Scanned")])
    subscription = subscribe(backlog, source=source_of(backlog).narrow({"Scanned"}))
    rows: list[int] = []
    read_rows = subscription._read_rows
    subscription._read_rows = lambda stream, limit: (found := read_rows(stream, limit), rows.append(len(found)))[0]
    found, steps = [], [0]
    with memory() as peak:
        while not (page := subscription.fetch(1_000, 0.0)).caught_up:
            found += page.events
            steps.append(page.scanned)
        assert peak() < MOST_MEMORY
    found += page.events
    steps.append(page.scanned)

    assert positions(found) == [wanted]
    assert page.scanned == wanted
    assert all(0 < after - before <= 1_000 for before, after in itertools.pairwise(steps))
    assert max(rows) <= 2, "rows that nobody wants have left the server"


@pytest.mark.case("A19")
def test_a_projection_passes_a_filtered_backlog(world: World, backlog: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The watermark moves while nothing is handled, lag is right on the way and at the end, a restart reads none of it."""
    projection = world.projection(source=source_of(backlog), event_types=frozenset({"Passed"}))
    held = Held(monkeypatch, commanded_subscription.CommandedSubscription, passing=20)
    wanted = [Recorded(type="Elixir.Shop.Passed")]
    with memory() as peak:
        backlog_is_passed(world, projection, held, lambda: backlog.append("other", wanted), most_step=PAGE)
        assert peak() < MOST_MEMORY


@pytest.mark.parametrize("name", ["Elixir.Shop.Shipped", "Shop.Shipped", "Shipped"])
def test_a_type_may_be_named_with_or_without_its_modules(store: Any, subscribe: Any, name: str) -> None:
    """`event_types` takes the whole type, the type without `Elixir.`, or its last part; nothing that merely ends so."""
    for kind in ("Elixir.Shop.Shipped", "Elixir.Shop.Placed", "NotShipped", "Elixir.Shop.Shipped.Twice"):
        store.append("a", [Recorded(type=kind)])

    events = read_all(subscribe(store, source=source_of(store).narrow({name})))

    assert [event.type for event in events] == ["Elixir.Shop.Shipped"]


def test_a_stream_prefix_chooses_streams(store: Any, subscribe: Any) -> None:
    """`stream_prefix` is a prefix, no pattern; other streams still move the cursor."""
    for stream in ("order-1", "order_2", "%order-3", "order-4", "cart-1"):
        store.append(stream)

    subscription = subscribe(store, stream_prefix="order-")
    page = subscription.fetch(100, 0.0)

    assert [event.stream_id for event in page.events] == ["order-1", "order-4"]
    assert page.scanned == 5


# --- writers ----------------------------------------------------------------------------------------------


def test_nothing_is_lost_while_many_write(store: Any, subscribe: Any) -> None:
    """Eight writers, every fifth transaction rolled back, a reader that never stops: no hole, no repeat, no inversion."""
    done = threading.Event()

    def write(number: int) -> None:
        chance = Random(number)
        with psycopg.connect(store.dsn) as connection:
            for _ in range(40):
                store.append(f"s-{chance.randrange(5)}", chance.randrange(1, 6), into=connection)
                if chance.random() < 0.2:
                    connection.rollback()
                else:
                    connection.commit()

    subscription, found = subscribe(store), []
    writers = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for writer in writers:
        writer.start()
    while not done.is_set():
        if not any(writer.is_alive() for writer in writers):
            done.set()
        found += read_all(subscription)

    assert positions(found) == list(
        range(1, store.value("SELECT stream_version FROM {schema}.streams WHERE stream_id = 0") + 1)
    )
    by_stream: dict[str, list[int]] = {}
    for event in found:
        by_stream.setdefault(event.stream_id, []).append(event.stream_version)
    assert all(versions == list(range(1, len(versions) + 1)) for versions in by_stream.values())


def test_reading_locks_nothing_that_an_appender_needs(store: Any, subscribe: Any) -> None:
    """A long transaction that has appended stops other appenders, but no reader; and no reader stops an appender."""
    store.append("a", 3)
    with psycopg.connect(store.dsn) as writer:
        store.append("b", 1, into=writer)
        assert positions(read_all(subscribe(store))) == [1, 2, 3]
    assert positions(read_all(subscribe(store))) == [1, 2, 3, 4]


# --- looking up -------------------------------------------------------------------------------------------


def test_one_event_is_read_by_its_number(store: Any, subscribe: Any) -> None:
    """A replay reads an event again by its number; a hard-deleted one is gone, and one of a deleted stream is not."""
    store.append("a", as_json({"n": 1}, {"n": 2}))
    store.append("gone")
    store.hard_delete("gone")
    store.soft_delete("a")
    subscription = subscribe(store)

    assert subscription.read(2).payload().data == {"n": 2}
    assert subscription.read(3) is None
    assert subscription.read(99) is None


@pytest.mark.parametrize("column", ["bytea", "jsonb"])
@pytest.mark.parametrize("data", ['{"a": [1, 2.5, null, "x"]}', '"{\\"a\\": 1}"', '"text"', "7"])
def test_a_stored_event_decodes_like_the_fetched_one(make_store: Any, subscribe: Any, column: str, data: str) -> None:
    """What a dead letter keeps of an event, JSON or bytes, decodes to the same payload, or fails in the same way."""
    store = make_store(column=column)
    store.append("a", [Recorded(data=data)])
    subscription = subscribe(store)
    (event,) = read_all(subscription)

    kept, kept_metadata = json.loads(json.dumps(event.stored()))
    restored = subscription.restore(event._replace(raw=kept, raw_metadata=kept_metadata, codec=None))

    assert outcome(restored) == outcome(event)


def test_bytes_that_are_no_json_are_kept_as_bytes(store: Any, subscribe: Any) -> None:
    """A term, or a payload that cannot be decoded, is stored as it is, and restored as it is."""
    broken, term = b"\xff{not json", b"\x83t\x00\x00\x00\x01d\x00\x01ka\x07"
    store.append("a", [Recorded(data=broken), Recorded(data=term, metadata=None)])
    subscription = subscribe(store)
    first, second = read_all(subscription)

    assert first.stored() == (broken, {})
    assert second.stored() == (term, None)
    assert subscription.restore(second._replace(raw=term, codec=None)).payload() == second.payload()
    with pytest.raises(ValueError):
        first.payload()


def outcome(event: Any) -> Any:
    try:
        return event.payload()
    except ValueError as error:
        return type(error)


def test_an_event_is_found_by_id_or_by_version(store: Any, subscribe: Any) -> None:
    """(partition, number) by event id, or by stream and version; None for what is not there or is no id at all."""
    store.append("a", 2)
    store.append("b", 2)
    key = store.event_ids("b")[1]
    subscription = subscribe(store)

    assert subscription.locate(event_id=str(key)) == ("", 4)
    assert subscription.locate(stream_id="b", stream_version=1) == ("", 3)
    assert subscription.locate(event_id=str(uuid.uuid4())) is None
    assert subscription.locate(event_id="no uuid") is None
    assert subscription.locate(stream_id="b", stream_version=3) is None
    assert subscription.locate(stream_id="nobody", stream_version=1) is None
