"""The layer rule: which writes may share a layer, which merge, and which must wait for the next layer."""

from __future__ import annotations

import pytest

from scriba.targets.layers import Entry, Form, Layers, Op, Use

pytestmark = pytest.mark.case("C2", "C3")

INSERTING, DELETING = Use("exclusion", "insert"), Use("exclusion", "delete")


class Table:
    """Anything but the word "refused" may be overwritten unseen."""

    def may_overwrite(self, entry, columns):
        return all(entry.values.get(column) != "refused" for column in columns)

    def may_forget(self, entry):
        return "refused" not in entry.values.values()


@pytest.fixture
def table():
    return Table()


def layered(*placed):
    """Place entries (or pairs of entry and uses); return each layer as (operation, key, values, count)."""
    layers = Layers()
    for entry in placed:
        layers.place(entry)
    return [
        [(entry.form.op.value, entry.key, entry.values, entry.count) for entry in layer] for layer in layers.drain()
    ]


def entry(op, table, key, values, uses=(), takes_over=None):
    return Entry(Form(op, table, tuple(values), takes_over, uses), key, list(values.values()))


def insert(table, key, uses=(), **values):
    return entry(Op.INSERT, table, key, values, uses)


def update(table, key, uses=(), **values):
    return entry(Op.UPDATE, table, key, values, uses)


def delete(table, key, uses=()):
    return entry(Op.DELETE, table, key, {}, uses)


def upsert(table, key, takes_over=("a",), uses=(), **values):
    return entry(Op.UPSERT, table, key, {"key": key, **values}, uses, takes_over)


def test_different_rows_share_a_layer(table):
    """Writes on different rows commute: one layer, in delivery order."""
    assert layered(insert(table, 1, a="x"), update(table, 2, a="y"), delete(table, 3)) == [
        [("insert", 1, {"a": "x"}, 1), ("update", 2, {"a": "y"}, 1), ("delete", 3, {}, 1)]
    ]


def test_the_same_key_in_two_tables_is_two_rows():
    """A key means a row only together with its table."""
    assert len(layered(insert(Table(), 1, a="x"), insert(Table(), 1, a="x"))) == 1


def test_an_update_goes_into_its_insert(table):
    """Insert and update of one row are one insert with the last values."""
    assert layered(insert(table, 1, a="x", b="y"), update(table, 1, a="z")) == [
        [("insert", 1, {"a": "z", "b": "y"}, 1)]
    ]


def test_updates_of_one_row_are_one_and_count_twice(table):
    """The last value of each column wins, and both updates had to find the row."""
    assert layered(update(table, 1, a="x"), update(table, 1, a="y", b="z")) == [
        [("update", 1, {"a": "y", "b": "z"}, 2)]
    ]


def test_an_update_before_a_delete_leaves_the_delete(table):
    """What is deleted need not be updated first; both had to find the row."""
    assert layered(update(table, 1, a="x"), delete(table, 1)) == [[("delete", 1, {}, 2)]]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (insert, insert), (insert, delete), (insert, upsert), (delete, insert), (delete, update), (delete, delete),
        (delete, upsert), (update, insert), (update, upsert), (upsert, insert), (upsert, delete),
    ],
)  # fmt: skip
def test_any_other_repeat_waits_for_the_next_layer(table, first, second):
    """Only three kinds of repeats, and upserts of the whole row, are known to merge."""
    assert [len(layer) for layer in layered(first(table, 1), second(table, 1))] == [1, 1]


def test_a_row_comes_back_in_order(table):
    """Insert, update, delete, insert, update, delete: each rebirth is a layer of its own."""
    states = layered(
        insert(table, 1, a="1"),
        update(table, 1, a="2"),
        delete(table, 1),
        insert(table, 1, a="3"),
        update(table, 1, a="4"),
    )
    assert states == [[("insert", 1, {"a": "2"}, 1)], [("delete", 1, {}, 1)], [("insert", 1, {"a": "4"}, 1)]]


