"""A worker's connection: kept while it is good, dropped when it is not, never a burden."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from django.db import OperationalError, connection, connections
from django.test import override_settings

from scriba.protocols import CursorMove, WriteFailed
from scriba.targets import connections as hygiene
from tests.integration.target.desk import Desk, own_connection, row
from tests.testapp.models import Row


def settle_one(desk: Desk, position: int) -> int:
    """Settle one event in a batch of its own; return the backend that did it."""
    with desk.batch() as batch:
        batch.add([row(str(position))])
        desk.settle(batch, CursorMove("s", position, position, position), applied=1)
        return connection.connection.info.backend_pid


def terminate(desk: Desk, pid: int) -> None:
    assert desk.execute("SELECT pg_terminate_backend(%s, 5000)", pid) == [(True,)]


@pytest.mark.parametrize("max_age", [0, 60, None])
def test_one_connection_serves_many_batches(desk: Desk, max_age: int | None) -> None:
    """Whatever CONN_MAX_AGE says: its default of 0 is for requests, and would connect anew for each batch."""
    connection.settings_dict["CONN_MAX_AGE"] = max_age
    connection.close()

    assert len({settle_one(desk, position) for position in range(1, 20)}) == 1


def test_a_connection_beyond_its_age_is_renewed(desk: Desk) -> None:
    """CONN_MAX_AGE counts; without it, an hour does."""
    connection.settings_dict["CONN_MAX_AGE"] = 60
    connection.close()
    first = settle_one(desk, 1)
    connection.close_at = time.monotonic() - 1
    second = settle_one(desk, 2)
    connection.settings_dict["CONN_MAX_AGE"] = 0
    connection.close_at = time.monotonic() - hygiene.OLDEST_S + 60
    assert settle_one(desk, 3) == second
    connection.close_at = time.monotonic() - hygiene.OLDEST_S - 1

    assert len({first, second, settle_one(desk, 4)}) == 3


@pytest.mark.case("A10")
@pytest.mark.parametrize("when", ["between", "first statement", "write", "commit"])
def test_a_terminated_backend_costs_one_batch_at_most(desk: Desk, when: str) -> None:
    """The broken connection never meets a second batch; what had not committed is not there."""
    pid = settle_one(desk, 1)
    if when == "between":
        terminate(desk, pid)
    try:
        with desk.batch() as batch:
            if when == "first statement":
                terminate(desk, pid)
            batch.add([row("2")])
            if when == "write":
                terminate(desk, pid)
            desk.settle(batch, CursorMove("s", 2, 2, 2), applied=1)
            if when == "commit":
                terminate(desk, pid)
    except (OperationalError, WriteFailed) as error:
        assert isinstance(error, OperationalError)
        assert connection.connection is None or not connection.connection.closed

    assert desk.ids() == ["1"]
    assert settle_one(desk, 2) != pid
    assert desk.ids() == ["1", "2"]
    assert desk.cursors() == {"s": 2}


@pytest.mark.parametrize("is_noticed", [True, False])
def test_the_first_error_comes_out_although_the_server_is_gone(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, is_noticed: bool
) -> None:
    """Rolling back a broken connection must not connect anew, nor put another error in the first one's place."""
    error = LookupError("the first")

    def refuse(*args: Any) -> None:
        raise OperationalError("the server is down")

    with pytest.raises(LookupError) as caught, desk.batch() as batch:
        pid = connection.connection.info.backend_pid
        terminate(desk, pid)
        if is_noticed:
            with pytest.raises(OperationalError):
                batch.cursors(["a"])
        monkeypatch.setattr(connections["default"], "get_new_connection", refuse)
        raise error

    assert caught.value is error


