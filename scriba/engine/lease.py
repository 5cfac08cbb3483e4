"""Keeping a lease alive, and noticing at once when it is gone.

A heartbeat every third of the lease goes over a ledger of its own, from a thread that does nothing else, so that
neither a slow handler nor a long query can let the lease run out. What changes in between is told by a heartbeat
before its time, so that a dead network never keeps the owner's own thread from acting on it. A second thread watches the local clock: when no
heartbeat has been confirmed for a whole lease (because it hangs in a dead network, too), another process may own the
segment by now, whatever our last answer was.

What always holds: the lease is counted from *before* the heartbeat was sent, so it ends here no later than in the
database; the loss is reported once, and never after :meth:`LeaseKeeper.stop`. Losing the lease is no danger to the
data (the fence is), only to the peace: nothing more should be handed out.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Final

from scriba.log_fields import about

if TYPE_CHECKING:
    from collections.abc import Callable

    from scriba.protocols import Identity, Lease, Ledger, Progress

__all__ = ["LeaseKeeper"]

logger = logging.getLogger("scriba")

BEATS_PER_LEASE: Final = 3
FIRST_RETRY_S: Final = 0.1  #: after a failed heartbeat; doubled up to the ordinary interval
RENEWAL_GRACE_S: Final = 0.2  #: a halt raises the epoch a moment before :meth:`LeaseKeeper.renew` says so
JOIN_S: Final = 2.0


class LeaseKeeper:
    """Owns two threads from :meth:`start` to :meth:`stop`. Its methods may be called from any thread.

    `progress` is asked for what each heartbeat reports, `on_lost` is told once when the lease is lost; both are
    called from the keeper's threads. `lease_s` and all times are seconds; `clock` is monotonic.
    """

    def __init__(  # noqa: PLR0913 - a lease, and its way to the world
        self,
        open_ledger: Callable[[], Ledger],
        lease: Lease,
        lease_s: float,
        progress: Callable[[], Progress],
        on_lost: Callable[[], None],
        *,
        identity: Identity,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._open_ledger = open_ledger
        self._lease = lease
        self._lease_s = lease_s
        self._progress = progress
        self._on_lost = on_lost
        self._identity = identity
        self._clock = clock
        self._held_until = clock() + lease_s
        self._failures = 0
        self._stopped = False
        self._is_lost = False
        self._has_news = False
        self.error: Exception | None = None  #: why no heartbeat will ever get through
        self._changed = threading.Condition()
        self._threads = [
            threading.Thread(target=work, name=f"scriba {identity} {role}", daemon=True)
            for role, work in (("lease", self._keep), ("lease-watch", self._watch))
        ]

    @property
    def lease(self) -> Lease:
        return self._lease

    @property
    def is_held(self) -> bool:
        """Whether nobody else can own the segment yet, as far as this process can know."""
        return not self._is_lost and self._clock() < self._held_until

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def renew(self, lease: Lease) -> None:
        """Go on under a new epoch, which the owner itself has raised (a halt does)."""
        with self._changed:
            self._lease = lease
            self._changed.notify_all()

    def tell(self) -> None:
        """Report the progress at once, by a heartbeat before its time. Never waits for the database."""
        with self._changed:
            self._has_news = True
            self._changed.notify_all()

    def stop(self) -> None:
        """End both threads. Idempotent. A heartbeat that hangs is left behind, and named."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        for thread in self._threads:
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(JOIN_S)
                if thread.is_alive():
                    extra = about(self._identity)
                    logger.warning(
                        "%s is late: its heartbeat hangs; it ends with its connection", thread.name, extra=extra
                    )

    def beat(self, ledger: Ledger) -> float | None:
        """Send one heartbeat; return the seconds until the next one, or None when there is none."""
        self._has_news = False  # before the look: what changes from now on is a reason for another heartbeat
        lease, sent_at = self._lease, self._clock()
        try:
            held = ledger.heartbeat(lease, self._lease_s, self._progress())
        except Exception as error:
            if ledger.transient(error):
                return self._failed(error)
            logger.exception("%s: the heartbeat failed for good", self._identity, extra=about(self._identity))
            self.error = error
            self._lose("the heartbeat failed for good")
            return None
        if held:
            return self._confirmed(sent_at)
        if self._renewed_since(lease):
            return 0.0
        self._lose("the segment has another epoch")
        return None

    def check(self) -> float | None:
        """Return the seconds for which the lease still holds; report the loss and return None when it does not."""
        left_s = self._held_until - self._clock()
        if left_s > 0:
            return left_s
        self._lose(f"no heartbeat was confirmed for {self._lease_s:g} s")
        return None

    # --- the two threads ------------------------------------------------------------------------------------

    def _keep(self) -> None:
        ledger = self._open_ledger()
        try:
            while self._is_on and (wait_s := self.beat(ledger)) is not None:
                self._rest(wait_s, lambda: self._has_news)
        finally:
            ledger.close()

    def _watch(self) -> None:
        while self._is_on and (left_s := self.check()) is not None:
            self._rest(left_s)

    @property
    def _is_on(self) -> bool:
        return not (self._stopped or self._is_lost)

    def _rest(self, seconds: float, is_over: Callable[[], bool] = lambda: False) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._is_on or is_over(), seconds)

    # --- what a heartbeat's answer means --------------------------------------------------------------------

    def _confirmed(self, sent_at: float) -> float:
        self._held_until = sent_at + self._lease_s
        self._failures = 0
        return self._lease_s / BEATS_PER_LEASE

    def _failed(self, error: Exception) -> float:
        """Try again soon: until the lease's time is over, nobody else can have taken it."""
        if not self._failures:
            cause = " ".join(str(error).split())
            extra = about(self._identity)
            logger.warning("%s: a heartbeat failed, trying again: %s", self._identity, cause, extra=extra)
        wait_s = FIRST_RETRY_S * 2.0**self._failures
        self._failures = min(self._failures + 1, 10)
        return min(wait_s, self._lease_s / BEATS_PER_LEASE)

    def _renewed_since(self, lease: Lease) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._lease is not lease or self._stopped, RENEWAL_GRACE_S)

    def _lose(self, reason: str) -> None:
        with self._changed:
            if not self._is_on:
                return
            self._is_lost = True
            self._changed.notify_all()
        logger.warning("%s: the lease is lost: %s", self._identity, reason, extra=about(self._identity))
        self._on_lost()
