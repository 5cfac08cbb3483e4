"""Events that the real Commanded wrote arrive exactly as Elixir itself read them."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import pytest

from tests.support.commanded import expected
from tests.support.reading import positions, read_all

STORES = ("bytea-json", "jsonb", "bytea-term")


@pytest.fixture(params=STORES)
def name(request: Any) -> str:
    return str(request.param)


@pytest.fixture
def real(make_store: Any, name: str) -> Any:
    store = make_store(seed=False, column="jsonb" if name == "jsonb" else "bytea")
    store.load(name)
    return store


def as_elixir_read_it(event: Any) -> dict[str, Any]:
    payload = event.payload()
    return {
        "event_id": event.id,
        "event_number": event.position,
        "event_type": payload.type,
        "stream_uuid": event.stream_id,
        "stream_version": event.stream_version,
        "causation_id": event.causation_id,
        "correlation_id": event.correlation_id,
        "created_at": event.occurred_at,
        "data": payload.data,
        "metadata": payload.metadata,
    }


def normal(events: Any) -> list[str]:
    """A text in which 1 and 1.0, and 1 and True, differ."""
    return [
        json.dumps({**event, "created_at": str(as_time(event["created_at"]))}, sort_keys=True, default=str)
        for event in events
    ]


def as_time(at: Any) -> datetime:
    return at if isinstance(at, datetime) else datetime.fromisoformat(at)


def test_every_row_is_decoded_as_elixir_read_it(real: Any, name: str, subscribe: Any) -> None:
    """Every event of `$all`: ids, number, type, stream and version, time, data and metadata, value and type."""
    events = read_all(subscribe(real))

    assert len(events) == 181
    assert normal(map(as_elixir_read_it, events)) == normal(expected(name)["all"])


@pytest.mark.parametrize(("stream", "part"), [("account-1", "account_1"), ("linked-view", "linked_view")])
def test_a_single_stream_is_read_as_elixir_read_it(
    real: Any, name: str, subscribe: Any, stream: str, part: str
) -> None:
    """A stream, and a stream of links, is numbered by its own versions and names the original stream of each event."""
    events = read_all(subscribe(real, stream=stream))

    assert normal(map(as_elixir_read_it, events)) == normal(expected(name)[part])


@pytest.mark.parametrize(
    ("subscription", "stream", "start_from"),
    [
        ("accounts_read_model", "$all", "origin"),
        ("from_100", "$all", 100),
        ("from_current", "$all", "current"),
        ("one_stream", "account-1", 0),
        ("on_links", "linked-view", 0),
    ],
)
def test_a_subscription_is_given_what_elixir_gave_it(
    real: Any, name: str, subscribe: Any, subscription: str, stream: str, start_from: Any
) -> None:
    """From the same start, the same events arrive in the same order as at an Elixir subscriber."""
    given = expected(name)["delivered"][subscription]

    events = read_all(subscribe(real, stream=stream, start_from=start_from))

    found = [
        {
            "event_id": event.id,
            "event_number": event.position,
            "stream_uuid": event.stream_id,
            "stream_version": event.stream_version,
        }
        for event in events
    ]
    # Elixir's subscribers of single streams stopped early; what they were given is the beginning.
    assert found[: len(given)] == given
    assert len(found) == len(given) or stream != "$all"


def test_start_from_n_delivers_n_plus_1_first(real: Any, subscribe: Any) -> None:
    """`start_from=N` means *after N*, at every boundary: before the first, over the hole 175..178, at the end."""
    everything = positions(read_all(subscribe(real)))
    for start in (0, 1, 99, 173, 174, 175, 176, 178, 179, 184, 185):
        found = positions(read_all(subscribe(real, start_from=start)))

        assert found == [number for number in everything if number > start]


def test_deleted_streams_are_read_as_elixir_reads_them(real: Any, subscribe: Any) -> None:
    """A soft-deleted stream keeps its events in `$all` but is itself refused; a hard-deleted one is nowhere."""
    numbers = positions(read_all(subscribe(real)))

    assert [number for number in range(1, 186) if number not in numbers] == [175, 176, 177, 178]
    assert {172, 173, 174} <= set(numbers)
    assert read_all(subscribe(real, stream="doomed-soft")) == []
    assert read_all(subscribe(real, stream="doomed-hard")) == []


def test_the_demo_balances_come_out_of_the_three_stores_alike(make_store: Any, subscribe: Any) -> None:
    """Whichever serializer wrote the events, the same sums come out of them."""
    totals = []
    for name in STORES:
        store = make_store(seed=False, column="jsonb" if name == "jsonb" else "bytea")
        store.load(name)
        sums: dict[str, float] = {}
        for event in read_all(subscribe(store)):
            data = event.payload().data
            if event.type == "Elixir.Peer.MoneyMoved" and data["account_id"] != "x":
                sums[data["account_id"]] = sums.get(data["account_id"], 0) + data["amount"]
        totals.append(sums)

    assert len(totals[0]) == 12
    assert totals[0] == totals[1] == totals[2]
