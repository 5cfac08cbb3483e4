"""What the live page shows, read from the rows of every target alias: a handful of statements per database.

The page asks every few seconds, so nothing here may grow with the number of events: no list of streams, letters by
group, samples of one hour only. A database that is away is shown as such and does not hide the others.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from django.db import DEFAULT_DB_ALIAS, DatabaseError, connections

from scriba.audit import history
from scriba.checks import target_alias
from scriba.durations import duration
from scriba.panel.charts import Chart, Point, chart
from scriba.protocols import Identity, Status, Wish
from scriba.registry import all_projections

if TYPE_CHECKING:
    from scriba.models import Audit

__all__ = ["Card", "Group", "Sheet", "read_sheets", "target_aliases"]

HOUR_S: Final = 3600.0
_URGENT: Final = {"halted": 0, "not running": 1}  #: what needs somebody comes first,
_HELD_BACK: Final = 2  #: then what waits for something,
_CALM: Final = 3  #: then the rest
_EXCERPT: Final = re.compile(r"\s+LINE \d+: .*", re.DOTALL)
_HOLDER: Final = re.compile(r"\bprocess (\d+)\b")  #: as sources name who holds them back
MOST_GROUPS: Final = 50
MOST_ENTRIES: Final = 15


@dataclass(slots=True)
class Card:
    """One projection in one database."""

    alias: str
    name: str
    version: int
    status: str
    wish: str
    wish_by: str = ""
    wish_reason: str = ""
    halt_cause: str = ""
    halted_at: datetime | None = None
    owner: str = ""
    reason: str = ""
    watermark: int | None = None
    head: int | None = None
    rate: float = 0.0
    lag_seconds: float | None = None
    counters: dict[str, int] = field(default_factory=dict)
    letters: dict[str, int] = field(default_factory=dict)
    is_orphan: bool = False
    siblings: Sequence[int] = ()
    throughput: Chart = field(default_factory=Chart)
    lag: Chart = field(default_factory=Chart)

    @property
    def identity(self) -> str:
        return f"{self.name}:{self.version}"

    @property
    def css(self) -> str:
        return self.status.replace(" ", "-")

    @property
    def lag_events(self) -> int | None:
        return None if self.watermark is None or self.head is None else max(0, self.head - self.watermark)

    @property
    def lag_shown(self) -> str:
        """How far behind, in words. Who is halted or gone does not look at the source: its last word is a lower bound."""
        if self.lag_events is None:
            return "\N{EN DASH}"
        if self.is_at_work:
            return f"{self.lag_events:,} behind" if self.lag_events else "caught up"
        return f"\N{GREATER-THAN OR EQUAL TO} {self.lag_events:,} behind" if self.lag_events else "unknown"

    @property
    def cause_shown(self) -> str:
        """The cause of the halt without the excerpt of SQL that PostgreSQL draws an arrow under: there is no line to see."""
        return _EXCERPT.sub("", self.halt_cause)

    @property
    def is_at_work(self) -> bool:
        """Whether a live process looks at its source."""
        return bool(self.owner) and self.status != Status.HALTED

    @property
    def holder(self) -> str:
        """The database process that holds it back, where one is named."""
        found = _HOLDER.search(self.reason)
        return found[1] if found else ""

    @property
    def has_charts(self) -> bool:
        """Whether there is something to draw, or will be soon."""
        return bool(self.is_at_work or self.throughput.lines or self.lag.lines)

    @property
    def urgency(self) -> int:
        return _URGENT.get(self.status, _HELD_BACK if self.reason else _CALM)

    @property
    def lag_words(self) -> str:
        return "" if not self.lag_events or self.lag_seconds is None else duration(self.lag_seconds)

    @property
    def unresolved(self) -> int:
        return self.letters.get("open", 0) + self.letters.get("parked", 0)

    @property
    def actions(self) -> list[str]:
        """What may be asked of it in its present state."""
        if self.is_orphan:
            return [] if self.owner else ["forget"]
        if self.halt_cause:
            return ["start"] if self.wish == Wish.STOPPED else ["stop"]
        allowed = {Wish.RUNNING: ["pause", "stop"], Wish.PAUSED: ["resume", "stop"], Wish.STOPPED: ["start"]}
        at_rest = self.wish == Wish.STOPPED and (not self.owner or self.status == Status.STOPPED)
        return [*allowed[Wish(self.wish)], *(["reset"] if at_rest else [])]

    @property
    def is_calm(self) -> bool:
        return self.status == Status.RUNNING and not self.unresolved


@dataclass(slots=True)
class Group:
    """Equal failures."""

    alias: str
    identity: str
    kind: str
    type: str
    fingerprint: str
    status: str
    letters: int
    message: str
    first: Any
    last: Any


@dataclass(slots=True)
class Sheet:
    """One database: its projections, dead letters by group, and records; or why it cannot be read."""

    alias: str
    cards: list[Card] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)
    entries: list[Audit] = field(default_factory=list)
    problem: str = ""


def target_aliases() -> list[str]:
    """Return the databases that projections write to, the default one first and in any case."""
    return list(dict.fromkeys([DEFAULT_DB_ALIAS, *filter(None, map(target_alias, all_projections()))]))


def read_sheets() -> list[Sheet]:
    """Read every target alias. An alias without Scriba's tables is left out unless a projection writes to it."""
    sheets = []
    for alias in target_aliases():
        try:
            sheets.append(_sheet(alias))
        except DatabaseError as error:
            connections[alias].close_if_unusable_or_obsolete()
            sheets.append(Sheet(alias, problem=" ".join(str(error).split())))
    return [sheet for sheet in sheets if sheet.cards or sheet.problem or len(sheets) == 1]


