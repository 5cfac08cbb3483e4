"""Stores that the library eventsourcing writes for real: its PostgreSQL and SQLite recorders, and UmaDB."""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import psycopg
import pytest

pytest.importorskip("eventsourcing", reason='pip install "scriba[eventsourcing]"')

from psycopg.conninfo import conninfo_to_dict

from scriba.protocols import Identity, Shard
from scriba.sources.eventsourcing import EventSourcingSource, LogSubscription
from tests.support.processes import database_url

if TYPE_CHECKING:
    from tests.support.world import World

_numbers = itertools.count(1)


class Store(NamedTuple):
    """Where applications of a test keep their events, and how a source has to be told about it."""

    name: str
    env: dict[str, str]
    options: dict[str, Any]

    def open(self, application: Any) -> Any:
        """Construct a writing application."""
        return application(env=self.env)

    def source(self, application: Any, **options: Any) -> EventSourcingSource:
        env = {**self.env, **options.pop("env", {})}
        return EventSourcingSource(application, env=env, **{**self.options, **options})

    def subscribe(self, application: Any, resume: int | None = None, **options: Any) -> LogSubscription:
        return self.source(application, **options).subscribe(Identity("test", 1), [Shard(resume=resume)])


@pytest.fixture
def world(transactional_db: None, scratch_name: str) -> World:
    from tests.support.world import World

    return World(scratch_name)


@pytest.fixture
def sqlite_store(tmp_path: Path) -> Store:
    env = {"PERSISTENCE_MODULE": "eventsourcing.sqlite", "SQLITE_DBNAME": str(tmp_path / "events.sqlite")}
    return Store("sqlite", env, {})


@pytest.fixture
def postgres_store(db: None) -> Iterator[Store]:
    """A schema of its own in the test database, so that nothing has to be flushed between tests."""
    url = database_url()
    server = conninfo_to_dict(url)
    schema = f"es_{os.getpid()}_{next(_numbers)}"
    env = {
        "PERSISTENCE_MODULE": "eventsourcing.postgres",
        "POSTGRES_DBNAME": str(server["dbname"]),
        "POSTGRES_HOST": str(server.get("host") or "127.0.0.1"),
        "POSTGRES_PORT": str(server.get("port") or 5432),
        "POSTGRES_USER": str(server.get("user") or "postgres"),
        "POSTGRES_PASSWORD": str(server.get("password") or ""),
        "POSTGRES_SCHEMA": schema,
        "POSTGRES_POOL_SIZE": "1",
    }
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f"CREATE SCHEMA {schema}")
        yield Store("postgres", env, {})
        connection.execute(f"DROP SCHEMA {schema} CASCADE")


class UmaServer:
    """A UmaDB server, which comes with the wheel of its client. Can be stopped and started again on its file."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{probe.getsockname()[1]}"
        arguments = ["umadb", "--db-path", str(folder / "uma"), "--listen", self.address]
        self._code = f"import umadb; umadb.run_server_from_args({arguments!r})"
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        self._process = process = subprocess.Popen(
            [sys.executable, "-c", self._code], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert process.stdout is not None
        assert any("is listening" in line for line in process.stdout), "the UmaDB server did not start"

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.terminate()
            process.communicate(timeout=10)


@pytest.fixture
def umadb_server(tmp_path: Path) -> Iterator[UmaServer]:
    pytest.importorskip("umadb", reason="pip install umadb")
    server = UmaServer(tmp_path)
    server.start()
    yield server
    server.stop()


@pytest.fixture
def umadb_store(umadb_server: UmaServer) -> Store:
    import umadb

    factory = "tests.integration.eventsourcing.umadb_recorder:UmaFactory"
    env = {"PERSISTENCE_MODULE": factory, "UMADB_URI": f"http://{umadb_server.address}"}
    return Store("umadb", env, {"gaps": "ordered", "transient_errors": [umadb.TransportError]})


@pytest.fixture(params=["postgres", "sqlite", "umadb"])
def store(request: pytest.FixtureRequest) -> Store:
    """Each of them in turn: what holds for one recorder must hold for all."""
    return request.getfixturevalue(f"{request.param}_store")  # type: ignore[no-any-return]
