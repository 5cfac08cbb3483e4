"""Events of the Python library ``eventsourcing``: an application's notification log as a source.

The log is read in pages through the recorder's own ``select_notifications``, never through the library's
subscriptions: those exist for some recorders only, do not reconnect, have no polling to fall back on, read ahead of
what is handled, and lose events where positions are committed out of order. Decoding happens in the workers
(:mod:`scriba.sources.eventsourcing_decoding`).

What always holds: a position is handed out only when everything below it is known. How that is known depends on the
recorder (:mod:`scriba.sources.eventsourcing_logs`), and where it cannot be known the source refuses to start.

The third-party package is imported absolutely and late: importing Scriba, or this module, never imports it.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

from django.core.checks import Error

from scriba.conf import scriba_settings
from scriba.exceptions import ConfigurationError, did_you_mean
from scriba.protocols import Head, Page, Shard
from scriba.sources.eventsourcing_applications import (
    ApplicationLoader,
    alias_problem,
    database_env,
    require_library,
    topics_of,
)
from scriba.sources.eventsourcing_decoding import MapperCodec
from scriba.sources.eventsourcing_errors import is_transient
from scriba.sources.eventsourcing_logs import Look, OrderedLog, SQLiteLog
from scriba.sources.eventsourcing_postgres import PostgresLog
from scriba.sources.starting import wait_for_start

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime

    from django.core.checks import CheckMessage
    from eventsourcing.application import Application

    from scriba.event import Event
    from scriba.protocols import Identity
    from scriba.sources.eventsourcing_logs import Log

__all__ = ["EventSourcingSource", "LogSubscription", "database_env"]

WAKEUPS: Final = ("listen", "poll")
GAPS: Final = ("auto", "ordered")
STARTS: Final = ("origin", "current")
HELD_BACK_S: Final = (
    0.005  #: half of the first wait while positions are held back: the end of a transaction need not send a notice
)
SHARE_IN_A_PAGE: Final = 4  #: a page may hold this part of the bytes in flight
FIRST_PAGE: Final = 100  #: rows, before anything is known about their weight
GROWTH: Final = 4  #: a page asks for at most so many times the rows of the one before

POSTGRES_RECORDER: Final = "eventsourcing.postgres.PostgresApplicationRecorder"
SQLITE_RECORDER: Final = "eventsourcing.sqlite.SQLiteApplicationRecorder"
MEMORY_RECORDER: Final = "eventsourcing.popo.POPOApplicationRecorder"
DJANGO_RECORDER: Final = "eventsourcing_django.recorders.DjangoApplicationRecorder"


class EventSourcingSource:
    """The notification log of an ``eventsourcing`` application.

    The handler gets the domain event itself: ``case Account.Opened(holder=holder): …``.

    `application`
        A subclass of ``eventsourcing.application.Application``, a path to one (``"school.application.School"``), or a
        callable without arguments that makes a new one. It is constructed by the runner, once per subscription and
        without creating tables; a factory should do the same (``env={"CREATE_TABLE": "no"}``).
    `env`
        Overrides of the application's environment, stronger than ``os.environ`` and than the class's own ``env``.
        Unless said here, the application is constructed with ``CREATE_TABLE=no``, ``POSTGRES_POOL_SIZE=1`` and
        ``POSTGRES_CONNECT_TIMEOUT=1``.
    `using`
        The Django database alias whose PostgreSQL holds the log, instead of ``POSTGRES_…`` settings: see
        :func:`database_env`, which is for the writing side.
    `topics`
        Topics or event classes to read, all by default. Others never leave the store, and still move the watermark.
        For a class that was renamed or moved, name its old topics too. (`event_types` of the projection compares the
        event's *type*: what follows the colon of the stored topic, under the name it was stored with.)
    `start_from`
        ``"origin"``, ``"current"``, or a notification id; the first event delivered is the one after it. *Current* is
        behind the last notification of the first look; on PostgreSQL :mod:`scriba.sources.starting` says what becomes
        of events that are in flight then.
    `wakeup`
        ``"listen"`` follows the notices that the library's PostgreSQL recorder sends, on a connection of its own, and
        polls besides; ``"poll"`` only polls. Recorders of other stores are polled.
    `gaps`
        How it is known that nothing is missing below a position. ``"auto"``: on the library's PostgreSQL recorder by
        evidence, always, because writers may be configured differently from us (with
        ``POSTGRES_ENABLE_DB_FUNCTIONS`` they commit out of order); ids without a gap need no evidence, so that costs
        nothing otherwise. On its SQLite recorder there is one writer at a time and nothing to check. Any other
        recorder needs your word: ``gaps="ordered"`` says that its store commits events in the order of their ids, as
        the documentation of UmaDB and KurrentDB does of theirs.
    `transient_errors`
        Exception classes of a third-party recorder that may go away by themselves (a lost connection), for example
        ``umadb.TransportError``. Known ones need not be named.

    ``meta``: `id` is ``originator_id:version``, `stream_id` the originator id, `stream_version` its version, `type`
    what follows the colon of the topic, `position` the notification id; `occurred_at` is the event's own timestamp
    (None when it has none with a zone, and when the application has a cipher: it is part of what is encrypted).
    ``meta.metadata`` has ``topic``, ``originator_version`` and ``application``. Upcasting, transcodings, compression
    and encryption are the application's own.

    With a cipher, dead letters keep the encrypted state and the topic, and decoding errors do not quote what was
    decrypted. What a handler writes into its own exceptions is the handler's business.
    """

    def __init__(  # noqa: PLR0913 - options of a source
        self,
        application: object,
        *,
        env: Mapping[str, str] | None = None,
        using: str | None = None,
        topics: Collection[Any] | None = None,
        start_from: str | int = "origin",
        wakeup: str = "listen",
        gaps: str = "auto",
        transient_errors: Collection[type[Exception]] = (),
    ) -> None:
        where = type(self).__name__
        self._loader = ApplicationLoader(application, env, where=where, using=using)
        self._using = using
        self._topics = topics_of(topics, where)
        self._start_from = checked_start(start_from, where)
        self._wakeup = _one_of(WAKEUPS, wakeup, f"{where}: wakeup")
        self._gaps = _one_of(GAPS, gaps, f"{where}: gaps")
        self._transient_errors = tuple(transient_errors)

    def subscribe(self, identity: Identity, shards: Sequence[Shard]) -> LogSubscription:
        """Construct the application and open its log."""
        with ExitStack() as opened:
            application = self._loader.construct()
            opened.callback(application.close)
            log = self._log_of(application, identity)
            opened.callback(log.close)
            codec = MapperCodec(application.mapper, application.name)
            subscription = LogSubscription(log, codec, shards[0], self._start_from, judge=self.transient)
            subscription.closing = opened.pop_all()
        return subscription

    def identity(self) -> str:
        """Name the log that is read: another application is another source, another server is not."""
        return f"eventsourcing:{self._loader.name()}"

    def checks(self) -> list[CheckMessage]:
        try:
            require_library()
        except ConfigurationError as error:
            return [Error(str(error), hint='pip install "scriba[eventsourcing]"', id="scriba.E201")]
        try:
            self._loader.find()
        except ConfigurationError as error:
            return [Error(str(error), hint="Give the application's class, or the path to it.", id="scriba.E202")]
        problem = alias_problem(self._using) if self._using else None
        return [Error(problem[0], hint=problem[1], id="scriba.E203")] if problem else []

    def transient(self, error: Exception) -> bool:
        """Say whether `error` may go away by itself: a lost or refused connection, a busy database."""
        return isinstance(error, self._transient_errors) or is_transient(error)

    def _log_of(self, application: Application[Any], identity: Identity) -> Log:
        """Choose how the recorder's positions are trusted, or refuse."""
        recorder: Any = application.recorder
        kinds = {f"{kind.__module__}.{kind.__qualname__}" for kind in type(recorder).__mro__}
        if POSTGRES_RECORDER in kinds:
            if self._gaps != "auto":
                msg = f"gaps={self._gaps!r}: gap checking cannot be switched off on the library's PostgreSQL recorder."
                raise ConfigurationError(msg)
            return PostgresLog(recorder, self._topics, listen=self._wakeup == "listen", name=str(identity))
        if SQLITE_RECORDER in kinds:
            return SQLiteLog(recorder, self._topics)
        if MEMORY_RECORDER in kinds:
            self._check_memory(application)
        elif DJANGO_RECORDER in kinds:
            msg = "applications on the Django extension are read with DjangoEventSourcingSource(application_name=…)."
            raise ConfigurationError(msg)
        elif self._gaps != "ordered":
            msg = (
                f"nothing is known about the order of positions in {type(recorder).__module__}.{type(recorder).__qualname__}. "
                "If its store commits events in the order of their ids, so that a smaller id never appears after a "
                'larger one, say gaps="ordered"; if it does not, it cannot be read without losing events.'
            )
            raise ConfigurationError(msg)
        return OrderedLog(recorder, self._topics)

    def _check_memory(self, application: Application[Any]) -> None:
        if not self._loader.is_factory():
            msg = (
                f"the application {application.name} keeps its events in the memory of the process that writes them, so a "
                "projection would see none. Set PERSISTENCE_MODULE in its environment (or in env=…), for example to "
                '"eventsourcing.postgres".'
            )
            raise ConfigurationError(msg)


class LogSubscription:
    """An open log, read page by page."""

    def __init__(
        self,
        log: Log,
        codec: MapperCodec,
        shard: Shard,
        start_from: str | int,
        *,
        judge: Callable[[Exception], bool],
    ) -> None:
        self._log = log
        self._codec = codec
        self._judge = judge
        self._appetite = FIRST_PAGE  #: rows to ask for
        self._held_back_s = HELD_BACK_S
        self._drained_at: float | None = None  #: when the last look was, if it found the end
        self.closing = ExitStack()  #: everything that ends with the subscription
        self._is_told_to_return = False
        self._after = -1
        #: to be found by the first fetch, or known already
        self._is_start_unknown = shard.resume is None and start_from == "current"
        if not self._is_start_unknown:
            self._after = (
                shard.resume if shard.resume is not None else -1 if start_from == "origin" else int(start_from)
            )
            self._log.check(self._after)
        self._head: tuple[int, datetime | None] = (-1, None)

    def _begin(self, timeout: float) -> None:
        self._is_told_to_return = self._is_told_to_return or timeout <= 0
        try:
            self._after = wait_for_start(
                self._log.current,
                pause=self._log.wait,
                may_wait=lambda: not self._is_told_to_return,
                waiting_for=self._log.waiting_for,
            )
        finally:
            self._is_told_to_return = False
        self._is_start_unknown = False

    def fetch(self, limit: int, timeout: float) -> Page:
        """See :class:`~scriba.protocols.Subscription`.

        After a look that has found the end, the next one comes `timeout` later, or when a notice does.
        With ``start_from="current"`` the first one takes as long as the writers that it meets, where positions can
        appear out of order; `wake` (and a `timeout` of 0) ends it with
        :class:`~scriba.sources.starting.StartUnknown`.
        """
        if self._is_start_unknown:
            self._begin(timeout)
        asked = min(limit, self._appetite)
        look = None
        if self._drained_at is not None:
            self._log.wait(self._drained_at + timeout - time.monotonic())
        else:
            look = self._log.look(self._after, asked)
            if not look.found and look.scanned <= self._after and timeout > 0:
                self._log.wait(self._pause(look, timeout))
                look = None
        if look is None:
            look = self._log.look(self._after, asked)
        events = [self._codec.event(stored, stored.id) for stored in look.found]
        kept = self._within_budget(events)
        if kept < len(events):
            look = Look(look.found[:kept], events[kept - 1].position, caught_up=False)
        if look.scanned > self._after:
            self._held_back_s = HELD_BACK_S
        self._after = look.scanned
        self._drained_at = time.monotonic() if look.caught_up else None
        return Page(events[:kept], look.scanned, look.caught_up)

    def _pause(self, look: Look, timeout: float) -> float:
        """Return how long to wait; while positions are held back, look again soon, and then less and less often."""
        if not look.blocked:
            return timeout
        self._held_back_s = min(self._held_back_s * 2, timeout)
        return self._held_back_s

    def _within_budget(self, events: Sequence[Event]) -> int:
        """Return how many of `events` fit into a page, at least one, and ask for more or fewer rows next time.

        A recorder can be asked for rows only, so pages begin small and grow with what rows have weighed so far.
        """
        budget = scriba_settings().max_bytes_in_flight // SHARE_IN_A_PAGE
        totals = list(accumulate(event.size for event in events))
        kept = max(1, bisect_right(totals, budget))
        if totals:
            fitting = budget * len(totals) // max(totals[-1], 1)
            self._appetite = max(1, min(fitting, self._appetite * GROWTH))
        return min(kept, len(events))

    def head(self, partition: str = "") -> Head | None:
        """Return the highest recorded position and its time; also the moment to notice that the log was replaced."""
        del partition
        if self._is_start_unknown:
            self._log.current()  # who writes now is waited for, and named
        self._log.check(self._after)
        position = self._log.head()
        if position is None:
            return None
        if position != self._head[0]:
            stored = self._log.at(position)
            self._head = (position, self._codec.event(stored, position).occurred_at if stored else None)
        return Head(position, self._head[1], self._log.waiting_for())

    def ack(self, watermark: int, partition: str = "") -> None:
        """Keep nothing: the library has no durable subscription, and the watermark is kept by Scriba."""

    def read(self, position: int, partition: str = "") -> Event | None:
        del partition
        stored = self._log.at(position)
        return self._codec.event(stored, position) if stored else None

    def restore(self, event: Event) -> Event:
        return self._codec.restore(event, self._log.original_id)

    def locate(
        self, event_id: str | None = None, stream_id: str | None = None, stream_version: int | None = None
    ) -> tuple[str, int] | None:
        if event_id is not None:
            stream_id, _, version = event_id.rpartition(":")
            stream_version = int(version) if version.isdecimal() else None
        if not stream_id or stream_version is None:
            return None
        position = self._log.locate(stream_id, stream_version)
        return None if position is None else ("", position)

    def transient(self, error: Exception) -> bool:
        return self._judge(error)

    def wake(self) -> None:
        self._is_told_to_return = True
        self._log.wake()

    def close(self) -> None:
        """Release the log and the application. Twice is fine: the second time, there is nothing left to close."""
        self.closing.close()


def checked_start(start_from: object, where: str) -> str | int:
    """Return `start_from`, or say what is accepted."""
    if start_from in STARTS or (isinstance(start_from, int) and not isinstance(start_from, bool) and start_from >= 0):
        return start_from
    msg = f"{where}: start_from must be 'origin', 'current', or a position of 0 or more, not {start_from!r}."
    raise ConfigurationError(msg)


def _one_of(accepted: Sequence[str], value: object, what: str) -> str:
    if value not in accepted:
        msg = f"{what}={value!r} is unknown{did_you_mean(str(value), accepted)}"
        raise ConfigurationError(msg)
    return str(value)
