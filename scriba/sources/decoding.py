"""From stored text or bytes to what a handler gets: JSON, upcasters, classes. Used by every source that stores JSON.

Runs in worker threads, on one event at a time, anew at each call: a retried handler never sees what a failed attempt
did to a dict. Whatever is raised here is that one event's dead letter (``decode:<class>``); :class:`SkipEvent` is its
source's decision not to deliver it. Nothing here knows where events come from.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

from scriba.event import Payload, SkipEvent
from scriba.exceptions import ConfigurationError, did_you_mean
from scriba.sources.building import Build, TypeMap, Types, UnknownKeys

if TYPE_CHECKING:
    from scriba.event import Event

try:
    import orjson
except ImportError:  # pragma: no cover - the standard library does the same, in three times the time
    orjson = None  # type: ignore[assignment]

__all__ = [
    "Decoding",
    "JsonColumn",
    "PayloadCodec",
    "RawColumn",
    "UnknownEventType",
    "Upcaster",
    "Upcasters",
    "load_json",
]

UnknownType = Literal["deliver", "skip", "fail"]
Upcaster = Callable[[Payload], "Payload | tuple[str, Any, Mapping[str, Any]]"]
Upcasters = Upcaster | Sequence[Upcaster]
Hook = Callable[[Any, str], Any]

UNKNOWN_TYPE: Final = ("deliver", "skip", "fail")
#: orjson reads an integer beyond 64 bits as a float; the standard library reads it exactly.
_HUGE: Final = float(2**63)
_new: Final = tuple.__new__  #: past the generated constructor, which is Python: once for each event
_CERTAIN: Final = frozenset({str, int, bool, type(None)})  #: read alike by both


class UnknownEventType(LookupError):  # noqa: N818 - reads as `decode:UnknownEventType`
    """No class is known for an event's type, and ``unknown_type="fail"`` was asked for."""


def load_json(raw: str | bytes) -> Any:
    """Return what the JSON text `raw` says, as the standard library would; faster where orjson is installed."""
    if orjson is not None:
        try:
            value = orjson.loads(raw)
        except orjson.JSONDecodeError:
            pass  # NaN, lone surrogates: whatever Python's own encoder writes is read, or properly complained about
        else:
            if _is_exact(value):
                return value
    return json.loads(raw)


def _is_exact(value: Any) -> bool:
    """Say whether `value` holds no float that may have been a huge integer. A look at the values is far cheaper than
    one at the text.
    """
    kind = type(value)
    if kind is float:
        return -_HUGE < value < _HUGE  # type: ignore[no-any-return]
    if kind is dict:
        value = value.values()
    elif kind is not list:
        return True
    return _CERTAIN.issuperset(map(type, value)) or all(map(_is_exact, value))


# --- columns --------------------------------------------------------------------------------------------


class JsonColumn:
    """A column that holds JSON, as text or as bytes."""

    def __init__(self, *, is_binary: bool = False, decoder: type[json.JSONDecoder] | None = None) -> None:
        self._is_binary = is_binary
        self._decoder = decoder

    def load(self, raw: Any, event_type: str) -> Any:
        """Return the decoded value."""
        del event_type
        if raw is None:
            return None
        return load_json(raw) if self._decoder is None else json.loads(raw, cls=self._decoder)

    def stored(self, raw: Any) -> Any:
        """Return plain JSON values; bytes when `raw` is no JSON."""
        if raw is None:
            return None
        try:
            return json.loads(raw)
        except (ValueError, RecursionError):
            return raw.encode("utf-8", "surrogatepass") if isinstance(raw, str) else bytes(raw)

    def restored(self, stored: Any) -> Any:
        """Return what the column held: the inverse of :meth:`stored`."""
        if stored is None:
            return None
        if isinstance(stored, bytes):
            return stored if self._is_binary else stored.decode("utf-8", "surrogatepass")
        text = json.dumps(stored)
        return text.encode() if self._is_binary else text


class RawColumn:
    """A column that only the team can read: `hook` gets (what is stored, the event's type) and returns the data."""

    def __init__(self, hook: Hook) -> None:
        self._hook = hook

    def load(self, raw: Any, event_type: str) -> Any:
        """Return what the hook makes of `raw`."""
        return self._hook(raw, event_type)

    def stored(self, raw: Any) -> Any:
        """Return `raw` as it is."""
        return bytes(raw) if isinstance(raw, bytearray | memoryview) else raw

    def restored(self, stored: Any) -> Any:
        """Return `stored` as it is."""
        return stored


