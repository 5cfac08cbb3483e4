"""What folding must get right, case by case, each against one-by-one application."""

from __future__ import annotations

import datetime
import gc
import sys
import uuid
import weakref

import pytest
from django.apps import apps
from django.db import DataError, IntegrityError, OperationalError, connection, connections, models, transaction
from django.db.models import F, Q
from django.db.models.signals import post_delete, post_save, pre_delete, pre_save
from django.test.utils import isolate_apps

from scriba import Delete, Insert, Update, Upsert
from scriba.targets import catalog, statements
from scriba.targets.folding import WriteBuffer
from scriba.targets.shapes import Shape, shape_of
from tests.property_db.folding.app import models as shapes
from tests.property_db.folding.app.fields import CallsField
from tests.property_db.folding.app.models import Author, Book, Checked, Composite, Drawn, Plain, Unique, UuidKey
from tests.property_db.folding.oracle import assert_equivalent, executed, folded, one_by_one

pytestmark = pytest.mark.django_db


@pytest.fixture
def buffer():
    return WriteBuffer(connection)


@pytest.fixture(name="executed")
def statements_executed():
    """The statements that were executed, catalogue look-ups left out, with their parameters."""
    with executed() as seen:
        yield seen


def add(buffer, *writes):
    for write in writes:
        buffer.add(write)


# --- order ------------------------------------------------------------------------------------------------


@pytest.mark.case("C2")
def test_a_row_lives_twice_in_one_batch():
    """Insert, update, delete and insert of one row in one batch leave the last state."""
    outcome = assert_equivalent(
        lambda: [
            Insert(Plain(id="a", name="1", number=1)),
            Update(Plain, {"id": "a"}, name="2"),
            Delete(Plain, {"id": "a"}),
            Insert(Plain(id="a", name="3")),
            Update(Plain, {"pk": "a"}, number=4),
        ],
        [Plain],
    )
    assert outcome.rows["Plain"] == [("a", "3", "4", None, None, None)]
    assert outcome.statements == 3


@pytest.mark.case("C6")
@pytest.mark.parametrize(
    "writes",
    [
        lambda model: [Insert(model(id=1)), Delete(model, {"id": 1}), Insert(model(id=1)), Insert(model(id=2))],
        lambda model: [Insert(model(id=1)), Upsert(model(id=2)), Insert(model(id=3))],
        lambda model: [Upsert(model(id=1)), Upsert(model(id=1)), Insert(model(id=2))],
        lambda model: [Upsert(model(id=1)), Upsert(model(id=2), update_fields=[]), Upsert(model(id=3))],
    ],
)
def test_what_a_sequence_numbers_is_numbered_in_order(writes):
    """Rows take their numbers in the order of the writes, and a write that needs none takes one all the same."""
    assert_equivalent(lambda: writes(shapes.Numbered), [shapes.Numbered])


@pytest.mark.case("C6")
def test_drawn_keys_come_in_order():
    """Keys are drawn in the order of the inserts, with deletes and given keys between them."""
    outcome = assert_equivalent(
        lambda: [
            Insert(Drawn(name="1")),
            Insert(Drawn(id=7, name="7")),
            Insert(Drawn(name="2")),
            Delete(Drawn, {"id": 1}),
            Insert(Drawn(name="3")),
            Update(Drawn, {"id": 2}, number=2),
        ],
        [Drawn],
    )
    assert sorted(outcome.rows["Drawn"]) == [("2", "2", "2"), ("3", "3", None), ("7", "7", None)]


@pytest.mark.case("C4")
def test_an_update_by_another_filter_keeps_its_place():
    """An update by a non-key filter touches the row inserted before it, not the one inserted after it."""
    outcome = assert_equivalent(
        lambda: [
            Insert(Plain(id="a", name="new")),
            Update(Plain, {"name": "new"}, number=5),
            Insert(Plain(id="b", name="new")),
        ],
        [Plain],
    )
    assert [row[:3] for row in outcome.rows["Plain"]] == [("a", "new", "5"), ("b", "new", "0")]


