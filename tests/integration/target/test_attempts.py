"""Handler calls inside the batch's transaction: what they see, what they leave behind, whose fault it was."""

from __future__ import annotations

import functools
import logging
from typing import Any

import psycopg
import pytest
from django.db import DatabaseError, IntegrityError, InterfaceError, OperationalError, connection, transaction
from django.db.models import F

from scriba.exceptions import PermanentFailure, RetryAfter
from scriba.protocols import CursorMove, Failure, FailureKind, WriteFailed
from scriba.results import Delete, Insert, Update
from tests.integration.target.desk import Desk, row
from tests.testapp.models import Child, Counter, Row


class Boom(Exception):
    pass


def fail_after(work: Any) -> Any:
    def handler() -> None:
        work()
        raise Boom

    return handler


# --- what a handler sees ------------------------------------------------------------------------------------


@pytest.mark.case("C1")
def test_a_handler_that_reads_sees_what_earlier_events_declared(desk: Desk) -> None:
    """Its first statement finds the buffer flushed, whatever kind of write waited in there."""
    with desk.batch() as batch:
        batch.add([row("a", name="x"), row("b", name="y")])
        batch.add([Update(Row, {"id": "a"}, name="z"), Delete(Row, {"id": "b"})])
        seen = batch.attempt(lambda: dict(Row.objects.values_list("id", "name")))

    assert seen == {"a": "z"}


def test_a_pure_handler_costs_no_statement(desk: Desk) -> None:
    """Neither a savepoint nor a flush: the common case never pays for the others."""
    with desk.batch() as batch:
        batch.add([row("what is learned once about a model")])
    connection.force_debug_cursor = True
    with desk.batch() as batch:
        before = len(connection.queries)
        for number in range(10):
            batch.add(batch.attempt(lambda number=number: [row(f"r{number}")]))
        assert len(connection.queries) == before


@pytest.mark.case("C1")
def test_reads_and_declared_writes_may_alternate(desk: Desk) -> None:
    """Each of many reading handlers sees exactly what was declared before it; savepoints do not pile up."""
    with desk.batch() as batch:
        batch.add([Insert(Counter(key="k", value=1))])
        for _ in range(20):
            value = batch.attempt(lambda: Counter.objects.get(key="k").value)
            batch.add([Update(Counter, {"key": "k"}, value=value + value)])
        desk.settle(batch, CursorMove("s", 1, 21, 21), applied=21)

    assert desk.execute("SELECT value FROM testapp_counter WHERE key = 'k'") == [(2**20,)]


# --- what a failed one leaves -------------------------------------------------------------------------------


@pytest.mark.case("C7")
def test_a_failed_handler_leaves_nothing_and_the_events_before_it_commit(desk: Desk) -> None:
    """Rows it inserted, updated and deleted are as they were; those declared before it are there."""
    with desk.batch() as batch:
        batch.add([row("before")])

        def handler() -> None:
            Row.objects.create(id="mine")
            Row.objects.filter(id="before").update(name="changed")
            with transaction.atomic():
                Row.objects.create(id="nested")
            raise Boom

        with pytest.raises(Boom):
            batch.attempt(handler)
        batch.add([row("after")])
        desk.settle(batch, CursorMove("s", 1, 2, 2), applied=2)

    assert desk.execute("SELECT id, name FROM testapp_row ORDER BY id") == [("after", ""), ("before", "")]


@pytest.mark.case("C7")
def test_the_handlers_own_exception_comes_back_unchanged(desk: Desk) -> None:
    """The very object, so that retries and letters tell what the handler said."""
    error = Boom("as it was")

    def handler() -> None:
        Row.objects.create(id="mine")
        raise error

    with desk.batch() as batch, pytest.raises(Boom) as caught:
        batch.attempt(handler)

    assert caught.value is error


