"""A backlog that nobody wants, passed by a running projection: what must hold for every source that filters (A19)."""

from __future__ import annotations

import itertools
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from scriba import wait_for
from scriba.info import info
from scriba.registry import _remember, forget
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from scriba.protocols import Page
    from scriba.registry import Projection
    from tests.support.world import World

__all__ = ["MOST_MEMORY", "Held", "backlog_is_passed", "memory"]

MOST_MEMORY = 2_000_000  #: bytes: a few pages of anything; what is left out would be fifty times as much


class Held:
    """Records the pages of one kind of subscription, and holds back the fetch after `passing` of them until opened."""

    def __init__(self, monkeypatch: Any, kind: type, passing: int) -> None:
        self.pages: list[Page] = []
        self.passing = passing
        self.gate = threading.Event()
        fetch = kind.fetch  # type: ignore[attr-defined]

        def held(subscription: Any, limit: int, timeout: float) -> Page:
            if len(self.pages) >= self.passing:
                self.gate.wait(60)
            page: Page = fetch(subscription, limit, timeout)
            self.pages.append(page)
            return page

        monkeypatch.setattr(kind, "fetch", held)


@contextmanager
def memory() -> Iterator[Callable[[], int]]:
    """Yield what says how many bytes Python has needed at most since the beginning."""
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    try:
        yield lambda: tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


def backlog_is_passed(
    world: World, projection: Projection, held: Held, append_wanted: Callable[[], int], *, most_step: int
) -> None:
    """The watermark moves while nothing is handled, lag says how much is left, and a restart reads none of it again."""
    wanted = append_wanted()
    _remember(projection)
    try:
        with world.running(projection):
            wait_until(lambda: len(held.pages) == held.passing, what="the pages before the gate")
            midway = held.pages[-1].scanned
            assert 0 < midway < wanted
            wait_until(lambda: info(projection).watermark == midway, what="the watermark of what was left out")
            wait_until(lambda: info(projection).head == wanted, what="the head")
            assert info(projection).lag_events == wanted - midway
            assert set(info(projection).counters.values()) <= {0}
            held.gate.set()
            assert wait_for(projection, position=wanted, timeout=120) == wanted
            wait_until(lambda: info(projection).lag_events == 0, what="the end of the lag")
        steps = [0, *(page.scanned for page in held.pages)]
        strides = [after - before for before, after in itertools.pairwise(steps)]
        assert 0 <= min(strides) <= max(strides) <= most_step, strides
        assert world.applied() == [wanted]
        assert sum(info(projection).counters.values()) == 1

        held.pages.clear()
        with world.running(projection):
            last = append_wanted()
            assert wait_for(projection, position=last, timeout=60) == last
        assert min(page.scanned for page in held.pages) >= wanted, "the restart has read what was passed before"
        assert world.applied() == [wanted, last]
    finally:
        forget(projection)
