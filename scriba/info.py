"""What a projection is like right now, read from its rows: any process sees the same, whether the owner lives or not."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from django.db import DEFAULT_DB_ALIAS, connections

from scriba.protocols import Status, Wish
from scriba.registry import all_projections, find

if TYPE_CHECKING:
    from collections.abc import Mapping

    from scriba.protocols import Identity
    from scriba.registry import Projection

__all__ = ["Info", "ListedProjection", "State", "alias_of", "info", "list_projections", "read_state"]

MOST_STREAMS: Final = 1_000  #: so many stream positions are listed; there may be millions
COUNTERS: Final = ("applied", "skipped", "dead_lettered", "deduplicated", "unmatched")


@dataclass(frozen=True, slots=True)
class Info:
    """A projection at one moment. None means: not known (yet). Positions are the source's."""

    name: str
    version: int
    status: Status  #: what it is: ``not running`` when no live process owns it, ``halted`` whoever owns it
    wish: Wish  #: what it should be
    wish_by: str
    wish_reason: str
    reason: str  #: the owner's words: what it waits for, why it does nothing; empty when all is well
    owner: str  #: ``host:pid:token`` of the process that owns it; empty when none does
    source: str
    target: str
    halt_reason: str | None  #: the recorded cause of a halt
    halt_label: str | None  #: the same, short
    watermark: int | None  #: everything delivered at or below it is settled
    safe_position: int | None  #: the watermark, or the imported cursor where that is higher
    head: int | None  #: highest readable position of the source when the owner last looked
    lag: timedelta | None  #: age of the last settled event; zero when nothing is unsettled
    lag_seconds: float | None  #: the same in seconds
    lag_events: int | None  #: positions between watermark and head: at most so many events are unsettled
    rate: float  #: events settled per second, smoothed over the last seconds
    counters: Mapping[str, int]  #: applied, skipped, dead_lettered; deduplicated (part of skipped); unmatched
    dead_letters: Mapping[str, int]  #: letters by status: open, parked, replayed, discarded
    stream_positions: Mapping[str, int]  #: cursors by ordering key, the first 1,000
    stream_positions_cut: bool  #: whether there are more


class ListedProjection(NamedTuple):
    """One line of :func:`list_projections`."""

    name: str
    version: int
    status: Status


class State(NamedTuple):
    """A projection's rows, joined. `segment` is None when it never ran, `wish` is None when it has no row at all."""

    wish: Wish | None = None
    wish_by: str = ""
    wish_reason: str = ""
    halt_cause: str = ""
    halt_label: str = ""
    floor: int | None = None
    segment: int | None = None
    epoch: int = 0
    owner: str = ""
    is_live: bool = False
    owner_status: str = ""
    reason: str = ""
    watermark: int | None = None
    head: int | None = None
    age_s: float | None = None
    rate: float = 0.0

    @property
    def status(self) -> Status:
        if self.halt_cause:
            return Status.HALTED
        return Status(self.owner_status) if self.is_live else Status.NOT_RUNNING


def info(p: object) -> Info:
    """Return what the projection `p` is like. `p`: the decorated function, a name (version 1), or (name, version).

    Raises :class:`~scriba.exceptions.UnknownProjection`.
    """
    projection = find(p)
    alias = alias_of(projection)
    state = read_state(projection.identity, alias)
    positions = _stream_positions(projection.identity, alias)
    lag_seconds = _lag_seconds(state)
    return Info(
        name=projection.name,
        version=projection.version,
        status=state.status,
        wish=state.wish or Wish.RUNNING,
        wish_by=state.wish_by,
        wish_reason=state.wish_reason,
        reason=state.reason if state.is_live else "",
        owner=state.owner if state.is_live else "",
        source=projection.source.identity(),
        target=projection.target.identity(),
        halt_reason=state.halt_cause or None,
        halt_label=state.halt_label or None,
        watermark=state.watermark,
        safe_position=max((at for at in (state.watermark, state.floor) if at is not None), default=None),
        head=state.head,
        lag=None if lag_seconds is None else timedelta(seconds=lag_seconds),
        lag_seconds=lag_seconds,
        lag_events=_lag_events(state),
        rate=state.rate if state.is_live else 0.0,
        counters=_counters(state, alias),
        dead_letters=_dead_letters(projection.identity, alias),
        stream_positions=dict(positions[:MOST_STREAMS]),
        stream_positions_cut=len(positions) > MOST_STREAMS,
    )


