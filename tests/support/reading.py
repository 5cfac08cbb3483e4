"""Reading a source to its end, without an engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scriba.event import Event
    from scriba.protocols import Subscription

__all__ = ["positions", "read_all"]


def read_all(subscription: Subscription, limit: int = 1_000) -> list[Event]:
    """Fetch until the source says that nothing is left; each page must move on and keep the order."""
    found: list[Event] = []
    scanned = -1
    while True:
        page = subscription.fetch(limit, 0.0)
        assert len(page.events) <= limit
        assert page.scanned >= scanned
        assert all(event.position <= page.scanned for event in page.events)
        found += page.events
        scanned = page.scanned
        if page.caught_up:
            break
    numbers = positions(found)
    assert numbers == sorted(set(numbers))
    return found


def positions(events: list[Event]) -> list[int]:
    return [event.position for event in events]
