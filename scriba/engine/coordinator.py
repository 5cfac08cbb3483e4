"""The life of one projection in one process: who owns it, what is wished, and what it does about both.

``initializing → running ⇄ paused → draining → stopped``, ``standby`` while another process owns it, and ``halted``,
which only a human leaves. The wish is a row that any process may change; the coordinator follows it within a second.
All decisions are taken in this one thread; readers and workers only end, and leave their error behind.

What always holds: nothing is read or handled without a lease; a halt is recorded only after the lanes are quiet; a
lost lease ends the term at once, and the fence stops whatever it could still have committed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple

from scriba import signals
from scriba.engine.lease import LeaseKeeper
from scriba.engine.partitioner import HASH_NAME
from scriba.engine.pipeline import BACKOFF_S, Halt
from scriba.engine.telemetry import send
from scriba.engine.term import Term
from scriba.exceptions import ConfigurationError
from scriba.protocols import FenceLost, Holder, Progress, Recorded, SourceBusy, Status, Wish

if TYPE_CHECKING:
    from scriba.conf import Settings
    from scriba.protocols import Identity, Lease, Ledger, Orders, Source
    from scriba.registry import Projection

__all__ = ["TRANSITIONS", "Coordinator", "Outcome", "Snapshot", "narrowed"]

logger = logging.getLogger("scriba")

WISH_EVERY_S: Final = 0.4  #: how often the wish is read: followed within a second
WATERMARK_EVERY_S: Final = 0.5  #: while events flow
WATERMARK_DRAINED_S: Final = 0.05  #: once everything is settled
CALM_AFTER_S: Final = 60.0  #: a term that lived so long ended by accident, not in a loop
WISHES_AT_ONCE: Final = 1_000  #: wishes on letters handed to the lanes at one look
SAMPLE_EVERY_S: Final = 10.0  #: how often the charts get a point
STANDBY_EVERY_S: Final = 0.4  #: a standby looks so often whether the owner has gone

_LIVE: Final = frozenset(set(Status) - {Status.NOT_RUNNING})
TRANSITIONS: Final = {
    Status.NOT_RUNNING: frozenset({Status.INITIALIZING}),
    Status.INITIALIZING: _LIVE - {Status.INITIALIZING} | {Status.NOT_RUNNING},
    Status.STANDBY: _LIVE - {Status.STANDBY} | {Status.NOT_RUNNING},
    Status.RUNNING: _LIVE - {Status.RUNNING} | {Status.NOT_RUNNING},
    Status.PAUSED: _LIVE - {Status.PAUSED} | {Status.NOT_RUNNING},
    Status.DRAINING: frozenset({Status.STOPPED, Status.NOT_RUNNING, Status.INITIALIZING, Status.HALTED, Status.STANDBY}),
    Status.STOPPED: frozenset({Status.INITIALIZING, Status.RUNNING, Status.PAUSED, Status.STANDBY, Status.DRAINING,
                               Status.HALTED, Status.NOT_RUNNING}),
    Status.HALTED: frozenset({Status.INITIALIZING, Status.STOPPED, Status.STANDBY, Status.DRAINING, Status.NOT_RUNNING,
                              Status.RUNNING, Status.PAUSED}),
}  # fmt: skip


class Snapshot(NamedTuple):
    """What a projection looks like from its own process, for progress bars and health checks."""

    identity: Identity
    status: Status
    watermark: int | None
    head: int | None
    rate: float
    settled: int
    in_flight: int
    stalled_s: float
    reason: str


class Outcome(NamedTuple):
    """How a coordinator ended: an exit code (0 drained, 1 halted or failed), and why in words."""

    code: int
    reason: str = ""


class Coordinator:
    """Runs in one thread. `stop` and `snapshot` may be called from any."""

    def __init__(  # noqa: PLR0913 - a projection, its ledger, and how it is run
        self,
        projection: Projection,
        *,
        open_ledger: Callable[[], Ledger],
        settings: Settings,
        owner: str,
        until_caught_up: bool = False,
        drain_timeout_s: float | None = None,
    ) -> None:
        self.projection = projection
        self.outcome: Outcome | None = None
        self.ended = threading.Event()
        self._identity = projection.identity
        self._source = narrowed(projection)
        self._open_ledger = open_ledger
        self._settings = settings
        self._owner = owner
        self._until_caught_up = until_caught_up
        self._drain_timeout_s = settings.drain_timeout_s if drain_timeout_s is None else drain_timeout_s
        self._status = Status.NOT_RUNNING
        self._reason = ""
        self._tick = threading.Event()
        self._stopping = threading.Event()
        self._hurrying = threading.Event()
        self._lost = threading.Event()
        self._term: Term | None = None
        self._keeper: LeaseKeeper | None = None
        self._ledger: Ledger
        self._saved: int | None = None
        self._saved_at = 0.0
        self._wish_read_at = 0.0
        self._lag_sent_at = time.monotonic()
        self._sampled_at = float("-inf")
        self._was_started = False
        self._failures = 0
        self._restarts = 0
        self._waited_for = False
        self._term_began = 0.0
        self._standbys = 0
        self._busy_until = 0.0
        self._rate = _Rate()
        self.changed: Callable[[], None] = lambda: None

    # --- from other threads -------------------------------------------------------------------------------

    def stop(self, *, hurry: bool = False) -> None:
        """Drain and leave; with `hurry`, leave without waiting for handlers. Idempotent."""
        if hurry:
            self._hurrying.set()
        self._stopping.set()
        self._tick.set()

    def snapshot(self) -> Snapshot:
        term = self._term
        head = term.reader.head if term else None
        return Snapshot(
            self._identity,
            self._shown_status,
            term.watermark if term else self._saved,
            head.position if head else None,
            self._rate.value,
            term.settled if term else 0,
            term.in_flight if term else 0,
            term.stalled_s if term else 0.0,
            self._ending or self._reason or (term.problem if term else ""),
        )

    @property
    def _shown_status(self) -> Status:
        """A process that was told to leave is draining until it has left."""
        leaving = self._stopping.is_set() and self._status not in {Status.NOT_RUNNING, Status.HALTED}
        return Status.DRAINING if leaving else self._status

    @property
    def _ending(self) -> str:
        """Why this life ended; empty while it goes on."""
        return self.outcome.reason if self.outcome is not None else ""

    # --- the life -----------------------------------------------------------------------------------------

    def run(self) -> None:
        """Own the projection whenever it can be had, until told to stop. The thread's whole life."""
        self._ledger = self._open_ledger()
        self._become(Status.INITIALIZING)
        try:
            while self.outcome is None and not self._stopping.is_set():
                try:
                    self._guard(self._once)
                except FenceLost:
                    logger.warning("%s: the lease is lost; another process may own it now", self._identity)
        except BaseException as error:
            self.outcome = Outcome(1, f"{type(error).__qualname__}: {error}")
            logger.exception("%s: the coordinator failed", self._identity)
            raise
        finally:
            self._ledger.close()
            halted = self._status is Status.HALTED
            self.outcome = self.outcome or Outcome(1 if halted else 0, self._reason if halted else "")
            self._become(Status.NOT_RUNNING)
            self.ended.set()
            self.changed()

    def _once(self) -> None:
        """One try to own the projection, and everything that follows while it lasts."""
        self._ledger.register(Recorded(self.projection.partition_by_name, self._source.identity(), HASH_NAME))
        claim = self._ledger.acquire(self._owner, self._settings.lease_s)
        if isinstance(claim, Holder):
            self._stand_by(claim)
            return
        self._standbys = 0
        self._reason = ""
        self._lost.clear()
        self._keeper = keeper = LeaseKeeper(
            self._open_ledger, claim, self._settings.lease_s, self._progress, self._lease_lost, name=str(self._identity)
        )
        keeper.start()
        try:
            self._own()
        except FenceLost:
            self._lost.set()
            raise
        finally:
            clean = self._end_term()
            keeper.stop()
            if clean and not self._lost.is_set():
                self._guard_exit(lambda: self._ledger.release(keeper.lease))
            self._keeper = None

    def _own(self) -> None:
        """Follow the wish while the lease is ours. Returns when told to stop; raises FenceLost when it is not."""
        self._become(Status.INITIALIZING)
        self._wish_read_at = 0.0
        while not self._stopping.is_set():
            if self._lost.is_set():
                raise FenceLost
            self._guard(self._turn)
            if self.outcome is not None:
                return
            self._tick.wait(WATERMARK_DRAINED_S if self._saved_is_behind() else WISH_EVERY_S / 2)
            self._tick.clear()

    def _turn(self) -> None:
        """What is looked at over and over: the term's health, the wish, the watermark."""
        self._look_after_term()
        now = time.monotonic()
        if now - self._wish_read_at >= WISH_EVERY_S or self._term is None:
            orders = self._ledger.orders()
            self._follow(orders)
            self._waited_for = orders.waited_for
            self._hand_out_wishes()
            self._wish_read_at = now
        self._save_watermark()
        self._report_lag()
        self._take_sample()
        if self._until_caught_up:
            self._leave_when_done()

    @property
    def _lease(self) -> Lease:
        if self._keeper is None:
            raise FenceLost
        return self._keeper.lease

    # --- the wish -----------------------------------------------------------------------------------------

    def _follow(self, orders: Orders) -> None:
        if orders.halt_cause:
            self._end_term()
            self._reason = orders.halt_cause
            self._become(Status.HALTED)
        elif orders.wish is Wish.STOPPED:
            if self._term is not None:
                self._become(Status.DRAINING)
                self._end_term()
            self._reason = "stopped on request; start it to go on"
            self._become(Status.STOPPED)
        elif orders.wish is Wish.PAUSED:
            if self._term is not None:
                self._term.pause()
            self._reason = "paused on request; resume it to go on"
            was_running = self._status is Status.RUNNING
            self._become(Status.PAUSED)
            if was_running:
                send(signals.projection_paused, self._identity, system_time=time.time())
        else:
            self._run_term()

    def _run_term(self) -> None:
        was_paused = self._status is Status.PAUSED
        if self._term is None:
            if time.monotonic() < self._busy_until:
                return
            self._begin_term()
        if self._term is not None:
            self._term.resume()
            if self._status is Status.STANDBY and self._term.reader.subscription is None:
                return  # the source lets in one reader at a time: running only once it has let us in
        self._reason = ""
        self._become(Status.RUNNING)
        if not self._was_started:
            self._was_started = True
            send(signals.projection_started, self._identity, system_time=time.time())
        elif was_paused:
            send(signals.projection_resumed, self._identity, system_time=time.time())

    def _hand_out_wishes(self) -> int:
        """Give each operator's wish on a dead letter to the lane of its key, once until it is carried out.

        Return how many wishes there were.
        """
        term = self._term
        if term is None or term.reader.subscription is None:
            return 0
        wishes = self._ledger.letter_wishes(WISHES_AT_ONCE)
        for wish in wishes:
            term.resolve(wish)
        return len(wishes)

    # --- the term -----------------------------------------------------------------------------------------

    def _begin_term(self) -> None:
        self._ledger.open_lanes(self._lease, self.projection.lanes)
        resume = self._ledger.resume(self._lease)
        self._saved = resume.watermark
        self._rate = _Rate()
        self._term_began = time.monotonic()
        self._term = Term(
            self.projection, self._source, self._lease, resume, self._open_ledger, self._settings, self._tick.set
        )
        self._term.start()
        send(
            signals.cache_initialized, self._identity, wiped_count=0, preloaded_count=0,
            source="postgres" if resume.watermark is not None else "empty",
        )  # fmt: skip

    def _look_after_term(self) -> None:
        """Act on the error that ended a thread of the term, if one did."""
        term = self._term
        if term is None or term.error is None:
            if term is not None:
                self._rate.update(term.settled)
            return
        error = term.error
        self._end_term()
        if isinstance(error, FenceLost):
            raise error
        if isinstance(error, Halt):
            self._record_halt(error)
        elif isinstance(error, SourceBusy):
            self._reason = f"standby: {error}"
            self._become(Status.STANDBY)
            send(
                signals.source_standby,
                self._identity,
                attempt=self._standbys,
                retry_in=error.retry_in_s,
                owner=error.holder,
            )
            self._standbys += 1
            self._busy_until = time.monotonic() + error.retry_in_s
        else:
            logger.error("%s: a thread ended with an error; starting again", self._identity, exc_info=error)
            self._restarts = 0 if time.monotonic() - self._term_began > CALM_AFTER_S else self._restarts + 1
            self._back_off(f"restarting after {type(error).__qualname__}: {error}", self._restarts)

    def _record_halt(self, halt: Halt) -> None:
        """The lanes are quiet: record the halt and raise the epoch, so that nothing commits after it."""
        lease = self._ledger.halt(self._lease, str(halt), halt.label)
        if lease is None:
            raise FenceLost
        if self._keeper is not None:
            self._keeper.renew(lease)
        self._reason = str(halt)
        self._become(Status.HALTED)
        logger.error("%s halted: %s", self._identity, halt, extra=_extra(self._identity), exc_info=halt.__cause__)
        send(signals.projection_halted, self._identity, system_time=time.time(), reason=str(halt), label=halt.label)

    def _end_term(self) -> bool:
        """Drain: each worker commits what it has handled. False when a handler did not come back in time."""
        term, self._term = self._term, None
        if term is None:
            return True
        term.close()
        deadline = time.monotonic() + self._drain_timeout_s
        late = term.join(0.05)
        while late and time.monotonic() < deadline and not self._hurrying.is_set():
            late = term.join(0.1)
        if late:
            reason = f"still busy after {self._drain_timeout_s:g} s: {', '.join(late)}"
            logger.error(
                "%s: %s; its transaction will be refused", self._identity, reason, extra=_extra(self._identity)
            )
            if self._stopping.is_set():
                self.outcome = Outcome(1, reason)
            term.reader.leave()
        else:
            self._save_last(term)
            term.reader.leave(-1 if self._lost.is_set() else term.watermark)
        return not late

    def _save_last(self, term: Term) -> None:
        """Everything this term will ever settle is settled: leave the exact watermark behind."""
        watermark = term.watermark
        if self._lost.is_set() or self._keeper is None or watermark < 0 or watermark == self._saved:
            return
        progress = Progress(self._status, watermark, term.time_at(watermark), reason=self._reason)
        self._guard_exit(lambda: self._ledger.save_watermark(self._lease, progress))
        self._saved = watermark

    # --- what is reported ---------------------------------------------------------------------------------

    def _saved_is_behind(self) -> bool:
        term = self._term
        return term is not None and (term.in_flight == 0 or self._waited_for) and term.watermark != self._saved

    def _save_watermark(self) -> None:
        term = self._term
        if term is None:
            return
        watermark, now = term.watermark, time.monotonic()
        if watermark == self._saved or watermark < 0:
            term.reader.saved_watermark = -1 if self._saved is None else self._saved
            return
        trails = term.in_flight and not self._waited_for
        pause_s = WATERMARK_EVERY_S if trails else WATERMARK_DRAINED_S
        if now - self._saved_at < pause_s:
            return
        if not self._ledger.save_watermark(self._lease, self._progress()):
            raise FenceLost
        self._saved, self._saved_at = watermark, now
        term.reader.saved_watermark = watermark

    def _progress(self) -> Progress:
        """What the heartbeat and the watermark write say; also called from the lease's thread."""
        term = self._term
        if term is None:
            return Progress(self._status, reason=self._reason)
        watermark = term.watermark
        head = term.reader.head
        return Progress(
            self._status,
            watermark if watermark >= 0 else None,
            term.time_at(watermark),
            head.position if head else None,
            head.occurred_at if head else None,
            self._rate.value,
            self._reason or term.problem,
        )

    def _report_lag(self) -> None:
        interval, now, term = self.projection.lag_interval, time.monotonic(), self._term
        if not interval or now - self._lag_sent_at < interval or term is None or term.reader.head is None:
            return
        self._lag_sent_at = now
        watermark, head = term.watermark, term.reader.head
        lag_events = max(0, head.position - watermark)
        at = term.time_at(watermark)
        lag_seconds = max(0.0, time.time() - at.timestamp()) if lag_events and at else 0.0
        send(
            signals.lag_reported, self._identity, lag_events=lag_events, lag_seconds=lag_seconds, watermark=watermark,
            status=self._status,
        )  # fmt: skip

    def _take_sample(self) -> None:
        now = time.monotonic()
        if now - self._sampled_at >= SAMPLE_EVERY_S:
            self._sampled_at = now
            self._ledger.sample(self._lease, self._progress())

    def _leave_when_done(self) -> None:
        term = self._term
        if term is not None and term.is_caught_up and self._saved == term.watermark:
            if not self._hand_out_wishes():  # a replay that somebody asked for is work, too
                self.outcome = Outcome(0, "caught up")
        elif self._status is Status.HALTED:
            self.outcome = Outcome(1, self._reason)
        elif self._status in {Status.STOPPED, Status.PAUSED} and (term is None or term.in_flight == 0):
            self.outcome = Outcome(0, self._reason)

    # --- standby, backoff, end ----------------------------------------------------------------------------

    def _stand_by(self, holder: Holder) -> None:
        if self._status is not Status.STANDBY:
            logger.info(
                "%s: standby; %s owns it",
                self._identity,
                holder.owner,
                extra=_extra(self._identity, owner=holder.owner),
            )
        self._become(Status.STANDBY)
        self._reason = (
            f"owned by {holder.owner}; takes over when it leaves, or after {holder.expires_in_s:.1f} s of silence"
        )
        wait_s = min(STANDBY_EVERY_S, max(0.05, holder.expires_in_s))
        send(signals.source_standby, self._identity, attempt=self._standbys, retry_in=wait_s, owner=holder.owner)
        self._standbys += 1
        self._stopping.wait(wait_s)

    def _guard(self, work: Callable[[], None]) -> None:
        """Do `work`; an outage of the database is waited for, a wrong configuration ends the life, the rest too."""
        try:
            work()
        except FenceLost:
            raise
        except ConfigurationError as error:
            self.outcome = Outcome(2, str(error))
            logger.error("%s: %s", self._identity, error, extra=_extra(self._identity))  # noqa: TRY400 - a message, no bug
        except Exception as error:
            if not self._ledger.transient(error):
                raise
            self._back_off(f"the database is out of reach: {' '.join(str(error).split())}", self._failures)
            self._failures += 1
        else:
            self._failures = 0

    def _guard_exit(self, work: Callable[[], object]) -> None:
        """Do `work` on the way out; without a database the watermark trails and the lease runs out by itself."""
        try:
            work()
        except Exception as error:
            if not self._ledger.transient(error):
                raise
            logger.warning("%s: leaving without the database: %s", self._identity, error, extra=_extra(self._identity))

    def _back_off(self, reason: str, failures: int) -> None:
        wait_s = BACKOFF_S[min(failures, len(BACKOFF_S) - 1)]
        self._reason = reason
        logger.warning("%s: %s; next try in %.1f s", self._identity, reason, wait_s, extra=_extra(self._identity))
        self._stopping.wait(wait_s)

    def _lease_lost(self) -> None:
        """Called by the keeper's thread: hand out nothing more."""
        self._lost.set()
        term = self._term
        if term is not None:
            term.close()
        self._tick.set()

    def _become(self, status: Status) -> None:
        if status is self._status:
            return
        if status not in TRANSITIONS[self._status]:
            msg = f"{self._identity}: {self._status} → {status} is no transition"
            raise RuntimeError(msg)
        self._status = status
        if self._keeper is not None and not self._lost.is_set():
            self._ledger.heartbeat(self._lease, self._settings.lease_s, self._progress())
        self.changed()


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


def narrowed(projection: Projection) -> Source:
    """Let the source filter by event type as early as it can, when it knows how."""
    narrow: Callable[[frozenset[str]], Source] | None = getattr(projection.source, "narrow", None)
    if narrow is None or projection.event_types is None:
        return projection.source
    return narrow(projection.event_types)


def _extra(identity: Identity, **more: object) -> dict[str, object]:
    return {"projection": identity.name, "version": identity.version, **more}
