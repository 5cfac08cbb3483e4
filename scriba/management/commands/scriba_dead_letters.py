"""Dead letters from the command line: look at them, let them be tried again, give them up, clear the old ones away.

A replay or a discard is a wish on the letter's row: the process that runs the projection carries it out, in the
key's own lane. So bulk work is safe to interrupt and safe to repeat.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Any, ClassVar, Final

from django.core.management.base import CommandError
from django.db.models import Count, Max, Min
from django.utils.timezone import localtime

from scriba.bulk import RESOLVED, holders, purge, waiting_behind
from scriba.management.asking import confirm
from scriba.management.base import MISUSED, ScribaCommand, count, operator, seconds
from scriba.management.bulk import BulkWork, DryRun
from scriba.management.letters import add_filters, age, chosen, is_narrowed
from scriba.models import DeadLetter

if TYPE_CHECKING:
    from django.core.management.base import CommandParser
    from django.db.models import QuerySet

EPILOG = """\
examples:
  scriba_dead_letters list                                 the open and parked ones
  scriba_dead_letters list --groups                        equal failures as one line
  scriba_dead_letters list --projection orders --since 2h --json
  scriba_dead_letters show 17                              payload, metadata and traceback
  scriba_dead_letters replay 17                            try one again, after the fix
  scriba_dead_letters replay --kind 'commit:23505*'        all of a kind, in order
  scriba_dead_letters replay --all --dry-run               which would pass now, and what they would change
  scriba_dead_letters discard --group 6f1c2d               give a group up
  scriba_dead_letters purge --older-than 90d               delete resolved ones

replay and discard are wishes: the process that runs the projection carries them out, within a second. They may be
interrupted and repeated. A replay releases what is parked behind its letter, in order. A dry run calls the handler
in this process, in transactions that are rolled back.

exit codes:
  0  done
  1  some were refused or failed again, or would fail; the others are done
  2  wrong usage, nothing named, unknown id or projection, not confirmed, or the database cannot be reached
