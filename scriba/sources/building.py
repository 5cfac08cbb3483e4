"""Which class an event type stands for, and how one is built from a payload.

Dataclasses and attrs classes are built by ``cattrs`` (the extra ``scriba[types]``), pydantic models and msgspec structs
by their own libraries; each is imported only when such a class is given. Besides what those libraries do anyway, typed
fields are read as Django's JSON encoder writes them: ISO dates and times, UUIDs and Decimals as text, durations, bytes
as base64.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import importlib
import importlib.util
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any, Final, Literal
from uuid import UUID

from scriba.exceptions import ConfigurationError, did_you_mean

__all__ = ["Build", "PayloadMismatch", "TypeMap", "Types", "UnknownKeys"]

Build = Callable[[Any], Any]
Buildable = type[Any] | Build
Types = Collection[type[Any]] | Mapping[str, Buildable] | Callable[[str], "Buildable | None"]
UnknownKeys = Literal["ignore", "forbid"]

UNKNOWN_KEYS: Final = ("ignore", "forbid")
SHOWN_NAMES: Final = 20


class PayloadMismatch(ValueError):  # noqa: N818 - reads as `decode:PayloadMismatch`
    """A payload does not fit the class of its type; the message names each field at fault."""


class TypeMap:
    """The option ``types=``: a list of classes, a mapping or a callable from the type's name to a class.

    In a list, a class stands for the types that carry its name, its qualified name, or its dotted path. In place of a
    class, a mapping or callable may give a function that builds the event from its payload. Shared by all workers.
    """

    def __init__(self, where: str, types: Any, unknown_keys: UnknownKeys = "ignore") -> None:
        if unknown_keys not in UNKNOWN_KEYS:
            msg = f"{where}: unknown_keys={unknown_keys!r} is no choice{did_you_mean(str(unknown_keys), UNKNOWN_KEYS)}"
            raise ConfigurationError(msg)
        self._where = where
        self._forbid = unknown_keys == "forbid"
        self._lock = threading.Lock()
        self._builds: dict[str, Build | None] = {}
        self._named: dict[str, Buildable] = {}
        self._ask: Callable[[str], Any] | None = None
        if isinstance(types, Mapping):
            self._named = dict(types)
        elif isinstance(types, Collection) and not isinstance(types, str):
            self._named = _by_name(where, types)
        elif callable(types) and not isinstance(types, type):
            self._ask = types
        else:
            msg = f"{where}: types must be a list of classes, or a mapping or callable from type name to class, not {types!r}."
            raise ConfigurationError(msg)
        for name, given in self._named.items():
            self._check(name, given)

    def find(self, name: str) -> Build | None:
        """Return what builds events of the type `name`; None for an unknown one."""
        try:
            return self._builds[name]
        except KeyError:
            with self._lock:  # two threads must not generate code for one class at the same time
                if name not in self._builds:
                    self._builds[name] = self._make(name)
                return self._builds[name]

    def names_of(self, classes: Iterable[str]) -> frozenset[str]:
        """Return the type names that stand for the classes named (by qualified name)."""
        wanted = set(classes)
        return frozenset(name for name, given in self._named.items() if getattr(given, "__qualname__", None) in wanted)

    def described(self) -> str:
        """Return which types are known, for messages."""
        if self._ask is not None:
            return f"the callable {getattr(self._ask, '__qualname__', self._ask)!r} returned None for it."
        names = sorted(self._named)
        more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
        return f"known are {', '.join(names[:SHOWN_NAMES])}{more}."

    def _make(self, name: str) -> Build | None:
        given = self._named.get(name) if self._ask is None else self._ask(name)
        if given is None:
            return None
        if not isinstance(given, type):
            self._check(name, given)
            return given
        return _BUILDERS[_library_of(given, self._where)](given, self._forbid)

    def _check(self, name: Any, given: Any) -> None:
        """Say at once what would otherwise dead-letter the first event."""
        if not isinstance(name, str):
            msg = f"{self._where}: types maps names of event types, which are strings, not {name!r}."
            raise ConfigurationError(msg)
        if isinstance(given, type):
            _library_of(given, self._where)
        elif not callable(given):
            msg = f"{self._where}: types[{name!r}] must be a class, or a function that builds the event, not {given!r}."
            raise ConfigurationError(msg)


def _by_name(where: str, classes: Collection[Any]) -> dict[str, Buildable]:
    found: dict[str, Buildable] = {}
    for given in classes:
        if not isinstance(given, type):
            msg = f"{where}: types is a list of classes, and {given!r} is none; name other things in a mapping."
            raise ConfigurationError(msg)
        for name in (given.__name__, given.__qualname__, f"{given.__module__}.{given.__qualname__}"):
            if found.setdefault(name, given) is not given:
                msg = f"{where}: two classes of types are called {name!r}; tell them apart with a mapping: {{type name: class}}."
                raise ConfigurationError(msg)
    return found


# --- libraries ------------------------------------------------------------------------------------------


def _library_of(given: type[Any], where: str) -> str:
    """Return the library that builds objects of the class `given`."""
    if hasattr(given, "__struct_fields__"):
        return "msgspec"
    if callable(getattr(given, "model_validate", None)):
        return "pydantic"
    if dataclasses.is_dataclass(given) or hasattr(given, "__attrs_attrs__"):
        if importlib.util.find_spec("cattrs") is None:
            msg = f"{where}: {given.__qualname__} is built by cattrs, which is not installed: pip install scriba[types]"
            raise ConfigurationError(msg)
        return "cattrs"
    msg = (
        f"{where}: {given.__module__}.{given.__qualname__} is no dataclass, attrs class, pydantic model or msgspec struct; "
        "in a mapping, a function (payload) -> object may stand in its place."
    )
    raise ConfigurationError(msg)


def _with_cattrs(given: type[Any], forbid: bool) -> Build:  # noqa: FBT001 - internal table
    build = _converter(forbid, detailed=False).get_structure_hook(given)

    def call(data: Any) -> Any:
        try:
            return build(data, given)
        except Exception as error:
            raise PayloadMismatch(_faults(given, forbid, data)) from error

    return call


def _faults(given: type[Any], forbid: bool, data: Any) -> str:  # noqa: FBT001 - as above
    """Build once more with the converter that finds every fault and says where it is."""
    cattrs = importlib.import_module("cattrs")
    try:
        _converter(forbid, detailed=True).structure(data, given)
    except Exception as error:  # noqa: BLE001 - any class's own __init__
        faults = cattrs.transform_error(error, path=given.__qualname__)
        return f"the payload does not fit {given.__qualname__}: {'; '.join(faults)}"
    return f"the payload does not fit {given.__qualname__}"


@functools.lru_cache
def _converter(forbid: bool, *, detailed: bool) -> Any:  # noqa: FBT001 - as above
    cattrs = importlib.import_module("cattrs")
    converter = cattrs.Converter(detailed_validation=detailed, forbid_extra_keys=forbid)
    for kind, read in _READ.items():
        converter.register_structure_hook(kind, lambda value, _, kind=kind, read=read: _read(kind, read, value))
    return converter


def _with_pydantic(given: type[Any], forbid: bool) -> Build:  # noqa: FBT001 - as above
    return _guarded(given, given.model_validate, _pydantic_names(given) if forbid else None)


def _pydantic_names(given: type[Any]) -> set[str]:
    """Return the keys that a model reads: names and aliases, of which a field may have several."""
    known: set[str] = set()
    for name, field in given.model_fields.items():
        for alias in (name, field.alias, field.validation_alias):
            choices = getattr(alias, "choices", (alias,))
            known.update(str(getattr(choice, "path", (choice,))[0]) for choice in choices)
    return known


def _with_msgspec(given: type[Any], forbid: bool) -> Build:  # noqa: FBT001 - as above
    msgspec = importlib.import_module("msgspec")
    known = {*given.__struct_encode_fields__, given.__struct_config__.tag_field}
    return _guarded(given, lambda data: msgspec.convert(data, given, strict=False), known if forbid else None)


def _guarded(given: type[Any], build: Build, known: Collection[Any] | None) -> Build:
    if known is None:
        return build

    def call(data: Any) -> Any:
        if isinstance(data, Mapping) and (unknown := sorted(set(data).difference(known))):
            msg = f"the payload does not fit {given.__qualname__}: extra fields found ({', '.join(unknown)})"
            raise PayloadMismatch(msg)
        return build(data)

    return call


_BUILDERS: Final[Mapping[str, Callable[[type[Any], bool], Build]]] = {
    "cattrs": _with_cattrs,
    "pydantic": _with_pydantic,
    "msgspec": _with_msgspec,
}


# --- typed fields ---------------------------------------------------------------------------------------


def _read(kind: type[Any], read: Callable[[Any], Any], value: Any) -> Any:
    if type(value) is kind:
        return value
    try:
        return read(value)
    except (
        ArithmeticError,
        AttributeError,
    ) as error:  # Decimal("twelve"), UUID({}): cattrs knows what a ValueError means
        msg = f"no {kind.__name__}"
        raise ValueError(msg) from error


def _decimal(value: Any) -> Decimal:
    return Decimal(str(value) if isinstance(value, float) else value)


def _duration(value: Any) -> timedelta:
    from django.utils.dateparse import parse_duration  # noqa: PLC0415 - reads both of Django's forms

    if isinstance(value, int | float):
        return timedelta(seconds=value)
    found = parse_duration(value)
    if found is None:
        msg = f"{value!r} is no duration"
        raise ValueError(msg)
    return found


def _bytes(value: Any) -> bytes:
    return base64.b64decode(value, validate=True)


_READ: Final[Mapping[type[Any], Callable[[Any], Any]]] = {
    datetime: datetime.fromisoformat,
    date: date.fromisoformat,
    time: time.fromisoformat,
    timedelta: _duration,
    UUID: UUID,
    Decimal: _decimal,
    bytes: _bytes,
}
