"""Shows how projections are, from any host: it reads rows and needs no running process."""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, Any, ClassVar

from django.db import InterfaceError, OperationalError, connections
from django.utils.timezone import localtime

from scriba import info
from scriba.management.base import ScribaCommand, seconds, select_versions
from scriba.management.overview import as_history, as_json, as_table, as_text

if TYPE_CHECKING:
    from django.core.management.base import CommandParser

    from scriba.info import Info
    from scriba.registry import Projection

EPILOG = """\
examples:
  scriba_info                 every projection
  scriba_info orders          all versions of one name
  scriba_info orders:2        one version
  scriba_info --watch         the table again every 2 seconds, until Ctrl-C
  scriba_info --watch 0.5     the same, faster
  scriba_info --history       who paused, stopped, reset or replayed what, the newest first
  scriba_info --json          for programs: a list of objects (with --watch, one list per line)

watermark: everything delivered at or below it is settled. lag: positions (and seconds) from there to the head.
Who is halted or not running looks at no source: its lag is a lower bound (≥), or unknown.
dead letters: the open ones, and the events parked behind one.

exit codes:
  0  shown (whatever is shown: see scriba_health for a verdict)
  2  unknown projection, or the database cannot be reached
"""


class Command(ScribaCommand):
    help = "Shows state, owner, watermark, head, lag, rate, counters and halts of projections."
    epilog: ClassVar[str] = EPILOG
    requires_system_checks = ()  # somebody who looks wants to see, not to be told off

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("projections", nargs="*", metavar="name[:version]", help="which ones; all when left out")
        parser.add_argument("--json", action="store_true", help="for programs")
        parser.add_argument("--history", action="store_true", help="who asked what and when, the newest first")
        parser.add_argument(
            "--watch",
            nargs="?",
            type=seconds,
            const=2.0,
            metavar="SECONDS",
            help="again and again, every 2 s by default",
        )

    def handle(self, *_: Any, **options: Any) -> None:
        projections = select_versions(options["projections"])
        if options["history"]:
            self.stdout.write(as_history(projections, as_program=options["json"]))
            return
        if options["watch"] is None:
            self._show([info(projection) for projection in projections], as_program=options["json"])
            return
        try:
            self._watch(projections, options["watch"], as_program=options["json"])
        except KeyboardInterrupt:  # the ordinary way to leave
            self.stdout.write("")

    def _show(self, infos: list[Info], *, as_program: bool) -> None:
        if as_program:
            self.stdout.write(json.dumps(as_json(infos), indent=2))
        elif self.stdout.isatty():
            self._console().print(as_table(infos))
        else:
            self.stdout.write(as_text(infos))

    def _watch(self, projections: list[Projection], every_s: float, *, as_program: bool) -> None:
        if as_program or not self.stdout.isatty():
            self._watch_lines(projections, every_s, as_program=as_program)
            return
        from rich.live import Live  # noqa: PLC0415 - only on a terminal

        with Live(console=self._console(), auto_refresh=False, screen=True) as live:
            while True:
                live.update(_titled(projections), refresh=True)
                threading.Event().wait(every_s)

    def _watch_lines(self, projections: list[Projection], every_s: float, *, as_program: bool) -> None:
        while True:
            if as_program:
                self.stdout.write(json.dumps(as_json([info(projection) for projection in projections])))
            else:
                self.stdout.write(
                    f"{localtime():%H:%M:%S}\n{as_text([info(projection) for projection in projections])}\n"
                )
            self.stdout.flush()
            threading.Event().wait(every_s)

    def _console(self) -> Any:
        from rich.console import Console  # noqa: PLC0415 - only on a terminal

        out: Any = self.stdout
        return Console(file=getattr(out, "_out", out))  # below Django's wrapper, which ends every write


def _titled(projections: list[Projection]) -> Any:
    """Return one screen; a database that is away is shown, and looked for again."""
    from rich.console import Group  # noqa: PLC0415 - only on a terminal
    from rich.text import Text  # noqa: PLC0415 - only on a terminal

    try:
        shown = as_table([info(projection) for projection in projections])
    except (OperationalError, InterfaceError) as error:
        connections.close_all()
        shown = Text(f"The database is out of reach: {' '.join(str(error).split())}", style="red")
    return Group(Text(f"scriba_info  {localtime():%H:%M:%S}  (Ctrl-C leaves)\n", style="dim"), shown)
