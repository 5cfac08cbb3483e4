"""The ear on a NOTIFY channel: one thread, one connection of its own, and nothing depends on it.

A notification only says *look now*. Notifications are lost while the connection is down, so each connect is LISTEN
first and then a hint to look; and the reader polls in any case.
"""

from __future__ import annotations

import logging
import random
import select
import socket
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import psycopg
from django.db import DatabaseError, InterfaceError, connections
from psycopg import sql

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

__all__ = ["Ear"]

logger = logging.getLogger("scriba")

ALIVE_EVERY_S: Final = 30.0  #: a silent connection is asked whether it is still there
BACKOFF_S: Final = (0.1, 0.5, 1.0, 5.0, 15.0)  #: between reconnects, plus up to half of it at random
CLOSE_WITHIN_S: Final = 5.0


class Ear:
    """Calls `on_hint` whenever `channel` of the database `using` says something. Start once, close once."""

    def __init__(self, using: str, channel: str, on_hint: Callable[[], None], name: str) -> None:
        self._using = using
        self._channel = channel
        self._on_hint = on_hint
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
            wrapper = self._wrapper()
            try:
                connection = self._listen(wrapper)
                failures = 0
                self._hear(connection)
            except (psycopg.Error, DatabaseError, InterfaceError) as error:
                self.listening.clear()
                self._back_off(failures, error)
                failures += 1
            finally:
                wrapper.close()
        self.listening.clear()

    def _wrapper(self) -> BaseDatabaseWrapper:
        """Return a connection as Django would open it (service files, roles, passwords), but outside of its pool."""
        copy: Callable[[], BaseDatabaseWrapper] = connections[self._using].copy
        wrapper = copy()
        wrapper.settings_dict["OPTIONS"].pop("pool", None)
        return wrapper

    def _listen(self, wrapper: BaseDatabaseWrapper) -> psycopg.Connection[Any]:
        wrapper.ensure_connection()
        connection: psycopg.Connection[Any] = wrapper.connection
        connection.set_autocommit(True)  # notifications never arrive inside a transaction
        # What arrives together with the answer to a statement is dispatched by the driver itself.
        connection.add_notify_handler(lambda _notification: self._on_hint())
        psycopg.Cursor(connection).execute(sql.SQL("LISTEN {}").format(sql.Identifier(self._channel)))
        self._on_hint()
        self.listening.set()
        return connection

    def _hear(self, connection: psycopg.Connection[Any]) -> None:
        """Pass on what arrives, until told to close. Raises when the connection is gone."""
        while not self._closing.is_set():
            ready, _, _ = select.select([connection.fileno(), self._hears_bell.fileno()], [], [], ALIVE_EVERY_S)
            if not ready:
                psycopg.Cursor(connection).execute("SELECT 1")
            elif not self._closing.is_set() and _drain(connection):
                self._on_hint()

    def _back_off(self, failures: int, error: Exception) -> None:
        wait_s = BACKOFF_S[min(failures, len(BACKOFF_S) - 1)] * random.uniform(1.0, 1.5)  # noqa: S311 - spreads load
        log = logger.warning if failures == 0 else logger.debug
        log("%s: the listening connection is lost (%s); polling goes on, next try in %.1f s", self._name, error, wait_s)
        self._closing.wait(wait_s)


def _drain(connection: psycopg.Connection[Any]) -> bool:
    """Read everything that waits, and say whether a notification was among it."""
    connection.pgconn.consume_input()
    found = False
    while connection.pgconn.notifies() is not None:
        found = True
    return found
