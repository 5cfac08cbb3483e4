"""An open reading of an event table.

`fetch` and `head` go over a connection of the subscription's own, in autocommit: each statement sees what is committed
at that moment, whatever transaction the calling thread may be in. `read`, `locate` and `restore` use the calling
thread's connection.

What always holds: nothing at or below a handed-out `scanned` is ever handed out later, because `scanned` moves only
over numbers that follow without a hole and over what the horizon has settled; and a page is read after the evidence
that lets it pass, never before.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any, Final

import psycopg
from django.core.exceptions import ValidationError
from django.db import connections, models

from scriba.conf import scriba_settings
from scriba.connection import OwnConnection
from scriba.exceptions import ConfigurationError, SourceError
from scriba.listening import Ear
from scriba.protocols import Head, Page
from scriba.sources.horizon import NOTHING, Horizon, run_length
from scriba.sources.starting import CurrentStart, wait_for_start
from scriba.sources.table_facts import STANDBY_ID, look_at_table
from scriba.sources.table_reading import SourceAway, is_transient
from scriba.sources.table_statements import SEPARATOR

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from scriba.event import Event
    from scriba.protocols import Identity, Shard
    from scriba.sources.horizon import Relations
    from scriba.sources.table_reading import TableReading

__all__ = ["InlineSubscription", "TableSubscription"]

Rows = list[tuple[Any, ...]]

END: Final = 2**63 - 1  #: no upper bound
FIRST_ROWS: Final = 128  #: rows of the first page; doubled while pages are light, cut back when one is heavy
SCANNED_ROWS: Final = 20_000  #: rows that one page with a filter looks at
BLOCKED_POLL_S: Final = 0.01  #: the end of a foreign transaction sends no notice
BURNT_LOOK_S: Final = 0.1  #: how often an idle reader looks for numbers that were drawn and never used
PATIENCE: Final = 0.1  #: what waits long is looked at less often: this share of the time it has waited
SHARE_IN_A_PAGE: Final = 4  #: a page may hold this part of the bytes in flight
_WANTED: Final = -1  #: the column of a row that says whether the filters let it through
_SIZE: Final = 10


class _Reading:
    """What both kinds of subscription share: single events, by the calling thread's connection."""

    def __init__(self, reading: TableReading) -> None:
        self._reading = reading

    def ack(self, watermark: int, partition: str = "") -> None:
        """Keep nothing: an event table has no subscribers of its own."""

    def read(self, position: int, partition: str = "") -> Event | None:
        """Return the event at `position`, filtered out or not; None when there is none."""
        del partition
        with connections[self._reading.alias].cursor() as cursor:
            cursor.execute(self._reading.statements.one, {"position": position, "types": []})
            rows = cursor.fetchall()
        return next(iter(self._reading.shape.events(rows)), None)

    def restore(self, event: Event) -> Event:
        return self._reading.codec.restore(event)

    def locate(
        self, event_id: str | None = None, stream_id: str | None = None, stream_version: int | None = None
    ) -> tuple[str, int] | None:
        """Return ("", position) of an event by its id, or by stream and version; None while it is not visible."""
        fields = self._reading.fields
        if event_id is not None:
            ways = [{fields.id: event_id}]
        elif fields.stream_version is None or not fields.stream_id:
            raise ConfigurationError(_CANNOT_LOCATE.format(model=fields.model._meta.label))
        else:
            ways = [
                way | {fields.stream_version: stream_version} for way in _stream_ways(fields.stream_id, stream_id or "")
            ]
        rows: models.QuerySet[Any] = models.QuerySet(model=fields.model, using=self._reading.alias)
        for way in ways:
            if all(_fits(fields.field(path), value, self._reading.alias) for path, value in way.items()):
                position = rows.filter(**way).order_by().values_list(fields.position, flat=True).first()
                if position is not None:
                    return "", int(position)
        return None

    def transient(self, error: Exception) -> bool:
        return is_transient(error)


