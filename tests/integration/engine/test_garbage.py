"""What a batch has held is free when it is over, well or badly: the cyclic collector counts objects, not megabytes."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from scriba.engine.circuit import Circuit
from scriba.engine.pipeline import LaneRun
from scriba.engine.reader import keyed
from scriba.engine.replay import Replayer
from scriba.event import Event
from scriba.protocols import Lease, LetterWish
from scriba.results import Insert
from scriba.retry import RetryPolicy
from scriba.targets import OrmTarget
from scriba.targets.orm import OrmBatch
from tests.support.engine import settle_all
from tests.support.world import World
from tests.testapp.models import Row

FIRST = 10_000_000  #: beyond every position of the event table


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[weakref.ref[Any]]]:
    """What was made for each batch, while nothing is collected but by its count of references."""
    made: list[weakref.ref[Any]] = []
    init = OrmBatch.__init__

    def noted(batch: OrmBatch, *args: Any, **options: Any) -> None:
        made.append(weakref.ref(batch))
        init(batch, *args, **options)

    monkeypatch.setattr(OrmBatch, "__init__", noted)
    monkeypatch.setattr(logging.getLogger("scriba"), "disabled", True)  # the test's own log keeps what it is shown
    gc.collect()
    gc.disable()
    yield made
    gc.enable()


def failing(how: str, written: list[weakref.ref[Any]]) -> Any:
    """Return a handler of rows, of which the one for every tenth position fails."""

    def handler(data: Any, meta: Any) -> Insert:
        del data
        is_bad = meta.position % 10 == 3
        row = Row(id="taken" if is_bad and how == "refused" else str(meta.position))
        written.append(weakref.ref(row))
        if is_bad and how == "swallowed":
            Row.objects.create(id="taken")
        if how == "all" or (is_bad and how == "raised"):
            raise ValueError(meta.position)
        return Insert(row)

    return handler


@pytest.mark.parametrize("how", ["well", "raised", "all", "refused", "swallowed"])
def test_a_batch_leaves_nothing_to_the_collector(world: World, how: str, batches: list[weakref.ref[Any]]) -> None:
    """A good one, dead letters of a handler's errors, and verdicts after an error of the database."""
    written: list[weakref.ref[Any]] = []
    world.run(world.projection())
    Row.objects.create(id="taken")
    retry = RetryPolicy(attempts=2, backoff=(0.0,))
    projection, segment = world.projection(failing(how, written), retry=retry), world.segment
    writer = OrmTarget().open(projection.identity)
    run = LaneRun(projection, writer, Lease(segment.pk, segment.owner, segment.epoch), 0, Circuit(), ceiling=-1)
    try:
        for start in (FIRST, FIRST + 20, FIRST + 40):
            items = [keyed(projection, Event(start + n, f"s{n}", "Happened", f"id-{n}", {"n": n})) for n in range(20)]
            settle_all(run, items)
            assert not any(reference() for reference in written)
    finally:
        writer.close()
        Row.objects.all().delete()

    assert len(written) >= 60
    assert not any(reference() for reference in batches)
    assert len(world.letters()) == {"well": 0, "all": 60}.get(how, 6)


def test_a_replay_that_fails_leaves_nothing_to_the_collector(world: World, batches: list[weakref.ref[Any]]) -> None:
    """Thousands of letters may be replayed before their handler is right."""
    written: list[weakref.ref[Any]] = []
    world.append("a")
    projection = world.projection(failing("all", written))
    world.run(projection)
    (letter,) = world.letters()
    del written[:], batches[:]
    subscription, segment = projection.source.subscribe(projection.identity, []), world.segment
    writer = OrmTarget().open(projection.identity)
    replayer = Replayer(projection, writer, Lease(segment.pk, segment.owner, segment.epoch))
    try:
        wish = LetterWish(letter.pk, letter.position, "", "a", "replay", "somebody", False)
        replayer.carry_out(wish, subscription)
    finally:
        writer.close()
        subscription.close()

    assert world.letters()[0].attempts == 2
    assert written
    assert not any(reference() for reference in [*written, *batches])