@pytest.mark.case("C7", "C8")
def test_undo_works_when_the_first_statement_lies_inside_a_block_without_a_savepoint(desk: Desk) -> None:
    """As in every bulk_create and multi-table save: Django's stack must not be touched there."""

    def handler() -> None:
        with transaction.atomic(savepoint=False):
            Row.objects.bulk_create([Row(id="mine")])
            raise Boom

    with desk.batch() as batch:
        batch.add([row("before")])
        with pytest.raises(Boom):
            batch.attempt(handler)
        assert batch.attempt(lambda: [obj.pk for obj in Row.objects.all()]) == ["before"]
        desk.settle(batch, CursorMove("s", 1, 1, 1), applied=1)

    assert desk.ids() == ["before"]


@pytest.mark.case("C8")
def test_a_handler_sees_and_writes_from_inside_a_block_without_a_savepoint(desk: Desk) -> None:
    """Flush and savepoint happen in there, and what it wrote stays."""

    def handler() -> int:
        with transaction.atomic(savepoint=False):
            Row.objects.bulk_create([Row(id="mine")])
            return Row.objects.count()

    with desk.batch() as batch:
        batch.add([row("before")])
        assert batch.attempt(handler) == 2
        desk.settle(batch, CursorMove("s", 1, 2, 2), applied=2)

    assert desk.ids() == ["before", "mine"]


def test_many_failures_in_a_row_are_undone_one_by_one(desk: Desk) -> None:
    """A savepoint that was rolled back to serves the next attempt, too."""
    with desk.batch() as batch:
        for number in range(5):
            with pytest.raises(Boom):
                batch.attempt(fail_after(lambda number=number: Row.objects.create(id=f"bad{number}")))
            batch.attempt(lambda number=number: Row.objects.create(id=f"good{number}"))
        desk.settle(batch, CursorMove("s", 1, 9, 9), applied=5)

    assert desk.ids() == [f"good{number}" for number in range(5)]


# --- on_commit ----------------------------------------------------------------------------------------------


@pytest.mark.case("A15")
def test_the_hook_of_a_failed_attempt_never_runs(desk: Desk) -> None:
    """Neither when it wrote, nor when it touched nothing, nor from inside a nested block."""
    ran = []

    def nested() -> None:
        with transaction.atomic():
            transaction.on_commit(lambda: ran.append("nested"))

    with desk.batch() as batch:
        batch.attempt(lambda: transaction.on_commit(lambda: ran.append("good")))
        for work in (
            lambda: transaction.on_commit(lambda: ran.append("pure")),
            lambda: (Row.objects.count(), transaction.on_commit(lambda: ran.append("reading"))),
            nested,
        ):
            with pytest.raises(Boom):
                batch.attempt(fail_after(work))
        batch.attempt(lambda: transaction.on_commit(lambda: ran.append("last")))
        assert ran == []

    assert ran == ["good", "last"]


@pytest.mark.case("A15")
@pytest.mark.parametrize("name_it", [False, True])
def test_a_hook_that_raises_is_logged_and_the_others_run(
    desk: Desk, caplog: pytest.LogCaptureFixture, name_it: bool
) -> None:
    """The batch is committed and says so; a hook without a name (a partial) does not even spoil the logging."""
    ran = []

    def explode(what: str = "") -> None:
        raise SystemExit(what) if what else Boom

    bad = explode if name_it else functools.partial(explode, "leave")
    with caplog.at_level(logging.ERROR, "scriba"), desk.batch() as batch:
        batch.attempt(lambda: transaction.on_commit(lambda: ran.append("first")))
        batch.attempt(lambda: transaction.on_commit(bad))
        batch.attempt(lambda: transaction.on_commit(lambda: ran.append("third")))
        batch.add([row("a")])
        desk.settle(batch, CursorMove("s", 1, 3, 3), applied=3)

    assert ran == ["first", "third"]
    assert desk.ids() == ["a"]
    assert "on_commit hook" in caplog.text


