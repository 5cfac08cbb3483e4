"""A ledger's own connection: not the test's, not the request's, and never a broken one twice."""

from __future__ import annotations

import os
import socket

import pytest
from django.db import DatabaseError, connection, connections
from psycopg import IsolationLevel

from scriba.connection import OwnConnection
from scriba.exceptions import ConfigurationError
from scriba.ledger import PgLedger
from scriba.protocols import Identity, Orders, Wish
from tests.integration.ledger.support import LEASE_S, RUNNING, USING, Desk, ProxiedConnection
from tests.support.processes import database_url
from tests.support.proxy import Proxy


def pid_of(own: OwnConnection) -> int:
    return int(own.rows("SELECT pg_backend_pid()")[0][0])


def test_a_ledger_neither_sees_nor_disturbs_the_transaction_around_it(desk: Desk) -> None:
    """A handler's or a test's transaction may fail, roll back or never end: ownership is not part of it."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid(), txid_current()")
        pid, transaction_id = cursor.fetchone()
        ledger = desk.ledger(registered=False)
        ledger.set_wish(Wish.PAUSED)
        cursor.execute("SELECT pg_backend_pid(), txid_current(), (SELECT wish FROM scriba_projections WHERE projection_name = %s)",
                       [desk.identity.name])  # fmt: skip
        assert cursor.fetchone() == (pid, transaction_id, "paused")
    assert connection.in_atomic_block
    assert pid_of(ledger._connection) != pid


@pytest.mark.case("A10", "D8")
def test_a_connection_that_broke_is_transient_and_replaced_at_the_next_call(desk: Desk) -> None:
    """A terminated backend costs one error that may be repeated, and no owner has to open anything."""
    ledger, lease = desk.owned()
    for _ in range(3):
        desk.rows.rows("SELECT pg_terminate_backend(%s)", [pid_of(ledger._connection)])

        with pytest.raises(DatabaseError) as broken:
            ledger.orders()

        assert ledger.transient(broken.value)
        assert ledger.heartbeat(lease, LEASE_S, RUNNING)


def test_a_connection_that_breaks_inside_a_transaction_is_replaced_too(desk: Desk) -> None:
    """Nothing of the transaction is kept; the next call starts anew."""
    own = OwnConnection(USING)
    pid = pid_of(own)

    with pytest.raises(DatabaseError), own.transaction() as cursor:
        desk.rows.rows("SELECT pg_terminate_backend(%s)", [pid])
        cursor.execute("SELECT 1")

    assert pid_of(own) != pid
    own.close()


@pytest.mark.case("D8")
@pytest.mark.django_db
def test_a_dead_network_is_noticed_within_a_minute() -> None:
    """Whoever waits for an answer that cannot come is told so by the kernel; the project's own OPTIONS come first."""
    with Proxy(database_url()) as proxy:
        own = ProxiedConnection(USING, proxy)
        own.rows("SELECT 1")
        connection = own._open().connection
        with socket.socket(fileno=os.dup(connection.fileno())) as line:
            options = [
                line.getsockopt(level, option)
                for level, option in (
                    (socket.SOL_SOCKET, socket.SO_KEEPALIVE),
                    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE),
                    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL),
                    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT),
                    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT),
                )
            ]
        own.close()

    assert options == [1, 20, 5, 3, 30_000]


def test_what_the_project_says_of_its_connections_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A default is only for what OPTIONS leave open."""
    monkeypatch.setitem(connections[USING].settings_dict, "OPTIONS", {"connect_timeout": 3})

    options = OwnConnection(USING)._open().settings_dict["OPTIONS"]

    assert (options["connect_timeout"], options["keepalives_idle"]) == (3, 20)


def test_a_failed_statement_does_not_cost_the_connection(desk: Desk) -> None:
    """Only a broken connection is replaced."""
    own = OwnConnection(USING)
    pid = pid_of(own)

    with pytest.raises(DatabaseError):
        own.rows("SELECT 1 FROM no_such_table")

    assert pid_of(own) == pid
    own.close()


def test_a_missing_table_is_not_transient(desk: Desk) -> None:
    """What no repetition mends must not be repeated for ever."""
    own = OwnConnection(USING)
    with pytest.raises(DatabaseError) as missing:
        own.rows("SELECT 1 FROM no_such_table")
    own.close()

    assert not desk.ledger(registered=False).transient(missing.value)
    assert not desk.ledger(registered=False).transient(ValueError("no database at all"))


def test_closing_twice_and_using_it_again_is_fine(desk: Desk) -> None:
    """A closed ledger opens a connection when it is asked something."""
    ledger = desk.ledger(registered=False)
    ledger.orders()
    ledger.close()
    ledger.close()

    assert ledger.orders() == Orders(Wish.RUNNING)


def test_a_pool_and_a_stricter_isolation_level_are_left_out(desk: Desk) -> None:
    """A pool of four is sized for workers, and a guarded update under REPEATABLE READ would fail instead of waiting."""
    options = connections[USING].settings_dict["OPTIONS"]
    own = OwnConnection(USING)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(options, "pool", {"max_size": 1})
        patch.setitem(options, "isolation_level", IsolationLevel.SERIALIZABLE)

        assert own.rows("SHOW transaction_isolation") == [("read committed",)]
        with own.transaction() as cursor:  # the driver says the level with BEGIN only
            cursor.execute("SHOW transaction_isolation")
            assert cursor.fetchall() == [("read committed",)]

        assert options["pool"] == {"max_size": 1}
    own.close()


def test_another_database_than_postgresql_is_refused_with_a_name() -> None:
    """Scriba's state needs PostgreSQL; a project may have other databases beside it."""
    lite = {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}
    lite = connections.configure_settings({"default": {}, "lite": lite})["lite"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(connections.settings, "lite", lite)

        with pytest.raises(ConfigurationError, match="'lite' is SQLite"):
            PgLedger(Identity("orders", 1), "lite").orders()
