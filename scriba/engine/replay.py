"""Replays and discards: what an operator wishes of a dead letter, carried out by the key's own lane.

In lane order, under the fence, between two batches: done anywhere else it would race with the live lane, and an event
could be stranded as parked behind no letter, or applied after a later one. The order is kept here, whoever wrote the
wish: a parked event is never applied before the one that it waits for, and none after a later one of its key unless
the wish allows it. A replay never touches the live cursor
nor the lane's counters; the letter's status changes in the transaction of the rows it wrote.

Under ``on_failure="park"`` the end of a letter hands its wish to the first one parked behind it, in one transaction,
and so on in order: a limited number at a time, so that the lane's other keys are not kept waiting. What arrives
meanwhile still queues behind.

An event whose key could not be worked out was dead-lettered under its stream. Once its key is known the letter moves
to it, in the lane that it leaves, which alone knows that nobody is being parked behind it there; the wish moves with
it, and the lane of the key carries it out as for any other letter. So one key is still served by one worker.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from scriba.engine.handling import DecodeFailed, FailReturned, HandlerCall, HandlerExited, free_locals, plain_text
from scriba.engine.lanes import Routed
from scriba.engine.letters import letter_for
from scriba.engine.reader import keyed
from scriba.event import SkipEvent, ordering_key_in, storable_key
from scriba.log_fields import about
from scriba.protocols import CursorMove, Failure, FailureKind, FenceLost, Resolution, WriteFailed
from scriba.results import Fail

if TYPE_CHECKING:
    from scriba.event import Event
    from scriba.protocols import Batch, Lease, Letter, LetterWish, StoredLetter, Subscription, Writer
    from scriba.registry import Projection

__all__ = ["RELEASED_AT_ONCE", "Replayer", "refusal", "rekeyed", "restored"]

logger = logging.getLogger("scriba")

RELEASED_AT_ONCE: Final = 100  #: parked events applied before the lane's other keys get their turn


class Replayer:
    """Carries out wishes on one lane's writer. Used by that lane's thread."""

    def __init__(self, projection: Projection, writer: Writer, lease: Lease) -> None:
        self._projection = projection
        self._writer = writer
        self._lease = lease

    def carry_out(self, wish: LetterWish, subscription: Subscription) -> None:
        """Do what `wish` says, and the same for those parked behind.

        A transient error leaves the wish where it is, for the next look. Raises FenceLost.
        """
        try:
            done = self._discard(wish) if wish.wish == "discard" else self._replay_wished(wish, subscription)
            if done:
                self._release(wish, subscription)
        except FenceLost:
            raise
        except Exception as error:
            if self._failure_of(error)[0].kind is not FailureKind.TRANSIENT:
                raise
            identity = self._projection.identity
            extra = about(identity, position=wish.event_position, letter=wish.letter)
            logger.warning(
                "%s: a %s waits: %s", identity, wish.wish, plain_text(self._failure_of(error)[1]), extra=extra
            )
            free_locals(error)

    # --- one letter ---------------------------------------------------------------------------------------

    def _discard(self, wish: LetterWish) -> bool:
        with self._writer.batch(self._lease.fence) as batch:
            stored = batch.letter(wish.letter)
            if stored is None or stored.key != wish.key:  # it has moved to another key's lane since the wish was read
                return False
            batch.resolve(Resolution(stored.id, "discarded", wish.by))
        return True

    def _replay_wished(self, wish: LetterWish, subscription: Subscription) -> bool:
        event = subscription.read(wish.event_position, wish.partition)
        return self._replay(wish.letter, wish, event, subscription)

    def _replay(self, letter: int, wish: LetterWish, found: Event | None, subscription: Subscription) -> bool:
        """Run one letter's event through the handler; say whether it is out of the way. A failure stays open."""
        try:
            # As a verdict pass: there is one event to blame, and no second pass that would find the cause of a failed read.
            with self._writer.batch(self._lease.fence, verdict=True) as batch:
                stored = batch.letter(letter)
                if stored is None or stored.key != wish.key:  # it has moved since the wish was read
                    return False
                item = rekeyed(self._projection, stored, found) or Routed(restored(stored, subscription), stored.key)
                allowed = wish.allow_out_of_order and letter == wish.letter
                if why := refusal(batch, stored, item.key, allow_out_of_order=allowed):
                    batch.resolve(Resolution(stored.id, _status_refused(stored), wish.by, note=why))
                    return False
                if item.key != stored.key:
                    self._move(batch, stored, item.key, wish)
                    return True
                applied = self._apply(batch, item)
                position = stored.event.position
                move = CursorMove(stored.key, position, position, position) if applied else None
                batch.resolve(Resolution(stored.id, "replayed", wish.by, applied=move))
        except FenceLost:
            raise
        except Exception as error:
            if self._failure_of(error)[0].kind is FailureKind.TRANSIENT:
                raise
            self._record_failure(letter, wish, *self._failure_of(error))
            free_locals(error)
            return False
        return True

    def _move(self, batch: Batch, stored: StoredLetter, key: str, wish: LetterWish) -> None:
        """Let the letter go on waiting under its true key; under ``park`` behind what is unresolved there."""
        status = "parked" if self._projection.on_failure == "park" else stored.status
        batch.resolve(Resolution(stored.id, status, wish.by, key=key))

    def _apply(self, batch: Batch, item: Routed) -> bool:
        call = HandlerCall(self._projection, batch)
        call.item, call.replaying = item, True
        try:
            outcome = batch.attempt(call)
        except SkipEvent:
            return False
        except WriteFailed:
            raise
        except Exception as error:
            raise _HandlerFailed from error
        if outcome:
            batch.add(outcome)
        return outcome is None or bool(outcome)

    def _record_failure(self, letter: int, wish: LetterWish, failure: Failure, cause: BaseException) -> None:
        with self._writer.batch(self._lease.fence) as batch:
            stored = batch.letter(letter)
            if stored is not None:
                failed = self._letter_of(stored, cause, failure)
                batch.resolve(Resolution(stored.id, "open", wish.by, note="the replay failed again", failed=failed))

    def _letter_of(self, stored: StoredLetter, cause: BaseException, failure: Failure) -> Letter:
        kind: str | None = None
        reason: BaseException | Fail = cause
        if isinstance(cause, FailReturned):
            reason = Fail(cause.args[0])
        elif isinstance(cause, DecodeFailed | HandlerExited) and cause.__cause__ is not None:
            reason = cause.__cause__
            kind = f"decode:{type(reason).__qualname__}" if isinstance(cause, DecodeFailed) else None
        elif failure.label.startswith("commit:"):
            kind = failure.label
        return letter_for(stored.event, stored.key, reason, stored.attempts + 1, self._projection.identity, kind=kind)

    # --- those behind it ----------------------------------------------------------------------------------

    def _release(self, wish: LetterWish, subscription: Subscription) -> None:
        """Apply what is parked behind a resolved letter, in order, until one fails or enough is done for now.

        The next one carries the wish already, so what is left is found again at the next look.
        """
        after = wish.event_position
        for _ in range(RELEASED_AT_ONCE):
            parked = self._writer.next_parked(wish.key, wish.partition, after)
            if parked is None or parked.behind is not None:  # one was discarded out of the middle
                return
            event = subscription.read(parked.event.position, wish.partition)
            if not self._replay(parked.id, wish, event, subscription):
                return
            after = parked.event.position

    def _failure_of(self, error: Exception) -> tuple[Failure, BaseException]:
        if isinstance(error, WriteFailed):
            return error.failure, error.__cause__ or error
        if isinstance(error, _HandlerFailed) and error.__cause__ is not None:
            return Failure(FailureKind.INTEGRITY, ""), error.__cause__
        return self._projection.target.classify(error), error