def test_a_hook_sees_the_committed_rows_and_an_ordinary_connection(desk: Desk) -> None:
    """It runs after the commit, in autocommit, with nothing of the batch's watching left."""
    seen: list[Any] = []

    def hook() -> None:
        seen.extend(desk.ids())
        with transaction.atomic():
            Row.objects.create(id="by the hook")

    with desk.batch() as batch:
        batch.attempt(lambda: transaction.on_commit(hook))
        batch.add([row("a")])

    assert seen == ["a"]
    assert desk.ids() == ["a", "by the hook"]


def test_no_hook_runs_when_the_batch_rolls_back(desk: Desk) -> None:
    """And none is left for the next batch."""
    ran = []
    with pytest.raises(Boom), desk.batch() as batch:
        batch.attempt(lambda: transaction.on_commit(lambda: ran.append("lost")))
        raise Boom
    with desk.batch():
        pass

    assert ran == []


# --- whose fault --------------------------------------------------------------------------------------------


def duplicate() -> None:
    Row.objects.create(id="taken")


def test_an_error_of_its_own_statement_is_the_events_fault(desk: Desk) -> None:
    """Classified by SQLSTATE, with the constraint's name, and undone: the batch goes on."""
    with desk.batch() as batch:
        batch.add([row("taken")])
        with pytest.raises(WriteFailed) as caught:
            batch.attempt(duplicate)
        desk.settle(batch, CursorMove("s", 1, 2, 1), applied=1)

    assert caught.value.guilty
    assert caught.value.failure.kind is FailureKind.INTEGRITY
    assert caught.value.failure.label == "commit:23505 (testapp_row_pkey)"
    assert isinstance(caught.value.__cause__, IntegrityError)
    assert desk.ids() == ["taken"]


def test_an_error_wrapped_in_the_handlers_own_exception_is_still_the_connections(desk: Desk) -> None:
    """Whatever a handler turns it into: the SQLSTATE in the chain decides."""

    def handler() -> None:
        try:
            duplicate()
        except IntegrityError as error:
            raise Boom from error

    with desk.batch() as batch:
        batch.add([row("taken")])
        with pytest.raises(WriteFailed) as caught:
            batch.attempt(handler)

    assert caught.value.failure.label == "commit:23505 (testapp_row_pkey)"


@pytest.mark.parametrize("decision", [PermanentFailure("no room"), RetryAfter(3)])
def test_what_a_handler_decides_about_its_own_error_counts(desk: Desk, decision: Exception) -> None:
    """A handler that meets its duplicate key and says what shall become of the event is believed."""

    def handler() -> None:
        try:
            with transaction.atomic():
                duplicate()
        except IntegrityError as error:
            raise decision from error

    with desk.batch() as batch:
        batch.add([row("taken")])
        with pytest.raises(type(decision)):
            batch.attempt(handler)
        desk.settle(batch, CursorMove("s", 1, 2, 1), applied=1)

    assert desk.ids() == ["taken"]


def test_an_error_that_a_handler_deals_with_properly_is_no_failure(desk: Desk) -> None:
    """Inside atomic(), and nothing is broken: as in get_or_create."""

    def handler() -> str:
        try:
            with transaction.atomic():
                duplicate()
        except IntegrityError:
            Row.objects.create(id="instead")
        return "done"

    with desk.batch() as batch:
        batch.add([row("taken")])
        assert batch.attempt(handler) == "done"
        desk.settle(batch, CursorMove("s", 1, 2, 2), applied=2)

    assert desk.ids() == ["instead", "taken"]


def test_an_error_of_a_foreign_connection_is_the_handlers_own_affair(desk: Desk) -> None:
    """Of the same server and the same kind, but not of the batch's transaction: raised again as it was."""

    def handler() -> None:
        Row.objects.count()
        with desk.driver() as other:
            other.execute("SELECT * FROM no_such_table")

    with desk.batch() as batch:
        with pytest.raises(psycopg.errors.UndefinedTable):
            batch.attempt(handler)
        batch.add([row("after")])
        desk.settle(batch, CursorMove("s", 1, 2, 2), applied=1)

    assert desk.ids() == ["after"]


