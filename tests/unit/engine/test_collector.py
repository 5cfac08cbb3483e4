"""The collector of a worker's process looks less often, and is left as it was found."""

from __future__ import annotations

import gc
import weakref

from scriba.engine.collector import THRESHOLDS, spared_collector


class Cycle:
    def __init__(self) -> None:
        self.me = self


def test_a_cycle_is_collected_all_the_same():
    """What handlers leave behind in cycles does not stay for ever."""
    with spared_collector():
        left = weakref.ref(Cycle())
        young = [[] for _ in range(3 * THRESHOLDS[0])]
        assert left() is None
    assert young


def test_what_was_loaded_is_not_visited_again():
    """Everything that exists at the beginning is out of the collector's way, and comes back at the end."""
    with spared_collector():
        assert gc.get_freeze_count() > 1_000
    assert gc.get_freeze_count() == 0


def test_the_collector_is_left_as_it_was():
    """A command that is called inside another process changes nothing for good."""
    before = gc.get_threshold()
    with spared_collector():
        assert gc.get_threshold() == THRESHOLDS
    assert gc.get_threshold() == before
