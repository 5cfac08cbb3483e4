"""A dry run: what would pass after a deploy, and what it would change, without leaving anything behind."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import transaction
from django.db.models import F

from scriba import Delete, Done, Insert, Skip, Update, Upsert
from scriba.models import DeadLetter, Position
from scriba.registry import Projection
from scriba.rehearsal import Rehearsal, rehearse
from tests.support.world import World, note
from tests.testapp.models import Applied, Child, Counter, Parent, Row


class Mended:
    """A handler that fails until it is told what to do instead."""

    def __init__(self) -> None:
        self.does: Any = None
        self.replaying: list[bool] = []

    def __call__(self, data: Any, meta: Any) -> Any:
        self.replaying.append(meta.replaying)
        if self.does is None:
            raise LookupError(f"not yet {meta.position}")
        return self.does(data, meta)


@pytest.fixture
def handler() -> Mended:
    return Mended()


@pytest.fixture
def registered(world: World, handler: Mended, monkeypatch: pytest.MonkeyPatch) -> Projection:
    """The world's projection, found by its name like a declared one."""
    from scriba import registry

    made = world.projection(handler)
    monkeypatch.setitem(registry._registry, made.identity, made)
    return made


def fail(world: World, projection: Projection, *streams: str) -> list[int]:
    positions = world.append(*streams)
    world.run(projection)
    assert len(world.letters()) == len(positions)
    return positions


def tried(world: World, **options: Any) -> list[Rehearsal]:
    return list(rehearse(DeadLetter.objects.filter(projection_name=world.name), **options))


def test_what_would_pass_is_said_and_nothing_is_left(world: World, registered: Projection, handler: Mended) -> None:
    """Rows, cursors and letters are as before; hooks do not run; the handler is told that it is a replay."""
    positions = fail(world, registered, "a", "b")
    hooks: list[int] = []
    cursors = list(Position.objects.filter(projection_name=world.name).values())

    def write(data: Any, meta: Any) -> Insert:
        transaction.on_commit(lambda: hooks.append(meta.position))
        return Insert(Applied(projection=world.name, stream_id=meta.stream_id, position=meta.position))

    handler.does, handler.replaying = write, []
    found = tried(world)

    assert [(one.letter.position, one.outcome, dict(one.rows)) for one in found] == [
        (position, "passes", {"testapp_applied": (1, 0, 0)}) for position in positions
    ]
    assert handler.replaying == [True, True]
    assert (world.applied(), hooks) == ([], [])
    assert list(Position.objects.filter(projection_name=world.name).values()) == cursors
    assert {(letter.status, letter.attempts, letter.wish) for letter in world.letters()} == {("open", 1, "")}


def test_what_would_fail_is_said_with_its_reason(world: World, registered: Projection, handler: Mended) -> None:
    """A handler's error, and an error that only the database can know, each by its kind; the next ones are still tried."""
    first, second, third = fail(world, registered, "a", "a", "a")
    Row.objects.create(id="taken", code="taken")

    def write(data: Any, meta: Any) -> Insert:
        if meta.position == first:
            raise KeyError("shipping")
        return Insert(Row(id=f"{world.name}-{meta.position}", code="taken" if meta.position == second else None))

    handler.does = write
    found = tried(world)

    assert [(one.letter.position, one.outcome) for one in found] == [
        (first, "fails"),
        (second, "fails"),
        (third, "passes"),
    ]
    assert found[0].error_kind == "KeyError"
    assert found[1].error_kind.startswith("commit:23505")


def test_a_deferred_constraint_is_looked_at(world: World, registered: Projection, handler: Mended) -> None:
    """What would fail at the commit fails in the rehearsal."""
    fail(world, registered, "a")
    handler.does = lambda data, meta: Insert(Child(id=f"{world.name}-c", parent_id="nobody"))

    (one,) = tried(world)

    assert (one.outcome, one.error_kind[:12]) == ("fails", "commit:23503")


def test_row_differences_are_shown(world: World, registered: Projection, handler: Mended) -> None:
    """Before and after of each declared write; rows that only the database wrote are counted."""
    fail(world, registered, "a")
    Row.objects.create(id=f"{world.name}-1", status="new")
    Parent.objects.create(id=f"{world.name}-p")
    Child.objects.create(id=f"{world.name}-c", parent_id=f"{world.name}-p")
    handler.does = lambda data, meta: [
        Update(Row, {"id": f"{world.name}-1"}, status="shipped"),
        Upsert(Counter(key=world.name, value=3)),
        Delete(Parent, {"id": f"{world.name}-p"}),
    ]

    (one,) = tried(world)

    shown = [str(change) for change in one.changes]
    assert shown[0] == f"~ testapp.Row '{world.name}-1' status: 'new' → 'shipped'"
    assert shown[1].startswith(f"+ testapp.Counter(key='{world.name}', value=3")
    assert shown[2].startswith("- testapp.Parent(")
    assert one.rows["testapp_child"] == (0, 0, 1)
    assert Row.objects.get(id=f"{world.name}-1").status == "new"
    assert Child.objects.filter(id=f"{world.name}-c").exists()