@pytest.mark.case("C5")
@pytest.mark.parametrize("how", ["update", "delete", "upsert"])
def test_a_unique_value_moves_from_row_to_row(how):
    """A unique value that one row gives up may be taken by another in the same batch."""
    gives_up = {
        "update": lambda: Update(Unique, {"id": 1}, code=None),
        "delete": lambda: Delete(Unique, {"id": 1}),
        "upsert": lambda: Upsert(Unique(id=1, code="y")),
    }[how]
    outcome = assert_equivalent(
        lambda: [
            Insert(Unique(id=1, code="x")),
            gives_up(),
            Insert(Unique(id=2, code="x")),
            Update(Unique, {"id": 2}, note="n"),
        ],
        [Unique],
    )
    assert outcome.error is None


@pytest.mark.case("C5")
def test_a_unique_value_taken_too_early_is_still_refused():
    """Folding must not repair a batch that fails one by one."""
    outcome = assert_equivalent(
        lambda: [Insert(Unique(id=2, code="x")), Delete(Unique, {"id": 1})],
        [Unique],
        seeds=lambda: [Insert(Unique(id=1, code="x"))],
    )
    assert isinstance(outcome.error, IntegrityError)


@pytest.mark.case("C5")
def test_updates_beside_a_unique_column_fold(buffer, executed):
    """A column that takes no part in a unique constraint is updated in one statement."""
    add(buffer, *[Update(Unique, {"id": number}, note="n") for number in range(10)])
    buffer.flush()
    assert len(executed) == 1
    assert buffer.unmatched == 10


# --- how many statements ----------------------------------------------------------------------------------


@pytest.mark.case("C3")
def test_a_batch_is_few_statements(buffer, executed):
    """Inserts of one model, updates of one column set, and deletes are one statement each."""
    add(buffer, *[Insert(Plain(id=str(number))) for number in range(20)])
    add(buffer, *[Update(Plain, {"id": str(number)}, name="x", number=number) for number in range(20, 40)])
    add(buffer, *[Delete(Plain, {"id": str(number)}) for number in range(40, 60)])
    assert executed == []
    buffer.flush()
    assert [sql.split()[0] for sql, _ in executed] == ["INSERT", "UPDATE", "DELETE"]
    assert buffer.unmatched == 40


def test_a_large_batch_is_split_by_size(buffer, executed, monkeypatch):
    """More values than one statement should carry become several; a single large row stays whole."""
    monkeypatch.setattr(statements, "MAX_BYTES", 1000)
    add(buffer, *[Insert(Plain(id=f"{number:04}", payload={"text": "x" * 50})) for number in range(64)])
    add(buffer, *[Update(Plain, {"id": f"none {number:04}"}, name="x") for number in range(64)])
    add(buffer, Update(Plain, {"id": "0001"}, payload={"text": "y" * 5000}))
    buffer.flush()
    assert len(executed) > 8
    assert Plain.objects.count() == 64
    assert Plain.objects.get(id="0001").payload == {"text": "y" * 5000}
    assert buffer.unmatched == 64


def test_updates_find_their_rows_by_index(buffer, executed):
    """On a large table an update of many rows does not read the whole table."""
    with connection.cursor() as cursor:
        cursor.execute(
            "INSERT INTO folding_plain (id, name, number) SELECT 'k' || n, '', 0 FROM generate_series(1, 200000) n"
        )
        cursor.execute("ANALYZE folding_plain")
        add(buffer, *[Update(Plain, {"id": f"k{number * 300 + 1}"}, number=1) for number in range(500)])
        plans = []

        def explain(execute, sql, params, many, context):
            if sql.startswith("UPDATE"):
                execute(f"EXPLAIN {sql}", params, many, context)
                plans.extend(line for (line,) in context["cursor"].fetchall())
            return execute(sql, params, many, context)

        with connection.execute_wrapper(explain):
            buffer.flush()
    assert plans
    assert not [line for line in plans if "Seq Scan on folding_plain" in line], "\n".join(plans)
    assert buffer.unmatched == 0


def test_rows_are_locked_in_the_order_of_their_keys(buffer, executed):
    """Two workers that update the same rows ask for them in one order, so that neither waits for the other for ever."""
    add(
        buffer, *[Update(Plain, {"id": key}, number=1) for key in "bca"], *[Delete(Plain, {"id": key}) for key in "zxy"]
    )
    buffer.flush()
    assert [parameters[0] for _, parameters in executed] == ['{"a","b","c"}', '{"x","y","z"}']


