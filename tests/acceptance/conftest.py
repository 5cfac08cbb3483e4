"""The example project in processes of its own, on a database of its own, as a user's terminal would have it."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest

from tests.support.processes import REPOSITORY, database_url
from tests.support.waiting import wait_until

_numbers = itertools.count(1)


class Shop:
    """The example project on one database."""

    def __init__(self, url: str) -> None:
        self.url = url
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("DJANGO_", "SCRIBA_"))}
        self._environment = {**clean, "DATABASE_URL": url, "SCRIBA_LEASE_S": "1", "PYTHONUNBUFFERED": "1"}

    def manage(self, *arguments: str, timeout: float = 120, succeed: bool = True) -> str:
        """Run a command to its end; return what it printed, on either stream."""
        done = subprocess.run(
            [sys.executable, "manage.py", *arguments],
            cwd=REPOSITORY,
            env=self._environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout,
            check=False,
        )
        assert (done.returncode == 0) is succeed, f"manage.py {' '.join(arguments)} → {done.returncode}\n{done.stdout}"
        return done.stdout

    @contextmanager
    def managed(self, *arguments: str) -> Iterator[subprocess.Popen[str]]:
        """Start a command; on leaving it is killed if it still runs."""
        process = subprocess.Popen(
            [sys.executable, "manage.py", *arguments],
            cwd=REPOSITORY,
            env=self._environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        try:
            yield process
        finally:
            process.kill()
            process.communicate()

    def execute(self, sql: str, *params: Any) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.url, autocommit=True) as connection:
            cursor = connection.execute(sql, params)
            return cursor.fetchall() if cursor.description else []

    def count(self, sql: str, *params: Any) -> int:
        return int(self.execute(sql, *params)[0][0])

    def settled(self, name: str) -> int:
        """Return how many events `name` has settled."""
        return self.count(
            "SELECT COALESCE(sum(applied + skipped + dead_lettered), 0) FROM scriba_lanes"
            " JOIN scriba_segments ON segment_id = scriba_segments.id WHERE projection_name = %s",
            name,
        )

    def wait_settled(self, name: str, count: int) -> None:
        wait_until(lambda: self.settled(name) >= count, timeout=60, what=f"{name} to settle {count} events")


@contextmanager
def database(template: str = "template1") -> Iterator[str]:
    """Make a database on the tests' server, a copy of `template`; yield its name, and drop it."""
    name = f"shop_{os.getpid()}_{next(_numbers)}"
    _execute(f"CREATE DATABASE {name} TEMPLATE {template}")
    yield name
    _execute(f"DROP DATABASE {name} WITH (FORCE)")


def _execute(statement: str) -> None:
    """Over a connection of its own: one that stays open for a session may meet a test that ends connections."""
    with psycopg.connect(database_url(), autocommit=True) as connection:
        connection.execute(statement)


@pytest.fixture
def empty_shop(django_db_setup: None) -> Iterator[Shop]:
    """The example project on an empty database of its own."""
    with database() as name:
        yield Shop(database_url(database=name))


@pytest.fixture(scope="session")
def migrated(django_db_setup: None) -> Iterator[str]:
    """A database with the example project's tables, to be copied."""
    with database() as name:
        Shop(database_url(database=name)).manage("migrate", "-v0")
        yield name


@pytest.fixture
def shop(migrated: str) -> Iterator[Shop]:
    """The example project with its tables, and nothing in them."""
    with database(migrated) as name:
        yield Shop(database_url(database=name))


@pytest.fixture(scope="session")
def demonstrated(migrated: str) -> Iterator[str]:
    """A database that a demo has run on, to be copied."""
    with database(migrated) as name:
        Shop(database_url(database=name)).manage("demo", "--events", "1000", "--no-latency")
        yield name


@pytest.fixture
def shop_after_demo(demonstrated: str) -> Iterator[Shop]:
    """The example project as a demo has left it."""
    with database(demonstrated) as name:
        yield Shop(database_url(database=name))
