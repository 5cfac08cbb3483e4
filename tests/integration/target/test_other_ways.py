"""Ways to the database that pass beside Django's query hook, and things that no handler may do."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from django.db import close_old_connections, connection, connections, transaction
from django.db.transaction import TransactionManagementError
from psycopg import sql

from scriba.protocols import CursorMove, FailureKind, WriteFailed
from scriba.targets.watch import Elsewhere, HandlerMisuse
from tests.integration.target.desk import Desk, own_connection, row
from tests.testapp.models import Counter, Row

IDS = "SELECT id FROM testapp_row ORDER BY id"


def by_copy() -> list[str]:
    with connection.cursor() as cursor, cursor.copy(f"COPY ({IDS}) TO STDOUT") as copy:
        return [line[0] for line in copy.rows()]


def by_stream() -> list[str]:
    with connection.cursor() as cursor:
        return [line[0] for line in cursor.stream(IDS)]


def by_callproc() -> list[str]:
    with connection.cursor() as cursor:
        cursor.callproc("ts_stat", ["SELECT to_tsvector('simple', id) FROM testapp_row"])
        return sorted(word for word, *_ in cursor.fetchall())


def by_raw_connection() -> list[str]:
    return [line[0] for line in connection.connection.execute(IDS)]


def by_raw_cursor() -> list[str]:
    with connection.connection.cursor() as cursor:
        return [line[0] for line in cursor.execute(sql.SQL(IDS))]


def by_raw_server_cursor() -> list[str]:
    with connection.connection.cursor("mine") as cursor:
        return [line[0] for line in cursor.execute(IDS.encode())]


def by_iterator() -> list[str]:
    return [obj.pk for obj in Row.objects.order_by("id").iterator(chunk_size=10)]


def by_raw_transaction() -> list[str]:
    with connection.connection.transaction():
        return by_raw_connection()


def by_pipeline() -> list[str]:
    with connection.connection.pipeline():
        return by_raw_connection()


def by_django_savepoint() -> list[str]:
    with transaction.atomic():
        return by_iterator()


WAYS = [
    by_copy, by_stream, by_callproc, by_raw_connection, by_raw_cursor, by_raw_server_cursor, by_iterator,
    by_raw_transaction, by_pipeline, by_django_savepoint,
]  # fmt: skip


@pytest.mark.case("C8")
@pytest.mark.parametrize("look", WAYS)
def test_every_way_to_the_database_sees_everything_before_it(desk: Desk, look: Callable[[], list[str]]) -> None:
    """The first statement of a handler flushes, whichever way it takes."""
    with desk.batch() as batch:
        batch.add([row("a")])
        assert batch.attempt(look) == ["a"]
        batch.add([row("b")])
        assert batch.attempt(by_iterator) == ["a", "b"]
        desk.settle(batch, CursorMove("s", 1, 2, 2), applied=2)

    assert desk.ids() == ["a", "b"]


def in_by_copy() -> None:
    with (
        connection.cursor() as cursor,
        cursor.copy("COPY testapp_row (id, name, amount, status, payload, updated_at) FROM STDIN") as copy,
    ):
        copy.write_row(["mine", "", 0, "", "{}", "2026-01-01"])


def in_by_raw_connection() -> None:
    connection.connection.execute(
        "INSERT INTO testapp_row (id, name, amount, status, payload, updated_at) VALUES ('mine', '', 0, '', '{}', now())"
    )


def in_by_raw_transaction() -> None:
    with connection.connection.transaction():
        in_by_raw_connection()


def in_by_pipeline() -> None:
    with connection.connection.pipeline():
        in_by_raw_connection()


@pytest.mark.case("C7", "C8")
@pytest.mark.parametrize("write", [in_by_copy, in_by_raw_connection, in_by_raw_transaction, in_by_pipeline])
def test_what_was_written_beside_django_is_undone_too(desk: Desk, write: Callable[[], None]) -> None:
    """A savepoint was set before it."""

    def handler() -> None:
        write()
        raise LookupError

    with desk.batch() as batch:
        batch.add([row("a")])
        with pytest.raises(LookupError):
            batch.attempt(handler)
        batch.attempt(write)
        assert batch.wrote
        desk.settle(batch, CursorMove("s", 1, 3, 3), applied=2)

    assert desk.ids() == ["a", "mine"]


@pytest.mark.case("C8")
def test_a_raw_cursor_kept_from_an_earlier_event_still_sees_everything(desk: Desk) -> None:
    """It has learned to ask, whoever keeps it."""
    kept: list[Any] = []

    with desk.batch() as batch:
        batch.attempt(lambda: kept.append(connection.connection.cursor()))
        batch.add([row("a")])
        assert batch.attempt(lambda: kept[0].execute(IDS).fetchall()) == [("a",)]
        batch.add([row("b")])

    with desk.batch() as batch:  # and in the next batch
        batch.add([row("c")])
        assert batch.attempt(lambda: kept[0].execute(IDS).fetchall()) == [("a",), ("b",), ("c",)]


@pytest.mark.case("C8")
def test_a_cursor_built_by_hand_is_refused(desk: Desk) -> None:
    """Nothing could have flushed before it; the message says where to take one from."""
    with desk.batch() as batch:
        batch.add([row("a")])
        with pytest.raises(HandlerMisuse, match=r"connection\.cursor\(\)"):
            batch.attempt(lambda: psycopg.ClientCursor(connection.connection).execute(IDS))
        desk.settle(batch, CursorMove("s", 1, 2, 1), applied=1)

    assert desk.ids() == ["a"]


@pytest.mark.case("C8")
def test_a_wrapper_that_a_handler_installs_does_not_see_our_statements(desk: Desk) -> None:
    """A handler that forbids itself queries must not forbid the flush of other events' writes."""

    def blocker(*args: Any) -> None:
        raise AssertionError("a query")

    def handler() -> list[str]:
        with connection.execute_wrapper(blocker):
            pass
        seen = []

        def note(execute: Any, sql: Any, *args: Any) -> Any:
            seen.append(sql.split()[0])
            return execute(sql, *args)

        with connection.execute_wrapper(note):
            Row.objects.count()
        return seen

    with desk.batch() as batch:
        batch.add([row("a")])
        assert batch.attempt(handler) == ["SELECT"]


