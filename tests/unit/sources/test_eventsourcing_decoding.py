"""One event of the library eventsourcing, from what is stored to what a handler gets, and into a dead letter and back."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID, uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("eventsourcing")

from eventsourcing.cipher import AESCipher
from eventsourcing.compressor import ZlibCompressor
from eventsourcing.domain import Aggregate
from eventsourcing.persistence import (
    DatetimeAsISO,
    DecimalAsStr,
    JSONTranscoder,
    Mapper,
    Notification,
    Transcoding,
    UUIDAsHex,
)
from eventsourcing.utils import Environment

from scriba.event import Event
from scriba.sources.eventsourcing_decoding import MapperCodec, RecordedEvent, type_of

SECRET = "XX00-SECRET-IBAN"


class Account(Aggregate):
    class Opened(Aggregate.Created):
        iban: str
        limit: Decimal

    class Renamed(Aggregate.Event):
        """Changed once: version 1 had `name` only, and its upcaster quotes what it cannot split."""

        first: str
        last: str
        class_version = 2

        @staticmethod
        def upcast_v1_v2(state: dict[str, Any]) -> None:
            name = state.pop("name")
            if " " not in name:
                msg = f"no last name in {name!r}"
                raise LookupError(msg)
            state["first"], state["last"] = name.split(" ")

    class Moved(Aggregate.Event):
        """Changed three times, with one upcaster missing."""

        class_version = 3


class Shade:
    def __init__(self, name: str) -> None:
        self.name = name


class ShadeByName(Transcoding):
    type = Shade
    name = "shade"

    def encode(self, obj: Shade) -> str:
        return obj.name

    def decode(self, data: str) -> Shade:
        if data == SECRET:
            msg = f"no such shade: {data}"
            raise KeyError(msg)
        return Shade(data)


def mapper(*, key: bytes | None = None, compress: bool = False) -> Mapper[UUID]:
    transcoder = JSONTranscoder()
    for transcoding in (UUIDAsHex(), DecimalAsStr(), DatetimeAsISO(), ShadeByName()):
        transcoder.register(transcoding)
    cipher = None
    if key is not None:
        import base64

        cipher = AESCipher(Environment(env={"CIPHER_KEY": base64.b64encode(key).decode()}))
    return Mapper(transcoder, compressor=ZlibCompressor() if compress else None, cipher=cipher)


KEY, OTHER_KEY = b"k" * 32, b"o" * 32
TIME = datetime(2026, 3, 1, 12, 30, tzinfo=UTC)


def opened(**changes: Any) -> Account.Opened:
    made = object.__new__(Account.Opened)
    state = {
        "originator_id": uuid4(),
        "originator_version": 1,
        "timestamp": TIME,
        "originator_topic": "x:Account",
        "iban": SECRET,
        "limit": Decimal("10.50"),
    }
    made.__dict__.update(state | changes)
    return made


def notification(stored: Any, position: int = 7) -> Notification:
    return Notification(stored.originator_id, stored.originator_version, stored.topic, stored.state, position)


def recorded(codec: MapperCodec, by: Mapper[UUID], event: Any = None, position: int = 7) -> RecordedEvent:
    return codec.event(notification(by.to_stored_event(event or opened()), position), position)


def raw_event(codec: MapperCodec, topic: str, state: bytes) -> RecordedEvent:
    return codec.event(Notification(uuid4(), 3, topic, state, 9), 9)


TOPIC = f"{Account.__module__}:Account"


def test_the_handler_gets_the_domain_event() -> None:
    """The payload is what the application's mapper makes: the very class, with its typed attributes."""
    codec = MapperCodec(mapper(), "Bank")
    event = recorded(codec, mapper())

    payload = event.payload()

    assert isinstance(payload.data, Account.Opened)
    assert payload.data.limit == Decimal("10.50")
    assert payload.type == event.type == "Account.Opened"
    assert payload.metadata == {"topic": f"{TOPIC}.Opened", "originator_version": 1, "application": "Bank"}


def test_what_identifies_an_event_is_its_originator_and_version() -> None:
    """`id` is originator and version, `stream_id` the originator, `position` the notification id."""
    event = recorded(MapperCodec(mapper(), "Bank"), mapper(), opened(originator_version=4), position=12)

    originator = str(event.raw.originator_id)
    assert (event.id, event.stream_id, event.stream_version) == (f"{originator}:4", originator, 4)
    assert (event.position, event.partition, event.size) == (12, "", len(event.raw.state))


