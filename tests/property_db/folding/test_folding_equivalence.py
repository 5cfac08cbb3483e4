"""A folded batch leaves the database exactly as its writes applied one by one, for every shape of model."""

from __future__ import annotations

import datetime
import uuid
from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest
from django.db import models
from django.db.models import F, Q
from hypothesis import given
from hypothesis import strategies as st
from psycopg.types.range import Range

from scriba import Delete, Insert, Update, Upsert
from tests.property_db.folding.app import models as shapes
from tests.property_db.folding.app.models import EPOCH
from tests.property_db.folding.oracle import assert_equivalent
from tests.support.profiles import runs

pytestmark = [pytest.mark.django_db, pytest.mark.case("C3", "C6")]

NUMBERS = st.integers(0, 4)
GOOD_WORDS = ["", "a", "b", 'q"\\']
WORDS = st.sampled_from([*GOOD_WORDS * 12, "too long for it"])


class Spec(NamedTuple):
    """How random writes on one model look. `keys` are few, so that writes meet."""

    keys: st.SearchStrategy[Any]
    values: Mapping[str, st.SearchStrategy[Any]]
    is_drawn: bool = False  #: the key may be left to the database


SPECS: dict[type[models.Model], Spec] = {
    shapes.Plain: Spec(
        st.sampled_from("abc"),
        {
            "name": WORDS,
            "number": st.sampled_from([*range(20), 2**31]),
            "color": st.sampled_from([*shapes.Color, None]),
            "payload": st.none() | st.dictionaries(WORDS, NUMBERS, max_size=1),
            "touched": st.none() | st.just(EPOCH),
        },
    ),
    shapes.Drawn: Spec(NUMBERS, {"name": WORDS, "number": NUMBERS | st.none()}, is_drawn=True),
    shapes.Numbered: Spec(NUMBERS, {"name": WORDS}),
    shapes.Unique: Spec(NUMBERS, {"code": st.sampled_from(["x", "y", None]), "note": WORDS}),
    shapes.PartlyUnique: Spec(
        NUMBERS, {"code": st.sampled_from(["x", "y"]), "active": st.booleans(), "note": st.sampled_from(["n", "m"])}
    ),
    shapes.Excluding: Spec(
        NUMBERS, {"span": st.sampled_from([Range(0, 5), Range(4, 8), Range(8, 9)]), "note": st.sampled_from(["n", "m"])}
    ),
    shapes.Checked: Spec(
        NUMBERS,
        {
            "low": NUMBERS,
            "high": st.sampled_from([4, 4, 5, 5, 6, 6, 2]),
            "count": st.sampled_from([*range(9), -1]),
            "note": st.sampled_from([*["", "a", "abc"] * 4, "abcd"]),
        },
    ),
    shapes.Watched: Spec(st.sampled_from("ab"), {"note": st.sampled_from(["n", "m"])}),
    shapes.WatchLog: Spec(NUMBERS, {"said": st.just("mine")}, is_drawn=True),
    shapes.UuidKey: Spec(NUMBERS.map(lambda number: uuid.UUID(int=number)), {"number": NUMBERS}),
    shapes.Composite: Spec(
        st.tuples(st.sampled_from("st"), NUMBERS.map(lambda day: datetime.date(2024, 1, 1 + day))), {"total": NUMBERS}
    ),
    shapes.Moment: Spec(
        st.sampled_from(
            [
                EPOCH,
                EPOCH.astimezone(datetime.timezone(datetime.timedelta(hours=5))),
                EPOCH + datetime.timedelta(microseconds=1),
            ]
        ),
        {"number": NUMBERS},
    ),
    shapes.Price: Spec(st.sampled_from(["1.04", "1.0", "1.1"]), {"number": NUMBERS}),
    shapes.ShortKey: Spec(st.sampled_from(["abc", "abc  ", "abcd", "ab"]), {"number": NUMBERS}),
    shapes.PlainExtra: Spec(st.sampled_from("ab"), {"number": NUMBERS}),
    shapes.Timed: Spec(NUMBERS, {"note": WORDS, "created": st.just(EPOCH)}),
    shapes.Defaulting: Spec(NUMBERS, {"note": WORDS, "state": WORDS, "number": NUMBERS}),
    shapes.Generating: Spec(NUMBERS, {"whole": NUMBERS, "part": st.sampled_from([1, 2, 3, 1, 2, 3, 0])}),
    shapes.Custom: Spec(NUMBERS, {"secret": st.none() | WORDS, "number": NUMBERS}),
    shapes.Loud: Spec(NUMBERS, {"word": WORDS, "number": NUMBERS}),
    shapes.Sized: Spec(NUMBERS, {"number": NUMBERS}),
    shapes.Asked: Spec(NUMBERS, {"data": st.none() | st.just({"a": 1})}),
    shapes.Named: Spec(NUMBERS, {"word": WORDS}),
    shapes.Author: Spec(NUMBERS, {"name": WORDS}, is_drawn=True),
    shapes.Book: Spec(NUMBERS, {"author_id": NUMBERS | st.none(), "title": WORDS, "sequel_of_id": NUMBERS | st.none()}),
    shapes.Tagged: Spec(NUMBERS, {"name": WORDS}),
    shapes.StrictParent: Spec(NUMBERS, {"note": st.sampled_from(["n", "m"])}),
    shapes.StrictChild: Spec(NUMBERS, {"parent_id": NUMBERS | st.none()}),
    shapes.Place: Spec(NUMBERS, {"name": WORDS}, is_drawn=True),
    shapes.Restaurant: Spec(NUMBERS, {"name": WORDS, "stars": NUMBERS}, is_drawn=True),
    shapes.PlainProxy: Spec(st.sampled_from("abc"), {"name": WORDS, "number": NUMBERS}),
    shapes.Hiding: Spec(NUMBERS, {"hidden": st.booleans(), "number": NUMBERS}),
    shapes.Ordered: Spec(NUMBERS, {"author_id": st.none()}),
}