def test_a_closed_cursor_is_the_handlers_own_affair(desk: Desk) -> None:
    """The driver's complaint has no SQLSTATE, but the connection is in order: it must not be repeated for ever."""

    def handler() -> None:
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1")
        cursor.execute("SELECT 1")

    with desk.batch() as batch, pytest.raises(InterfaceError):
        batch.attempt(handler)


def test_a_structural_error_of_a_handler_is_told_as_such(desk: Desk) -> None:
    """A missing table is no bad event."""

    def handler() -> None:
        with connection.cursor() as cursor:
            cursor.execute("SELECT * FROM no_such_table")

    with desk.batch() as batch, pytest.raises(WriteFailed) as caught:
        batch.attempt(handler)

    assert caught.value.failure.kind is FailureKind.STRUCTURAL
    assert caught.value.failure.label == "commit:42P01 (undefined_table)"


# --- the flush that a handler's first statement triggers -------------------------------------------------------


def swallow_everything() -> str:
    for _ in range(2):
        try:
            Row.objects.count()
        except Exception:
            pass
    return "as if nothing had happened"


def turn_it_around() -> None:
    try:
        Row.objects.count()
    except Exception:
        raise Boom from None


@pytest.mark.parametrize("handler", [Row.objects.count, swallow_everything, turn_it_around])
def test_what_breaks_while_earlier_writes_are_flushed_is_not_the_handlers_fault(desk: Desk, handler: Any) -> None:
    """It wins over whatever the handler makes of it."""
    with pytest.raises(WriteFailed) as caught, desk.batch() as batch:
        batch.add([row("a", code="c"), row("b", code="c")])
        batch.attempt(handler)

    assert not caught.value.guilty
    assert caught.value.failure.kind is FailureKind.INTEGRITY
    assert desk.ids() == []


# --- swallowed errors ---------------------------------------------------------------------------------------


def swallow_integrity_error() -> None:
    try:
        duplicate()
    except IntegrityError:
        pass


def swallow_select_error() -> None:
    try:
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1 / 0")
    except DatabaseError:
        pass


def swallow_missing_table() -> None:
    try:
        with connection.cursor() as cursor:
            cursor.execute("SELECT * FROM no_such_table")
    except DatabaseError:
        pass


def swallow_and_go_on() -> None:
    swallow_integrity_error()
    swallow_select_error()
    swallow_missing_table()


def swallow_on_the_raw_driver() -> None:
    try:
        connection.connection.execute("SELECT 1 / 0")
    except psycopg.Error:
        pass
    try:
        connection.connection.execute("SELECT 1")
    except psycopg.errors.InFailedSqlTransaction:
        pass


def swallow_inside_a_block() -> None:
    try:
        with transaction.atomic(savepoint=False):
            raise Boom
    except Boom:
        pass


def ask_for_a_rollback() -> None:
    transaction.set_rollback(True)


def leave_a_block_open() -> None:
    transaction.atomic().__enter__()
    Row.objects.create(id="in the open block")


@pytest.mark.case("B19")
@pytest.mark.parametrize(
    ("handler", "label"),
    [
        (swallow_integrity_error, "commit:23505 (testapp_row_pkey)"),
        (swallow_select_error, "commit:22012 (division_by_zero)"),
        (swallow_missing_table, "commit:42P01 (undefined_table)"),
        (swallow_and_go_on, "commit:23505 (testapp_row_pkey)"),
        (swallow_on_the_raw_driver, "commit:22012 (division_by_zero)"),
        (swallow_inside_a_block, "commit:TransactionManagementError"),
        (ask_for_a_rollback, "commit:TransactionManagementError"),
        (leave_a_block_open, "commit:TransactionManagementError"),
    ],
)
def test_a_handler_that_leaves_its_transaction_broken_is_the_culprit(desk: Desk, handler: Any, label: str) -> None:
    """With the original cause; its neighbours commit, and nothing is rolled back silently."""
    with desk.batch() as batch:
        batch.add([row("taken")])
        with pytest.raises(WriteFailed) as caught:
            batch.attempt(handler)
        batch.add([row("after")])
        assert batch.attempt(Row.objects.count) == 2
        desk.settle(batch, CursorMove("s", 1, 3, 3), applied=2)

    assert caught.value.guilty
    assert caught.value.failure == (FailureKind.INTEGRITY, label, False)
    assert caught.value.__cause__ is not None
    assert desk.ids() == ["after", "taken"]
    assert desk.cursors() == {"s": 3}


