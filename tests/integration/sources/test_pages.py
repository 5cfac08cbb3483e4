"""What a page of an event table holds: every shape of column, filters, bounds, and what it costs."""

from __future__ import annotations

import json
import re
import uuid
from datetime import UTC, datetime, timedelta, timezone
from zoneinfo import ZoneInfo

import pytest
from django.db import connections, models, transaction
from django.db.models import Exists, OuterRef, Q
from django.test import override_settings

from scriba.event import Event
from scriba.exceptions import ConfigurationError, SourceError
from scriba.protocols import Identity, Shard
from scriba.sources import TableSource
from tests.integration.sources.conftest import run
from tests.integration.sources.reading import IDENTITY, Reader
from tests.integration.sources.shapes import (
    NO_ZERO,
    ZERO,
    BinaryEvent,
    ChildEvent,
    PlainEvent,
    StreamRow,
    TextEvent,
    UuidEvent,
    ZeroEvent,
)  # fmt: skip


def read(source: TableSource, limit: int = 1_000) -> list[Event]:
    reader = Reader(source)
    reader.look_until_quiet(limit)
    return reader.events


def fill(count: int, data: str = "'{}'", event_type: str = "'counted'") -> None:
    run(
        "INSERT INTO shapes_plainevent (event_id, stream_id, event_type, data) "
        f"SELECT gen_random_uuid(), 'stream-' || n % 10, {event_type}, {data} FROM generate_series(1, {count}) n"
    )


# --- columns --------------------------------------------------------------------------------------------


def test_every_part_of_an_event_is_found_by_its_name(plain):
    """Fields with the names that teams use need no option; ids become text, times aware and in UTC."""
    at = datetime(2026, 3, 1, 12, 30, tzinfo=timezone(timedelta(hours=5)))
    made = plain.objects.create(
        stream_id="order-1", stream_version=3, event_type="Placed", data={"total": 5, "ä": [None]}, metadata={"user": "u"},
        occurred_at=at, correlation_id=uuid.uuid4(), causation_id="c",
    )  # fmt: skip
    [event] = read(TableSource(plain))
    assert event[:4] == (1, "order-1", "Placed", str(made.event_id))
    assert event.payload() == ("Placed", {"total": 5, "ä": [None]}, {"user": "u"})
    assert (event.occurred_at, event.occurred_at.tzinfo, event.stream_version) == (at, UTC, 3)
    assert (event.correlation_id, event.causation_id) == (str(made.correlation_id), "c")
    assert event.size > 20


def test_what_a_table_does_not_have_is_none(plain):
    """Absent metadata is an empty mapping; everything else that is missing is None."""
    fill(1)
    [event] = read(TableSource(plain))
    assert event.payload().metadata == {}
    assert (event.occurred_at, event.stream_version, event.correlation_id, event.causation_id) == (None,) * 4


def test_a_stream_of_several_columns_is_joined(table):
    """A tuple of names makes one stream id, and the event is found by it, separators in the values included."""
    table(UuidEvent)
    UuidEvent.objects.create(aggregate_type="a:b", aggregate_id="c", event_type="t", version=1)
    UuidEvent.objects.create(aggregate_type="a", aggregate_id="b:d", event_type="t", version=1)
    source = TableSource(UuidEvent, stream_id=("aggregate_type", "aggregate_id"))
    assert [event.stream_id for event in read(source)] == ["a:b:c", "a:b:d"]
    subscription = source.subscribe(IDENTITY, [Shard()])
    assert subscription.locate(stream_id="a:b:d", stream_version=1) == ("", 2)
    assert subscription.locate(stream_id="a:b:c", stream_version=1) == ("", 1)
    assert subscription.locate(stream_id="a", stream_version=1) is None


def test_a_stream_can_be_computed(plain):
    """A callable gets the event; where it fails, that event is dead-lettered and its neighbours are read."""
    fill(3, data="CASE n WHEN 2 THEN '{}' ELSE jsonb_build_object('order', 'o' || n) END")
    source = TableSource(plain, stream_id=lambda event: event.data["order"])
    first, broken, last = read(source)
    assert (first.stream_id, last.stream_id) == ("o1", "o3")
    with pytest.raises(KeyError):
        broken.payload()
    assert broken.stored() == ({}, None)
    with pytest.raises(ConfigurationError, match="stream and version"):
        source.subscribe(IDENTITY, [Shard()]).locate(stream_id="o1", stream_version=1)