def test_server_side_plans_are_made_for_each_statement(buffer, executed, monkeypatch):
    """Where the driver prepares statements on the server, plans are not kept: one for an empty table is ruinous later."""
    monkeypatch.setitem(connections["default"].settings_dict, "OPTIONS", {"server_side_binding": True})
    monkeypatch.setattr(connections["default"].connection, "prepare_threshold", 0)
    add(buffer, Update(Plain, {"id": "a"}, number=1))
    buffer.flush()
    assert executed[0][0] == "SET LOCAL plan_cache_mode = force_custom_plan"
    with connection.cursor() as cursor:
        cursor.execute("SET LOCAL plan_cache_mode = auto")  # the test's own transaction goes on


# --- unmatched writes -------------------------------------------------------------------------------------


@pytest.mark.case("B18", "C3")
def test_unmatched_writes_are_counted_one_by_one():
    """Merged writes that find no row count as many as they are; those that find one count nothing."""
    outcome = assert_equivalent(
        lambda: [
            Update(Plain, {"id": "none"}, name="x"),
            Update(Plain, {"id": "none"}, number=1),
            Delete(Plain, {"id": "none"}),
            Update(Plain, {"id": "there"}, name="x"),
            Delete(Plain, {"id": "there"}),
            Delete(Plain, {"id": "there"}),
            Update(Plain, {"id": "alone"}, name="y"),
            Update(Plain, {"name": "nobody"}, number=2),
            Delete(Plain, {"name": "nobody"}),
        ],
        [Plain],
        seeds=lambda: [Insert(Plain(id="there"))],
    )
    assert outcome.unmatched == 7


def test_discarding_forgets_writes_and_counts(buffer):
    """After a rollback nothing of the batch is left in the buffer."""
    buffer.add(Update(Plain, {"name": "nobody"}, number=1))
    buffer.add(Insert(Plain(id="a")))
    assert buffer.unmatched == 1
    buffer.discard()
    buffer.flush()
    assert buffer.unmatched == 0
    assert not Plain.objects.exists()


def test_a_failed_flush_leaves_nothing_to_repeat(buffer):
    """What a flush could not execute is gone, and the transaction knows that it can only be rolled back."""
    add(buffer, Insert(Plain(id="a", name="x" * 50)))
    with transaction.atomic():
        with pytest.raises(DataError):
            buffer.flush()
        assert connection.needs_rollback
    buffer.flush()
    assert not Plain.objects.exists()


# --- barriers ---------------------------------------------------------------------------------------------


BARRIERS = {
    "another filter": lambda: Update(Plain, {"name": ""}, number=1),
    "more than the key": lambda: Update(Plain, {"id": "a", "name": ""}, number=1),
    "a Q": lambda: Update(Plain, Q(id="a"), number=1),
    "an expression": lambda: Update(Plain, {"id": "a"}, number=F("number") + 1),
    "every row": lambda: Update.all(Plain, number=1),
    "every row deleted": lambda: Delete.all(Plain),
    "the key itself": lambda: Update(Plain, {"id": "a"}, id="b"),
    "a lookup of the key": lambda: Delete(Plain, {"id__in": ["a"]}),
    "no key": lambda: Update(Plain, {"pk": None}, number=1),
    "a key of another type": lambda: Update(Plain, {"id": 1.5}, number=1),
    "a proxy": lambda: Update(shapes.PlainProxy, {"id": "a"}, number=1),
    "a value of another type": lambda: Update(Plain, {"id": "a"}, payload=models.Value(None, models.JSONField())),
    "a trigger": lambda: Insert(shapes.Watched(id="a")),
    "a unique column": lambda: Update(Unique, {"id": 1}, code="x"),
    "an upsert beside a unique column": lambda: Upsert(Unique(id=1, code="x")),
    "a conditional unique column": lambda: Update(shapes.PartlyUnique, {"id": 1}, active=True),
    "an exclusion": lambda: Update(shapes.Excluding, {"id": 1}, span=(1, 2)),
    "an immediate foreign key": lambda: Update(shapes.StrictParent, {"id": 1}, note="x"),
    "its other side": lambda: Insert(shapes.StrictChild(id=1)),
    "a cascade": lambda: Delete(Author, {"id": 1}),
    "a key that may be rounded": lambda: Insert(shapes.Price(value="1.04")),
    "a key that is cut": lambda: Insert(shapes.ShortKey(id="abc  ")),
    "a key that is too large": lambda: Update(Unique, {"id": 2**31}, note="x"),
    "parents": lambda: Insert(shapes.Restaurant(name="x")),
    "a base manager": lambda: Update(shapes.Hiding, {"id": 1}, number=1),
    "an order": lambda: Insert(shapes.Ordered(id=1)),
    "SQL of a field's own": lambda: Insert(shapes.Loud(id=1, word="x")),
    "an upsert by other fields": lambda: Upsert(Drawn(name="x"), unique_fields=["id"], update_fields=["name"]),
    "an upsert without a key": lambda: Upsert(Drawn(name="x")),
    "a generated column": lambda: Update(shapes.Generating, {"id": 1}, ratio=1),
    "a value that the column refuses": lambda: Update(Plain, {"id": "a"}, name="x" * 11),
}


