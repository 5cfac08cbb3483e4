"""The ear on a store's NOTIFY channel: one thread, one connection, and nothing depends on it.

A notification only says *look now*; what it names is ignored. Notifications are lost while the connection is down,
so after each connect comes LISTEN first and then a hint to look. The reader polls in any case.
"""

from __future__ import annotations

import logging
import random
import select
import socket
import threading
from typing import TYPE_CHECKING, Any, Final

import psycopg
from psycopg import sql

if TYPE_CHECKING:
    from collections.abc import Callable

    from scriba.sources.commanded_connections import Connection

__all__ = ["Listener"]

logger = logging.getLogger("scriba")

ALIVE_EVERY_S: Final = 30.0  #: a silent connection is asked whether it is still there
BACKOFF_S: Final = (0.1, 0.5, 1.0, 5.0, 15.0)  #: between reconnects, plus up to half of it at random
_IMPOSSIBLE: Final = frozenset({"0A000", "25006", "42501"})  #: a replica, or a server that does not do LISTEN


class Listener:
    """Calls `on_hint` whenever the store may have something new. Start once, close once; any thread."""

    def __init__(self, connect: Callable[[], Connection], channel: str, on_hint: Callable[[], None], name: str) -> None:
        self._connect = connect
        self._channel = channel
        self._on_hint = on_hint
        self._name = name
        self._closing = threading.Event()
        self._waker, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name=f"{name} listener", daemon=True)
        self.listening = threading.Event()  #: set while the server sends us what happens

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End the thread and its connection. Twice is fine."""
        if not self._closing.is_set():
            self._closing.set()
            self._waker.send(b"x")
            self._thread.join(5)
            self._waker.close()
            self._woken.close()

    def _run(self) -> None:
        failures = 0
        while not self._closing.is_set():
            try:
                with self._connect() as connection:
                    connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(self._channel)))
                    failures = 0
                    self.listening.set()
                    self._on_hint()
                    self._listen(connection)
            except psycopg.Error as error:
                self.listening.clear()
                if error.sqlstate in _IMPOSSIBLE:
                    logger.warning("%s: no LISTEN here (%s): polling only", self._name, error)
                    break
                self._wait(failures, error)
                failures += 1
        self.listening.clear()

    def _listen(self, connection: Connection) -> None:
        """Pass on what arrives, until told to close. Raises when the connection is gone."""
        # What arrives together with the answer to a statement is dispatched by the driver itself.
        connection.add_notify_handler(lambda _notification: self._on_hint())
        while not self._closing.is_set():
            ready, _, _ = select.select([connection.fileno(), self._woken], [], [], ALIVE_EVERY_S)
            if not ready:
                connection.execute("SELECT 1")
            elif not self._closing.is_set() and _drain(connection):
                self._on_hint()

    def _wait(self, failures: int, error: Exception) -> None:
        wait_s = BACKOFF_S[min(failures, len(BACKOFF_S) - 1)] * random.uniform(1.0, 1.5)  # noqa: S311 - spreads load
        log: Any = logger.warning if failures == 0 else logger.debug
        log("%s: the listening connection is lost (%s); polling goes on, next try in %.1f s", self._name, error, wait_s)
        self._closing.wait(wait_s)


def _drain(connection: Connection) -> bool:
    """Read everything that waits, and say whether a notification was among it."""
    connection.pgconn.consume_input()
    found = False
    while connection.pgconn.notifies() is not None:
        found = True
    return found
