"""Dead letters from outside: looking at them, and wishing that they be replayed or discarded."""

from __future__ import annotations

import threading
from typing import Any

import psycopg
import pytest
from django.db import connections, transaction

import scriba
from scriba.exceptions import EventDeadLettered, InvalidState, WaitTimeout
from scriba.models import DeadLetter, Position
from scriba.results import Insert
from tests.support.processes import database_url
from tests.support.waiting import wait_until
from tests.support.world import World
from tests.testapp.models import Applied


def make_letter(world: World, position: int = 3, **columns: Any) -> DeadLetter:
    return DeadLetter.objects.create(
        projection_name=world.name, projection_version=1, position=position, stream_id="a", **columns
    )


def test_letters_are_listed_by_position_and_filtered_like_any_queryset(world: World) -> None:
    """Of one projection and version, in the order of the events."""
    for position, kind in ((9, "ValueError"), (3, "commit:23505 (unique)"), (5, "ValueError")):
        make_letter(world, position, error_kind=kind)
    DeadLetter.objects.create(projection_name=world.name, projection_version=2, position=1)

    letters = scriba.dead_letters(world.projection())

    assert [letter.position for letter in letters] == [3, 5, 9]
    assert [letter.position for letter in scriba.dead_letters(world.projection(), error_kind="ValueError")] == [5, 9]
    assert letters.filter(error_kind__startswith="commit:").count() == 1


@pytest.mark.parametrize("status", ["open", "parked"])
@pytest.mark.parametrize("wish", ["replay", "discard"])
def test_a_wish_is_recorded_on_the_letters_row(world: World, status: str, wish: str) -> None:
    """Who wishes it and when; the letter itself stays as it is until its lane carries the wish out."""
    letter = make_letter(world, status=status)
    with psycopg.connect(database_url(), autocommit=True) as listener:
        listener.execute("LISTEN scriba_wish")

        returned = getattr(scriba, wish)(letter, by="ann")

        assert next(listener.notifies(timeout=10, stop_after=1)).payload == str(world.identity)
    (stored,) = world.letters()
    assert (stored.wish, stored.wish_by, stored.status, stored.allow_out_of_order) == (wish, "ann", status, False)
    assert stored.wished_at is not None
    assert (returned.pk, returned.wish) == (letter.pk, wish)


@pytest.mark.parametrize("status", ["replayed", "discarded"])
@pytest.mark.parametrize("wish", [scriba.replay, scriba.discard])
def test_a_resolved_letter_is_refused(world: World, status: str, wish: Any) -> None:
    """An old copy of the row does not help: the row decides."""
    letter = make_letter(world)
    DeadLetter.objects.update(status=status)

    with pytest.raises(InvalidState) as refused:
        wish(letter)

    assert refused.value.state == status
    assert world.letters()[0].wish == ""


@pytest.mark.case("B15")
def test_of_two_replays_at_the_same_moment_one_is_recorded(world: World) -> None:
    """The other one learns that the letter already waits."""
    letter = make_letter(world)
    barrier, outcomes = threading.Barrier(2), []

    def replay(name: str) -> None:
        mine = DeadLetter.objects.get(pk=letter.pk)
        barrier.wait(10)
        try:
            scriba.replay(mine, by=name)
            outcomes.append("wished")
        except InvalidState as error:
            outcomes.append(error.state)
        finally:
            connections.close_all()

    threads = [threading.Thread(target=replay, args=(name,)) for name in ("ann", "bob")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)

    assert sorted(outcomes) == ["waiting for its replay", "wished"]


@pytest.mark.case("B15")
def test_a_replay_behind_later_applied_events_is_refused_unless_allowed(world: World) -> None:
    """The caller hears at once what its lane would say later; a cursor that only passed dead letters is no obstacle."""
    letter = make_letter(world, 3)
    cursor = Position.objects.create(
        projection_name=world.name, projection_version=1, stream_id="a", position=9, applied_position=4
    )

    with pytest.raises(InvalidState, match="position 4 is applied") as refused:
        scriba.replay(letter)
    assert refused.value.state == "out of order"
    assert world.letters()[0].wish == ""

    assert scriba.replay(letter, allow_out_of_order=True).allow_out_of_order
    DeadLetter.objects.update(wish="", allow_out_of_order=False)
    cursor.applied_position = 2
    Position.objects.filter(stream_id="a").update(applied_position=2)
    assert scriba.replay(letter).wish == "replay"


