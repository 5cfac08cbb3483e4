"""The life of one projection in one process: who owns it, what is wished, and what it does about both.

The wish is a row that any process may change; a notice with it makes the coordinator look at once, and without one it
looks twice a second. All decisions are taken in this one thread; readers and workers only end, and leave their error
behind. What is told to others, and when, is :mod:`scriba.engine.reporting`'s business.

What always holds: nothing is read or handled without a lease; a halt is recorded only after the lanes are quiet; a
lost lease ends the term at once, and the fence stops whatever it could still have committed.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final

from scriba import signals
from scriba.engine.lease import LeaseKeeper
from scriba.engine.partitioner import HASH_NAME
from scriba.engine.patience import Patience
from scriba.engine.pipeline import Halt
from scriba.engine.reporting import Reporter
from scriba.engine.states import Listen, Outcome, Snapshot, step
from scriba.engine.telemetry import send
from scriba.engine.term import Term, narrowed
from scriba.exceptions import ConfigurationError
from scriba.log_fields import about
from scriba.protocols import FenceLost, Holder, Progress, Recorded, SourceBusy, Status, Wish

if TYPE_CHECKING:
    from scriba.conf import Settings
    from scriba.protocols import Lease, Ledger, Orders
    from scriba.registry import Projection

__all__ = ["Coordinator", "Listen", "Outcome", "Snapshot", "narrowed"]

logger = logging.getLogger("scriba")

WISH_EVERY_S: Final = 0.4  #: how often the wish is read when no notice comes: followed within a second
WISHES_AT_ONCE: Final = 1_000  #: wishes on letters handed to the lanes at one look
STANDBY_EVERY_S: Final = 0.4  #: a standby looks so often whether the owner has gone, when no notice comes


class Coordinator:
    """Runs in one thread. `stop`, `look` and `snapshot` may be called from any."""

    def __init__(  # noqa: PLR0913 - a projection, its ledger, and how it is run
        self,
        projection: Projection,
        *,
        open_ledger: Callable[[], Ledger],
        settings: Settings,
        owner: str,
        until_caught_up: bool = False,
        drain_timeout_s: float | None = None,
        listen: Listen | None = None,
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
        self._listen = listen or (lambda _look: lambda: None)  # hears of nothing: looks by itself
        self._status = Status.NOT_RUNNING
        self._reason = ""
        self._tick = threading.Event()
        self._wished = threading.Event()
        self._stopping = threading.Event()
        self._hurrying = threading.Event()
        self._lost = threading.Event()
        self._term: Term | None = None
        self._keeper: LeaseKeeper | None = None
        self._ledger: Ledger
        self._reporter = Reporter(projection)
        may_pass = lambda error: self._ledger.transient(error)  # noqa: E731, PLW0108 - it is opened by the thread
        self._patience = Patience(self._identity, may_pass, self._say, self._stopping)
        self._wish_read_at = 0.0
        self._was_started = False
        self._term_began = 0.0
        self._busy_until = 0.0
        self._untold: Halt | None = None
        self._late_under: Lease | None = None  #: the last lease under which a handler did not come back in time
        self.changed: Callable[[], None] = lambda: None

    # --- from other threads -------------------------------------------------------------------------------

    def stop(self, *, hurry: bool = False) -> None:
        """Drain and leave; with `hurry`, leave without waiting for handlers. Idempotent."""
        if hurry:
            self._hurrying.set()
        self._stopping.set()
        self._tick.set()
        self._tell()

    def look(self) -> None:
        """Look at once what is wished, and whether the segment is free: somebody has changed one of them."""
        self._wished.set()
        self._tick.set()

    def snapshot(self) -> Snapshot:
        """Return what this process knows of it."""
        ending = self.outcome.reason if self.outcome is not None else ""
        return self._reporter.snapshot(self._term, self._shown_status, ending or self._reason)

    @property
    def _shown_status(self) -> Status:
        """A process that was told to leave is draining until it has left."""
        leaving = self._stopping.is_set() and self._status not in {Status.NOT_RUNNING, Status.HALTED}
        return Status.DRAINING if leaving else self._status

    # --- the life -----------------------------------------------------------------------------------------

    def run(self) -> None:
        """Own the projection whenever it can be had, until told to stop. The thread's whole life."""
        with ExitStack() as leaving:  # whatever fails, the first one is done: who waits for our end would wait for ever
            leaving.callback(self._end)
            self._live(leaving)

    def _live(self, leaving: ExitStack) -> None:
        try:
            self._ledger = self._open_ledger()
            leaving.callback(self._ledger.close)
            self._become(Status.INITIALIZING)
            leaving.callback(self._listen(self.look))
            while self.outcome is None and not self._stopping.is_set():
                try:
                    self._patience.guard(self._once)
                except FenceLost as lost:
                    why = str(lost) or "the lease is lost; another process may own it now"
                    logger.warning("%s: %s", self._identity, why, extra=about(self._identity))
        except ConfigurationError as error:
            self.outcome = Outcome(2, str(error))
            logger.error("%s: %s", self._identity, error, extra=about(self._identity))  # noqa: TRY400 - a message, no bug
        except BaseException as error:
            self.outcome = Outcome(1, f"{type(error).__qualname__}: {error}")
            logger.exception("%s: the coordinator failed", self._identity, extra=about(self._identity))
            raise

    def _end(self) -> None:
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
        self._reporter.owns()
        self._reason = ""
        self._lost.clear()
        self._keeper = keeper = LeaseKeeper(
            self._open_ledger, claim, self._settings.lease_s, self._progress, self._lease_lost, identity=self._identity
        )
        try:
            keeper.start()
            self._own()
        except FenceLost:
            self._lost.set()
            raise
        finally:
            clean = False
            try:
                clean = self._end_term()
            finally:  # a keeper left behind would keep everybody else away for as long as the process lives
                keeper.stop()
                self._keeper = None
            if clean and not self._lost.is_set():
                self._patience.guard_exit(lambda: self._ledger.release(keeper.lease))

    def _own(self) -> None:
        """Follow the wish while the lease is ours. Returns when told to stop; raises FenceLost when it is not."""
        self._become(Status.INITIALIZING)
        self._wish_read_at = 0.0
        while not self._stopping.is_set():
            if self._lost.is_set():
                raise (self._keeper and self._keeper.error) or FenceLost
            self._patience.guard(self._turn)
            if self.outcome is not None:
                return
            self._wait_for_news(self._reporter.next_in_s(self._term, self._status) or WISH_EVERY_S / 2)

    def _turn(self) -> None:
        """What is looked at over and over: the term's health, the wish, and what there is to report."""
        self._look_after_term()
        self._fence_off()
        now = time.monotonic()
        if self._wished.is_set() or self._term is None or now - self._wish_read_at >= WISH_EVERY_S:
            self._wished.clear()  # before the look: what is wished from now on is a reason for another one
            orders = self._ledger.orders()
            self._follow(orders)
            self._reporter.waited_for(self._term, is_so=orders.waited_for)
            self._hand_out_wishes()
            self._wish_read_at = now
        self._reporter.report(self._ledger, self._lease, self._term, self._status, self._reason)
        if self._until_caught_up:
            self._leave_when_done()

    def _wait_for_news(self, seconds: float) -> None:
        self._tick.wait(seconds)
        self._tick.clear()

    @property
    def _lease(self) -> Lease:
        if self._keeper is None:
            raise FenceLost
        return self._keeper.lease

    # --- the wish -----------------------------------------------------------------------------------------

    def _follow(self, orders: Orders) -> None:
        if orders.halt_cause:
            self._end_term()
            self._show_halt(orders.halt_cause)
        elif orders.wish is Wish.STOPPED:
            if self._term is not None:
                self._become(Status.DRAINING)
                self._end_term()
                self._fence_off()
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
        """Give each operator's wish on a letter to the lane of its key, once until it is carried out; return their number."""
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
        self._term_began = time.monotonic()
        self._untold = None
        self._term = Term(
            self.projection, self._source, self._lease, resume, self._open_ledger, self._settings, self._tick.set
        )
        self._reporter.begin(self._term, resume.watermark)
        self._term.start()

    def _look_after_term(self) -> None:
        """Act on the error that ended a thread of the term, if one did."""
        term = self._term
        if term is None or term.error is None:
            return
        error = term.error
        self._end_term()
        if isinstance(error, FenceLost):
            raise error
        if isinstance(error, Halt):
            self._record_halt(error)  # raises the epoch by itself
        elif isinstance(error, SourceBusy):
            self._reason = f"standby: {error}"
            self._become(Status.STANDBY)
            self._reporter.standby(error.retry_in_s, error.holder)
            self._busy_until = time.monotonic() + error.retry_in_s
        else:
            self._patience.restart_after(error, time.monotonic() - self._term_began)

    def _fence_off(self) -> None:
        """A handler that did not come back may not commit beside a later term: take the segment again, under another epoch."""
        if self._late_under is self._lease and not self._stopping.is_set():
            raise FenceLost("takes the segment again: a handler that did not come back must not commit any more")

    def _record_halt(self, halt: Halt) -> None:
        """The lanes are quiet: record the halt and raise the epoch, so that nothing commits after it."""
        self._untold = halt  # if the answer is lost, the next look at the orders says whether it was recorded
        lease = self._ledger.halt(self._lease, str(halt), halt.label)
        if lease is None:
            raise FenceLost
        if self._keeper is not None:
            self._keeper.renew(lease)
        self._show_halt(str(halt))

    def _show_halt(self, cause: str) -> None:
        self._reason = cause
        self._become(Status.HALTED)
        halt, self._untold = self._untold, None
        if halt is not None:  # None: recorded by another process, or told already
            self._reporter.halted(halt)

    def _end_term(self) -> bool:
        """Drain: each worker commits what it has handled. False when a handler did not come back in time."""
        term, self._term = self._term, None
        if term is None:
            return True
        late = term.drain(self._drain_timeout_s, self._hurrying)
        if late:
            self._late_under = self._lease
            reason = f"still busy after {self._drain_timeout_s:g} s: {', '.join(late)}"
            extra = about(self._identity)
            logger.error("%s: %s; its transaction will be refused", self._identity, reason, extra=extra)
            if self._stopping.is_set():
                self.outcome = Outcome(1, reason)
            term.reader.leave()
        else:
            if not self._lost.is_set() and self._keeper is not None:
                last = functools.partial(self._reporter.save_last, self._ledger, self._lease, term)
                self._patience.guard_exit(lambda: last(self._status, self._reason))
            term.reader.leave(-1 if self._lost.is_set() else term.watermark)
        return not late

    def _progress(self) -> Progress:
        """What the heartbeat says; also called from the lease's thread."""
        return self._reporter.progress(self._term, self._shown_status, self._reason)

    def _leave_when_done(self) -> None:
        term = self._term
        if term is not None and term.is_caught_up and self._reporter.has_saved(term):
            if not self._hand_out_wishes():  # a replay that somebody asked for is work, too
                self.outcome = Outcome(0, "caught up")
        elif self._status is Status.HALTED:
            self.outcome = Outcome(1, self._reason)
        elif self._status in {Status.STOPPED, Status.PAUSED} and (term is None or term.in_flight == 0):
            self.outcome = Outcome(0, self._reason)

    # --- standby, backoff, end ----------------------------------------------------------------------------

    def _stand_by(self, holder: Holder) -> None:
        if self._status is not Status.STANDBY:
            extra = about(self._identity, owner=holder.owner)
            logger.info("%s: standby; %s owns it", self._identity, holder.owner, extra=extra)
        self._become(Status.STANDBY)
        self._reason = (
            f"owned by {holder.owner}; takes over when it leaves, or after {holder.expires_in_s:.1f} s of silence"
        )
        wait_s = min(STANDBY_EVERY_S, max(0.05, holder.expires_in_s))
        self._reporter.standby(wait_s, holder.owner)
        self._wait_for_news(wait_s)

    def _say(self, reason: str) -> None:
        self._reason = reason

    def _lease_lost(self) -> None:
        """Called by the keeper's thread: hand out nothing more."""
        self._lost.set()
        term = self._term
        if term is not None:
            term.close()
        self._tick.set()

    def _become(self, status: Status) -> None:
        if status is not self._status:
            self._status = step(self._status, status, self._identity)
            self._tell()
            self.changed()

    def _tell(self) -> None:
        """Let the tables say what changed, by the keeper: a change is acted on, and signalled, without a database, too."""
        keeper = self._keeper
        if keeper is not None:
            keeper.tell()
