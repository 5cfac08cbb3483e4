"""Replays and discards: what an operator wishes of a dead letter, carried out by the key's own lane.

In lane order, under the fence, between two batches: done anywhere else it would race with the live lane, and an event
could be stranded as parked behind no letter, or applied after a later one. The order is kept here, whoever wrote the
wish: a parked event is never applied before the one that it waits for, and none after a later one of its key unless
the wish allows it. A replay never touches the live cursor
nor the lane's counters; the letter's status changes in the transaction of the rows it wrote.

Under ``on_failure="park"`` the end of a letter hands its wish to the first one parked behind it, in one transaction,
and so on in order: a limited number at a time, so that the lane's other keys are not kept waiting. What arrives
meanwhile still queues behind.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from scriba.engine.handling import DecodeFailed, FailReturned, HandlerCall, HandlerExited, plain_text
from scriba.engine.lanes import Routed
from scriba.engine.letters import letter_for
from scriba.event import SkipEvent
from scriba.log_fields import about
from scriba.protocols import CursorMove, Failure, FailureKind, FenceLost, Resolution, WriteFailed
from scriba.results import Fail

if TYPE_CHECKING:
    from scriba.event import Event
    from scriba.protocols import Batch, Lease, Letter, LetterWish, StoredLetter, Subscription, Writer
    from scriba.registry import Projection

__all__ = ["RELEASED_AT_ONCE", "Replayer", "restored"]

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
            failure, cause = self._failure_of(error)
            if failure.kind is not FailureKind.TRANSIENT:
                raise
            identity = self._projection.identity
            extra = about(identity, position=wish.event_position, letter=wish.letter)
            logger.warning("%s: a %s waits: %s", identity, wish.wish, plain_text(cause), extra=extra)

    # --- one letter ---------------------------------------------------------------------------------------

    def _discard(self, wish: LetterWish) -> bool:
        with self._writer.batch(self._lease.fence) as batch:
            stored = batch.letter(wish.letter)
            if stored is not None:
                batch.resolve(Resolution(stored.id, "discarded", wish.by))
        return stored is not None

    def _replay_wished(self, wish: LetterWish, subscription: Subscription) -> bool:
        event = subscription.read(wish.event_position, wish.partition)
        return self._replay(wish.letter, wish, Routed(event, wish.key) if event else None, subscription)

    def _replay(self, letter: int, wish: LetterWish, found: Routed | None, subscription: Subscription) -> bool:
        """Run one letter's event through the handler; say whether it is applied. A failure stays open."""
        try:
            with self._writer.batch(self._lease.fence) as batch:
                stored = batch.letter(letter)
                if stored is None:
                    return False
                if refusal := _refusal(batch, stored, wish):
                    batch.resolve(Resolution(stored.id, stored.status, wish.by, note=refusal))
                    return False
                item = found or Routed(restored(stored, subscription), stored.key)
                applied = self._apply(batch, item)
                position = stored.event.position
                move = CursorMove(stored.key, position, position, position) if applied else None
                batch.resolve(Resolution(stored.id, "replayed", wish.by, applied=move))
        except FenceLost:
            raise
        except Exception as error:
            failure, cause = self._failure_of(error)
            if failure.kind is FailureKind.TRANSIENT:
                raise
            self._record_failure(letter, wish, cause, failure)
            return False
        return True

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

    def _record_failure(self, letter: int, wish: LetterWish, cause: BaseException, failure: Failure) -> None:
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
            found = Routed(event, parked.key) if event else None
            if not self._replay(parked.id, wish, found, subscription):
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


def _refusal(batch: Batch, stored: StoredLetter, wish: LetterWish) -> str:
    """Return why the letter's event may not be applied now, whoever asked for it; empty when it may."""
    if stored.status == "parked" and stored.behind is not None:
        return PARKED_BEHIND.format(letter=stored.behind)
    if not wish.allow_out_of_order and batch.applied_beyond(stored.key, stored.event.position):
        return OUT_OF_ORDER
    return ""


PARKED_BEHIND: Final = "refused: parked behind letter {letter}, whose replay or discard releases it in order"
OUT_OF_ORDER: Final = (
    "refused: a later event of the same key has been applied already; replay with allow_out_of_order=True if the "
    "handler does not depend on the order"
)