@pytest.mark.parametrize(
    ("topic", "expected"),
    [
        ("bank.domain:Account.Opened", "Account.Opened"),
        ("bank.domain", "bank.domain"),
        ("account-opened", "account-opened"),
    ],
)
def test_the_type_is_what_follows_the_colon(topic: str, expected: str) -> None:
    """A topic without a colon, which a class may choose as its own, is the type itself."""
    assert type_of(topic) == expected


def test_each_call_decodes_anew() -> None:
    """A retried handler never sees what a failed attempt did to the event."""
    event = recorded(MapperCodec(mapper(), "Bank"), mapper())

    event.payload().data.__dict__["iban"] = "spoilt"

    assert event.payload().data.iban == SECRET


class CountingMapper(Mapper):
    calls = 0

    def to_domain_event(self, stored_event: Any) -> Any:
        self.calls += 1
        return super().to_domain_event(stored_event)


def test_the_time_is_learnt_while_decoding_and_not_before() -> None:
    """Nobody pays for decoding twice: the reader not at all, the worker once."""
    counting = CountingMapper(mapper().transcoder)
    event = recorded(MapperCodec(counting, "Bank"), mapper())
    assert counting.calls == 0

    event.payload()

    assert event.occurred_at == TIME
    assert counting.calls == 1


def test_the_time_can_be_asked_for_before_decoding() -> None:
    """The lag in seconds needs the time of an event that no worker has seen; it is decoded once for that."""
    counting = CountingMapper(mapper().transcoder)
    event = recorded(MapperCodec(counting, "Bank"), mapper())

    assert [event.occurred_at, event.occurred_at] == [TIME, TIME]
    assert counting.calls == 1


@pytest.mark.parametrize("timestamp", [datetime(2026, 3, 1, 12, 30), "2026-03-01", None])
def test_a_time_without_a_zone_is_no_time(timestamp: object) -> None:
    """Nobody knows which instant it was."""
    event = recorded(MapperCodec(mapper(), "Bank"), mapper(), opened(timestamp=timestamp))

    event.payload()

    assert event.occurred_at is None


def test_the_time_of_an_event_that_cannot_be_decoded_is_unknown() -> None:
    """Asking for the time never raises: the worker finds and reports what is wrong."""
    codec = MapperCodec(mapper(), "Bank")

    assert raw_event(codec, f"{TOPIC}.Opened", b"\xff").occurred_at is None


@pytest.mark.parametrize(
    ("topic", "state", "kind"),
    [
        ("no.such.module:Thing", b"{}", "TopicError"),
        (f"{TOPIC}.NeverWas", b"{}", "TopicError"),
        (f"{TOPIC}.Opened", b"\xff\xfe", "MapperDeserialisationError"),
        (f"{TOPIC}.Opened", b'{"x": {"_type_": "unknown", "_data_": 1}}', "MapperDeserialisationError"),
        (f"{TOPIC}.Moved", b'{"class_version": 2}', "AttributeError"),
        (f"{TOPIC}.Renamed", b'{"name": "Cher"}', "LookupError"),
    ],
)
def test_what_the_mapper_raises_is_raised(topic: str, state: bytes, kind: str) -> None:
    """Module gone, class gone, wrong bytes, unknown transcoding, missing or failing upcaster: the class names the kind."""
    event = raw_event(MapperCodec(mapper(), "Bank"), topic, state)

    with pytest.raises(Exception) as caught:
        event.payload()

    assert type(caught.value).__qualname__ == kind


def test_old_versions_are_upcast() -> None:
    """Upcasting is the application's own, and runs before the handler."""
    event = raw_event(MapperCodec(mapper(), "Bank"), f"{TOPIC}.Renamed", b'{"name": "Ada L"}')

    data = event.payload().data
    assert (data.first, data.last) == ("Ada", "L")


# --- an encrypted store -------------------------------------------------------------------------------------------


def everything_about(error: BaseException) -> str:
    """Return all that a log, a table or a crash reporter could take from an error."""
    seen = []
    cause: BaseException | None = error
    while cause is not None:
        seen += [*map(repr, cause.args), str(cause), repr(vars(cause)), *traceback.format_exception(cause)]
        cause = cause.__cause__ or cause.__context__
    return "\n".join(seen)


def failure(event: Event) -> Exception:
    with pytest.raises(Exception) as caught:
        event.payload()
    return caught.value


def encrypted(state: Any, **event: Any) -> tuple[MapperCodec, RecordedEvent]:
    """Return an event whose encrypted state is `state` (bytes, or what is written as JSON)."""
    own = mapper(key=KEY)
    clear = state if isinstance(state, bytes) else json.dumps(state).encode()
    codec = MapperCodec(own, "Bank")
    assert own.cipher is not None
    return codec, raw_event(codec, event.get("topic", f"{TOPIC}.Opened"), own.cipher.encrypt(clear))


