"""Layers against a model: any batch of writes, executed layer by layer, does what one write after the other does."""

from __future__ import annotations

import random
from collections.abc import Hashable, Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scriba.targets.layers import Entry, Form, Layers, Op, Use
from tests.support.profiles import runs

pytestmark = pytest.mark.case("C3")


class RefusedError(Exception):
    """The table in memory does what a database would do."""


class Table:
    """A table in memory: a key, a unique column `u`, columns `a` and `b` (which refuse -1), and a drawn column `n`."""

    def __init__(self, rows: Iterable[int]) -> None:
        self.rows: dict[Hashable, dict[str, Any]] = {key: {"a": 0, "b": 0, "u": None, "n": 0} for key in rows}
        self.drawn = 0
        self.unmatched = 0

    def may_overwrite(self, entry, columns):
        return all(entry.values.get(column) != -1 for column in columns)

    def may_forget(self, entry):
        return -1 not in entry.values.values()

    def execute(self, op, key, values, takes_over=None, count=1):
        if key is None or (op in (Op.INSERT, Op.UPSERT)):
            self.drawn += 1
            values = {"a": 0, "b": 0, "u": None, "n": self.drawn, **values}
            key = 100 + self.drawn if key is None else key
        if op in (Op.DELETE, Op.UPDATE) and key not in self.rows:
            self.unmatched += count
            self._check(values)
        elif op is Op.DELETE:
            del self.rows[key]
        elif op is Op.UPDATE:
            self._put(key, {**self.rows[key], **values})
        elif key in self.rows:
            if op is Op.INSERT:
                raise RefusedError(key)
            self._check(values)
            self._put(key, {**self.rows[key], **{name: values[name] for name in takes_over}})
        else:
            self._put(key, values)

    def _put(self, key, row):
        self._check(row)
        if row["u"] is not None and any(other["u"] == row["u"] for k, other in self.rows.items() if k != key):
            raise RefusedError(row["u"])
        self.rows[key] = row

    @staticmethod
    def _check(values):
        if -1 in values.values():
            raise RefusedError(values)


KEYS = st.integers(0, 3)
VALUES = st.sampled_from([*list(range(8)) * 5, -1])  # -1 is refused
SETS = st.dictionaries(st.sampled_from("ab"), VALUES, min_size=1)
WHOLE = st.fixed_dictionaries({"a": VALUES, "b": VALUES})
UNIQUE = st.sampled_from([None, None, None, "v", "w", "x", "y"])
FITTING = {True: [Op.UPDATE, Op.UPDATE, Op.UPDATE, Op.DELETE, Op.UPSERT], False: [Op.INSERT, Op.INSERT, Op.UPSERT]}


@st.composite
def batches(draw):
    """Rows that are there before, and writes of which most find their row, or its room."""
    there = draw(st.sets(KEYS))
    present, writes = set(there), []
    for _ in range(draw(st.integers(1, 25))):
        key = draw(KEYS)
        op = draw(st.sampled_from([*FITTING[key in present] * 12, *Op]))
        values = draw({Op.UPDATE: SETS, Op.DELETE: st.just({})}.get(op, WHOLE))
        if op is Op.INSERT:
            key = None if draw(st.integers(0, 3)) == 0 else key
            values = {**values, "u": draw(UNIQUE)}
        (present.discard if op is Op.DELETE else present.add)(key)
        writes.append((op, key, values))
    return there, writes


def _uses(op, key):
    uses = [Use("rows", "drawn" if key is None else "keyed")]
    if op in (Op.INSERT, Op.DELETE):
        uses.append(Use("exclusion", op))
    if op in (Op.INSERT, Op.UPSERT):
        uses.append(Use("sequence", op, ordered=True))
    return uses


def one_by_one(table, writes):
    for op, key, values in writes:
        table.execute(op, key, dict(values), ("a", "b"))


def folded(table, writes, shuffle):
    layers = Layers()
    for op, key, values in writes:
        takes_over = ("a", "b") if op is Op.UPSERT else None
        form = Form(op, table, tuple(values), takes_over, _uses(op, key))
        layers.place(Entry(form, key, list(values.values())))
    for layer in layers.drain():
        assert len({entry.key for entry in layer if entry.key is not None}) == sum(e.key is not None for e in layer)
        for entry in _commuted(layer, shuffle):
            table.execute(entry.form.op, entry.key, entry.values, entry.form.takes_over, entry.count)


def _commuted(layer, shuffle):
    """Return a layer's entries as its statements might write them: one statement per operation, in any order, with
    its rows in any order too unless they draw.
    """
    statements = [[entry for entry in layer if entry.form.op is op] for op in shuffle.sample([*Op], len(Op))]
    for statement in statements:
        if statement and statement[0].form.op in (Op.UPDATE, Op.DELETE):
            shuffle.shuffle(statement)
    return [entry for statement in statements for entry in statement]


@given(batches(), st.randoms(use_true_random=False))
@runs(5000)
def test_layers_do_what_one_by_one_does(batch, shuffle: random.Random):
    """Same rows, same unmatched writes, and a failure where there is one, in any order inside a layer."""
    there, writes = batch
    expected, found = Table(there), Table(there)
    try:
        one_by_one(expected, writes)
    except RefusedError:
        with pytest.raises(RefusedError):
            folded(found, writes, shuffle)
        return
    folded(found, writes, shuffle)
    assert found.rows == expected.rows
    assert found.unmatched == expected.unmatched