def list_projections() -> list[ListedProjection]:
    """Return (name, version, status) of every registered projection, sorted."""
    return [
        ListedProjection(*projection.identity, read_state(projection.identity, alias_of(projection)).status)
        for projection in all_projections()
    ]


def alias_of(projection: Projection) -> str:
    """Return the database alias whose Scriba tables belong to `projection`: the one its target writes to."""
    return getattr(projection.target, "using", None) or DEFAULT_DB_ALIAS


def read_state(identity: Identity, alias: str) -> State:
    """Read the projection's rows, on the caller's own connection. The database's clock says whether a lease lives."""
    found = _rows(alias, _STATE, identity)
    if not found:
        return State()
    wish, *others = found[0]
    return State(Wish(wish), *others)


def _lag_events(state: State) -> int | None:
    if state.head is None or state.watermark is None:
        return None
    return max(0, state.head - state.watermark)


def _lag_seconds(state: State) -> float | None:
    if _lag_events(state) == 0:
        return 0.0
    return None if state.age_s is None else max(0.0, state.age_s)


def _counters(state: State, alias: str) -> dict[str, int]:
    sums = ", ".join(f"COALESCE(sum({name}), 0)::bigint" for name in COUNTERS)
    with connections[alias].cursor() as cursor:
        cursor.execute(f"SELECT {sums} FROM scriba_lanes WHERE segment_id = %s", [state.segment])
        return dict(zip(COUNTERS, cursor.fetchone() or (0,) * len(COUNTERS), strict=True))


def _dead_letters(identity: Identity, alias: str) -> dict[str, int]:
    from scriba.models import DeadLetter  # noqa: PLC0415 - needs the app registry

    counted = _rows(alias, _LETTERS, identity)
    return dict.fromkeys(DeadLetter.Status.values, 0) | dict(counted)


def _stream_positions(identity: Identity, alias: str) -> list[tuple[str, int]]:
    return [(key, position) for key, position in _rows(alias, _POSITIONS, identity)]


def _rows(alias: str, sql: str, identity: Identity) -> list[tuple[Any, ...]]:
    with connections[alias].cursor() as cursor:
        cursor.execute(sql, {"name": identity.name, "version": identity.version, "most": MOST_STREAMS + 1})
        rows: list[tuple[Any, ...]] = cursor.fetchall()
    return rows


_STATE: Final = """
SELECT projection.wish, wish_by, wish_reason, halt_cause, halt_label, floor, segment.id, COALESCE(epoch, 0),
       COALESCE(owner, ''), COALESCE(owner <> '' AND lease_expires_at > clock_timestamp(), false),
       COALESCE(status, ''), COALESCE(reason, ''), watermark, head,
       EXTRACT(EPOCH FROM clock_timestamp() - watermark_at)::float8, COALESCE(rate, 0)
FROM scriba_projections AS projection
LEFT JOIN scriba_segments AS segment USING (projection_name, projection_version)
WHERE projection_name = %(name)s AND projection_version = %(version)s
ORDER BY partition, slice_from LIMIT 1
"""
_LETTERS: Final = """
SELECT status, count(*) FROM scriba_dead_letters
WHERE projection_name = %(name)s AND projection_version = %(version)s GROUP BY status
"""
_POSITIONS: Final = """
SELECT stream_id, position FROM scriba_positions
WHERE projection_name = %(name)s AND projection_version = %(version)s ORDER BY stream_id LIMIT %(most)s
"""
