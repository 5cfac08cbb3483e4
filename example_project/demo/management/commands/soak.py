"""Run for long, kill at random, verify everything at the end."""

from __future__ import annotations

import argparse
import collections
import os
import random
import signal
import subprocess
import sys
import threading
import time
from typing import Any

from django.core.management import call_command
from django.core.management.base import BaseCommand, CommandError
from django.db import connection

import scriba
from example_project.bank.history import open_accounts
from example_project.demo.verification import verify
from example_project.demo.writers import Writer
from example_project.shop.models import StoredEvent

PROJECTIONS = ("orders", "customers", "balances")
PROCESSES = 2  # one owns, one stands by
LONGEST_SETTLE_S = 300.0
CHUNK = 400
PAUSE_S = 0.4  # between two chunks of a writer: the point is disasters, not load

EPILOG = """\
examples:
  soak                   one minute
  soak --minutes 60      an hour, over lunch
  soak --seed 7          the same schedule of disasters again

exit codes:
  0  every row is what the events say
  1  it is not, or nothing settled in time
"""


class Command(BaseCommand):
    help = (
        "Lets writers append and projections run while processes are killed and stopped and connections terminated at "
        "random; at the end verifies every row and says what was survived."
    )

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> Any:
        as_written = argparse.RawDescriptionHelpFormatter
        return super().create_parser(prog_name, subcommand, epilog=EPILOG, formatter_class=as_written, **kwargs)

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--minutes", type=float, default=1.0, help="how long to make life hard (default: 1)")
        parser.add_argument("--writers", type=int, default=2, help="how many threads append (default: 2)")
        parser.add_argument("--seed", type=int, default=None, help="repeat a schedule of disasters")

    def handle(self, *_args: Any, minutes: float, writers: int, seed: int | None, **_options: Any) -> None:
        seed = random.randrange(10_000) if seed is None else seed
        self.stdout.write(f"seed {seed}; {minutes:g} minute(s) with {writers} writers and {PROCESSES} processes …")
        call_command("migrate", verbosity=0, interactive=False)
        open_accounts()
        disasters = Disasters(random.Random(seed))
        appending = Appending(writers)
        try:
            self._live_through(minutes * 60, disasters)
        finally:
            appended = appending.stop()
        self._settle(disasters)
        disasters.end()
        self._say(appended, disasters)

    def _live_through(self, seconds: float, disasters: Disasters) -> None:
        pause = threading.Event()
        deadline, said = time.monotonic() + seconds, time.monotonic()
        while time.monotonic() < deadline:
            disasters.keep_alive()
            pause.wait(disasters.random.uniform(1.0, 5.0))
            disasters.strike()
            if time.monotonic() - said > 10:
                said = time.monotonic()
                self.stdout.write(f"  {StoredEvent.objects.count():,} events, survived so far: {disasters}")

    def _settle(self, disasters: Disasters) -> None:
        """Let it be quiet until the projections have caught up."""
        pause, deadline = threading.Event(), time.monotonic() + LONGEST_SETTLE_S
        while time.monotonic() < deadline:
            disasters.keep_alive()
            head = StoredEvent.objects.order_by("-pk").values_list("pk", flat=True).first() or 0
            infos = [scriba.info(name) for name in PROJECTIONS]
            halted = [info for info in infos if info.status == "halted"]
            if halted:
                msg = f"{halted[0].name} halted: {halted[0].halt_reason}"
                raise CommandError(msg)
            if all((info.watermark or 0) >= head for info in infos[:2]) and not infos[2].lag_events:
                return
            pause.wait(0.2)
        msg = f"not settled {LONGEST_SETTLE_S:g} s after the last disaster; see manage.py scriba_info"
        raise CommandError(msg)

    def _say(self, appended: int, disasters: Disasters) -> None:
        findings = verify()
        for finding in findings:
            self.stdout.write(f"{'ok   ' if finding.holds else 'WRONG'} {finding.what}: {finding.detail}")
        self.stdout.write(f"survived {disasters}, while {appended:,} events were appended")
        if not all(finding.holds for finding in findings):
            raise CommandError("the read models are not what the events say.")
        self.stdout.write("every row is what the events say.")


class Appending:
    """Writers in threads, one after the other of a few hundred events each, until they are stopped."""

    def __init__(self, count: int) -> None:
        self._stopping = threading.Event()
        self._appended = 0
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._run, args=(number,), daemon=True) for number in range(count)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> int:
        """Let each writer finish what it is at; return how many events were appended."""
        self._stopping.set()
        for thread in self._threads:
            thread.join()
        return self._appended

    def _run(self, number: int) -> None:
        round_ = 0
        while not self._stopping.wait(PAUSE_S):
            round_ += 1
            writer = Writer(number * 100_000 + round_, CHUNK, self._note)
            writer.run()  # in this thread; a terminated connection ends this round only

    def _note(self, count: int) -> None:
        with self._lock:
            self._appended += count


class Disasters:
    """What happens to the processes that run the projections, by a seeded random."""

    def __init__(self, chance: random.Random) -> None:
        self.random = chance
        self.survived: collections.Counter[str] = collections.Counter()
        self._processes: list[subprocess.Popen[bytes]] = []

    def __str__(self) -> str:
        return ", ".join(f"{count} {what}" for what, count in sorted(self.survived.items())) or "nothing yet"

    def keep_alive(self) -> None:
        """Start processes anew in place of those that were killed, as a supervisor would."""
        self._processes = [process for process in self._processes if process.poll() is None]
        while len(self._processes) < PROCESSES:
            self._processes.append(
                subprocess.Popen(
                    [sys.executable, "manage.py", "run_projections"],
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env={**os.environ, "SCRIBA_LOG_LEVEL": "ERROR"},
                )
            )

    def strike(self) -> None:
        """Let one thing go wrong."""
        what = self.random.choice(["process killed", "process terminated", "process stopped", "connections terminated"])
        victim = self.random.choice(self._processes)
        if what == "process killed":
            victim.kill()
        elif what == "process terminated":
            victim.terminate()
        elif what == "process stopped":
            victim.send_signal(signal.SIGSTOP)
            threading.Timer(self.random.uniform(0.5, 20.0), victim.send_signal, [signal.SIGCONT]).start()
        else:
            with connection.cursor() as cursor:
                cursor.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() "
                    "AND pid <> pg_backend_pid() AND query LIKE '%%scriba%%' ORDER BY random() LIMIT 3"
                )
        self.survived[what] += 1

    def end(self) -> None:
        for process in self._processes:
            process.send_signal(signal.SIGCONT)
            process.terminate()
        for process in self._processes:
            process.wait(60)
