"""What ``manage.py check`` says about projections, before anything runs. Every id is explained in the reference.

Nothing here opens a connection, except the one check under Django's tag ``database``, which looks only at the
databases it is given and takes one that cannot be reached for a remark, never for an error: building an image, or
migrating one database while another is away, must not need them all.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from django.apps import apps
from django.core.checks import CheckMessage, Error, Info, Tags, Warning, register  # noqa: A004 - Django's word
from django.db import DatabaseError, InterfaceError, connections
from django.utils.connection import ConnectionDoesNotExist

from scriba.conf import scriba_settings
from scriba.exceptions import ConfigurationError
from scriba.listening import may_listen
from scriba.registry import all_projections, duplicate_identities, qualified_name

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from django.db.backends.base.base import BaseDatabaseWrapper

    from scriba.registry import Projection

__all__ = [
    "CONNECTIONS_BESIDE_LANES",
    "check_database",
    "check_projections",
    "database_problems",
    "problems",
    "target_alias",
]

#: What a running projection opens besides one connection per lane: reader, its ledger, coordinator, heartbeat. The
#: process has one more, by which it hears of wishes.
CONNECTIONS_BESIDE_LANES = 4
VERSION_IN_NAME = re.compile(r"_v\d+$")
POOL_DEFAULT = 4  #: psycopg_pool's size when nothing is said


@register("scriba")
def check_projections(app_configs: object, **kwargs: object) -> list[CheckMessage]:  # noqa: ARG001 - Django's signature
    """Check the setting, and everything about the registered projections that needs no connection."""
    return [*_settings(), *_duplicates(), *problems(all_projections())]


@register("scriba", Tags.database)
def check_database(
    app_configs: object,  # noqa: ARG001 - Django's signature
    databases: Collection[str] | None = None,
    **kwargs: object,  # noqa: ARG001 - Django's signature
) -> list[CheckMessage]:
    """Look at those of `databases` that projections use: tables, connection budget, and what sources ask of them."""
    return [] if _is_migrating() else database_problems(all_projections(), databases or ())


def _is_migrating() -> bool:
    """Say whether this is ``migrate``, which checks first: what it is about to bring must not keep it from running."""
    return sys.argv[1:2] == ["migrate"]


def problems(projections: Sequence[Projection]) -> list[CheckMessage]:
    """Return what is wrong with `projections`, as far as it can be seen without a connection."""
    found: list[CheckMessage] = []
    for projection in projections:
        found += _declaration(projection)
        found += [message for message in _sources_and_targets(projection) if message not in found]
    found += _shared_models(projections)
    found += _pools(projections)
    return found


def database_problems(projections: Sequence[Projection], databases: Collection[str]) -> list[CheckMessage]:
    """Return what the servers themselves show, for those of `databases` that `projections` use.

    A source may have a method ``database_checks(databases)`` beside its ``checks()``.
    """
    found: list[CheckMessage] = []
    for alias, writing in _by_alias(projections).items():
        if alias in databases and _postgresql(alias) is not None:
            found += _inspect(alias, writing)
    for projection in projections if databases else ():
        look: Callable[[Collection[str]], list[CheckMessage]] | None = getattr(
            projection.source, "database_checks", None
        )
        found += [message for message in look(databases) if message not in found] if look else []
    return found


def target_alias(projection: Projection) -> str | None:
    """Return the database alias that a projection writes to; None for a target that is no Django database."""
    return getattr(projection.target, "using", None)


# --- without a connection ---------------------------------------------------------------------------------------


def _settings() -> Iterator[CheckMessage]:
    try:
        scriba_settings()
    except ConfigurationError as error:
        yield Error(
            str(error), hint="The reference page 'Settings' lists every key with its default.", id="scriba.E005"
        )


def _duplicates() -> Iterator[CheckMessage]:
    for identity, first, second in duplicate_identities():
        yield Error(
            f"Two projections are named {identity.name!r} version {identity.version}: {first} and {second}.",
            hint="Give one of them another name, or another version=… if it shall replace the first.",
            id="scriba.E001",
        )


def _declaration(projection: Projection) -> Iterator[CheckMessage]:
    match = VERSION_IN_NAME.search(projection.name)
    if match:
        bare = projection.name[: match.start()]
        yield Warning(
            f"The projection's name {projection.name!r} carries a version.",
            hint=f"Name it {bare!r} with version={match.group()[2:]}: versions of one name are shown side by side.",
            obj=projection.identity,
            id="scriba.W002",
        )
    if _is_async(projection.handler):
        yield Error(
            f"The handler {qualified_name(projection.handler)} is a coroutine function.",
            hint="Write a plain def: Django's transactions, and so handlers, do not work in async code.",
            obj=projection.identity,
            id="scriba.E006",
        )


def _is_async(handler: Any) -> bool:
    """Look through decorators that wrap, and at objects whose ``__call__`` is the handler."""
    functions = (handler, inspect.unwrap(handler), type(handler).__call__)
    return any(inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function) for function in functions)


def _sources_and_targets(projection: Projection) -> Iterator[CheckMessage]:
    yield from projection.target.checks(projection.models)
    yield from projection.source.checks()
    alias = target_alias(projection)
    connection: Any = _postgresql(alias) if alias is not None else None
    if connection is not None and connection.Database.__name__ != "psycopg":
        yield Error(
            f"The database {alias!r} of {projection.identity} is reached through {connection.Database.__name__}.",
            hint='Scriba needs psycopg 3: python -m pip install "psycopg[binary]>=3.2", and remove psycopg2.',
            obj=projection.identity,
            id="scriba.E013",
        )


def _postgresql(alias: str) -> BaseDatabaseWrapper | None:
    """Return the wrapper of an alias, unopened; None when it is unknown or no PostgreSQL, which the target says."""
    try:
        connection = connections[alias]
    except ConnectionDoesNotExist:
        return None
    return connection if connection.vendor == "postgresql" else None


def _shared_models(projections: Iterable[Projection]) -> Iterator[CheckMessage]:
    writers: dict[Any, list[str]] = defaultdict(list)
    for projection in projections:
        for model in dict.fromkeys(projection.models):
            writers[model].append(str(projection.identity))
    for model, names in writers.items():
        if len(names) > 1:
            yield Warning(
                f"{len(names)} projections write the read model {model.__name__}: {', '.join(names)}.",
                hint="Each keeps its own cursors, so events of one may overwrite those of another; and a reset of one "
                "with --truncate empties the rows of all. Give each its own model.",
                obj=model,
                id="scriba.W012",
            )


def _pools(projections: Iterable[Projection]) -> Iterator[CheckMessage]:
    """Compare Django's connection pools with the lanes of one process; all else goes over connections of its own."""
    for alias, writing in _by_alias(projections).items():
        connection = _postgresql(alias)
        size = _pool_size(connection) if connection is not None else None
        if size is None:
            continue
        for projection in writing:
            if projection.lanes > size:
                yield Warning(
                    f"{projection.identity} has {projection.lanes} lanes, but the pool of the database {alias!r} has at most "
                    f"{size} connections.",
                    hint="Lanes without a connection wait for each other. Raise OPTIONS['pool']['max_size'] to the lanes of "
                    "a process, or lower parallelism.",
                    obj=projection.identity,
                    id="scriba.W007",
                )
        together = sum(projection.lanes for projection in writing)
        if together > size >= max(projection.lanes for projection in writing):
            yield Warning(
                f"The {len(writing)} projections on the database {alias!r} have {together} lanes together, but its pool has "
                f"at most {size} connections.",
                hint="Raise OPTIONS['pool']['max_size'], or run them in several processes "
                "(run_projections NAME, or --exclude NAME).",
                id="scriba.W008",
            )


