"""Events and what a handler learns about them: frozen values.

An :class:`Event` carries its payload *undecoded* until somebody asks, so that the reader thread stays
cheap and a payload that cannot be decoded is one event's fault, found in the worker. Each call of
:meth:`Event.payload` decodes anew: a retried handler never sees what a failed attempt did to a dict.
Nothing here knows Django or a database driver.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

if TYPE_CHECKING:
    from datetime import datetime

__all__ = ["Codec", "Event", "EventMeta", "Payload", "SkipEvent", "ordering_key_in", "storable_key"]

LONGEST_KEY: Final = 400  #: characters; with the name of a projection they fit into an index row, whatever the letters


class Payload(NamedTuple):
    """A decoded event: what upcasters receive and return, and what the handler gets."""

    type: str
    data: Any
    metadata: Mapping[str, Any]


class SkipEvent(Exception):  # noqa: N818 - a decision, not an error
    """Raised by a codec for an event that its source was told not to deliver (``unknown_type="skip"``)."""


class Codec(Protocol):
    """Turns what a source stored into what a handler gets. Called in worker threads: no shared state."""

    def decode(self, event: Event) -> Payload:
        """Return the decoded payload of `event`; any exception is that event's dead letter."""
        ...

    def stored(self, event: Event) -> tuple[Any, Any]:
        """Return (data, metadata) as the source stored them, for a dead letter; never raises.

        Plain JSON values where the stored form is JSON, ``bytes`` where it is not.
        """
        ...


class Event(NamedTuple):
    """One fact from a source.

    `position` orders events inside one `partition` and never identifies one; `id` identifies and never
    orders. `raw` is whatever the source's `codec` understands; without a codec it is the data itself.
    """

    position: int
    stream_id: str
    type: str
    id: str = ""
    raw: Any = None
    raw_metadata: Any = None
    occurred_at: datetime | None = None
    stream_version: int | None = None
    correlation_id: str | None = None
    causation_id: str | None = None
    partition: str = ""
    size: int = 0  #: bytes of payload, as far as the source knows; bounds what is in flight
    codec: Codec | None = None

    def payload(self) -> Payload:
        """Decode: a fresh value at each call. Raises whatever the codec raises."""
        if self.codec is None:
            return Payload(self.type, self.raw, self.raw_metadata or {})
        return self.codec.decode(self)

    def stored(self) -> tuple[Any, Any]:
        """Return (data, metadata) as stored: what a dead letter keeps."""
        if self.codec is None:
            return self.raw, self.raw_metadata or {}
        return self.codec.stored(self)

    @property
    def data(self) -> Any:
        """The decoded data, decoded anew at each access (for `partition_by` callables)."""
        return self.payload().data

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The decoded metadata, decoded anew at each access."""
        return self.payload().metadata


class EventMeta(NamedTuple):
    """The second argument of a handler.

    `id` answers "is this the event I saw before?", `position` answers "where is it in the order?".
    `stream_version`, `correlation_id` and `causation_id` are None where the source has none.
    `replaying` is true while a dead letter is applied later, so that handlers can hold back side effects.
    """

    id: str
    stream_id: str
    position: int
    type: str
    metadata: Mapping[str, Any]
    occurred_at: datetime | None
    correlation_id: str | None = None
    causation_id: str | None = None
    stream_version: int | None = None
    replaying: bool = False


def ordering_key_in(partition: str, key: str) -> str:
    """Return the ordering key as it is stored: keys of a named partition never meet those of another."""
    return f"{partition}/{key}" if partition else key


def storable_key(key: str) -> str:
    """Return an ordering key as the tables hold it: itself, unless PostgreSQL cannot store or index it.

    Then its readable beginning and a hash of the whole: different keys never meet.
    """
    if len(key) <= LONGEST_KEY and "\x00" not in key and (key.isascii() or _is_encodable(key)):
        return key
    shown = key[:LONGEST_KEY].replace("\x00", "\\x00").encode("utf-8", "backslashreplace").decode()
    return f"{shown[: LONGEST_KEY // 2]}…#{hashlib.sha256(key.encode('utf-8', 'surrogatepass')).hexdigest()}"


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
