"""Orphans: projections that the tables know and the code does not. They can be looked at, and forgotten.

What always holds: a projection that a live process owns is never forgotten (another deployment may still declare it),
and one that is declared here is reset, not forgotten. Read models stay: nobody knows any more which they were.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from django.db import DEFAULT_DB_ALIAS, connections, transaction

from scriba.audit import record
from scriba.exceptions import InvalidState, UnknownProjection
from scriba.info import alias_of
from scriba.protocols import Identity
from scriba.registry import all_projections
from scriba.takeover import insist, wear_reset_mark

if TYPE_CHECKING:
    from django.db.backends.utils import CursorWrapper

__all__ = ["forget", "orphans"]


def orphans(alias: str) -> list[Identity]:
    """Return the projections in the tables of the database `alias` that no code of this process declares there."""
    declared = {made.identity for made in all_projections() if alias_of(made) == alias}
    with connections[alias].cursor() as cursor:
        cursor.execute("SELECT projection_name, projection_version FROM scriba_projections ORDER BY 1, 2")
        return [identity for row in cursor.fetchall() if (identity := Identity(*row)) not in declared]


def forget(p: str | tuple[str, int], alias: str = DEFAULT_DB_ALIAS, *, by: str = "") -> int:
    """Delete every row of an orphaned projection but the records, in one transaction; return how many.

    `p` is a name (version 1) or (name, version); `alias` names the database that it wrote to.

    Raises :class:`~scriba.exceptions.UnknownProjection` when it is no orphan of this database, and
    :class:`~scriba.exceptions.InvalidState` while a process runs it.
    """
    identity = Identity(p, 1) if isinstance(p, str) else Identity(*p)
    if identity not in orphans(alias):
        msg = f"{identity} is no orphan in the database {alias!r}: it is declared in the code (reset it), or not in the tables."
        raise UnknownProjection(msg)
    with transaction.atomic(using=alias), connections[alias].cursor() as cursor:
        wear_reset_mark(cursor)
        _refuse_running(cursor, identity, alias)
        deleted = 0
        for sql in _FORGET:
            cursor.execute(sql, _named(identity))
            deleted += cursor.rowcount
        record(cursor, identity, "forget", by=by, detail=f"{deleted} rows deleted")
    return deleted


def _refuse_running(cursor: CursorWrapper, identity: Identity, alias: str) -> None:
    for owner, is_live in insist(cursor, _LOCK, _named(identity), using=alias, identity=identity):
        if is_live:
            msg = f"cannot forget {identity}: {owner} runs it. It is declared there, though not here; stop that process first."
            raise InvalidState("running", msg)


def _named(identity: Identity) -> dict[str, Any]:
    return {"name": identity.name, "version": identity.version}


_OURS: Final = "projection_name = %(name)s AND projection_version = %(version)s"
_LOCK: Final = f"""
SELECT owner, owner <> '' AND lease_expires_at > clock_timestamp()
FROM scriba_segments WHERE {_OURS} ORDER BY id FOR UPDATE
"""
_FORGET: Final = (
    f"DELETE FROM scriba_positions WHERE {_OURS}",
    f"DELETE FROM scriba_dead_letters WHERE {_OURS}",
    f"DELETE FROM scriba_samples WHERE {_OURS}",
    f"DELETE FROM scriba_lanes WHERE segment_id IN (SELECT id FROM scriba_segments WHERE {_OURS})",
    f"DELETE FROM scriba_segments WHERE {_OURS}",
    f"DELETE FROM scriba_projections WHERE {_OURS}",
)
