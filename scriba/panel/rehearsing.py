"""A dry run in the admin: which letters would pass now, which rows that would change, and why the others would not.

What always holds: nothing is left behind (that is ``scriba/rehearsal.py``); a dry run is a POST with a token by somebody
who may resolve letters, because it calls handlers; it uses connections of its own, whatever transaction the request is
in (``ATOMIC_REQUESTS``); it ends soon, and says how many letters it has not tried. Values of rows are shown to those
who may look at the rows' model, names of fields to everybody else.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from datetime import date, datetime
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from django.apps import apps
from django.contrib import admin
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.db import connections
from django.template.response import TemplateResponse
from django.utils.timezone import is_aware, localtime

from scriba.exceptions import ScribaError
from scriba.info import alias_of
from scriba.protocols import Identity
from scriba.registry import find
from scriba.rehearsal import rehearse

if TYPE_CHECKING:
    from django.db.models import QuerySet
    from django.http import HttpRequest, HttpResponse

    from scriba.models import DeadLetter
    from scriba.rehearsal import Change, Rehearsal

__all__ = ["Trial", "dry_run", "rehearse_selected", "try_all"]

MOST_LETTERS: Final = 200  #: in one request; the command tries any number
LONGEST_S: Final = 10.0  #: after that no other key is begun: a web server ends requests that take long
MOST_SHOWN: Final = 50  #: letters with their rows; the others are in the numbers
LONGEST_VALUE: Final = 200  #: characters
MOST_REASONS: Final = 10

#: Each outcome: its number's label, the words beside a letter, and the tone of both.
OUTCOMES: Final = {
    "passes": ("would pass", "would pass", "good"),
    "skips": ("would be skipped", "would be skipped by the handler", "good"),
    "fails": ("would fail", "would fail", "bad"),
    "waits": ("would wait", "would wait", "rest"),
    "refused": ("would be refused", "would be refused", "rest"),
    "busy": ("not tried", "could not be tried just now", "rest"),
}


@dataclass(slots=True)
class Trial:
    """What came of one dry run: the letters tried, what stood in the way of whole projections, how many are left."""

    tried: list[Rehearsal] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    untried: int = 0


class Value(NamedTuple):
    """One field of a row, before and after, as texts; None where there is no row or nothing may be shown."""

    name: str
    before: str | None
    after: str | None


class Row(NamedTuple):
    """One row that would change."""

    sign: str
    word: str
    model: str
    key: str
    values: Sequence[Value]
    is_hidden: bool


class Tried(NamedTuple):
    """One letter and what would become of it, as the page shows it."""

    letter: DeadLetter
    outcome: str
    words: str
    tone: str
    reason: str
    tables: Sequence[str]
    rows: Sequence[Row]


@admin.action(description="Dry run of selected dead letters: which would pass now?", permissions=["resolve"])
def rehearse_selected(model_admin: Any, request: HttpRequest, letters: QuerySet[DeadLetter]) -> HttpResponse:
    """Try them, and show the result; nothing is changed."""
    again = [("action", "rehearse_selected"), ("select_across", request.POST.get("select_across", "0"))]
    again += [(ACTION_CHECKBOX_NAME, pk) for pk in request.POST.getlist(ACTION_CHECKBOX_NAME)]
    return dry_run(model_admin, request, letters, again)


def dry_run(
    model_admin: Any, request: HttpRequest, letters: QuerySet[DeadLetter], again: Sequence[tuple[str, str]]
) -> HttpResponse:
    """Try `letters` and return the page of results; `again` are the fields that ask for the same once more."""
    trial = try_all(letters, allow_out_of_order="allow_out_of_order" in request.POST)
    passing = [one.letter.pk for one in trial.tried if one.would_pass]
    counted = Counter(one.outcome for one in trial.tried)
    total = len(trial.tried)
    context = {
        **model_admin.admin_site.each_context(request),
        "title": f"Dry run: {len(passing):,} of {total:,} would pass" if total else "Dry run: nothing could be tried",
        "opts": model_admin.model._meta,
        "media": model_admin.media,
        "outcomes": [(label, counted[name], tone) for name, (label, _, tone) in OUTCOMES.items() if counted[name]],
        "reasons": _reasons(trial.tried),
        "shown": [_shown(one, request.user) for one in trial.tried[:MOST_SHOWN]],
        "not_shown": max(0, total - MOST_SHOWN),
        "problems": trial.problems,
        "untried": trial.untried,
        "passing": passing,
        "again": again,
        "was_refused": counted["refused"] or "allow_out_of_order" in request.POST,
        "allow_out_of_order": "allow_out_of_order" in request.POST,
        "database": request.GET.get("database", ""),
    }
    request.current_app = model_admin.admin_site.name
    return TemplateResponse(request, "scriba/rehearsal.html", context)


# --- trying -------------------------------------------------------------------------------------------------------


def try_all(letters: QuerySet[DeadLetter], *, allow_out_of_order: bool = False) -> Trial:
    """Rehearse `letters`, at most 200 of them and for about ten seconds, on connections of their own."""
    ordered = letters.order_by("projection_name", "projection_version", "partition", "stream_id", "position")
    found = list(ordered.defer("event_data", "event_metadata", "error_stacktrace")[:MOST_LETTERS])
    more = letters.count() - len(found)
    with ThreadPoolExecutor(1, "scriba dry run") as thread:
        trial = thread.submit(_try, found, letters.db, allow_out_of_order=allow_out_of_order).result()
    trial.untried += max(0, more)
    return trial


def _try(letters: Iterable[DeadLetter], alias: str, *, allow_out_of_order: bool) -> Trial:
    trial, deadline = Trial(), time.monotonic() + LONGEST_S
    try:
        for identity, group in itertools.groupby(letters, key=_identity):
            of_one = list(group)
            if time.monotonic() > deadline:
                trial.untried += len(of_one)
                continue
            try:
                _require_here(identity, alias)
                trial.untried += _rehearse(of_one, trial.tried, deadline, allow_out_of_order=allow_out_of_order)
            except ScribaError as error:
                trial.problems.append(f"{identity} cannot be tried ({len(of_one):,} of the letters): {error}")
    finally:
        connections.close_all()
    return trial


def _rehearse(
    letters: Sequence[DeadLetter], tried: list[Rehearsal], deadline: float, *, allow_out_of_order: bool
) -> int:
    """Rehearse the letters of one projection; return how many were left out when the time was over."""
    done = 0
    with closing(rehearse(letters, allow_out_of_order=allow_out_of_order)) as rehearsals:
        for one in rehearsals:
            tried.append(one)
            done += 1
            if time.monotonic() > deadline:
                break
    return len(letters) - done


def _identity(letter: DeadLetter) -> Identity:
    return Identity(letter.projection_name, letter.projection_version)


def _require_here(identity: Identity, alias: str) -> None:
    """An orphan of one database may have the name of a projection of another: that one is not meant."""
    if alias_of(find(identity)) != alias:
        msg = f"{identity} does not write to the database {alias!r}: its letters there belong to an orphan."
        raise ScribaError(msg)


# --- showing ------------------------------------------------------------------------------------------------------


def _reasons(tried: Iterable[Rehearsal]) -> list[tuple[int, str]]:
    """Return why letters would not pass, the commonest reason first."""
    counted = Counter(_reason(one).split(" DETAIL: ")[0] for one in tried if not one.would_pass)
    return [(number, reason) for reason, number in counted.most_common(MOST_REASONS)]


def _reason(one: Rehearsal) -> str:
    return _short(f"{one.error_kind}: {one.error}" if one.error_kind else one.error, 2 * LONGEST_VALUE)


def _shown(one: Rehearsal, user: Any) -> Tried:
    _, words, tone = OUTCOMES[one.outcome]
    tables = [
        f"{table} " + " ".join(f"{sign}{number:,}" for sign, number in zip("+~\N{MINUS SIGN}", numbers, strict=True) if number)
        for table, numbers in one.rows.items()
    ]  # fmt: skip
    reason = "" if one.would_pass else _reason(one)
    return Tried(one.letter, one.outcome, words, tone, reason, tables, [_row(change, user) for change in one.changes])


def _row(change: Change, user: Any) -> Row:
    model = apps.get_model(change.model)
    may_look = any(
        user.has_perm(f"{model._meta.app_label}.{act}_{model._meta.model_name}") for act in ("view", "change")
    )
    sign, word = (
        ("+", "new")
        if change.before is None
        else ("\N{MINUS SIGN}", "deleted")
        if change.after is None
        else ("~", "changed")
    )
    before, after = change.before or {}, change.after or {}
    names = [name for name in (after or before) if not (before and after) or before[name] != after[name]]
    values = [
        Value(name, _value(before[name]) if before and may_look else None, _value(after[name]) if after and may_look else None)
        for name in names
    ]  # fmt: skip
    key = "" if change.key is None or not may_look else _value(change.key)
    return Row(sign, word, model._meta.label, key, values, not may_look)


def _value(value: Any) -> str:
    """Return a value for people: texts as they are, nothing as a dash, times in the zone that the admin shows."""
    if isinstance(value, datetime):
        return f"{localtime(value) if is_aware(value) else value:%Y-%m-%d %H:%M:%S}"
    if isinstance(value, str):
        return _short(value, LONGEST_VALUE) or '""'
    return "NULL" if value is None else str(value) if isinstance(value, date) else _short(str(value), LONGEST_VALUE)


def _short(text: str, longest: int) -> str:
    line = " ".join(text.split())
    return line if len(line) <= longest else f"{line[:longest]}…"
