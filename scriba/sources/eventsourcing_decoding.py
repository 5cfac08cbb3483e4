"""What happens to one event of the library ``eventsourcing`` between its log and a handler, and back.

The reader thread passes on what the recorder stored, untouched. A worker turns it into the domain event, with the
application's own mapper: its transcodings, upcasters, compressor and cipher. Whatever the mapper raises is that one
event's dead letter (``decode:<class>``).

What always holds: while the application has a cipher, nothing that was encrypted leaves this module except inside
the domain event that the handler gets. Dead letters keep the encrypted state and the topic; the errors raised here
carry no word of what was decrypted; and no time, because the time is part of what was encrypted.
"""

from __future__ import annotations

import functools
import json
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from scriba.event import Event, Payload

if TYPE_CHECKING:
    from collections.abc import Callable
    from uuid import UUID

    from eventsourcing.persistence import Mapper, StoredEvent

__all__ = ["DetailsWithheld", "MapperCodec", "RecordedEvent", "StoredState", "type_of"]


class StoredState(NamedTuple):
    """What the mapper reads of a stored event: the same names as the library's own ``Notification``."""

    id: int
    originator_id: Any
    originator_version: int
    topic: str
    state: bytes


class RecordedEvent(Event):
    """An event whose time lies inside its payload: found when somebody asks, and remembered once found.

    The library has no column for the time, and decoding costs more than all else that a reader does. So the reader
    leaves it out, the worker learns it while it decodes for the handler, and nobody decodes for the time alone
    except who asks for it before that (the lag: once a second).
    """

    @property
    def occurred_at(self) -> datetime | None:
        if "_occurred_at" not in self.__dict__:
            codec = self.codec
            self.remember_time(codec.time_of(self) if isinstance(codec, MapperCodec) else None)
        known: datetime | None = self.__dict__["_occurred_at"]
        return known

    def remember_time(self, occurred_at: datetime | None) -> None:
        self.__dict__["_occurred_at"] = occurred_at


class DetailsWithheld(Exception):  # noqa: N818 - the ground of the classes made by `_withheld`
    """An event of an encrypted store could not be decoded, and the original error may quote what was decrypted."""


class MapperCodec:
    """Decodes with the application's mapper. Shared by all workers: the mapper keeps no state between calls."""

    def __init__(self, mapper: Mapper[Any], application_name: str) -> None:
        self._mapper = mapper
        self._application_name = application_name
        self._is_secret = mapper.cipher is not None
        self._is_json = mapper.cipher is None and mapper.compressor is None

    def event(self, stored: StoredEvent | StoredState, position: int) -> RecordedEvent:
        """Return the event at `position`, undecoded."""
        originator_id = str(stored.originator_id)
        return RecordedEvent(
            position=position,
            stream_id=originator_id,
            type=type_of(stored.topic),
            id=f"{originator_id}:{stored.originator_version}",
            raw=stored,
            stream_version=stored.originator_version,
            size=len(stored.state),
            codec=self,
        )

    # --- towards the handler ------------------------------------------------------------------------------

    def decode(self, event: Event) -> Payload:
        """Return the domain event; raise what the mapper raised, without details where they are secret."""
        stored = event.raw
        domain_event = self._domain_event(stored)
        if isinstance(event, RecordedEvent):
            event.remember_time(self._time_in(domain_event))
        metadata = {
            "topic": stored.topic,
            "originator_version": stored.originator_version,
            "application": self._application_name,
        }
        return Payload(event.type, domain_event, metadata)

    def time_of(self, event: Event) -> datetime | None:
        """Return the time inside the payload, or None: not there, not readable, without a zone, or encrypted."""
        if self._is_secret:
            return None
        try:
            return self._time_in(self._mapper.to_domain_event(event.raw))
        except Exception:  # noqa: BLE001 - found again, and reported, when a worker decodes the event
            return None

    def _domain_event(self, stored: Any) -> Any:
        if not self._is_secret:
            return self._mapper.to_domain_event(stored)
        try:
            return self._mapper.to_domain_event(stored)
        except Exception as error:  # noqa: BLE001 - any upcaster's: raised again below, as far as it may be told
            failed = _withheld(error, self._mapper, stored)
        raise failed  # outside the block, so that the original, which may quote clear text, is not its context

    def _time_in(self, domain_event: object) -> datetime | None:
        occurred_at = None if self._is_secret else getattr(domain_event, "timestamp", None)
        if not isinstance(occurred_at, datetime) or occurred_at.utcoffset() is None:
            return None
        return occurred_at

    # --- into a dead letter, and out of one ---------------------------------------------------------------

    def stored(self, event: Event) -> tuple[Any, Any]:
        """Return (data, metadata) for a dead letter: the state as JSON where it is JSON, else its bytes."""
        stored = event.raw
        if self._is_secret:
            return bytes(stored.state), {"topic": stored.topic}
        metadata = {
            "topic": stored.topic,
            "originator_version": stored.originator_version,
            "application": self._application_name,
        }
        return self._readable(bytes(stored.state)), metadata

    def _readable(self, state: bytes) -> Any:
        if self._is_json:
            try:
                return json.loads(state)
            except (ValueError, RecursionError):  # another transcoder, or the very damage that the letter is about
                pass
        return state

    def restore(self, event: Event, original_id: Callable[[str], UUID | str]) -> RecordedEvent:
        """Return `event`, whose ``raw`` and ``raw_metadata`` come out of a dead letter, as the log would hand it over.

        `original_id` turns an id that was written as text into what the log hands out.
        """
        text, _, version = event.id.rpartition(":")
        topic = event.raw_metadata["topic"]
        raw = event.raw
        state = raw if isinstance(raw, bytes) else json.dumps(raw, separators=(",", ":"), ensure_ascii=False).encode()
        stored = StoredState(event.position, original_id(text), int(version), topic, state)
        return self.event(stored, event.position)


@functools.lru_cache(maxsize=4096)
def type_of(topic: str) -> str:
    """Return the event type that a topic names: what follows its colon, or all of it (a class's own ``TOPIC``)."""
    return topic.partition(":")[2] or topic


def _withheld(error: Exception, mapper: Mapper[Any], stored: Any) -> DetailsWithheld:
    """Return an error of the same class name that says where decoding failed, and nothing of what was decrypted."""
    kind = type(type(error).__name__, (DetailsWithheld,), {"__qualname__": type(error).__qualname__})
    failed: DetailsWithheld = kind(
        f"event {stored.originator_id}:{stored.originator_version} with topic {stored.topic!r} {_where(mapper, stored)}"
    )
    return failed


def _where(mapper: Mapper[Any], stored: Any) -> str:
    from eventsourcing.utils import resolve_topic  # noqa: PLC0415 - an extra, loaded when it is in use

    try:
        resolve_topic(stored.topic)
    except Exception as error:  # noqa: BLE001 - importing a module may raise anything; topics are not encrypted
        return f"cannot be decoded: {error}"
    try:
        if mapper.cipher is not None:
            mapper.cipher.decrypt(stored.state)
    except Exception:  # noqa: BLE001 - a cipher of the user's choice
        return "cannot be decrypted: the key is not the one it was encrypted with, or the state is damaged."
    return (
        "was decrypted but not decoded. The error is withheld, because it may quote what was encrypted; call "
        "mapper.to_domain_event() of the application in a shell to see it."
    )