@pytest.mark.case("C3")
@pytest.mark.parametrize("barrier", sorted(BARRIERS))
def test_barriers_flush_first_and_stand_alone(buffer, barrier):
    """What is not a plain write on a known row is executed at once, by the ORM, behind everything before it."""
    seen = []

    def watch(execute, sql, params, many, context):
        if "pg_class" not in sql and not sql.startswith(("SAVEPOINT", "RELEASE")):
            seen.append(sql)
        return execute(sql, params, many, context)

    buffer.add(Insert(UuidKey(number=1)))
    with transaction.atomic(), connection.execute_wrapper(watch):
        try:
            buffer.add(BARRIERS[barrier]())
        except (DataError, IntegrityError, TypeError):
            transaction.set_rollback(True)
    assert "folding_uuidkey" in seen[0], "the earlier write comes first"
    assert len(seen) > 1 or barrier in {"no key", "a key that is too large", "a generated column"}, (
        "then the write itself"
    )
    assert not any("unnest" in sql for sql in seen[1:])


@pytest.mark.parametrize("signal", [pre_delete, post_delete])
def test_receivers_of_delete_signals_see_each_row(buffer, executed, signal):
    """A model whose deletes somebody listens to is deleted by the ORM, from the moment of connecting on."""
    told = []
    buffer.add(Delete(Plain, {"id": "a"}))
    buffer.flush()
    assert len(executed) == 1

    def receiver(instance, **_kwargs):
        told.append(instance.id)

    add(buffer, Insert(Plain(id="a")), Insert(Plain(id="b")))
    signal.connect(receiver, sender=Plain)
    try:
        add(buffer, Delete(Plain, {"id": "a"}), Delete(Plain, {"id": "b"}))
    finally:
        signal.disconnect(receiver, sender=Plain)
    assert told == ["a", "b"]


def test_a_trigger_sees_each_write_in_order():
    """A table with a trigger is written row by row."""
    outcome = assert_equivalent(
        lambda: [
            Insert(shapes.Watched(id="a", note="1")),
            Insert(shapes.WatchLog(said="between")),
            Update(shapes.Watched, {"id": "a"}, note="2"),
            Update(shapes.Watched, {"id": "a"}, note="3"),
        ],
        [shapes.Watched, shapes.WatchLog],
    )
    assert [said for _id, said in sorted(outcome.rows["WatchLog"])] == [
        "INSERT a 1",
        "between",
        "UPDATE a 2",
        "UPDATE a 3",
    ]


OBSTACLES = {
    shapes.Watched: "a trigger",
    shapes.StrictParent: "a foreign key that is checked at once",
    shapes.StrictChild: "a foreign key that is checked at once",
    shapes.Price: "a primary key whose equality is not known",
    shapes.Restaurant: "multi-table inheritance",
    shapes.PlainProxy: "a proxy model",
    shapes.Hiding: "a base manager of its own",
    shapes.Ordered: "order_with_respect_to",
}


def test_only_these_models_never_fold():
    """Each obstacle is seen where it is, and nowhere else."""
    found = {model: shape_of(connections["default"], model).obstacle for model in shapes.Base.__subclasses__()}
    found |= {
        model: shape_of(connections["default"], model).obstacle for model in (shapes.Restaurant, shapes.PlainProxy)
    }
    assert {model: obstacle for model, obstacle in found.items() if obstacle} == OBSTACLES


