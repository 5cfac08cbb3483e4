"""Notifications make it faster; nothing is lost without them."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from scriba import listening as ears
from scriba.exceptions import SourceError
from tests.support.commanded import VERSIONS
from tests.support.proxy import Proxy
from tests.support.reading import positions, read_all
from tests.support.waiting import wait_until

LONG_S = 30.0  #: a fetch that waits so long was not woken


def listening(subscription: Any) -> Any:
    """Read what is there, and wait until the server sends us what happens."""
    read_all(subscription)
    listener = subscription._ear
    assert listener.listening.wait(10)
    subscription.fetch(1, 0.0)
    return listener


def woken_by(subscription: Any, act: Any) -> float:
    """Return after how many seconds a waiting reader had events, once `act` had been done."""
    found: list[Any] = []

    def read() -> None:
        while not found:  # a hint may come without news; each wait is long all the same
            found.extend(subscription.fetch(100, LONG_S).events)

    thread = threading.Thread(target=read)
    thread.start()
    started = time.monotonic()
    act()
    thread.join(2 * LONG_S)
    assert found
    return time.monotonic() - started


@pytest.mark.parametrize("version", VERSIONS, ids=lambda version: ".".join(map(str, version)))
def test_an_append_wakes_the_reader(make_store: Any, subscribe: Any, version: Any) -> None:
    """A waiting fetch returns at the commit, on the channel of each schema version, quoted where it has a dot."""
    store = make_store(version=version)
    subscription = subscribe(store, wakeup="notify")
    listening(subscription)

    assert woken_by(subscription, lambda: store.append("a,b", 2)) < LONG_S / 3


def test_a_notification_of_another_store_wakes_nobody(make_store: Any, subscribe: Any) -> None:
    """Each schema has its channel."""
    store, other = make_store(), make_store()
    subscription = subscribe(store, wakeup="notify")
    listening(subscription)
    subscription._hint.clear()

    other.append("a")
    store.run("NOTIFY nothing")

    assert subscription.fetch(10, 0.05) == ([], 0, True, "")


@pytest.mark.case("A10")
def test_a_listener_that_is_killed_listens_again_and_looks(
    store: Any, subscribe: Any, identity: Any, monkeypatch: Any
) -> None:
    """After a reconnect comes LISTEN, then a look: what was appended while nobody listened arrives by that look."""
    monkeypatch.setattr(ears, "BACKOFF_S", (0.05,))
    subscription = subscribe(store, wakeup="notify")
    listener = listening(subscription)

    def kill_and_append() -> None:
        store.run(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = %s",
            (f"scriba {identity} listener",),
        )
        wait_until(lambda: not listener.listening.is_set(), what="the loss to be noticed")
        store.append("a")

    assert woken_by(subscription, kill_and_append) < LONG_S / 3
    assert listener.listening.wait(10)
    assert woken_by(subscription, lambda: store.append("a")) < LONG_S / 3


def test_a_listener_that_dies_silently_costs_only_the_poll(store: Any, subscribe: Any, store_dsn: str) -> None:
    """A connection that is dead without saying so delivers nothing; the next poll does."""
    with Proxy(store_dsn) as proxy:
        subscription = subscribe(store, wakeup="notify", session=proxy.dsn)
        listening(subscription)
        proxy.fall_silent()

        store.append("a")

        assert positions(subscription.fetch(10, 0.05).events) == [1]
        proxy.speak()


def test_a_silent_listener_is_asked_whether_it_lives(
    store: Any, subscribe: Any, identity: Any, monkeypatch: Any
) -> None:
    """A quiet connection is used now and then, so that a dead one is noticed and nothing between forgets it."""
    monkeypatch.setattr(ears, "ALIVE_EVERY_S", 0.02)
    listening(subscribe(store, wakeup="notify"))

    asked = "SELECT count(*) FROM pg_stat_activity WHERE application_name = %s AND query = 'SELECT 1'"
    wait_until(lambda: store.value(asked, (f"scriba {identity} listener",)), what="a question to the listener's server")


def test_a_listener_that_is_cut_off_is_replaced(store: Any, subscribe: Any, store_dsn: str, monkeypatch: Any) -> None:
    """A network that breaks costs nothing but a reconnect."""
    monkeypatch.setattr(ears, "BACKOFF_S", (0.02,))
    with Proxy(store_dsn) as proxy:
        subscription = subscribe(store, wakeup="notify", session=proxy.dsn)
        listener = listening(subscription)
        proxy.cut()
        wait_until(lambda: not listener.listening.is_set(), what="the loss to be noticed")
        assert listener.listening.wait(10)

        assert woken_by(subscription, lambda: store.append("a")) < LONG_S / 3
        subscription.close()


def test_a_fetch_without_news_ends_after_its_time(store: Any, subscribe: Any) -> None:
    """With or without notifications, a fetch waits no longer than it was told to."""
    for wakeup in ("notify", "poll"):
        subscription = subscribe(store, wakeup=wakeup)
        subscription.fetch(10, 0.0)
        started = time.monotonic()
        assert subscription.fetch(10, 0.05).caught_up
        assert time.monotonic() - started < 5


def test_wake_ends_a_wait_from_any_thread(store: Any, subscribe: Any) -> None:
    """Whoever stops or pauses a projection need not wait for the end of a poll."""
    subscription = subscribe(store)
    waiting = threading.Event()
    threading.Thread(target=lambda: waiting.wait(10) and subscription.wake()).start()
    started = time.monotonic()
    waiting.set()

    assert subscription.fetch(10, LONG_S).caught_up
    assert time.monotonic() - started < LONG_S / 3


def test_without_notifications_everything_arrives_by_polling(store: Any, subscribe: Any) -> None:
    """`wakeup="poll"` opens no ear, and reads the same."""
    subscription = subscribe(store, wakeup="poll")
    subscription.fetch(10, 0.0)
    store.append("a", 3)

    assert subscription._ear is None
    assert positions(read_all(subscription)) == [1, 2, 3]


def test_who_polls_looks_every_so_often_however_fast_events_come(store: Any, subscribe: Any) -> None:
    """A look after each event would cost as much as a look after fifty, and find fifty times less."""
    subscription = subscribe(store, wakeup="poll")
    assert subscription.fetch(10, 0.0).caught_up
    looked_at = time.monotonic()
    store.append("a")

    page = subscription.fetch(10, 0.3)

    assert time.monotonic() - looked_at > 0.25
    assert [event.position for event in page.events] == [1]


@pytest.mark.case("D11")
def test_through_a_pooler_it_polls_and_says_so(store: Any, subscribe: Any, store_dsn: str, caplog: Any) -> None:
    """A pooler may hand the session to others: no LISTEN through it, a warning, and everything arrives by polling."""
    store.append("a", 2)
    with Proxy(store_dsn, is_pooler=True) as proxy:
        subscription = subscribe(store, dsn=proxy.dsn, wakeup="notify")

        assert positions(read_all(subscription)) == [1, 2]
        assert subscription._ear is None
        assert "LISTEN does not work through a connection pooler: polling only" in caplog.text
        subscription.close()


@pytest.mark.case("D11")
def test_through_a_pooler_a_lock_is_refused_unless_there_is_another_way(
    store: Any, subscribe: Any, store_dsn: str
) -> None:
    """Sharing needs a session of its own: without session= it is refused with the cure, with it it works."""
    store.append("a", 2)
    with Proxy(store_dsn, is_pooler=True) as proxy:
        refused = subscribe(store, dsn=proxy.dsn, checkpoint="shared")
        with pytest.raises(SourceError, match=r"goes through a pooler.* session= .*checkpoint='own'"):
            refused.fetch(10, 0.0)
        refused.close()

        subscription = subscribe(store, dsn=proxy.dsn, checkpoint="shared", wakeup="notify", session=store_dsn)
        listening(subscription)
        assert subscription.floor() == 0
        subscription.close()