@pytest.mark.case("B19")
def test_the_error_that_follows_from_a_swallowed_one_names_the_first(desk: Desk) -> None:
    """TransactionManagementError only says that something had happened before."""

    def handler() -> None:
        swallow_integrity_error()
        Row.objects.count()

    with desk.batch() as batch:
        batch.add([row("taken")])
        with pytest.raises(WriteFailed) as caught:
            batch.attempt(handler)
        desk.settle(batch, CursorMove("s", 1, 2, 1), applied=1)

    assert caught.value.failure.label == "commit:23505 (testapp_row_pkey)"
    assert isinstance(caught.value.__cause__, IntegrityError)
    assert desk.ids() == ["taken"]


@pytest.mark.case("B19")
def test_an_error_dealt_with_before_is_not_the_cause_of_a_later_one(desk: Desk) -> None:
    """What a savepoint has mended is forgotten."""

    def handler() -> None:
        try:
            with transaction.atomic():
                duplicate()
        except IntegrityError:
            pass
        swallow_select_error()

    with desk.batch() as batch:
        batch.add([row("taken")])
        with pytest.raises(WriteFailed) as caught:
            batch.attempt(handler)

    assert caught.value.failure.label == "commit:22012 (division_by_zero)"


@pytest.mark.case("B19")
def test_a_broken_transaction_is_never_left_as_if_it_committed(desk: Desk) -> None:
    """The last check: even what no attempt has noticed does not become a silent rollback."""
    with pytest.raises(WriteFailed), desk.batch() as batch:
        batch.add([row("a")])
        desk.settle(batch, CursorMove("s", 1, 1, 1), applied=1)
        with pytest.raises(psycopg.errors.DivisionByZero):
            connection.connection.execute("SELECT 1 / 0")

    assert desk.cursors() == {}


# --- the connection goes away -------------------------------------------------------------------------------


def terminate_own_backend(desk: Desk) -> None:
    pid = connection.connection.info.backend_pid
    assert desk.execute("SELECT pg_terminate_backend(%s, 5000)", pid) == [(True,)]


@pytest.mark.case("B24", "A10")
@pytest.mark.parametrize("swallows", [False, True])
def test_a_reading_handler_that_meets_a_restarting_server_is_no_bad_event(desk: Desk, swallows: bool) -> None:
    """57P01 is transient, also when it came up through the handler, also when the handler hid it."""

    def handler() -> None:
        Row.objects.count()
        terminate_own_backend(desk)
        try:
            Row.objects.count()
        except OperationalError:
            if not swallows:
                raise

    with pytest.raises(WriteFailed) as caught, desk.batch() as batch:
        batch.attempt(handler)

    assert caught.value.failure.kind is FailureKind.TRANSIENT
    assert not caught.value.failure.bounded
    with desk.batch() as batch:  # the broken connection did not outlive its batch
        batch.add([row("a")])
    assert desk.ids() == ["a"]


@pytest.mark.case("B24")
def test_a_deadlock_met_by_a_handler_is_repeated(desk: Desk) -> None:
    """40P01 in the chain of causes is transient, although a handler raised it."""

    def handler() -> None:
        with connection.cursor() as cursor:
            cursor.execute("DO $$ BEGIN RAISE EXCEPTION 'as in a deadlock' USING ERRCODE = '40P01'; END $$")

    with pytest.raises(WriteFailed) as caught, desk.batch() as batch:
        batch.attempt(handler)

    assert caught.value.failure == (FailureKind.TRANSIENT, "commit:40P01 (deadlock_detected)", False)


