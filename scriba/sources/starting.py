"""Where a projection begins that says ``start_from="current"``, on a table whose positions appear out of order.

The highest visible position alone is no answer: a writer that is at work may hold a lower number, and commit a moment
later. So the start is *declared* once, from evidence:

1. The first look notes the highest visible position, and who is writing. Nobody: that position is the start.
2. Otherwise the start is declared when all of those have ended. Whatever commits after that lies behind the start.
3. An event that was in flight at the first look, and has committed since, moves the start back below itself, as far as
   its number is among the last `LOOKED_BACK`. What stands above it is delivered with it, events of before included.

Hence every event that commits after the declaration is delivered, and every event that commits after the first look,
but one whose writer drew its number more than `LOOKED_BACK` numbers earlier. Nothing is handed out, and no position is
remembered, before the declaration: a process that ends earlier leaves the first look to the next one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from scriba.sources.horizon import NOTHING

if TYPE_CHECKING:
    from scriba.sources.horizon import Horizon, Query, Relations

__all__ = ["CurrentStart", "StartUnknown", "wait_for_start"]

LOOKED_BACK: Final = 100_000  #: numbers up to the highest one among which events in flight are looked for
FIRST_PAUSE_S: Final = 0.01  #: the end of a foreign transaction sends no notice
LONGEST_PAUSE_S: Final = 1.0
PATIENCE: Final = 0.1  #: what waits long is looked at less often: this share of the time it has waited


class StartUnknown(Exception):  # noqa: N818 - a state of the world, not a mistake
    """The reader was told to return before it could be known where *current* is. Another try may know."""

    def __init__(self, waiting_for: str) -> None:
        super().__init__(f'start_from="current" is not known yet: {waiting_for or "writers are at work"}')


class CurrentStart:
    """Finds the start of one reading. Used by the thread that fetches; `query` is its connection."""

    def __init__(self, query: Query, relations: Relations, horizon: Horizon) -> None:
        self._query = query
        self._relations = relations
        self._horizon = horizon
        self._visible: int | None = None  #: the highest position at the first look
        self._open: list[int] = []  #: numbers up to there that held no row at the first look

    def position(self) -> int | None:
        """Return the position to begin after; None while somebody who was there at the first look is still writing."""
        if self._visible is None:
            self._visible = self._horizon.written()
            if self._visible == NOTHING or self._is_settled(self._visible):
                return self._visible
            self._open = self._open_numbers(self._visible)
            return None
        return self._declared(self._visible) if self._is_settled(self._visible) else None

    def _is_settled(self, position: int) -> bool:
        self._horizon.advance(NOTHING)
        return self._horizon.settled >= position

    def _open_numbers(self, highest: int) -> list[int]:
        table, column, _, _, lowest = self._relations
        span = (max(lowest, highest - LOOKED_BACK + 1), highest)
        return [int(row[0]) for row in self._query(_OPEN.format(table=table, column=column), (*span, *span))]

    def _declared(self, visible: int) -> int:
        """Look with a snapshot that is newer than the evidence: what has become an event of the open numbers."""
        table, column, *_ = self._relations
        lowest = self._query(_LOWEST_OF.format(table=table, column=column), (self._open,))[0][0]
        return visible if lowest is None else int(lowest) - 1


def wait_for_start(
    find: Callable[[], int | None],
    *,
    pause: Callable[[float], object],
    may_wait: Callable[[], bool],
    waiting_for: Callable[[], str],
) -> int:
    """Return what `find` finds, however long that takes; `pause` waits for so many seconds at most.

    A page cannot be returned instead: how far it has scanned would be remembered as the start. Raises
    :class:`StartUnknown` as soon as `may_wait` says no.
    """
    began = time.monotonic()
    while (start := find()) is None:
        if not may_wait():
            raise StartUnknown(waiting_for())
        pause(min(LONGEST_PAUSE_S, max(FIRST_PAUSE_S, PATIENCE * (time.monotonic() - began))))
    return start


_OPEN: Final = """
SELECT number FROM generate_series(%s::bigint, %s::bigint) AS number
EXCEPT SELECT {column} FROM {table} WHERE {column} BETWEEN %s AND %s
"""
_LOWEST_OF: Final = "SELECT min({column}) FROM {table} WHERE {column} = ANY(%s::bigint[])"