# --- refused ------------------------------------------------------------------------------------------------


def says(*statements: str) -> Callable[[], None]:
    def handler() -> None:
        with connection.cursor() as cursor:
            for statement in statements:
                cursor.execute(statement)

    return handler


def driver_says(statement: Any) -> Callable[[], None]:
    return lambda: connection.connection.execute(statement)


FORBIDDEN = {
    "commit": says("COMMIT"),
    "commit behind a comment": says("/* so */ -- there\n commit;"),
    "commit behind a read": says("SELECT 1; COMMIT"),
    "rollback": says("SELECT 1", "ROLLBACK"),
    "end": says("END"),
    "begin": says("BEGIN"),
    "start transaction": says("START TRANSACTION"),
    "prepare": says("PREPARE TRANSACTION 'x'"),
    "set transaction": says("SET TRANSACTION ISOLATION LEVEL SERIALIZABLE"),
    "raw commit statement": driver_says("COMMIT"),
    "raw composed commit": driver_says(sql.SQL("COM{}").format(sql.SQL("MIT"))),
    "driver's commit()": lambda: connection.connection.commit(),
    "driver's rollback()": lambda: connection.connection.rollback(),
    "driver's close()": lambda: connection.connection.close(),
    "close()": lambda: connection.close(),
    "close_all()": connections.close_all,
    "close_old_connections()": close_old_connections,
}


@pytest.mark.case("C8")
@pytest.mark.parametrize("name", FORBIDDEN)
def test_a_handler_cannot_end_its_batchs_transaction(desk: Desk, name: str) -> None:
    """A clear error, and the batch goes on as if it had not been tried."""
    with desk.batch() as batch:
        batch.add([row("a")])
        with pytest.raises(HandlerMisuse, match="inside its batch's transaction"):
            batch.attempt(FORBIDDEN[name])
        batch.add([row("b")])
        desk.settle(batch, CursorMove("s", 1, 3, 3), applied=2)

    assert desk.ids() == ["a", "b"]


@pytest.mark.parametrize(
    "call", [lambda: connection.commit(), lambda: connection.rollback(), lambda: connection.set_autocommit(True)]
)
def test_what_django_itself_forbids_stays_forbidden(desk: Desk, call: Callable[[], None]) -> None:
    """Django's own error comes through, and nothing happens to the batch."""
    with desk.batch() as batch:
        batch.add([row("a")])
        with pytest.raises(TransactionManagementError):
            batch.attempt(call)
        desk.settle(batch, CursorMove("s", 1, 2, 1), applied=1)

    assert desk.ids() == ["a"]


def test_savepoints_of_its_own_are_a_handlers_right(desk: Desk) -> None:
    """ROLLBACK TO is no ROLLBACK."""

    def handler() -> None:
        with connection.cursor() as cursor:
            cursor.execute("SAVEPOINT mine")
            cursor.execute("DELETE FROM testapp_row")
            cursor.execute("ROLLBACK TO SAVEPOINT mine")
            cursor.execute("RELEASE SAVEPOINT mine")

    with desk.batch() as batch:
        batch.add([row("a")])
        batch.attempt(handler)
        desk.settle(batch, CursorMove("s", 1, 2, 2), applied=2)

    assert desk.ids() == ["a"]