def test_a_deleted_letter_cannot_be_wished_anything(world: World) -> None:
    """Purged meanwhile."""
    letter = make_letter(world)
    DeadLetter.objects.all().delete()

    with pytest.raises(DeadLetter.DoesNotExist):
        scriba.discard(letter)


def test_waiting_inside_a_transaction_is_refused_before_anything_is_wished(world: World) -> None:
    """The lane could not see the wish."""
    letter = make_letter(world)
    with transaction.atomic(), pytest.raises(transaction.TransactionManagementError):
        scriba.replay(letter, wait=True)
    assert world.letters()[0].wish == ""


def test_a_wish_that_nobody_carries_out_in_time_stays(world: World) -> None:
    """The time limit is the caller's, not the wish's."""
    with pytest.raises(WaitTimeout, match="wish stays"):
        scriba.discard(make_letter(world), wait=True, timeout=0.02)
    assert world.letters()[0].wish == "discard"


# --- with an owner ------------------------------------------------------------------------------------------------


class Flaky:
    """A handler that fails until it is mended."""

    def __init__(self, world: World) -> None:
        self.world, self.is_mended = world, False

    def __call__(self, data: Any, meta: Any) -> Insert:
        if data.get("bad") and not self.is_mended:
            raise ValueError("not mended")
        return Insert(Applied(projection=self.world.name, stream_id=meta.stream_id, position=meta.position))


@pytest.mark.case("B16")
def test_a_replay_that_fails_again_says_so_and_one_that_succeeds_resolves_the_letter(world: World) -> None:
    """``wait=True`` returns when the owner's lane has done it."""
    handler = Flaky(world)
    projection = world.projection(handler)
    (position,) = world.append("a", bad=True)
    with world.running(projection):
        with pytest.raises(EventDeadLettered):
            scriba.wait_for(projection, position=position)
        (letter,) = scriba.dead_letters(projection)

        with pytest.raises(EventDeadLettered, match="failed again") as again:
            scriba.replay(letter, wait=True)
        assert again.value.letter_id == letter.pk
        assert letter.attempts == 2

        handler.is_mended = True
        assert scriba.replay(letter, wait=True, by="ann").status == "replayed"

    assert world.applied() == [position]
    assert world.letters()[0].resolved_by == "ann"


@pytest.mark.case("B14", "B15")
def test_the_owner_keeps_the_order_of_parked_events_whoever_wrote_the_wish(world: World) -> None:
    """By hand, past every function that would have refused it: the row's wish is refused, and says why."""
    handler = Flaky(world)
    projection = world.projection(handler, on_failure="park")
    positions = [*world.append("a", bad=True), *world.append("a", "a")]
    with world.running(projection):
        wait_until(lambda: len(world.letters()) == 3, what="one open, two parked")
        handler.is_mended = True
        head, first, second = world.letters()
        DeadLetter.objects.filter(pk=second.pk).update(wish="replay", allow_out_of_order=True)
        DeadLetter.objects.filter(pk=first.pk).update(wish="discard")
        wait_until(lambda: {letter.wish for letter in world.letters()} == {""}, what="both wishes")
        assert (
            world.letters(pk=second.pk)[0].note
            == f"refused: parked behind letter {head.pk}, whose replay or discard releases it in order"
        )
        assert world.applied() == []

        scriba.replay(head, wait=True)
        world.wait_applied(2)

    assert world.applied() == [positions[0], positions[2]]
    assert [letter.status for letter in world.letters()] == ["replayed", "discarded", "replayed"]


def test_a_discard_is_carried_out_by_the_owner(world: World) -> None:
    """Given up for good, and by whom."""
    projection = world.projection(Flaky(world))
    (position,) = world.append("a", bad=True)
    with world.running(projection):
        with pytest.raises(EventDeadLettered):
            scriba.wait_for(projection, position=position)
        (letter,) = scriba.dead_letters(projection)

        assert scriba.discard(letter, wait=True, by="ann").status == "discarded"
    assert world.applied() == []
