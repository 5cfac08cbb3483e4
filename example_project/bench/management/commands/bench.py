"""Measure Scriba against what one would write by hand, on this machine, with the content verified."""

from __future__ import annotations

import argparse
import json
import os
import platform
from importlib.metadata import version
from typing import Any

import django
from django.conf import settings
from django.core.management import call_command
from django.core.management.base import BaseCommand
from django.db import connection, connections
from rich.console import Console
from rich.table import Table

from example_project.bench.measuring import Cost, Spread
from example_project.bench.races import RACES, Options, Report
from example_project.bench.situations import SITUATIONS

SCENARIOS = {**RACES, **SITUATIONS}
NAME = "scriba_bench"

EPILOG = """\
examples:
  bench                                 catch-up, five cycles: some minutes
  bench poison hot-stream --cycles 3
  bench --contenders raw-5000,scriba-4  only these two
  bench memory --events 1000000
  bench --json > figures.json
  bench catchup steady --markdown > figures.md

Everything happens in a database of its own, which is made and dropped. A quiet machine gives steadier figures; ratios
and CPU per event bear a busy one. The exit code says nothing about targets: 1 means that a read model was wrong.
"""


class Command(BaseCommand):
    help = "Measures catch-up and other scenarios, interleaved with contenders, and verifies every row."
    requires_migrations_checks = False

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> Any:
        as_written = argparse.RawDescriptionHelpFormatter
        return super().create_parser(prog_name, subcommand, epilog=EPILOG, formatter_class=as_written, **kwargs)

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("scenarios", nargs="*", default=["catchup"], metavar="scenario", help=", ".join(SCENARIOS))
        parser.add_argument("--events", type=int, default=50_000, help="for the fast contenders (default: 50000)")
        parser.add_argument("--slice", type=int, default=2_000, help="for the slow contenders (default: 2000)")
        parser.add_argument("--cycles", type=int, default=5, help="how often each runs (default: 5)")
        parser.add_argument("--contenders", default="", help="of catchup, with commas between; all by default")
        parser.add_argument("--seconds", type=float, default=10.0, help="of steady and writers (default: 10)")
        parser.add_argument("--rows", type=int, default=1_000_000, help="of large-read-model, many-streams, deep-log")
        form = parser.add_mutually_exclusive_group()
        form.add_argument("--json", action="store_true", help="print figures for machines, and progress to stderr")
        form.add_argument("--markdown", action="store_true", help="print tables for a document")

    def handle(self, *_args: Any, scenarios: list[str], **given: Any) -> None:
        for name in scenarios:
            if name not in SCENARIOS:
                self.stderr.write(f"unknown scenario {name!r}; there are: {', '.join(SCENARIOS)}")
                raise SystemExit(2)
        progress = Console(stderr=True, highlight=False)
        options = Options(
            events=given["events"], slice=min(given["slice"], given["events"]), cycles=given["cycles"],
            contenders=tuple(filter(None, given["contenders"].split(","))), seconds=given["seconds"],
            rows=given["rows"], say=progress.print,
        )  # fmt: skip
        settings.DEBUG = False  # for all: with it Django writes down every statement
        with OwnDatabase():
            machine = about()
            reports = [SCENARIOS[name](options) for name in scenarios]
        if given["json"]:
            self.stdout.write(
                json.dumps({"machine": machine, "reports": [_plain(report) for report in reports]}, indent=1)
            )
            return
        if given["markdown"]:
            self.stdout.write("\n\n".join([_settings(machine), *map(_in_markdown, reports)]))
            return
        console = Console(file=self.stdout._out, highlight=False, soft_wrap=True)  # noqa: SLF001 - rich writes there, too
        console.print(_settings(machine))
        for report in reports:
            _show(console, report)


