"""From what is stored to what a handler gets: JSON, upcasters, classes of every library, and the way into a dead letter."""

from __future__ import annotations

import dataclasses
import enum
import json
import threading
import uuid
from collections.abc import Callable
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

import attrs
import pytest
from django.core.serializers.json import DjangoJSONEncoder

from scriba.event import Event, Payload, SkipEvent
from scriba.exceptions import ConfigurationError
from scriba.sources import building
from scriba.sources.building import PayloadMismatch
from scriba.sources.decoding import Decoding, JsonColumn, PayloadCodec, RawColumn, UnknownEventType, load_json

ID = uuid.UUID("11111111-2222-3333-4444-555555555555")
AT = datetime(2026, 3, 1, 12, 30, 15, 123456, tzinfo=UTC)


class Kind(enum.Enum):
    GIFT = "gift"


@dataclasses.dataclass(frozen=True)
class Line:
    sku: str
    price: Decimal


@dataclasses.dataclass(frozen=True)
class Placed:
    order_id: uuid.UUID
    at: datetime
    total: Decimal
    lines: list[Line] = dataclasses.field(default_factory=list)
    kind: Kind | None = None
    day: date | None = None
    hour: time | None = None
    lasted: timedelta | None = None
    blob: bytes | None = None


@attrs.frozen
class Shipped:
    order_id: uuid.UUID
    carrier: str = "mail"


def codec(**options: Any) -> PayloadCodec:
    return PayloadCodec(JsonColumn(), JsonColumn(), Decoding("Source", **options))


def event(data: Any, type: str = "Placed", metadata: Any = None, *, of: PayloadCodec | None = None) -> Event:
    raw = data if isinstance(data, str | bytes) else json.dumps(data, cls=DjangoJSONEncoder)
    return Event(1, "s", type, "1", raw, None if metadata is None else json.dumps(metadata), codec=of or codec())


PLACED = {"order_id": ID, "at": AT, "total": Decimal("10.10")}


# --- JSON -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"n": 123456789012345678901234567890}', {"n": 123456789012345678901234567890}),
        ('{"n": 18446744073709551616, "m": -9223372036854775809}', {"n": 2**64, "m": -(2**63) - 1}),
        ("[NaN, Infinity]", None),
        (r'"\ud800"', "\ud800"),
        ('"1234567890123456789012"', "1234567890123456789012"),
        (b'{"a": "\xc3\xa4"}', {"a": "ä"}),
    ],
)
def test_json_is_read_exactly(text, value):
    """Whatever parser is installed, numbers keep their digits and everything that Python writes is read."""
    found = load_json(text)
    assert str(found) == str(json.loads(text))
    assert value is None or found == value


def test_an_event_is_decoded_anew_each_time():
    """A retried handler never sees what a failed attempt did to a dict."""
    stored = event({"lines": [1]})
    stored.payload().data["lines"].append(2)
    assert stored.payload().data == {"lines": [1]}


@pytest.mark.parametrize(
    ("metadata", "given"), [(None, {}), ({"a": 1}, {"a": 1}), ([1], {"metadata": [1]}), ("x", {"metadata": "x"})]
)
def test_metadata_is_always_a_mapping(metadata, given):
    """Handlers look keys up, whatever a team has stored."""
    assert event({}, metadata=metadata).payload().metadata == given


@pytest.mark.parametrize("raw", ["{", "not json", '{"a": }', "\ud800"])
def test_what_is_no_json_is_kept_as_bytes_and_fails_again(raw):
    """A dead letter never loses what was stored, and a replay finds the same fault."""
    broken = event(raw)
    with pytest.raises(ValueError):
        broken.payload()
    data, metadata = broken.stored()
    assert isinstance(data, bytes)
    restored = codec().restore(broken._replace(raw=data, raw_metadata=metadata, codec=None))
    assert restored.raw == raw
    with pytest.raises(ValueError):
        restored.payload()


def test_a_decoder_of_the_field_is_used():
    """A JSONField with its own decoder decodes as it does in Django."""

    class Upper(json.JSONDecoder):
        def decode(self, text, **_):  # type: ignore[override]
            return super().decode(text.upper())

    column = JsonColumn(decoder=Upper)
    assert column.load('{"a": "b"}', "t") == {"A": "B"}


def test_a_hook_reads_what_only_the_team_can_read():
    """The hook gets what is stored and the type; the letter keeps it, and restores it unchanged."""
    column = RawColumn(lambda raw, event_type: (event_type, bytes(raw)))
    assert column.load(b"\x00", "T") == ("T", b"\x00")
    assert column.restored(column.stored(memoryview(b"\x00"))) == b"\x00"
    assert column.stored("text") == "text"


# --- classes --------------------------------------------------------------------------------------------