# --- past help ----------------------------------------------------------------------------------------------


def leave_a_copy_unfinished(kept: list[Any]) -> None:
    copy = connection.cursor().copy("COPY testapp_counter (key, value) FROM STDIN")
    kept.extend([copy, copy.__enter__()])


def leave_a_pipeline_open(kept: list[Any]) -> None:
    pipeline = connection.connection.pipeline()
    kept.extend([pipeline, pipeline.__enter__()])


def leave_a_driver_transaction_open(kept: list[Any]) -> None:
    block = connection.connection.transaction()
    kept.extend([block, block.__enter__()])


def cut_the_wire(kept: list[Any]) -> None:
    connection.connection.pgconn.finish()


@pytest.mark.parametrize(
    "spoil", [leave_a_copy_unfinished, leave_a_pipeline_open, leave_a_driver_transaction_open, cut_the_wire]
)
def test_a_connection_spoiled_beyond_repair_ends_the_batch_and_never_halts(
    desk: Desk, spoil: Callable[[list[Any]], None]
) -> None:
    """Repeated a bounded number of times, so that the event is found; the next batch works."""
    kept: list[Any] = []
    with pytest.raises(WriteFailed) as caught, desk.batch() as batch:
        batch.add([row("a")])
        batch.attempt(lambda: spoil(kept))

    assert caught.value.failure.kind is FailureKind.TRANSIENT
    assert caught.value.failure.bounded
    kept.clear()
    gc.collect()
    with desk.batch() as batch:
        batch.add([row("b")])
        desk.settle(batch, CursorMove("s", 1, 1, 1), applied=1)
    assert desk.ids() == ["b"]


def test_a_transaction_ended_behind_everybodys_back_halts(desk: Desk) -> None:
    """What earlier events wrote is committed without their cursors: nothing may go on."""

    def handler() -> None:
        connection.connection.pgconn.exec_(b"COMMIT")

    with pytest.raises(WriteFailed) as caught, desk.batch() as batch:
        batch.attempt(handler)

    assert caught.value.failure.kind is FailureKind.STRUCTURAL


# --- another database -----------------------------------------------------------------------------------------


@pytest.fixture
def elsewhere(desk: Desk) -> Any:
    Elsewhere._warned.clear()
    with own_connection("other") as connection:
        yield connection


elsewhere_too = pytest.mark.django_db(databases=["default", "other"])


@elsewhere_too
@pytest.mark.case("C8")
@pytest.mark.parametrize(
    "write",
    [
        lambda: Counter.objects.using("other").create(key="x"),
        lambda: Row.objects.using("other").filter(id="x").delete(),
        lambda: connections["other"].cursor().execute("TRUNCATE testapp_counter"),
        lambda: connections["other"].cursor().copy("COPY testapp_counter FROM STDIN").__enter__(),
    ],
)
def test_a_write_to_another_database_is_the_events_failure(
    desk: Desk, elsewhere: Any, write: Callable[[], object]
) -> None:
    """It would not be undone with the batch; the message names both databases and the cure."""
    with desk.batch() as batch:
        with pytest.raises(HandlerMisuse, match=r"OrmTarget\(using='other'\)"):
            batch.attempt(write)
        batch.add([row("a")])
        desk.settle(batch, CursorMove("s", 1, 2, 2), applied=1)

    assert desk.ids() == ["a"]
    assert not Counter.objects.using("other").exists()


@elsewhere_too
@pytest.mark.case("C8")
def test_a_read_from_another_database_warns_once(desk: Desk, elsewhere: Any, caplog: pytest.LogCaptureFixture) -> None:
    """It is allowed: reference data may live there; but it is in no order with the events."""
    with caplog.at_level(logging.WARNING, "scriba"), desk.batch() as batch:
        for _ in range(3):
            assert batch.attempt(lambda: list(Counter.objects.using("other").all())) == []

    assert [record.args for record in caplog.records] == [(desk.identity, "other", "default")]


@elsewhere_too
def test_outside_of_handlers_other_databases_are_left_alone(
    desk: Desk, elsewhere: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Hooks after the commit may write wherever they like."""
    with caplog.at_level(logging.WARNING, "scriba"), desk.batch() as batch:
        batch.attempt(lambda: transaction.on_commit(lambda: Counter.objects.using("other").create(key="x")))

    assert Counter.objects.using("other").get().key == "x"
    assert not caplog.records
    Counter.objects.using("other").all().delete()
