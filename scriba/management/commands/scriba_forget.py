"""Deletes what the tables keep of a projection that the code does not declare any more."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from django.core.management.base import CommandError
from django.db import DEFAULT_DB_ALIAS, connections

from scriba import forget
from scriba.exceptions import UnknownProjection, did_you_mean
from scriba.forgetting import orphans
from scriba.info import read_state
from scriba.management.asking import confirm
from scriba.management.base import MISUSED, ScribaCommand, operator
from scriba.protocols import Identity
from scriba.registry import all_projections

if TYPE_CHECKING:
    from django.core.management.base import CommandParser

EPILOG = """\
examples:
  scriba_forget orders                       version 1 of orders, which is not in the code any more
  scriba_forget orders:2 --no-input          without asking
  scriba_forget orders --database reporting  the tables in another database

Cursors, dead letters, counters and wish are deleted in one transaction. Its read models stay: drop their tables yourself.
For a projection that is in the code, use scriba_reset.

exit codes:
  0  forgotten
  1  refused: a process runs the projection
  2  wrong usage, declared in the code, unknown, not confirmed, or the database cannot be reached
"""


class Command(ScribaCommand):
    help = "Deletes the rows of a projection that is not in the code any more."
    epilog: ClassVar[str] = EPILOG
    requires_system_checks = ()  # what is forgotten is not declared: no check is about it

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("projection", metavar="name[:version]", help="which one")
        parser.add_argument(
            "--database", default=DEFAULT_DB_ALIAS, metavar="ALIAS", help="the database that it wrote to"
        )
        parser.add_argument("--no-input", "--noinput", action="store_false", dest="interactive", help="do not ask")

    def handle(self, *_: Any, **options: Any) -> None:
        alias = _known(options["database"])
        identity = _orphan(options["projection"], alias)
        confirm(self, _question(identity, alias), interactive=options["interactive"])
        deleted = forget(identity, alias, by=operator())
        self.stdout.write(f"{identity}: forgotten, {deleted:,} rows deleted.")


def _known(alias: str) -> str:
    if alias not in connections:
        msg = f"--database: there is no database {alias!r} in DATABASES{did_you_mean(alias, list(connections))}"
        raise CommandError(msg, returncode=MISUSED)
    return alias


def _orphan(text: str, alias: str) -> Identity:
    """Return which orphan is meant; a name alone means version 1, as in every command."""
    name, _, version = text.rpartition(":")
    meant = [Identity(text, 1), *([Identity(name, int(version))] if name and version.isdecimal() else [])]
    there = orphans(alias)
    for identity in meant:
        if identity in there:
            return identity
    for declared in (made.identity for made in all_projections()):
        if declared in meant:
            msg = f"{declared} is in the code: scriba_reset makes it begin anew. Only what the code does not declare is forgotten."
            raise UnknownProjection(msg)
    known = [str(identity) for identity in there]
    others = did_you_mean(text, known) if known else "; there is none."
    msg = f"the tables of the database {alias!r} know no {text!r} that the code does not declare{others}"
    raise UnknownProjection(msg)


def _question(identity: Identity, alias: str) -> str:
    now = read_state(identity, alias)
    return (
        f"{identity} ({now.status}, watermark {now.watermark}) is not in the code any more. Its cursors, dead letters and "
        "counters are deleted; its read model stays."
    )
