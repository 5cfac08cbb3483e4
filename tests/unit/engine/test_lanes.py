"""Queues keep what is unsettled, and the watermark never leads."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scriba.engine.lanes import BATCH_BYTES, MOST_LINGER_S, Lane, Routed, Watermark, linger_after
from scriba.event import Event


def item(position: int, size: int = 0) -> Routed:
    return Routed(Event(position, "s", "Happened", size=size), "s")


def test_taken_events_stay_until_they_are_settled() -> None:
    """A worker that dies leaves its events where its successor finds them."""
    lane = Lane(0, 10)
    lane.put([item(1), item(2), item(3)], 0)

    assert lane.take(2) == ([], [item(1), item(2)])
    assert lane.take(2) == ([], [item(1), item(2)])
    lane.settle(1)
    assert lane.take(2) == ([], [item(2), item(3)])
    assert lane.oldest == 2


def test_a_full_lane_refuses_and_a_settled_one_accepts_again() -> None:
    """Back-pressure: nothing is put while the lane holds its capacity."""
    lane = Lane(0, 2)
    assert lane.put([item(1), item(2), item(3)], 0)
    assert not lane.put([item(4)], 0)
    lane.settle(2)
    assert lane.put([item(4)], 0)
    assert len(lane) == 2


def test_a_position_is_put_once() -> None:
    """A page that is read again after a lost connection brings nothing that is here, or has been here."""
    lane = Lane(0, 10)
    lane.put([item(1), item(3)], 0)
    lane.settle(1)
    assert lane.put([item(1), item(3), item(4)], 0)
    assert lane.put([item(3)], 0)

    assert lane.take(10) == ([], [item(3), item(4)])


def test_bytes_in_flight_follow_put_and_settle() -> None:
    """What bounds memory is counted exactly."""
    lane = Lane(0, 10)
    lane.put([item(1, 100), item(2, 50)], 0)
    lane.settle(1)
    assert lane.bytes == 50


def test_closing_wakes_a_waiting_worker_and_hands_out_nothing_more() -> None:
    """What is queued when a lane closes was never handled."""
    lane = Lane(0, 10)
    taken: list[object] = []
    worker = threading.Thread(target=lambda: taken.append(lane.take(5)))
    worker.start()
    lane.close()
    worker.join(5)
    lane.put([item(1)], 0)

    assert taken == [None]
    assert lane.take(5) is None


def test_large_events_make_a_batch_smaller_and_never_empty() -> None:
    """A batch holds as many events as its bytes allow, and one that is too large goes alone."""
    half = BATCH_BYTES // 2
    lane = Lane(0, 10)
    lane.put([item(1, half), item(2, half), item(3, 1), item(4, 2 * BATCH_BYTES), item(5)], 0)

    taken = []
    while len(lane):
        _, items = lane.take(10) or ([], [])
        taken.append([routed.event.position for routed in items])
        lane.settle(len(items))

    assert taken == [[1, 2], [3], [4], [5]]


def test_an_event_that_comes_alone_is_handed_out_at_once() -> None:
    """After a commit that left nothing waiting, nobody lingers, whatever that commit took."""
    assert linger_after(took_s=9.0, settled=1, waiting=0) == 0.0


def test_commits_that_come_back_to_back_linger_for_less_than_they_take() -> None:
    """What lingering adds to a latency is a part of the commit it waited for already, and bounded."""
    assert linger_after(took_s=0.002, settled=1, waiting=3) == 0.001
    assert linger_after(took_s=60.0, settled=1, waiting=3) == MOST_LINGER_S


def test_nobody_lingers_before_a_batch_that_did_not_commit() -> None:
    """A retry has its own waits."""
    assert linger_after(took_s=0.002, settled=0, waiting=3) == 0.0


def test_lingering_ends_when_the_batch_is_full() -> None:
    """Company that arrives in time goes into the same batch, and a full batch waits no longer."""
    lane = Lane(0, 10)
    lane.put([item(1)], 0)
    taken: list[object] = []
    worker = threading.Thread(target=lambda: taken.append(lane.take(2, linger_s=60.0)))
    worker.start()
    lane.put([item(2)], 0)
    worker.join(10)

    assert taken == [([], [item(1), item(2)])]


@pytest.mark.parametrize("sizes", [[BATCH_BYTES // 2, BATCH_BYTES // 2], [3 * BATCH_BYTES]])
def test_nobody_lingers_over_a_batch_that_has_its_bytes(sizes: list[int]) -> None:
    """Large events fill a batch long before their number does: whatever comes could not go with it."""
    lane = Lane(0, 10)
    lane.put([item(position, size) for position, size in enumerate(sizes)], 0)
    taken: list[object] = []
    worker = threading.Thread(target=lambda: taken.append(lane.take(10, linger_s=60.0)), daemon=True)
    worker.start()
    worker.join(10)

    assert len(taken) == 1


def test_jobs_are_handed_out_before_events_and_without_any() -> None:
    """A replay need not wait for the next event."""
    lane = Lane(0, 10)
    lane.post("replay")
    assert lane.take(5) == (["replay"], [])


@pytest.mark.case("A20")
@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=40),
    st.lists(st.integers(0, 3), max_size=60),
    st.integers(1, 7),
)
def test_the_watermark_never_passes_an_unsettled_event(routes: list[int], settles: list[int], page: int) -> None:
    """Whatever the interleaving of routing and settling: below the watermark everything is settled, and once all
    is, it is the last position."""
    lanes = [Lane(number, 1000) for number in range(4)]
    watermark = Watermark(lanes, -1)
    unsettled: set[int] = set()
    queues: list[list[int]] = [[], [], [], []]
    pending = list(settles)
    last = -1
    for position, lane in enumerate(routes):
        lanes[lane].put([item(position)], 0)
        unsettled.add(position)
        queues[lane].append(position)
        if position % page == page - 1:
            watermark.routed(position)
        if pending and queues[(chosen := pending.pop())]:
            unsettled.discard(queues[chosen].pop(0))
            lanes[chosen].settle(1)
        value = watermark.value()
        assert all(position > value for position in unsettled)
        assert value >= last
        last = value
    watermark.routed(len(routes) - 1)
    for number, queue in enumerate(queues):
        lanes[number].settle(len(queue))
    assert watermark.value() == len(routes) - 1


def test_a_lane_that_is_closed_while_its_worker_lingers_hands_nothing_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is queued was never handled: a stop, a pause or a lost lease ends the wait, it does not begin a batch."""
    lane = Lane(0, 10)
    lane.put([item(1)], 0)
    wait_for = lane._changed.wait_for

    def closing(predicate: Callable[[], object], timeout: float | None = None) -> object:
        if timeout is not None:
            lane.close()
        return wait_for(predicate, timeout)

    monkeypatch.setattr(lane._changed, "wait_for", closing)
    assert lane.take(5, linger_s=30.0) is None