def test_an_encrypted_event_is_decrypted_for_the_handler_only() -> None:
    """The handler sees the domain event; its dead letter keeps the encrypted bytes and the topic."""
    codec = MapperCodec(mapper(key=KEY, compress=True), "Bank")
    event = recorded(codec, mapper(key=KEY, compress=True))

    assert event.payload().data.iban == SECRET

    data, metadata = event.stored()
    assert data == event.raw.state
    assert metadata == {"topic": f"{TOPIC}.Opened"}


def test_the_time_of_an_encrypted_event_is_part_of_what_is_encrypted() -> None:
    """It would end up in clear text in dead letters and in the lag."""
    event = recorded(MapperCodec(mapper(key=KEY), "Bank"), mapper(key=KEY))

    before, _, after = event.occurred_at, event.payload(), event.occurred_at

    assert (before, after) == (None, None)


@pytest.mark.parametrize(
    ("state", "topic", "kind"),
    [
        ({"name": SECRET}, f"{TOPIC}.Renamed", "LookupError"),
        ({"x": {"_type_": "shade", "_data_": SECRET}}, f"{TOPIC}.Opened", "MapperDeserialisationError"),
        ({"x": {"_type_": "datetime_iso", "_data_": SECRET}}, f"{TOPIC}.Opened", "MapperDeserialisationError"),
        ({"x": {"_type_": SECRET, "_data_": 1}}, f"{TOPIC}.Opened", "MapperDeserialisationError"),
        (SECRET.encode() + b"\xff", f"{TOPIC}.Opened", "MapperDeserialisationError"),
    ],
)
def test_an_error_quotes_nothing_that_was_decrypted(state: Any, topic: str, kind: str) -> None:
    """The kind stays what it was; every word of the message, of the causes and of the contexts is safe to store."""
    _, event = encrypted(state, topic=topic)

    error = failure(event)

    assert type(error).__qualname__ == kind
    assert SECRET not in everything_about(error)
    assert "withheld" in str(error)
    assert topic in str(error)


def test_a_wrong_key_is_named_as_one() -> None:
    """Every event fails alike then, and the operator must learn why."""
    event = recorded(MapperCodec(mapper(key=OTHER_KEY), "Bank"), mapper(key=KEY))

    error = failure(event)

    assert type(error).__qualname__ == "MapperDeserialisationError"
    assert "key" in str(error)


def test_a_topic_that_is_gone_is_named_in_an_encrypted_store_too() -> None:
    """Topics are stored in clear text, so the reason may be told."""
    _, event = encrypted({}, topic="no.such.module:Thing")

    error = failure(event)

    assert type(error).__qualname__ == "TopicError"
    assert "no.such.module" in str(error)


# --- into a dead letter and back ----------------------------------------------------------------------------------


def from_letter(event: Event) -> Event:
    """Return what comes out of a dead letter: the stored data, without a codec."""
    data, metadata = event.stored()
    return Event(event.position, event.stream_id, event.type, event.id, raw=data, raw_metadata=metadata)


@pytest.mark.parametrize(
    "make",
    [mapper, lambda: mapper(compress=True), lambda: mapper(key=KEY), lambda: mapper(key=KEY, compress=True)],
    ids=["plain", "compressed", "encrypted", "compressed and encrypted"],
)
def test_a_dead_letter_decodes_like_the_event(make: Callable[[], Mapper[UUID]]) -> None:
    """Restored from what was stored, for the day when the log itself has lost the event."""
    codec = MapperCodec(make(), "Bank")
    event = recorded(codec, make())

    restored = codec.restore(from_letter(event), UUID)

    assert restored.payload() == event.payload()
    assert (restored.id, restored.stream_version) == (event.id, 1)


def test_an_operator_can_read_a_dead_letter() -> None:
    """A state that is JSON is kept as JSON."""
    data, _ = recorded(MapperCodec(mapper(), "Bank"), mapper()).stored()

    assert data["iban"] == SECRET
    assert data["limit"] == {"_type_": "decimal_str", "_data_": "10.50"}


@given(st.binary())
def test_storing_never_fails(state: bytes) -> None:
    """A dead letter is written about bytes that nobody can read, too."""
    codec = MapperCodec(mapper(), "Bank")
    event = raw_event(codec, f"{TOPIC}.Opened", state)

    data, _ = event.stored()

    assert data == state or repr(data) == repr(json.loads(state))


def test_storing_survives_a_state_that_is_nested_without_end() -> None:
    """What JSON cannot be parsed into is kept as bytes."""
    event = raw_event(MapperCodec(mapper(), "Bank"), f"{TOPIC}.Opened", b"[" * 200_000)

    assert event.stored()[0] == b"[" * 200_000
