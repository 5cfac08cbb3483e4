"""Letters whose ordering key could not be worked out: once it can be, the lane of that key replays them, in its order."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from scriba.engine.handling import DecodeFailed
from scriba.engine.lanes import Routed
from scriba.engine.partitioner import lane_of
from scriba.engine.replay import rekeyed
from scriba.event import LONGEST_KEY, Event, Payload, storable_key
from scriba.protocols import StoredLetter
from scriba.results import Insert
from scriba.testing.memory import MemorySource, MemoryState, MemoryTarget
from tests.support.engine import Running, make_projection, memory_world
from tests.support.waiting import wait_until

LANES = 4
X, Y = "customer-1", "customer-3"
assert lane_of(X, LANES) != lane_of("s1", LANES)


class Codec:
    """Cannot read the positions in `broken`: a class that was renamed, a key that is missing."""

    def __init__(self, *broken: int) -> None:
        self.broken = set(broken)

    def decode(self, event: Event) -> Payload:
        if event.position in self.broken:
            raise LookupError(f"no such class at {event.position}")
        return Payload(event.type, event.raw, {})

    def stored(self, event: Event) -> tuple[Any, Any]:
        return event.raw, {}


class Handler:
    """Writes customer and position; fails for the positions in `bad`; remembers which lane called it."""

    def __init__(self, *bad: int) -> None:
        self.bad = set(bad)
        self.lanes: dict[int, str] = {}

    def __call__(self, data: Any, meta: Any) -> Insert:
        if meta.position in self.bad:
            raise ValueError(f"cannot do {meta.position}")
        self.lanes[meta.position] = threading.current_thread().name
        return Insert((data["customer"], meta.position))


def world(codec: Codec, *of: tuple[str, str]) -> tuple[MemorySource, MemoryTarget, MemoryState]:
    """Events, each of a (stream, customer)."""
    return memory_world(
        *(
            Event(position, stream, "Happened", f"id-{position}", {"customer": customer}, codec=codec)
            for position, (stream, customer) in enumerate(of, 1)
        )
    )


def by_customer(handler: Handler, source: MemorySource, target: MemoryTarget, **options: Any) -> Any:
    options = {"parallelism": LANES, **options}
    return make_projection(handler, source, target, partition_by=lambda event: event.data["customer"], **options)


def applied(target: MemoryTarget, customer: str) -> list[int]:
    return [write.obj[1] for write in target.log if write.obj[0] == customer]


def letters(target: MemoryTarget) -> dict[int, tuple[str, str]]:
    return {at: (letter.key, letter.status) for at, letter in sorted(target.letters.items())}


@pytest.mark.case("A21", "B15")
def test_the_lane_of_the_true_key_replays_a_letter_that_had_none() -> None:
    """Filed under its stream, applied by the worker of its key, whose applied position it raises; the other has none."""
    codec, handler = Codec(1), Handler()
    source, target, state = world(codec, ("s1", X))
    with Running(by_customer(handler, source, target), state):
        wait_until(lambda: letters(target) == {1: ("s1", "open")}, what="the letter")
        codec.broken.clear()
        target.wish(1)
        wait_until(lambda: letters(target) == {1: (X, "replayed")}, what="the replay")

    assert applied(target, X) == [1]
    assert target.applied == {X: 1}
    assert target.cursors == {"s1": 1}
    assert handler.lanes[1].endswith(f"lane-{lane_of(X, LANES)}")


@pytest.mark.case("A21", "B15")
def test_a_later_event_of_the_true_key_refuses_the_replay() -> None:
    """As for any other letter, unless the wish allows it; what is refused stays where it was."""
    codec = Codec(1)
    source, target, state = world(codec, ("s1", X), ("s2", X))
    with Running(by_customer(Handler(), source, target), state):
        wait_until(lambda: target.applied == {X: 2} and 1 in target.letters, what="the later one, and the letter")
        codec.broken.clear()
        target.wish(1)
        wait_until(lambda: "later event" in target.notes.get(1, ""), what="the refusal")
        assert letters(target) == {1: ("s1", "open")}
        assert applied(target, X) == [2]
        target.wish(1, allow_out_of_order=True)
        wait_until(lambda: letters(target) == {1: (X, "replayed")}, what="the replay")

    assert applied(target, X) == [2, 1]
    assert target.applied == {X: 2}


@pytest.mark.case("A21")
@pytest.mark.parametrize("allow_out_of_order", [False, True])
def test_an_event_that_came_again_under_its_true_key_is_not_applied_twice(allow_out_of_order: bool) -> None:
    """After a crash and the fix the source may hand it over once more, and nothing knows it under that key."""
    codec = Codec(1)
    source, target, state = world(codec, ("s1", X))
    with Running(by_customer(Handler(), source, target), state):
        wait_until(lambda: 1 in target.letters, what="the letter")
        codec.broken.clear()
        target.applied[X] = 1
        target.wish(1, allow_out_of_order=allow_out_of_order)
        wait_until(lambda: "applied already" in target.notes.get(1, ""), what="the refusal")

    assert applied(target, X) == []


@pytest.mark.case("A21", "B16")
def test_a_stream_too_long_to_be_stored_is_asked_for_the_true_key_like_any_other() -> None:
    """Its letter is under the short form; while there is no other key it stays there, and moves nowhere."""
    codec = Codec(1)
    source, target, _ = world(codec, (LONGEST_KEY * "s" + "1", X))
    projection, (event,) = by_customer(Handler(), source, target), source.events
    stored = StoredLetter(1, event, storable_key(event.stream_id), "open", 1, None)
    waiting = rekeyed(projection, stored, event)
    codec.broken.clear()
    known = rekeyed(projection, stored, event)

    assert waiting is not None
    assert (waiting.key, type(waiting.error)) == (stored.key, DecodeFailed)
    assert known == Routed(event, X)


@pytest.mark.case("A21", "B16")
def test_a_letter_whose_key_is_still_unknown_fails_again_where_it_is() -> None:
    """Nobody is asked to guess: the same kind of error, one attempt more."""
    codec = Codec(1)
    source, target, state = world(codec, ("s1", X))
    with Running(by_customer(Handler(), source, target), state):
        wait_until(lambda: 1 in target.letters, what="the letter")
        target.wish(1)
        wait_until(lambda: target.letters[1].attempts == 2, what="the second attempt")

    assert letters(target) == {1: ("s1", "open")}
    assert target.letters[1].error_kind == "decode:LookupError"


@pytest.mark.case("A21", "B14", "B23")
def test_what_was_parked_behind_a_letter_without_a_key_goes_on_when_that_one_leaves() -> None:
    """They shared a stream only because neither could be read: each is applied under its own key, none is stranded."""
    codec = Codec(1, 2, 3)
    source, target, state = world(codec, ("s1", X), ("s1", Y), ("s1", X))
    with Running(by_customer(Handler(), source, target, on_failure="park"), state):
        wait_until(lambda: len(target.letters) == 3, what="one open, two parked")
        assert letters(target) == {1: ("s1", "open"), 2: ("s1", "parked"), 3: ("s1", "parked")}
        codec.broken.clear()
        target.wish(1)
        wait_until(
            lambda: letters(target) == {1: (X, "replayed"), 2: (Y, "replayed"), 3: (X, "replayed")},
            what="all of them",
        )

    assert applied(target, X) == [1, 3]
    assert applied(target, Y) == [2]
    assert not target.wishes


@pytest.mark.case("A21", "B14")
def test_under_park_a_letter_waits_behind_those_of_its_true_key() -> None:
    """Parked there, and released in order with what came meanwhile."""
    codec, handler = Codec(2), Handler(1)
    source, target, state = world(codec, ("s1", X), ("s2", X), ("s3", X))
    with Running(by_customer(handler, source, target, on_failure="park"), state):
        wait_until(lambda: len(target.letters) == 3, what="two open, one parked")
        assert letters(target) == {1: (X, "open"), 2: ("s2", "open"), 3: (X, "parked")}
        codec.broken.clear()
        target.wish(2)
        wait_until(lambda: "parked behind letter 1" in target.notes.get(2, ""), what="the refusal")
        assert letters(target)[2] == (X, "parked")
        handler.bad.clear()
        target.wish(1)
        wait_until(lambda: applied(target, X) == [1, 2, 3], what="all of them")

    assert not target.wishes


@pytest.mark.case("A21", "B14")
def test_under_park_a_letter_that_fails_again_under_its_true_key_holds_that_key() -> None:
    """From then on it is a letter like any other."""
    codec, handler = Codec(1), Handler(1)
    source, target, state = world(codec, ("s1", X))
    with Running(by_customer(handler, source, target, on_failure="park"), state):
        wait_until(lambda: 1 in target.letters, what="the letter")
        codec.broken.clear()
        target.wish(1)
        wait_until(lambda: letters(target) == {1: (X, "open")} and not target.wishes, what="the second failure")
        source.append(Event(2, "s2", "Happened", "id-2", {"customer": X}, codec=codec))
        wait_until(lambda: letters(target).get(2) == (X, "parked"), what="the next one")
        handler.bad.clear()
        target.wish(1)
        wait_until(lambda: applied(target, X) == [1, 2], what="both")
