from __future__ import annotations

import argparse
import statistics
import threading
import time
from contextlib import ExitStack
from typing import Any

from django.contrib.auth import get_user_model
from django.core.management import call_command
from django.core.management.base import BaseCommand, CommandError
from django.db import connection
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import scriba
from example_project.bank.models import AccountEvent
from example_project.demo.verification import Finding, verify
from example_project.demo.writers import Writer
from example_project.shop.events import OrderPaid
from example_project.shop.models import StoredEvent
from scriba.sources import notify_appended

PROJECTIONS = ("orders", "customers", "balances")
LONGEST_S = 600.0


class Command(BaseCommand):
    help = (
        "Append events from several writers while two projections run, wait until everything is settled, and verify "
        "that the read models say what the events say."
    )
    requires_migrations_checks = False

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--events", type=int, default=20_000, help="how many events to append (default: 20000)")
        parser.add_argument("--writers", type=int, default=4, help="how many threads append them (default: 4)")
        parser.add_argument("--no-latency", action="store_true", help="skip measuring how soon one event is visible")

    def handle(self, *_args: Any, events: int, writers: int, no_latency: bool, **_options: Any) -> None:
        self.console = Console(file=self.stdout._out, highlight=False)  # noqa: SLF001 - rich writes to the same stream
        self._migrate()
        self._open_accounts()
        with ExitStack() as running:
            for name in PROJECTIONS:
                running.enter_context(scriba.start_projection(name))
            elapsed_s = self._append_and_follow(events, writers)
            self._say_rate(events, elapsed_s)
            if not no_latency:
                self._say_latencies()
        call_command("scriba_info", stdout=self.stdout)
        self._say_findings(verify())
        self._say_what_next()

    # --- steps --------------------------------------------------------------------------------------------

    def _migrate(self) -> None:
        self.console.print(f"database: {connection.settings_dict['NAME']}; migrating …")
        call_command("migrate", verbosity=0, interactive=False)

    def _open_accounts(self) -> None:
        """The bank's 53 events: three accounts, fifty movements."""
        rows = [
            AccountEvent(account_id=name, event_type="AccountOpened", payload={"owner": name.title()})
            for name in ("ada", "grace", "edsger")
            if not AccountEvent.objects.filter(account_id=name, event_type="AccountOpened").exists()
        ]
        for number in range(50):
            kind = "MoneyWithdrawn" if number % 3 == 2 else "MoneyDeposited"
            name = ("ada", "grace", "edsger")[number % 3]
            rows.append(AccountEvent(account_id=name, event_type=kind, payload={"amount": f"{10 + number}.50"}))
        AccountEvent.objects.bulk_create(rows)

    def _append_and_follow(self, events: int, count: int) -> float:
        columns = (TextColumn("{task.description:<22}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        started = time.monotonic()
        with Progress(*columns, console=self.console, disable=not self.console.is_terminal) as progress:
            appended = progress.add_task("appended", total=events)
            lock = threading.Lock()

            def advance(size: int) -> None:
                with lock:
                    progress.advance(appended, size)

            share, rest = divmod(events, count)
            threads = [Writer(number, share + (number < rest), advance) for number in range(count)]
            for thread in threads:
                thread.start()
            self._wait_until_settled(threads, progress, events)
        for thread in threads:
            if thread.error is not None:
                msg = f"{thread.name} failed: {thread.error}"
                raise CommandError(msg) from thread.error
        rolled_back, poison = sum(t.rolled_back for t in threads), sum(t.poison for t in threads)
        self.console.print(
            f"appended {events:,} events from {count} writers ({rolled_back} transactions rolled back, {poison} poison events)"
        )
        return time.monotonic() - started

    def _wait_until_settled(self, writers: list[Writer], progress: Progress, events: int) -> None:
        """Follow the projections by their rows, as any other process would."""
        tasks = {name: progress.add_task(f"settled by {name}", total=events) for name in PROJECTIONS[:2]}
        base = {name: scriba.info(name).watermark or 0 for name in tasks}
        deadline = time.monotonic() + LONGEST_S
        pause = threading.Event()
        while time.monotonic() < deadline:
            head = StoredEvent.objects.order_by("-pk").values_list("pk", flat=True).first() or 0
            infos = [scriba.info(name) for name in PROJECTIONS]
            for info in infos:
                if info.status == "halted":
                    msg = f"{info.name} halted: {info.halt_reason}"
                    raise CommandError(msg)
                if info.name in tasks:
                    progress.update(tasks[info.name], completed=min(events, (info.watermark or 0) - base[info.name]))
            appending = any(writer.is_alive() for writer in writers)
            if not appending and all((info.watermark or 0) >= head for info in infos[:2]) and not infos[2].lag_events:
                for task in tasks.values():
                    progress.update(task, completed=events)
                return
            pause.wait(0.1)
        msg = f"not settled after {LONGEST_S:g} s; see manage.py scriba_info"
        raise CommandError(msg)

    def _say_rate(self, events: int, elapsed_s: float) -> None:
        self.console.print(
            f"[bold]{events / elapsed_s:,.0f} events/s[/bold] through both projections while {events:,} events were appended "
            f"({elapsed_s:.1f} s from the first append to the last settled event)"
        )

    def _say_latencies(self) -> None:
        idle = [self._latency(pause_s=1.3) for _ in range(3)]
        flowing = [self._latency(pause_s=0.0) for _ in range(15)]
        self.console.print(
            f"a new event is visible after {statistics.median(idle) * 1000:.0f} ms when the projection was idle, "
            f"{statistics.median(flowing) * 1000:.0f} ms while events flow (medians of {len(idle)} and {len(flowing)})"
        )

    def _latency(self, *, pause_s: float) -> float:
        """Return the seconds from the commit of an event to its row being settled."""
        threading.Event().wait(pause_s)
        row = StoredEvent.of("latency", OrderPaid("latency", "card"))
        row.save()
        notify_appended(StoredEvent)
        committed = time.monotonic()
        scriba.wait_for("orders", position=row.pk, timeout=10)
        return time.monotonic() - committed

    def _say_findings(self, findings: list[Finding]) -> None:
        for finding in findings:
            mark = "[green]ok[/green]  " if finding.holds else "[red]WRONG[/red]"
            self.console.print(f"{mark} {finding.what}: {finding.detail}")
        if not all(finding.holds for finding in findings):
            msg = "the read models are not what the events say."
            raise CommandError(msg)
        self.console.print("[bold green]verified.[/bold green]")

    def _say_what_next(self) -> None:
        users = get_user_model().objects
        if not users.filter(username="admin").exists():
            users.create_superuser("admin", "admin@example.org", "admin")
        self.console.print(
            "\nTry next:\n"
            "  python manage.py runserver            then http://127.0.0.1:8000/admin/  (login admin, password admin)\n"
            "  python manage.py run_projections      keeps the read models in step until you stop it\n"
            "  python manage.py scriba_info --watch  in another terminal\n"
            "  python manage.py demo_db stop         stops the embedded database"
        )