@pytest.mark.case("D8")
def test_a_connection_that_fell_silent_is_tried_before_it_is_used(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a long idle time the next batch works at once, although a firewall has dropped the connection."""
    pid = settle_one(desk, 1)
    terminate(desk, pid)
    monkeypatch.setattr(hygiene, "LONGEST_IDLE_S", -1.0)

    assert settle_one(desk, 2) != pid
    assert desk.ids() == ["1", "2"]


def test_a_busy_connection_is_not_tried(desk: Desk) -> None:
    """A look before each batch would be a round trip for nothing."""
    settle_one(desk, 1)
    connection.force_debug_cursor = True
    statements = []
    usable = connection.is_usable
    connection.is_usable = lambda: statements.append("looked") or usable()
    settle_one(desk, 2)

    assert statements == []


def test_autocommit_left_off_by_somebody_does_not_lose_batches(desk: Desk) -> None:
    """Django's atomic() would leave the commit to whoever turned it off."""
    settle_one(desk, 1)
    connection.set_autocommit(False)
    settle_one(desk, 2)

    assert desk.ids() == ["1", "2"]


def test_an_alias_with_autocommit_off_in_its_settings_commits_all_the_same(desk: Desk) -> None:
    """The setting is for those who manage transactions themselves; a batch is one."""
    connection.close()
    connection.settings_dict["AUTOCOMMIT"] = False

    settle_one(desk, 1)
    settle_one(desk, 2)

    assert desk.ids() == ["1", "2"]


@pytest.mark.case("D7")
def test_debug_does_not_grow_the_query_log(desk: Desk) -> None:
    """A worker runs for months, also where DEBUG was left on."""
    with override_settings(DEBUG=True):
        sizes = []
        for position in range(1, 40):
            settle_one(desk, position)
            sizes.append((len(connection.queries_log), sum(map(sys.getsizeof, connection.queries_log))))

    assert set(sizes) == {(0, 0)}


def test_nothing_of_the_watching_stays_behind(desk: Desk) -> None:
    """After a batch the connection, Django's and the driver's, is as it was before."""
    settle_one(desk, 1)
    before = _traces()
    settle_one(desk, 2)
    with pytest.raises(LookupError), desk.batch() as batch:
        batch.attempt(Row.objects.count)
        raise LookupError

    assert _traces() == before
    assert not connection.execute_wrappers
    assert connection.connection.cursor.__func__ is type(connection.connection).cursor


def _traces() -> tuple[set[str], set[str]]:
    return set(vars(connections["default"])), set(vars(connection.connection))


def test_closing_twice_is_fine_and_leaves_no_connection(desk: Desk) -> None:
    """A worker ends by closing what its thread has opened."""
    settle_one(desk, 1)
    for _ in range(2):
        desk.writer.close()

    assert connection.connection is None


# --- Django's connection pool -----------------------------------------------------------------------------------


@pytest.fixture
def pooled(desk: Desk) -> Iterator[Desk]:
    with own_connection("default") as wrapper:
        wrapper.settings_dict["CONN_MAX_AGE"] = 0
        wrapper.settings_dict["OPTIONS"]["pool"] = {"min_size": 1, "max_size": 1, "timeout": 5.0}
        wrapper.alias = "default"
        try:
            yield desk
        finally:
            wrapper.close()
            wrapper.close_pool()


def test_a_pool_has_its_connection_back_after_each_batch(pooled: Desk) -> None:
    """With one connection in the pool, two writers take turns."""
    for position in range(1, 6):
        settle_one(pooled, position)
        assert connection.connection is None

    assert len(pooled.ids()) == 5


def test_a_pool_gets_it_back_without_a_trace(pooled: Desk) -> None:
    """Another part of the program may be the next to use it."""
    pid = settle_one(pooled, 1)
    with connection.cursor() as cursor:
        driver = connection.connection
        assert driver.info.backend_pid == pid
        cursor.execute("SELECT 1")
        assert driver.cursor.__func__ is type(driver).cursor
        assert connection.get_autocommit()


def test_a_broken_connection_of_a_pool_is_replaced(pooled: Desk) -> None:
    """By the pool; the writer only hands it back."""
    pid = settle_one(pooled, 1)
    with pytest.raises(OperationalError), pooled.batch() as batch:
        terminate(pooled, pid)
        batch.cursors(["a"])

    assert settle_one(pooled, 2) != pid
    assert pooled.ids() == ["1", "2"]


def test_an_unfinished_copy_does_not_block_the_pool(pooled: Desk) -> None:
    """Its connection is closed by force: the pool would wait for it, for ever."""
    kept: list[Any] = []

    def handler() -> None:
        copy = connection.cursor().copy("COPY testapp_counter (key, value) FROM STDIN")
        kept.extend([copy, copy.__enter__()])

    with pytest.raises(WriteFailed), pooled.batch() as batch:
        batch.attempt(handler)

    settle_one(pooled, 1)
    assert pooled.ids() == ["1"]
