"""The main job of the example project: see it work, and see it verified."""

from __future__ import annotations

import argparse
import logging
import statistics
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from decimal import Decimal
from typing import Any, Self

from django.contrib.auth import get_user_model
from django.core.management import call_command
from django.core.management.base import BaseCommand, CommandError
from django.db import OperationalError, connection, transaction
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import scriba
from example_project.bank.history import open_accounts
from example_project.demo.verification import Finding, verify
from example_project.demo.writers import Writers
from example_project.elixir_bank import demonstration
from example_project.shop.events import OrderPlaced
from example_project.shop.models import OrderRow, StoredEvent
from scriba.protocols import Status
from scriba.sources import notify_appended

SHOP = ("orders", "customers")
PROJECTIONS = (*SHOP, "balances")
LONGEST_S = 600.0
LINE_EVERY_S = 2.0
LOOK_EVERY_S = 0.1
LOGIN = "admin"

EPILOG = """\
examples:
  demo                          20,000 events from 4 writers
  demo --events 200000          a longer look
  demo --events 2000 --writers 8
  demo --commanded              a Commanded event store instead: load, project, verify, show

with a run_projections in another terminal, to be killed and started again:
  demo --append-only            only the writers
  demo --verify-only            only the verification, once scriba_info shows no lag

It may be run again and again: each run adds its events to those that are there, and verifies all of them.

exit codes:
  0  settled and verified
  1  a writer failed, a projection halted, nothing settled in time, or a read model is wrong
"""


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        message = f"{number} is not positive"
        raise argparse.ArgumentTypeError(message)
    return number


class Command(BaseCommand):
    help = (
        "Appends events from several writers while projections run, waits until everything is settled, and verifies "
        "that the read models say what the events say."
    )
    requires_migrations_checks = False

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> Any:
        as_written = argparse.RawDescriptionHelpFormatter
        return super().create_parser(prog_name, subcommand, epilog=EPILOG, formatter_class=as_written, **kwargs)

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--events", type=positive, default=20_000, help="how many to append (default: 20000)")
        parser.add_argument("--writers", type=positive, default=4, help="how many threads append them (default: 4)")
        part = parser.add_mutually_exclusive_group()
        part.add_argument("--append-only", action="store_true", help="append, and run no projection")
        part.add_argument("--verify-only", action="store_true", help="append nothing: verify what is there")
        part.add_argument(
            "--commanded", action="store_true", help="instead: project events that the real Commanded wrote, and verify"
        )
        parser.add_argument("--no-latency", action="store_true", help="skip measuring how soon one event is visible")

    def handle(self, *_args: Any, **options: Any) -> None:
        try:
            self._run(options)
        except scriba.ScribaError as error:
            raise CommandError(str(error)) from error

    def _run(self, options: dict[str, Any]) -> None:
        self.console = Console(file=self.stdout._out, highlight=False, soft_wrap=True)  # noqa: SLF001 - rich writes there, too
        self._migrate()
        if options["commanded"]:
            demonstration.run(self.console)
            return
        if not options["verify_only"]:
            open_accounts()
            self._append(
                options["events"],
                options["writers"],
                follow=not options["append_only"],
                measure=not options["no_latency"],
            )
        if options["append_only"]:
            return
        self._say_findings(verify())
        self._say_what_next()

    # --- steps --------------------------------------------------------------------------------------------

    def _migrate(self) -> None:
        settings = connection.settings_dict
        self.console.print(f"database {settings['NAME']!r} on {settings['HOST'] or 'this machine'}; migrating …")
        try:
            connection.ensure_connection()
        except OperationalError as error:
            message = (
                f"The database cannot be reached: {' '.join(str(error).split())}\n"
                "DATABASE_URL names it; without that variable the demo brings a server of its own."
            )
            raise CommandError(message) from error
        call_command("migrate", verbosity=0, interactive=False)

    def _append(self, events: int, writers: int, *, follow: bool, measure: bool) -> None:
        """Let the writers append; meanwhile run the projections and follow them until everything is settled."""
        appenders = Writers(events, writers)  # before any thread is started: it is a fork
        with ExitStack() as running:
            running.enter_context(expected_letters())
            for name in PROJECTIONS if follow else ():
                handle = running.enter_context(scriba.start_projection(name))
                while handle.snapshot().status in {Status.NOT_RUNNING, Status.INITIALIZING}:
                    if handle.wait(0.01):  # raises what it ended with
                        break
            elapsed_s = self._write(appenders, events, writers, follow=follow)
            if follow:
                self.console.print(
                    f"[bold]{events / elapsed_s:,.0f} events/s[/bold] through {' and '.join(SHOP)} while the writers appended "
                    f"({elapsed_s:.1f} s from the first append to the last settled event)"
                )
                if measure:
                    self._say_latencies()
                call_command("scriba_info", *PROJECTIONS, stdout=self.stdout)

    def _write(self, writers: Writers, events: int, count: int, *, follow: bool) -> float:
        started = time.monotonic()
        writers.begin()
        with Display(self.console, events, SHOP if follow else ()) as display:
            if follow:
                self._follow(writers, display)
            else:
                self._watch(writers, display)
            written = writers.end()
        if written.error:
            raise CommandError(written.error)
        self.console.print(
            f"appended {events:,} events from {count} writers ({written.rolled_back:,} transactions rolled back on purpose, "
            f"{written.poison:,} poison events that must become dead letters)"
        )
        return time.monotonic() - started

    def _watch(self, writers: Writers, display: Display) -> None:
        pause = threading.Event()
        while writers.is_alive:
            pause.wait(LOOK_EVERY_S)
            display.appended(writers.appended)

    def _follow(self, writers: Writers, display: Display) -> None:
        """Follow the projections by their rows, as any other process would."""
        pause, deadline = threading.Event(), time.monotonic() + LONGEST_S
        while time.monotonic() < deadline:
            is_appending = writers.is_alive  # asked before the head: it must not lead
            display.appended(writers.appended)
            head = StoredEvent.objects.order_by("-pk").values_list("pk", flat=True).first() or 0
            infos = [scriba.info(name) for name in PROJECTIONS]
            for info in infos:
                if info.status == "halted":
                    message = f"{info.name} halted: {info.halt_reason}"
                    raise CommandError(message)
                display.settled(info.name, sum(info.counters[kind] for kind in ("applied", "skipped", "dead_lettered")))
            is_settled = all((info.watermark or 0) >= head for info in infos if info.name in SHOP)
            if is_settled and not is_appending and infos[-1].lag_events == 0:
                return
            pause.wait(LOOK_EVERY_S)
        message = f"not settled after {LONGEST_S:g} s; see manage.py scriba_info"
        raise CommandError(message)

    def _say_latencies(self) -> None:
        idle = [self._latency(rest_s=1.0) for _ in range(3)]
        flowing = [self._latency() for _ in range(15)]
        notified = [self._latency(rest_s=0.4, notify=True) for _ in range(3)]
        self.console.print(
            f"a new event is in the read model after {milliseconds(idle)} when the projection was idle, "
            f"{milliseconds(notified)} when the writer notified, {milliseconds(flowing)} while events flow (medians)"
        )

    def _latency(self, *, rest_s: float = 0.0, notify: bool = False) -> float:
        """Return the seconds from the commit of an event until its row is there for everybody."""
        pause = threading.Event()
        pause.wait(rest_s)
        order_id = f"o-{uuid.uuid4().hex[:12]}"
        with transaction.atomic():
            StoredEvent.of(order_id, OrderPlaced(order_id, "c-latency", Decimal("9.99"))).save()
            if notify:
                notify_appended(StoredEvent)
        committed = time.monotonic()
        while not OrderRow.objects.filter(pk=order_id).exists():
            if time.monotonic() - committed > LONGEST_S:
                message = f"{order_id} is not visible after {LONGEST_S:g} s; see manage.py scriba_info"
                raise CommandError(message)
            pause.wait(0.001)
        return time.monotonic() - committed

    def _say_findings(self, findings: list[Finding]) -> None:
        for finding in findings:
            mark = "[green]ok[/green]   " if finding.holds else "[bold red]WRONG[/bold red]"
            self.console.print(f"{mark} {finding.what}: {finding.detail}")
        if not all(finding.holds for finding in findings):
            message = "the read models are not what the events say."
            raise CommandError(message)
        self.console.print("[bold green]verified.[/bold green]")

    def _say_what_next(self) -> None:
        users = get_user_model().objects
        admin = users.filter(username=LOGIN).first() or users.create_superuser(LOGIN, "admin@example.org", LOGIN)
        password = f"password {LOGIN}" if admin.check_password(LOGIN) else "with the password that you gave it"
        self.console.print(
            "\nTry next:\n"
            f"  python manage.py runserver            then http://127.0.0.1:8000/admin/  (login {LOGIN}, {password})\n"
            "  python manage.py run_projections      keeps the read models in step until you stop it\n"
            "  python manage.py scriba_info --watch  in another terminal\n"
            "  python manage.py demo_db stop         stops the embedded database"
        )


