"""What operators and programs ask of dead letters: look, replay, discard, one or very many of them.

A replay or a discard is a **wish** on the letter's row: the process that owns the projection carries it out, in the
key's own lane. What always holds: the state check and the wish are one guarded UPDATE, so of two operators one succeeds;
what is refused here is refused by the owner too, which decides; and who wished what is recorded in the same transaction.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from django.db import connections, transaction

from scriba.audit import record
from scriba.exceptions import EventDeadLettered, InvalidState, WaitTimeout
from scriba.info import alias_of
from scriba.protocols import Identity
from scriba.registry import find
from scriba.waiting import is_so_within, refuse_to_wait_in_transaction

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta

    from django.db.models import Model, QuerySet

    from scriba.models import DeadLetter

__all__ = ["BulkResult", "dead_letters", "discard", "discard_all", "purge_resolved", "replay", "replay_all"]


class BulkResult(NamedTuple):
    """What became of many letters, by their ids. What is wished is carried out; the others are as they were."""

    wished: list[int]
    behind: list[int]  #: parked: the replay of the letter that they wait for releases them
    refused: list[int]  #: resolved, waiting for another wish, or a later event of the key is applied


def dead_letters(p: object, **filters: Any) -> QuerySet[DeadLetter]:
    """Return the dead letters of `p` as a queryset, ordered by position; `filters` are field lookups.

    ``dead_letters(orders, status="open", error_kind__startswith="commit:")``. Raises
    :class:`~scriba.exceptions.UnknownProjection`.
    """
    from scriba.models import DeadLetter  # noqa: PLC0415 - needs the app registry

    projection = find(p)
    letters = DeadLetter.objects.using(alias_of(projection)).order_by("partition", "position")
    return letters.filter(projection_name=projection.name, projection_version=projection.version, **filters)


def replay(
    letter: DeadLetter, *, allow_out_of_order: bool = False, by: str = "", wait: bool = False, timeout: float = 10.0
) -> DeadLetter:
    """Wish that the letter's event be handled again; return the letter as it is then.

    The owner's lane does it, between two of its batches, through the same handler. An event whose stream has moved on
    is not applied late unless `allow_out_of_order`. With `wait` it returns when the letter is resolved.

    Raises :class:`~scriba.exceptions.InvalidState` when the letter is resolved, waits for another wish, or would be
    applied out of order; with `wait` :class:`~scriba.exceptions.EventDeadLettered` when the replay failed again, and
    :class:`~scriba.exceptions.WaitTimeout`.
    """
    if not allow_out_of_order:
        _refuse_late(letter)
    _refuse_parked(letter)
    return _resolve(letter, "replay", by, timeout if wait else None, allow_out_of_order=allow_out_of_order)


def discard(letter: DeadLetter, *, by: str = "", wait: bool = False, timeout: float = 10.0) -> DeadLetter:
    """Wish that the letter be given up for good; the events parked behind it are released. See :func:`replay`."""
    return _resolve(letter, "discard", by, timeout if wait else None)


def replay_all(
    letters: QuerySet[DeadLetter],
    *,
    allow_out_of_order: bool = False,
    by: str = "",
    on_progress: Callable[[BulkResult], None] | None = None,
) -> BulkResult:
    """Wish that the events of all `letters` (a queryset, like that of :func:`dead_letters`) be handled again.

    Some hundred letters at a time, each of these chunks committed by itself: it takes a moment for ten thousand, and
    may be interrupted and repeated. Nothing is refused with an exception; the result says what became of each letter.
    `on_progress` is called with the result so far after each chunk. See :func:`replay`.
    """
    return _wish_all(letters, "replay", by, on_progress, allow_out_of_order=allow_out_of_order)


def discard_all(
    letters: QuerySet[DeadLetter], *, by: str = "", on_progress: Callable[[BulkResult], None] | None = None
) -> BulkResult:
    """Wish that all `letters` be given up for good. See :func:`replay_all`."""
    return _wish_all(letters, "discard", by, on_progress)


def purge_resolved(letters: QuerySet[DeadLetter], *, older_than: timedelta, by: str = "") -> int:
    """Delete those of `letters` that were replayed or discarded longer ago than `older_than`; return how many.

    Some thousand at a time, each of these chunks committed by itself. Open and parked ones stay, whatever their age.
    """
    from scriba.bulk import purge  # noqa: PLC0415 - needs the app registry

    return sum(purge(letters, before=datetime.now(UTC) - older_than, by=by))


def _wish_all(
    letters: QuerySet[DeadLetter],
    wish: str,
    by: str,
    on_progress: Callable[[BulkResult], None] | None,
    *,
    allow_out_of_order: bool = False,
) -> BulkResult:
    from scriba.bulk import wish_all  # noqa: PLC0415 - needs the app registry

    result = BulkResult([], [], [])
    for chunk in wish_all(letters, wish, by=by, allow_out_of_order=allow_out_of_order):
        for ids, more in zip(result, chunk, strict=True):
            ids.extend(more)
        if on_progress is not None:
            on_progress(result)
    return result


# --- one letter -----------------------------------------------------------------------------------------------------


def _refuse_late(letter: DeadLetter) -> None:
    """Say at once what the owner, which decides, would say later."""
    from scriba.models import Position  # noqa: PLC0415 - needs the app registry

    later = Position.objects.using(_alias(letter)).filter(
        projection_name=letter.projection_name,
        projection_version=letter.projection_version,
        stream_id=letter.stream_id,
        applied_position__gt=letter.position,
    )
    applied = later.values_list("applied_position", flat=True).first()
    if applied is not None:
        msg = (
            f"{letter} cannot be replayed in order: {letter.stream_id!r} has moved on, its event at position {applied} is "
            "applied. If the handler does not mind, replay with allow_out_of_order; else discard it."
        )
        raise InvalidState("out of order", msg)


def _refuse_parked(letter: DeadLetter) -> None:
    """A parked event comes after what it waits for; the replay of that one releases it."""
    if letter.status != letter.Status.PARKED:
        return
    earlier = (
        type(letter)
        .objects.using(_alias(letter))
        .filter(
            projection_name=letter.projection_name,
            projection_version=letter.projection_version,
            partition=letter.partition,
            stream_id=letter.stream_id,
            position__lt=letter.position,
            status__in=(letter.Status.OPEN, letter.Status.PARKED),
        )
    )
    head = earlier.order_by("position").values_list("pk", flat=True).first()
    if head is not None:
        msg = (
            f"{letter} is parked behind letter {head}: replay (or discard) that one, and this one is released in order."
        )
        raise InvalidState("parked", msg)


def _resolve(
    letter: DeadLetter, wish: str, by: str, wait_s: float | None, *, allow_out_of_order: bool = False
) -> DeadLetter:
    from django.db.models.functions import Now  # noqa: PLC0415 - models need settings

    alias = _alias(letter)
    if wait_s is not None:
        refuse_to_wait_in_transaction(alias)
    letters = type(letter).objects.using(alias)
    unresolved = letters.filter(pk=letter.pk, status__in=(letter.Status.OPEN, letter.Status.PARKED), wish="")
    with transaction.atomic(using=alias):
        wished = unresolved.update(wish=wish, wish_by=by, wished_at=Now(), allow_out_of_order=allow_out_of_order)
        if wished:
            _note(letter, wish, by, alias)
    letter.refresh_from_db(using=alias)
    if not wished:
        state = f"waiting for its {letter.wish}" if letter.wish else letter.status
        msg = f"cannot {wish} {letter}: it is {state}; possible while it is open or parked and nothing is wished of it."
        raise InvalidState(state, msg)
    if wait_s is not None:
        _wait_until_resolved(letter, wish, alias, wait_s)
    return letter


def _note(letter: DeadLetter, wish: str, by: str, alias: str) -> None:
    """Write who wished it into the records; the owner is told by the same commit."""
    identity = Identity(letter.projection_name, letter.projection_version)
    with connections[alias].cursor() as cursor:
        detail = f"letter {letter.pk}, position {letter.position}: {letter.error_kind}"
        record(cursor, identity, wish, by=by, detail=detail)
        cursor.execute("SELECT pg_notify('scriba_wish', %s)", [str(identity)])


def _wait_until_resolved(letter: DeadLetter, wish: str, alias: str, timeout: float) -> None:
    def is_carried_out() -> bool:
        letter.refresh_from_db(using=alias)
        return not letter.wish

    if not is_so_within(is_carried_out, timeout):
        msg = f"nobody has carried out the {wish} of {letter} within {timeout:g} s. The wish stays."
        raise WaitTimeout(msg, position=letter.position)
    if letter.status not in {letter.Status.REPLAYED, letter.Status.DISCARDED}:
        msg = f"the {wish} of {letter} came to nothing: {letter.note or letter.error_message}"
        raise EventDeadLettered(msg, letter_id=letter.pk)


def _alias(row: Model) -> str:
    return row._state.db or "default"
