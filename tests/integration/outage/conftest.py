"""A PostgreSQL of these tests' own, to be stopped, crashed and restarted without hurting any other test."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest

from example_project.embedded import EmbeddedPostgres
from tests.support.processes import REPOSITORY, environment, managed
from tests.support.server import SETTINGS, guarded
from tests.support.waiting import wait_until


class Elsewhere:
    """A server that may fall, with the test suite's tables, and processes that run on it."""

    def __init__(self, server: EmbeddedPostgres) -> None:
        self.server = server
        self.url = server.ensure_running()

    def execute(self, sql: str, *params: Any) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.url, autocommit=True) as connection:
            cursor = connection.execute(sql, params)
            return cursor.fetchall() if cursor.description else []

    def append(self, *streams: str, data: str = "{}") -> list[int]:
        sql = (
            "INSERT INTO testapp_event (stream_id, type, data, metadata, occurred_at) "
            "SELECT unnest(%s::text[]), 'Happened', %s::jsonb, '{}', now() RETURNING id"
        )
        return [row[0] for row in self.execute(sql, list(streams), data)]

    def applied(self, name: str) -> list[int]:
        return [
            row[0]
            for row in self.execute("SELECT position FROM testapp_applied WHERE projection = %s ORDER BY id", name)
        ]

    def wait_applied(self, name: str, count: int, timeout: float = 60) -> None:
        wait_until(lambda: len(self.applied(name)) >= count, timeout=timeout, what=f"{count} applied events")

    @contextmanager
    def running(self, name: str, *more: str) -> Iterator[subprocess.Popen[str]]:
        with managed("run_projections", name, *more, DATABASE_URL=self.url) as process:
            yield process

    def check(self, name: str, positions: list[int]) -> None:
        """Exactly once, nothing dead-lettered, and the counters say the same."""
        applied = self.applied(name)
        assert sorted(applied) == sorted(positions), f"missing {set(positions) - set(applied)}, applied {len(applied)}"
        assert self.execute("SELECT error_kind FROM scriba_dead_letters WHERE projection_name = %s", name) == []
        counted = self.execute(
            "SELECT sum(applied) + sum(skipped) - sum(deduplicated) + sum(dead_lettered) FROM scriba_lanes "
            "JOIN scriba_segments AS segment ON segment.id = segment_id WHERE projection_name = %s",
            name,
        )
        assert counted == [(len(positions),)]


@pytest.fixture(scope="module")
def _server() -> Iterator[EmbeddedPostgres]:
    server = EmbeddedPostgres(Path(tempfile.mkdtemp(prefix="scriba-outage-")), settings=SETTINGS)
    guard = guarded(server)
    server.ensure_running()
    environ = environment(DATABASE_URL=server.url())
    subprocess.run(
        [sys.executable, "-m", "django", "migrate", "--run-syncdb", "-v0"], cwd=REPOSITORY, env=environ, check=True
    )
    yield server
    server.remove()
    if guard.stdin is not None:
        guard.stdin.close()
    guard.wait(20)


@pytest.fixture
def elsewhere(_server: EmbeddedPostgres) -> Elsewhere:
    place = Elsewhere(_server)
    place.execute(
        "TRUNCATE testapp_event, testapp_applied, scriba_positions, scriba_dead_letters, scriba_projections, "
        "scriba_lanes, scriba_segments RESTART IDENTITY CASCADE"
    )
    return place
