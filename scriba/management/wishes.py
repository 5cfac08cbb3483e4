"""scriba_pause, scriba_resume, scriba_stop and scriba_start: one command with four verbs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from django.core.management.base import CommandError

from scriba import info
from scriba.exceptions import ScribaError
from scriba.management.base import FAILED, MISUSED, ScribaCommand, operator, seconds, select
from scriba.protocols import Status

if TYPE_CHECKING:
    from collections.abc import Callable

    from django.core.management.base import CommandParser

    from scriba.registry import Projection

__all__ = ["WishCommand", "epilog_for"]

EPILOG = """\
examples:
  scriba_{verb} orders                       version 1 of orders
  scriba_{verb} orders:2 totals              two projections
  scriba_{verb} --all
  scriba_{verb} orders --reason "deploy 4711"  recorded together with who said so
  scriba_{verb} orders --wait                return when the process that runs it has followed

The wish is a row: whoever runs the projection, on any host, follows within a second, and it survives restarts.

exit codes:
  0  wished (with --wait: and followed)
  1  refused for at least one: wrong state, or with --wait not followed in time; the others are done
  2  wrong usage, unknown projection, or the database cannot be reached
"""


def epilog_for(verb: str) -> str:
    return EPILOG.format(verb=verb)


class WishCommand(ScribaCommand):
    """Wishes something of one, several or all projections."""

    verb: ClassVar[Callable[..., None]]
    done: ClassVar[str]  #: how the wish is called once it is recorded
    requires_system_checks = ()  # stopping must be possible with a broken declaration elsewhere

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("projections", nargs="*", metavar="name[:version]", help="which ones")
        parser.add_argument("--all", action="store_true", dest="all_of_them", help="every registered projection")
        parser.add_argument("--reason", default="", help="why, for the records")
        parser.add_argument(
            "--wait", nargs="?", type=seconds, const=10.0, metavar="SECONDS", help="until it has followed, at most 10 s"
        )

    def handle(self, *_: Any, **options: Any) -> None:
        if bool(options["projections"]) == options["all_of_them"]:
            msg = "Name the projections, or give --all (not both)."
            raise CommandError(msg, returncode=MISUSED)
        refused = [answer for made in select(options["projections"]) if (answer := self._one(made, options))]
        if refused:
            raise CommandError("\n".join(refused), returncode=FAILED)

    def _one(self, projection: Projection, options: dict[str, Any]) -> str:
        """Wish it of one projection; return why that was refused, or nothing."""
        waiting = {} if options["wait"] is None else {"wait": True, "timeout": options["wait"]}
        try:
            type(self).verb(projection, by=operator(), reason=options["reason"], **waiting)
        except ScribaError as error:
            return str(error)
        now = info(projection)
        if waiting:
            follows = "done"
        elif now.status is Status.NOT_RUNNING:
            follows = "no process runs it now; the next one follows"
        else:
            follows = f"{now.owner or 'the process that runs it'} follows within a second"
        self.stdout.write(f"{projection.identity}: wished {self.done} ({follows})")
        return ""
