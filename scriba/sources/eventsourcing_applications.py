"""From what a source was given (a class, a dotted path, a factory) to an application that can be read.

Nothing here imports the library ``eventsourcing`` before it is asked for something, and no application is constructed
before a runner subscribes: an application opens connections, and those belong to the process that reads.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, Final

from django.db import connections
from django.utils.connection import ConnectionDoesNotExist

from scriba.exceptions import ConfigurationError

if TYPE_CHECKING:
    from eventsourcing.application import Application

__all__ = ["ApplicationLoader", "alias_problem", "database_env", "require_library", "topics_of"]

#: What an application that only reads needs, unless `env` says otherwise: no DDL (two processes that create tables at
#: the same moment fail), not the five connections that the library's pool would open for each projection, and an error
#: soon after the server has gone: the recorder repeats each call ten times, deaf to everything else meanwhile.
READING: Final[Mapping[str, str]] = {
    "CREATE_TABLE": "no",
    "POSTGRES_POOL_SIZE": "1",
    "POSTGRES_CONNECT_TIMEOUT": "1",
}


def require_library() -> None:
    """Raise :class:`~scriba.exceptions.ConfigurationError`, with the cure, when the library is not installed."""
    try:
        importlib.import_module("eventsourcing.application")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "eventsourcing":
            raise
        msg = (
            "this source reads applications of the Python library eventsourcing, which is not installed. Install it with: "
            'pip install "scriba[eventsourcing]"'
        )
        raise ConfigurationError(msg) from error


class ApplicationLoader:
    """Finds the application that a source names, and constructs it for reading."""

    def __init__(
        self, application: object, env: Mapping[str, str] | None, *, where: str, using: str | None = None
    ) -> None:
        self._given = application
        self._env = dict(env or {})
        self._using = using
        self._where = where
        self._check_given()

    def name(self) -> str:
        """Return the application's name, as its tables are named after it; a factory's own name for a factory."""
        found = self.find()
        if isinstance(found, type):
            return str(found.name)  # type: ignore[attr-defined]  # checked to be an Application
        return f"{getattr(found, '__module__', '')}.{getattr(found, '__qualname__', type(found).__qualname__)}"

    def is_factory(self) -> bool:
        return not isinstance(self.find(), type)

    def find(self) -> Callable[..., Any]:
        """Return the application class or the factory; import it if it was named by a path."""
        require_library()
        from eventsourcing.application import Application  # noqa: PLC0415 - an extra, loaded when it is in use

        found = _imported(self._given, self._where) if isinstance(self._given, str) else self._given
        if isinstance(found, type):
            if not issubclass(found, Application):
                raise ConfigurationError(self._wrong(found))
        elif not callable(found):
            raise ConfigurationError(self._wrong(found))
        elif self._env or self._using:
            msg = (
                f"{self._where}: env= and using= go with an application class. {found!r} is a factory: it makes the application, "
                "so it decides about its environment (give it CREATE_TABLE=no)."
            )
            raise ConfigurationError(msg)
        return found

    def construct(self, forced: Mapping[str, str] | None = None) -> Application[Any]:
        """Return a new application, which the caller closes. `forced` is stronger than the source's own `env`."""
        found = self.find()
        from eventsourcing.application import Application  # noqa: PLC0415 - an extra, loaded when it is in use

        if not isinstance(found, type):
            made = found()
            if not isinstance(made, Application):
                msg = f"{self._where}: the factory {found!r} must return an eventsourcing Application, not {made!r}."
                raise ConfigurationError(msg)
            return made
        # Names with the application's prefix win in the library: a class that sets SCHOOL_CREATE_TABLE would defeat ours.
        prefix = f"{found.name.upper()}_"  # type: ignore[attr-defined]
        env: dict[str, str] = {}
        database = database_env(self._using) if self._using else {}
        for settings in (READING, database, self._env, forced or {}):
            for key in sorted(settings, key=lambda key: key.startswith(prefix)):
                env[key] = env[prefix + key.removeprefix(prefix)] = str(settings[key])
        return found(env=env)  # type: ignore[no-any-return]

    def _check_given(self) -> None:
        if isinstance(self._given, str) or callable(self._given):
            return
        raise ConfigurationError(self._wrong(self._given))

    def _wrong(self, found: object) -> str:
        return (
            f"{self._where}: application={found!r} cannot be read. Accepted: a subclass of eventsourcing's Application, a "
            'path to one ("school.application.School"), or a callable without arguments that makes a new one. An '
            "application that is already made holds connections of its own; give its class."
        )


def database_env(using: str = "default") -> dict[str, str]:
    """Return the environment of an application that keeps its events in the database of a Django alias.

    For the writing side, ``Bank(env=database_env())``; a source with ``using="default"`` reads the same database. It is
    looked up at each call, so in tests it is the test database. Raises
    :class:`~scriba.exceptions.ConfigurationError` for an alias that is unknown or no PostgreSQL.
    """
    problem = alias_problem(using)
    if problem:
        raise ConfigurationError(" ".join(problem))
    settings = connections[using].settings_dict
    options = settings["OPTIONS"]

    def value(setting: str, option: str, variable: str, default: str = "") -> str:
        # The library passes on what it is given, an empty text too, so libpq's own variables are asked here.
        return str(settings[setting] or options.get(option) or os.environ.get(variable) or default)

    return {
        "PERSISTENCE_MODULE": "eventsourcing.postgres",
        "POSTGRES_DBNAME": value("NAME", "dbname", "PGDATABASE"),
        "POSTGRES_HOST": value("HOST", "host", "PGHOST"),
        "POSTGRES_PORT": value("PORT", "port", "PGPORT", "5432"),
        "POSTGRES_USER": value("USER", "user", "PGUSER"),
        "POSTGRES_PASSWORD": value("PASSWORD", "password", "PGPASSWORD"),
    }


def alias_problem(using: str) -> tuple[str, str] | None:
    """Return what is wrong with a database alias as the place of a source's events, and a hint; None if nothing is."""
    try:
        connection = connections[using]
    except ConnectionDoesNotExist:
        known = ", ".join(sorted(connections.settings))
        return (
            f"The source names the database alias {using!r}, which settings.DATABASES does not have.",
            f"Known: {known}.",
        )
    if connection.vendor != "postgresql":
        return (
            f"The source names the database alias {using!r}, which is {connection.display_name}.",
            "Only on PostgreSQL can it be known that no event is missing.",
        )
    return None


def topics_of(given: Collection[Any] | None, where: str) -> tuple[str, ...]:
    """Return topic names: of a class its topic, a text as it is. Empty means all."""
    if given is None:
        return ()
    if isinstance(given, str) or not isinstance(given, Collection) or not given:
        msg = f"{where}: topics must be a list of topics or event classes, not {given!r}; leave it out to read all."
        raise ConfigurationError(msg)
    return tuple(item if isinstance(item, str) else _topic(item, where) for item in given)


def _topic(item: object, where: str) -> str:
    if not isinstance(item, type):
        msg = f"{where}: topics must hold topics or event classes, not {item!r}."
        raise ConfigurationError(msg)
    from eventsourcing.utils import get_topic  # noqa: PLC0415 - an extra, loaded when it is in use

    return get_topic(item)


def _imported(path: str, where: str) -> Any:
    """Import ``module:Name`` or ``module.Name``."""
    module, _, name = path.partition(":") if ":" in path else path.rpartition(".")
    try:
        found = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        msg = f"{where}: application={path!r} cannot be imported: {error}."
        raise ConfigurationError(msg) from error
    return found
