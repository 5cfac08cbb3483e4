"""`reset`: make a projection forget everything, in one transaction, so that it starts again from its source's beginning.

A reset raises the epoch behind the same lock that a takeover takes: a batch that is still open somewhere is waited
for or ended, and nothing of an older epoch can commit afterwards, neither cursors nor a late watermark.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from django.db import connections, transaction

from scriba.audit import record
from scriba.exceptions import ConfigurationError, InvalidState
from scriba.info import alias_of, read_state
from scriba.log_fields import about
from scriba.protocols import Status
from scriba.registry import find
from scriba.takeover import insist, wear_reset_mark

if TYPE_CHECKING:
    from collections.abc import Collection

    from django.db.backends.utils import CursorWrapper
    from django.db.models import Model

    from scriba.registry import Projection

__all__ = ["Forgotten", "reset"]

logger = logging.getLogger("scriba")


class Forgotten(NamedTuple):
    """What a reset removed: cursors, dead letters (deleted, or else discarded), and rows of read models."""

    cursors: int = 0
    dead_letters: int = 0
    read_model_rows: int = 0


def reset(
    p: object, *, dead_letters: bool = False, truncate: bool | Collection[type[Model]] = False, by: str = ""
) -> Forgotten:
    """Forget cursors, watermark, ceiling, imported floor, counters and recorded options; return what was removed.

    `dead_letters` deletes the letters; without it they stay as history, the unresolved ones as *discarded* (their
    events come again anyway). `truncate` deletes the rows of the named read models, or with True of the projection's
    ``models``, in the same transaction. Neither a halt nor the wish is changed; the source's own checkpoint, if it
    has one, is left alone.

    Raises :class:`~scriba.exceptions.InvalidState` while a process runs the projection (stop it first),
    :class:`~scriba.exceptions.ConfigurationError` and :class:`~scriba.exceptions.UnknownProjection`.
    """
    projection = find(p)
    alias = alias_of(projection)
    tables = _tables(projection, truncate)
    state = read_state(projection.identity, alias)
    _refuse_running(projection, state.owner_status, is_live=state.is_live)
    with transaction.atomic(using=alias), connections[alias].cursor() as cursor:
        wear_reset_mark(cursor)
        _fence(projection, cursor, alias)
        forgotten = _forget(projection, cursor, tables, delete_letters=dead_letters)
        record(cursor, projection.identity, "reset", by=by, detail=_detail(forgotten, tables, deleted=dead_letters))
    extra = about(projection.identity, by=by or None)
    logger.warning("%s was reset by %s: %s", projection.identity, by or "somebody", forgotten, extra=extra)
    return forgotten


def _refuse_running(projection: Projection, status: str, *, is_live: bool) -> None:
    if is_live and status not in {Status.STOPPED, Status.HALTED}:
        msg = f"cannot reset {projection.identity} while it is {status}; stop it first and wait until it has stopped."
        raise InvalidState(status, msg)


def _tables(projection: Projection, truncate: bool | Collection[type[Model]]) -> list[str]:  # noqa: FBT001 - as given
    """Return the tables of the read models, those of multi-table parents behind their children's."""
    models: Collection[Any] = projection.models if truncate is True else truncate or ()
    if truncate is True and not models:
        msg = f"reset(truncate=True): {projection.identity} names no models; declare models=[…] or name them here."
        raise ConfigurationError(msg)
    lineage = [model._meta.concrete_model for model in models]
    lineage += [parent for model in models for parent in model._meta.get_parent_list()]
    return list(dict.fromkeys(model._meta.db_table for model in lineage))


def _fence(projection: Projection, cursor: CursorWrapper, alias: str) -> None:
    """Lock the segments alone, look once more whether somebody runs the projection, and raise the epochs."""
    for status, is_live in insist(cursor, _LOCK, _params(projection), using=alias, identity=projection.identity):
        _refuse_running(projection, status, is_live=is_live)
    cursor.execute(_RAISE, _params(projection))


def _forget(
    projection: Projection, cursor: CursorWrapper, tables: Collection[str], *, delete_letters: bool
) -> Forgotten:
    def execute(sql: str) -> int:
        cursor.execute(sql, _params(projection))
        return int(cursor.rowcount)

    cursors = execute(f"DELETE FROM scriba_positions WHERE {_PROJECTION}")
    letters = execute(f"DELETE FROM scriba_dead_letters WHERE {_PROJECTION}" if delete_letters else _DISCARD)
    execute(_ZERO_LANES)
    execute(_FORGET_OPTIONS)
    rows = 0
    for table in tables:
        rows += execute(f"DELETE FROM {connections[cursor.db.alias].ops.quote_name(table)}")
    if tables:
        cursor.execute("SET CONSTRAINTS ALL IMMEDIATE")  # a row that still refers to a read model is found here
    return Forgotten(cursors, letters, rows)


def _detail(forgotten: Forgotten, tables: Collection[str], *, deleted: bool) -> str:
    rows = f", {forgotten.read_model_rows} rows of {', '.join(tables)} deleted" if tables else ""
    return f"{forgotten.cursors} cursors forgotten, {forgotten.dead_letters} dead letters {'deleted' if deleted else 'discarded'}{rows}"


def _params(projection: Projection) -> dict[str, Any]:
    return {"name": projection.name, "version": projection.version}


_PROJECTION: Final = "projection_name = %(name)s AND projection_version = %(version)s"
_LOCK: Final = f"""
SELECT status, owner <> '' AND lease_expires_at > clock_timestamp()
FROM scriba_segments WHERE {_PROJECTION} ORDER BY id FOR UPDATE
"""
_RAISE: Final = f"""
UPDATE scriba_segments SET epoch = epoch + 1, watermark = NULL, watermark_at = NULL, ceiling = NULL, head = NULL,
       head_at = NULL, rate = 0, anchor = ''
WHERE {_PROJECTION}
"""
_DISCARD: Final = f"""
UPDATE scriba_dead_letters SET status = 'discarded', resolved_at = now(), resolved_by = 'reset', wish = ''
WHERE {_PROJECTION} AND status IN ('open', 'parked')
"""
_ZERO_LANES: Final = f"""
UPDATE scriba_lanes SET applied = 0, skipped = 0, dead_lettered = 0, deduplicated = 0, unmatched = 0
WHERE segment_id IN (SELECT id FROM scriba_segments WHERE {_PROJECTION})
"""
_FORGET_OPTIONS: Final = f"""
UPDATE scriba_projections SET floor = NULL, partition_by = '', source_identity = '', hash_name = '',
       reset_count = reset_count + 1
WHERE {_PROJECTION}
"""