def test_a_dataclass_gets_its_typed_fields():
    """Times, UUIDs, Decimals, nested classes and enums arrive as their types, read as Django's encoder writes them."""
    data = {
        **PLACED, "lines": [{"sku": "a", "price": "1.50"}], "kind": "gift", "day": date(2026, 3, 1), "hour": time(8, 30),
        "lasted": timedelta(minutes=5), "blob": "aGk=",
    }  # fmt: skip
    built = event(data, of=codec(types=[Placed])).payload().data
    assert built == Placed(
        ID, built.at, Decimal("10.10"), [Line("a", Decimal("1.50"))], Kind.GIFT, date(2026, 3, 1), time(8, 30),
        timedelta(minutes=5), b"hi",
    )  # fmt: skip
    assert built.at == AT.replace(microsecond=123000)  # the encoder keeps milliseconds
    assert built.at.utcoffset() == timedelta(0)


def test_an_attrs_class_is_built_and_unknown_keys_are_left_out():
    """Events grow; an old reader takes what it knows."""
    stored = event({"order_id": str(ID), "new": 1}, "Shipped", of=codec(types=[Placed, Shipped]))
    assert stored.payload().data == Shipped(ID)


def test_unknown_keys_can_be_forbidden():
    """Who wants strictness gets it, with the key in the message."""
    stored = event({"order_id": str(ID), "new": 1}, "Shipped", of=codec(types=[Shipped], unknown_keys="forbid"))
    with pytest.raises(PayloadMismatch, match="extra fields found"):
        stored.payload()


def test_a_payload_that_does_not_fit_names_every_fault():
    """The dead letter says which fields are wrong, and where they are."""
    stored = event({"order_id": "no", "total": "1", "lines": [{"sku": "a"}]}, of=codec(types=[Placed]))
    with pytest.raises(PayloadMismatch) as caught:
        stored.payload()
    for part in ("Placed", "order_id", "at", "price", "lines"):
        assert part in str(caught.value)