@pytest.mark.case("B24", "B19")
def test_a_deadlock_that_a_handler_swallows_is_repeated_too(desk: Desk) -> None:
    """The event is no worse for it: only what does not pass by itself is held against it."""

    def handler() -> None:
        try:
            with connection.cursor() as cursor:
                cursor.execute("DO $$ BEGIN RAISE EXCEPTION 'as in a deadlock' USING ERRCODE = '40P01'; END $$")
        except OperationalError:
            pass

    with pytest.raises(WriteFailed) as caught, desk.batch() as batch:
        batch.attempt(handler)

    assert caught.value.failure.kind is FailureKind.TRANSIENT


@pytest.mark.case("B19")
@pytest.mark.parametrize("go_on", [Row.objects.count, lambda: connection.connection.execute("DELETE FROM testapp_row")])
def test_a_handler_that_asked_for_a_rollback_reaches_the_database_no_more(desk: Desk, go_on: Any) -> None:
    """Its fault, not that of the writes which would have been flushed for it; the driver refuses like Django."""

    def handler() -> None:
        transaction.set_rollback(True)
        go_on()

    with desk.batch() as batch:
        batch.add([row("before")])
        with pytest.raises(WriteFailed) as caught:
            batch.attempt(handler)
        desk.settle(batch, CursorMove("s", 1, 2, 1), applied=1)

    assert caught.value.guilty
    assert desk.ids() == ["before"]


@pytest.mark.case("B19")
def test_an_earlier_error_of_the_connection_is_not_what_a_handler_swallowed(desk: Desk) -> None:
    """Taken for a deadlock it would be repeated for ever: the event would never be settled."""

    def deadlock() -> None:
        with transaction.mark_for_rollback_on_error(using="default"), connection.cursor() as cursor:
            cursor.execute("DO $$ BEGIN RAISE EXCEPTION USING ERRCODE = '40P01'; END $$")

    with pytest.raises(WriteFailed) as caught, desk.batch() as batch:
        batch.attempt(deadlock)
    assert caught.value.failure.kind is FailureKind.TRANSIENT

    with desk.batch() as batch, pytest.raises(WriteFailed) as caught:
        batch.attempt(ask_for_a_rollback)
    assert caught.value.failure == Failure(FailureKind.INTEGRITY, "commit:TransactionManagementError")


# --- counting ------------------------------------------------------------------------------------------------


@pytest.mark.case("B18")
def test_updates_and_deletes_that_match_nothing_are_counted(desk: Desk) -> None:
    """Folded or one by one: the number comes back, and stands in the lane's row."""
    with desk.batch() as batch:
        batch.add([row("a"), Update(Row, {"id": "nobody"}, name="x"), Delete(Row, {"id": "nobody"})])
        batch.add([Update(Row, {"name": "nobody"}, name="x"), Update(Row, {"id": "a"}, name=F("status"))])
        unmatched = desk.settle(batch, CursorMove("s", 1, 5, 5), applied=5)

    assert unmatched == 3
    assert desk.counters() == {"applied": 5, "skipped": 0, "dead_lettered": 0, "deduplicated": 0, "unmatched": 3}


def test_wrote_says_whether_the_handler_itself_has_written(desk: Desk) -> None:
    """The flush of others' writes does not count, a read does not, a raw COPY does; each attempt begins anew."""

    def copy_in() -> None:
        with connection.cursor() as cursor, cursor.copy("COPY testapp_row (id) FROM STDIN") as copy:
            pass
        del copy

    with desk.batch() as batch:
        batch.add([row("a")])
        told = []
        for handler in (
            Row.objects.count,
            lambda: Row.objects.select_for_update().get(id="a"),
            lambda: Row.objects.filter(id="a").update(name="x"),
            lambda: None,
            lambda: connection.connection.execute("DELETE FROM testapp_child"),
            copy_in,
            lambda: list(Row.objects.raw("WITH gone AS (DELETE FROM testapp_row RETURNING *) SELECT * FROM gone")),
        ):
            batch.attempt(handler)
            told.append(batch.wrote)

    assert told == [False, False, True, False, True, True, True]
    assert not Child.objects.exists()
