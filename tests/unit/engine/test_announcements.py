"""Who waits for an event is woken by the owner: only then, and never in vain."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from scriba.conf import Settings
from scriba.engine.partitioner import lane_of
from scriba.protocols import Orders, Status, Wish
from scriba.results import Insert
from tests.support.engine import Running, events, insert_position, make_projection, memory_world
from tests.support.waiting import wait_until

WAITED_FOR = Orders(Wish.RUNNING, waited_for=True)


def test_nobody_is_told_anything_while_nobody_waits() -> None:
    """An announcement costs every other transaction of the server something."""
    source, target, state = memory_world(*events(*"abcabc"))

    with Running(make_projection(insert_position, source, target), state, until_caught_up=True) as coordinator:
        assert coordinator.ended.wait(10)

    assert len(target.log) == 6
    assert state.announcements == 0


def test_an_idle_owner_answers_the_one_who_waits() -> None:
    """What was committed before it knew was not announced: its answer makes the one who waits look again."""
    source, target, state = memory_world(*events("a"))
    with Running(make_projection(insert_position, source, target), state) as coordinator:
        wait_until(lambda: state.resume.watermark == 1, what="everything settled and saved")
        state.orders = WAITED_FOR
        coordinator.look()

        wait_until(lambda: state.announcements == 1, what="the answer")


def test_each_commit_is_announced_while_others_are_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cursor of one stream has moved although the watermark has not: whoever waits for that one can go on."""
    monkeypatch.setattr("scriba.engine.coordinator.WISH_EVERY_S", 3_600.0)
    release = threading.Event()

    def handler(data: Any, meta: Any) -> Insert:
        if meta.stream_id == "slow":
            assert release.wait(10)
        return insert_position(data, meta)

    source, target, state = memory_world(*events("slow"))
    state.orders = WAITED_FOR
    with Running(make_projection(handler, source, target, parallelism=8), state):
        wait_until(lambda: state.announcements, what="the answer")
        others = [name for name in "abcdefgh" if lane_of(name, 8) != lane_of("slow", 8)]
        for position, stream in enumerate(others, 2):
            before = state.announcements
            source.append(*events(stream, first=position))
            wait_until(lambda: stream in target.cursors and state.announcements > before, what="its announcement")  # noqa: B023
        assert "slow" not in target.cursors
        release.set()


def test_a_standby_takes_over_when_it_is_told_that_the_owner_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It need not wait until it would look again by itself, nor until a lease runs out."""
    monkeypatch.setattr("scriba.engine.coordinator.STANDBY_EVERY_S", 3_600.0)
    source, target, state = memory_world(*events("a"))
    state.owner, state.expires_at = "another", float("inf")
    settings = Settings(lease_s=60.0)
    with Running(make_projection(insert_position, source, target), state, settings=settings) as coordinator:
        wait_until(lambda: coordinator.snapshot().status is Status.STANDBY, what="standby")
        state.owner, state.expires_at = "", 0.0
        coordinator.look()

        wait_until(lambda: coordinator.snapshot().status is Status.RUNNING, what="the takeover")