def test_orm_writes_are_counted_and_undone(world: World, registered: Projection, handler: Mended) -> None:
    """A handler that returns Done() is rehearsed like any other."""
    fail(world, registered, "a")
    Counter.objects.create(key=world.name)

    def write(data: Any, meta: Any) -> Done:
        Counter.objects.filter(key=world.name).update(value=F("value") + 1)
        return Done()

    handler.does = write
    (one,) = tried(world)

    assert (one.outcome, dict(one.rows)) == ("passes", {"testapp_counter": (0, 1, 0)})
    assert Counter.objects.get(key=world.name).value == 0


def test_a_skip_would_pass(world: World, registered: Projection, handler: Mended) -> None:
    """A handler that ignores the event now resolves its letter."""
    fail(world, registered, "a")
    handler.does = lambda data, meta: Skip()

    assert [one.outcome for one in tried(world)] == ["skips"]


@pytest.mark.case("B14")
def test_parked_events_are_rehearsed_behind_their_head(
    world: World, handler: Mended, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In order, each seeing what those before it would write; when one would fail, the rest would wait."""
    from scriba import registry

    parking = world.projection(handler, on_failure="park")
    monkeypatch.setitem(registry._registry, parking.identity, parking)
    Counter.objects.create(key=world.name)
    _, second, _ = fail(world, parking, "a", "a", "a")
    seen: list[int] = []

    def count(data: Any, meta: Any) -> Update:
        seen.append(Counter.objects.get(key=world.name).value)
        if meta.position == second and not data.get("mended", True):
            raise ValueError
        return Update(Counter, {"key": world.name}, value=F("value") + 1)

    handler.does = count
    assert [one.outcome for one in tried(world)] == ["passes"] * 3
    assert seen == [0, 1, 2]

    handler.does = lambda data, meta: 1 / 0 if meta.position == second else Skip()
    assert [one.outcome for one in tried(world)] == ["skips", "fails", "waits"]


@pytest.mark.case("B15")
def test_an_event_that_would_be_refused_is_said_to_be(world: World, registered: Projection, handler: Mended) -> None:
    """Out of order without permission; with it the event is tried."""
    (position,) = fail(world, registered, "a")
    Position.objects.filter(projection_name=world.name).update(position=position + 5, applied_position=position + 5)
    handler.does = lambda data, meta: Skip()

    assert [one.outcome for one in tried(world)] == ["refused"]
    assert [one.outcome for one in tried(world, allow_out_of_order=True)] == ["skips"]


# --- letters whose key could not be worked out ------------------------------------------------------------------


class Keyed:
    """A `partition_by` that cannot read any event until it is mended."""

    def __init__(self) -> None:
        self.is_broken = True

    def __call__(self, event: Any) -> str:
        if self.is_broken and event.data.get("broken"):
            raise LookupError("no customer")
        return str(event.data["customer"])


@pytest.fixture
def keyed(world: World, handler: Mended, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Projection:
    from scriba import registry

    options = getattr(request, "param", {})
    made = world.projection(handler, partition_by=Keyed(), **options)
    monkeypatch.setitem(registry._registry, made.identity, made)
    return made


def mend(projection: Projection) -> None:
    assert isinstance(projection.partition_by, Keyed)
    projection.partition_by.is_broken = False


@pytest.mark.case("A21", "B15")
def test_a_letter_is_late_when_a_later_event_of_its_true_key_is_applied(
    world: World, keyed: Projection, handler: Mended
) -> None:
    """The dry run works the key out anew, as the replay does."""
    handler.does = lambda data, meta: Skip() if meta.replaying else note(world.name)(data, meta)
    (late,) = world.append("s1", customer=f"{world.name}-x", broken=True)
    world.append("s2", customer=f"{world.name}-x")
    (early,) = world.append("s3", customer=f"{world.name}-y", broken=True)
    world.run(keyed)
    assert {letter.position: letter.stream_id for letter in world.letters()} == {late: "s1", early: "s3"}
    mend(keyed)

    assert {one.letter.position: one.outcome for one in tried(world)} == {late: "refused", early: "skips"}
    assert {one.outcome for one in tried(world, allow_out_of_order=True)} == {"skips"}


@pytest.mark.case("A21", "B14")
@pytest.mark.parametrize("keyed", [{"on_failure": "park"}], indirect=True)
def test_a_letter_waits_behind_those_of_its_true_key_when_they_are_parked(
    world: World, keyed: Projection, handler: Mended
) -> None:
    """What the replay would park there is said to wait; what it leaves behind is tried by itself."""
    key = f"{world.name}-x"
    (head,) = world.append("s1", customer=key)
    (waiting,) = world.append("s2", customer=key, broken=True)
    (free,) = world.append("s2", customer=f"{world.name}-y", broken=True)
    world.run(keyed)
    assert len(world.letters()) == 3
    mend(keyed)
    handler.does = lambda data, meta: Skip()

    found = {one.letter.position: one for one in tried(world)}

    assert (found[waiting].outcome, found[waiting].error) == (
        "waits",
        f"parked behind letter {DeadLetter.objects.get(projection_name=world.name, position=head).pk}",
    )
    assert (found[head].outcome, found[free].outcome) == ("skips", "skips")
