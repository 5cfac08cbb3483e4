"""Cursors, and the counters of a lane: one statement per batch, over sorted arrays, in the batch's transaction.

What always holds: a cursor row is written only if it stands *before* the first position that this batch settles for
its key ("forward" is not enough: a batch whose COMMIT lost its answer, repeated as part of a larger one, moves forward
and applies twice), and either all of a batch's cursors are written or :class:`~scriba.protocols.CursorRefused` is
raised. Nobody waits for another's cursors: a key is one lane's, and a takeover ends every older transaction first. A batch
may meet its own last try, whose connection broke while the server was at it. Keys are sorted, so that the two rarely
deadlock; a join may take them in another order, and then one of them is repeated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from scriba.event import storable_key
from scriba.protocols import CursorRefused

if TYPE_CHECKING:
    from django.db.backends.utils import CursorWrapper

    from scriba.protocols import CursorMove, Identity, Settlement
    from scriba.round_trips import Script

__all__ = [
    "applied_position", "array_of", "begin_to_settle", "cursors_of", "raise_applied", "settle_the_rest",
]  # fmt: skip


def cursors_of(cursor: CursorWrapper, identity: Identity, keys: Sequence[str]) -> dict[str, int]:
    """Return the durable cursors of those of `keys` that have one."""
    by_stored = {storable_key(key): key for key in keys}
    cursor.execute(_FIND, {**_named(identity), "keys": array_of(list(by_stored))})
    return {by_stored[stored]: position for stored, position in cursor.fetchall()}


class Moved:
    """What the first statements of a settlement found: cursors that they moved, and whether the lane has counters."""

    def __init__(self) -> None:
        self.cursors = 0
        self.has_counters = True

    def read(self, cursor: CursorWrapper) -> None:
        self.cursors = cursor.rowcount

    def read_counters(self, cursor: CursorWrapper) -> None:
        self.has_counters = cursor.rowcount > 0


def begin_to_settle(script: Script, identity: Identity, settlement: Settlement) -> Moved:
    """Let `script` move every cursor that is there, and count the batch's events; follow with :func:`settle_the_rest`."""
    moved = Moved()
    named, moves = _named(identity), settlement.moves
    if len(moves) == 1:
        script.add(_MOVE_ONE, named | moves[0]._asdict() | {"key": storable_key(moves[0].key)}, moved.read)
    elif moves:
        script.add(_MOVE, named | _arrays(moves), moved.read)
    if any(_counted(settlement).values()):
        script.add(_COUNT, _counters(settlement), moved.read_counters)
    return moved


def settle_the_rest(cursor: CursorWrapper, identity: Identity, settlement: Settlement, moved: Moved) -> None:
    """Do what the first statement could not: usually nothing. Raises :class:`CursorRefused` when a cursor will not move.

    A key without a cursor costs one statement more, a lane without counters too, and writes that found no row: they are
    known when the script has run.
    """
    moves = settlement.moves
    if moved.cursors != len(moves):
        cursor.execute(_ADD, _named(identity) | _arrays(moves))
        written = moved.cursors + cursor.rowcount
        if written != len(moves):
            raise CursorRefused(f"{len(moves) - written} of {len(moves)} cursors stand elsewhere")
    if not moved.has_counters:
        cursor.execute(_OPEN, _counters(settlement))
    elif settlement.counters.unmatched:
        cursor.execute(_COUNT_UNMATCHED, _counters(settlement))


def _counters(settlement: Settlement) -> dict[str, int]:
    return _counted(settlement) | {"segment": settlement.segment, "lane": settlement.lane}


def _counted(settlement: Settlement) -> dict[str, int]:
    return {name: getattr(settlement.counters, name) for name in _COUNTERS}


def raise_applied(cursor: CursorWrapper, identity: Identity, move: CursorMove) -> None:
    """Remember that an event of the key was applied later, by a replay. The cursor itself stays."""
    cursor.execute(_RAISE_APPLIED, {**_named(identity), "key": storable_key(move.key), "applied": move.applied})


def applied_position(cursor: CursorWrapper, identity: Identity, key: str) -> int:
    """Return the last position of `key` that was applied; -1 when none was."""
    cursor.execute(_APPLIED, {**_named(identity), "key": storable_key(key)})
    row = cursor.fetchone()
    return int(row[0]) if row else -1


def array_of(values: Sequence[str | int | None]) -> str:
    """Return an array literal (cast it): joined by hand, because a driver's dumper costs a microsecond per value."""
    return "{" + ",".join([_element(value) for value in values]) + "}"


