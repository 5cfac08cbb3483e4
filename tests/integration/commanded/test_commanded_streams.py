"""Reading one stream by its own versions."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from scriba.exceptions import SourceError
from tests.support.reading import positions, read_all


def test_an_unknown_stream_is_waited_for(store: Any, subscribe: Any) -> None:
    """A stream that does not exist is empty, and its first event arrives when it is created."""
    store.append("other", 5)
    subscription = subscribe(store, stream="later")

    assert subscription.fetch(10, 0.0) == ([], 0, True, "")
    assert subscription.head() is None
    store.append("later", 2)
    assert positions(read_all(subscription)) == [1, 2]
    assert subscription.head().position == 2


def test_a_soft_deleted_stream_gives_nothing_more(store: Any, subscribe: Any, caplog: Any) -> None:
    """The library refuses a deleted stream, so we do: nothing more arrives, operators are told, and no lag remains."""
    store.append("a", 3)
    subscription = subscribe(store, stream="a")
    assert positions(subscription.fetch(2, 0.0).events) == [1, 2]
    store.soft_delete("a")

    assert subscription.fetch(10, 0.0) == ([], 2, True, "")
    head = subscription.head()
    assert head.position == 2
    assert "a was deleted" in head.waiting_for
    assert "the stream 'a' was deleted" in caplog.text


def test_a_stream_that_was_created_again_stops_the_projection(store: Any, subscribe: Any) -> None:
    """After a hard delete the same name begins at 1 again under another key: noticed while reading, and at a restart."""
    store.append("a", 3)
    subscription = subscribe(store, stream="a")
    read_all(subscription)
    anchor = subscription.anchor()
    store.hard_delete("a")
    assert subscription.fetch(10, 0.0) == ([], 3, True, "")
    store.append("a", 9)

    with pytest.raises(SourceError, match=r"'a' was deleted and created again \(its row was 1@\d+ and is now 2@\d+\)"):
        subscription.fetch(10, 0.0)
    with pytest.raises(SourceError, match="deleted and created again"):
        subscribe(store, stream="a", resume=3, anchor=anchor).fetch(10, 0.0)


def test_a_stream_shorter_than_the_cursor_stops_the_projection(store: Any, subscribe: Any) -> None:
    """A restart finds a cursor beyond the stream's version: the stream, or the store, is not what it was."""
    store.append("a", 3)

    with pytest.raises(SourceError, match=r"read up to number 7, but a in schema .* ends at 3"):
        subscribe(store, stream="a", resume=7).fetch(10, 0.0)


def test_links_are_read_in_the_order_of_the_links(store: Any, subscribe: Any) -> None:
    """A stream of links is ordered by its own numbers, which need not be the global order."""
    store.append("a", 1)
    store.append("b", 1)
    store.link("view", [*store.event_ids("b"), *store.event_ids("a")])

    events = read_all(subscribe(store, stream="view"))

    assert [(event.position, event.stream_id, event.stream_version) for event in events] == [(1, "b", 1), (2, "a", 1)]


def test_current_is_the_version_of_the_stream(store: Any, subscribe: Any) -> None:
    """`start_from="current"` counts the stream's own versions, and 0 for a stream that does not exist."""
    store.append("other", 5)
    store.append("a", 2)
    subscription = subscribe(store, stream="a", start_from="current")
    unknown = subscribe(store, stream="later", start_from="current")
    assert (subscription.fetch(10, 0.0).scanned, unknown.fetch(10, 0.0).scanned) == (2, 0)

    store.append("a")
    store.append("later")

    assert positions(read_all(subscription)) == [3]
    assert positions(read_all(unknown)) == [1]


@pytest.mark.parametrize("stream", ["$all", "a"])
def test_current_misses_nothing_that_is_in_flight(store: Any, subscribe: Any, stream: str) -> None:
    """Numbers appear in the order of the commits: what an append in flight will get lies behind the start."""
    last = store.append("a", 2)
    with psycopg.connect(store.dsn) as appending:
        in_flight = store.append("a", 2, into=appending)
        subscription = subscribe(store, stream=stream, start_from="current")
        assert subscription.fetch(10, 0.0).scanned == last

        appending.commit()

    assert positions(read_all(subscription)) == [in_flight - 1, in_flight]


def test_events_of_a_stream_are_found_by_its_own_numbers(store: Any, subscribe: Any) -> None:
    """Where a single stream is read, positions are its versions, for `read` and `locate` too."""
    store.append("other", 5)
    store.append("a", 2)
    key = store.event_ids("a")[1]
    subscription = subscribe(store, stream="a")

    assert subscription.read(2).id == str(key)
    assert subscription.locate(event_id=str(key)) == ("", 2)
    assert subscription.locate(stream_id="a", stream_version=1) == ("", 1)
    assert subscription.locate(stream_id="other", stream_version=1) is None
