"""Sending signals so that they cost nothing when nobody listens and break nothing when a receiver fails."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from scriba.log_fields import about

if TYPE_CHECKING:
    from django.dispatch import Signal

    from scriba.event import Event
    from scriba.protocols import Identity, Letter

__all__ = ["event_fields", "log_letter", "send"]

logger = logging.getLogger("scriba")


def send(signal: Signal, projection: Identity, **fields: Any) -> None:
    """Send `signal`; a receiver that raises is logged and does not reach the engine."""
    if not signal.receivers:
        return
    for receiver, answer in signal.send_robust(sender=projection, projection=projection, **fields):
        if isinstance(answer, Exception):
            known = {name: fields[name] for name in ("lane", "position", "event_id") if name in fields}
            logger.error(
                "%s: a signal receiver failed: %r",
                projection,
                receiver,
                extra=about(projection, **known),
                exc_info=answer,
            )


def event_fields(event: Event) -> dict[str, Any]:
    """Return what every signal about one event says of it."""
    return {
        "event_type": event.type,
        "stream_id": event.stream_id,
        "position": event.position,
        "event_id": event.id,
        "correlation_id": event.correlation_id,
    }


def log_letter(projection: Identity, letter: Letter, lane: int) -> None:
    """Write one line for an event that was given up on, with its traceback once; parked ones are its consequence."""
    if letter.status != "open":
        return
    event = letter.event
    logger.error(
        "%s: dead letter at position %s (%s of %s): %s: %s",
        projection,
        event.position,
        event.type,
        event.stream_id,
        letter.error_kind,
        " ".join(letter.message.split()),
        exc_info=letter.cause,
        extra=about(projection, lane=lane, position=event.position, event_id=event.id),
    )
