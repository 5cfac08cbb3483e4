"""Runs projections in this process until it is told to stop. The engine does the work; this shows it."""

from __future__ import annotations

import atexit
from typing import TYPE_CHECKING, Any, ClassVar

from django.core.management.base import CommandError
from django.utils.autoreload import run_with_reloader

from scriba.engine import runner
from scriba.engine.collector import spared_collector
from scriba.management.base import MISUSED, ScribaCommand, operator, positive, seconds, select
from scriba.management.logs import logging_as
from scriba.management.preflight import close_idle, preflight
from scriba.management.probes import STALLED_AFTER_S, ProbeServer
from scriba.management.progress import BarDisplay, Display, PlainDisplay
from scriba.protocols import Status

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from django.core.management.base import CommandParser

    from scriba.engine.coordinator import Snapshot
    from scriba.registry import Projection

EPILOG = """\
examples:
  run_projections                          every projection, until SIGTERM or Ctrl-C
  run_projections orders totals:2          these two (a name alone means version 1)
  run_projections --exclude reports        all but one
  run_projections --until-caught-up        drain the source, then leave (cron, tests, deployments)
  run_projections orders --parallelism 16  more lanes for a long catch-up
  run_projections --start orders           wish it running first, after scriba_stop orders
  run_projections --log-format json        one JSON object per log line
  run_projections --metrics-port 9464      Prometheus metrics at :9464/metrics
  run_projections --health-port 8081       /live and /ready for Kubernetes
  run_projections --reload                 restart on code changes (development only)

A second process with the same projection stands by and takes over when the first one leaves or dies.
SIGTERM and Ctrl-C drain: what is in flight is committed, nothing new is begun. A second signal does not wait.

exit codes:
  0  drained, caught up, or stopped on request
  1  a projection halted or failed, or did not drain in time
  2  wrong usage or configuration, or the database cannot be reached
"""


class Command(ScribaCommand):
    help = "Runs projections until SIGTERM or Ctrl-C, or until the source is drained."
    epilog: ClassVar[str] = EPILOG

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("projections", nargs="*", metavar="name[:version]", help="which ones; all when left out")
        parser.add_argument(
            "--exclude",
            action="append",
            default=[],
            metavar="NAME[:VERSION]",
            help="leave this one out; may be repeated",
        )
        parser.add_argument("--until-caught-up", action="store_true", help="leave when everything readable is settled")
        parser.add_argument(
            "--start", action="store_true", help="wish them running first; after a stop this also leaves a halt behind"
        )
        parser.add_argument(
            "--parallelism", type=positive, metavar="N", help="lanes of each, instead of the declared number"
        )
        parser.add_argument("--batch-size", type=positive, metavar="N", help="most events in one transaction")
        parser.add_argument(
            "--drain-timeout", type=seconds, metavar="SECONDS", help="longest wait for handlers on the way out"
        )
        parser.add_argument(
            "--log-format", choices=("plain", "json"), help="how the logger 'scriba' writes to standard error"
        )
        parser.add_argument("--no-progress", action="store_true", help="plain lines, also on a terminal")
        parser.add_argument("--metrics-port", type=positive, metavar="PORT", help="serve Prometheus metrics there")
        parser.add_argument("--health-port", type=positive, metavar="PORT", help="serve /live and /ready there")
        parser.add_argument(
            "--stalled-after",
            type=seconds,
            default=STALLED_AFTER_S,
            metavar="SECONDS",
            help="without a commit although events are in flight: not healthy any more (60)",
        )
        parser.add_argument("--reload", action="store_true", help="restart on code changes (development only)")

    def handle(self, *_: Any, **options: Any) -> None:
        if options["reload"]:
            run_with_reloader(lambda: self._run(options))
        else:
            self._run(options)

    def _run(self, options: dict[str, Any]) -> None:
        projections = _chosen(options)
        for warning in preflight(projections):
            self.stderr.write(self.style.WARNING(f"{warning.msg} {warning.hint or ''}"))
        self.check_migrations()  # of other apps, the read models': Django's notice, no refusal
        close_idle()
        display, write_log = self._display(plain=options["no_progress"] or options["log_format"] == "json")
        watch = _Watch(display)
        servers: list[ProbeServer] = []
        _serve_metrics(options["metrics_port"])
        try:
            with logging_as(options["log_format"], options["verbosity"], write_log), spared_collector():
                code = runner.run(
                    projections,
                    until_caught_up=options["until_caught_up"],
                    drain_timeout_s=options["drain_timeout"],
                    start=options["start"],
                    start_by=operator(),
                    on_progress=watch,
                    on_start=lambda fleet: self._started(fleet, options, servers),
                )
        finally:
            for server in servers:
                server.close()
            display.close()
        if code:
            raise CommandError(watch.complaint(code), returncode=code)

    def _started(self, fleet: runner.Fleet, options: dict[str, Any], servers: list[ProbeServer]) -> None:
        """Before the first event: what has to be undone at the end, and what others ask of this process."""
        if options["reload"]:
            _drain_at_exit(fleet)
        port = options["health_port"]
        if port is None:
            return
        try:
            servers.append(ProbeServer(port, fleet.snapshots, stalled_after_s=options["stalled_after"]))
        except OSError as error:
            raise CommandError(_taken("--health-port", port, error), returncode=MISUSED) from error

    def _display(self, *, plain: bool) -> tuple[Display, Callable[[str], object] | None]:
        """Return the display, and where log lines go so that they do not tear a bar apart."""
        if plain or not self.stdout.isatty():
            return PlainDisplay(self._write), None
        out: Any = self.stdout
        bars = BarDisplay(getattr(out, "_out", out))  # below Django's wrapper, which ends every write
        return bars, lambda line: bars.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _write(self, line: str) -> None:
        self.stdout.write(line)
        self.stdout.flush()