class TableSubscription(_Reading):
    """One run's reading. Nothing is opened before the first `fetch` or `head`: `wait_for` only locates."""

    def __init__(self, reading: TableReading, identity: Identity, shards: Sequence[Shard]) -> None:
        super().__init__(reading)
        self._identity = identity
        self._resume = shards[0].resume if shards else None
        self._connection = _PageConnection(reading.alias)
        self._hint = threading.Event()
        self._ear: Ear | None = None
        self._horizon: Horizon | None = None
        self._current: CurrentStart | None = None  #: while it is not known where to begin
        self._is_told_to_return = False
        self._after = NOTHING
        self._is_drained = False  #: the last look found nothing that it did not hand out
        self._rows = FIRST_ROWS
        self._budget = 0
        self._blocked_since: float | None = None
        self._looked_at = self._idle_since = self._looked_last = 0.0

    # --- protocol -----------------------------------------------------------------------------------------

    def fetch(self, limit: int, timeout: float) -> Page:
        """See :class:`~scriba.protocols.Subscription`. Raises :class:`~scriba.exceptions.SourceError` to halt.

        After a look that has found the end, the next one comes `timeout` later, or when a notice does: who polls looks
        every so often, however fast events come. With ``start_from="current"`` the first one takes as long as the writers that it meets; `wake` (and a `timeout`
        of 0) ends it with :class:`~scriba.sources.starting.StartUnknown`.
        """
        horizon = self._opened()
        if self._current is not None:
            self._begin(horizon, self._current, timeout)
        if self._is_drained:  # at once there would be next to nothing: what has come since is worth one look, not many
            self._rest(self._looked_last + timeout - time.monotonic())
            return self._look(horizon, limit)
        before = self._after
        page = self._look(horizon, limit)
        if page.scanned > before or timeout <= 0:
            return page
        self._rest(self._pause_s(timeout))
        return self._look(horizon, limit)

    def head(self, partition: str = "") -> Head | None:
        """Return the highest written position; `waiting_for` names who holds back what is not yet safe to read."""
        del partition
        horizon = self._opened()
        rows = self._connection.page(self._reading.statements.last, {"types": []})
        if not rows:
            return None
        position, occurred_at = rows[0]
        is_waiting = self._current is not None or self._blocked_since is not None
        return Head(position, occurred_at, horizon.waiting_for() if is_waiting else "")

    def wake(self) -> None:
        self._is_told_to_return = True
        self._hint.set()

    def close(self) -> None:
        self._hint.set()
        if self._ear is not None:
            self._ear.close()
        self._horizon = None
        self._connection.close()

    # --- opening ------------------------------------------------------------------------------------------

    def _opened(self) -> Horizon:
        """Make sure that evidence can be trusted here, and find where to begin."""
        if self._horizon is not None:
            return self._horizon
        if self._reading.listens and self._ear is None:  # before the first look: what comes after that is heard of
            self._ear = Ear(self._reading.alias, self._reading.channel, self._hint.set, str(self._identity))
            self._ear.start()
        relations = self._verified()
        horizon = Horizon(self._connection.rows, relations)
        self._budget = scriba_settings().max_bytes_in_flight // SHARE_IN_A_PAGE
        if self._resume is None and self._reading.start_from == "current":
            self._current = CurrentStart(self._connection.rows, relations, horizon)
            self._resume = self._current.position()
        elif self._resume is None:
            self._resume = self._start(horizon)
        if self._resume is not None:
            self._begin_after(horizon, self._resume)
        self._reading.was_read.set()
        self._horizon = horizon
        return horizon

    def _begin(self, horizon: Horizon, current: CurrentStart, timeout: float) -> None:
        self._is_told_to_return = self._is_told_to_return or timeout <= 0
        try:
            self._resume = wait_for_start(
                current.position,
                pause=self._rest,
                may_wait=lambda: not self._is_told_to_return,
                waiting_for=horizon.waiting_for,
            )
        finally:
            self._is_told_to_return = False
        self._begin_after(horizon, self._resume)

    def _begin_after(self, horizon: Horizon, position: int) -> None:
        self._current = None
        self._after = position
        horizon.check(position)
        horizon.advance(position)

    def _rest(self, longest_s: float) -> None:
        self._hint.wait(longest_s)
        self._hint.clear()

    def _verified(self) -> Relations:
        reading = self._reading
        facts = look_at_table(self._connection.rows, reading.fields, reading.alias, reading.sequence)
        if facts.relations is not None:
            return facts.relations
        message = " ".join(f"{problem.message} {problem.hint}" for problem in facts.errors)
        if reading.was_read.is_set() and any(problem.id == STANDBY_ID for problem in facts.errors):
            raise SourceAway(message)  # a fail-over: the alias will lead to a primary again
        raise SourceError(message)

    def _start(self, horizon: Horizon) -> int:
        start = self._reading.start_from
        if start == "origin":
            return NOTHING
        try:
            horizon.check(int(start))
        except SourceError as error:
            msg = f"start_from={start} lies beyond what the table has: {error}"
            raise SourceError(msg) from error
        return int(start)

    # --- one look -----------------------------------------------------------------------------------------

    def _look(self, horizon: Horizon, limit: int) -> Page:
        if self._reading.is_filtered and self._after < horizon.settled:
            return self._look_back(horizon, limit)
        is_probe = self._blocked_since is not None  # does it still wait? One row says so, not a page of payloads
        rows, is_cut = self._page(1 if is_probe else limit)
        ready = run_length(self._after, _positions(rows), horizon.settled)
        has_moved = ready == 0 and self._may_advance(bool(rows)) and horizon.advance(self._after)
        if has_moved or (is_probe and ready):
            rows, is_cut = self._page(limit)  # again: what was read before the evidence may lack what it settles
            ready = run_length(self._after, _positions(rows), horizon.settled)
        return self._handed_out(horizon, rows, ready, is_cut=is_cut)

    def _handed_out(self, horizon: Horizon, rows: Rows, ready: int, *, is_cut: bool) -> Page:
        is_complete = ready == len(rows)
        last = rows[ready - 1][0] if ready else self._after
        # A page that was not cut has shown everything up to the horizon, whether there was something or not.
        scanned = last if is_complete and is_cut else max(last, horizon.settled, self._after)
        self._looked_last = now = time.monotonic()
        if scanned > self._after:
            self._idle_since = self._blocked_since = now
        if is_complete:
            self._blocked_since = None
        elif self._blocked_since is None:
            self._blocked_since = now
        self._after = scanned
        self._is_drained = is_complete and not is_cut
        found = [row for row in rows[:ready] if row[_WANTED]] if self._reading.is_filtered else rows[:ready]
        return Page(self._reading.shape.events(found), scanned, caught_up=self._is_drained)

    def _look_back(self, horizon: Horizon, limit: int) -> Page:
        """Read what is settled: holes mean nothing there, so only what the filters let through leaves the server."""
        scope = {"after": self._after, "upto": horizon.settled}
        bound = self._connection.page(self._reading.statements.bound, {**scope, "rows": SCANNED_ROWS})
        upto = bound[0][0] if bound else horizon.settled
        rows, is_cut = self._page(limit, upto=upto, statement=self._reading.statements.wanted)
        self._after = rows[-1][0] if is_cut else upto
        self._idle_since, self._blocked_since, self._is_drained = time.monotonic(), None, False
        return Page(self._reading.shape.events(rows), self._after, caught_up=False)

    def _page(self, limit: int, *, upto: int = END, statement: str = "") -> tuple[Rows, bool]:
        """Read one page; return its rows and whether a bound of rows or bytes has cut it."""
        asked = min(limit, self._rows)
        parameters = {
            "after": self._after, "upto": upto, "limit": asked, "budget": self._budget, "types": self._reading.types,
        }  # fmt: skip
        rows = self._connection.page(statement or self._reading.statements.page, parameters)
        is_heavy = sum(row[_SIZE] for row in rows) >= self._budget
        self._rows = max(1, 2 * len(rows)) if is_heavy else max(FIRST_ROWS, 2 * asked)
        return rows, is_heavy or len(rows) == asked

    # --- patience -----------------------------------------------------------------------------------------

    def _may_advance(self, is_blocked: bool) -> bool:  # noqa: FBT001 - internal
        """Say whether to take evidence now: at once for rows that wait, now and then for numbers that are burnt."""
        now = time.monotonic()
        if not is_blocked and now - self._looked_at < max(BURNT_LOOK_S, min(1.0, PATIENCE * (now - self._idle_since))):
            return False
        self._looked_at = now
        return True

    def _pause_s(self, timeout: float) -> float:
        if self._blocked_since is None:
            return timeout
        return min(timeout, max(BLOCKED_POLL_S, PATIENCE * (time.monotonic() - self._blocked_since)))


