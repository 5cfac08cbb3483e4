"""The tutorial for users of the library eventsourcing works as it is written, on their own recorder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

pytest.importorskip("eventsourcing", reason='pip install "scriba[eventsourcing]"')
pytest.importorskip("psycopg_pool", reason='pip install "eventsourcing[postgres]"')

from tests.acceptance.test_tutorial import FENCE, commands, run, surroundings, write
from tests.support.processes import REPOSITORY, database_url

PAGE = REPOSITORY / "docs/tutorial/eventsourcing.md"


@pytest.fixture
def database(db: None) -> Iterator[str]:
    """A database of this tutorial's own on the tests' server; its name."""
    name = f"tutorial_es_{os.getpid()}"
    with psycopg.connect(database_url(), autocommit=True) as connection:
        connection.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")
        connection.execute(f"CREATE DATABASE {name}")
        yield name
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)")
        connection.execute(f"DROP DATABASE IF EXISTS test_{name} WITH (FORCE)")


@pytest.mark.timeout(300)
def test_the_tutorial_works_as_it_is_written(tmp_path: Path, database: str) -> None:
    """A bank, a read model, its admin page, a renamed class, a replay: what the page says happens."""
    environment = surroundings(tmp_path)
    done = 0
    for fence in FENCE.finditer(PAGE.read_text()):
        if fence["caption"]:
            write(tmp_path, fence["caption"], fence["body"].replace('"NAME": "tutorial"', f'"NAME": "{database}"'))
        elif fence["kind"] == "console":
            for command in commands(fence["body"]):
                done += run(command, tmp_path, environment)

    assert done > 15
