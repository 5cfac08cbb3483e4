"""Real processes against the test database: `manage.py` commands that are stopped, continued and killed."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from django.db import connections

from tests.support.waiting import wait_until

__all__ = ["REPOSITORY", "Output", "database_url", "manage", "managed"]

REPOSITORY = Path(__file__).resolve().parents[2]


def database_url(alias: str = "default", database: str = "") -> str:
    """Return the URL of the *test* database behind `alias`, or of another `database` on the same server."""
    settings = connections[alias].settings_dict
    host, port = settings["HOST"], settings["PORT"]
    user, password = settings["USER"] or "", settings["PASSWORD"]
    name = database or settings["NAME"]
    credentials = f"{user}:{password}@" if password else f"{user}@"
    if str(host).startswith("/") or not host:
        options = settings.get("OPTIONS", {})
        socket = host or options.get("host", "")
        return f"postgresql://{credentials}/{name}?host={socket}&port={port or options.get('port', '')}"
    return f"postgresql://{credentials}{host}:{port}/{name}"


def environment(**more: str) -> dict[str, str]:
    return {
        **os.environ,
        "DATABASE_URL": database_url(),
        "DJANGO_SETTINGS_MODULE": "tests.settings",
        "PYTHONPATH": str(REPOSITORY),
        "PYTHONUNBUFFERED": "1",
        **more,
    }


def manage(*arguments: str, timeout: float = 60, **env: str) -> subprocess.CompletedProcess[str]:
    """Run `manage.py` with the test suite's settings to its end."""
    return subprocess.run(
        [sys.executable, "-m", "django", *arguments], cwd=REPOSITORY, env=environment(**env), text=True,
        capture_output=True, timeout=timeout, check=False,
    )  # fmt: skip


@contextmanager
def managed(*arguments: str, **env: str) -> Iterator[subprocess.Popen[str]]:
    """Start `manage.py` with the test suite's settings; it is killed on leaving if it still runs."""
    process = subprocess.Popen(
        [sys.executable, "-m", "django", *arguments], cwd=REPOSITORY, env=environment(**env), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait(10)
        if process.stdout is not None:
            process.stdout.close()


class Output:
    """What a process prints, read as it comes, so that a test waits for a line and not for the process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        self._lines: list[str] = []
        self._seen = 0
        self._reader = threading.Thread(target=self._lines.extend, args=(process.stdout,), name="output")
        self._reader.start()

    def until(self, text: str) -> str:
        """Wait for a line with `text` that has not been waited for yet, and return it."""
        found: list[int] = []

        def is_there() -> bool:
            found[:] = [n for n, line in enumerate(self._lines[self._seen :], self._seen) if text in line]
            return bool(found)

        wait_until(is_there, timeout=30, what=f"the line {text!r}; there is {self._lines}")
        self._seen = found[0] + 1
        return self._lines[found[0]]

    @property
    def whole(self) -> str:
        """Everything, once the process has ended."""
        self._reader.join(20)
        return "".join(self._lines)