@pytest.mark.parametrize("kind", building._READ, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("value", ["no such thing", {"a": 1}], ids=repr)
def test_a_value_of_the_wrong_kind_is_named_in_words(kind: type, value: object):
    """Whatever a class raises for what it cannot read: the dead letter says what was expected, and where."""
    made = dataclasses.make_dataclass("Made", [("field", kind)])
    with pytest.raises(PayloadMismatch) as caught:
        event({"field": value}, "Made", of=codec(types=[made])).payload()
    assert "invalid value for type, expected" in str(caught.value)
    assert str(caught.value).endswith("@ Made.field")


def test_a_pydantic_model_is_built_by_pydantic():
    pydantic = pytest.importorskip("pydantic")

    class Paid(pydantic.BaseModel):
        order_id: uuid.UUID
        amount: Decimal = pydantic.Field(alias="sum")
        note: str = pydantic.Field("", validation_alias=pydantic.AliasChoices("note", pydantic.AliasPath("notes", 0)))

    data = {"order_id": str(ID), "sum": "1.5", "new": 1}
    built = event(data, "Paid", of=codec(types={"Paid": Paid})).payload().data
    assert (built.order_id, built.amount) == (ID, Decimal("1.5"))
    with pytest.raises(PayloadMismatch, match="new"):
        event(data, "Paid", of=codec(types={"Paid": Paid}, unknown_keys="forbid")).payload()
    strict = codec(types={"Paid": Paid}, unknown_keys="forbid")
    assert event({"order_id": str(ID), "sum": 1, "notes": ["n"]}, "Paid", of=strict).payload().data.note == "n"
    with pytest.raises(pydantic.ValidationError):
        event({}, "Paid", of=codec(types={"Paid": Paid})).payload()


def test_a_msgspec_struct_is_built_by_msgspec():
    msgspec = pytest.importorskip("msgspec")
    paid = msgspec.defstruct("Paid", [("order_id", uuid.UUID), ("at", datetime), ("amount", Decimal)], rename="camel")
    data = {"orderId": str(ID), "at": AT.isoformat(), "amount": "1.5", "new": 1}
    built = event(data, "Paid", of=codec(types=[paid])).payload().data
    assert (built.order_id, built.at, built.amount) == (ID, AT, Decimal("1.5"))
    with pytest.raises(PayloadMismatch, match="new"):
        event(data, "Paid", of=codec(types=[paid], unknown_keys="forbid")).payload()


def test_a_function_may_stand_in_place_of_a_class():
    """A mapping or a callable may give whatever builds the event."""
    by_mapping = codec(types={"Placed": lambda data: ("built", data)})
    by_callable = codec(types=lambda name: Shipped if name == "Shipped" else None)
    assert event({"a": 1}, of=by_mapping).payload().data == ("built", {"a": 1})
    assert event({"order_id": str(ID)}, "Shipped", of=by_callable).payload().data == Shipped(ID)
    assert event({"a": 1}, "Other", of=by_callable).payload().data == {"a": 1}


@pytest.mark.parametrize("name", ["Placed", f"{__name__}.Placed"])
def test_a_listed_class_stands_for_its_names(name):
    """Name, qualified name and dotted path: what stores write."""
    assert isinstance(event(PLACED, name, of=codec(types=[Placed])).payload().data, Placed)


def test_unknown_types_are_delivered_skipped_or_failed():
    """The three answers to a type that nobody knows."""
    types = [Placed]
    assert event({"a": 1}, "New", of=codec(types=types)).payload() == ("New", {"a": 1}, {})
    with pytest.raises(SkipEvent):
        event({}, "New", of=codec(types=types, unknown_type="skip")).payload()
    with pytest.raises(UnknownEventType, match=r"'New': known are .*Placed"):
        event({}, "New", of=codec(types=types, unknown_type="fail")).payload()


def test_a_builder_is_made_once_for_all_threads(monkeypatch):
    """Code is generated per class, not per event and not per thread."""
    made = []
    original = building._BUILDERS["cattrs"]
    monkeypatch.setitem(
        building._BUILDERS, "cattrs", lambda given, forbid: made.append(given) or original(given, forbid)
    )
    shared = codec(types=[Placed])
    start = threading.Barrier(4)

    def decode():
        start.wait()
        for _ in range(50):
            event(PLACED, of=shared).payload()

    threads = [threading.Thread(target=decode) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [Placed]


# --- upcasters ------------------------------------------------------------------------------------------


def test_upcasters_run_in_order_before_the_class_is_chosen():
    """Each gets what the one before it returned; names, data and metadata may all change."""

    def rename(payload: Payload) -> Payload:
        return payload._replace(type="Shipped") if payload.type == "Sent" else payload

    def fill(payload: Payload) -> tuple[str, Any, dict[str, Any]]:
        return payload.type, {**payload.data, "carrier": "boat"}, {"upcast": True}

    stored = event({"order_id": str(ID)}, "Sent", of=codec(types=[Shipped], upcast=[rename, fill]))
    assert stored.payload() == ("Shipped", Shipped(ID, "boat"), {"upcast": True})


def test_one_upcaster_needs_no_list():
    assert event({}, of=codec(upcast=lambda payload: payload._replace(data=1))).payload().data == 1


@pytest.mark.parametrize("returned", [None, ("a", "b"), {"type": "t"}])
def test_an_upcaster_that_returns_something_else_is_named(returned):
    """A missing return is a fault of the event's, with the function's name."""

    def forgetful(payload):
        return returned

    with pytest.raises(TypeError, match="forgetful must return a Payload"):
        event({}, of=codec(upcast=[forgetful])).payload()


# --- options --------------------------------------------------------------------------------------------


def two_of_a_name() -> list[type]:
    return [dataclasses.make_dataclass("Same", ["a"]), dataclasses.make_dataclass("Same", ["b"])]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"types": "Placed"}, "types must be a list of classes"),
        ({"types": 5}, "types must be a list of classes"),
        ({"types": [Placed, "Shipped"]}, "'Shipped' is none"),
        ({"types": [int]}, "no dataclass, attrs class, pydantic model or msgspec struct"),
        ({"types": {"a": 5}}, r"types\['a'\] must be a class"),
        ({"types": {5: Placed}}, "strings, not 5"),
        ({"types": two_of_a_name()}, "two classes of types are called 'Same'"),
        ({"types": [Placed], "unknown_type": "skp"}, "did you mean 'skip'"),
        ({"unknown_type": "skip"}, "needs types"),
        ({"types": [Placed], "unknown_keys": "forbidden"}, "did you mean 'forbid'"),
        ({"upcast": [1]}, "upcast must be functions"),
    ],
)
def test_a_wrong_option_is_said_at_once(options, told):
    """Not at the first event, and with the accepted values."""
    with pytest.raises(ConfigurationError, match=told):
        codec(**options)


def test_a_missing_converter_names_the_extra(monkeypatch):
    """cattrs is needed only when such classes are given, and the message says how to get it."""
    find: Callable[..., Any] = building.importlib.util.find_spec
    monkeypatch.setattr(building.importlib.util, "find_spec", lambda name: None if name == "cattrs" else find(name))
    with pytest.raises(ConfigurationError, match=r"pip install scriba\[types\]"):
        codec(types=[Placed])
    codec(types={"a": lambda data: data})


def test_a_class_of_a_callable_is_judged_when_it_comes_up():
    """What a callable returns is known only then: that event is dead-lettered with the reason."""
    with pytest.raises(ConfigurationError, match="no dataclass"):
        event({}, of=codec(types=lambda name: int)).payload()