#: Models whose rows touch each other: a batch mixes them.
FAMILIES = [
    [shapes.Plain, shapes.Drawn, shapes.Unique],
    [shapes.Plain, shapes.PlainProxy, shapes.PlainExtra],
    [shapes.Author, shapes.Book],
    [shapes.Watched, shapes.WatchLog],
    [shapes.StrictParent, shapes.StrictChild],
    [shapes.Place, shapes.Restaurant],
    [shapes.Tagged, shapes.Named],
    *[[model] for model in SPECS],
]


def _instance(model, key, values):
    if key is None:
        return model(**values)
    if isinstance(key, tuple):
        return model(pk=key, **values)
    return model(**{model._meta.pk.attname: key}, **values)


def _filter(model, key, form):
    fields = model._meta.pk_fields
    if isinstance(key, tuple):
        return {"pk": key} if form % 2 else dict(zip([field.name for field in fields], key, strict=True))
    return {["pk", fields[0].name, fields[0].attname, f"{fields[0].name}__exact"][form]: key}


PRESENT = ["update", "update", "update", "update", "delete", "upsert", "odd"]
ABSENT = ["insert", "insert", "insert", "upsert"]


@st.composite
def _write(draw, family, there):
    """Return a function that makes the write anew: objects are used once. `there` guesses which rows exist."""
    model = draw(st.sampled_from(family))
    spec = SPECS[model]
    key = draw(spec.keys)
    form = draw(st.integers(0, 3))
    row = (model._meta.db_table, str(key))
    fitting = PRESENT if row in there else ABSENT
    kind = draw(st.sampled_from([*fitting * 3, *PRESENT, "insert"]))  # mostly what finds its row, or its room
    values = {name: draw(strategy) for name, strategy in spec.values.items() if draw(st.booleans())}
    if kind in ("insert", "upsert"):
        if spec.is_drawn and kind == "insert" and draw(st.booleans()):
            key = None
        there.add(row)
        return lambda: (Insert if kind == "insert" else Upsert)(_instance(model, key, values))
    if kind == "delete":
        there.discard(row)
        return lambda: Delete(model, _filter(model, key, form))
    name = draw(st.sampled_from(sorted(spec.values)))
    values = values or {name: draw(spec.values[name])}
    if kind == "update":
        return lambda: Update(model, _filter(model, key, form), **values)
    return draw(_odd(model, key, name, values))


def _odd(model, key, name, values):
    """Writes that are never folded: other filters, expressions, every row."""
    value = values.get(name)
    found = {f"{name}__isnull": True} if value is None else {name: value}
    return st.sampled_from(
        [
            lambda: Update(model, found, **values),
            lambda: Update(model, Q(pk=key), **values),
            lambda: Update(model, {"pk": key}, **{name: F(name)}),
            lambda: Update.all(model, **values),
            lambda: Delete(model, found),
            lambda: Delete(model, {"pk__in": [key]}),
        ]
    )


@st.composite
def batches(draw):
    """A batch on one family of models: the family, functions that make the writes, and rows that are there before."""
    family = draw(st.sampled_from(FAMILIES))
    seeded = [(model, draw(SPECS[model].keys)) for model in draw(st.lists(st.sampled_from(family), max_size=4))]
    there = {(model._meta.db_table, str(key)) for model, key in seeded}
    makers = [draw(_write(family, there)) for _ in range(draw(st.integers(1, 20)))]
    return family, makers, seeded


def _tables(family):
    tables = {*family, *[parent for model in family for parent in model._meta.all_parents if not parent._meta.abstract]}
    return {shapes.Plain if model is shapes.PlainProxy else model for model in tables}


@given(batches())
@runs(5000)
def test_folded_is_one_by_one(batch):
    """Rows, unmatched writes and failures are those of one write after the other, whatever the model is."""
    family, makers, seeded = batch
    seeds = list({(model._meta.db_table, str(key)): (model, key) for model, key in seeded}.values())
    assert_equivalent(
        lambda: [make() for make in makers],
        _tables(family),
        lambda: [Upsert(_instance(model, key, {})) for model, key in seeds if model not in UNSEEDED],
    )


#: Defaults that do not make a row, or two rows that exclude each other.
UNSEEDED = {shapes.Excluding, shapes.Restaurant}