@pytest.mark.parametrize(
    ("change", "obstacle"),
    [
        ("CREATE RULE r AS ON DELETE TO folding_uuidkey DO ALSO NOTHING", "a rewrite rule"),
        ("ALTER TABLE folding_uuidkey ENABLE ROW LEVEL SECURITY", "row-level security"),
        ("CREATE TABLE folding_heir () INHERITS (folding_uuidkey)", "not an ordinary table"),
        ("ALTER TABLE folding_uuidkey DROP CONSTRAINT folding_uuidkey_pkey", "the primary key is not the table's"),
        (
            "ALTER TABLE folding_uuidkey ALTER COLUMN id TYPE bytea USING ''::bytea",
            "a primary key whose equality is not known",
        ),
        ("DROP TABLE folding_uuidkey", "the table does not exist"),
        (
            (
                "CREATE FUNCTION f(int) RETURNS bool LANGUAGE sql IMMUTABLE RETURN true;"
                "ALTER TABLE folding_uuidkey ADD CHECK (f(number))"
            ),
            "a check by a function of one's own",
        ),
    ],
)
def test_the_database_is_asked_and_not_the_model(change, obstacle):
    """What a migration's RunSQL did to a table counts, although the model does not know it."""
    facts = _facts_after(change)
    assert shape_of_facts(UuidKey, facts).obstacle == obstacle


def _facts_after(change):
    with transaction.atomic():
        with connection.cursor() as cursor:
            cursor.execute(change)
        facts = _facts_now("folding_uuidkey")
        transaction.set_rollback(True)
    return facts


def _facts_now(table):
    return catalog._facts(catalog._ask(connections["default"], table))


def shape_of_facts(model, facts):
    return Shape(model, facts, connections["default"])


@pytest.mark.parametrize("action", ["CASCADE", "SET NULL", "RESTRICT"])
def test_deletes_that_the_database_spreads_are_alone(action):
    """Where a foreign key makes the database change other rows, or look at them, a delete is a barrier."""
    with transaction.atomic():
        with connection.cursor() as cursor:
            cursor.execute(
                "CREATE TABLE folding_heir (id uuid REFERENCES folding_uuidkey"
                f" ON DELETE {action} DEFERRABLE INITIALLY DEFERRED)"
            )
        shape = shape_of_facts(UuidKey, _facts_now("folding_uuidkey"))
        transaction.set_rollback(True)
    assert shape.obstacle == ""
    assert not shape.folds_deletes()
    assert shape_of(connections["default"], UuidKey).folds_deletes()


def test_a_default_that_may_read_anything_is_the_orms():
    """A column that is left to a function of one's own is not inserted by sets."""
    change = (
        "CREATE FUNCTION f() RETURNS int LANGUAGE sql RETURN 1;"
        "ALTER TABLE folding_uuidkey ADD COLUMN extra int DEFAULT f()"
    )
    usual, calling = shape_of(connections["default"], UuidKey), shape_of_facts(UuidKey, _facts_after(change))
    assert usual.insert_form(frozenset(), None) is not None
    assert calling.insert_form(frozenset(), None) is None
    assert calling.update_form(("number",)) is not None


@isolate_apps("tests.property_db.folding.app")
def test_a_table_with_two_models_is_never_folded(monkeypatch):
    """Two models of one table would give one row two names."""

    class Mirror(models.Model):
        id = models.UUIDField(primary_key=True)

        class Meta:
            app_label = "folding"
            db_table = "folding_uuidkey"
            managed = False

    everything = apps.get_models()
    monkeypatch.setattr(apps, "get_models", lambda **_kwargs: [*everything, Mirror])
    facts = shape_of(connections["default"], UuidKey).facts
    assert shape_of_facts(UuidKey, facts).obstacle == "another model has the same table"


def test_a_key_of_a_caseless_collation_is_not_known():
    """Where the database calls different texts equal, a text does not name a row."""
    facts = shape_of(connections["default"], Plain).facts
    columns = {**facts.columns, "id": facts.columns["id"]._replace(merges_equals=True)}
    assert (
        shape_of_facts(Plain, facts._replace(columns=columns)).obstacle == "a primary key whose equality is not known"
    )


