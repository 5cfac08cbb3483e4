"""The world around a ledger: other processes' workers, frozen or busy, and rows to look at."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from django.db import DatabaseError, connections
from django.db.backends.base.base import BaseDatabaseWrapper
from psycopg.conninfo import conninfo_to_dict

from scriba.connection import OwnConnection
from scriba.ledger import PgLedger
from scriba.protocols import Identity, Lease, Progress, Recorded, Status
from tests.support.leftovers import forget
from tests.support.proxy import Proxy

USING = "default"
LEASE_S = 1.0
RECORDED = Recorded("stream_id", "events", "crc")
RUNNING = Progress(Status.RUNNING)
SOON_S = 10.0  # only a failing test waits so long

_numbers = itertools.count(1)


def fresh_identity(name: str = "ledger") -> Identity:
    return Identity(f"{name}-{os.getpid()}-{next(_numbers)}", 1)


class Desk:
    """One projection's rows, and ledgers on them. Everything it opened is closed, everything it wrote deleted."""

    def __init__(self) -> None:
        self.identity = fresh_identity()
        self.rows = OwnConnection(USING)
        self._closing: list[Callable[[], None]] = [self.rows.close]

    def ledger(self, *, registered: bool = True) -> PgLedger:
        ledger = PgLedger(self.identity, USING)
        self._closing.append(ledger.close)
        if registered:
            ledger.register(RECORDED)
        return ledger

    def owned(self, owner: str = "old") -> tuple[PgLedger, Lease]:
        ledger = self.ledger()
        lease = ledger.acquire(owner, LEASE_S)
        assert isinstance(lease, Lease), lease
        return ledger, lease

    def worker(self) -> Worker:
        worker = Worker()
        self._closing.append(worker.close)
        return worker

    def segment(self, *columns: str) -> Any:
        found = self.rows.rows(
            f"SELECT {', '.join(columns)} FROM scriba_segments WHERE projection_name = %s", [self.identity.name]
        )[0]
        return found if len(columns) > 1 else found[0]

    def expire(self) -> None:
        """Let the lease run out, as if its owner had been silent."""
        self.rows.rows(
            "UPDATE scriba_segments SET lease_expires_at = now() - interval '1 ms' WHERE projection_name = %s",
            [self.identity.name],
        )

    def seed(self, **cursors: int) -> None:
        for key, position in cursors.items():
            self.rows.rows(
                "INSERT INTO scriba_positions (projection_name, projection_version, stream_id, position) "
                "VALUES (%s, %s, %s, %s)",
                [*self.identity, key, position],
            )

    def cursors(self) -> dict[str, int]:
        sql = "SELECT stream_id, position FROM scriba_positions WHERE projection_name = %s AND projection_version = %s"
        return dict(self.rows.rows(sql, self.identity))

    def close(self) -> None:
        for worker in reversed(self._closing[1:]):
            worker()
        forget(self.identity.name, self.rows.rows)
        self.rows.close()


class ProxiedConnection(OwnConnection):
    """One that goes over TCP, through `proxy`."""

    def __init__(self, using: str, proxy: Proxy) -> None:
        super().__init__(using)
        self._way = conninfo_to_dict(proxy.dsn)

    def _copy(self) -> BaseDatabaseWrapper:
        wrapper = super()._copy()
        wrapper.settings_dict |= {"HOST": self._way["host"], "PORT": self._way["port"]}
        wrapper.settings_dict["OPTIONS"] |= {"sslmode": "disable", "gssencmode": "disable"}
        return wrapper


class Worker:
    """A connection like that of a batch: it checks the fence first and holds what the check locks until it ends."""

    def __init__(self) -> None:
        self._wrapper: BaseDatabaseWrapper = connections[USING].copy()  # type: ignore[attr-defined]
        self._wrapper.inc_thread_sharing()
        self._wrapper.set_autocommit(False)
        self.pid: int = self.execute("SELECT pg_backend_pid()")[0][0]
        self._wrapper.rollback()

    @property
    def is_local(self) -> bool:
        """Whether the backend is a process of this machine, which may be stopped and continued."""
        command = Path(f"/proc/{self.pid}/cmdline")
        return command.exists() and command.read_bytes().startswith(b"postgres:")

    def execute(self, sql: str, params: Any = ()) -> list[Any]:
        with self._wrapper.cursor() as cursor:
            cursor.execute(sql, params)
            return cursor.fetchall() if cursor.description else []

    def passes(self, lease: Lease) -> bool:
        """The first statement of every batch."""
        sql = "SELECT 1 FROM scriba_segments WHERE id = %s AND epoch = %s FOR KEY SHARE"
        return bool(self.execute(sql, [lease.segment, lease.epoch]))

    def writes(self, identity: Identity, key: str) -> None:
        self.execute(
            "INSERT INTO scriba_positions (projection_name, projection_version, stream_id, position) VALUES (%s, %s, %s, 1)",
            [*identity, key],
        )

    def commits(self) -> bool:
        try:
            self._wrapper.commit()
        except DatabaseError:
            return False
        return True

    def roll_back(self) -> None:
        self._wrapper.rollback()

    def close(self) -> None:
        try:
            self._wrapper.close()
        except DatabaseError:
            self._wrapper.connection = None  # its backend was ended


def is_waiting(rows: OwnConnection, pid: int, *events: str) -> bool:
    found = rows.rows("SELECT wait_event FROM pg_stat_activity WHERE pid = %s AND wait_event_type = 'Lock'", [pid])
    return bool(found) and (not events or found[0][0] in events)
