"""The charts' samples: taken by the owner while it owns, at once and then now and then."""

from __future__ import annotations

import pytest

from scriba.engine import reporting
from tests.support.engine import Running, events, insert_position, make_projection, memory_world
from tests.support.waiting import wait_until


def test_an_owner_notes_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first note comes at once, the later ones follow the watermark."""
    monkeypatch.setattr(reporting, "SAMPLE_EVERY_S", 0.01)
    source, target, state = memory_world(*events("a", "b", "c"))

    with Running(make_projection(insert_position, source, target), state):
        wait_until(lambda: state.samples and state.samples[-1].watermark == 3, what="a sample at the head")

    assert len(state.samples) > 1


def test_samples_are_far_apart() -> None:
    """They are for an hour's chart: a projection that runs for a moment leaves one."""
    source, target, state = memory_world(*events("a", "b", "c"))

    with Running(make_projection(insert_position, source, target), state) as running:
        wait_until(lambda: running.snapshot().watermark == 3, what="everything settled")

    assert len(state.samples) == 1
