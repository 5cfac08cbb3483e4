"""Who asked what of a projection, and when: one row per act, for the people who come after.

A row is written in the transaction of what it tells of: no act without its entry, no entry for what was refused.
Must not be read by the engine: nothing depends on it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from scriba.stored_json import storable_text

if TYPE_CHECKING:
    from django.db.backends.utils import CursorWrapper
    from django.db.models import QuerySet

    from scriba.models import Audit
    from scriba.protocols import Identity

__all__ = ["AUDITED", "history", "record"]

LONGEST_TEXT: Final = 2_000

#: An INSERT for the end of a statement that begins with ``WITH done AS (… RETURNING …)``.
AUDITED: Final = """
INSERT INTO scriba_audit (projection_name, projection_version, action, actor, reason)
SELECT %(name)s, %(version)s, %(action)s, %(by)s, %(reason)s FROM done
"""


def record(  # noqa: PLR0913 - the columns
    cursor: CursorWrapper, identity: Identity, action: str, *, by: str, reason: str = "", detail: str = ""
) -> None:
    """Write one entry on the caller's cursor, in its transaction."""
    texts = [storable_text(text, LONGEST_TEXT) for text in (action, by, reason, detail)]
    cursor.execute(
        "INSERT INTO scriba_audit (projection_name, projection_version, action, actor, reason, detail) "
        "VALUES (%s, %s, %s, %s, %s, %s)",
        [*identity, *texts],
    )


def history(alias: str, identity: Identity | None = None, *, most: int = 50) -> QuerySet[Audit]:
    """Return the newest `most` entries of the database `alias`, of one projection if it is named, newest first."""
    from scriba.models import Audit  # noqa: PLC0415 - needs the app registry

    entries: Any = Audit.objects.using(alias).order_by("-id")
    if identity is not None:
        entries = entries.filter(projection_name=identity.name, projection_version=identity.version)
    newest: QuerySet[Audit] = entries[:most]
    return newest
