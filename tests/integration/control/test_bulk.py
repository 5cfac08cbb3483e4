"""One wish for many dead letters: in chunks, guarded row by row, told in numbers."""

from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import connections

import scriba
from scriba import bulk
from scriba.bulk import holders, waiting_behind, wish_all
from scriba.models import Audit, DeadLetter, Position
from tests.support.world import World


def letters(world: World, *positions: int, **columns: Any) -> list[DeadLetter]:
    key = {"projection_name": world.name, "projection_version": 1}
    return [
        DeadLetter.objects.create(**key, position=position, **{"stream_id": f"s{position}", **columns})
        for position in positions
    ]


def of(world: World) -> Any:
    return DeadLetter.objects.filter(projection_name=world.name).order_by("position")


def test_all_are_wished_in_chunks_with_one_entry_in_the_records(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each chunk is committed by itself; the entry counts them together."""
    monkeypatch.setattr(bulk, "AT_ONCE", 2)
    made = letters(world, 1, 2, 3, 4, 5)

    chunks = list(wish_all(of(world), "replay", by="ann"))

    assert [chunk.wished for chunk in chunks] == [[made[0].pk, made[1].pk], [made[2].pk, made[3].pk], [made[4].pk]]
    assert set(of(world).values_list("wish", "wish_by")) == {("replay", "ann")}
    assert [entry.detail for entry in Audit.objects.filter(projection_name=world.name)] == ["5 letters"]


def test_the_public_functions_say_what_became_of_each_letter(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """All letters of a queryset, with the result so far after each chunk; nothing is refused with an exception."""
    monkeypatch.setattr(bulk, "AT_ONCE", 2)
    made = letters(world, 1, 2, 3)
    (parked,) = letters(world, 4, stream_id="s1", status="parked")
    (late,) = letters(world, 5)
    Position.objects.create(
        projection_name=world.name, projection_version=1, stream_id="s5", position=9, applied_position=9
    )
    progress: list[int] = []

    result = scriba.replay_all(
        scriba.dead_letters(world.projection()),
        by="ann",
        on_progress=lambda so_far: progress.append(len(so_far.wished)),
    )

    assert result == ([letter.pk for letter in made], [parked.pk], [late.pk])
    assert progress == [2, 3, 3]
    assert set(of(world).exclude(wish="").values_list("wish", "wish_by")) == {("replay", "ann")}
    assert scriba.replay_all(of(world).filter(pk=late.pk), allow_out_of_order=True).wished == [late.pk]
    assert scriba.discard_all(of(world).filter(pk=parked.pk), by="bob").wished == [parked.pk]
    assert scriba.discard_all(of(world)).refused == [letter.pk for letter in (*made, parked, late)]


def test_a_purge_deletes_what_was_resolved_long_ago(world: World) -> None:
    """Not what is young, nor what nobody has resolved, however old it is."""
    ago = {days: datetime.now(UTC) - timedelta(days=days) for days in (1, 100)}
    letters(world, 1, status="replayed", resolved_at=ago[100])
    letters(world, 2, status="discarded", resolved_at=ago[100])
    letters(world, 3, status="replayed", resolved_at=ago[1])
    letters(world, 4, occurred_at=ago[100])

    deleted = scriba.purge_resolved(scriba.dead_letters(world.projection()), older_than=timedelta(days=90), by="ann")

    assert deleted == 2
    assert [letter.position for letter in of(world)] == [3, 4]


def test_an_interruption_leaves_whole_chunks_and_repeating_does_the_rest(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was wished stays wished, what was not is found again."""
    monkeypatch.setattr(bulk, "AT_ONCE", 2)
    letters(world, 1, 2, 3, 4, 5)

    work = wish_all(of(world), "discard", by="ann")
    next(work)
    work.close()
    assert of(world).filter(wish="discard").count() == 2

    again = list(wish_all(of(world), "discard", by="ann"))
    assert sum(len(chunk.wished) for chunk in again) == 3
    assert sum(len(chunk.refused) for chunk in again) == 2


def test_each_letter_is_guarded(world: World) -> None:
    """Resolved, already wished, moved on, parked: left alone, whatever was selected."""
    fine, resolved, wished, late = letters(world, 1, 2, 3, 4)
    DeadLetter.objects.filter(pk=resolved.pk).update(status="replayed")
    DeadLetter.objects.filter(pk=wished.pk).update(wish="discard")
    Position.objects.create(
        projection_name=world.name, projection_version=1, stream_id="s4", position=9, applied_position=9
    )
    (parked,) = letters(world, 7, stream_id="s1", status="parked")

    (chunk,) = wish_all(of(world), "replay", by="ann")

    assert list(chunk.wished) == [fine.pk]
    assert list(chunk.behind) == [parked.pk]
    assert list(chunk.refused) == [resolved.pk, wished.pk, late.pk]
    (allowed,) = wish_all(of(world).filter(pk=late.pk), "replay", allow_out_of_order=True)
    assert list(allowed.wished) == [late.pk]
    (discarded,) = wish_all(of(world).filter(pk=parked.pk), "discard")
    assert list(discarded.wished) == [parked.pk]


def test_of_two_operators_at_once_each_letter_is_wished_by_one(world: World) -> None:
    """Two clicks at the same moment: no letter twice, none lost."""
    letters(world, *range(50))
    barrier, counts = threading.Barrier(2), []

    def work(name: str) -> None:
        barrier.wait(10)
        try:
            counts.append(sum(len(chunk.wished) for chunk in wish_all(of(world), "replay", by=name)))
        finally:
            connections.close_all()

    threads = [threading.Thread(target=work, args=(name,)) for name in ("ann", "bob")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)

    assert sum(counts) == 50
    assert of(world).filter(wish="replay").count() == 50


@pytest.mark.case("B14")
def test_who_waits_behind_whom_is_known(world: World) -> None:
    """An open letter counts the events parked behind it; a parked one names its head."""
    (head, other) = letters(world, 1, 20, stream_id="a")[0], letters(world, 2, stream_id="b")[0]
    first, second = letters(world, 3, 4, stream_id="a", status="parked")

    assert waiting_behind([head, other, first]) == {head.pk: 2}
    assert holders([head, first, second]) == {first.pk: head.pk, second.pk: head.pk}
