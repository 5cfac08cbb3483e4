"""Wishing the same of many dead letters, and purging old ones: a statement per some hundred, each committed by itself.

So ten thousand letters take a moment, and an interruption leaves whole chunks behind: what is wished is carried out,
what is not is found again. What always holds: a letter that is resolved, waits for another wish, would be applied out
of order, or is parked behind one that is not resolved is left alone, whoever else clicks at the same time; and only
what is resolved at the moment of its deletion is purged, each letter by one of those who purge at once.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from django.db import connections, transaction
from django.db.models import Count, Exists, OuterRef, Q, Subquery
from django.db.models.functions import Now

from scriba.audit import record
from scriba.models import Audit, DeadLetter, Position
from scriba.protocols import Identity

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from datetime import datetime

    from django.db.models import QuerySet

__all__ = ["RESOLVED", "UNRESOLVED", "Wished", "holders", "purge", "waiting_behind", "wish_all"]

AT_ONCE: Final = 500  #: letters in one statement
PURGED_AT_ONCE: Final = 2_000
UNRESOLVED: Final = (DeadLetter.Status.OPEN, DeadLetter.Status.PARKED)
RESOLVED: Final = (DeadLetter.Status.REPLAYED, DeadLetter.Status.DISCARDED)


#: The entry in the records of each projection that was written first, and what it counts by now.
_Notes: TypeAlias = dict[Identity, tuple[int, int]]


class Wished(NamedTuple):
    """What became of one chunk: the ids that are wished now, those that wait for another one, those refused."""

    wished: Sequence[int] = ()
    behind: Sequence[int] = ()  #: parked: the replay of the letter before them releases them
    refused: Sequence[int] = ()


def wish_all(
    letters: QuerySet[DeadLetter], wish: str, *, by: str = "", allow_out_of_order: bool = False
) -> Iterator[Wished]:
    """Wish `wish` (``replay`` or ``discard``) of all `letters`, in their order; yield what became of each chunk.

    Which letters are meant is decided once, at the beginning. Nothing happens before the first ``next()``.
    """
    alias = letters.db
    meant = list(letters.values_list("pk", flat=True))
    notes: _Notes = {}
    for start in range(0, len(meant), AT_ONCE):
        chunk = meant[start : start + AT_ONCE]
        with transaction.atomic(using=alias):
            wished = _wish(chunk, wish, by, alias, allow_out_of_order=allow_out_of_order)
            _tell(wished, alias)
            _note(Counter(wished.values()), wish, by, alias, notes)
        left = [pk for pk in chunk if pk not in wished]
        behind = set(_parked_behind(DeadLetter.objects.using(alias).filter(pk__in=left))) if wish == "replay" else set()
        yield Wished(
            [pk for pk in chunk if pk in wished],
            [pk for pk in left if pk in behind],
            [pk for pk in left if pk not in behind],
        )


def purge(letters: QuerySet[DeadLetter], *, before: datetime, by: str = "") -> Iterator[int]:
    """Delete those of `letters` that were resolved before `before`; yield after each chunk how many it had.

    A letter that has failed again meanwhile is open, and stays. Nothing happens before the first ``next()``.
    """
    alias = letters.db
    old = letters.order_by("pk").filter(status__in=RESOLVED, resolved_at__lt=before)
    notes: _Notes = {}
    while True:
        with transaction.atomic(using=alias):
            locked = old.select_for_update(skip_locked=True)[:PURGED_AT_ONCE]
            found = {
                pk: Identity(name, version)
                for pk, name, version in locked.values_list("pk", "projection_name", "projection_version")
            }
            if not found:
                return
            DeadLetter.objects.using(alias).filter(pk__in=found).delete()
            _note(Counter(found.values()), "purge", by, alias, notes)
        yield len(found)


def holders(letters: Sequence[DeadLetter]) -> dict[int, int]:
    """Return, for each parked one of `letters` (of one database), the id of the letter at the head of its key."""
    parked = [letter for letter in letters if letter.status == DeadLetter.Status.PARKED]
    if not parked:
        return {}
    found = DeadLetter.objects.using(parked[0]._state.db).filter(pk__in=[letter.pk for letter in parked])
    head = _earlier().order_by("position").values("pk")[:1]
    return {pk: at for pk, at in found.annotate(head=head).values_list("pk", "head") if at is not None}


def waiting_behind(letters: Sequence[DeadLetter]) -> dict[int, int]:
    """Return, for each open one of `letters` (of one database), how many parked events wait behind it, if any do."""
    heads = [letter for letter in letters if letter.status == DeadLetter.Status.OPEN]
    if not heads:
        return {}
    where = {name: OuterRef(name) for name in _KEY}
    behind = DeadLetter.objects.filter(**where, status=DeadLetter.Status.PARKED, position__gt=OuterRef("position"))
    number = behind.order_by().values("stream_id").annotate(number=Count("pk")).values("number")
    found = DeadLetter.objects.using(heads[0]._state.db).filter(pk__in=[letter.pk for letter in heads])
    return {pk: many for pk, many in found.annotate(many=Subquery(number)).values_list("pk", "many") if many}


# --- one chunk ----------------------------------------------------------------------------------------------------


def _wish(chunk: Sequence[int], wish: str, by: str, alias: str, *, allow_out_of_order: bool) -> dict[int, Identity]:
    """Write the wish on those of `chunk` that may have it; return them with their projections."""
    free = DeadLetter.objects.using(alias).filter(pk__in=chunk, status__in=UNRESOLVED, wish="")
    if wish == "replay":
        free = free.exclude(_BEHIND)
        if not allow_out_of_order:
            free = free.exclude(_is_late())
    rows = free.select_for_update().order_by("pk").values_list("pk", "projection_name", "projection_version")
    found = {pk: Identity(name, version) for pk, name, version in rows}
    # Locked now; one that was wished or resolved while the lock was waited for is not among them any more.
    DeadLetter.objects.using(alias).filter(pk__in=found).update(
        wish=wish, wish_by=by, wished_at=Now(), allow_out_of_order=allow_out_of_order
    )
    return found


def _tell(wished: dict[int, Identity], alias: str) -> None:
    """Wake the owners at the commit."""
    with connections[alias].cursor() as cursor:
        for identity in set(wished.values()):
            cursor.execute("SELECT pg_notify('scriba_wish', %s)", [str(identity)])


def _note(numbers: Counter[Identity], action: str, by: str, alias: str, notes: _Notes) -> None:
    """Count the chunk in one entry of the records per projection."""
    with connections[alias].cursor() as cursor:
        for identity, number in numbers.items():
            entry, before = notes.get(identity, (None, 0))
            if entry is None:
                record(cursor, identity, action, by=by, detail=_counted(number))
                cursor.execute("SELECT currval(pg_get_serial_sequence('scriba_audit', 'id'))")
                (entry,) = cursor.fetchone()
            else:
                Audit.objects.using(alias).filter(pk=entry).update(detail=_counted(before + number))
            notes[identity] = (entry, before + number)


def _counted(number: int) -> str:
    return f"{number:,} letter{'' if number == 1 else 's'}"


def _is_late() -> Exists:
    return Exists(
        Position.objects.filter(
            projection_name=OuterRef("projection_name"),
            projection_version=OuterRef("projection_version"),
            stream_id=OuterRef("stream_id"),
            applied_position__gt=OuterRef("position"),
        )
    )


def _earlier() -> QuerySet[DeadLetter]:
    where = {name: OuterRef(name) for name in _KEY}
    return DeadLetter.objects.filter(**where, position__lt=OuterRef("position"), status__in=UNRESOLVED)


def _parked_behind(letters: QuerySet[DeadLetter]) -> QuerySet[DeadLetter, int]:
    return letters.filter(_BEHIND).values_list("pk", flat=True)


_KEY: Final = ("projection_name", "projection_version", "partition", "stream_id")
_BEHIND: Final = Q(status=DeadLetter.Status.PARKED) & Q(Exists(_earlier()))