def test_a_stream_in_another_table_is_followed(table):
    """Foreign keys are followed with two underscores, for parts of the event and for the filter."""
    table(StreamRow, ChildEvent)
    shown, hidden = StreamRow.objects.create(name="shown"), StreamRow.objects.create(name="hidden", is_hidden=True)
    for stream in (shown, hidden, shown):
        ChildEvent.objects.create(stream=stream, type="t", data={})
    assert [event.stream_id for event in read(TableSource(ChildEvent, stream_id="stream__name"))] == [
        "shown",
        "hidden",
        "shown",
    ]
    assert [event.stream_id for event in read(TableSource(ChildEvent))] == ["1", "2", "1"]
    filtered = TableSource(ChildEvent, stream_id="stream__name", filter=Q(stream__is_hidden=False))
    assert [event.position for event in read(filtered)] == [1, 3]


def test_a_filter_over_many_rows_is_refused(database):
    """A relation to many rows would deliver an event once per row."""
    source = TableSource("auth.User", stream_id="username", type="first_name", data="email", filter=Q(groups__name="t"))
    assert [problem.id for problem in source.checks()] == ["scriba.E217"]
    with pytest.raises(ConfigurationError, match="relation to many"):
        source.subscribe(IDENTITY, [Shard()])


def test_a_filter_that_does_not_fit_the_model_is_found_by_check(database):
    """A misspelt field in a filter is known before anything runs."""
    [problem] = TableSource("testapp.Event", filter=Q(strem_id="a")).checks()
    assert problem.id == "scriba.E217"
    assert "strem_id" in problem.msg


def test_json_in_a_text_column(table):
    """Text is decoded as JSON, and what is no JSON is its event's fault, kept as bytes."""
    table(TextEvent)
    TextEvent.objects.create(
        stream_id="s", type="t", payload=json.dumps({"big": 12345678901234567890123, "nan": float("inf")})
    )
    TextEvent.objects.create(stream_id="s", type="t", payload="{'broken'")
    good, bad = read(TableSource(TextEvent))
    assert good.payload().data == {"big": 12345678901234567890123, "nan": float("inf")}
    with pytest.raises(ValueError, match="Expecting property name"):
        bad.payload()
    assert bad.stored() == (b"{'broken'", None)


def test_a_payload_only_the_team_can_read(table):
    """`decode` gets what the column holds, and the type; a dead letter keeps the bytes, and a replay decodes them again."""
    table(BinaryEvent)
    BinaryEvent.objects.create(stream_id="s", type="Added", payload=b"\x00\x05\xff")
    source = TableSource(BinaryEvent, decode=lambda raw, event_type: (event_type, list(raw)))
    [event] = read(source)
    assert event.payload().data == ("Added", [0, 5, 255])
    assert event.stored() == (b"\x00\x05\xff", None)
    subscription = source.subscribe(IDENTITY, [Shard()])
    data, metadata = event.stored()
    assert (
        subscription.restore(event._replace(raw=data, raw_metadata=metadata, codec=None)).payload() == event.payload()
    )
    assert subscription.read(1).payload() == event.payload()


def test_json_in_a_binary_column(table):
    """Bytes are JSON unless `decode` says otherwise."""
    table(BinaryEvent)
    BinaryEvent.objects.create(stream_id="s", type="t", payload=b'{"a": 1}')
    [event] = read(TableSource(BinaryEvent))
    assert event.payload().data == {"a": 1}
    assert event.stored() == ({"a": 1}, None)


