"""The verdict pass: several events under one savepoint, judged before the commit, undone without a trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.db import DatabaseError, IntegrityError, connection, transaction

from scriba.protocols import CursorMove, FailureKind, WriteFailed
from scriba.results import Delete, Insert, Update
from tests.integration.target.desk import Desk, row
from tests.testapp.models import Child, Counter, Parent, Row


def adds(batch: Any, *writes: Any) -> Callable[[], None]:
    return lambda: batch.add(list(writes))


@pytest.mark.case("B3")
def test_a_guilty_part_is_undone_and_its_neighbours_stay(desk: Desk) -> None:
    """Rows 1 and 3; the duplicate between them is gone, with everything else of its part."""
    with desk.batch(verdict=True) as batch:
        batch.trial(adds(batch, row("1", code="x")))
        with pytest.raises(IntegrityError):
            batch.trial(adds(batch, row("2", code="y"), row("2b", code="x")))
        batch.trial(adds(batch, row("3", code="z")))
        desk.settle(batch, CursorMove("s", 1, 3, 3), letters=[desk.letter(desk.event(2))], applied=2, dead_lettered=1)

    assert desk.ids() == ["1", "3"]
    assert desk.cursors() == {"s": 3}
    assert [position for position, *_ in desk.letters()] == [2]


@pytest.mark.case("B21")
def test_a_deferred_foreign_key_is_checked_at_the_end_of_its_part(desk: Desk) -> None:
    """Found before the commit, where it would hit every event of the batch."""
    with desk.batch(verdict=True) as batch:
        batch.trial(adds(batch, Insert(Parent(id="p")), Insert(Child(id="good", parent_id="p"))))
        with pytest.raises(IntegrityError):
            batch.trial(adds(batch, Insert(Child(id="orphan", parent_id="nobody"))))
        desk.settle(batch, CursorMove("s", 1, 2, 1), applied=1, dead_lettered=1)

    assert desk.ids(Child) == ["good"]


@pytest.mark.case("B21")
def test_a_child_may_come_before_its_parent_within_one_batch_and_part(desk: Desk) -> None:
    """Foreign keys hold at the end of a batch, and of a part of a verdict pass."""
    with desk.batch() as batch:
        batch.add([Insert(Child(id="c1", parent_id="p1"))])
        batch.add([Insert(Parent(id="p1"))])
        desk.settle(batch, CursorMove("s", 1, 2, 2), applied=2)
    with desk.batch(verdict=True) as batch:
        batch.trial(adds(batch, Insert(Child(id="c2", parent_id="p2")), Insert(Parent(id="p2"))))
        desk.settle(batch, CursorMove("s", 3, 4, 4), applied=2)

    assert desk.ids(Child) == ["c1", "c2"]


@pytest.mark.case("B21")
def test_without_a_trial_a_broken_foreign_key_comes_out_of_the_commit(desk: Desk) -> None:
    """As an error of the batch: nothing of it is there, and it is classified as one event's fault."""
    with pytest.raises(IntegrityError) as caught, desk.batch() as batch:
        batch.add([row("innocent"), Insert(Child(id="orphan", parent_id="nobody"))])
        desk.settle(batch, CursorMove("s", 1, 2, 2), applied=2)

    failure = desk.target.classify(caught.value)
    assert failure.kind is FailureKind.INTEGRITY
    assert failure.label.startswith("commit:23503 (testapp_child_parent_id")
    assert (desk.ids(), desk.cursors()) == ([], {})


def test_after_a_trial_constraints_are_deferred_as_declared(desk: Desk) -> None:
    """The next part may have its child before its parent again; a constraint declared immediate stays so."""
    desk.execute(
        "ALTER TABLE testapp_counter ADD CONSTRAINT once UNIQUE (last_position) DEFERRABLE INITIALLY IMMEDIATE"
    )
    try:
        with desk.batch(verdict=True) as batch:
            batch.trial(adds(batch, Insert(Counter(key="a", last_position=1))))
            batch.trial(lambda: (batch.add([Insert(Child(id="c", parent_id="p"))]), batch.attempt(Child.objects.count),
                                 batch.add([Insert(Parent(id="p"))])))  # fmt: skip

            def immediate() -> None:
                batch.add([Insert(Counter(key="b", last_position=1))])
                batch.attempt(Counter.objects.count)

            with pytest.raises(WriteFailed) as caught:
                batch.trial(immediate)
            desk.settle(batch, CursorMove("s", 1, 3, 3), applied=2)
    finally:
        desk.execute("ALTER TABLE testapp_counter DROP CONSTRAINT once")

    assert caught.value.failure.label == "commit:23505 (once)"
    assert desk.ids(Counter) == ["a"]