class InlineSubscription(_Reading):
    """Reads in the calling thread, on its own connection, inside the transaction it is in: for tests.

    Without the horizon, because the rows of one's own transaction are visible and in order. Every reading begins at the
    origin unless `start_from` is a position: in a test, *current* would be after everything.
    """

    def __init__(self, reading: TableReading, shards: Sequence[Shard]) -> None:
        super().__init__(reading)
        start = reading.start_from
        resume = shards[0].resume if shards else None
        self._after = resume if resume is not None else int(start) if isinstance(start, int) else NOTHING

    def fetch(self, limit: int, timeout: float) -> Page:
        """Return what is visible; never waits."""
        del timeout
        reading = self._reading
        parameters: dict[str, Any] = {
            "after": self._after, "upto": END, "limit": limit, "budget": END, "types": reading.types,
        }  # fmt: skip
        with connections[reading.alias].cursor() as cursor:
            cursor.execute(reading.statements.page, parameters)
            rows = cursor.fetchall()
        if rows:
            self._after = rows[-1][0]
        return Page(reading.shape.events(row for row in rows if row[_WANTED]), self._after, caught_up=len(rows) < limit)

    def head(self, partition: str = "") -> Head | None:
        del partition
        with connections[self._reading.alias].cursor() as cursor:
            cursor.execute(self._reading.statements.last, {"types": []})
            row = cursor.fetchone()
        return None if row is None else Head(row[0], row[1])

    def wake(self) -> None:
        """Nothing waits here."""

    def close(self) -> None:
        """The connection is the test's."""


