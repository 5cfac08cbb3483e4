"""A verdict for Kubernetes, cron and monitoring: silent numbers become an exit code."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from django.core.management.base import CommandError

from scriba import info
from scriba.management.base import FAILED, ScribaCommand, count, seconds, select_versions
from scriba.management.progress import duration
from scriba.protocols import Status, Wish

if TYPE_CHECKING:
    from django.core.management.base import CommandParser

    from scriba.info import Info

EPILOG = """\
examples:
  scriba_health                                   every projection runs somewhere, none is halted
  scriba_health orders --max-lag-seconds 60       and it is at most a minute behind
  scriba_health --max-lag-events 10000
  scriba_health --max-dead-letters 0              and nothing waits for a human

A projection that somebody paused or stopped is healthy: that is what was wished. It says so.

exit codes:
  0  healthy
  1  halted, run by no process, too far behind, or too many dead letters (open or parked)
  2  wrong usage, unknown projection, or the database cannot be reached
"""


class Command(ScribaCommand):
    help = "Exits with 0 when projections are healthy and 1 when they are not."
    epilog: ClassVar[str] = EPILOG
    requires_system_checks = ()  # a probe asks one question

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("projections", nargs="*", metavar="name[:version]", help="which ones; all when left out")
        parser.add_argument("--max-lag-seconds", type=seconds, metavar="N", help="oldest allowed last settled event")
        parser.add_argument("--max-lag-events", type=count, metavar="N", help="most positions behind the head")
        parser.add_argument("--max-dead-letters", type=count, metavar="N", help="most letters that are open or parked")

    def handle(self, *_: Any, **options: Any) -> None:
        infos = [info(projection) for projection in select_versions(options["projections"])]
        found = [problem for one in infos for problem in problems(one, options)]
        if found:
            raise CommandError("\n".join(found), returncode=FAILED)
        for one in infos:
            self.stdout.write(f"{one.name}:{one.version}: {_verdict(one)}")


def problems(info: Info, limits: dict[str, Any]) -> list[str]:
    """Return what makes a projection unhealthy, each with its name."""
    if info.halt_reason:
        found = [f"halted: {info.halt_reason}"]
    elif info.wish is Wish.RUNNING:
        found = _absence(info) or _lag(info, limits)
    else:
        found = []
    waiting = info.dead_letters["open"] + info.dead_letters["parked"]
    most = limits["max_dead_letters"]
    if most is not None and waiting > most:
        found.append(f"{waiting:,} dead letters wait (at most {most:,} are allowed)")
    return [f"{info.name}:{info.version}: {problem}" for problem in found]


def _absence(info: Info) -> list[str]:
    return ["run by no process"] if info.status is Status.NOT_RUNNING else []


def _lag(info: Info, limits: dict[str, Any]) -> list[str]:
    found = []
    most_events, most_seconds = limits["max_lag_events"], limits["max_lag_seconds"]
    if most_events is not None and (info.lag_events is None or info.lag_events > most_events):
        behind = "an unknown number of" if info.lag_events is None else f"{info.lag_events:,}"
        found.append(f"{behind} positions behind (at most {most_events:,} are allowed)")
    if most_seconds is not None and (info.lag_seconds is None or info.lag_seconds > most_seconds):
        age = "an unknown time" if info.lag_seconds is None else duration(info.lag_seconds)
        found.append(f"{age} behind (at most {duration(most_seconds)} is allowed)")
    return found


def _verdict(info: Info) -> str:
    if info.wish is not Wish.RUNNING:
        return f"{info.wish} on request{f' of {info.wish_by}' if info.wish_by else ''}"
    return "healthy"
