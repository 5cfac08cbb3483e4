"""Makes a projection forget everything, so that it starts again from its source's beginning."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from django.apps import apps
from django.core.management.base import CommandError

from scriba import info, reset
from scriba.management.asking import confirm
from scriba.management.base import MISUSED, ScribaCommand, operator, select

if TYPE_CHECKING:
    from django.core.management.base import CommandParser
    from django.db.models import Model

    from scriba.registry import Projection

EPILOG = """\
examples:
  scriba_reset orders                        cursors, watermark and counters; then every event comes again
  scriba_reset orders --truncate             and delete the rows of its declared models=[…]
  scriba_reset orders --model shop.OrderRow  and delete the rows of this model (may be repeated)
  scriba_reset orders --dead-letters         and delete its dead letters (else the open ones are discarded)
  scriba_reset orders --no-input             without asking

Everything happens in one transaction. Stop the projection first: scriba_stop orders --wait.
Without --truncate the events are applied to the rows that are there: right for upserts, wrong for counters.

exit codes:
  0  forgotten
  1  refused: a process runs the projection
  2  wrong usage, unknown projection or model, not confirmed, or the database cannot be reached
"""


class Command(ScribaCommand):
    help = "Forgets a stopped projection's cursors, watermark and counters, and what else is asked for."
    epilog: ClassVar[str] = EPILOG

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("projection", metavar="name[:version]", help="which one")
        parser.add_argument("--truncate", action="store_true", help="delete the rows of the declared read models too")
        parser.add_argument(
            "--model", action="append", default=[], metavar="app.Model", help="delete the rows of this read model too"
        )
        parser.add_argument("--dead-letters", action="store_true", help="delete its dead letters too")
        parser.add_argument("--no-input", "--noinput", action="store_false", dest="interactive", help="do not ask")

    def handle(self, *_: Any, **options: Any) -> None:
        (projection,) = select([options["projection"]])
        truncate = _models(projection, options["model"], declared=options["truncate"])
        confirm(
            self, _question(projection, truncate, letters=options["dead_letters"]), interactive=options["interactive"]
        )
        forgotten = reset(projection, dead_letters=options["dead_letters"], truncate=truncate, by=operator())
        verb = "deleted" if options["dead_letters"] else "discarded"
        self.stdout.write(
            f"{projection.identity}: {forgotten.cursors:,} cursors forgotten, {forgotten.dead_letters:,} dead letters {verb}, "
            f"{forgotten.read_model_rows:,} rows of read models deleted."
        )


def _models(projection: Projection, labels: list[str], *, declared: bool) -> list[type[Model]]:
    if declared and not projection.models:
        msg = f"--truncate: {projection.identity} declares no models; name them with --model, or declare models=[…]."
        raise CommandError(msg, returncode=MISUSED)
    try:
        return [*(projection.models if declared else ()), *(apps.get_model(label) for label in labels)]
    except (LookupError, ValueError) as error:
        msg = f"--model: {error} Give a model as app_label.ModelName."
        raise CommandError(msg, returncode=MISUSED) from error


def _question(projection: Projection, models: list[type[Model]], *, letters: bool) -> str:
    now = info(projection)
    lines = [
        f"{projection.identity} ({now.status}, watermark {now.watermark}) forgets its cursors, watermark and counters."
    ]
    if models:
        lines.append(f"Every row of {', '.join(model._meta.label for model in models)} is deleted.")
    kept = now.dead_letters["open"] + now.dead_letters["parked"]
    if letters:
        lines.append(f"Its {sum(now.dead_letters.values()):,} dead letters are deleted.")
    elif kept:
        lines.append(f"Its {kept:,} open dead letters are discarded.")
    return "\n".join(lines)
