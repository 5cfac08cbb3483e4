"""Notices instead of looking again and again: wishes are followed at once, and those who wait are woken.

The looks are set so far apart here that only a notice can be the reason why something happens.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
from django.conf import settings
from django.db import connection, connections
from django.test import override_settings

import scriba
from scriba import listening, waiting
from scriba.engine import coordinator
from scriba.exceptions import EventDeadLettered, ProjectionHalted
from scriba.listening import BorrowedEar
from scriba.protocols import Status
from scriba.registry import Projection
from scriba.results import Insert
from tests.support.processes import database_url
from tests.support.waiting import wait_until
from tests.support.world import World
from tests.testapp.models import Applied

NEVER_S = 3_600.0


def ears() -> list[int]:
    """The backends that have said LISTEN last."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND query LIKE 'LISTEN%' "
            "AND pid <> pg_backend_pid()"
        )
        return [pid for (pid,) in cursor.fetchall()]


def without_ears() -> Any:
    return override_settings(SCRIBA={**settings.SCRIBA, "listen": False})


class Gate:
    """A handler that waits at its gate, and fails for events that say so until it is mended."""

    def __init__(self, world: World, *, is_open: bool = True) -> None:
        self._world = world
        self.opened = threading.Event()
        self.is_mended = False
        if is_open:
            self.opened.set()

    def __call__(self, data: Any, meta: Any) -> Insert:
        assert self.opened.wait(20)
        if data.get("bad") and not self.is_mended:
            raise LookupError("not mended")
        return Insert(Applied(projection=self._world.name, stream_id=meta.stream_id, position=meta.position))


# --- wishes -------------------------------------------------------------------------------------------------------


