"""Which dead letters a command means: by id, or by projection, status, kind, type, stream and age."""

from __future__ import annotations

import argparse
import re
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from django.core.management.base import CommandError
from django.db.models import Q
from django.utils.dateparse import parse_date, parse_datetime
from django.utils.timezone import get_current_timezone, is_naive, make_aware

from scriba.info import alias_of
from scriba.management.base import MISUSED, select_versions
from scriba.models import DeadLetter
from scriba.registry import all_projections

if TYPE_CHECKING:
    from collections.abc import Sequence

    from django.core.management.base import CommandParser
    from django.db.models import QuerySet

__all__ = ["UNRESOLVED", "add_filters", "age", "chosen", "is_narrowed", "moment"]

UNRESOLVED: Final = (DeadLetter.Status.OPEN, DeadLetter.Status.PARKED)
_SPAN: Final = re.compile(r"(\d+)\s*(s|min|h|d|w)")
_UNITS: Final = {"s": "seconds", "min": "minutes", "h": "hours", "d": "days", "w": "weeks"}


def add_filters(parser: CommandParser, *, status: bool) -> None:
    """Add the options that :func:`chosen` reads."""
    parser.add_argument(
        "--projection", action="append", default=[], metavar="NAME[:VERSION]", help="of these projections"
    )
    if status:
        parser.add_argument(
            "--status", action="append", choices=DeadLetter.Status.values, help="open and parked when left out"
        )
    parser.add_argument("--kind", help="error kind, exactly or (with a * at the end) its beginning: 'commit:23505*'")
    parser.add_argument("--type", dest="event_type", help="event type")
    parser.add_argument("--stream", help="stream (ordering key)")
    parser.add_argument("--event-id", help="the source's event id")
    parser.add_argument(
        "--group", metavar="FINGERPRINT", help="one group of equal failures, as 'list --groups' shows it"
    )
    parser.add_argument(
        "--since", type=moment, metavar="WHEN", help="dead-lettered since: a span (2h, 3d) or a date and time"
    )
    parser.add_argument(
        "--database", metavar="ALIAS", help="only in this database; all that projections write to otherwise"
    )


def chosen(
    options: dict[str, Any], ids: Sequence[int] = (), *, status: Sequence[str] = UNRESOLVED
) -> list[QuerySet[DeadLetter]]:
    """Return one queryset per database, in the order of positions, for those databases that have a matching letter.

    Raises CommandError (2) for an id that nothing matches or that two databases have.
    """
    wanted = _condition(options, options.get("status") or status)
    if ids:
        wanted &= Q(pk__in=ids)
    found = [
        DeadLetter.objects.using(alias)
        .filter(wanted)
        .order_by("projection_name", "projection_version", "partition", "position")
        for alias in _aliases(options["database"])
    ]
    if ids:
        _require_each_once(ids, found)
    return [letters for letters in found if letters.exists()]


def is_narrowed(options: dict[str, Any]) -> bool:
    """Say whether any filter was given."""
    return any(options[name] for name in ("projection", "kind", "event_type", "stream", "event_id", "group", "since"))


def age(text: str) -> timedelta:
    """Read a span from the command line: ``45 min``, ``2h``, ``30d``."""
    match = _SPAN.fullmatch(text.strip())
    if match is None:
        msg = f"a span is a number and a unit (s, min, h, d, w), like 30d, not {text!r}"
        raise argparse.ArgumentTypeError(msg)
    return timedelta(**{_UNITS[match[2]]: int(match[1])})


def moment(text: str) -> datetime:
    """Read a moment from the command line: a span back from now, a date, or a date and time."""
    if _SPAN.fullmatch(text.strip()):
        return datetime.now(UTC) - age(text)
    try:
        when = parse_datetime(text) or _midnight(text)
    except ValueError:
        when = None
    if when is None:
        msg = f"a span (2h, 3d), a date (2026-11-30) or a date and time (2026-11-30T18:00) is needed, not {text!r}"
        raise argparse.ArgumentTypeError(msg)
    return make_aware(when, get_current_timezone()) if is_naive(when) else when


def _midnight(text: str) -> datetime | None:
    day = parse_date(text)
    return datetime(day.year, day.month, day.day) if day else None  # noqa: DTZ001 - made aware by the caller


def _condition(options: dict[str, Any], status: Sequence[str]) -> Q:
    wanted = Q(status__in=status)
    if options["projection"]:
        of_these = Q()
        for projection in select_versions(options["projection"]):
            of_these |= Q(projection_name=projection.name, projection_version=projection.version)
        wanted &= of_these
    kind = options["kind"]
    if kind:
        wanted &= Q(error_kind__startswith=kind[:-1]) if kind.endswith("*") else Q(error_kind=kind)
    plain = {
        "event_type": "event_type",
        "stream": "stream_id",
        "event_id": "event_id",
        "group": "fingerprint",
        "since": "occurred_at__gte",
    }
    return wanted & Q(**{lookup: options[name] for name, lookup in plain.items() if options[name]})


def _aliases(only: str | None) -> list[str]:
    aliases = list(dict.fromkeys(map(alias_of, all_projections())))
    if only is None:
        return aliases
    if only not in aliases:
        msg = f"--database {only}: projections write to {', '.join(aliases) or 'no database'}."
        raise CommandError(msg, returncode=MISUSED)
    return [only]


def _require_each_once(ids: Sequence[int], found: Sequence[QuerySet[DeadLetter]]) -> None:
    seen = [pk for letters in found for pk in letters.values_list("pk", flat=True)]
    missing = sorted(set(ids) - set(seen))
    if missing:
        msg = f"No unresolved dead letter has the id {', '.join(map(str, missing))}; 'scriba_dead_letters list' shows them."
        raise CommandError(msg, returncode=MISUSED)
    if len(seen) > len(set(seen)):
        msg = "More than one database has a letter with this id: say which with --database."
        raise CommandError(msg, returncode=MISUSED)
