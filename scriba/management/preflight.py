"""What must hold before a projection starts: its databases answer, and Scriba's tables are there and up to date.

Asked once, at the start of ``run_projections``: what is found here would otherwise be a traceback out of a thread, or
a failure in the middle of the first batch. Later outages are waited for by the engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from django.core.checks import CheckMessage, Error
from django.db import DatabaseError, connections
from django.db.migrations.executor import MigrationExecutor

from scriba.checks import database_problems, target_alias
from scriba.exceptions import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from scriba.registry import Projection

__all__ = ["close_idle", "preflight"]


def preflight(projections: Sequence[Projection]) -> list[CheckMessage]:
    """Return the warnings of the databases that `projections` use.

    Raises :class:`~scriba.exceptions.ConfigurationError`, with cause and cure, for what would keep them from running.
    """
    targets = _unique(target_alias(projection) for projection in projections)
    aliases = _unique([*targets, *(_source_alias(projection) for projection in projections)])
    for alias in aliases:
        _require_answer(alias)
    found = database_problems(projections, aliases)
    errors = [message for message in found if message.level >= Error("").level]
    if errors:
        raise ConfigurationError("\n".join(f"{message.msg}\n{message.hint}" for message in errors))
    for alias in targets:
        _require_migrations(alias)
    return found


def close_idle() -> None:
    """Close this thread's connections: the engine's threads open their own, and these would only lie idle."""
    for connection in connections.all(initialized_only=True):
        if not connection.in_atomic_block:
            connection.close()


def _unique(aliases: Iterable[str | None]) -> list[str]:
    return [alias for alias in dict.fromkeys(aliases) if alias is not None]


def _source_alias(projection: Projection) -> str | None:
    """Return the alias that a source reads from; None for one that is reached in another way."""
    find: Callable[[], str] | None = getattr(projection.source, "database", None)
    return find() if callable(find) else getattr(projection.source, "using", None)


def _require_answer(alias: str) -> None:
    connection = connections[alias]
    try:
        connection.ensure_connection()
    except DatabaseError as error:
        where = connection.settings_dict
        cause = " ".join(str(error).split()) or type(error).__name__
        msg = (
            f"The database {alias!r} ({where['NAME']} at {where['HOST'] or 'the local socket'}"
            f"{':' + str(where['PORT']) if where['PORT'] else ''}) cannot be reached: {cause}\n"
            "Check that the server runs and that DATABASES in the settings (or DATABASE_URL) names it. Nothing was started."
        )
        raise ConfigurationError(msg) from error


def _require_migrations(alias: str) -> None:
    executor = MigrationExecutor(connections[alias])
    ours = [node for node in executor.loader.graph.leaf_nodes() if node[0] == "scriba"]
    waiting = [migration.name for migration, _ in executor.migration_plan(ours)]
    if waiting:
        msg = (
            f"The database {alias!r} lacks {len(waiting)} migration(s) of scriba: {', '.join(waiting)}.\n"
            f"Run: python manage.py migrate --database={alias}"
        )
        raise ConfigurationError(msg)