@pytest.fixture
def looks_never(monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner reads its wish once, and then only when it is told to."""
    monkeypatch.setattr(coordinator, "WISH_EVERY_S", NEVER_S)


@contextmanager
def running(world: World, projection: Projection) -> Iterator[Projection]:
    with world.running(projection):
        wait_until(lambda: scriba.info(projection).status == Status.RUNNING, what="it to run")
        yield projection


@pytest.mark.case("D1")
@pytest.mark.usefixtures("looks_never")
def test_every_wish_is_followed_when_it_is_announced(world: World) -> None:
    """Pause, resume, stop and start, by an owner that would not look by itself for an hour."""
    with running(world, world.projection()) as projection:
        for command, status in (
            (scriba.pause, Status.PAUSED),
            (scriba.resume, Status.RUNNING),
            (scriba.stop, Status.STOPPED),
            (scriba.start, Status.RUNNING),
        ):
            command(projection, wait=True)
            assert scriba.info(projection).status == status


@pytest.mark.usefixtures("looks_never")
@pytest.mark.parametrize("wish", ["one", "many"])
def test_a_replay_is_carried_out_when_it_is_announced(world: World, wish: str) -> None:
    """One letter, or all of them at once."""
    handler = Gate(world)
    (position,) = world.append("a", bad=True)
    with running(world, world.projection(handler)) as projection:
        wait_until(world.letters, what="the letter")
        handler.is_mended = True
        letters = scriba.dead_letters(projection)
        if wish == "one":
            scriba.replay(letters.get())
        else:
            scriba.replay_all(letters)
        world.wait_applied(1)

    assert world.applied() == [position]


@pytest.mark.usefixtures("looks_never")
def test_an_ear_that_lost_its_connection_hears_again(world: World) -> None:
    """It listens, then lets everybody look: what was wished meanwhile is followed."""
    with running(world, world.projection()) as projection:
        wait_until(ears, what="the ear")
        [ear] = ears()
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_terminate_backend(%s)", [ear])

        scriba.pause(projection, wait=True)

        wait_until(lambda: ears() not in ([], [ear]), what="the new ear")


def test_one_ear_serves_all_projections_of_a_process_and_goes_with_the_last(world: World) -> None:
    """Each looks only for its own wishes; afterwards no connection is left."""
    from scriba.engine.runner import Fleet

    fleets = [Fleet([world.projection(version=1), world.projection(version=2)]), Fleet([world.projection(version=3)])]
    for fleet in fleets:
        fleet.start()
    try:
        wait_until(ears, what="the ear")
        assert len(ears()) == 1
    finally:
        for fleet in fleets:
            fleet.stop()
            wait_until(lambda: fleet.wait(0.05), what="the end")  # noqa: B023 - waited for here
    wait_until(lambda: not ears(), what="the end of its connection")


@pytest.mark.case("D11")
@pytest.mark.parametrize("reason", ["setting", "pooler"])
def test_without_an_ear_wishes_are_followed_all_the_same(
    world: World, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looking is what everything rests on: the setting, and a pooler in transaction mode, switch the ear off."""
    monkeypatch.setattr(listening, "is_pooled", lambda _connection: reason == "pooler")
    with override_settings(SCRIBA={**settings.SCRIBA, "listen": reason == "pooler"}):
        with running(world, world.projection()) as projection:
            scriba.pause(projection, wait=True)
            assert ears() == []


# --- wait_for -----------------------------------------------------------------------------------------------------


@pytest.fixture
def sleeps_until_woken(monkeypatch: pytest.MonkeyPatch, looks_never: None) -> None:
    """Neither side looks by itself."""
    for step in ("FIRST_STEP_S", "LONGEST_STEP_S", "LONGEST_HEARD_STEP_S"):
        monkeypatch.setattr(waiting, step, NEVER_S)


@contextmanager
def waiter(world: World, wait: Callable[[], Any]) -> Iterator[list[Any]]:
    """Somebody in `wait` whom the owner has been told of; at the end it must have returned or raised."""
    answers: list[Any] = []

    def work() -> None:
        try:
            answers.append(wait())
        except Exception as error:
            answers.append(error)
        finally:
            connections.close_all()

    threading.Thread(target=work, daemon=True).start()
    wait_until(lambda: world.state.waited_at is not None, what="somebody to wait")
    yield answers
    wait_until(lambda: answers, what="the one who waits to be woken")


@pytest.mark.usefixtures("sleeps_until_woken")
def test_a_reader_is_woken_by_the_commit_of_its_event(world: World) -> None:
    """It looks once, finds nothing, and sleeps for an hour unless it is told."""
    handler = Gate(world, is_open=False)
    (position,) = world.append("a")
    with running(world, world.projection(handler)) as projection:
        with waiter(world, lambda: scriba.wait_for(projection, position=position, timeout=NEVER_S)) as answers:
            assert answers == []
            handler.opened.set()

    assert answers == [position]


@pytest.mark.usefixtures("sleeps_until_woken")
def test_a_reader_is_woken_by_the_watermark(world: World) -> None:
    """An event that the source leaves out is settled when the watermark has passed what came before it."""
    handler = Gate(world, is_open=False)
    world.append("a", type="Wanted")
    (unwanted,) = world.append("b", type="Unwanted")
    projection = world.projection(handler, event_types=frozenset({"Wanted"}))
    with running(world, projection):
        with waiter(world, lambda: scriba.wait_for(projection, position=unwanted, timeout=NEVER_S)) as answers:
            handler.opened.set()

    assert answers == [unwanted]


@pytest.mark.usefixtures("sleeps_until_woken")
@pytest.mark.parametrize(("on_failure", "raised"), [("continue", EventDeadLettered), ("halt", ProjectionHalted)])
def test_a_reader_is_woken_by_bad_news(world: World, on_failure: str, raised: type[Exception]) -> None:
    """A dead letter or a halt ends the waiting, too."""
    handler = Gate(world, is_open=False)
    (position,) = world.append("a", bad=True)
    projection = world.projection(handler, on_failure=on_failure)
    with running(world, projection):
        with waiter(world, lambda: scriba.wait_for(projection, position=position, timeout=NEVER_S)) as answers:
            handler.opened.set()

    assert isinstance(answers[0], raised)


def test_nothing_is_announced_while_nobody_waits(world: World) -> None:
    """A NOTIFY takes a lock of the whole server at its commit: batches must not pay for it."""
    with psycopg.connect(database_url(), autocommit=True) as listener:
        listener.execute("LISTEN scriba_settled")

        positions = world.append_many(300)
        world.run(world.projection(batch_size=10))
        heard = list(listener.notifies(timeout=0))

    assert heard == []
    world.check(positions)


@pytest.mark.parametrize("deaf", ["setting", "pooler"])
def test_who_cannot_listen_polls(world: World, deaf: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read-your-writes needs no notice, only more looks."""
    monkeypatch.setattr(listening, "is_pooled", lambda _connection: deaf == "pooler")
    with (
        override_settings(SCRIBA={**settings.SCRIBA, "listen": deaf == "pooler"}),
        running(world, world.projection()) as projection,
    ):
        ear = BorrowedEar("default", "scriba_settled", str(world.identity))
        assert ear.is_deaf
        assert not ear.wait(0.0)
        (position,) = world.append("a")
        assert scriba.wait_for(projection, position=position) == position


def test_the_connection_of_the_one_who_waits_is_given_back_as_it_was(world: World) -> None:
    """A request's connection listens to nothing afterwards, and keeps no handler; a pool would hand it on."""
    with pytest.raises(scriba.WaitTimeout):
        scriba.wait_for(world.projection(), position=1, timeout=0.02)

    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_listening_channels()")
        assert cursor.fetchall() == []
    assert connection.connection._notify_handlers == []


def test_only_the_own_payload_wakes(world: World) -> None:
    """Another projection's progress is nothing to look at."""
    ear = BorrowedEar("default", "scriba_settled", str(world.identity))
    try:
        world.execute("SELECT pg_notify('scriba_settled', 'another:1')")
        assert not ear.wait(0.02)
        world.execute("SELECT pg_notify('another_channel', %s)", str(world.identity))
        assert not ear.wait(0.0)
        world.execute("SELECT pg_notify('scriba_settled', %s)", str(world.identity))
        assert ear.wait(10.0)
    finally:
        ear.close()
