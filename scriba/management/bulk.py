"""Replays and discards of many dead letters at a terminal: progress, an end at any moment, and a summary always."""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from django.core.management.base import CommandError

from scriba import discard, info, replay
from scriba.bulk import UNRESOLVED, wish_all
from scriba.exceptions import ScribaError, UnknownProjection
from scriba.management.base import FAILED, ScribaCommand, operator
from scriba.models import DeadLetter
from scriba.protocols import Status
from scriba.rehearsal import rehearse

if TYPE_CHECKING:
    from collections.abc import Sequence

    from django.db.models import QuerySet

    from scriba.rehearsal import Rehearsal

__all__ = ["BulkWork", "DryRun"]

LOOK_EVERY_S: Final = 0.2
SPEAK_EVERY_S: Final = 5.0  #: a line of progress elsewhere than on a terminal
MOST_COMPLAINTS: Final = 20  #: a screen
SHOWN: Final = 50  #: letters of a dry run that are described one by one
ONE_LINE: Final = 200


class _Progress:
    """Says how far it is: in place on a terminal, now and then a line elsewhere; nothing when it is over at once."""

    def __init__(self, command: ScribaCommand, total: int) -> None:
        self._out: Any = command.stderr
        self._total = total
        self._spoke_at = time.monotonic()
        self._is_open = False

    def __call__(self, done: int, what: str) -> None:
        now = time.monotonic()
        in_place = self._out.isatty()
        if now - self._spoke_at < (LOOK_EVERY_S if in_place else SPEAK_EVERY_S):
            return
        self._spoke_at = now
        line = f"{done:,} of {self._total:,} {what}"
        self._out.write(f"\r{line:<60}" if in_place else line, ending="" if in_place else "\n")
        self._out.flush()
        self._is_open = in_place

    def close(self) -> None:
        if self._is_open:
            self._out.write("\r" + " " * 60 + "\r", ending="")


class BulkWork:
    """Wishes something of letters, then waits for the results. Says what was done, always."""

    def __init__(self, command: ScribaCommand, options: dict[str, Any], total: int) -> None:
        self._command = command
        self._action: str = options["action"]
        self._wait_s: float = options["wait"]
        self._more: dict[str, Any] = {"allow_out_of_order": True} if options.get("allow_out_of_order") else {}
        self._progress = _Progress(command, total)
        self._total = total
        self._waiting: dict[str, set[int]] = {}
        self._names: dict[str, set[tuple[str, int]]] = {}
        self._results: Counter[str] = Counter()
        self._complaints: list[str] = []

    def run(self, found: Sequence[QuerySet[DeadLetter]]) -> None:
        try:
            for letters in found:
                self._names[letters.db] = set(
                    letters.order_by().values_list("projection_name", "projection_version").distinct()
                )
                self._wish(letters)
            self._collect()
        except KeyboardInterrupt:
            untouched = self._total - self._left() - sum(self._results.values())
            if untouched:
                self._results["not asked for"] = untouched
            self._complaints.append("Interrupted. What is wished is carried out all the same; it is safe to repeat.")
        finally:
            self._progress.close()
        self._summarise()

    def _wish(self, letters: QuerySet[DeadLetter]) -> None:
        for chunk in wish_all(letters, self._action, by=operator(), **self._more):
            self._waiting.setdefault(letters.db, set()).update(chunk.wished)
            if chunk.behind:
                self._results["parked behind another"] += len(chunk.behind)
            for pk in chunk.refused:
                self._refused(letters.db, pk)
            self._progress(self._left(), f"wished to be {_PAST[self._action]}")

    def _refused(self, alias: str, pk: int) -> None:
        """Ask for this one alone: the answer says why it was left out."""
        self._results["refused"] += 1
        if len(self._complaints) >= MOST_COMPLAINTS:
            self._complaints.append("")
            return
        try:
            act = replay if self._action == "replay" else discard
            act(DeadLetter.objects.using(alias).get(pk=pk), by=operator(), **self._more)
        except (ScribaError, DeadLetter.DoesNotExist) as error:
            self._complaints.append(str(error))
        else:  # what stood in its way is gone
            self._results["refused"] -= 1
            self._waiting.setdefault(alias, set()).add(pk)

    def _collect(self) -> None:
        """Wait while somebody is there to carry the wishes out, at most for the time that was allowed."""
        deadline = time.monotonic() + self._wait_s
        while self._left() and time.monotonic() < deadline and self._is_served():
            self._note_ended()
            self._progress(self._total - self._left(), "settled")
            if self._left():
                threading.Event().wait(LOOK_EVERY_S)

    def _left(self) -> int:
        return sum(map(len, self._waiting.values()))

    def _is_served(self) -> bool:
        return any(_runs(name) for names in self._names.values() for name in names)

    def _note_ended(self) -> None:
        """Ask for all results at once: ten thousand letters are one statement, not ten thousand."""
        for alias, waiting in self._waiting.items():
            ended = DeadLetter.objects.using(alias).filter(wish="", pk__in=waiting).defer(*_LARGE)
            for letter in ended:
                self._count(letter)
                waiting.discard(letter.pk)

    def _count(self, letter: DeadLetter) -> None:
        if letter.status in UNRESOLVED:
            self._results["failed again"] += 1
            self._complaints.append(f"letter {letter.pk}, {letter}: {letter.error_message} ({letter.note})")
        else:
            self._results[letter.status] += 1

    def _summarise(self) -> None:
        if self._left():
            self._results["still wished"] += self._left()
            if not self._is_served():
                self._complaints.append(
                    "No process runs the projection now: the wishes are carried out by the next one."
                )
        shown = {result: number for result, number in self._results.items() if number}
        self._command.stdout.write(
            ", ".join(f"{number:,} {result}" for result, number in shown.items()) or "nothing done"
        )
        for complaint in self._complaints[:MOST_COMPLAINTS]:
            self._command.stderr.write(complaint)
        if len(self._complaints) > MOST_COMPLAINTS:
            self._command.stderr.write(f"… and {len(self._complaints) - MOST_COMPLAINTS:,} more")
        if self._results["refused"] or self._results["failed again"]:
            msg = "Not every letter is resolved."
            raise CommandError(msg, returncode=FAILED)


