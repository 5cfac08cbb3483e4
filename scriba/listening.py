"""Hearing of NOTIFY: an ear with a thread and a connection of its own, one ear for many, and one that is borrowed.

A notification only says *look now*, and nothing depends on it. Notifications are lost while a connection is down, so
each connect is LISTEN first and then a hint to look; whoever listens polls in any case. Through a pooler in transaction
mode nothing is ever heard, and LISTEN would be left behind on a connection that belongs to others: there it is not said.
"""

from __future__ import annotations

import logging
import random
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import psycopg
from django.db import DatabaseError, InterfaceError, connections
from psycopg import sql

from scriba.conf import scriba_settings
from scriba.log_fields import about

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

__all__ = ["BorrowedEar", "Ear", "Switchboard", "is_pooled", "may_listen"]

logger = logging.getLogger("scriba")

Connection = psycopg.Connection[Any]
Connect = Callable[[], Connection]  #: opens a connection that the ear may keep to itself

ALIVE_EVERY_S: Final = 30.0  #: a silent connection is asked whether it is still there
BACKOFF_S: Final = (0.1, 0.5, 1.0, 5.0, 15.0)  #: between reconnects, plus up to half of it at random
CLOSE_WITHIN_S: Final = 5.0


def may_listen(using: str) -> bool:
    """Say whether anybody wants to listen on the database `using`."""
    return scriba_settings().listen and connections[using].vendor == "postgresql"


def is_pooled(connection: Connection) -> bool:
    """Say whether a pooler stands between us and the server: it hands out a process id of its own."""
    row = connection.execute("SELECT pg_backend_pid()").fetchone()
    return row is not None and row[0] != connection.info.backend_pid


