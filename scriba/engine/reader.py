"""The reader: pulls pages in position order and routes their events to the lanes.

It stops pulling when a lane is full (back-pressure), when too many bytes are in flight, when paused, and when the
term ends. A position is handed out only below a ceiling that was raised durably before; a page counts as routed only
when its last event is in its lane. A subscription whose connection breaks is opened again behind the last routed
position, so nothing is skipped and nothing is read twice.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from scriba import signals
from scriba.engine.handling import DecodeFailed, exited, plain_text
from scriba.engine.lanes import Lane, Routed, Watermark
from scriba.engine.partitioner import lane_of, owns, owns_all
from scriba.engine.pipeline import BACKOFF_S, Halt
from scriba.engine.telemetry import send
from scriba.event import SkipEvent, ordering_key_in
from scriba.exceptions import SourceError
from scriba.log_fields import about
from scriba.protocols import FenceLost, Progress, Shard, SourceBusy, Status

if TYPE_CHECKING:
    from scriba.conf import Settings
    from scriba.event import Event
    from scriba.protocols import Head, Lease, Ledger, Page, Resume, Source, Subscription
    from scriba.registry import Projection

__all__ = ["CEILING_STEP", "Reader", "keyed"]

logger = logging.getLogger("scriba")

CEILING_STEP: Final = 50_000  #: positions promised ahead: one durable write per so many
PAGE: Final = 2_000  #: most events in one fetch
MAX_POSITION: Final = 2**63 - 1
BUSY_FOR_S: Final = 1.0  #: so long after the last event the fast poll is kept
HEAD_EVERY_S: Final = 1.0  #: how often the head is looked up, for the lag
_new: Final = tuple.__new__  #: past the generated constructor, which is Python: once for each event
BLOCKED_S: Final = 0.25  #: longest wait on a full lane before housekeeping


class Reader:
    """Runs in one thread, from the first fetch to the end of the term."""

    def __init__(  # noqa: PLR0913 - each is a collaborator of this term
        self,
        projection: Projection,
        source: Source,
        lease: Lease,
        resume: Resume,
        lanes: list[Lane],
        watermark: Watermark,
        open_ledger: Callable[[], Ledger],
        limits: Settings,
        on_change: Callable[[], None],
    ) -> None:
        self._projection = projection
        self._source = source
        # A source that cannot filter by type is filtered here; filtered positions move the watermark all the same.
        self._types = None if hasattr(source, "narrow") else projection.event_types
        self._lease = lease
        self._lanes = lanes
        self._watermark = watermark
        self._open_ledger = open_ledger
        self._limits = limits
        self._on_change = on_change
        self._first = resume.watermark is None
        self._resume = resume.watermark
        self._anchor = resume.anchor
        self._ceiling = -1
        self.subscription: Subscription | None = None  #: read by lanes for replays; None while reconnecting
        self._closing = threading.Event()
        self._running = threading.Event()
        self._ended = threading.Event()
        self._left = threading.Event()
        self._failures = 0
        self._acked = -1
        self._next_head = 0.0
        self._last_event = 0.0
        #: durable, kept up to date by the coordinator: what the source may be told
        self.saved_watermark = -1 if resume.watermark is None else resume.watermark
        self.head: Head | None = None
        self.caught_up = False
        self.problem = ""
        self.delivered = 0
        self.floor: int | None = None

    # --- called by the owner ------------------------------------------------------------------------------

    def run(self) -> None:
        """Read until :meth:`close`. Raises Halt, FenceLost or SourceBusy; a lost connection is repeated here."""
        ledger = self._open_ledger()
        try:
            while not self._closing.is_set():
                if self._running.wait(self._limits.idle_poll_s):
                    self._try_once(ledger)
                elif self.subscription is not None or self._failures:
                    self._attempt(self._stay, ledger)
        finally:
            ledger.close()
            self._ended.set()
            if self._left.is_set():
                self._close_subscription()

    def pause(self) -> None:
        """Take nothing new; what is in flight goes on."""
        self._running.clear()
        self._wake()

    def resume(self) -> None:
        self._running.set()

    def close(self) -> None:
        """Leave at the next opportunity. Any thread."""
        self._closing.set()
        self._running.set()
        self._wake()

    def leave(self, watermark: int = -1) -> None:
        """Tell the source the term's last watermark, and let it go: when the lanes have drained, not when reading ends.

        A source that is shared with another system hands over here: had it let go while events were in flight, the
        other side would begin before them.
        """
        subscription = self.subscription
        if subscription is not None and watermark > self._acked:
            try:
                subscription.ack(watermark, self._lease.partition)
            except Exception:  # the next owner begins at our own watermark, or above
                identity = self._projection.identity
                logger.warning(
                    "%s: the source did not learn the last watermark",
                    identity,
                    exc_info=True,
                    extra=about(identity, position=watermark),
                )
        self._left.set()
        if self._ended.is_set():
            self._close_subscription()

    # --- one fetch ----------------------------------------------------------------------------------------

    def _try_once(self, ledger: Ledger) -> None:
        self._attempt(lambda: self._read_page(ledger), ledger)

    def _stay(self) -> None:
        """Paused: be there for replays, and for who asks how far the source has got, also after an outage."""
        if self.subscription is None:
            self._subscribe()
            self.problem = ""
        self._housekeeping()
        self._failures = 0

    def _read_page(self, ledger: Ledger) -> None:
        """The steps of one page: look, promise, hand out, count as routed."""
        subscription = self.subscription or self._subscribe()
        self._housekeeping()
        if not self._room():
            return
        page = subscription.fetch(PAGE, self._poll_s())
        while not self._running.wait(self._limits.idle_poll_s):  # paused while it waited: what it found waits, too
            self._housekeeping()
        self._remember_anchor(ledger, subscription)
        self._remember_start(ledger, page)
        self._promise(ledger, page.scanned)
        if not self._route(page):
            return
        self._watermark.routed(page.scanned)
        self._resume = page.scanned
        if page.caught_up and not self.caught_up:
            self.caught_up = True
            self._on_change()
        self.caught_up = page.caught_up
        self.problem = ""
        self._failures = 0

    def _poll_s(self) -> float:
        busy = time.monotonic() - self._last_event < BUSY_FOR_S
        return self._limits.busy_poll_s if busy else self._limits.idle_poll_s

    def _room(self) -> bool:
        """Wait until the bytes in flight allow another page, or time for housekeeping has come."""
        if sum(lane.bytes for lane in self._lanes) < self._limits.max_bytes_in_flight:
            return True
        fullest = max(self._lanes, key=lambda lane: lane.bytes)
        fullest.wait_below(fullest.bytes, BLOCKED_S)
        return False

    def _remember_start(self, ledger: Ledger, page: Page) -> None:
        """Make the very first position durable before anything is handed out.

        Otherwise a crash before the first watermark would resolve ``start_from="current"`` a second time, later,
        and skip what came between.
        """
        if not self._first:
            return
        start = page.events[0].position - 1 if page.events else page.scanned
        if not ledger.save_watermark(self._lease, Progress(Status.RUNNING, watermark=start)):
            raise FenceLost
        self._first = False

    def _remember_anchor(self, ledger: Ledger, subscription: Subscription) -> None:
        """Keep what the source counts in, so that the next start can tell whether it still counts the same."""
        anchor = getattr(subscription, "anchor", lambda: "")()
        if anchor and anchor != self._anchor:
            if not ledger.save_anchor(self._lease, anchor):
                raise FenceLost
            self._anchor = anchor

    def _promise(self, ledger: Ledger, scanned: int) -> None:
        if scanned <= self._ceiling:
            return
        ceiling = min(scanned + CEILING_STEP, MAX_POSITION)
        if not ledger.raise_ceiling(self._lease, ceiling):
            raise FenceLost
        self._ceiling = ceiling

    # --- routing ------------------------------------------------------------------------------------------

    def _route(self, page: Page) -> bool:
        """Put every event into its lane; False when the term ended meanwhile (nothing is counted as routed then)."""
        if not page.events:
            return True
        self._last_event = time.monotonic()
        waiting = self._by_lane(page.events)
        self.delivered += sum(map(len, waiting.values()))
        timeout = 0.0
        while waiting:
            # Lanes with room first, so that one full lane never starves the others of a page that is here.
            waiting = {lane: items for lane, items in waiting.items() if not self._lanes[lane].put(items, timeout)}
            if self._closing.is_set():
                return False
            timeout = BLOCKED_S / len(waiting) if waiting else 0.0
            self._housekeeping()
        return True

    def _by_lane(self, events: Sequence[Event]) -> dict[int, list[Routed]]:
        """Return those of `events` that are wanted and belong to this segment, by the number of their lane."""
        types, projection, lease, count = self._types, self._projection, self._lease, len(self._lanes)
        found: list[list[Routed]] = [[] for _ in self._lanes]
        is_whole = owns_all(lease)
        for event in events:
            if types is None or event.type in types:
                routed = keyed(projection, event)
                if is_whole or owns(lease, routed.key):
                    found[lane_of(routed.key, count)].append(routed)
        return {lane: items for lane, items in enumerate(found) if items}

    # --- beside the events --------------------------------------------------------------------------------

    def _housekeeping(self) -> None:
        """Tell the source what is settled, and look how far it has got, now and then."""
        subscription = self.subscription
        if subscription is None:
            return
        if self.saved_watermark > self._acked:
            self._acked = self.saved_watermark
            subscription.ack(self._acked, self._lease.partition)
        now = time.monotonic()
        if now >= self._next_head:
            self._next_head = now + HEAD_EVERY_S
            self.head = subscription.head(self._lease.partition)

    # --- the subscription ---------------------------------------------------------------------------------

    def _subscribe(self) -> Subscription:
        # Not `_resume`: what was routed and is still in flight must not be taken for settled.
        settled = self.saved_watermark if self.saved_watermark >= 0 else None
        shard = Shard(
            self._lease.partition, self._lease.slice_from, self._lease.slice_to, self._resume, settled, self._anchor
        )
        subscription = self._source.subscribe(self._projection.identity, [shard])
        try:
            self.floor = getattr(subscription, "floor", lambda: None)()
        except BaseException:  # busy, or broken already: not a subscription that anybody should see
            subscription.close()
            raise
        self._acked = -1  # what the last subscription was told may not have reached the source
        self.subscription = subscription
        self._next_head = 0.0
        send(signals.source_subscribed, self._projection.identity, attempts=self._failures + 1)
        return subscription

    def _attempt(self, work: Callable[[], None], ledger: Ledger | None = None) -> None:
        """Do `work`; repeat what may go away by itself, with growing waits, and halt on everything else."""
        try:
            work()
        except (Halt, FenceLost, SourceBusy):
            raise
        except SourceError as error:
            raise Halt(str(error), "source") from error
        except Exception as error:
            if not self._may_pass(error, ledger):
                msg = f"the source cannot be read: {type(error).__qualname__}: {error}"
                raise Halt(msg, f"source:{type(error).__qualname__}") from error
            self._back_off(error)

    def _may_pass(self, error: Exception, ledger: Ledger | None) -> bool:
        subscription = self.subscription
        judge = subscription.transient if subscription is not None else getattr(self._source, "transient", None)
        return (judge is not None and judge(error)) or (ledger is not None and ledger.transient(error))

    def _back_off(self, error: Exception) -> None:
        self._close_subscription()
        wait_s = BACKOFF_S[min(self._failures, len(BACKOFF_S) - 1)]
        self._failures += 1
        self.caught_up = False
        self.problem = f"reconnecting to the source: {' '.join(str(error).split())}"
        identity = self._projection.identity
        logger.warning(
            "%s: the source is out of reach (%s); next try in %.1f s",
            identity,
            self.problem,
            wait_s,
            extra=about(identity, position=self._resume),
        )
        self._closing.wait(wait_s)

    def _close_subscription(self) -> None:
        subscription, self.subscription = self.subscription, None
        if subscription is not None:
            try:
                subscription.close()
            except Exception:  # a connection that broke is allowed to break again while it is closed
                logger.debug(
                    "closing the source's subscription failed", exc_info=True, extra=about(self._projection.identity)
                )

    def _wake(self) -> None:
        subscription = self.subscription
        if subscription is not None:
            subscription.wake()


def keyed(projection: Projection, event: Event) -> Routed:
    """Return `event` with its ordering key; an error of `partition_by` becomes that event's dead letter."""
    partition_by = projection.partition_by
    if partition_by is None:
        partition, stream_id = event.partition, event.stream_id
        return _new(Routed, (event, ordering_key_in(partition, stream_id) if partition else stream_id, None))
    try:
        key: object = partition_by(event)
        if not isinstance(key, str):
            msg = f"partition_by must return a string, not {key!r}"
            raise TypeError(msg)  # noqa: TRY301 - one event's fault, like any error of the callable
    except Exception as error:  # noqa: BLE001 - its lane makes a dead letter of it
        return Routed(event, ordering_key_in(event.partition, event.stream_id), _decoding_error(event) or error)
    except BaseException as error:  # noqa: BLE001 - likewise: the reader's thread is not the callable's to end
        left = exited("partition_by", error)
        left.__cause__ = error
        return Routed(event, ordering_key_in(event.partition, event.stream_id), left)
    return Routed(event, ordering_key_in(event.partition, key))


def _decoding_error(event: Event) -> DecodeFailed | None:
    """Tell a payload that cannot be decoded from a `partition_by` that is wrong about it: it names the letter's kind."""
    try:
        event.payload()
    except SkipEvent:
        return None
    except Exception as error:  # noqa: BLE001 - whatever the codec raises
        failed = DecodeFailed(plain_text(error))
        failed.__cause__ = error
        return failed
    return None