def test_both_halves_of_an_autumn_night_keep_their_instants(plain):
    """02:30 happens twice when the clocks go back: two instants, in order, both aware."""
    zone = ZoneInfo("Europe/Berlin")
    first = datetime(2026, 10, 25, 2, 30, tzinfo=zone)
    second = first.replace(fold=1)
    for at in (first, second):
        plain.objects.create(stream_id="s", event_type="t", occurred_at=at)
    events = read(TableSource(plain))
    assert [event.occurred_at for event in events] == [
        datetime(2026, 10, 25, 0, 30, tzinfo=UTC), datetime(2026, 10, 25, 1, 30, tzinfo=UTC),
    ]  # fmt: skip


def test_times_without_a_zone_are_in_the_settings_zone(plain):
    """With USE_TZ off Django stores local times; handlers get the instant they meant."""
    run("ALTER TABLE shapes_plainevent ALTER occurred_at TYPE timestamp")
    run(
        "INSERT INTO shapes_plainevent (event_id, stream_id, event_type, data, occurred_at) "
        "VALUES (gen_random_uuid(), 's', 't', '{}', '2026-07-01 12:00')"
    )
    with override_settings(USE_TZ=False, TIME_ZONE="Europe/Berlin"):
        [event] = read(TableSource(plain))
    assert event.occurred_at == datetime(2026, 7, 1, 10, 0, tzinfo=UTC)
    assert event.occurred_at.tzinfo is UTC


def test_a_time_that_python_cannot_hold_is_left_out(plain):
    """A row with the time `infinity` is delivered without a time, instead of stopping the reader."""
    run(
        "INSERT INTO shapes_plainevent (event_id, stream_id, event_type, data, occurred_at) VALUES "
        "(gen_random_uuid(), 's', 't', '{}', 'infinity'), (gen_random_uuid(), 's', 't', '{}', '10000-01-01')"
    )
    assert [event.occurred_at for event in read(TableSource(plain))] == [None, None]


# --- positions ------------------------------------------------------------------------------------------


@pytest.mark.case("A18")
def test_positions_may_start_at_zero(database):
    """A sequence with MINVALUE 0 is read from its first number."""
    run(NO_ZERO)
    run(ZERO)
    run("INSERT INTO shapes_zero (stream_id) VALUES ('a'), ('b')")
    assert [event.position for event in read(TableSource(ZeroEvent))] == [0, 1]
    reader = Reader(TableSource(ZeroEvent), resume=0)
    assert reader.look() == [1]
    run(NO_ZERO)


@pytest.mark.case("A18")
def test_huge_gaps_and_huge_positions_cost_nothing(plain):
    """A jump of the sequence is one gap, and 2^62 is a position like any other."""
    fill(2)
    run("SELECT setval('shapes_plainevent_id_seq', 4611686018427387904)")
    fill(2)
    reader = Reader(TableSource(plain))
    assert reader.look_until_quiet() == [1, 2, 2**62 + 1, 2**62 + 2]
    assert reader.last.scanned == 2**62 + 2
    narrowed = Reader(TableSource(plain).narrow({"other"}))
    assert narrowed.look_until_quiet() == []
    assert narrowed.last.scanned == 2**62 + 2


# --- filters --------------------------------------------------------------------------------------------


def test_a_filter_leaves_rows_out_and_scans_them(plain):
    """`filter` is applied after the scan: holes that it makes are none that anybody waits for."""
    fill(30, data="jsonb_build_object('n', n)")
    source = TableSource(plain, filter=Q(stream_id="stream-3") | Q(data__n=7))
    reader = Reader(source)
    assert reader.look_until_quiet() == [3, 7, 13, 23]
    assert reader.last.scanned == 30
    fill(10)
    assert reader.look_until_quiet() == [33]
    assert reader.last.scanned == 40


def test_a_filter_may_use_the_percent_sign_and_subqueries(plain):
    """Values of a filter are written into the statement once, whatever they hold."""
    fill(2, event_type="CASE n WHEN 1 THEN '100%s' ELSE 'plain' END")
    assert [event.position for event in read(TableSource(plain, filter=Q(event_type="100%s")))] == [1]
    assert [event.position for event in read(TableSource(plain, filter=Q(event_type__contains="%")))] == [1]
    same = PlainEvent.objects.filter(pk=OuterRef("pk"), event_type="plain")
    assert [event.position for event in read(TableSource(plain, filter=Exists(same) & Q(pk__gt=0)))] == [2]