class _PageConnection(OwnConnection):
    """A connection that reads pages: binary, past Django's cursor, whose Python-made times cost more than the rest."""

    def page(self, statement: str, parameters: dict[str, Any]) -> Rows:
        """Execute one statement with named parameters and return its rows."""
        with self._minded():
            wrapper = self._open()
            wrapper.ensure_connection()
            with psycopg.Cursor(wrapper.connection) as cursor:
                return cursor.execute(statement, parameters, prepare=False, binary=True).fetchall()


# --- helpers --------------------------------------------------------------------------------------------


def _positions(rows: Rows) -> list[int]:
    return [row[0] for row in rows]


def _stream_ways(paths: tuple[str, ...], stream_id: str) -> Iterator[dict[str, Any]]:
    """Yield the ways in which `stream_id` may be made of the columns `paths`: their values may hold the separator."""
    first, *rest = paths
    if not rest:
        yield {first: stream_id}
        return
    pieces = stream_id.split(SEPARATOR)
    for cut in range(1, len(pieces)):
        for way in _stream_ways(tuple(rest), SEPARATOR.join(pieces[cut:])):
            yield {first: SEPARATOR.join(pieces[:cut]), **way}


def _fits(field: Any, value: object, alias: str) -> bool:
    """Say whether `value` can be a value of `field`: a text that is no UUID names no event, and no error."""
    target = field.target_field if field.is_relation else field
    try:
        target.get_db_prep_value(target.to_python(value), connections[alias])
    except (ValidationError, ValueError, TypeError, OverflowError):
        return False
    return True


_CANNOT_LOCATE: Final = (
    "an event of {model} cannot be found by stream and version: the source knows no field of the version "
    "(stream_version=…), or computes the stream id. Use position=… or event_id=…."
)
