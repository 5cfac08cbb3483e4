"""What ``manage.py check`` says about an OrmTarget and the read models named for it.

A declared write has queryset semantics: ``save()`` overrides and save signals do not run. That surprises once, at
check time, rather than in production.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, Final

from django.core.checks import CheckMessage, Error, Warning  # noqa: A004 - Django's name
from django.db import DatabaseError, connections, models, router
from django.db.models.signals import post_delete, post_save, pre_delete, pre_save

__all__ = ["missing_tables", "target_checks"]

TABLES: Final = ("scriba_positions", "scriba_dead_letters", "scriba_projections", "scriba_segments", "scriba_lanes")
OLDEST_SERVER: Final = 140_000


def target_checks(using: str, read_models: Collection[type[models.Model]]) -> list[CheckMessage]:
    """Return what is wrong with the alias `using` and the read models; nothing here needs a connection."""
    if using not in connections:
        known = ", ".join(sorted(connections))
        return [Error(
            f"OrmTarget(using={using!r}): there is no such database alias.",
            hint=f"settings.DATABASES has: {known}.", id="scriba.E100",
        )]  # fmt: skip
    if connections[using].vendor != "postgresql":
        return [Error(
            f"OrmTarget(using={using!r}): {connections[using].display_name} cannot hold read models of Scriba.",
            hint="Cursors, rows and dead letters commit in one PostgreSQL transaction; use an alias of that engine.",
            id="scriba.E101",
        )]  # fmt: skip
    return [message for model in read_models for message in _of_model(using, model)]


def missing_tables(using: str) -> list[str] | None:
    """Return which of Scriba's tables the database behind `using` lacks; None when it cannot be asked."""
    try:
        with connections[using].cursor() as cursor:
            present = set(connections[using].introspection.table_names(cursor))
    except DatabaseError:
        return None
    return [table for table in TABLES if table not in present]


def _of_model(using: str, model: type[models.Model]) -> Iterator[CheckMessage]:
    routed = router.db_for_write(model)
    if routed != using:
        yield Warning(
            f"{model._meta.label} is written through the alias {using!r}, but the routers send its writes to {routed!r}.",
            hint=f"Give the projection target=OrmTarget(using={routed!r}), or change the router.",
            obj=model, id="scriba.W102",
        )  # fmt: skip
    for method in ("save", "delete"):
        if getattr(model, method) is not getattr(models.Model, method):
            yield Warning(
                f"{model._meta.label} overrides {method}(), which declared writes do not call.",
                hint="They do what bulk_create, QuerySet.update and QuerySet.delete do. Write it in the handler, or return Done().",
                obj=model, id="scriba.W103",
            )  # fmt: skip
    listening = [name for name, signal in _SIGNALS.items() if signal.has_listeners(model)]
    if listening:
        yield Warning(
            f"{model._meta.label} has receivers of {', '.join(listening)}, which declared inserts and updates do not send.",
            hint="Do their work in the handler, or write through the ORM there and return Done().",
            obj=model, id="scriba.W104",
        )  # fmt: skip


_SIGNALS: Final = {"pre_save": pre_save, "post_save": post_save, "pre_delete": pre_delete, "post_delete": post_delete}
