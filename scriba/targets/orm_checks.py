"""What ``manage.py check`` says about a target and the read models that a projection names. Opens no connection.

(The tables, the server and its limits are looked at by ``scriba/checks.py``, which is told which databases it may ask.)
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from django.core.checks import CheckMessage, Error, Warning  # noqa: A004 - Django's word
from django.db import connections, models, router
from django.db.models import signals
from django.utils.connection import ConnectionDoesNotExist

__all__ = ["target_checks"]

_SAVE_SIGNALS = {"pre_save": signals.pre_save, "post_save": signals.post_save}


def target_checks(using: str, read_models: Collection[type[models.Model]]) -> list[CheckMessage]:
    """Return what is wrong with writing `read_models` to the database `using`."""
    found = [*_database(using)]
    if not found:
        for model in read_models:
            found += [*_routing(using, model), *_unused_code(model)]
    return found


def _database(using: str) -> Iterator[CheckMessage]:
    try:
        connection = connections[using]
    except ConnectionDoesNotExist:
        yield Error(
            f"OrmTarget(using={using!r}): settings.DATABASES has no such alias.",
            hint=f"Known aliases: {', '.join(sorted(connections.settings))}.",
            id="scriba.E100",
        )
        return
    if connection.vendor != "postgresql":
        yield Error(
            f"OrmTarget(using={using!r}) writes to {connection.display_name}.",
            hint="Scriba needs PostgreSQL: its fence, its cursors and its dead letters rely on it.",
            id="scriba.E101",
        )


def _routing(using: str, model: type[models.Model]) -> Iterator[CheckMessage]:
    name = model._meta.label
    if not router.allow_migrate_model(using, model):
        yield Error(
            f"The routers keep the table of {name} out of the database {using!r}, where its projection writes.",
            hint="Name the database of the read model: OrmTarget(using=…); or let allow_migrate() accept it.",
            obj=model,
            id="scriba.E105",
        )
        return
    routed = router.db_for_write(model)
    if routed != using:
        yield Warning(
            f"The routers send writes of {name} to the database {routed!r}, but its projection writes to {using!r}.",
            hint=f"Declared writes go to {using!r}; a handler that writes through the ORM itself would go to {routed!r}, "
            f"which is an error at run time. Name one database: OrmTarget(using={routed!r}).",
            obj=model,
            id="scriba.W102",
        )


def _unused_code(model: type[models.Model]) -> Iterator[CheckMessage]:
    name = model._meta.label
    overridden = [
        method for method in ("save", "delete") if getattr(model, method) is not getattr(models.Model, method)
    ]
    if overridden:
        yield Warning(
            f"{name} overrides {' and '.join(f'{method}()' for method in overridden)}, which declared writes do not call.",
            hint="They do what bulk_create(), QuerySet.update() and QuerySet.delete() do. Move the code into the handler, "
            "or write through the ORM there and return Done().",
            obj=model,
            id="scriba.W103",
        )
    connected = [signal for signal, dispatcher in _SAVE_SIGNALS.items() if dispatcher.has_listeners(model)]
    if connected:
        yield Warning(
            f"Receivers of {' and '.join(connected)} are connected to {name}; declared writes do not send these signals.",
            hint="Call what they do from the handler (transaction.on_commit() for side effects), or write through the ORM "
            "there and return Done().",
            obj=model,
            id="scriba.W104",
        )
