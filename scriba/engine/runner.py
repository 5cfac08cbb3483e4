"""One process: a coordinator per projection, OS signals, and the exit code.

The main thread only waits: a signal handler sets a flag and never raises, because an exception inside COMMIT would
lose the commit. The first SIGTERM or SIGINT drains; the second leaves without waiting for handlers. Neither changes
what operators wish.
"""

from __future__ import annotations

import functools
import logging
import os
import secrets
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from scriba.conf import scriba_settings
from scriba.engine.coordinator import Coordinator
from scriba.engine.states import Outcome, Snapshot
from scriba.exceptions import ConfigurationError, ProjectionHalted
from scriba.log_fields import about
from scriba.protocols import Ledger, Wish

if TYPE_CHECKING:
    from collections.abc import Iterator

    from scriba.protocols import Identity
    from scriba.registry import Projection

__all__ = ["Fleet", "RunningProjection", "run", "start_in_background"]

logger = logging.getLogger("scriba")

PROGRESS_EVERY_S: Final = 0.2


def run(  # noqa: PLR0913 - the options of run_projections
    projections: Sequence[Projection],
    *,
    until_caught_up: bool = False,
    drain_timeout_s: float | None = None,
    start: bool = False,
    start_by: str = "",
    on_progress: Callable[[list[Snapshot]], None] | None = None,
    install_signals: bool = True,
    on_start: Callable[[Fleet], None] | None = None,
    open_ledger: Callable[[Projection], Ledger] | None = None,
) -> int:
    """Run `projections` until they end or the process is told to; return the exit code.

    With `start` they are wished *running* first, by `start_by`.

    0: drained; 1: a projection halted, failed, or did not drain in time; 2: a configuration error.
    """
    fleet = Fleet(
        projections, until_caught_up=until_caught_up, drain_timeout_s=drain_timeout_s, open_ledger=open_ledger
    )
    if on_start is not None:
        on_start(fleet)
    if start:
        fleet.wish_running(by=start_by)
    with _signals(fleet) if install_signals else _no_signals():
        fleet.start()
        while not fleet.wait(PROGRESS_EVERY_S):
            if on_progress is not None:
                on_progress(fleet.snapshots())
        if on_progress is not None:
            on_progress(fleet.snapshots())
    return fleet.exit_code


def start_in_background(
    projection: Projection,
    *,
    by: str = "",
    until_caught_up: bool = False,
    open_ledger: Callable[[Projection], Ledger] | None = None,
) -> RunningProjection:
    """Wish *running*, run `projection` in threads of this process, and return its handle."""
    fleet = Fleet([projection], until_caught_up=until_caught_up, open_ledger=open_ledger)
    fleet.wish_running(by=by)
    fleet.start()
    return RunningProjection(fleet)


