"""D11: through a transaction-mode pooler everything works by polling, and is as exact as without one.

No session outlives a transaction there: no LISTEN, no session lock, no prepared statement. PgBouncer is Debian's
package; where it is not installed these tests are skipped and say so.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from django.db import connection, connections
from psycopg.conninfo import conninfo_to_dict

import scriba
from scriba import listening
from scriba.protocols import Status
from tests.support.processes import database_url, managed
from tests.support.waiting import wait_until
from tests.support.world import World

PGBOUNCER = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin")

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif(PGBOUNCER is None, reason="PgBouncer is not installed (Debian: apt-get install pgbouncer)"),
]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def pooled(transactional_db: None, tmp_path: Path) -> Iterator[str]:
    """Start PgBouncer in transaction mode in front of the test database; the URL that leads through it."""
    behind = conninfo_to_dict(database_url())
    port = _free_port()
    config = tmp_path / "pgbouncer.ini"
    config.write_text(
        f"[databases]\n* = host={behind['host']} port={behind['port']} user={behind['user']}\n"
        f"[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\nauth_type = any\n"
        "pool_mode = transaction\ndefault_pool_size = 6\nmax_client_conn = 100\nserver_reset_query_always = 0\n"
        f"logfile = {tmp_path}/pgbouncer.log\nignore_startup_parameters = extra_float_digits\n"
    )
    command = [str(PGBOUNCER), "-q", str(config)]
    if os.geteuid() == 0:  # it refuses to run as root, and only root can reach the server's socket
        command[:0] = ["unshare", "-U", "--map-user=1000", "--map-group=1000"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    url = f"postgresql://{behind['user']}@127.0.0.1:{port}/{behind['dbname']}"

    def answers() -> bool:
        assert process.poll() is None, (process.stderr.read() if process.stderr else b"").decode()
        try:
            psycopg.connect(url, connect_timeout=2).close()
        except psycopg.OperationalError:
            return False
        return True

    try:
        wait_until(answers, what="PgBouncer")
        yield url
    finally:
        process.kill()
        process.wait(10)


@pytest.mark.case("D11")
def test_a_projection_behind_a_pooler_is_exact(pooled: str) -> None:
    """Catch-up and tail by polling, with more workers than the pool has connections to spare."""
    world = World("noting")
    positions = world.append_many(300)
    with managed("run_projections", "noting", DATABASE_URL=pooled) as process:
        world.wait_applied(300)
        for n in range(20):
            positions += world.append(f"s{n}")
        world.wait_applied(320)
        process.terminate()
        assert process.wait(20) == 0

    world.check(positions)


@pytest.mark.case("D11", "A6", "A13")
def test_ownership_behind_a_pooler_survives_a_stopped_owner(pooled: str) -> None:
    """The lease is a row, not a session lock: takeover, SIGCONT and exact totals work the same."""
    world = World("noting")
    positions = world.append_many(50)
    with managed("run_projections", "noting", DATABASE_URL=pooled) as owner:
        world.wait_applied(50)
        with managed("run_projections", "noting", DATABASE_URL=pooled):
            owner.send_signal(signal.SIGSTOP)
            positions += world.append_many(50)
            world.wait_applied(100)
            owner.send_signal(signal.SIGCONT)
            positions += world.append_many(50)
            world.wait_applied(150)

    world.check(positions)


@pytest.fixture
def pooled_alias(pooled: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A database alias of this process, for those who listen, that leads through PgBouncer."""
    parts = conninfo_to_dict(pooled)
    wrapper: Any = connections["default"].copy()  # type: ignore[attr-defined]
    wrapper.settings_dict |= {"HOST": parts["host"], "PORT": parts["port"], "USER": parts["user"]}
    monkeypatch.setattr(listening, "connections", {"pooled": wrapper})
    yield "pooled"
    wrapper.close()


@pytest.mark.case("D11")
def test_behind_a_pooler_nobody_listens_and_wishes_are_followed_by_looking(pooled: str, pooled_alias: str) -> None:
    """LISTEN would stay behind on a connection that belongs to others; all that is lost is a moment."""
    with managed("run_projections", "noting", DATABASE_URL=pooled):
        wait_until(lambda: scriba.info("noting").status == Status.RUNNING, what="it to run")
        scriba.pause("noting", wait=True)
        scriba.resume("noting", wait=True)
        ear = listening.BorrowedEar(pooled_alias, "scriba_settled", "noting:1")
        assert ear.is_deaf
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND query LIKE 'LISTEN%'"
            )
            assert cursor.fetchone() == (0,)


@pytest.mark.case("D11", "C7", "B1")
def test_handlers_that_write_and_fail_behind_a_pooler(pooled: str) -> None:
    """Savepoints, undo and dead letters stay inside one transaction, which is all that a pooler keeps together."""
    world = World("writing")
    positions = world.append("a", "b", "a")
    bad = world.append("b", fail=True)
    positions += world.append("b")
    with managed("run_projections", "writing", DATABASE_URL=pooled):
        world.wait_applied(4)
        wait_until(world.letters, what="the dead letter")

    world.check([*positions, *bad], dead=bad)