class DryRun:
    """Says which letters would pass now, and what they would change; leaves nothing behind."""

    def __init__(self, command: ScribaCommand, total: int, *, allow_out_of_order: bool) -> None:
        self._command = command
        self._allow_out_of_order = allow_out_of_order
        self._progress = _Progress(command, total)
        self._total = total
        self._outcomes: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()

    def run(self, found: Sequence[QuerySet[DeadLetter]]) -> None:
        try:
            for letters in found:
                for one in rehearse(letters.defer(*_LARGE), allow_out_of_order=self._allow_out_of_order):
                    self._note(one)
        except KeyboardInterrupt:
            self._command.stderr.write(f"Interrupted: {self._total - self._outcomes.total():,} letters were not tried.")
        finally:
            self._progress.close()
        self._summarise()

    def _note(self, one: Rehearsal) -> None:
        if self._outcomes.total() < SHOWN:
            for line in _described(one):
                self._command.stdout.write(line)
        self._outcomes[one.outcome] += 1
        if not one.would_pass:
            self._failures[f"{one.error_kind}: {_short(one.error)}" if one.error_kind else one.error] += 1
        self._progress(self._outcomes.total(), "tried")

    def _summarise(self) -> None:
        tried = self._outcomes.total()
        if tried > SHOWN:
            self._command.stdout.write(f"… and {tried - SHOWN:,} more")
        passing = self._outcomes["passes"] + self._outcomes["skips"]
        self._command.stdout.write(f"{passing:,} of {tried:,} would pass. Nothing was changed.")
        for reason, number in self._failures.most_common(MOST_COMPLAINTS):
            self._command.stderr.write(f"{number:,} letters: {reason}")
        if passing < tried:
            msg = "Not every letter would pass."
            raise CommandError(msg, returncode=FAILED)


def _runs(name: tuple[str, int]) -> bool:
    try:
        return info(name).status is not Status.NOT_RUNNING
    except UnknownProjection:  # not declared in this process; whoever runs it carries the wishes out
        return False


def _described(one: Rehearsal) -> list[str]:
    letter = one.letter
    head = f"letter {letter.pk}, {letter.projection_name}:{letter.projection_version} at {letter.position}: "
    if not one.would_pass:
        reason = f"{one.error_kind}: {one.error}" if one.error_kind else one.error
        return [head + f"{_WOULD[one.outcome]}: {_short(reason)}"]
    counts = ", ".join(
        f"{table} " + " ".join(f"{sign}{number}" for sign, number in zip("+~-", numbers, strict=True) if number)
        for table, numbers in one.rows.items()
    )
    return [
        head + _WOULD[one.outcome] + (f" ({counts})" if counts else ""),
        *(f"    {_short(str(change))}" for change in one.changes),
    ]


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= ONE_LINE else f"{line[:ONE_LINE]}…"


_LARGE: Final = ("event_data", "event_metadata", "error_stacktrace")
_PAST: Final = {"replay": "replayed", "discard": "discarded"}
_WOULD: Final = {
    "passes": "would pass",
    "skips": "would be skipped by the handler",
    "fails": "would fail",
    "waits": "would wait",
    "refused": "would be refused",
    "busy": "could not be tried just now",
}