def _pool_size(connection: BaseDatabaseWrapper) -> int | None:
    pool = connection.settings_dict.get("OPTIONS", {}).get("pool")
    if not pool:
        return None
    options = pool if isinstance(pool, dict) else {}
    smallest = options.get("min_size", POOL_DEFAULT)
    return int(options.get("max_size") or smallest)


def _needed(projection: Projection) -> int:
    return projection.lanes + CONNECTIONS_BESIDE_LANES


def _by_alias(projections: Iterable[Projection]) -> dict[str, list[Projection]]:
    groups: dict[str, list[Projection]] = defaultdict(list)
    for projection in projections:
        alias = target_alias(projection)
        if alias is not None:
            groups[alias].append(projection)
    return groups


# --- with a connection ------------------------------------------------------------------------------------------


def _inspect(alias: str, writing: Sequence[Projection]) -> Iterator[CheckMessage]:
    try:
        with connections[alias].cursor() as cursor:
            tables = {table.name for table in connections[alias].introspection.get_table_list(cursor)}
            cursor.execute(
                "SELECT current_setting('max_connections')::int - "
                "current_setting('superuser_reserved_connections')::int"
            )
            allowed = cursor.fetchone()[0]
    except (DatabaseError, InterfaceError) as error:
        yield Info(
            f"The database {alias!r} could not be looked at: {_first_line(error)}",
            hint="Its tables and its connection limit were not checked.",
            id="scriba.I011",
        )
        return
    yield from _missing_tables(alias, writing, tables)
    yield from _budget(alias, writing, allowed)


def _missing_tables(alias: str, writing: Sequence[Projection], tables: Collection[str]) -> Iterator[CheckMessage]:
    ours = [model._meta.db_table for model in apps.get_app_config("scriba").get_models()]
    missing = [table for table in ours if table not in tables]
    if missing:
        names = ", ".join(str(projection.identity) for projection in writing)
        yield Error(
            f"The database {alias!r} has no {', '.join(missing)}; {names} would write there.",
            hint=f"Run: python manage.py migrate --database={alias}",
            id="scriba.E010",
        )


def _budget(alias: str, writing: Sequence[Projection], allowed: int) -> Iterator[CheckMessage]:
    needed = sum(map(_needed, writing)) + may_listen(alias)
    if needed > allowed:
        yield Warning(
            f"The projections on the database {alias!r} open {needed} connections, but its server allows {allowed}.",
            hint="Lower parallelism, or raise max_connections of the server. A standby process opens one connection "
            "per projection on top.",
            id="scriba.W009",
        )


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
