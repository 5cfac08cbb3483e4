"""Real processes that start at once: a parent with Django loaded and no connection open forks them on demand.

Run as ``python -m tests.support.zygote``; a projection's name on standard input starts a process that runs it, whose
pid is printed. Killing such a process is as real as killing ``run_projections``; only the imports are not repeated.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["Zygote", "zygote"]


class Zygote:
    """The test's side of it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.alive: set[int] = set()

    def start(self, name: str) -> int:
        """Run the projection `name` in a new process; return its pid."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(name + "\n")
        self._process.stdin.flush()
        pid = int(self._process.stdout.readline())
        self.alive.add(pid)
        return pid

    def kill(self, pid: int, number: int = signal.SIGKILL) -> None:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass
        if number == signal.SIGKILL:
            self.alive.discard(pid)

    def kill_all(self) -> None:
        for pid in list(self.alive):
            self.kill(pid)


@contextmanager
def zygote() -> Iterator[Zygote]:
    from tests.support.processes import REPOSITORY, environment

    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.zygote"], cwd=REPOSITORY, env=environment(), text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    parent = Zygote(process)
    try:
        yield parent
    finally:
        parent.kill_all()
        process.kill()
        process.wait(10)


def main() -> None:
    import django

    django.setup()
    from scriba.engine import runner
    from scriba.registry import find

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the dead need no funeral here
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            sys.stdin.close()
            os._exit(runner.run([find(line.strip())]))
        print(pid, flush=True)


if __name__ == "__main__":
    main()
