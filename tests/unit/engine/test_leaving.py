"""What a term leaves behind when it closes in the middle of something."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from scriba.engine.lanes import Lane, Routed
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