def _element(value: str | int | None) -> str:
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return "NULL" if value is None else str(value)


def _arrays(moves: Sequence[CursorMove]) -> dict[str, str]:
    rows = sorted((storable_key(move.key), move.first, move.last, move.applied) for move in moves)
    keys, firsts, lasts, applied = zip(*rows, strict=True) if rows else ((), (), (), ())
    return {"keys": array_of(keys), "firsts": array_of(firsts), "lasts": array_of(lasts), "applieds": array_of(applied)}


def _named(identity: Identity) -> dict[str, Any]:
    return {"name": identity.name, "version": identity.version}


_COUNTERS: Final = ("applied", "skipped", "dead_lettered", "deduplicated", "unmatched")

_FIND: Final = """
SELECT stream_id, position FROM scriba_positions
WHERE projection_name = %(name)s AND projection_version = %(version)s AND stream_id = ANY(%(keys)s::text[])
"""

#: Saying the keys twice keeps the look-ups on the index, also when the table has grown a millionfold since its last
#: ANALYZE.
_MOVE: Final = """
WITH given AS MATERIALIZED (
  SELECT * FROM unnest(%(keys)s::text[], %(firsts)s::bigint[], %(lasts)s::bigint[], %(applieds)s::bigint[])
    AS given (key, first, last, applied)
)
UPDATE scriba_positions AS known
SET position = given.last, applied_position = GREATEST(known.applied_position, given.applied), updated_at = now()
FROM given
WHERE known.projection_name = %(name)s AND known.projection_version = %(version)s
  AND known.stream_id = given.key AND known.stream_id = ANY(%(keys)s::text[]) AND known.position < given.first
"""

#: The same for one key, which the server plans in a fifth of the time: what an event costs that comes alone.
_MOVE_ONE: Final = """
UPDATE scriba_positions
SET position = %(last)s, applied_position = GREATEST(applied_position, %(applied)s), updated_at = now()
WHERE projection_name = %(name)s AND projection_version = %(version)s
  AND stream_id = %(key)s AND position < %(first)s
"""

_COUNT: Final = """
UPDATE scriba_lanes
SET applied = applied + %(applied)s, skipped = skipped + %(skipped)s,
    dead_lettered = dead_lettered + %(dead_lettered)s, deduplicated = deduplicated + %(deduplicated)s
WHERE segment_id = %(segment)s AND lane = %(lane)s
"""

#: After `_MOVE`: a cursor that it moved, or that stands elsewhere, is in the way here, and not counted.
_ADD: Final = """
INSERT INTO scriba_positions (projection_name, projection_version, stream_id, position, applied_position, updated_at)
SELECT %(name)s, %(version)s, key, last, applied, now()
FROM unnest(%(keys)s::text[], %(lasts)s::bigint[], %(applieds)s::bigint[]) AS given (key, last, applied)
ORDER BY key
ON CONFLICT (projection_name, projection_version, stream_id) DO NOTHING
"""

#: A lane's first batch; only a lane that is being opened at this very moment can stand in its way.
_OPEN: Final = """
INSERT INTO scriba_lanes AS known (segment_id, lane, applied, skipped, dead_lettered, deduplicated, unmatched)
VALUES (%(segment)s, %(lane)s, %(applied)s, %(skipped)s, %(dead_lettered)s, %(deduplicated)s, %(unmatched)s)
ON CONFLICT (segment_id, lane) DO UPDATE
SET applied = known.applied + excluded.applied, skipped = known.skipped + excluded.skipped,
    dead_lettered = known.dead_lettered + excluded.dead_lettered,
    deduplicated = known.deduplicated + excluded.deduplicated, unmatched = known.unmatched + excluded.unmatched
"""

_COUNT_UNMATCHED: Final = """
UPDATE scriba_lanes SET unmatched = unmatched + %(unmatched)s WHERE segment_id = %(segment)s AND lane = %(lane)s
"""

_RAISE_APPLIED: Final = """
UPDATE scriba_positions SET applied_position = GREATEST(applied_position, %(applied)s)
WHERE projection_name = %(name)s AND projection_version = %(version)s AND stream_id = %(key)s
"""

_APPLIED: Final = """
SELECT applied_position FROM scriba_positions
WHERE projection_name = %(name)s AND projection_version = %(version)s AND stream_id = %(key)s
  AND applied_position IS NOT NULL
"""
