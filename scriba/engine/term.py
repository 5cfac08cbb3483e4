"""One term: the uninterrupted ownership of a segment under one epoch, with its reader, lanes and workers.

A term never outlives its lease and is never reused: after a lost lease, a crash of a thread or a change of the
database underneath, a new one is built from what is durable. The first thread that ends with an error closes the
term, the others finish the event at hand, commit, and leave.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from scriba.engine.circuit import Circuit
from scriba.engine.lanes import Lane, Routed, Watermark, linger_after
from scriba.engine.partitioner import lane_of
from scriba.engine.pipeline import LaneRun
from scriba.engine.reader import Reader
from scriba.engine.replay import Replayer
from scriba.engine.workers import Crew

if TYPE_CHECKING:
    from datetime import datetime

    from scriba.conf import Settings
    from scriba.protocols import Lease, Ledger, LetterWish, Resume, Source
    from scriba.registry import Projection

__all__ = ["Term", "narrowed"]

PAGES_PER_LANE = 2  #: queued batches per lane beyond which the reader waits


class Term:
    """Start it once, watch `error`, close it, join it."""

    def __init__(  # noqa: PLR0913 - everything one ownership needs
        self,
        projection: Projection,
        source: Source,
        lease: Lease,
        resume: Resume,
        open_ledger: Callable[[], Ledger],
        settings: Settings,
        on_change: Callable[[], None],
    ) -> None:
        self._projection = projection
        self._lease = lease
        self._resume = resume
        self._on_change = on_change
        self._closing = threading.Event()
        capacity = PAGES_PER_LANE * projection.batch_size
        self._lanes = [Lane(number, capacity) for number in range(projection.lanes)]
        self._circuit = Circuit()
        start = -1 if resume.watermark is None else resume.watermark
        self._watermark = Watermark(self._lanes, start)
        self._crew = Crew(str(projection.identity), self._thread_ended)
        self.reader = Reader(
            projection, source, lease, resume, self._lanes, self._watermark, open_ledger, settings, on_change
        )
        self._runs: dict[int, LaneRun] = {}
        self._wishes: set[int] = set()
        self._settled = [0] * projection.lanes
        self._settled_at: dict[int, tuple[int, datetime | None]] = {}
        self._problems: dict[int, str] = {}
        self.tells_all = False  #: report each commit, not only that everything is settled: somebody waits for one

    # --- life ---------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start one worker per lane, then the reader (paused until :meth:`resume`)."""
        for lane in self._lanes:
            self._crew.start(f"lane-{lane.number}", functools.partial(self._work, lane))
        self._crew.start("reader", self.reader.run)

    def pause(self) -> None:
        """Take nothing new; what is in flight is finished."""
        self.reader.pause()

    def resume(self) -> None:
        self.reader.resume()

    def close(self) -> None:
        """Begin to leave: no new event is handled; each worker commits what it has handled. Idempotent."""
        self._closing.set()
        self.reader.close()
        for lane in self._lanes:
            lane.close()

    def join(self, timeout: float) -> list[str]:
        """Wait for the threads; return the names of those still busy after `timeout` seconds."""
        return self._crew.join(timeout)

    def drain(self, timeout: float, hurrying: threading.Event) -> list[str]:
        """Close, and wait for the threads until `timeout` seconds are over or `hurrying` is set; return who is late."""
        self.close()
        deadline = time.monotonic() + timeout
        late = self.join(0.05)
        while late and time.monotonic() < deadline and not hurrying.is_set():
            late = self.join(0.1)
        return late

    # --- what the coordinator asks --------------------------------------------------------------------------

    @property
    def error(self) -> BaseException | None:
        """The first error that ended one of the threads."""
        return self._crew.error

    @property
    def in_flight(self) -> int:
        return sum(map(len, self._lanes))

    @property
    def is_caught_up(self) -> bool:
        """Whether the source was drained at the last look and everything of it is settled."""
        return self.reader.caught_up and self.in_flight == 0

    @property
    def watermark(self) -> int:
        return self._watermark.value()

    @property
    def problem(self) -> str:
        """What holds the projection up right now, in words; empty when nothing does."""
        stalled = self.reader.problem or next(iter(self._problems.copy().values()), "")
        return stalled or (self.reader.head.waiting_for if self.reader.head else "")

    @property
    def stalled_s(self) -> float:
        """Seconds since the last commit of the lane that has had unsettled events for longest; 0 when idle."""
        now, runs = time.monotonic(), self._runs.copy()
        busy = [runs[lane.number].last_commit for lane in self._lanes if len(lane) and lane.number in runs]
        return max((now - commit for commit in busy), default=0.0)

    @property
    def settled(self) -> int:
        """Events settled in this term, redelivered ones included."""
        return sum(self._settled)

    def time_at(self, watermark: int) -> datetime | None:
        """Return when the last settled event at or below `watermark` occurred, as far as this term knows."""
        known = [at for at in self._settled_at.copy().values() if at[0] <= watermark]
        return max(known, key=lambda at: at[0])[1] if known else None

    def resolve(self, wish: LetterWish) -> None:
        """Let the lane of the letter's key carry out `wish` between two of its batches, once at a time."""
        if wish.letter in self._wishes:
            return
        self._wishes.add(wish.letter)
        self._lanes[lane_of(wish.key, len(self._lanes))].post(wish)

    # --- the worker thread ----------------------------------------------------------------------------------

    def _work(self, lane: Lane) -> None:
        """Serve one lane until the term closes."""
        writer = self._projection.target.open(self._projection.identity)
        try:
            run = LaneRun(
                self._projection,
                writer,
                self._lease,
                lane.number,
                self._circuit,
                ceiling=self._resume.ceiling,
                floor=self._floor,
                stopping=self._closing.is_set,
            )
            self._runs[lane.number] = run
            replayer = Replayer(self._projection, writer, self._lease)
            linger_s = 0.0
            while (taken := lane.take(self._projection.batch_size, linger_s)) is not None:
                started = time.monotonic()
                settled = self._serve(lane, run, replayer, *taken)
                linger_s = linger_after(time.monotonic() - started, settled, len(lane))
        finally:
            writer.close()

    def _serve(
        self, lane: Lane, run: LaneRun, replayer: Replayer, wishes: Sequence[LetterWish], items: Sequence[Routed]
    ) -> int:
        """Carry out `wishes`, then one batch of `items`; return how many events were settled."""
        for wish in wishes:
            self._carry_out(replayer, wish)
        if not items:
            return 0
        step = run.step(items)
        if step.problem:
            self._problems[lane.number] = step.problem
        elif step.settled:
            self._problems.pop(lane.number, None)
        if step.settled:
            last = items[step.settled - 1].event
            self._settled_at[lane.number] = (last.position, last.occurred_at)
            lane.settle(step.settled)
            self._settled[lane.number] += step.settled
            if self.tells_all or not self.in_flight:
                self._on_change()
        if step.wait_s:
            self._closing.wait(step.wait_s)
        return step.settled

    def _carry_out(self, replayer: Replayer, wish: LetterWish) -> None:
        try:
            subscription = self.reader.subscription
            if subscription is not None and not self._closing.is_set():
                replayer.carry_out(wish, subscription)
        finally:
            self._wishes.discard(wish.letter)

    def _floor(self) -> int:
        return max(self._resume.floor, -1 if self.reader.floor is None else self.reader.floor)

    def _thread_ended(self) -> None:
        if self._crew.error is not None:
            self.close()
        self._on_change()


def narrowed(projection: Projection) -> Source:
    """Let the source filter by event type as early as it can, when it knows how."""
    narrow: Callable[[frozenset[str]], Source] | None = getattr(projection.source, "narrow", None)
    if narrow is None or projection.event_types is None:
        return projection.source
    return narrow(projection.event_types)