def _sheet(alias: str) -> Sheet:
    cards = {(card.name, card.version): card for card in _cards(alias)}
    counted: dict[tuple[str, int], dict[str, int]] = defaultdict(dict)
    for name, version, status, number in _rows(alias, _LETTERS):
        counted[name, version][status] = number
    points = _points(alias)
    for key, card in cards.items():
        card.letters = {"open": 0, "parked": 0} | counted[key]
        card.siblings = sorted(version for name, version in cards if name == card.name and version != card.version)
        card.throughput, card.lag = (chart(line, span_s=HOUR_S) for line in points.get(key, ([], [])))
    groups = [Group(alias, f"{row[0]}:{row[1]}", *row[2:]) for row in _rows(alias, _GROUPS)]
    return Sheet(alias, list(cards.values()), groups, list(history(alias, most=MOST_ENTRIES)))


def _cards(alias: str) -> list[Card]:
    declared = {made.identity for made in all_projections() if target_alias(made) == alias}
    cards = [_card(alias, declared, *row) for row in _rows(alias, _STATES)]
    known = {Identity(card.name, card.version) for card in cards}
    cards += [Card(alias, *identity, str(Status.NOT_RUNNING), str(Wish.RUNNING)) for identity in declared - known]
    return sorted(cards, key=lambda card: (card.is_orphan, card.urgency, card.name, card.version))


def _card(alias: str, declared: set[Identity], name: str, version: int, *columns: Any) -> Card:
    wish, by, why, cause, halted_at, owner, is_live, status, reason, watermark, head, age_s, rate, *counters = columns
    shown = status if is_live else Status.NOT_RUNNING
    lag_s = 0.0 if watermark is not None and head is not None and head <= watermark else age_s
    return Card(
        alias, name, version, str(Status.HALTED if cause else shown), wish, by, why, cause, halted_at,
        owner=owner if is_live else "", reason=reason if is_live and not cause and wish == Wish.RUNNING else "",
        watermark=watermark, head=head if head is None or watermark is None else max(head, watermark),
        rate=rate if is_live else 0.0, lag_seconds=lag_s,
        counters=dict(zip(("applied", "skipped", "dead_lettered"), counters, strict=True)),
        is_orphan=Identity(name, version) not in declared,
    )  # fmt: skip


def _points(alias: str) -> dict[tuple[str, int], tuple[list[Point], list[Point]]]:
    """Return, by projection, events per second between samples, and the lag in events at each."""
    found: dict[tuple[str, int], tuple[list[Point], list[Point]]] = {}
    last: dict[tuple[str, int], tuple[float, int]] = {}
    for name, version, age_s, settled, behind in _rows(alias, _SAMPLES):
        rates, lags = found.setdefault((name, version), ([], []))
        then = last.get((name, version))
        if then is not None and then[0] > age_s:
            rates.append(Point(age_s, max(0, settled - then[1]) / (then[0] - age_s)))
        if behind is not None:
            lags.append(Point(age_s, behind))
        last[name, version] = (age_s, settled)
    return found


def _rows(alias: str, sql: str) -> list[tuple[Any, ...]]:
    with connections[alias].cursor() as cursor:
        cursor.execute(sql, {"hour_s": HOUR_S, "most": MOST_GROUPS})
        rows: list[tuple[Any, ...]] = cursor.fetchall()
    return rows


_STATES: Final = """
SELECT projection.projection_name, projection.projection_version, wish, wish_by, wish_reason, halt_cause, halted_at,
       COALESCE(owner, ''), COALESCE(owner <> '' AND lease_expires_at > clock_timestamp(), false),
       COALESCE(status, ''), COALESCE(reason, ''), watermark, head,
       EXTRACT(EPOCH FROM clock_timestamp() - watermark_at)::float8, COALESCE(rate, 0),
       COALESCE(counted.applied, 0)::bigint, COALESCE(counted.skipped, 0)::bigint,
       COALESCE(counted.dead_lettered, 0)::bigint
FROM scriba_projections AS projection
LEFT JOIN scriba_segments AS segment
       ON segment.projection_name = projection.projection_name
      AND segment.projection_version = projection.projection_version AND slice_from = 0
LEFT JOIN LATERAL (SELECT sum(applied) AS applied, sum(skipped) AS skipped, sum(dead_lettered) AS dead_lettered
                   FROM scriba_lanes WHERE segment_id = segment.id) AS counted ON true
"""
_LETTERS: Final = """
SELECT projection_name, projection_version, status, count(*) FROM scriba_dead_letters
WHERE status IN ('open', 'parked') GROUP BY 1, 2, 3
"""
_GROUPS: Final = """
SELECT projection_name, projection_version, error_kind, event_type, fingerprint, status, count(*),
       (array_agg(left(error_message, 300) ORDER BY id DESC))[1], min(occurred_at), max(occurred_at)
FROM scriba_dead_letters WHERE status IN ('open', 'parked')
GROUP BY 1, 2, 3, 4, 5, 6 ORDER BY 7 DESC, 10 DESC LIMIT %(most)s
"""
_SAMPLES: Final = """
SELECT projection_name, projection_version, EXTRACT(EPOCH FROM now() - taken_at)::float8, settled,
       GREATEST(head - watermark, 0)
FROM scriba_samples WHERE taken_at > now() - make_interval(secs => %(hour_s)s) ORDER BY taken_at
"""
