"""Sending signals so that they cost nothing when nobody listens and break nothing when a receiver fails."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from django.dispatch import Signal

    from scriba.event import Event
    from scriba.protocols import Identity

__all__ = ["event_fields", "send"]

logger = logging.getLogger("scriba")


def send(signal: Signal, projection: Identity, **fields: Any) -> None:
    """Send `signal`; a receiver that raises is logged and does not reach the engine."""
    if not signal.receivers:
        return
    for receiver, answer in signal.send_robust(sender=projection, projection=projection, **fields):
        if isinstance(answer, Exception):
            logger.error("a signal receiver failed: %r", receiver, exc_info=answer)


def event_fields(event: Event) -> dict[str, Any]:
    """Return what every signal about one event says of it."""
    return {
        "event_type": event.type,
        "stream_id": event.stream_id,
        "position": event.position,
        "event_id": event.id,
    }