class _Watch:
    """Passes snapshots on, and keeps what each projection said last for the closing message."""

    def __init__(self, display: Display) -> None:
        self._display = display
        self._halted: set[object] = set()
        self._last: Sequence[Snapshot] = ()

    def __call__(self, snapshots: Sequence[Snapshot]) -> None:
        self._last = snapshots
        for snapshot in snapshots:
            if snapshot.status is not Status.NOT_RUNNING:
                (self._halted.add if snapshot.status is Status.HALTED else self._halted.discard)(snapshot.identity)
        self._display(snapshots)

    def complaint(self, code: int) -> str:
        """Return one message for a run that ended with `code`: each projection that failed, and the cure."""
        lines = []
        for snapshot in self._last:
            halted = snapshot.identity in self._halted
            if snapshot.reason and (halted or snapshot.status is Status.NOT_RUNNING):
                lines.append(f"{snapshot.identity}{' halted' if halted else ''}: {snapshot.reason}")
        if self._halted and code != MISUSED:
            lines.append("After the fix: scriba_stop, then scriba_start (or run_projections --start).")
        return "\n".join(lines) or "A projection ended with an error; its log line says which."


def _drain_at_exit(fleet: runner.Fleet) -> None:
    """The reloader leaves without asking anybody: give the lease back, or the next process waits for it to run out."""

    def drain() -> None:
        fleet.stop()
        fleet.wait(None)

    atexit.register(drain)


def _serve_metrics(port: int | None) -> None:
    if port is None:
        return
    try:
        from prometheus_client import start_http_server  # noqa: PLC0415 - an extra

        from scriba.metrics import register  # noqa: PLC0415 - an extra
    except ImportError as error:
        msg = "--metrics-port needs prometheus-client: pip install 'scriba[prometheus]'"
        raise CommandError(msg, returncode=MISUSED) from error
    register()
    try:
        start_http_server(port)
    except OSError as error:
        raise CommandError(_taken("--metrics-port", port, error), returncode=MISUSED) from error


def _taken(option: str, port: int, error: OSError) -> str:
    return f"{option} {port}: cannot listen there ({error.strerror or error}). Give a port that is free."


def _chosen(options: dict[str, Any]) -> list[Projection]:
    overrides = {name: options[name] for name in ("parallelism", "batch_size") if options[name] is not None}
    chosen = select(options["projections"], options["exclude"])
    return [projection.override(**overrides) if overrides else projection for projection in chosen]
