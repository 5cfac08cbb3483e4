"""Lets a projection continue where a projector of ``commanded_ecto_projections`` stopped."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import psycopg
from django.core.management.base import CommandError
from django.db import DEFAULT_DB_ALIAS, connections, transaction
from django.db.models.functions import Now

from scriba.audit import record
from scriba.info import alias_of
from scriba.management.base import FAILED, MISUSED, ScribaCommand, operator, select
from scriba.protocols import Identity
from scriba.registry import all_projections
from scriba.sources.commanded import CommandedSource
from scriba.sources.commanded_migration import Finding, judge, look_at_store, read_projectors, unknown_projector

if TYPE_CHECKING:
    from collections.abc import Sequence

    from django.core.management.base import CommandParser

    from scriba.registry import Projection

EPILOG = """\
examples:
  scriba_import_projection_versions                                   every old projector, and where one may go on
  scriba_import_projection_versions orders --projector order_projector          what would be written for orders
  scriba_import_projection_versions orders --projector order_projector --write  write it
  scriba_import_projection_versions --database old --table tenant_1.projection_versions

Nothing is written without --write, and nothing is ever written to the old tables: going back stays possible. Stop the
old projector before you write; its number moves as long as it runs. Afterwards start the projection: the first event
it applies is the one after the number, whatever its source's start_from= says.

exit codes:
  0  shown, or written
  1  refused: no trustworthy number, the old projector still runs, or the projection has run already
  2  wrong usage, unknown projection or projector, no such table, or a database cannot be reached
"""


class Command(ScribaCommand):
    help = "Shows where projectors of commanded_ecto_projections stopped, and lets a projection go on from there."
    epilog: ClassVar[str] = EPILOG

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("projection", nargs="?", metavar="name[:version]", help="the projection that continues")
        parser.add_argument("--projector", metavar="NAME", help="the old projector whose read model it continues")
        parser.add_argument(
            "--database",
            default=DEFAULT_DB_ALIAS,
            metavar="ALIAS",
            help="where the old table is (default: %(default)s)",
        )
        parser.add_argument(
            "--table",
            default="projection_versions",
            metavar="[SCHEMA.]NAME",
            help="the old table (default: %(default)s)",
        )
        parser.add_argument("--write", action="store_true", help="write the starting point (default: only show it)")
        parser.add_argument("--force", action="store_true", help="write although the old subscription is still in use")

    def handle(self, *_: Any, **options: Any) -> None:
        projection = _continuing(options)
        projectors = read_projectors(options["database"], options["table"])
        if options["projector"]:
            chosen = [each for each in projectors if each.name == options["projector"]]
            if not chosen:
                raise CommandError(unknown_projector(options["projector"], projectors), returncode=MISUSED)
            projectors = chosen
        found = _judged(projectors, _source(projection))
        self._show(found)
        if projection is not None:
            self._import(projection, found[0], options)

    def _show(self, found: Sequence[Finding]) -> None:
        if not found:
            self.stdout.write("The table holds no projector.")
        for finding in found:
            start = "no trustworthy number" if finding.start is None else f"safe to go on after {finding.start}"
            self.stdout.write(f"{finding.projector.name}: {start}")
            for remark in finding.remarks:
                self.stdout.write(f"  - {remark}")

    def _import(self, projection: Projection, finding: Finding, options: dict[str, Any]) -> None:
        name = finding.projector.name
        if finding.start is None:
            msg = f"{projection.identity} cannot continue {name!r}: {finding.remarks[0]}"
            raise CommandError(msg, returncode=FAILED)
        if not options["write"]:
            self.stdout.write(
                f"{projection.identity} would begin after {finding.start}. Nothing was written: give --write."
            )
            return
        if finding.holder and not options["force"]:
            msg = f"the old projector still runs: {finding.holder}. Stop it, and look again: its number may have moved."
            raise CommandError(msg, returncode=FAILED)
        _write(projection, finding.start, name)
        self.stdout.write(f"{projection.identity} begins after {finding.start}, where {name!r} stopped.")


def _continuing(options: dict[str, Any]) -> Projection | None:
    """Return the projection that is to continue, if one is named; its projector must be named with it."""
    if options["projection"] is None:
        if options["write"]:
            msg = "--write needs the projection that continues, and --projector NAME."
            raise CommandError(msg, returncode=MISUSED)
        return None
    (projection,) = select([options["projection"]])
    if options["projector"] is None:
        msg = f"which projector does {projection.identity} continue? Name it: --projector NAME."
        raise CommandError(msg, returncode=MISUSED)
    if not isinstance(projection.source, CommandedSource):
        msg = f"{projection.identity} reads {projection.source.identity()}: the old numbers mean nothing there."
        raise CommandError(msg, returncode=MISUSED)
    return projection


def _source(projection: Projection | None) -> CommandedSource | None:
    """Return the event store to compare with: the projection's, or the first that any projection reads."""
    candidates = [projection] if projection is not None else all_projections()
    sources = (candidate.source for candidate in candidates)
    return next((source for source in sources if isinstance(source, CommandedSource)), None)


def _judged(projectors: Sequence[Any], source: CommandedSource | None) -> list[Finding]:
    try:
        store = None if source is None else look_at_store(source, Identity("import", 1))
    except psycopg.Error as error:
        msg = f"the event store cannot be looked at: {' '.join(str(error).split())}"
        raise CommandError(msg, returncode=MISUSED) from error
    return [judge(projector, store) for projector in projectors]


def _write(projection: Projection, number: int, projector: str) -> None:
    """Write floor and watermark of a projection that never ran, and the entry in the records, in one transaction."""
    from scriba.models import Position, ProjectionState, Segment  # noqa: PLC0415 - needs the app registry

    alias = alias_of(projection)
    key: dict[str, Any] = {"projection_name": projection.name, "projection_version": projection.version}
    with transaction.atomic(using=alias):
        state, _ = ProjectionState.objects.using(alias).get_or_create(**key)
        segment, _ = Segment.objects.using(alias).get_or_create(**key, partition="", slice_from=0)
        # A process that starts meanwhile waits here for the row, and then reads what was written.
        locked = Segment.objects.using(alias).select_for_update().filter(pk=segment.pk)
        watermark = locked.get().watermark
        if locked.exclude(owner="").filter(lease_expires_at__gt=Now()).exists():
            msg = f"a process runs {projection.identity} now; stop it first: manage.py scriba_stop {projection.identity} --wait"
            raise CommandError(msg, returncode=FAILED)
        if watermark is not None or Position.objects.using(alias).filter(**key).exists():
            msg = (
                f"{projection.identity} has run already (watermark {watermark}): a starting point would contradict what it has "
                f"applied. Make it forget: manage.py scriba_reset {projection.identity}; or give the projection a new version."
            )
            raise CommandError(msg, returncode=FAILED)
        ProjectionState.objects.using(alias).filter(pk=state.pk).update(floor=number)
        locked.update(watermark=number)
        with connections[alias].cursor() as cursor:
            detail = f"begins after {number}, where {projector!r} stopped"
            record(cursor, projection.identity, "import", by=operator(), detail=detail)