class Ear:
    """Calls `on_hint` whenever `channel` says something. Start once, close once.

    `database` is an alias, or what opens a connection: a source may read a database that Django does not know. With
    `on_notice` that is called instead, with what was said; `on_hint` then only after each connect.
    """

    def __init__(
        self,
        database: str | Connect,
        channel: str,
        on_hint: Callable[[], None],
        name: str,
        on_notice: Callable[[str], None] | None = None,
    ) -> None:
        self._database = database
        self._channel = channel
        self._on_hint = on_hint
        self._on_notice = on_notice
        self._name = name
        self._closing = threading.Event()
        self._bell, self._hears_bell = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name=f"{name} ear", daemon=True)
        self.listening = threading.Event()  #: set while the server sends us what happens

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End the thread and its connection. Twice is fine."""
        if not self._closing.is_set():
            self._closing.set()
            self._bell.send(b"x")
            self._thread.join(CLOSE_WITHIN_S)
            self._bell.close()
            self._hears_bell.close()

    def _run(self) -> None:
        failures = 0
        while not self._closing.is_set():
            connection: Connection | None = None
            try:
                connection = self._connect()
                if isinstance(self._database, str) and is_pooled(connection):
                    self._give_up()
                    return
                self._listen(connection)
                failures = 0
                self._hear(connection)
            except (psycopg.Error, DatabaseError, InterfaceError) as error:
                self.listening.clear()
                self._back_off(failures, error)
                failures += 1
            finally:
                if connection is not None:
                    connection.close()
        self.listening.clear()

    def _connect(self) -> Connection:
        """Open a connection, of an alias as Django would (service files, roles, passwords), but outside of its pool."""
        if callable(self._database):
            return self._database()
        copy: Callable[[], BaseDatabaseWrapper] = connections[self._database].copy
        wrapper = copy()
        wrapper.settings_dict["OPTIONS"].pop("pool", None)
        wrapper.ensure_connection()
        connection: Connection = wrapper.connection
        connection.set_autocommit(True)
        return connection

    def _listen(self, connection: Connection) -> None:
        connection.set_autocommit(True)  # notifications never arrive inside a transaction
        # What arrives together with the answer to a statement is dispatched by the driver itself.
        connection.add_notify_handler(lambda notification: self._pass_on(notification.payload))
        _say(connection, "LISTEN {}", self._channel)
        self._on_hint()
        self.listening.set()

    def _hear(self, connection: psycopg.Connection[Any]) -> None:
        """Pass on what arrives, until told to close. Raises when the connection is gone."""
        while not self._closing.is_set():
            ready, _, _ = select.select([connection.fileno(), self._hears_bell.fileno()], [], [], ALIVE_EVERY_S)
            if not ready:
                psycopg.Cursor(connection).execute("SELECT 1")
            elif not self._closing.is_set():
                for payload in _drained(connection):
                    self._pass_on(payload)

    def _pass_on(self, payload: str) -> None:
        if self._on_notice is None:
            self._on_hint()
        else:
            self._on_notice(payload)

    def _give_up(self) -> None:
        logger.info(
            "%s: %r is reached through a connection pooler, through which nothing is heard: polling only",
            self._name,
            self._database,
            extra=about(None, channel=self._channel, listener=self._name),
        )

    def _back_off(self, failures: int, error: Exception) -> None:
        wait_s = BACKOFF_S[min(failures, len(BACKOFF_S) - 1)] * random.uniform(1.0, 1.5)  # noqa: S311 - spreads load
        logger.log(
            logging.DEBUG if failures else logging.WARNING,
            "%s: the listening connection is lost (%s); polling goes on, next try in %.1f s",
            self._name,
            error,
            wait_s,
            extra=about(None, channel=self._channel, listener=self._name),
        )
        self._closing.wait(wait_s)


class Switchboard:
    """One ear for the many of a process that wait for different payloads of one channel.

    It is opened by the first who joins and closed by the last who leaves. Any thread.
    """

    def __init__(self, using: str, channel: str) -> None:
        self._using = using
        self._channel = channel
        self._lock = threading.Lock()
        self._rings: dict[str, list[Callable[[], None]]] = {}
        self._ear: Ear | None = None

    def join(self, payload: str, ring: Callable[[], None]) -> Callable[[], None]:
        """Let `ring` be called when `payload` is said, and after each connect; return what ends that."""
        with self._lock:
            self._rings.setdefault(payload, []).append(ring)
            if self._ear is None and may_listen(self._using):
                name = f"scriba {self._channel} of {self._using}"
                self._ear = Ear(self._using, self._channel, self._ring_all, name, self._ring)
                self._ear.start()
        return lambda: self._leave(payload, ring)

    def _leave(self, payload: str, ring: Callable[[], None]) -> None:
        with self._lock:
            self._rings[payload].remove(ring)
            ear = None if any(self._rings.values()) else self._ear
            if ear is not None:
                self._ear = None
        if ear is not None:  # outside of the lock, which its thread takes to ring
            ear.close()

    def _ring(self, payload: str) -> None:
        with self._lock:
            rings = self._rings.get(payload, [])[:]
        for ring in rings:
            ring()

    def _ring_all(self) -> None:
        with self._lock:
            rings = [ring for several in self._rings.values() for ring in several]
        for ring in rings:
            ring()


class BorrowedEar:
    """Hears `payload` on `channel` over the caller's own connection to the database `using`, until it is closed.

    For somebody who waits for a moment in a thread of their own. It is deaf inside a transaction, where LISTEN would
    count only from its end, and where the connection cannot listen: then :meth:`wait` only lets time pass.
    """

    def __init__(self, using: str, channel: str, payload: str) -> None:
        self._wrapper: BaseDatabaseWrapper = connections[using]
        self._channel = channel
        self._payload = payload
        self._heard = False
        self._connection: psycopg.Connection[Any] | None = None
        if not self._wrapper.in_atomic_block and self._wrapper.get_autocommit() and may_listen(using):
            self._open()

    @property
    def is_deaf(self) -> bool:
        return self._connection is None

    def wait(self, seconds: float) -> bool:
        """Wait until the payload is said, at most `seconds`; say whether it was."""
        deadline = time.monotonic() + seconds
        while not self._heard and (left_s := deadline - time.monotonic()) > 0:
            self._hear(left_s)
        heard, self._heard = self._heard, False
        return heard

    def close(self) -> None:
        """Give the connection back as it was. Twice is fine."""
        connection, self._connection = self._connection, None
        if connection is None:
            return
        connection.remove_notify_handler(self._note)
        try:
            _say(connection, "UNLISTEN {}", self._channel)
        except psycopg.Error:  # closed, with everything it listened to
            return

    def _open(self) -> None:
        try:
            self._wrapper.ensure_connection()
            connection: Connection = self._wrapper.connection
            if is_pooled(connection):
                return
            _say(connection, "LISTEN {}", self._channel)
        except (psycopg.Error, DatabaseError, InterfaceError):  # a standby that accepts no LISTEN; or nothing at all
            return
        connection.add_notify_handler(self._note)  # what arrives together with the answer to another statement
        self._connection = connection

    def _hear(self, seconds: float) -> None:
        connection = self._connection
        if connection is None:
            time.sleep(seconds)  # noqa: TID251 - the caller waits in its own thread
            return
        try:
            ready, _, _ = select.select([connection.fileno()], [], [], seconds)
            for payload in _drained(connection) if ready else []:
                self._heard = self._heard or payload == self._payload
        except (psycopg.Error, OSError):  # gone: the next statement of its owner says so
            self._connection = None

    def _note(self, notification: psycopg.Notify) -> None:
        self._heard = self._heard or (notification.channel, notification.payload) == (self._channel, self._payload)


def _say(connection: psycopg.Connection[Any], statement: str, channel: str) -> None:
    psycopg.Cursor(connection).execute(sql.SQL(statement).format(sql.Identifier(channel)))


def _drained(connection: psycopg.Connection[Any]) -> list[str]:
    """Read everything that waits, and return what was said."""
    connection.pgconn.consume_input()
    payloads = []
    while (notification := connection.pgconn.notifies()) is not None:
        payloads.append(notification.extra.decode(errors="replace"))
    return payloads
