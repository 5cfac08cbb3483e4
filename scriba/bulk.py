"""Wishing the same of many dead letters: a statement per some hundred of them, each committed by itself.

So ten thousand letters take a moment, and an interruption leaves whole chunks behind: what is wished is carried out,
what is not is found again. What always holds: a letter that is resolved, waits for another wish, would be applied out
of order, or is parked behind one that is not resolved is left alone, whoever else clicks at the same time.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final, NamedTuple

from django.db import connections, transaction
from django.db.models import Count, Exists, OuterRef, Q, Subquery
from django.db.models.functions import Now

from scriba.audit import record
from scriba.models import Audit, DeadLetter, Position
from scriba.protocols import Identity

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from django.db.models import QuerySet

__all__ = ["Wished", "holders", "waiting_behind", "wish_all"]

AT_ONCE: Final = 500  #: letters in one statement
UNRESOLVED: Final = (DeadLetter.Status.OPEN, DeadLetter.Status.PARKED)


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
    notes: dict[Identity, int] = {}
    for start in range(0, len(meant), AT_ONCE):
        chunk = meant[start : start + AT_ONCE]
        with transaction.atomic(using=alias):
            wished = _wish(chunk, wish, by, alias, allow_out_of_order=allow_out_of_order)
            _note(wished, wish, by, alias, notes)
        left = [pk for pk in chunk if pk not in wished]
        behind = set(_parked_behind(DeadLetter.objects.using(alias).filter(pk__in=left))) if wish == "replay" else set()
        yield Wished(
            [pk for pk in chunk if pk in wished],
            [pk for pk in left if pk in behind],
            [pk for pk in left if pk not in behind],
        )


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


def _note(wished: dict[int, Identity], wish: str, by: str, alias: str, notes: dict[Identity, int]) -> None:
    """Tell the owners, and count the chunk in one entry of the records per projection."""
    known = Audit.objects.using(alias)
    with connections[alias].cursor() as cursor:
        for identity, number in Counter(wished.values()).items():
            cursor.execute("SELECT pg_notify('scriba_wish', %s)", [str(identity)])
            before, entry = notes.get(identity, 0), _latest(known, identity, wish, by) if identity in notes else None
            notes[identity] = before + number
            if entry is None:
                record(cursor, identity, wish, by=by, detail=f"{number} letters")
            else:
                known.filter(pk=entry).update(detail=f"{notes[identity]} letters")


def _latest(known: QuerySet[Audit], identity: Identity, wish: str, by: str) -> int | None:
    ours = known.filter(projection_name=identity.name, projection_version=identity.version, action=wish, actor=by)
    return ours.filter(detail__endswith=" letters").order_by("-id").values_list("pk", flat=True).first()


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
