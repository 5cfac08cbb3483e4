"""The decorator, what it makes, and where it is found again: by function, by name, or by (name, version).

A decorator registers; nothing starts at import. Registering the same handler twice (a module imported twice, an
autoreload) replaces it; two different handlers under one identity are kept apart for ``manage.py check`` to report.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, Required, TypedDict, TypeVar, Unpack

from scriba.event import Event, EventMeta
from scriba.exceptions import ConfigurationError, UnknownProjection, did_you_mean
from scriba.protocols import Identity, Source, Target
from scriba.retry import RetryPolicy

__all__ = ["SERIAL", "Projection", "all_projections", "find", "projection"]

logger = logging.getLogger("scriba")

Handler = Callable[[Any, EventMeta], Any]
H = TypeVar("H")

DEFAULT_BATCH_SIZE: Final = 2000
MAX_NAME: Final = 255  #: what the column of the tables holds
ON_FAILURE: Final = ("continue", "park", "halt")


class _Serial:
    """The ordering key of everything: one lane, global order."""

    def __call__(self, event: Event) -> str:  # noqa: ARG002 - the shape of every key function
        return ""

    def __repr__(self) -> str:
        return "SERIAL"


SERIAL: Final = _Serial()

#: Option names of other libraries, and where the thing went.
MOVED: Final[Mapping[str, str]] = {
    "consistency": "there is no consistency option: call scriba.wait_for(...) where a reader must see its own write",
    "application": "the event store is named by the source: source=TableSource(Event) or another source",
    "repo": "the read model's database is named by the target: target=OrmTarget(using='alias')",
    "schema_prefix": "use a database alias with its own search_path: target=OrmTarget(using='alias')",
}


@dataclass(frozen=True, slots=True, eq=False)
class Projection:
    """Handler + source + target under one (name, version)."""

    name: str
    version: int
    handler: Handler
    source: Source
    target: Target
    parallelism: int
    partition_by: Callable[[Event], str] | None = None
    event_types: frozenset[str] | None = None
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    on_failure: str = "continue"
    models: tuple[Any, ...] = ()
    batch_size: int = DEFAULT_BATCH_SIZE
    lag_interval: float = 5.0

    @property
    def identity(self) -> Identity:
        return Identity(self.name, self.version)

    @property
    def lanes(self) -> int:
        """How many lanes run: global order allows only one."""
        return 1 if self.partition_by is SERIAL else self.parallelism

    @property
    def partition_by_name(self) -> str:
        """What is recorded about the ordering key: a change under the same version is refused."""
        if self.partition_by is None:
            return "stream_id"
        if self.partition_by is SERIAL:
            return "SERIAL"
        return f"{getattr(self.partition_by, '__module__', '')}.{_qualname(self.partition_by)}"

    def override(self, **options: Any) -> Projection:
        """Return a copy with other options; the identity and what is recorded under it cannot be changed.

        Raises :class:`~scriba.exceptions.ConfigurationError`.
        """
        for name in options:
            if name not in _OVERRIDABLE:
                detail = (
                    "it is part of the projection's identity"
                    if name in _OPTIONS
                    else f"unknown{did_you_mean(name, _OVERRIDABLE)}"
                )
                msg = f"option {name!r} cannot be overridden: {detail}"
                raise ConfigurationError(msg)
        return replace(self, **_validated(self.name, options))


class Options(TypedDict, total=False):
    """What ``@projection`` accepts, for type checkers; at run time every value is checked as well."""

    source: Required[Source]
    parallelism: Required[int]
    version: int
    target: Target
    partition_by: Callable[[Event], str] | None
    event_types: Collection[str | type]
    retry: RetryPolicy | Mapping[str, Any] | bool
    on_failure: Literal["continue", "park", "halt"]
    models: Collection[type[Any]]
    batch_size: int
    lag_interval: float


_OPTIONS: Final = ("name", *Options.__annotations__)
_OVERRIDABLE: Final = ("parallelism", "retry", "on_failure", "batch_size", "lag_interval")

_registry: dict[Identity, Projection] = {}
_duplicates: list[tuple[Identity, str, str]] = []
_ATTRIBUTE: Final = "__scriba_projection__"


def projection(name: str = "", /, **options: Unpack[Options]) -> Callable[[H], H]:
    """Register the decorated function (or class with ``handle(self, event, meta)``) as a projection.

    Options: `source` and `parallelism` (both required), `version` (1), `target` (``OrmTarget()``), `partition_by`
    (the stream id), `event_types` (all), `retry` (``RetryPolicy()``), `on_failure` (``"continue"``), `models` (none),
    `batch_size`, `lag_interval` (5 s; 0 = never). See the reference page for each.

    The decorated function stays an ordinary function. Raises :class:`~scriba.exceptions.ConfigurationError` for a
    wrong or unknown option.
    """
    _check_call(name, options)

    def register(handler: H) -> H:
        call = _callable_of(name, handler)
        made = Projection(handler=call, **{"name": name, **_defaults(), **_validated(name, options)})
        _remember(made)
        setattr(handler, _ATTRIBUTE, made)
        return handler

    return register


def find(p: object) -> Projection:
    """Return the projection of a decorated function or class, a name (version 1), or a (name, version).

    Raises :class:`~scriba.exceptions.UnknownProjection`, with the closest registered name.
    """
    if isinstance(p, Projection):
        return p
    if isinstance(p, str):
        return _by_identity(Identity(p, 1))
    if isinstance(p, tuple) and len(p) == 2:  # noqa: PLR2004 - (name, version)
        return _by_identity(Identity(*p))
    made = getattr(p, _ATTRIBUTE, None)
    if isinstance(made, Projection):
        return made
    msg = f"{p!r} is no projection: give the decorated function, a name, or (name, version)."
    raise UnknownProjection(msg)


def all_projections() -> list[Projection]:
    """Return every registered projection, sorted by (name, version)."""
    return [_registry[identity] for identity in sorted(_registry)]


def duplicate_identities() -> Sequence[tuple[Identity, str, str]]:
    """Return (identity, first handler, second handler) for each identity declared twice (for the checks)."""
    return tuple(_duplicates)


def forget(p: object) -> None:
    """Take a projection out of the registry, its duplicates included (for tests)."""
    identity = find(p).identity
    _registry.pop(identity, None)
    _duplicates[:] = [duplicate for duplicate in _duplicates if duplicate[0] != identity]


def qualified_name(handler: object) -> str:
    """Return the dotted name of a handler, for messages."""
    return f"{getattr(handler, '__module__', '?')}.{_qualname(handler)}"


def _by_identity(identity: Identity) -> Projection:
    try:
        return _registry[identity]
    except KeyError:
        versions = sorted(known.version for known in _registry if known.name == identity.name)
        if versions:
            hint = f"; {identity.name!r} has version(s) {', '.join(map(str, versions))}."
        elif _registry:
            hint = did_you_mean(identity.name, {known.name for known in _registry})
        else:
            hint = "; no projection is registered: is the app with projections.py in INSTALLED_APPS?"
        msg = f"no projection {identity.name!r} version {identity.version}{hint}"
        raise UnknownProjection(msg) from None


def _check_call(name: object, options: Mapping[str, Any]) -> None:
    if not isinstance(name, str) or not name:
        msg = f'@projection("name", …): the first argument is the projection\'s name, a string, not {name!r}.'
        raise ConfigurationError(msg)
    if len(name) > MAX_NAME:
        msg = f"@projection({name!r}): a name has at most {MAX_NAME} characters, this one has {len(name)}."
        raise ConfigurationError(msg)
    for option in options:
        if option in MOVED:
            msg = f"@projection({name!r}): {option!r} is not an option: {MOVED[option]}."
            raise ConfigurationError(msg)
        if option not in _OPTIONS:
            msg = f"@projection({name!r}): unknown option {option!r}{did_you_mean(option, _OPTIONS)}"
            raise ConfigurationError(msg)
    for required in ("source", "parallelism"):
        if required not in options:
            msg = f"@projection({name!r}): {required!r} is required and has no default."
            raise ConfigurationError(msg)


def _defaults() -> dict[str, Any]:
    from scriba.targets import OrmTarget  # noqa: PLC0415 - a target knows Django, the registry does not

    return {"version": 1, "target": OrmTarget()}


def _validated(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    checked = dict(options)
    for option, check in _CHECKS.items():
        if option in checked:
            checked[option] = check(f"@projection({name!r}): {option}", checked[option])
    return checked


def _positive_int(what: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        msg = f"{what} must be a whole number of at least 1, not {value!r}."
        raise ConfigurationError(msg)
    return value


def _seconds(what: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        msg = f"{what} must be seconds, 0 or more, not {value!r}."
        raise ConfigurationError(msg)
    return float(value)


def _policy(what: str, value: object) -> RetryPolicy:
    try:
        return RetryPolicy.parse(value)
    except (ConfigurationError, TypeError) as error:
        msg = f"{what.removesuffix(': retry')}: {error}"
        raise ConfigurationError(msg) from error


def _failure_policy(what: str, value: object) -> str:
    if value not in ON_FAILURE:
        msg = f"{what} must be one of {', '.join(map(repr, ON_FAILURE))}, not {value!r}."
        raise ConfigurationError(msg)
    return str(value)


def _key_function(what: str, value: object) -> object:
    if value is not None and not callable(value):
        msg = f"{what} must be a callable Event -> str, or SERIAL, not {value!r}."
        raise ConfigurationError(msg)
    return value


def _type_names(what: str, value: object) -> frozenset[str] | None:
    if value is None:
        return None
    if isinstance(value, str) or not isinstance(value, Collection) or not value:
        msg = f"{what} must be a list of event type names or classes, not {value!r}."
        raise ConfigurationError(msg)
    return frozenset(item if isinstance(item, str) else _qualname(item) for item in value)


def _models(what: str, value: object) -> tuple[Any, ...]:
    if isinstance(value, str) or not isinstance(value, Collection):
        msg = f"{what} must be a list of model classes, not {value!r}."
        raise ConfigurationError(msg)
    return tuple(value)


def _has(*methods: str) -> Callable[[str, object], object]:
    def check(what: str, value: object) -> object:
        missing = [method for method in methods if not callable(getattr(value, method, None))]
        if missing or isinstance(value, type):
            lacks = "it is a class, not an instance" if isinstance(value, type) else f"it has no {', '.join(missing)}()"
            msg = f"{what}={value!r} cannot serve: {lacks}."
            raise ConfigurationError(msg)
        return value

    return check


_CHECKS: Final[Mapping[str, Callable[[str, Any], Any]]] = {
    "version": _positive_int,
    "source": _has("subscribe", "identity"),
    "target": _has("open", "valid_result", "classify"),
    "parallelism": _positive_int,
    "partition_by": _key_function,
    "event_types": _type_names,
    "retry": _policy,
    "on_failure": _failure_policy,
    "models": _models,
    "batch_size": _positive_int,
    "lag_interval": _seconds,
}


def _callable_of(name: str, handler: Any) -> Handler:
    call: Any = getattr(handler(), "handle") if inspect.isclass(handler) and hasattr(handler, "handle") else handler  # noqa: B009 - a class of any kind
    if not callable(call) or inspect.isclass(call):
        msg = f"@projection({name!r}) decorates a function (event, meta) or a class with handle(self, event, meta), not {handler!r}."
        raise ConfigurationError(msg)
    if inspect.iscoroutinefunction(call) or inspect.isasyncgenfunction(call):
        msg = f"@projection({name!r}): an async handler cannot run inside a database transaction; write a plain def."
        raise ConfigurationError(msg)
    try:
        inspect.signature(call).bind(None, None)
    except TypeError as error:
        msg = f"@projection({name!r}): {qualified_name(handler)} must accept (event, meta): {error}."
        raise ConfigurationError(msg) from error
    except ValueError:  # a builtin without a signature: let the call decide
        pass
    return call  # type: ignore[no-any-return]


def _remember(made: Projection) -> None:
    known = _registry.get(made.identity)
    if known is not None and _place(known.handler) != _place(made.handler):
        _duplicates.append((made.identity, _place(known.handler), _place(made.handler)))
    _registry[made.identity] = made


def _place(handler: object) -> str:
    """Return a handler's dotted name and line: a copied function that kept its name is another handler."""
    code = getattr(inspect.unwrap(handler), "__code__", None)  # type: ignore[arg-type]  # callables of any kind
    return qualified_name(handler) + (f" (line {code.co_firstlineno})" if code else "")


def _qualname(item: object) -> str:
    if isinstance(item, functools.partial):
        return _qualname(item.func)
    return str(getattr(item, "__qualname__", type(item).__qualname__))