class Fleet:
    """The coordinators of one process."""

    def __init__(
        self,
        projections: Sequence[Projection],
        *,
        until_caught_up: bool = False,
        drain_timeout_s: float | None = None,
        open_ledger: Callable[[Projection], Ledger] | None = None,
    ) -> None:
        settings = scriba_settings()
        self._open_ledger = open_ledger or _ledger_of
        listen = _listen if open_ledger is None else None  # a ledger of another kind has no channel
        self._projections = list(projections)
        self._changed = threading.Event()
        self._requested = 0
        self._answered = 0
        owner = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(3)}"
        self.coordinators = [
            Coordinator(
                projection,
                open_ledger=_opener(self._open_ledger, projection),
                settings=settings,
                owner=owner,
                until_caught_up=until_caught_up,
                drain_timeout_s=drain_timeout_s,
                listen=functools.partial(listen, projection) if listen is not None else None,
            )
            for projection in projections
        ]
        for coordinator in self.coordinators:
            coordinator.changed = self._changed.set
        self._threads = [
            threading.Thread(
                target=_quietly(coordinator.run, coordinator.projection.identity),
                name=f"scriba {coordinator.projection.identity} coordinator",
                daemon=True,
            )
            for coordinator in self.coordinators
        ]

    def wish_running(self, *, by: str = "") -> None:
        """Set the wish *running* for all (a start after a stop leaves a halt behind); `by` is recorded."""
        for projection in self._projections:
            ledger = self._open_ledger(projection)
            try:
                ledger.set_wish(
                    Wish.RUNNING, by=by or f"process {os.getpid()} on {socket.gethostname()}", reason="started"
                )
            finally:
                ledger.close()

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def request_stop(self) -> None:
        """Ask for :meth:`stop` from a signal handler: a counter only, because even ``Event.set`` takes a lock that
        the interrupted main thread may hold. :meth:`wait` acts on it.
        """
        self._requested += 1

    def stop(self, *, hurry: bool = False) -> None:
        """Drain all; with `hurry`, leave without waiting for handlers. Idempotent."""
        for coordinator in self.coordinators:
            coordinator.stop(hurry=hurry)
        self._changed.set()

    def wait(self, timeout: float | None) -> bool:
        """Wait at most `timeout` seconds for the end of all (None: for ever); say whether it has come."""
        while self._answered < self._requested:
            self._answered += 1
            self.stop(hurry=self._answered > 1)
        if self.has_ended:
            return True
        if timeout is None:
            for coordinator in self.coordinators:
                coordinator.ended.wait()
            return True
        self._changed.wait(timeout)
        self._changed.clear()
        return self.has_ended

    @property
    def has_ended(self) -> bool:
        return all(coordinator.ended.is_set() for coordinator in self.coordinators)

    def snapshots(self) -> list[Snapshot]:
        return [coordinator.snapshot() for coordinator in self.coordinators]

    @property
    def outcomes(self) -> list[Outcome]:
        return [coordinator.outcome or Outcome(0) for coordinator in self.coordinators]

    @property
    def exit_code(self) -> int:
        """The worst of the outcomes; a projection that is halted when the process ends counts as one."""
        return max((outcome.code for outcome in self.outcomes), default=0)


class RunningProjection:
    """The handle that :func:`scriba.start_projection` returns. Leaving its ``with`` block stops it."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._coordinator = fleet.coordinators[0]

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the end; False when it has not come after `timeout` seconds.

        Raises :class:`~scriba.exceptions.ProjectionHalted` or :class:`~scriba.exceptions.ConfigurationError` when
        that is how it ended.
        """
        if not self._coordinator.ended.wait(timeout):
            return False
        outcome = self._fleet.outcomes[0]
        if outcome.code == 2:  # noqa: PLR2004 - the exit code of a wrong configuration
            raise ConfigurationError(outcome.reason)
        if outcome.code:
            raise ProjectionHalted(outcome.reason)
        return True

    def stop(self, timeout: float | None = None) -> None:
        """Drain and leave. Idempotent; does not change the wish. Raises what :meth:`wait` raises."""
        if not self._coordinator.ended.is_set():
            self._fleet.stop()
        self.wait(timeout)

    def snapshot(self) -> Snapshot:
        """Return how far it is, as this process knows it."""
        return self._coordinator.snapshot()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.stop()
            return
        self._fleet.stop()
        self._coordinator.ended.wait()


@contextmanager
def _signals(fleet: Fleet) -> Iterator[None]:
    """Let SIGTERM and SIGINT drain the fleet. Only the main thread may install handlers; others run without."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {
        number: signal.signal(number, lambda *_: fleet.request_stop()) for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _no_signals() -> Iterator[None]:
    yield


def _opener(open_ledger: Callable[[Projection], Ledger], projection: Projection) -> Callable[[], Ledger]:
    return lambda: open_ledger(projection)


def _ledger_of(projection: Projection) -> Ledger:
    from scriba.ledger import PgLedger  # noqa: PLC0415 - the engine's only door to the database side

    target: Any = projection.target
    return PgLedger(projection.identity, target.using)


def _listen(projection: Projection, look: Callable[[], None]) -> Callable[[], None]:
    """Let `look` be called when somebody wishes something of `projection`; return what ends that."""
    from scriba.ledger import wish_board  # noqa: PLC0415 - the engine's only door to the database side

    target: Any = projection.target
    return wish_board(target.using).join(str(projection.identity), look)


def _quietly(run_coordinator: Callable[[], None], identity: Identity) -> Callable[[], None]:
    """The coordinator has logged and recorded its error; a second traceback from the thread would only repeat it."""

    def quiet() -> None:
        try:
            run_coordinator()
        except Exception:  # recorded in the outcome
            logger.debug("a coordinator ended with an error", exc_info=True, extra=about(identity))

    return quiet
