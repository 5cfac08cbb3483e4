"""Replays and discards travel through the key's own lane: order kept, nothing stranded, the live cursor untouched."""

from __future__ import annotations

import random
from typing import Any

import pytest

from scriba.results import Insert
from scriba.retry import RetryPolicy
from scriba.testing.memory import MemoryTarget
from tests.support.engine import Running, events, insert_position, make_projection, memory_world
from tests.support.waiting import wait_until


class Handler:
    """Fails for the positions in `bad`, and remembers which calls were replays."""

    def __init__(self, *bad: int) -> None:
        self.bad = set(bad)
        self.replayed: list[int] = []

    def __call__(self, data: Any, meta: Any) -> Insert:
        if meta.replaying:
            self.replayed.append(meta.position)
        if meta.position in self.bad:
            raise ValueError(f"cannot do {meta.position}")
        return insert_position(data, meta)


def applied(target: MemoryTarget, stream: str) -> list[int]:
    return [write.obj[1] for write in target.log if write.obj[0] == stream]


def statuses(target: MemoryTarget) -> dict[int, str]:
    return {at: letter.status for at, letter in sorted(target.letters.items())}


@pytest.mark.case("B14")
def test_a_parked_key_is_released_in_order_by_a_replay() -> None:
    """Event 3 fails, 4..9 of its key are parked, others flow; after the fix the replay applies 3..9 in order, and
    what arrives meanwhile comes last."""
    handler = Handler(3)
    source, target, state = memory_world(*events("a", "b", "a", "a", "b", "a", "a", "b", "a"))
    with Running(make_projection(handler, source, target, on_failure="park", parallelism=2), state):
        wait_until(lambda: len(target.letters) == 5, what="one open, four parked")
        wait_until(lambda: applied(target, "b") == [2, 5, 8], what="the other stream")
        assert statuses(target) == {3: "open", 4: "parked", 6: "parked", 7: "parked", 9: "parked"}
        handler.bad.clear()
        target.wish(3)
        source.append(*events("a", first=10))
        wait_until(lambda: applied(target, "a") == [1, 3, 4, 6, 7, 9, 10], what="the released stream")

    assert set(statuses(target).values()) == {"replayed"}
    assert target.cursors["a"] == 10
    assert handler.replayed[:5] == [3, 4, 6, 7, 9]


@pytest.mark.case("B14", "B15")
@pytest.mark.parametrize("allow_out_of_order", [False, True])
def test_a_parked_event_is_not_applied_before_the_one_it_waits_for(allow_out_of_order: bool) -> None:
    """Whoever wrote the wish on its row: the replayer refuses it and says why; the head's replay applies it in order."""
    handler = Handler(1)
    source, target, state = memory_world(*events("a", "a", "a"))
    with Running(make_projection(handler, source, target, on_failure="park"), state):
        wait_until(lambda: len(target.letters) == 3, what="one open, two parked")
        handler.bad.clear()
        target.wish(2, allow_out_of_order=allow_out_of_order)
        wait_until(lambda: "parked behind letter 1" in target.notes.get(2, ""), what="the refusal")
        assert statuses(target) == {1: "open", 2: "parked", 3: "parked"}
        target.wish(1)
        wait_until(lambda: applied(target, "a") == [1, 2, 3], what="all of them")


@pytest.mark.case("B23")
def test_discarding_one_of_the_middle_releases_nobody() -> None:
    """Those behind it still wait for the head."""
    handler = Handler(1)
    source, target, state = memory_world(*events("a", "a", "a"))
    with Running(make_projection(handler, source, target, on_failure="park"), state):
        wait_until(lambda: len(target.letters) == 3, what="one open, two parked")
        handler.bad.clear()
        target.wish(2, "discard")
        wait_until(lambda: statuses(target) == {1: "open", 2: "discarded", 3: "parked"}, what="the discard")
        assert not target.wishes
        target.wish(1)
        wait_until(lambda: applied(target, "a") == [1, 3], what="the others")

    assert target.notes[3] == ""


@pytest.mark.case("B15")
def test_a_replay_whose_stream_has_moved_on_is_refused_unless_allowed() -> None:
    """Applying 1 after 2 breaks the stream's order: refused with the reason, applied when told so, cursor untouched."""
    handler = Handler(1)
    source, target, state = memory_world(*events("a", "a"))
    with Running(make_projection(handler, source, target), state):
        wait_until(lambda: target.cursors.get("a") == 2, what="both settled")
        handler.bad.clear()
        target.wish(1)
        wait_until(lambda: "refused" in target.notes.get(1, ""), what="the refusal")
        assert statuses(target) == {1: "open"}
        target.wish(1, allow_out_of_order=True)
        wait_until(lambda: statuses(target) == {1: "replayed"}, what="the replay")

    assert applied(target, "a") == [2, 1]
    assert target.cursors["a"] == 2
    assert target.counters.applied == 1


@pytest.mark.case("B16")
def test_a_replay_that_fails_again_stays_open_with_the_new_error() -> None:
    """Attempts count up, the new error is stored, and the wish is gone."""
    handler = Handler(1)
    source, target, state = memory_world(*events("a"))
    with Running(make_projection(handler, source, target, retry=RetryPolicy(2, (0.0,))), state):
        wait_until(lambda: 1 in target.letters, what="the letter")
        target.wish(1)
        wait_until(lambda: target.letters[1].attempts == 3, what="the third attempt")

    assert statuses(target) == {1: "open"}
    assert not target.wishes


@pytest.mark.case("B23")
def test_discarding_the_head_of_a_parked_key_releases_its_followers() -> None:
    """The head is given up for good; those behind it are applied in order."""
    source, target, state = memory_world(*events("a", "a", "a"))
    with Running(make_projection(Handler(1), source, target, on_failure="park"), state):
        wait_until(lambda: len(target.letters) == 3, what="one open, two parked")
        target.wish(1, "discard")
        wait_until(lambda: applied(target, "a") == [2, 3], what="the followers")

    assert statuses(target) == {1: "discarded", 2: "replayed", 3: "replayed"}


@pytest.mark.case("B23")
@pytest.mark.parametrize("seed", range(5))
def test_replays_while_the_lane_is_busy_keep_order_and_strand_nothing(seed: int) -> None:
    """Random arrivals, failures, replays and discards on one key: applied in order, and in the end nothing is held."""
    chance = random.Random(seed)
    handler = Handler(*chance.sample(range(1, 41), 8))
    source, target, state = memory_world()
    with Running(make_projection(handler, source, target, on_failure="park", batch_size=3), state):
        position = 0
        while position < 40:
            count = min(chance.randint(1, 6), 40 - position)
            source.append(*events(*["a"] * count, first=position + 1))
            position += count
            if chance.random() < 0.5:
                wait_until(lambda: target.cursors.get("a") == position, what="the arrivals")  # noqa: B023
                head = next((at for at, status in statuses(target).items() if status == "open"), None)
                if head is not None:
                    handler.bad.discard(head)
                    target.wish(head, chance.choice(["replay", "discard"]))
        handler.bad.clear()

        def nothing_is_held() -> bool:
            with target.lock:
                held = {at: status for at, status in statuses(target).items() if status in {"open", "parked"}}
                for at, status in held.items():
                    if status == "open" and at not in target.wishes:
                        target.wish(at)
            return target.cursors.get("a") == 40 and not held

        wait_until(nothing_is_held, timeout=30, what="nothing held any more")

    positions = applied(target, "a")
    assert positions == sorted(set(positions))
    discarded = {at for at, status in statuses(target).items() if status == "discarded"}
    assert set(positions) | discarded == set(range(1, 41))
