"""The options of CommandedSource: checked where they are written, before anything connects."""

from __future__ import annotations

import dataclasses
from decimal import Decimal
from typing import Any

import pytest

from scriba.event import Event, Payload, SkipEvent
from scriba.exceptions import ConfigurationError
from scriba.sources.commanded import CommandedSource
from scriba.sources.commanded_serializers import codec_for
from scriba.sources.decoding import UnknownEventType


@dataclasses.dataclass
class OrderPlaced:
    order_id: str
    amount: Decimal


def payload_of(kind: str, **options: Any) -> Payload:
    source = CommandedSource(dsn="dbname=x", **options)
    codec = codec_for(source.serializer, "bytea", "public", source.decoding)
    return codec.decode(Event(1, "s", kind, raw=b'{"order_id": "7", "amount": "10.50"}', codec=codec))


@pytest.mark.parametrize("kind", ["Elixir.Shop.Events.OrderPlaced", "Shop.OrderPlaced", "OrderPlaced"])
def test_a_class_stands_for_its_name_behind_any_modules(kind: str) -> None:
    """A list of classes fits whole module names, names without `Elixir.`, and bare names; fields get their types."""
    payload = payload_of(kind, types=[OrderPlaced])

    assert payload == (kind, OrderPlaced("7", Decimal("10.50")), {})


def test_other_type_names_are_mapped() -> None:
    """A type provider with names of its own, and two modules with one name, are told apart by a mapping."""
    types = {
        "order_placed": OrderPlaced,
        "Elixir.A.Placed": OrderPlaced,
        "Elixir.B.Placed": lambda data: data["order_id"],
    }

    assert payload_of("order_placed", types=types).data == OrderPlaced("7", Decimal("10.50"))
    assert payload_of("Elixir.A.Placed", types=types).data == OrderPlaced("7", Decimal("10.50"))
    assert payload_of("Elixir.B.Placed", types=types).data == "7"


def test_a_callable_is_asked_with_the_whole_name_first() -> None:
    """A callable sees the name as stored, and then its shorter forms, until it knows one."""
    asked: list[str] = []

    payload_of("Elixir.Shop.Gone", types=asked.append)

    assert asked == ["Elixir.Shop.Gone", "Shop.Gone", "Gone"]


def test_an_unknown_type_is_delivered_skipped_or_refused() -> None:
    """An event type that no class is known for follows `unknown_type`."""
    assert payload_of("Elixir.Shop.Gone", types=[OrderPlaced]).data["order_id"] == "7"
    with pytest.raises(SkipEvent):
        payload_of("Elixir.Shop.Gone", types=[OrderPlaced], unknown_type="skip")
    with pytest.raises(UnknownEventType, match=r"Elixir\.Shop\.Gone"):
        payload_of("Elixir.Shop.Gone", types=[OrderPlaced], unknown_type="fail")


def test_old_shapes_are_upcast_before_they_are_built() -> None:
    """Commanded upcasts in memory and keeps old shapes for ever; here a chain of functions does it, then the class."""

    def rename(payload: Payload) -> Payload:
        return payload._replace(type=payload.type.replace("Created", "Placed"))

    def raise_amount(payload: Payload) -> Any:
        return payload.type, {**payload.data, "amount": "11"}, {**payload.metadata, "upcast": True}

    payload = payload_of("Elixir.Shop.OrderCreated", types=[OrderPlaced], upcast=[rename, raise_amount])

    assert payload == ("Elixir.Shop.OrderPlaced", OrderPlaced("7", Decimal(11)), {"upcast": True})


def test_event_types_may_be_the_classes_of_the_type_map() -> None:
    """A projection that names a class filters for every type name that stands for it."""
    source = CommandedSource(dsn="dbname=x", types={"order_placed": OrderPlaced, "other": OrderPlaced})

    assert source.narrow(frozenset({"OrderPlaced"})).event_types == ["OrderPlaced", "order_placed", "other"]
    assert source.event_types is None


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "either using='alias' or dsn="),
        ({"using": "a", "dsn": "b"}, "either using='alias' or dsn="),
        ({"dsn": "x", "schema": ""}, "schema must be a name"),
        ({"dsn": "x", "stream": 7}, "stream must be a name"),
        ({"dsn": "x", "serializer": "jsno"}, "did you mean 'json'"),
        ({"dsn": "x", "checkpoint": "share"}, "did you mean 'shared'"),
        ({"dsn": "x", "wakeup": "listen"}, "accepted: notify, poll"),
        ({"dsn": "x", "start_from": "begin"}, "'origin', 'current', or a number"),
        ({"dsn": "x", "start_from": -1}, "'origin', 'current', or a number"),
        ({"dsn": "x", "start_from": True}, "'origin', 'current', or a number"),
        ({"dsn": "x", "lock_style": "one"}, "lock_style='one' is unknown"),
        ({"dsn": "x", "subscription_name": "a"}, "subscription_name is for checkpoint='shared'"),
        ({"dsn": "x", "types": "all"}, "types must be a list"),
        ({"dsn": "x", "upcast": [7]}, "upcast must be functions"),
        ({"dsn": "x", "unknown_type": "skip"}, "needs types"),
    ],
)
def test_wrong_options_are_refused_where_they_are_written(options: Any, says: str) -> None:
    """Each option is checked when the source is made; the message names the value and what is accepted."""
    with pytest.raises(ConfigurationError, match=says):
        CommandedSource(**options)


def test_the_identity_names_database_schema_and_stream() -> None:
    """A projection never starts on another store or stream by accident; other options do not change what is read."""
    source = CommandedSource(dsn="postgresql://host:5432/shop", schema="es", stream="cart-1")

    assert source.identity() == "commanded:shop/es/cart-1"
    assert CommandedSource(using="events").identity() == "commanded:events/public/$all"
    assert (
        CommandedSource(using="events", checkpoint="shared", serializer="json").identity()
        == "commanded:events/public/$all"
    )


def test_checks_name_aliases_that_cannot_serve(settings: Any) -> None:
    """`manage.py check` finds an alias that does not exist, or is no PostgreSQL, without connecting."""
    assert CommandedSource(using="default").checks() == []
    assert CommandedSource(dsn="postgresql://nowhere/x").checks() == []
    assert [message.id for message in CommandedSource(using="nowhere").checks()] == ["scriba.E301"]
    assert [message.id for message in CommandedSource(using="default", session="nowhere").checks()] == ["scriba.E301"]