def test_another_row_stays_in_the_first_layer(table):
    """A repeat delays its own row only."""
    states = layered(insert(table, 1), delete(table, 1), insert(table, 2))
    assert [[entry[1] for entry in layer] for layer in states] == [[1, 2], [1]]


@pytest.mark.parametrize("later", [update, delete])
def test_what_might_have_been_refused_is_written(table, later):
    """A value that the database could refuse is not overwritten or forgotten unseen."""
    assert len(layered(update(table, 1, a="refused"), later(table, 1, **({"a": "x"} if later is update else {})))) == 2


def test_upserts_of_the_whole_row_are_one(table):
    """The second of two upserts that give every column wins, and takes updates in as a row does."""
    assert layered(upsert(table, 1, a="x"), upsert(table, 1, a="y"), update(table, 1, a="z")) == [
        [("upsert", 1, {"key": 1, "a": "z"}, 1)]
    ]


def test_an_upsert_that_keeps_columns_is_not_replaced(table):
    """A row that exists keeps what such an upsert does not take over: neither upserts nor updates merge into it."""
    partial = {"takes_over": ("a",), "b": "x"}
    assert len(layered(upsert(table, 1, a="x", **partial), upsert(table, 1, a="y", **partial))) == 2
    assert len(layered(upsert(table, 1, a="x", **partial), update(table, 1, b="y"))) == 2
    assert len(layered(upsert(table, 1, a="x", **partial), update(table, 1, a="y"))) == 1


def test_inserts_and_deletes_of_exclusive_rows_take_turns(table):
    """A unique value freed by a delete is taken by a later insert, never by an earlier one."""
    states = layered(
        insert(table, 1, [INSERTING]),
        insert(table, 2, [INSERTING]),
        delete(table, 3, [DELETING]),
        insert(table, 4, [INSERTING]),
        delete(table, 5, [DELETING]),
    )
    assert [[entry[1] for entry in layer] for layer in states] == [[1, 2], [3], [4], [5]]


def test_a_merge_does_not_move_a_delete_before_an_insert(table):
    """Folding a delete into an earlier update must not free a unique value too early."""
    states = layered(update(table, 1, a="x"), insert(table, 2, [INSERTING]), delete(table, 1, [DELETING]))
    assert [[entry[:2] for entry in layer] for layer in states] == [[("update", 1), ("insert", 2)], [("delete", 1)]]


def test_drawn_keys_keep_apart_from_given_ones(table):
    """A row whose key the database draws may be any row: writes by key go before or after it, in order."""
    drawn, keyed = Use("rows", "drawn"), Use("rows", "keyed")
    states = layered(
        insert(table, None, [drawn]),
        insert(table, None, [drawn]),
        update(table, 1, [keyed], a="x"),
        insert(table, None, [drawn]),
    )
    assert [[entry[1] for entry in layer] for layer in states] == [[None, None], [1], [None]]


def test_ordered_uses_never_overtake_each_other(table):
    """Rows that draw from a sequence do so in the order of their writes, across layers too."""
    draws = [Use("sequence", "all", ordered=True)]
    states = layered(
        insert(table, 1, draws),
        delete(table, 1),
        insert(table, 1, draws),
        insert(table, 2, draws),
        update(table, 3, a="x"),
    )
    assert [[entry[1] for entry in layer] for layer in states] == [[1, 3], [1], [1, 2]]


def test_ordered_uses_all_happen(table):
    """An upsert that draws a value is not swallowed by the next one."""
    draws = [Use("sequence", "all", ordered=True)]
    assert len(layered(upsert(table, 1, uses=draws, a="x"), upsert(table, 1, uses=draws, a="y"))) == 2


def test_draining_forgets(table):
    """What was handed over has no part in what comes later."""
    layers = Layers()
    layers.place(delete(table, 1, [DELETING]))
    layers.drain()
    assert not layers
    layers.place(insert(table, 1, [INSERTING], a="x"))
    assert [[entry.form.op for entry in layer] for layer in layers.drain()] == [[Op.INSERT]]
