"""The tutorials work: their files are written, their commands are run, and what they say is printed is printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psycopg
import pytest

from tests.support.processes import REPOSITORY, database_url

PAGES = REPOSITORY / "docs/tutorial"
FENCE = re.compile(
    r"^```(?P<kind>[^\n]*)\n(?::caption: (?P<caption>[^\n]+)\n\n)?(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL
)
NOT_HERE = ("python -m pip", "createdb")  #: what the tests' environment has already


class Command(NamedTuple):
    line: str
    printed: list[str]


@pytest.fixture
def database(db: None) -> Iterator[str]:
    """A database of a tutorial's own on the tests' server; its name."""
    name = f"tutorial_{os.getpid()}"
    with psycopg.connect(database_url(), autocommit=True) as connection:
        connection.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")
        connection.execute(f"CREATE DATABASE {name}")
        yield name
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)")
        connection.execute(f"DROP DATABASE IF EXISTS test_{name} WITH (FORCE)")


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("page", "needs", "least"),
    [("first-projection", (), 13), ("eventsourcing", ("eventsourcing", "psycopg_pool"), 16)],
    ids=["first-projection", "eventsourcing"],
)
def test_the_tutorial_works_as_it_is_written(
    tmp_path: Path, database: str, page: str, needs: tuple[str, ...], least: int
) -> None:
    """A stranger who types what the page says sees what the page says."""
    for package in needs:
        pytest.importorskip(package, reason='pip install "scriba[eventsourcing]"')
    environment = surroundings(tmp_path)
    done = 0
    for fence in FENCE.finditer((PAGES / f"{page}.md").read_text()):
        if fence["caption"]:
            write(tmp_path, fence["caption"], fence["body"].replace('"NAME": "tutorial"', f'"NAME": "{database}"'))
        elif fence["kind"] == "console":
            for command in commands(fence["body"]):
                done += run(command, tmp_path, environment)

    assert done >= least


def surroundings(folder: Path) -> dict[str, str]:
    """Return the environment of somebody who has installed Scriba and may reach a server by libpq's variables."""
    about = psycopg.conninfo.conninfo_to_dict(database_url())
    server = {
        f"PG{name.upper()}": str(value) for name, value in about.items() if name in {"host", "port", "user", "password"}
    }
    clean = {
        name: value for name, value in os.environ.items() if not name.startswith(("DJANGO_", "SCRIBA_", "DATABASE_"))
    }
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**clean, **server, "PATH": path, "PYTHONPATH": f"{folder}{os.pathsep}{REPOSITORY}", "PYTHONUNBUFFERED": "1"}


def write(folder: Path, caption: str, body: str) -> None:
    name, _, at_the_end = caption.partition(" ")
    path = folder / name
    assert path.parent.is_dir(), f"{caption} is in a folder that nothing has made"
    path.write_text(f"{path.read_text()}\n{body}" if at_the_end else body)


def commands(body: str) -> list[Command]:
    """Split a console block: a line with ``$ `` begins a command, quotes may span lines, the rest is output."""
    found: list[Command] = []
    open_quote = False
    for line in body.splitlines():
        if line.startswith("$ "):
            found.append(Command(line[2:], []))
        elif open_quote:
            found[-1] = Command(f"{found[-1].line}\n{line}", [])
        elif line:
            found[-1].printed.append(line)
        open_quote ^= line.count('"') % 2 == 1
    return found


def run(command: Command, folder: Path, environment: dict[str, str]) -> bool:
    """Run one command; it has to succeed and to print each line that the page shows, in that order."""
    if command.line.startswith(NOT_HERE):
        return False
    done = subprocess.run(
        command.line, shell=True, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"$ {command.line}\n{done.stdout}"
    rest = done.stdout
    for line in command.printed:
        assert line in rest, f"$ {command.line}\n{done.stdout}\n… does not print: {line}"
        rest = rest[rest.index(line) + len(line) :]
    return True