def test_facts_are_asked_again_after_a_reconnect():
    """A trigger that was added is seen by the next connection to the server."""
    before = shape_of(connections["default"], Plain)
    assert shape_of(connections["default"], Plain) is before
    changed = before.facts._replace(obstacle="a trigger")
    known = catalog._read[connections["default"].connection]
    known["folding_plain"] = changed
    try:
        assert shape_of(connections["default"], Plain).obstacle == "a trigger"
    finally:
        known["folding_plain"] = before.facts


def test_shapes_end_with_their_connection():
    """A worker's connection is not kept by what was compiled for it."""
    wrapper = connections["default"].copy()
    shape_of(wrapper, Plain)
    driver = weakref.ref(wrapper.connection)
    wrapper.close()
    gone = weakref.ref(wrapper)
    del wrapper
    gc.collect()
    assert gone() is None
    assert driver() is None


# --- keys -------------------------------------------------------------------------------------------------


@pytest.mark.case("C6")
def test_drawn_keys_are_handed_out(buffer, executed):
    """An instance gets the key that the database drew, so that a later write may refer to it."""
    author, other = Author(name="a"), Author(name="b")
    add(buffer, Insert(author), Insert(other))
    assert executed == []
    add(buffer, Insert(Book(id=1, author=other)), Insert(Book(id=2, author=author)))
    buffer.flush()
    assert Book.objects.get(id=1).author.name == "b"
    assert Book.objects.get(id=2).author.name == "a"


@pytest.mark.case("C6")
def test_instances_stand_for_their_keys():
    """A foreign key takes an instance or a key, in inserts and updates, and None."""
    outcome = assert_equivalent(
        lambda: [
            Insert(Book(id=1, author=Author(id=7))),
            Insert(Book(id=2, author_id=7)),
            Update(Book, {"id": 2}, author=Author(id=8)),
            Update(Book, {"id": 1}, author=None, sequel_of=2),
        ],
        [Book],
        seeds=lambda: [Insert(Author(id=7)), Insert(Author(id=8))],
    )
    assert outcome.error is None
    assert outcome.statements == 1


def test_an_unsaved_instance_is_refused_as_the_orm_refuses_it(buffer):
    """A foreign key to an instance without a key is the error that Django raises."""
    with pytest.raises(ValueError, match="unsaved related object"):
        buffer.add(Insert(Book(id=1, author=Author(name="never inserted"))))
    with pytest.raises(ValueError, match="Unsaved model instance"):
        buffer.add(Update(Book, {"id": 1}, author=Author(name="never inserted")))


@pytest.mark.case("C6")
def test_keys_written_differently_are_one_row():
    """A key as text, as an enumeration's member or in another time zone names the same row."""
    day, key = datetime.date(2024, 5, 6), uuid.UUID(int=77)
    moment = shapes.EPOCH
    outcome = assert_equivalent(
        lambda: [
            Insert(UuidKey(id=key)),
            Update(UuidKey, {"id": str(key)}, number=1),
            Update(UuidKey, {"pk": key.hex.upper()}, number=2),
            Delete(UuidKey, {"id": "{" + str(key) + "}"}),
            Insert(Composite(shop="s", day=day)),
            Update(Composite, {"pk": ("s", "2024-05-06")}, total=5),
            Delete(Composite, {"day": day, "shop": "s"}),
            Insert(shapes.Moment(at=moment)),
            Update(shapes.Moment, {"at": moment.astimezone(datetime.timezone(datetime.timedelta(hours=3)))}, number=3),
            Delete(shapes.Moment, {"pk": moment}),
            Insert(Plain(id="red")),
            Delete(Plain, {"id": shapes.Color.RED}),
            Insert(Unique(id=5)),
            Delete(Unique, {"id": "5"}),
        ],
        [UuidKey, Composite, shapes.Moment, Plain, Unique],
    )
    assert all(rows == [] for rows in outcome.rows.values())
    assert outcome.unmatched == 0


