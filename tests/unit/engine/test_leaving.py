"""What a term leaves behind when it closes, and what its source is told: a source may be shared with another system."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from scriba.engine.lanes import Lane, Routed
from scriba.engine.reporting import Reporter
from tests.support.engine import Running, events, insert_position, make_projection, memory_world
from tests.support.waiting import wait_until


@pytest.mark.case("A1", "A20")
def test_a_page_that_is_not_routed_when_the_term_closes_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lanes are empty, but the page was scanned: the watermark that is left behind must not count it as settled."""
    monkeypatch.setattr("scriba.engine.reader.PAGE", 10)
    source, target, state = memory_world(*events(*"abab" * 5))
    projection = make_projection(insert_position, source, target)
    put = Lane.put
    leaving = Running(projection, state, owner="leaving")

    def refuse(lane: Lane, items: Sequence[Routed], timeout: float) -> bool:
        if items[0].event.position <= 10:
            return put(lane, items, timeout)
        wait_until(lambda: len(target.log) == 10, what="the first page, settled")
        leaving.coordinator.stop()
        reader: Any = leaving.coordinator._term.reader if leaving.coordinator._term else None
        wait_until(lambda: reader is None or reader._closing.is_set(), what="the term to close")
        return False

    monkeypatch.setattr(Lane, "put", refuse)
    with leaving as coordinator:
        assert coordinator.ended.wait(20)
    assert state.resume.watermark == 10

    monkeypatch.setattr(Lane, "put", put)
    with Running(projection, state, owner="next", until_caught_up=True) as coordinator:
        assert coordinator.ended.wait(20)
    assert sorted(write.obj[1] for write in target.log) == list(range(1, 21))


def test_the_source_is_told_the_last_watermark_when_a_term_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when nothing was saved before the end: whoever goes on from the source's own checkpoint begins there."""
    monkeypatch.setattr(Reporter, "_save_watermark", lambda *_: None)
    source, target, state = memory_world(*events(*"abc"))
    with Running(make_projection(insert_position, source, target), state):
        wait_until(lambda: len(target.log) == 3, what="all events")

    assert state.resume.watermark == 3
    assert source.acked[-1] == 3


@pytest.mark.case("A10")
def test_what_a_broken_connection_did_not_carry_is_told_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The source learns the watermark over the next connection, although nothing new has come."""
    source, target, state = memory_world(*events(*"abc"))
    subscribe, failures = source.subscribe, iter([ConnectionError("cut")])

    def fragile(identity: Any, shards: Any) -> Any:
        subscription = subscribe(identity, shards)
        ack = subscription.ack

        def tell(watermark: int, partition: str = "") -> None:
            for failure in failures if watermark == 3 else ():
                raise failure
            ack(watermark, partition)

        subscription.ack = tell  # type: ignore[method-assign]
        return subscription

    monkeypatch.setattr(source, "subscribe", fragile)
    with Running(make_projection(insert_position, source, target), state):
        wait_until(lambda: source.acked[-1:] == [3], what="the source to learn the watermark")
        assert next(failures, None) is None


@pytest.mark.case("A22")
def test_what_another_system_has_settled_is_not_handled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The floor of a shared subscription: what was handed out below it, perhaps before it was known, counts as dedup."""
    source, target, state = memory_world(*events(*"abcde"))
    subscribe = source.subscribe

    def shared(identity: Any, shards: Any) -> Any:
        subscription: Any = subscribe(identity, shards)
        subscription.floor = lambda: 3
        return subscription

    monkeypatch.setattr(source, "subscribe", shared)
    with Running(make_projection(insert_position, source, target), state, until_caught_up=True) as coordinator:
        assert coordinator.ended.wait(20)

    assert sorted(write.obj[1] for write in target.log) == [4, 5]
    assert (target.counters.applied, target.counters.deduplicated) == (2, 3)
    assert state.resume.watermark == 5