def test_a_filter_that_is_null_leaves_the_row_out(plain):
    """SQL's *unknown* is no yes."""
    fill(2)
    run("UPDATE shapes_plainevent SET stream_version = 5 WHERE id = 2")
    assert [event.position for event in read(TableSource(plain, filter=Q(stream_version__gt=1)))] == [2]


def test_a_filter_never_hides_a_late_commit(plain, writer):
    """A position that is missing is waited for whether or not its event will be wanted."""
    source = TableSource(plain, filter=Q(event_type="wanted"))
    reader = Reader(source)
    reader.look()
    slow, fast = writer(), writer()
    insert = "INSERT INTO shapes_plainevent (event_id, stream_id, event_type, data) VALUES (gen_random_uuid(), 's', %s, '{}')"
    slow.execute(insert, ("wanted",))
    fast.execute(insert, ("other",))
    fast.execute(insert, ("wanted",))
    fast.commit()
    assert reader.look() == []
    assert reader.last.scanned == 0
    slow.commit()
    assert reader.look_until_quiet() == [1, 3]


def test_narrow_takes_stored_names_and_classes(plain):
    """`event_types` may name classes of the type map: they stand for every stored name that leads to them."""

    class Placed:
        pass

    fill(6, event_type="(ARRAY['order.placed', 'order.placed.v2', 'order.paid'])[1 + n % 3]")
    types = {"order.placed": dict, "order.placed.v2": dict, "order.paid": list}
    source = TableSource(plain, types={name: _built_as(kind) for name, kind in types.items()})
    assert [event.type for event in read(source.narrow({"order.paid"}))] == ["order.paid"] * 2
    assert {event.type for event in read(source.narrow({"_as_dict"}))} == {"order.placed", "order.placed.v2"}
    assert len(read(source)) == 6


@override_settings(SCRIBA={"max_bytes_in_flight": 40_000})
@pytest.mark.parametrize("padding", [1, 2_000])
def test_a_filtered_backlog_is_read_to_its_last_event(plain, padding):
    """Where more is wanted than fits into a page, by rows or by bytes, the next page goes on behind the last of them."""
    fill(
        1_500, data=f"jsonb_build_object('x', repeat(md5(n::text), {padding} / 32 + 1))",
        event_type="CASE WHEN n % 3 = 0 THEN 'wanted' ELSE 'other' END",
    )  # fmt: skip
    reader = Reader(TableSource(plain).narrow({"wanted"}))
    while not reader.seen or not reader.last.caught_up:
        reader.look(limit=100)
    assert reader.seen == list(range(3, 1_501, 3))


def _as_dict(data):
    return data


def _as_list(data):
    return [data]


def _built_as(kind):
    return _as_dict if kind is dict else _as_list


@pytest.mark.case("A19")
def test_a_backlog_that_is_filtered_out_is_scanned_in_few_steps(plain):
    """Filtered-out events cost no transport: the watermark moves by thousands of rows a page, and a restart goes on there."""
    fill(60_000)
    reader = Reader(TableSource(plain).narrow({"nothing"}))
    steps = [reader.look() or reader.last.scanned]
    while not reader.last.caught_up:
        steps.append(reader.look() or reader.last.scanned)
    assert steps[:3] == [20_000, 40_000, 60_000]
    assert len(steps) <= 4
    again = Reader(TableSource(plain).narrow({"nothing"}), resume=60_000)
    again.look()
    assert (again.last.scanned, again.last.caught_up) == (60_000, True)


# --- bounds and cost ------------------------------------------------------------------------------------