@pytest.mark.case("C6")
def test_composite_keys_fold(buffer, executed):
    """Rows with a key of several columns are inserted, updated and deleted by sets, half-equal keys kept apart."""
    days = [datetime.date(2024, 1, day) for day in range(1, 6)]
    add(buffer, *[Insert(Composite(shop=shop, day=day)) for shop in "st" for day in days])
    buffer.flush()
    add(buffer, *[Update(Composite, {"pk": ("s", day)}, total=5) for day in days[:3]])
    add(buffer, *[Update(Composite, {"day": day, "shop": "t"}, total=6) for day in days[2:]])
    add(buffer, Delete(Composite, {"pk": ("s", days[4])}), Delete(Composite, {"pk": ("t", days[0])}))
    buffer.flush()
    assert len(executed) == 3
    assert sorted(Composite.objects.values_list("shop", "day__day", "total")) == [
        ("s", 1, 5), ("s", 2, 5), ("s", 3, 5), ("s", 4, 0), ("t", 2, 0), ("t", 3, 6), ("t", 4, 6), ("t", 5, 6),
    ]  # fmt: skip


# --- what may not be hidden -------------------------------------------------------------------------------


@pytest.mark.case("C3")
@pytest.mark.parametrize(
    "writes",
    [
        lambda: [Insert(Plain(id="a", name="x" * 11)), Update(Plain, {"id": "a"}, name="x")],
        lambda: [Update(Plain, {"id": "b"}, number=None), Update(Plain, {"id": "b"}, number=1)],
        lambda: [Update(Plain, {"id": "b"}, name=None), Delete(Plain, {"id": "b"})],
        lambda: [Update(Plain, {"id": "b"}, number=2**31), Delete(Plain, {"id": "b"})],
        lambda: [Update(Plain, {"id": "b"}, payload={"a": "\0"}), Update(Plain, {"id": "b"}, payload={})],
        lambda: [Update(Plain, {"id": "b"}, payload=float("nan")), Update(Plain, {"id": "b"}, payload={})],
        lambda: [Upsert(Plain(id="a", name="x" * 11)), Upsert(Plain(id="a", name="x"))],
        lambda: [Update(Checked, {"id": 1}, low=11), Update(Checked, {"id": 1}, high=12)],
        lambda: [Insert(Checked(id=2, count=-1)), Update(Checked, {"id": 2}, count=1)],
        lambda: [Insert(shapes.Generating(id=1, part=0)), Update(shapes.Generating, {"id": 1}, part=1)],
        lambda: [Update(Checked, {"id": 1}, low=11), Delete(Checked, {"id": 1})],
    ],
)
def test_a_state_that_would_be_refused_is_not_skipped(writes):
    """Merging leaves out states in between only where the database could not have refused them."""
    outcome = assert_equivalent(
        writes, [Plain, Checked, shapes.Generating], seeds=lambda: [Insert(Plain(id="b")), Insert(Checked(id=1))]
    )
    assert outcome.error is not None


@pytest.mark.case("C3")
def test_a_text_too_long_for_its_index_is_not_skipped():
    """An index has room for less than its column: such a value is written before it is overwritten."""
    digits = [str(number * 7919 % 99991) for number in range(3000)]  # hardly compressible
    with transaction.atomic():
        with connection.cursor() as cursor:
            cursor.execute("CREATE INDEX folding_said ON folding_watchlog (said)")
        facts = _facts_now("folding_watchlog")
        said = next(column for column in shape_of_facts(shapes.WatchLog, facts).columns if column.attname == "said")
        with pytest.raises(OperationalError), transaction.atomic():
            shapes.WatchLog.objects.create(said="".join(digits))
        transaction.set_rollback(True)
    assert said.accepts("short")
    assert not said.accepts("".join(digits))


def test_objects_with_code_of_their_own_are_asked_once(buffer):
    """A field's code runs once for each row, also when the row turns out to be the ORM's."""
    CallsField.calls = 0
    add(buffer, Insert(shapes.Asked(id=1)), Insert(shapes.Asked(id=2, data=models.Value(None, models.JSONField()))))
    buffer.flush()
    assert CallsField.calls == 2
    assert sorted(shapes.Asked.objects.values_list("id", "calls")) == [(1, 1), (2, 2)]