class _HandlerFailed(Exception):  # noqa: N818 - carries its cause out of the batch
    """The handler itself failed, with `__cause__`: no error of the database, whatever its class."""


def restored(stored: StoredLetter, subscription: Subscription) -> Event:
    """Return the letter's event; one whose payload was not stored completely brings a codec that says so."""
    return stored.event if stored.event.codec is not None else subscription.restore(stored.event)


def rekeyed(projection: Projection, stored: StoredLetter, found: Event | None) -> Routed | None:
    """Return the source's event with its key: another than the letter's, if only now it can be worked out.

    Only a letter under its event's stream is asked again: that is where those without a key are put. Without the
    source's event there is nobody to ask: the letter's row has kept the key, and no other stream than that.
    """
    if found is None:
        return None
    kept = storable_key(stored.key)
    if projection.partition_by is None or kept != storable_key(ordering_key_in(found.partition, found.stream_id)):
        return Routed(found, stored.key)
    event, key, error = keyed(projection, found)
    return Routed(event, stored.key if storable_key(key) == kept else key, error)


def refusal(batch: Batch, stored: StoredLetter, key: str, *, allow_out_of_order: bool) -> str:
    """Return why the letter's event, whose ordering key is `key`, may not be applied now; empty when it may."""
    if stored.status == "parked" and stored.behind is not None:
        return PARKED_BEHIND.format(letter=stored.behind)
    position = stored.event.position
    if not batch.applied_beyond(key, position - 1):
        return ""
    if not batch.applied_beyond(key, position):  # redelivered after the fix, when its key was known
        return APPLIED_ALREADY
    return "" if allow_out_of_order else OUT_OF_ORDER


def _status_refused(stored: StoredLetter) -> str:
    """Return the status of a refused letter: parked is what waits for another one, and only that."""
    return stored.status if stored.behind is not None else "open"


PARKED_BEHIND: Final = "refused: parked behind letter {letter}, whose replay or discard releases it in order"
OUT_OF_ORDER: Final = (
    "refused: a later event of the same key has been applied already; replay with allow_out_of_order=True if the "
    "handler does not depend on the order"
)
APPLIED_ALREADY: Final = (
    "refused: this very event has been applied already, redelivered under its true ordering key; discard the letter"
)