Column = JsonColumn | RawColumn


# --- options --------------------------------------------------------------------------------------------


class Decoding:
    """The options that every source takes: `types`, `upcast`, `unknown_type`, `unknown_keys`. Checked at once.

    `where` names the source in messages. Raises :class:`~scriba.exceptions.ConfigurationError`.
    """

    def __init__(
        self,
        where: str,
        *,
        types: Types | None = None,
        upcast: Upcasters = (),
        unknown_type: UnknownType = "deliver",
        unknown_keys: UnknownKeys = "ignore",
    ) -> None:
        if unknown_type not in UNKNOWN_TYPE:
            msg = f"{where}: unknown_type={unknown_type!r} is no choice{did_you_mean(str(unknown_type), UNKNOWN_TYPE)}"
            raise ConfigurationError(msg)
        if types is None and unknown_type != "deliver":
            msg = f"{where}: unknown_type={unknown_type!r} needs types=…: without them no type is known."
            raise ConfigurationError(msg)
        self.types = None if types is None else TypeMap(where, types, unknown_keys)
        self.upcasters = _checked_upcasters(where, upcast)
        self.unknown_type = unknown_type

    def names_of(self, event_types: frozenset[str]) -> frozenset[str]:
        """Return the stored type names that `event_types` (names of types or of classes) stand for."""
        return event_types if self.types is None else event_types | self.types.names_of(event_types)


def _checked_upcasters(where: str, upcast: Any) -> tuple[Upcaster, ...]:
    chain = (upcast,) if callable(upcast) else tuple(upcast)
    for upcaster in chain:
        if not callable(upcaster):
            msg = f"{where}: upcast must be functions (Payload) -> Payload, not {upcaster!r}."
            raise ConfigurationError(msg)
    return chain


# --- codec ----------------------------------------------------------------------------------------------


class PayloadCodec:
    """The :class:`~scriba.event.Codec` of sources that store a data and a metadata column."""

    def __init__(self, data: Column, metadata: Column, decoding: Decoding) -> None:
        self._data = data
        self._metadata = metadata
        self._is_none_empty = isinstance(metadata, JsonColumn)  #: a hook of the team's may make something of None
        self._types = decoding.types
        self._upcasters = decoding.upcasters
        self._unknown_type = decoding.unknown_type

    def decode(self, event: Event) -> Payload:
        """Decode, upcast, and build the class that the type names."""
        kind, stored = event.type, event.raw_metadata
        has_none = stored is None and self._is_none_empty
        metadata = {} if has_none else _as_mapping(self._metadata.load(stored, kind))
        payload = _new(Payload, (kind, self._data.load(event.raw, kind), metadata))
        for upcaster in self._upcasters:
            payload = _upcast(upcaster, payload)
        return payload if self._types is None else self._built(self._types, payload)

    def _built(self, types: TypeMap, payload: Payload) -> Payload:
        build: Build | None = types.find(payload.type)
        if build is not None:
            return payload._replace(data=build(payload.data))
        if self._unknown_type == "deliver":
            return payload
        if self._unknown_type == "skip":
            raise SkipEvent(payload.type)
        msg = f"no class is known for the event type {payload.type!r}: {types.described()}"
        raise UnknownEventType(msg)

    def stored(self, event: Event) -> tuple[Any, Any]:
        """Return (data, metadata) for a dead letter."""
        return self._data.stored(event.raw), self._metadata.stored(event.raw_metadata)

    def restore(self, event: Event) -> Event:
        """Return `event`, whose raw values come out of a dead letter, so that it decodes like a fetched one."""
        raw, metadata = self._data.restored(event.raw), self._metadata.restored(event.raw_metadata)
        return event._replace(raw=raw, raw_metadata=metadata, codec=self)


def _as_mapping(metadata: Any) -> Mapping[str, Any]:
    """Handlers are promised a mapping, whatever a team has stored."""
    if metadata is None:
        return {}
    if type(metadata) is dict or isinstance(metadata, Mapping):
        return metadata
    return {"metadata": metadata}


def _upcast(upcaster: Upcaster, payload: Payload) -> Payload:
    returned = upcaster(payload)
    if isinstance(returned, Payload):
        return returned
    if isinstance(returned, tuple) and len(returned) == len(Payload._fields):
        return Payload(*returned)
    name = getattr(upcaster, "__qualname__", repr(upcaster))
    msg = f"the upcaster {name} must return a Payload or (type, data, metadata), not {returned!r:.200}"
    raise TypeError(msg)