@override_settings(SCRIBA={"max_bytes_in_flight": 4_000_000})
def test_a_page_is_bounded_by_the_bytes_that_python_will_hold(plain):
    """Compressed payloads count as what they are when they arrive, and one that is too large comes alone."""
    fill(40, data="jsonb_build_object('x', repeat('a', CASE WHEN n = 20 THEN 5000000 ELSE 300000 END))")
    stored = run("SELECT max(pg_column_size(data)) FROM shapes_plainevent WHERE id <> 20")[0][0]
    assert stored < 20_000  # that is what makes it a trap
    reader = Reader(TableSource(plain))
    pages = []
    while not pages or not reader.last.caught_up:
        reader.look()
        pages.append(reader.last.events)
    assert reader.seen == list(range(1, 41))
    sizes = [[len(event.raw) for event in page] for page in pages]
    assert all(sum(page[:-1]) < 1_000_000 for page in sizes)
    assert max(map(max, filter(None, sizes))) > 5_000_000


@override_settings(SCRIBA={"max_bytes_in_flight": 400_000})
def test_pages_grow_again_after_heavy_rows(plain):
    """A few heavy events do not make every later page small."""
    fill(10, data="jsonb_build_object('x', repeat('a', 90000))")
    fill(3_000)
    reader = Reader(TableSource(plain))
    reader.look_until_quiet()
    assert len(reader.seen) == 3_010
    fill(3_000)
    lengths = []
    while not lengths or not reader.last.caught_up:
        lengths.append(len(reader.look()))
    assert max(lengths) == 1_000


def plan_of(source: TableSource, statement: str, **parameters) -> str:
    reading = source._compiled()
    text = getattr(reading.statements, statement)
    with connections["default"].cursor() as cursor:
        cursor.execute(f"EXPLAIN (ANALYZE, BUFFERS, SUMMARY OFF, TIMING OFF) {text}", {"types": ["x"], **parameters})
        return "\n".join(row[0] for row in cursor.fetchall())


@pytest.mark.parametrize("source", [TableSource(PlainEvent), TableSource(PlainEvent, filter=Q(event_type="counted"))])
def test_a_page_costs_the_same_at_any_depth(plain, source):
    """A page is one range of the index, at the beginning and behind tens of thousands of events."""
    fill(40_000)
    run("ANALYZE shapes_plainevent")
    buffers = []
    for after in (0, 20_000, 38_000):
        plan = plan_of(source, "page", after=after, upto=2**63 - 1, limit=1_000, budget=10**7)
        assert "Index Scan using shapes_plainevent_pkey" in plan
        assert "Seq Scan" not in plan
        buffers.append(int(re.search(r"shared hit=(\d+)", plan)[1]))
    assert max(buffers) <= 1.3 * min(buffers)
    assert "Seq Scan" not in plan_of(source, "one", position=20_000)
    assert "Seq Scan" not in plan_of(source, "last")
    assert "Seq Scan" not in plan_of(source, "bound", after=10, upto=39_000, rows=20_000)


# --- a table that is not what it was --------------------------------------------------------------------


@pytest.mark.case("A25")
def test_explicit_ids_ahead_of_the_sequence_halt_with_the_cure(plain):
    """An import would declare thousands of numbers settled that are still to come; the message has the statement that heals."""
    reader = Reader(TableSource(plain))
    fill(2)
    reader.look_until_quiet()
    run(
        "INSERT INTO shapes_plainevent (id, event_id, stream_id, event_type, data) VALUES (1000, gen_random_uuid(), 's', 't', '{}')"
    )
    with pytest.raises(SourceError, match="explicit positions") as caught:
        reader.look()
    with pytest.raises(SourceError):
        Reader(TableSource(plain)).look()
    cure = re.search(r"SELECT setval.*?\);", str(caught.value))[0]
    run(cure)
    fill(1)
    healed = Reader(TableSource(plain), resume=2)
    assert healed.look_until_quiet() == [1000, 1001]


def test_a_table_behind_its_checkpoint_halts(plain):
    """After a restore or a truncation new events get positions that count as read: nothing may go on."""
    fill(5)
    reader = Reader(TableSource(plain))
    reader.look_until_quiet()
    run("TRUNCATE shapes_plainevent RESTART IDENTITY")
    with pytest.raises(SourceError, match="restored or truncated"):
        Reader(TableSource(plain), resume=5).look()
    reader.subscription._looked_at = 0.0
    with pytest.raises(SourceError, match="restored or truncated"):
        reader.look()


