"""What a log record says beside its sentence: the fields by which a collector finds all lines of one projection.

Every log call of Scriba takes ``extra=about(…)`` from here, so that a field has one name everywhere: ``projection``,
``version``, ``lane``, ``position``, ``event_id``, and whatever else a line knows. What always holds: a field that is
not known is left out, not written as None.
"""

from __future__ import annotations

__all__ = ["about"]


def about(identity: tuple[str, int] | None, **fields: object) -> dict[str, object]:
    """Return the ``extra`` of a record about the projection `identity` (None: about none in particular)."""
    named: dict[str, object] = {} if identity is None else {"projection": identity[0], "version": identity[1]}
    return named | {name: value for name, value in fields.items() if value is not None}
