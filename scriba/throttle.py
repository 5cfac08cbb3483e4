"""A log storm is bounded and counted: ten thousand equal lines are a few, and one that says how many were left out."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

__all__ = ["Throttle", "install"]

MOST: Final = 20  #: equal records in one window
WINDOW_S: Final = 60.0
MOST_KINDS: Final = 2_000


class Throttle(logging.Filter):
    """Lets `most` records of one kind pass in `window_s` seconds.

    A kind is a level, a message without its values, and the first of them: by custom the projection.

    The first record of the next window carries ``suppressed``, the number of those left out, and says so.
    """

    def __init__(
        self, most: int = MOST, window_s: float = WINDOW_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__()
        self._most = most
        self._window_s = window_s
        self._clock = clock
        self._lock = threading.Lock()
        self._seen: dict[tuple[int, str, str], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Say whether `record` may pass."""
        if record.levelno < logging.WARNING:
            return True
        about = record.args[0] if isinstance(record.args, tuple) and record.args else ""
        kind = (record.levelno, str(record.msg), str(about))
        with self._lock:
            began, count = self._seen.get(kind, (self._clock(), 0))
            left_out = 0
            if self._clock() - began >= self._window_s:
                left_out, began, count = max(0, count - self._most), self._clock(), 0
            if len(self._seen) > MOST_KINDS:
                self._seen.clear()  # counted anew: too many lines are better than too much memory
            self._seen[kind] = (began, count + 1)
        if count >= self._most:
            return False
        if left_out:
            record.suppressed = left_out
            record.msg = f"{record.msg} ({left_out} more like this were left out before)"
        return True


def install() -> None:
    """Throttle the logger ``scriba``, once."""
    logger = logging.getLogger("scriba")
    if not any(isinstance(known, Throttle) for known in logger.filters):
        logger.addFilter(Throttle())