class Display:
    """Bars on a terminal, a line every other second elsewhere."""

    def __init__(self, console: Console, events: int, names: tuple[str, ...]) -> None:
        columns = (TextColumn("{task.description:<22}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._console = console
        self._events = events
        self._bars = Progress(*columns, console=console, disable=not console.is_terminal)
        self._appended = 0
        self._before: dict[str, int] = {}
        self._settled: dict[str, int] = {}
        self._task = self._bars.add_task("appended", total=events)
        self._tasks = {name: self._bars.add_task(f"settled by {name}", total=None) for name in names}
        self._last_line = time.monotonic()

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._bars.stop()

    def appended(self, count: int) -> None:
        """Show how many events the writers have committed."""
        self._appended = count
        self._bars.update(self._task, completed=count)

    def settled(self, name: str, count: int) -> None:
        """Show how many events `name` has settled; what it had settled before this run is left out."""
        self._settled[name] = count - self._before.setdefault(name, count)
        if name in self._tasks:
            self._bars.update(self._tasks[name], completed=self._settled[name])
        if not self._console.is_terminal and time.monotonic() - self._last_line >= LINE_EVERY_S:
            self._last_line = time.monotonic()
            shown = ", ".join(f"{each} settled {self._settled.get(each, 0):,}" for each in self._tasks)
            self._console.print(f"appended {self._appended:,} of {self._events:,}; {shown}")


@contextmanager
def expected_letters() -> Iterator[None]:
    """Keep the log quiet about dead letters: the poison is there on purpose, and the verification counts them."""
    scribas = logging.getLogger("scriba")

    def is_news(record: logging.LogRecord) -> bool:
        return "dead letter at position" not in record.getMessage()

    scribas.addFilter(is_news)
    try:
        yield
    finally:
        scribas.removeFilter(is_news)


def milliseconds(times_s: list[float]) -> str:
    return f"{statistics.median(times_s) * 1000:.0f} ms"
