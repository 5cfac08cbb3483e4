"""What the world hears of a batch that is committed: the outcome signals and the log lines.

Sent after the commit, from what the commit settled, so that rows and signals agree on every path.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Final

from scriba import signals
from scriba.engine.telemetry import event_fields, log_letter, send
from scriba.log_fields import about

if TYPE_CHECKING:
    from scriba.engine.tally import Tally
    from scriba.protocols import Identity

__all__ = ["Outcomes"]

logger = logging.getLogger("scriba")

SKIPS_BEFORE_WARNING: Final = 1_000


class Outcomes:
    """The announcements of one lane. Used by one thread."""

    def __init__(self, identity: Identity, lane: int) -> None:
        self._identity = identity
        self._lane = lane
        self._skips_in_a_row: int | None = 0

    def announce(self, tally: Tally, duration_s: float) -> None:
        """Send what became of each event, and of the batch."""
        identity, now = self._identity, time.time()
        for item, reason in tally.skips if signals.event_skipped.receivers else ():
            send(signals.event_skipped, identity, system_time=now, reason=reason, **event_fields(item.event))
        for letter in tally.letters:
            log_letter(identity, letter, self._lane)
            send(
                signals.dead_lettered,
                identity,
                system_time=now,
                error_kind=letter.error_kind,
                status=letter.status,
                **event_fields(letter.event),
            )
        if tally.counters.unmatched:
            send(signals.writes_unmatched, identity, count=tally.counters.unmatched, lane=self._lane)
        if tally.settled:
            send(signals.batch_stopped, identity, duration=duration_s, batch_size=tally.settled, lane=self._lane)
        self._warn_about_skips(tally)

    def _warn_about_skips(self, tally: Tally) -> None:
        """Warn once when nothing but skips came: nearly always a handler that matches on the wrong thing."""
        if self._skips_in_a_row is None:
            return
        if tally.counters.skipped - tally.counters.deduplicated < tally.settled - tally.counters.deduplicated:
            self._skips_in_a_row = None
            return
        self._skips_in_a_row += tally.counters.skipped - tally.counters.deduplicated
        if self._skips_in_a_row >= SKIPS_BEFORE_WARNING:
            self._skips_in_a_row = None
            logger.warning(
                "%s: the first %d events of lane %d were all Skip(). Without types= the handler gets a dict: does it "
                "match on meta.type?",
                self._identity,
                SKIPS_BEFORE_WARNING,
                self._lane,
                extra=about(self._identity, lane=self._lane),
            )
