"""What a page costs does not depend on how deep in the store it lies."""

from __future__ import annotations

import os
import statistics
import time
from typing import Any

import pytest

from scriba.sources.commanded_store import Statements, inspect_store
from tests.support.commanded import Store, source_of
from tests.support.reading import read_all


@pytest.fixture(scope="module", params=["bytea", "jsonb"])
def large(request: Any, store_dsn: str) -> Any:
    """Enough events that a plan which reads a whole table would be chosen where it is cheaper."""
    store = Store(store_dsn, f"large_{request.param}", column=request.param).create()
    store.fill(30_000, streams=300)
    yield store
    store.drop()
    store.close()


@pytest.fixture
def explain(large: Store, subscribe: Any) -> Any:
    """Explain a page on the connection that reads it, with that connection's settings."""
    subscription = subscribe(large)
    return lambda cursor, **options: explained(large, subscription._connection, cursor, **options)


def explained(
    store: Store, connection: Any, cursor: int, *, is_filtered: bool = False, stream: int = 0
) -> dict[str, Any]:
    statements = Statements(inspect_store(connection, store.schema), is_filtered=is_filtered)
    parameters = {
        "stream": stream,
        "cursor": cursor,
        "limit": 1_000,
        "budget": 8_000_000,
        "types": ["Placed"],
        "prefix": None,
    }
    statement = store.sql("EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) ") + statements.page
    plan: dict[str, Any] = connection.execute(statement, parameters).fetchone()[0][0]["Plan"]
    return plan


def nodes(plan: dict[str, Any]) -> list[dict[str, Any]]:
    return [plan, *(node for child in plan.get("Plans", ()) for node in nodes(child))]


@pytest.mark.parametrize("is_filtered", [False, True])
@pytest.mark.parametrize("cursor", [0, 15_000, 28_900])
def test_a_page_is_a_range_of_the_unique_index(explain: Any, cursor: int, is_filtered: bool) -> None:
    """Rows come from `ix_stream_events` in order; events by their primary key; nothing is sorted, no table is scanned."""
    found = nodes(explain(cursor, is_filtered=is_filtered))

    indexes = {node.get("Index Name") for node in found}
    assert {"ix_stream_events", "events_pkey"} <= indexes
    (links,) = [node for node in found if node.get("Index Name") == "ix_stream_events"]
    assert "stream_id = " in links["Index Cond"]
    assert "stream_version > " in links["Index Cond"]
    assert links["Actual Rows"] <= 1_001
    assert "Sort" not in {node["Node Type"] for node in found}
    assert "Seq Scan" not in {node["Node Type"] for node in found}


def test_statistics_older_than_the_events_change_no_plan(make_store: Any, subscribe: Any) -> None:
    """A store that grew a hundredfold since it was analysed is still read by ordered ranges."""
    store = make_store()
    store.run("ALTER TABLE {schema}.stream_events SET (autovacuum_enabled = off)")
    store.fill(500, streams=10)
    for _ in range(12):
        store.append("account-1", 1_000)

    found = nodes(explained(store, subscribe(store)._connection, 498))

    (links,) = [node for node in found if node.get("Index Name") == "ix_stream_events"]
    assert links["Actual Rows"] <= 1_001


def test_a_page_of_one_stream_uses_the_same_index(explain: Any) -> None:
    """A single stream is the same range, under its own key."""
    found = nodes(explain(10, stream=7))

    assert "ix_stream_events" in {node.get("Index Name") for node in found}
    assert not [node for node in found if node["Node Type"] == "Seq Scan"]


@pytest.mark.parametrize("is_filtered", [False, True])
def test_a_page_touches_few_blocks_per_event_and_no_more_of_them_deep_in_the_store(
    explain: Any, is_filtered: bool
) -> None:
    """An event costs its link, three levels of its key and its row, and its stream's: so at the start, so at the end."""
    first, deep = (buffers(explain(cursor, is_filtered=is_filtered)) for cursor in (0, 28_900))

    assert first <= 5 * 1_000
    assert deep <= 1.2 * first


def buffers(plan: dict[str, Any]) -> int:
    return int(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"])


def test_head_and_lookups_are_single_probes(large: Store) -> None:
    """Head, one event, and both look-ups touch a handful of blocks, however large the store is."""
    statements = Statements(inspect_store(large.connection, large.schema))
    parameters = {
        "stream": 0,
        "position": 20_000,
        "name": "account-7",
        "version": 50,
        "event_id": large.event_ids("account-7")[0],
    }
    for statement in (statements.head, statements.one, statements.position_of_id, statements.position_of_version):
        composed = large.sql("EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) ") + statement
        plan = large.connection.execute(composed, parameters).fetchone()[0][0]["Plan"]

        assert buffers(plan) < 40


def test_statements_are_never_prepared_on_the_server(large: Store, subscribe: Any) -> None:
    """A plan cached while the store was small would scan it once it is large: each page is planned anew."""
    subscription = subscribe(large)
    read_all(subscription, 500)

    rows = subscription._connection.execute("SELECT count(*) FROM pg_prepared_statements").fetchone()

    assert rows == (0,)


# --- measured: not in the default run ----------------------------------------------------------------------


@pytest.mark.skipif(
    "SCRIBA_COMMANDED_EVENTS" not in os.environ,
    reason="a measurement, not a test: run it on a quiet machine with SCRIBA_COMMANDED_EVENTS=1100000",
)
@pytest.mark.slow
def test_reading_and_decoding_is_fast_and_stays_so(store_dsn: str, subscribe: Any, record_property: Any) -> None:
    """At least 25,000 events of 230 bytes per second, read and decoded; a page at 10^6 costs at most 1.2 times the first."""
    count = int(os.environ.get("SCRIBA_COMMANDED_EVENTS", "1100000"))
    store = Store(store_dsn, "measured").create()
    try:
        store.fill(count, streams=1_000)
        rates = [rate(store, subscribe) for _ in range(3)]
        first, deep = (page_seconds(store, subscribe, cursor) for cursor in (1_000, count - 100_000))
    finally:
        store.drop()
        store.close()
    print(f"\nread and decoded: {', '.join(f'{found:,.0f}' for found in rates)} events/s; "
          f"page of 1,000 at the start {first * 1e3:.2f} ms, at {count - 100_000:,} {deep * 1e3:.2f} ms")  # fmt: skip
    record_property("events_per_second", statistics.median(rates))
    assert statistics.median(rates) >= 25_000
    assert deep <= 1.2 * first


def rate(store: Store, subscribe: Any) -> float:
    subscription = subscribe(store)
    started, count = time.perf_counter(), 0
    while count < 200_000 and (events := subscription.fetch(1_000, 0.0).events):
        for event in events:
            event.payload()
        count += len(events)
    return count / (time.perf_counter() - started)


def page_seconds(store: Store, subscribe: Any, cursor: int) -> float:
    """The median time of a page of 1,000, over 30 pages in a row."""
    subscription = subscribe(store, source=source_of(store), resume=cursor)
    while len(subscription.fetch(1_000, 0.0).events) < 1_000:
        continue
    times = []
    for _ in range(30):
        started = time.perf_counter()
        subscription.fetch(1_000, 0.0)
        times.append(time.perf_counter() - started)
    return statistics.median(times)
