"""How far a projection was, noted now and then by its owner; and the forgetting of old notes and old records.

What always holds: only the owner notes, under its epoch; what is noted here is bounded in time, and the records of who
asked what are bounded in time and number, so neither table grows with the age of a projection.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from scriba.conf import scriba_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from scriba.connection import Row

__all__ = ["PRUNE_EVERY_S", "forget_old_records", "take_sample"]

SAMPLES_KEPT_S: Final = 3_900.0  #: the charts show an hour
PRUNE_EVERY_S: Final = 3_600.0  #: so often an owner forgets old records


def take_sample(rows: Callable[[str, Mapping[str, Any]], Sequence[Row]], values: Mapping[str, Any]) -> bool:
    """Note one sample and forget the old ones of the projection. False: fenced, nothing was noted.

    `values`: name, version, segment, epoch, owner, and what the owner reports.
    """
    return bool(rows(_SAMPLE, {**values, "kept_s": SAMPLES_KEPT_S}))


def forget_old_records(rows: Callable[[str, Mapping[str, Any]], Sequence[Row]], values: Mapping[str, Any]) -> None:
    """Delete what the settings say is too old (of every projection: an orphan has no owner), or too much (of this one)."""
    settings = scriba_settings()
    kept = {"kept_s": settings.audit_kept_s, "most": settings.audit_most}
    rows(_FORGET_OLD, {**values, **kept})
    rows(_FORGET_MANY, {**values, **kept})


_SAMPLE: Final = """
WITH old AS (
  DELETE FROM scriba_samples WHERE projection_name = %(name)s AND projection_version = %(version)s
    AND taken_at < now() - make_interval(secs => %(kept_s)s))
INSERT INTO scriba_samples (projection_name, projection_version, watermark, head, settled, lag_seconds)
SELECT %(name)s, %(version)s, GREATEST(watermark, %(watermark)s::bigint), COALESCE(%(head)s::bigint, head),
       (SELECT COALESCE(sum(applied + skipped + dead_lettered), 0) FROM scriba_lanes WHERE segment_id = segment.id),
       CASE WHEN GREATEST(watermark, %(watermark)s::bigint) >= COALESCE(%(head)s::bigint, head) THEN 0
            ELSE EXTRACT(EPOCH FROM now() - COALESCE(%(watermark_at)s::timestamptz, watermark_at)) END
FROM scriba_segments AS segment WHERE id = %(segment)s AND epoch = %(epoch)s AND owner = %(owner)s
RETURNING 1
"""
_FORGET_OLD: Final = "DELETE FROM scriba_audit WHERE happened_at < now() - make_interval(secs => %(kept_s)s)"
_FORGET_MANY: Final = """
DELETE FROM scriba_audit WHERE projection_name = %(name)s AND projection_version = %(version)s AND id <= (
  SELECT id FROM scriba_audit WHERE projection_name = %(name)s AND projection_version = %(version)s
  ORDER BY id DESC OFFSET %(most)s LIMIT 1)
"""
