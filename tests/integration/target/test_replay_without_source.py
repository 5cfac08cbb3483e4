"""A letter whose event the source has lost: replayed from what was stored, unless that is not all of it."""

from __future__ import annotations

from typing import Any

import pytest

import scriba
from scriba.exceptions import EventDeadLettered
from tests.support.world import World, note
from tests.testapp.models import Event


@pytest.fixture
def world(transactional_db: None, scratch_name: str) -> World:
    return World(scratch_name)


class Flaky:
    def __init__(self, world: World) -> None:
        self.world, self.is_mended, self.got = world, False, []

    def __call__(self, data: Any, meta: Any) -> Any:
        if not self.is_mended:
            raise ValueError("not mended")
        self.got.append(data)
        return note(self.world.name)(data, meta)


@pytest.mark.parametrize("size", [100, 300_000])
def test_only_a_complete_payload_is_applied_again(world: World, size: int) -> None:
    """A cut one stays open and says why; its handler is not even called."""
    handler = Flaky(world)
    projection = world.projection(handler)
    (position,) = world.append("s", blob="x" * size)
    with world.running(projection):
        with pytest.raises(EventDeadLettered):
            scriba.wait_for(projection, position=position)
        Event.objects.all().delete()
        handler.is_mended = True
        (letter,) = world.letters()
        if size < 1_000:
            scriba.replay(letter, wait=True)
        else:
            with pytest.raises(EventDeadLettered):
                scriba.replay(letter, wait=True)

    (letter,) = world.letters()
    if size < 1_000:
        assert (letter.status, world.applied()) == ("replayed", [position])
        assert handler.got == [{"n": 0, "blob": "x" * size}]
    else:
        assert (letter.status, letter.error_kind) == ("open", "decode:NotRestorable")
        assert "not stored completely" in letter.error_message
        assert (world.applied(), handler.got) == ([], [])
