"""Waiting without polling: a notice with the commit, an ear that comes back, and a reader that needs neither."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager

import pytest
from django.db import connection, transaction

from scriba.protocols import Shard
from scriba.sources import TableSource, notify_appended
from tests.integration.sources.conftest import run
from tests.integration.sources.reading import IDENTITY
from tests.integration.sources.shapes import PlainEvent
from tests.support.waiting import wait_until

LONG_S = 30.0


@pytest.fixture
def listening(plain):
    subscription = TableSource(plain, wakeup="notify").subscribe(IDENTITY, [Shard()])
    subscription.fetch(1, 0.0)
    assert subscription._ear.listening.wait(LONG_S)
    yield subscription
    subscription.close()


@contextmanager
def waiting(subscription):
    """A thread in `fetch` with a wait that no test sees the end of; yields where its page will be."""
    pages = []
    subscription._hint.clear()
    thread = threading.Thread(target=lambda: pages.append(subscription.fetch(10, LONG_S)))
    thread.start()
    try:
        yield pages
        thread.join(10)
        assert not thread.is_alive(), "the notice did not wake the reader"
    finally:
        subscription.wake()
        thread.join()


def ears() -> list[int]:
    return [
        row[0]
        for row in run("SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND query LIKE 'LISTEN%%'")
    ]


def test_a_notice_wakes_the_reader_with_the_commit(listening):
    """Not before: the reader would look and find nothing."""
    with waiting(listening) as pages, transaction.atomic():
        PlainEvent.objects.create(stream_id="s", event_type="t")
        notify_appended(PlainEvent)
        assert not pages
    assert [event.position for event in pages[0].events] == [1]


@pytest.mark.parametrize("appended", ["model", "name", "source"])
def test_a_writer_may_name_model_or_source(listening, appended):
    """Whoever appends need not know how the projection reads."""
    what = {"model": PlainEvent, "source": TableSource(PlainEvent), "name": PlainEvent}[appended]
    with waiting(listening) as pages:
        PlainEvent.objects.create(stream_id="s", event_type="t")
        notify_appended(what, using="default" if appended == "name" else None)
    assert pages[0].events


def test_a_rolled_back_append_wakes_nobody(listening):
    """The notice is part of the transaction."""
    listening._hint.clear()
    with transaction.atomic():
        notify_appended(PlainEvent)
        transaction.set_rollback(True)
    notify_other = threading.Event()
    listening._ear._on_hint = notify_other.set
    notify_appended(PlainEvent)
    assert notify_other.wait(LONG_S)
    assert not listening._hint.is_set()


def test_an_ear_that_lost_its_connection_comes_back(listening):
    """It listens first and then hints, so that what was appended meanwhile is found."""
    [pid] = ears()
    run("SELECT pg_terminate_backend(%s)", pid)
    wait_until(lambda: ears() not in ([], [pid]) and listening._ear.listening.is_set(), what="the ear to listen again")
    with waiting(listening) as pages:
        PlainEvent.objects.create(stream_id="s", event_type="t")
        notify_appended(PlainEvent)
    assert pages[0].events


def test_closing_ends_the_ear_and_its_connection(plain):
    """No thread and no connection stays behind, however often it is closed."""
    subscription = TableSource(plain, wakeup="notify").subscribe(IDENTITY, [Shard()])
    subscription.fetch(1, 0.0)
    thread = subscription._ear._thread
    subscription.close()
    subscription.close()
    assert not thread.is_alive()
    wait_until(lambda: not ears(), what="the connection's end")


def test_a_reader_that_polls_has_no_ear(plain):
    """The default costs writers nothing and opens one connection."""
    subscription = TableSource(plain).subscribe(IDENTITY, [Shard()])
    subscription.fetch(1, 0.0)
    assert subscription._ear is None
    subscription.close()


def test_looking_up_an_event_opens_no_connection_of_its_own(plain):
    """`wait_for` subscribes in a web request, only to locate: it uses the request's connection."""
    event = PlainEvent.objects.create(stream_id="s", stream_version=1, event_type="t")
    before = run("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()")
    with transaction.atomic():
        subscription = TableSource(plain, wakeup="notify").subscribe(IDENTITY, [Shard()])
        assert subscription.locate(event_id=str(event.event_id)) == ("", event.pk)
        assert subscription.locate(stream_id="s", stream_version=1) == ("", event.pk)
        assert subscription.locate(event_id="no uuid") is None
        assert subscription.read(event.pk).stream_id == "s"
        assert run("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()") == before
        subscription.close()
    assert connection.is_usable()


def test_who_polls_looks_every_so_often_however_fast_events_come(plain):
    """A look after each event would cost as much as a look after fifty, and find fifty times less."""
    subscription = TableSource(plain, wakeup="poll").subscribe(IDENTITY, [Shard()])
    try:
        assert subscription.fetch(10, 0.0).caught_up
        looked_at = time.monotonic()
        PlainEvent.objects.create(stream_id="s", event_type="t")

        page = subscription.fetch(10, 0.3)

        assert time.monotonic() - looked_at > 0.25
        assert [event.position for event in page.events] == [1]
    finally:
        subscription.close()
