"""A table without an order over all its events gets one: AddEventPosition and EventPosition."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime, timedelta

import pytest
from django.db import connection, migrations, models
from django.db.migrations.autodetector import MigrationAutodetector
from django.db.migrations.graph import MigrationGraph
from django.db.migrations.questioner import NonInteractiveMigrationQuestioner
from django.db.migrations.state import ModelState, ProjectState
from django.db.migrations.writer import MigrationWriter

from scriba.exceptions import ConfigurationError
from scriba.fields import EventPosition
from scriba.operations import AddEventPosition
from scriba.sources import TableSource
from tests.integration.sources.conftest import run
from tests.integration.sources.reading import Reader
from tests.integration.sources.shapes import AggregateEvent, UuidEvent

NIGHT = datetime(2026, 3, 1, tzinfo=UTC)
TABLE = "shapes_aggregateevent"


def before() -> ProjectState:
    state = ProjectState()
    state.add_model(ModelState.from_model(AggregateEvent))
    return state


def add_position(**options) -> type[models.Model]:
    """Run the operation as `migrate` would; return the model as it is afterwards."""
    operation = AddEventPosition("AggregateEvent", **options)
    old, new = before(), before()
    operation.state_forwards("shapes", new)
    with connection.schema_editor() as editor:
        operation.database_forwards("shapes", editor, old, new)
    return new.apps.get_model("shapes", "aggregateevent")


def recorded(stream: uuid.UUID, version: int, minutes: float) -> uuid.UUID:
    return AggregateEvent.objects.create(
        aggregate_type="order",
        aggregate_id=stream,
        version=version,
        event_type="t",
        created_at=NIGHT + timedelta(minutes=minutes),
    ).id


def numbers() -> list[uuid.UUID]:
    return [row[0] for row in run(f"SELECT id FROM {TABLE} ORDER BY position")]


def test_a_table_without_an_order_is_refused_with_the_cure(table):
    """The commonest shape cannot be tailed: the check says why, and names operation and field."""
    table(AggregateEvent)
    [problem] = TableSource(AggregateEvent).checks()
    assert problem.id == "scriba.E215"
    assert "AddEventPosition" in problem.hint
    assert "EventPosition" in problem.hint


def test_events_are_numbered_by_time_and_version(table):
    """Old events get the order in which they happened, not the one in which they lie on disk."""
    table(AggregateEvent)
    one, two = uuid.uuid4(), uuid.uuid4()
    third, first = recorded(one, 2, 5), recorded(one, 1, 1)
    fourth, second = recorded(two, 2, 5.5), recorded(two, 1, 3)
    add_position()
    assert numbers() == [first, second, third, fourth]
    assert run(f"SELECT array_agg(position ORDER BY position) FROM {TABLE}") == [([1, 2, 3, 4],)]


def test_versions_outrank_clocks(table):
    """A later version that was written by a slow clock stays behind the earlier one of its stream."""
    table(AggregateEvent)
    stream, other = uuid.uuid4(), uuid.uuid4()
    first = recorded(stream, 1, 10)
    skewed = recorded(stream, 2, 2)
    between = recorded(other, 1, 5)
    add_position()
    assert numbers() == [between, first, skewed]


def test_later_events_are_numbered_by_the_database(table, writer):
    """Through the ORM, in bulk and by plain SQL, without anybody naming the position; the table can then be tailed."""
    table(AggregateEvent)
    old = recorded(uuid.uuid4(), 1, 0)
    model = add_position()
    common = {"aggregate_type": "order", "event_type": "t", "created_at": NIGHT}
    made = model.objects.create(aggregate_id=uuid.uuid4(), version=1, **common)
    assert made.position == 2
    bulk = model.objects.bulk_create([model(aggregate_id=uuid.uuid4(), version=1, **common) for _ in range(3)])
    assert [event.position for event in bulk] == [3, 4, 5]
    connected = writer(autocommit=True)
    connected.execute(
        f"INSERT INTO {TABLE} (id, aggregate_type, aggregate_id, version, event_type, payload, created_at) "
        "VALUES (gen_random_uuid(), 'order', gen_random_uuid(), 1, 't', '{}', now())"
    )
    reader = Reader(TableSource(model))
    reader.look_until_quiet()
    assert reader.seen == [1, 2, 3, 4, 5, 6]
    assert reader.events[0].id == str(old)
    assert TableSource(model).database_checks(["default"]) == []


def test_an_empty_table_begins_at_one(table):
    """Nothing to number is no special case."""
    table(AggregateEvent)
    model = add_position()
    assert model.objects.create(
        aggregate_type="o", aggregate_id=uuid.uuid4(), version=1, event_type="t", created_at=NIGHT
    ).position == 1  # fmt: skip


def test_a_trigger_that_forbids_updates_is_no_obstacle(table):
    """Many event tables refuse every UPDATE; the numbering is none that they mean, and the guard is back afterwards."""
    table(AggregateEvent)
    event = recorded(uuid.uuid4(), 1, 0)
    run("CREATE FUNCTION shapes_refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'append only'; END $$")
    run(f"CREATE TRIGGER refuse BEFORE UPDATE ON {TABLE} FOR EACH ROW EXECUTE FUNCTION shapes_refuse()")
    add_position()
    assert numbers() == [event]
    with pytest.raises(Exception, match="append only"):
        run(f"UPDATE {TABLE} SET version = 2")
    run("DROP FUNCTION shapes_refuse CASCADE")


def test_it_can_be_undone(table):
    """Migrating back removes column, index and sequence, and forward again works."""
    table(AggregateEvent)
    recorded(uuid.uuid4(), 1, 0)
    add_position()
    operation, old, new = AddEventPosition("aggregateevent"), before(), before()
    operation.state_forwards("shapes", new)
    with connection.schema_editor() as editor:
        operation.database_backwards("shapes", editor, new, old)
    assert not run(
        "SELECT 1 FROM pg_attribute WHERE attrelid = %s::regclass AND attname = 'position' AND NOT attisdropped", TABLE
    )
    assert not run("SELECT 1 FROM pg_class WHERE relkind = 'S' AND relname LIKE %s", f"{TABLE}%")
    add_position()
    assert run(f"SELECT position FROM {TABLE}") == [(1,)]


def test_the_autodetector_has_nothing_left_to_do(table):
    """After the operation, ``makemigrations --check`` is clean: the state holds the field as the model declares it."""
    state, wanted = before(), before()
    AddEventPosition("aggregateevent").state_forwards("shapes", state)
    wanted.add_field("shapes", "aggregateevent", "position", EventPosition(), preserve_default=True)
    detector = MigrationAutodetector(state, wanted, NonInteractiveMigrationQuestioner(specified_apps={"shapes"}))
    assert detector.changes(graph=MigrationGraph()) == {}


def test_it_can_be_written_into_a_migration_file():
    """Operation and field are serialised with the arguments that were given, and no others."""
    migration = type(
        "Migration", (migrations.Migration,), {"operations": [AddEventPosition("event", order_by=("at", "v"))]}
    )
    text = MigrationWriter(migration("0002_event_position", "shapes")).as_string()
    assert "scriba.operations.AddEventPosition" in text
    assert EventPosition().deconstruct()[1:] == ("scriba.fields.EventPosition", [], {})


def test_a_field_that_is_not_there_is_named(table):
    """A misspelt order is found before anything is changed."""
    table(AggregateEvent)
    with pytest.raises(ConfigurationError, match="'created'; did you mean 'created_at'"):
        add_position(order_by=("created", "version"))
    assert not run("SELECT 1 FROM pg_attribute WHERE attrelid = %s::regclass AND attname = 'position'", TABLE)


def test_a_new_model_needs_no_operation(table):
    """A model that is created with the field gets its column, its index and its sequence from CREATE TABLE."""
    table(UuidEvent)
    made = UuidEvent.objects.create(aggregate_type="order", aggregate_id="1", event_type="t")
    assert made.position == 1
    made.event_type = "u"
    made.save()
    made.refresh_from_db()
    assert (made.position, made.event_type) == (1, "u")
    made.full_clean(exclude=["payload"])
    assert UuidEvent.objects.create(aggregate_type="order", aggregate_id="1", event_type="t", position=7).position == 7
    assert TableSource(UuidEvent).database_checks(["default"]) == []


def test_the_sql_can_be_shown(table):
    """`sqlmigrate` prints what will happen."""
    operation, old, new = AddEventPosition("AggregateEvent"), before(), before()
    operation.state_forwards("shapes", new)
    with connection.schema_editor(collect_sql=True, atomic=False) as editor:
        operation.database_forwards("shapes", editor, old, new)
    assert any("row_number()" in statement for statement in editor.collected_sql)
