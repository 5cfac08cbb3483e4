"""What a run costs: seconds, CPU of this process and of PostgreSQL, memory. Each run in a process of its own.

The CPU of PostgreSQL is that of all processes of the server, from ``/proc`` of this machine, those included that have
ended meanwhile; None where they cannot be seen (another machine, another container). Clock ticks are 10 ms: runs of
seconds are measured well, runs of milliseconds are not.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import statistics
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from django.core.management.base import CommandError
from django.db import connection, connections

if TYPE_CHECKING:
    from collections.abc import Iterator

TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class Cost(NamedTuple):
    """One measured run of `events` events. Seconds; megabytes; `extra` is what a scenario adds."""

    events: int
    elapsed_s: float
    python_s: float
    server_s: float | None
    peak_mb: float
    extra: dict[str, Any]

    @property
    def rate(self) -> float:
        return self.events / self.elapsed_s

    @property
    def python_us(self) -> float:
        return self.python_s / self.events * 1e6

    @property
    def server_us(self) -> float | None:
        return None if self.server_s is None else self.server_s / self.events * 1e6


class Meter:
    """Measures between :meth:`start` and :meth:`stop`; whatever happens outside is start-up."""

    def __init__(self) -> None:
        self._postmaster = postmaster()
        self.extra: dict[str, Any] = {}
        self.start()

    def start(self) -> None:
        self._server = server_cpu_s(self._postmaster)
        self._python = python_cpu_s()
        self._started = time.monotonic()
        self._ended: float | None = None

    def ended(self) -> None:
        """Note the end of the work; called by any thread, the costs are read later by :meth:`cost`."""
        self._ended = time.monotonic()

    def since(self) -> float:
        return time.monotonic() - self._started

    def cost(self, events: int) -> Cost:
        ended = self._ended or time.monotonic()
        python = python_cpu_s() - self._python
        now = server_cpu_s(self._postmaster)
        server = None if now is None or self._server is None else now - self._server
        peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        return Cost(events, ended - self._started, python, server, peak_mb, self.extra)


def python_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def postmaster() -> int | None:
    """Return the process id of the server, if it runs where we can see it."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid()")
        (backend,) = cursor.fetchone()
    fields = _stat(backend)
    parent = _stat(int(fields[1])) if fields else None
    return int(fields[1]) if fields and parent and _is_postgres(int(fields[1])) else None


def server_cpu_s(pid: int | None) -> float | None:
    """Return the CPU seconds of all processes of the server, ended ones included."""
    own = _stat(pid) if pid is not None else None
    if own is None:
        return None
    ticks = sum(map(int, own[11:15]))  # its own, and those of its children that have ended
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            fields = _stat(int(entry.name))
            if fields and int(fields[1]) == pid:
                ticks += int(fields[11]) + int(fields[12])
    return ticks * TICK_S


def resident_mb() -> float:
    """Return the memory of this process as it is now; 0 where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0.0
    return pages * resource.getpagesize() / 1e6


@contextmanager
def watched_memory(meter: Meter) -> Iterator[None]:
    """Sample the memory of this process ten times a second; put the samples into `extra`."""
    samples: list[float] = []
    done = threading.Event()

    def sample() -> None:
        while not done.wait(0.1):
            samples.append(resident_mb())

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        meter.extra["resident_mb"] = samples


def _stat(pid: int) -> list[str] | None:
    """Return the fields of ``/proc/PID/stat`` behind the command's name; None when it cannot be read."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (OSError, IndexError):
        return None


def _is_postgres(pid: int) -> bool:
    try:
        return "postgres" in Path(f"/proc/{pid}/comm").read_text()
    except OSError:
        return False


# --- a process for each run -----------------------------------------------------------------------------


def in_child(work: Callable[..., Any], *arguments: Any) -> Any:
    """Call `work` in a fork of this process and return what it returned. Raises CommandError with its traceback."""
    return start_child(work, *arguments)()


def start_child(work: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:
    """Start `work` in a fork; return a function that waits for what it returns."""
    connections.close_all()
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def run() -> None:
        try:
            sender.send((True, work(*arguments)))
        except BaseException:  # noqa: BLE001 - shown by the parent
            sender.send((False, traceback.format_exc()))
        finally:
            connections.close_all()

    process = context.Process(target=run)
    process.start()
    sender.close()

    def result() -> Any:
        try:
            succeeded, value = receiver.recv()
        except EOFError:
            succeeded, value = False, "the process ended without a word"
        process.join()
        if not succeeded:
            message = f"{getattr(work, '__name__', work)} failed:\n{value}"
            raise CommandError(message)
        return value

    return result


# --- how late -------------------------------------------------------------------------------------------

LONGEST_S = 120.0
REST_S = 1.0  #: before the first append, and before the first that counts


class Arrivals:
    """When each of `count` events had its row committed; noted by any thread."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._seen: dict[int, float] = {}
        self._done = threading.Event()

    def note(self, key: int) -> None:
        self._seen[key] = time.monotonic()
        if len(self._seen) == self._count:
            self._done.set()

    def wait(self, check: Callable[[], object]) -> None:
        """Wait until all have arrived, at most `LONGEST_S`; `check` raises when that cannot happen any more."""
        deadline = time.monotonic() + LONGEST_S
        while not self._done.wait(0.5) and time.monotonic() < deadline:
            check()

    def judged(self, cost: Cost, committed: dict[int, float], appended_per_s: float) -> Cost:
        """Return `cost` with how many milliseconds passed from each commit to the commit of its row.

        Commits of the first second count for nobody: whoever projects is still warming up.
        """
        if self._seen.keys() != committed.keys():
            message = f"{len(self._seen)} of {len(committed)} events were settled"
            raise RuntimeError(message)
        warm = min(committed.values()) + REST_S
        late = sorted((self._seen[key] - at) * 1000 for key, at in committed.items() if at >= warm)
        shares = {f"p{share}_ms": late[min(len(late) - 1, len(late) * share // 100)] for share in (50, 99)}
        cost.extra.update(shares, appended_per_s=appended_per_s)
        return cost


def at_rate(rate: int, count: int, append: Callable[[int], int]) -> tuple[dict[int, float], float]:
    """Call `append` for each of `count` numbers, at `rate` a second; return when each key that it returned was
    committed, and the rate reached. By as many threads as the rate needs where a commit takes 20 ms.
    """
    committed: dict[int, float] = {}
    numbers = iter(range(count))
    threading.Event().wait(REST_S)
    started = time.monotonic()

    def write() -> None:
        pause = threading.Event()
        for number in numbers:
            pause.wait(max(0.0, started + number / rate - time.monotonic()))
            key = append(number)
            committed[key] = time.monotonic()
        connection.close()

    threads = [threading.Thread(target=write) for _ in range(max(1, rate // 50))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return committed, count / (time.monotonic() - started)


class Spread(NamedTuple):
    """A median with its range."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))