def test_a_start_beyond_the_table_is_named(plain):
    """A position that was never handed out is no place to start after: the option is in the message."""
    fill(5)
    with pytest.raises(SourceError, match="start_from=9 lies beyond"):
        Reader(TableSource(plain, start_from=9)).look()
    assert Reader(TableSource(plain, start_from=5)).look() == []


def test_an_emptied_table_that_counts_on_is_fine(plain):
    """Old events may be deleted: the sequence says that nothing was set back."""
    fill(5)
    run("DELETE FROM shapes_plainevent")
    reader = Reader(TableSource(plain), resume=5)
    assert reader.look() == []
    fill(1)
    assert reader.look() == [6]


# --- transactions around the reader ---------------------------------------------------------------------


def test_a_transaction_around_the_reader_does_not_blind_it(plain, writer):
    """Pages and evidence go over a connection of their own: a REPEATABLE READ block in the calling thread changes nothing."""
    reader = Reader(TableSource(plain))
    with transaction.atomic():
        run("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        assert run("SELECT count(*) FROM shapes_plainevent") == [(0,)]
        other = writer(autocommit=True)
        other.execute(
            "INSERT INTO shapes_plainevent (event_id, stream_id, event_type, data) VALUES (gen_random_uuid(), 's', 't', '{}')"
        )
        assert reader.look() == [1]
        assert run("SELECT count(*) FROM shapes_plainevent") == [(0,)]


def test_an_alias_without_autocommit_does_not_blind_it(plain, writer, monkeypatch):
    """``AUTOCOMMIT = False`` would leave the reader in one long transaction; its own connection commits by itself."""
    monkeypatch.setitem(connections["default"].settings_dict, "AUTOCOMMIT", False)
    reader = Reader(TableSource(plain))
    assert reader.look() == []
    other = writer(autocommit=True)
    pid = reader.subscription._connection.rows("SELECT pg_backend_pid()")[0][0]
    assert other.execute("SELECT state FROM pg_stat_activity WHERE pid = %s", (pid,)).fetchone() == ("idle",)


def test_inline_reading_sees_the_transaction_it_is_in(plain):
    """A test's own uncommitted rows are visible and ordered; a hole among them is a rollback, not a wait."""
    with transaction.atomic():
        fill(2)
        run("SELECT nextval('shapes_plainevent_id_seq')")
        fill(2)
        subscription = TableSource(plain, start_from="current").subscribe_inline(Identity("inline", 1), [Shard()])
        page = subscription.fetch(10, 5.0)
        assert [event.position for event in page.events] == [1, 2, 4, 5]
        assert (page.scanned, page.caught_up) == (5, True)
        assert subscription.head().position == 5
        fill(1)
        assert [event.position for event in subscription.fetch(10, 0).events] == [6]
        subscription.close()
        transaction.set_rollback(True)


# --- the model by name, other parts named ---------------------------------------------------------------


def test_a_model_may_be_named(database):
    """``"app.Model"`` is resolved when it is needed, so that projections may be declared before models are loaded."""
    source = TableSource("testapp.Event")
    assert source.identity() == "table:default.testapp_event(id)"
    assert source.checks() == []


def test_parts_may_be_named(plain):
    """An option outranks a guess."""
    fill(1)
    [event] = read(
        TableSource(plain, type="stream_id", stream_id="event_type", id="id", data="metadata", metadata="data")
    )
    assert (event.type, event.stream_id, event.id, event.payload().data) == ("stream-1", "counted", "1", None)


def test_a_field_with_its_own_way_of_reading_is_asked(plain, monkeypatch):
    """A team's own field (encrypted, compressed) decodes in the worker; the dead letter keeps what is stored."""

    class Reversed(models.TextField):
        def from_db_value(self, value, expression, connection):
            return value[::-1]

    fill(1)
    field = Reversed()
    field.set_attributes_from_name("event_type")
    from scriba.sources.table_statements import column_of

    column = column_of(field, "default")
    assert column.load("abc", "t") == "cba"
    assert column.stored("abc") == "abc"
