"""The records: who asked what of a projection, and when."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from django.conf import settings
from django.db import transaction
from django.test import override_settings

import scriba
from scriba.audit import history
from scriba.exceptions import InvalidState
from scriba.models import Audit, DeadLetter, ProjectionState
from scriba.protocols import Lease, Progress, Status
from tests.integration.control.conftest import Owner
from tests.support.world import World


def entries(world: World) -> list[tuple[str, str, str]]:
    """Return (action, actor, reason) of each entry, the oldest first."""
    found = Audit.objects.filter(projection_name=world.name).order_by("id")
    return list(found.values_list("action", "actor", "reason"))


@pytest.mark.case("D1")
def test_every_command_is_recorded_with_who_and_why(world: World) -> None:
    """In the order in which they were asked for."""
    made = world.projection()
    scriba.pause(made, by="ann", reason="deploy")
    scriba.resume(made, by="bob")
    scriba.stop(made, by="ann", reason="reset")
    scriba.reset(made, by="ann")
    scriba.start(made, by="bob", reason="done")

    assert entries(world) == [
        ("pause", "ann", "deploy"), ("resume", "bob", ""), ("stop", "ann", "reset"), ("reset", "ann", ""),
        ("start", "bob", "done"),
    ]  # fmt: skip
    assert [entry.action for entry in history("default", world.identity, most=2)] == ["start", "reset"]


def test_what_was_refused_is_not_recorded(world: World) -> None:
    """A command in the wrong state changes nothing, the records included."""
    with pytest.raises(InvalidState):
        scriba.resume(world.projection(), by="ann")

    assert entries(world) == []


def test_what_was_rolled_back_is_not_recorded(world: World) -> None:
    """The entry belongs to the transaction of the act."""
    with pytest.raises(RuntimeError), transaction.atomic():
        scriba.pause(world.projection(), by="ann")
        raise RuntimeError

    assert entries(world) == []
    assert not ProjectionState.objects.filter(projection_name=world.name, wish="paused").exists()


@pytest.mark.parametrize("wish", ["replay", "discard"])
def test_a_wish_on_a_letter_is_recorded_once(world: World, wish: str) -> None:
    """With the letter it is about; the one who came second left no trace."""
    letter = DeadLetter.objects.create(
        projection_name=world.name, projection_version=1, position=3, stream_id="a", error_kind="KeyError"
    )
    getattr(scriba, wish)(letter, by="ann")
    with pytest.raises(InvalidState):
        getattr(scriba, wish)(letter, by="bob")

    assert entries(world) == [(wish, "ann", "")]
    assert Audit.objects.get(projection_name=world.name).detail == f"letter {letter.pk}, position 3: KeyError"


def test_a_reset_says_what_it_removed(world: World) -> None:
    """The numbers are there when somebody asks later where the rows went."""
    world.append("a", "b")
    world.run(world.projection())
    scriba.stop(world.projection())
    scriba.reset(world.projection(), by="ann")

    assert (
        Audit.objects.get(projection_name=world.name, action="reset").detail
        == "2 cursors forgotten, 0 dead letters discarded"
    )


# --- how long ---------------------------------------------------------------------------------------------------------


def test_old_records_are_forgotten_and_so_are_too_many(world: World, owner: Owner) -> None:
    """By an owner, now and then: what is too old, of orphans too; and all but the newest of its own projection."""
    year_ago = datetime.now(UTC) - timedelta(days=366)
    for number in range(5):
        Audit.objects.create(projection_name=world.name, projection_version=1, action=f"{number}")
        Audit.objects.create(projection_name="another", projection_version=1, action=f"{number}")
    for name in (world.name, "another"):
        Audit.objects.create(projection_name=name, projection_version=1, action="old", happened_at=year_ago)

    with override_settings(SCRIBA={**settings.SCRIBA, "audit_most": 3}):
        owner.ledger.sample(owner.lease, Progress(Status.RUNNING, 1))

    kept = Audit.objects.order_by("id").values_list("projection_name", "action")
    assert [action for name, action in kept if name == world.name] == ["2", "3", "4"]
    assert [action for name, action in kept if name == "another"] == ["0", "1", "2", "3", "4"]


def test_records_are_not_counted_with_every_sample(world: World, owner: Owner) -> None:
    """Once an hour is enough; and one who owns nothing any more forgets nothing."""
    ancient = datetime(2000, 1, 1, tzinfo=UTC)

    def forgets(lease: Lease) -> bool:
        entry = Audit.objects.create(projection_name=world.name, projection_version=1, action="x", happened_at=ancient)
        owner.ledger.sample(lease, Progress(Status.RUNNING, 1))
        return not Audit.objects.filter(pk=entry.pk).exists()

    assert not forgets(owner.lease._replace(epoch=owner.lease.epoch - 1))
    assert forgets(owner.lease)
    assert not forgets(owner.lease)


# --- parked letters -----------------------------------------------------------------------------------------------


@pytest.mark.case("B14")
def test_a_parked_letter_is_not_replayed_before_the_one_it_waits_for(world: World) -> None:
    """The message names that one; without it the parked one may be replayed."""
    key = {"projection_name": world.name, "projection_version": 1, "stream_id": "a"}
    head = DeadLetter.objects.create(**key, position=3)
    parked = DeadLetter.objects.create(**key, position=4, status="parked")

    with pytest.raises(InvalidState, match=f"parked behind letter {head.pk}"):
        scriba.replay(parked)
    DeadLetter.objects.filter(pk=head.pk).update(status="discarded")

    assert scriba.replay(parked).wish == "replay"


# --- samples ------------------------------------------------------------------------------------------------------


@pytest.fixture
def fenced(owner: Owner) -> Lease:
    """The lease as it was before somebody else took over."""
    old = owner.lease
    owner.halts()
    return old


def test_only_the_owner_notes_how_far_it_is(world: World, owner: Owner, fenced: Lease) -> None:
    """A sample of another epoch is refused like every other write."""
    progress = Progress(Status.RUNNING, 5, head=9)

    assert not owner.ledger.sample(fenced, progress)
    assert owner.ledger.sample(owner.lease, progress)

    (row,) = samples(world)
    assert row == (5, 9, 0)


def test_old_samples_are_forgotten(world: World, owner: Owner) -> None:
    """The table stays small however long a projection runs: an hour is kept, of this projection."""
    owner.ledger.sample(owner.lease, Progress(Status.RUNNING, 1, head=9))
    world.execute("UPDATE scriba_samples SET taken_at = now() - interval '2 hours'")
    world.execute(
        "INSERT INTO scriba_samples (projection_name, projection_version, taken_at) VALUES ('another', 1, now() - interval '2 hours')"
    )

    owner.ledger.sample(owner.lease, Progress(Status.RUNNING, 2, head=9))

    assert [watermark for watermark, *_ in samples(world)] == [2]
    assert len(samples(World("another"))) == 1


def samples(world: World) -> list[tuple[int | None, int | None, int]]:
    from scriba.models import Sample

    found = Sample.objects.filter(projection_name=world.name).order_by("taken_at")
    return list(found.values_list("watermark", "head", "settled"))