@pytest.mark.case("C6")
def test_upserts_mean_what_bulk_create_means():
    """Given fields, no other fields, keys left to the database, values that are the ORM's: all as Django does it."""
    outcome = assert_equivalent(
        lambda: [
            Upsert(Plain(id="a", name="new", number=2), update_fields=["number"]),
            Upsert(Plain(id="a", name="new", number=3), unique_fields=["id"], update_fields=["number", "name"]),
            Upsert(Plain(id="a", name="never"), update_fields=[]),
            Upsert(Plain(id="b", payload=models.Value(None, models.JSONField()))),
            Upsert(Plain(id="b", number=models.Value(7)), update_fields=["number"]),
            Upsert(shapes.Label(id=1, content_type_id=1, object_id=2)),
            Upsert(Drawn(name="x"), update_fields=["name"]),
            Upsert(Drawn(id=1, name="y")),
            Upsert(Composite(shop="s", day=datetime.date(2024, 1, 1), total=1)),
            Upsert(Composite(shop="s", day=datetime.date(2024, 1, 1), total=2), unique_fields=["day", "shop"]),
            Upsert(Unique(id=1, code="x", note="1")),
            Upsert(Unique(id=2, code="x", note="2"), unique_fields=["code"], update_fields=["note"]),
            Upsert(shapes.Defaulting(id=1)),
            Upsert(shapes.Defaulting(id=1, state="set")),
        ],
        [Plain, shapes.Label, Drawn, Composite, Unique, shapes.Defaulting],
        seeds=lambda: [Insert(Plain(id="a", name="old", number=1))],
    )
    assert outcome.error is None


@pytest.mark.case("C6")
def test_no_save_signal_is_sent_for_any_model(buffer):
    """Declared writes send no save signals, also where a row has several tables."""
    told = []

    def receiver(sender, **_kwargs):
        told.append(sender)

    for signal in (pre_save, post_save):
        signal.connect(receiver)
    try:
        add(
            buffer,
            Insert(Plain(id="a")),
            Insert(shapes.Restaurant(name="x")),
            Upsert(shapes.Restaurant(pk=9, name="y")),
        )
        buffer.flush()
    finally:
        for signal in (pre_save, post_save):
            signal.disconnect(receiver)
    assert told == []
    assert shapes.Restaurant.objects.count() == 2


@pytest.mark.case("C6")
def test_a_field_that_asks_the_database_sees_everything_before_it():
    """Code of a field that reads the database meets what one-by-one application would have written."""
    outcome = assert_equivalent(
        lambda: [*[Insert(shapes.Sized(id=number)) for number in range(3)], Update(shapes.Sized, {"id": 0}, number=1)],
        [shapes.Sized],
    )
    assert [row[1] for row in outcome.rows["Sized"]] == ["0", "1", "2"]


# --- text -------------------------------------------------------------------------------------------------


@pytest.mark.case("C6")
def test_every_character_survives(buffer):
    """Text with any character that PostgreSQL can hold comes back as it was, as a value, a key and inside JSON."""
    characters = [chr(code) for code in range(1, sys.maxunicode + 1) if not 0xD800 <= code <= 0xDFFF]
    size = 600  # four bytes each still fit a row of the key's index
    texts = ["".join(characters[start : start + size]) for start in range(0, len(characters), size)]
    add(buffer, *[Insert(Plain(id=text, payload={"text": text})) for text in texts])
    buffer.flush()
    assert sorted(Plain.objects.values_list("id", flat=True)) == sorted(texts)
    assert all(row.payload == {"text": row.id} for row in Plain.objects.all())


@pytest.mark.case("C6")
@pytest.mark.parametrize("text", ["a\0b", "\ud800"])
@pytest.mark.parametrize("place", ["key", "value", "update", "array"])
def test_text_that_cannot_be_stored_is_the_same_error(text, place):
    """NUL and lone surrogates fail with the class of error that the ORM raises for them."""

    def build():
        return {
            "key": lambda: [Insert(Plain(id=text)), Insert(Plain(id="other"))],
            "value": lambda: [Insert(Plain(id="a", name=text)), Insert(Plain(id="b", name="ok"))],
            "update": lambda: [Insert(Plain(id="a")), Update(Plain, {"id": "a"}, name=text)],
            "array": lambda: [Insert(shapes.Every(id=1, tags=[text])), Insert(shapes.Every(id=2, tags=["a"]))],
        }[place]()

    expected, found = one_by_one(build, [Plain]).error, folded(build, [Plain]).error
    assert type(found) is type(expected)
    assert found is not None