class OwnDatabase:
    """A database beside the one of the settings, in which everything may be thrown away."""

    def __enter__(self) -> None:
        self._before = connection.settings_dict["NAME"]
        self._execute(f"DROP DATABASE IF EXISTS {NAME} WITH (FORCE)")
        self._execute(f"CREATE DATABASE {NAME}")
        self._use(NAME)
        call_command("migrate", verbosity=0, interactive=False)

    def __exit__(self, *_error: object) -> None:
        self._use(self._before)
        self._execute(f"DROP DATABASE IF EXISTS {NAME} WITH (FORCE)")
        connections.close_all()

    def _use(self, name: str) -> None:
        connections.close_all()
        connection.settings_dict["NAME"] = name

    def _execute(self, statement: str) -> None:
        with connection.cursor() as cursor:
            cursor.execute(statement)


def about() -> dict[str, str]:
    """Return what the figures depend on."""
    with connection.cursor() as cursor:
        settings = {}
        for name in ("server_version", "fsync", "synchronous_commit", "shared_buffers"):
            cursor.execute(f"SHOW {name}")
            settings[name] = str(cursor.fetchone()[0])
    return {
        "cores": str(os.cpu_count()),
        "load": f"{os.getloadavg()[0]:.1f}",
        "Python": platform.python_version(),
        "Django": django.__version__,
        "psycopg": version("psycopg"),
        "PostgreSQL": settings.pop("server_version"),
        **settings,
    }


def _settings(machine: dict[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in machine.items())


def _show(console: Console, report: Report) -> None:
    table = Table(
        "contender", "events/s", "range", "Python µs", "PostgreSQL µs", "peak MB", "batch", title=report.scenario
    )
    for name, costs in report.costs.items():
        rate = Spread.of([cost.rate for cost in costs])
        table.add_row(
            name, f"{rate.median:,.0f}", f"{rate.low:,.0f} to {rate.high:,.0f}",
            f"{_median(costs, 'python_us'):,.1f}", f"{_median(costs, 'server_us'):,.1f}" if _seen(costs) else "not visible",
            f"{_median(costs, 'peak_mb'):,.0f}", f"{costs[0].extra['batch']:,.0f}" if "batch" in costs[0].extra else "",
        )  # fmt: skip
    console.print(table)
    for finding in report.findings:
        low, high = finding.measured.low, finding.measured.high
        verdict = "met" if finding.is_met else "NOT met"
        console.print(
            f"{finding.what}: {finding.measured.median:.3g} ({low:.3g} to {high:.3g}); target {finding.target}: {verdict}"
        )


def _in_markdown(report: Report) -> str:
    lines = [
        f"**{report.scenario}**",
        "",
        "| contender | events/s (range) | Python µs per event | PostgreSQL µs per event | peak MB | events per batch |",
        "|---|---|---|---|---|---|",
    ]
    for name, costs in report.costs.items():
        rate = Spread.of([cost.rate for cost in costs])
        server = f"{_median(costs, 'server_us'):,.1f}" if _seen(costs) else "not visible"
        batch = f"{Spread.of([cost.extra['batch'] for cost in costs]).median:,.0f}" if "batch" in costs[0].extra else ""
        lines.append(
            f"| {name} | {rate.median:,.0f} ({rate.low:,.0f} to {rate.high:,.0f}) | {_median(costs, 'python_us'):,.1f} "
            f"| {server} | {_median(costs, 'peak_mb'):,.0f} | {batch} |"
        )
    lines += ["", "| measured | median (range) | target | |", "|---|---|---|---|"]
    for what, target, measured, is_met in report.findings:
        spread = f"{measured.median:.3g} ({measured.low:.3g} to {measured.high:.3g})"
        lines.append(f"| {what} | {spread} | {target} | {'met' if is_met else 'not met'} |")
    return "\n".join(lines)


def _seen(costs: list[Cost]) -> bool:
    return all(cost.server_s is not None for cost in costs)


def _median(costs: list[Cost], name: str) -> float:
    return Spread.of([getattr(cost, name) for cost in costs]).median


def _plain(report: Report) -> dict[str, Any]:
    return {
        "scenario": report.scenario,
        "costs": {
            name: [
                cost._asdict() | {"rate": cost.rate, "python_us": cost.python_us, "server_us": cost.server_us}
                for cost in costs
            ]
            for name, costs in report.costs.items()
        },
        "findings": [finding._asdict() | {"measured": finding.measured._asdict()} for finding in report.findings],
    }
