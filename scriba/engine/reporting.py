"""What an owner lets the world know: watermark, lag, samples, and a word to those who wait for an event.

It decides nothing and reads nothing from the tables; the coordinator says when, and under which lease. What always
holds: the watermark is written outside of the batches, throttled while events flow, and at once when everything is
settled or somebody waits; it may trail, never lead. Nothing is announced while nobody waits: a NOTIFY takes a lock of
the whole server at its commit, so a batch never carries one.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Final

from scriba import signals
from scriba.engine.states import Snapshot
from scriba.engine.telemetry import send
from scriba.log_fields import about
from scriba.protocols import FenceLost, Progress

if TYPE_CHECKING:
    from scriba.engine.pipeline import Halt
    from scriba.engine.term import Term
    from scriba.protocols import Identity, Lease, Ledger, Status
    from scriba.registry import Projection

__all__ = ["Reporter"]

logger = logging.getLogger("scriba")

WATERMARK_EVERY_S: Final = 0.5  #: while events flow
WATERMARK_DRAINED_S: Final = 0.05  #: once everything is settled, or while somebody waits
ANNOUNCE_EVERY_S: Final = 0.01  #: those who wait are not told more often
SAMPLE_EVERY_S: Final = 10.0  #: how often the charts get a point


class Reporter:
    """Used by the coordinator's thread; :meth:`progress` and what is read by snapshots from any."""

    def __init__(self, projection: Projection) -> None:
        self._identity: Identity = projection.identity
        self._lag_interval_s = projection.lag_interval
        self.saved: int | None = None  #: the watermark as it stands in the tables
        self._saved_at = 0.0
        self._lag_sent_at = time.monotonic()
        self._sampled_at = float("-inf")
        self._rate = _Rate()
        self._is_waited_for = False
        self._standbys = 0
        self._announced: tuple[object, ...] = ()
        self._announced_at = 0.0

    @property
    def rate(self) -> float:
        """Events settled per second, smoothed over a few seconds."""
        return self._rate.value

    def begin(self, term: Term, watermark: int | None) -> None:
        """Begin to report of a new term, which resumes at `watermark`."""
        self.saved = watermark
        self._rate = _Rate()
        term.tells_all = self._is_waited_for
        send(
            signals.cache_initialized, self._identity, wiped_count=0, preloaded_count=0,
            source="postgres" if watermark is not None else "empty",
        )  # fmt: skip

    def waited_for(self, term: Term | None, *, is_so: bool) -> None:
        """Learn whether somebody waits for an event. The first announcement is the answer that it is known.

        What was settled before it is found by the look that it causes; what is settled after it is announced.
        """
        if is_so != self._is_waited_for:
            self._announced = ()
        self._is_waited_for = is_so
        if term is not None:
            term.tells_all = is_so

    def progress(self, term: Term | None, status: Status, reason: str) -> Progress:
        """Return what the heartbeat and the watermark write say."""
        if term is None:
            return Progress(status, reason=reason)
        watermark, head = term.watermark, term.reader.head
        return Progress(
            status,
            watermark if watermark >= 0 else None,
            term.time_at(watermark),
            head.position if head else None,
            head.occurred_at if head else None,
            self.rate,
            reason or term.problem,
        )

    def snapshot(self, term: Term | None, status: Status, reason: str) -> Snapshot:
        """Return what this process knows, without a look into the tables."""
        if term is None:
            return Snapshot(self._identity, status, self.saved, None, self.rate, 0, 0, 0.0, reason)
        head = term.reader.head
        return Snapshot(
            self._identity,
            status,
            term.watermark,
            head.position if head else None,
            self.rate,
            term.settled,
            term.in_flight,
            term.stalled_s,
            reason or term.problem,
        )

    # --- once each ------------------------------------------------------------------------------------------

    def owns(self) -> None:
        """The segment is ours: a later standby counts its looks from the start."""
        self._standbys = 0

    def standby(self, retry_in_s: float, owner: str) -> None:
        """Say that `owner` has the projection, and that we look again in `retry_in_s`."""
        send(signals.source_standby, self._identity, attempt=self._standbys, retry_in=retry_in_s, owner=owner)
        self._standbys += 1

    def halted(self, halt: Halt) -> None:
        """Say that `halt` is recorded."""
        logger.error("%s halted: %s", self._identity, halt, extra=about(self._identity), exc_info=halt.__cause__)
        send(signals.projection_halted, self._identity, system_time=time.time(), reason=str(halt), label=halt.label)

    # --- in every turn --------------------------------------------------------------------------------------

    def report(self, ledger: Ledger, lease: Lease, term: Term | None, status: Status, reason: str) -> None:
        """Write and send whatever is due. Raises FenceLost."""
        if term is not None:
            self._rate.update(term.settled)
            self._save_watermark(ledger, lease, term, status, reason)
            self._report_lag(term, status)
        if time.monotonic() - self._sampled_at >= SAMPLE_EVERY_S:
            self._sampled_at = time.monotonic()
            ledger.sample(lease, self.progress(term, status, reason))
        self._announce(ledger, term, status)

    def next_in_s(self, term: Term | None, status: Status) -> float | None:
        """Return after how many seconds there is something to say that may not be said yet; None: nothing is left."""
        if self._is_waited_for and self._announced != self._news(term, status):
            return ANNOUNCE_EVERY_S
        drained = term is not None and (term.in_flight == 0 or self._is_waited_for)
        return WATERMARK_DRAINED_S if term is not None and drained and not self.has_saved(term) else None

    def has_saved(self, term: Term) -> bool:
        """Say whether the tables know all that is settled; of a source that never had an event there is nothing to know."""
        return term.watermark < 0 or term.watermark == self.saved

    def save_last(self, ledger: Ledger, lease: Lease, term: Term, status: Status, reason: str) -> None:
        """Everything this term will ever settle is settled: leave the exact watermark behind."""
        if self.has_saved(term):
            return
        watermark = term.watermark
        ledger.save_watermark(lease, Progress(status, watermark, term.time_at(watermark), reason=reason))
        self.saved = watermark

    # --- one thing each -------------------------------------------------------------------------------------

    def _save_watermark(self, ledger: Ledger, lease: Lease, term: Term, status: Status, reason: str) -> None:
        watermark, now = term.watermark, time.monotonic()
        if self.has_saved(term):
            term.reader.saved_watermark = -1 if self.saved is None else self.saved
            return
        trails = term.in_flight and not self._is_waited_for
        pause_s = WATERMARK_EVERY_S if trails else WATERMARK_DRAINED_S
        if now - self._saved_at < pause_s:
            return
        if not ledger.save_watermark(lease, self.progress(term, status, reason)):
            raise FenceLost
        self.saved, self._saved_at = watermark, now
        term.reader.saved_watermark = watermark

    def _report_lag(self, term: Term, status: Status) -> None:
        interval, now, head = self._lag_interval_s, time.monotonic(), term.reader.head
        if not interval or now - self._lag_sent_at < interval or head is None:
            return
        self._lag_sent_at = now
        watermark = term.watermark
        lag_events = max(0, head.position - watermark)
        at = term.time_at(watermark)
        lag_seconds = max(0.0, time.time() - at.timestamp()) if lag_events and at else 0.0
        send(
            signals.lag_reported, self._identity, lag_events=lag_events, lag_seconds=lag_seconds, watermark=watermark,
            status=status,
        )  # fmt: skip

    def _announce(self, ledger: Ledger, term: Term | None, status: Status) -> None:
        """Wake those who wait, when there is anything new for them to see."""
        news, now = self._news(term, status), time.monotonic()
        if not self._is_waited_for or news == self._announced or now - self._announced_at < ANNOUNCE_EVERY_S:
            return
        ledger.announce()
        self._announced, self._announced_at = news, now

    def _news(self, term: Term | None, status: Status) -> tuple[object, ...]:
        """Return what somebody who waits could see of us in the tables: it changes with each commit."""
        return (id(term), term.settled if term is not None else 0, self.saved, status)


class _Rate:
    """Events per second, smoothed over a few seconds."""

    def __init__(self) -> None:
        self.value = 0.0
        self._at = time.monotonic()
        self._count = 0

    def update(self, count: int) -> None:
        now = time.monotonic()
        elapsed = now - self._at
        if elapsed < 0.5:  # noqa: PLR2004 - shorter spans only measure the batch size
            return
        current = (count - self._count) / elapsed
        self.value = current if not self.value else 0.5 * self.value + 0.5 * current
        self._at, self._count = now, count
