"""When the schema no longer fits the handler, every event fails: halt then, instead of dead-lettering the log.

A *wipeout* is a batch in which more than one write was attempted and every one failed as its event's own fault
(integrity or decoding). A batch with a single attempt proves little; the third such in a row, with no success
between, counts. Skips neither count nor reset. One circuit per run of a projection, shared by its lanes.
"""

from __future__ import annotations

import threading

__all__ = ["SINGLES_IN_A_ROW", "Circuit"]

SINGLES_IN_A_ROW = 3


class Circuit:
    """Counts; the pipeline asks before a batch commits and reports after it has committed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._singles = 0

    def is_wipeout(self, attempted: int, failed: int) -> bool:
        """Say whether a batch with these verdicts must not be dead-lettered but halt the projection."""
        if failed == 0 or failed < attempted:
            return False
        if attempted > 1:
            return True
        with self._lock:
            return self._singles + 1 >= SINGLES_IN_A_ROW

    def committed(self, attempted: int, failed: int) -> None:
        """Remember a committed batch: any success resets, a lone failure counts one up."""
        if attempted == 0:
            return
        with self._lock:
            self._singles = self._singles + 1 if failed == attempted else 0