"""

SHORT: Final = 80


class Command(ScribaCommand):
    help = "Lists, shows, replays, discards and purges dead letters."
    epilog: ClassVar[str] = EPILOG
    requires_system_checks = ()

    def add_arguments(self, parser: CommandParser) -> None:
        actions = parser.add_subparsers(dest="action", required=True, metavar="list|show|replay|discard|purge")
        listing = actions.add_parser("list", help="show one line per letter, or per group of equal failures")
        add_filters(listing, status=True)
        listing.add_argument("--groups", action="store_true", help="one line per projection, kind, type and place")
        listing.add_argument("--limit", type=count, default=50, metavar="N", help="most lines (default: 50)")
        listing.add_argument("--json", action="store_true", help="for programs")
        showing = actions.add_parser("show", help="show everything about one letter")
        showing.add_argument("id", type=count)
        showing.add_argument("--database", metavar="ALIAS", help="only in this database")
        showing.add_argument("--json", action="store_true", help="for programs")
        for action, help_text in (("replay", "handle events again"), ("discard", "give letters up for good")):
            acting = actions.add_parser(action, help=help_text)
            acting.add_argument("ids", nargs="*", type=count, metavar="id")
            add_filters(acting, status=False)
            acting.add_argument("--all", action="store_true", dest="all_of_them", help="every unresolved letter")
            acting.add_argument(
                "--wait", type=seconds, default=30.0, metavar="SECONDS", help="longest wait for results (30)"
            )
            acting.add_argument("--no-input", "--noinput", action="store_false", dest="interactive", help="do not ask")
            if action == "replay":
                acting.add_argument(
                    "--allow-out-of-order",
                    action="store_true",
                    help="also where later events of the stream are applied",
                )
                acting.add_argument(
                    "--dry-run", action="store_true", help="only say which would pass now, and what they change"
                )
        purging = actions.add_parser("purge", help="delete replayed and discarded letters")
        purging.add_argument("--older-than", type=age, required=True, metavar="SPAN", help="resolved so long ago: 90d")
        add_filters(purging, status=False)
        purging.add_argument("--no-input", "--noinput", action="store_false", dest="interactive", help="do not ask")

    def handle(self, *_: Any, **options: Any) -> None:
        actions = {
            "list": self._list,
            "show": self._show,
            "replay": self._resolve,
            "discard": self._resolve,
            "purge": self._purge,
        }
        actions[options["action"]](options)

    # --- looking --------------------------------------------------------------------------------------------------

    def _list(self, options: dict[str, Any]) -> None:
        found = chosen(options)
        lines = (
            _groups(found)
            if options["groups"]
            else [line for letters in found for line in _rows(letters[: options["limit"]])]
        )
        lines = lines[: options["limit"]]
        if options["json"]:
            self.stdout.write(json.dumps(lines, indent=2, default=str))
            return
        if not lines:
            self.stdout.write("No dead letters.")
            return
        self.stdout.write(_aligned(lines, get_terminal_size().columns if self.stdout.isatty() else None))
        total = sum(letters.count() for letters in found)
        if not options["groups"] and total > len(lines):
            self.stdout.write(f"… and {total - len(lines):,} more; narrow the filters, or raise --limit.")

    def _show(self, options: dict[str, Any]) -> None:
        everything = dict.fromkeys(("projection", "kind", "event_type", "stream", "event_id", "group", "since"))
        found = chosen(everything | options, [options["id"]], status=DeadLetter.Status.values)
        letter = found[0].get()
        if options["json"]:
            self.stdout.write(json.dumps(_everything(letter), indent=2, default=str))
            return
        for name, value in _everything(letter).items():
            shown = json.dumps(value, indent=2, ensure_ascii=False) if isinstance(value, dict | list) else str(value)
            self.stdout.write(f"{name + ':':20} {shown}" if "\n" not in shown else f"{name}:\n{shown}")

    # --- acting ---------------------------------------------------------------------------------------------------

    def _resolve(self, options: dict[str, Any]) -> None:
        if not (options["ids"] or is_narrowed(options) or options["all_of_them"]):
            msg = f"Say which: ids, filters, or --all. 'scriba_dead_letters {options['action']} --help' shows examples."
            raise CommandError(msg, returncode=MISUSED)
        found = chosen(options, options["ids"])
        total = sum(letters.count() for letters in found)
        if not total:
            self.stdout.write("No unresolved dead letter matches; nothing to do.")
            return
        if options.get("dry_run"):
            DryRun(self, total, allow_out_of_order=options["allow_out_of_order"]).run(found)
            return
        if total > 1:
            confirm(
                self,
                f"{options['action']} {total:,} dead letters:\n{_aligned(_groups(found))}",
                interactive=options["interactive"],
            )
        BulkWork(self, options, total).run(found)

    def _purge(self, options: dict[str, Any]) -> None:
        before = datetime.now(UTC) - options["older_than"]
        found = [letters.filter(resolved_at__lt=before) for letters in chosen(options, status=RESOLVED)]
        total = sum(letters.count() for letters in found)
        if total:
            confirm(self, f"{total:,} resolved dead letters are deleted.", interactive=options["interactive"])
        deleted = sum(sum(purge(letters, before=before, by=operator())) for letters in found)
        self.stdout.write(f"{deleted:,} resolved dead letters deleted.")


# --- how letters look -------------------------------------------------------------------------------------------------


def _rows(letters: QuerySet[DeadLetter]) -> list[dict[str, Any]]:
    found = list(letters)
    behind, held_by = waiting_behind(found), holders(found)
    return [_row(letter, behind.get(letter.pk, 0), held_by.get(letter.pk)) for letter in found]


def _row(letter: DeadLetter, behind: int, held_by: int | None) -> dict[str, Any]:
    message = " ".join(letter.error_message.split())
    return {
        "id": letter.pk,
        "projection": f"{letter.projection_name}:{letter.projection_version}",
        "status": _status(letter, behind, held_by),
        "since": f"{localtime(letter.occurred_at):%Y-%m-%d %H:%M:%S}",
        "position": letter.position,
        "stream": letter.stream_id,
        "type": letter.event_type,
        "kind": letter.error_kind,
        "message": f"{message[:SHORT]}…" if len(message) > SHORT else message,
    }


def _status(letter: DeadLetter, behind: int, held_by: int | None) -> str:
    """Return the status, what waits behind the letter or what it waits for, and what is wished."""
    words = [f"{letter.status} behind {held_by}" if held_by else str(letter.status)]
    words += [f"{behind:,} wait behind it"] if behind else []
    words += [f"{letter.wish} wished"] if letter.wish else []
    return ", ".join(words)


def _groups(found: list[QuerySet[DeadLetter]]) -> list[dict[str, Any]]:
    """Return one line per group of equal failures, the largest first."""
    by = ("projection_name", "projection_version", "error_kind", "event_type", "fingerprint")
    lines = [
        {
            "letters": group["letters"],
            "projection": f"{group['projection_name']}:{group['projection_version']}",
            "kind": group["error_kind"],
            "type": group["event_type"],
            "group": group["fingerprint"],
            "first": f"{localtime(group['first']):%Y-%m-%d %H:%M:%S}",
            "last": f"{localtime(group['last']):%Y-%m-%d %H:%M:%S}",
        }
        for letters in found
        for group in letters.order_by()
        .values(*by)
        .annotate(letters=Count("pk"), first=Min("occurred_at"), last=Max("occurred_at"))
    ]
    return sorted(lines, key=lambda line: -line["letters"])


def _everything(letter: DeadLetter) -> dict[str, Any]:
    return {field.name: getattr(letter, field.name) for field in letter._meta.concrete_fields}


def _aligned(lines: list[dict[str, Any]], width: int | None = None) -> str:
    """Return a table of plain text: headings and one line per row, cut to `width` where that is given."""
    headings = list(lines[0])
    rows = [headings, *([str(line[name]) for name in headings] for line in lines)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(headings))]
    table = ["  ".join(text.ljust(most) for text, most in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(line if width is None or len(line) <= width else f"{line[: width - 1]}…" for line in table)