@pytest.mark.case("A15")
def test_the_hooks_of_an_undone_part_never_run(desk: Desk) -> None:
    """Those of attempts that had succeeded in it included."""
    ran = []

    def part() -> None:
        batch.attempt(lambda: transaction.on_commit(lambda: ran.append("undone")))
        batch.add([row("x", code="taken")])

    with desk.batch(verdict=True) as batch:
        batch.trial(adds(batch, row("1", code="taken")))
        batch.trial(lambda: batch.attempt(lambda: transaction.on_commit(lambda: ran.append("kept"))))
        with pytest.raises(IntegrityError):
            batch.trial(part)

    assert ran == ["kept"]


def test_what_handlers_read_and_wrote_in_an_undone_part_is_gone(desk: Desk) -> None:
    """Savepoints of attempts nest in those of trials, whatever came before them."""

    def part(number: int) -> None:
        batch.attempt(lambda: Row.objects.create(id=f"{number} by a handler"))
        batch.add([row(f"{number} declared", code="taken" if number % 2 else None)])
        batch.attempt(Row.objects.count)

    with desk.batch(verdict=True) as batch:
        batch.trial(adds(batch, row("0", code="taken")))
        batch.attempt(Row.objects.count)
        for number in range(1, 5):
            if number % 2:
                with pytest.raises(WriteFailed) as caught:
                    batch.trial(lambda number=number: part(number))
                assert not caught.value.guilty
            else:
                batch.trial(lambda number=number: part(number))
        assert batch.attempt(Row.objects.count) == 5
        desk.settle(batch, CursorMove("s", 1, 5, 5), applied=3)

    assert desk.ids() == ["0", "2 by a handler", "2 declared", "4 by a handler", "4 declared"]


@pytest.mark.case("B18")
def test_unmatched_writes_of_an_undone_part_are_not_counted(desk: Desk) -> None:
    """Those before and after it are."""
    nothing = Update(Row, {"id": "nobody"}, name="x"), Delete(Row, {"id": "nobody"})
    with desk.batch(verdict=True) as batch:
        batch.trial(adds(batch, nothing[0], row("1", code="x")))
        with pytest.raises(IntegrityError):
            batch.trial(adds(batch, *nothing, row("2", code="x")))
        with pytest.raises(IntegrityError):
            batch.trial(adds(batch, *nothing, row("3", code="x")))
        batch.trial(adds(batch, *nothing))
        unmatched = desk.settle(batch, CursorMove("s", 1, 3, 3), applied=2)

    assert unmatched == 3
    assert desk.counters()["unmatched"] == 3


def test_objects_are_made_afresh_after_an_undone_part(desk: Desk) -> None:
    """What a rolled-back insert has left on an object is forgotten with the object: the second try inserts."""
    made = []

    def part() -> None:
        made.append(Row(id="1"))
        batch.add([Insert(made[-1])])
        if len(made) == 1:
            batch.add([row("2", code="x"), row("3", code="x")])

    with desk.batch(verdict=True) as batch:
        with pytest.raises(IntegrityError):
            batch.trial(part)
        batch.trial(part)
        desk.settle(batch, CursorMove("s", 1, 1, 1), applied=1)

    assert desk.ids() == ["1"]


def test_a_connection_lost_in_a_part_ends_the_pass(desk: Desk) -> None:
    """No verdict can be found on a dead connection: it is transient, whatever error it is dressed in."""

    def part() -> None:
        pid = connection.connection.info.backend_pid
        desk.execute("SELECT pg_terminate_backend(%s, 5000)", pid)
        try:
            connection.connection.execute("SELECT 1")
        except Exception:
            raise ValueError("in disguise") from None

    with pytest.raises(WriteFailed) as caught, desk.batch(verdict=True) as batch:
        batch.trial(part)

    assert caught.value.failure.kind is FailureKind.TRANSIENT


def test_any_exception_undoes_a_part_and_comes_out_unchanged(desk: Desk) -> None:
    """A value error that comes up before any SQL, for example."""
    error = ValueError("as it was")

    def part() -> None:
        batch.add([row("x")])
        raise error

    with desk.batch(verdict=True) as batch:
        with pytest.raises(ValueError) as caught:
            batch.trial(part)
        batch.trial(adds(batch, row("y")))
        desk.settle(batch, CursorMove("s", 1, 2, 2), applied=1)

    assert caught.value is error
    assert desk.ids() == ["y"]


def test_a_value_error_of_one_write_is_found_by_halves(desk: Desk) -> None:
    """NUL in a text, a number beyond its column: each is its event's fault, and the rest is written."""
    bad = {2: row("nul", name="a\x00b"), 5: row("long", name="x" * 21)}
    verdicts = {}
    with desk.batch(verdict=True) as batch:
        for number in range(7):
            write = bad.get(number, row(f"good{number}"))
            try:
                batch.trial(adds(batch, write))
            except (DatabaseError, ValueError) as error:
                verdicts[number] = desk.target.classify(error)
        desk.settle(batch, CursorMove("s", 0, 6, 6), applied=5, dead_lettered=2)

    assert set(verdicts) == {2, 5}
    assert all(failure.kind is FailureKind.INTEGRITY for failure in verdicts.values())
    assert desk.ids() == ["good0", "good1", "good3", "good4", "good6"]
