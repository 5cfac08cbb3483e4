"""Replays and discards while the lane is at work on the same keys, on a real server."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest

import scriba
from scriba.exceptions import InvalidState
from scriba.models import DeadLetter
from scriba.registry import _remember, forget
from tests.support.waiting import wait_until
from tests.support.world import World, note

KEYS = 50  #: so many interleavings at once
EVENTS = 12  #: of each key


class Interleaving:
    """What happens to one key, in an order of its own: arrivals, failures, wishes."""

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.key = f"k{number}"
        self.chance = random.Random(number)
        self.bad = set(self.chance.sample(range(EVENTS), 3))
        self.arrived: list[int] = []

    def go_on(self) -> None:
        """Do one thing."""
        if len(self.arrived) < EVENTS and self.chance.random() < 0.6:
            count = min(self.chance.randint(1, 4), EVENTS - len(self.arrived))
            numbers = [{"n": len(self.arrived) + more} for more in range(count)]
            self.arrived += [self.world.append(self.key, **number)[0] for number in numbers]
        elif self.chance.random() < 0.7:
            self.wish()

    def wish(self) -> None:
        letter = DeadLetter.objects.filter(projection_name=self.world.name, stream_id=self.key, status="open").first()
        if letter is None:
            return
        if self.chance.random() < 0.6:
            self.bad.discard(letter.event_data["n"])
        try:
            (scriba.replay if self.chance.random() < 0.7 else scriba.discard)(letter)
        except (InvalidState, DeadLetter.DoesNotExist):
            pass  # it waits already, or its lane was faster

    @property
    def is_over(self) -> bool:
        return len(self.arrived) == EVENTS


@pytest.mark.case("B23", "B14")
def test_fifty_random_interleavings_of_a_busy_lane_and_its_replays_strand_nothing(world: World) -> None:
    """Each key is applied in order; what was not given up on is applied once; in the end nothing is held."""
    keys = {each.key: each for each in (Interleaving(world, number) for number in range(KEYS))}

    def handler(data: Any, meta: Any) -> Any:
        if data["n"] in keys[meta.stream_id].bad:
            raise LookupError("told to fail")
        return note(world.name)(data, meta)

    projection = world.projection(handler, on_failure="park", parallelism=3, batch_size=4)
    _remember(projection)
    try:
        with world.running(projection):
            order = random.Random(7)
            while going := [each for each in keys.values() if not each.is_over]:
                order.choice(going).go_on()
            for each in keys.values():
                each.bad.clear()
            wait_until(lambda: _nothing_is_held(world), timeout=60, what="the last replays")
    finally:
        forget(projection)

    discarded = {letter.position for letter in world.letters(status="discarded")}
    for each in keys.values():
        assert world.applied(each.key) == [position for position in each.arrived if position not in discarded]
    assert len(discarded) > KEYS / 10
    assert len(world.letters(status="replayed")) > KEYS / 2
    world.check_conservation(KEYS * EVENTS)


def _nothing_is_held(world: World) -> bool:
    """Replay whatever is still open; say whether everything has come and nothing is open or parked."""
    held = world.letters(status__in=("open", "parked"))
    for letter in held:
        if letter.status == "open" and not letter.wish:
            try:
                scriba.replay(letter)
            except (InvalidState, DeadLetter.DoesNotExist):
                continue
    counters = world.counters()
    return not held and counters["applied"] + counters["dead_lettered"] == KEYS * EVENTS


@pytest.mark.case("B15")
def test_two_replays_of_one_letter_apply_it_once(world: World) -> None:
    """Two operators at the same moment, ten times: one is told that it waits already; the row is there once."""
    broken = threading.Event()
    broken.set()

    def handler(data: Any, meta: Any) -> Any:
        if broken.is_set():
            raise LookupError("not yet")
        return note(world.name)(data, meta)

    projection = world.projection(handler)
    _remember(projection)
    positions = world.append(*(f"s{n}" for n in range(10)))
    try:
        with world.running(projection):
            wait_until(lambda: len(world.letters()) == 10, what="ten letters")
            broken.clear()
            for letter in world.letters():
                _at_the_same_moment(lambda letter=letter: scriba.replay(DeadLetter.objects.get(pk=letter.pk)))
            wait_until(lambda: len(world.letters(status="replayed")) == 10, what="ten replays")
            world.append("another")
            world.wait_applied(11)
    finally:
        forget(projection)

    assert sorted(world.applied())[:10] == positions
    assert len(world.applied()) == 11


def _at_the_same_moment(work: Any) -> None:
    barrier = threading.Barrier(2)

    def run() -> None:
        from django.db import connections

        barrier.wait(10)
        try:
            work()
        except InvalidState:
            pass
        finally:
            connections.close_all()

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
