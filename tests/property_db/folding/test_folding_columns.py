"""Every kind of column takes every value as the ORM stores it, folded or not."""

from __future__ import annotations

import datetime
import decimal
import uuid
from zoneinfo import ZoneInfo

import pytest
from django.db import connection, models
from django.db.models import F, Value
from django.utils.safestring import mark_safe
from django.utils.translation import gettext_lazy
from hypothesis import given
from hypothesis import strategies as st
from psycopg.types.range import Range

from scriba import Delete, Insert, Update, Upsert
from scriba.targets.kinds import KINDS, NotFoldable
from tests.property_db.folding.app.models import EPOCH, Color, Every, Level
from tests.property_db.folding.oracle import assert_equivalent
from tests.support.profiles import runs

pytestmark = [pytest.mark.django_db, pytest.mark.case("C6")]

NO_NUL = st.characters(blacklist_categories=("Cs",), blacklist_characters="\0")
TEXT = st.text(NO_NUL, max_size=12) | st.sampled_from(
    ["", "NULL", "null", '"', "\\", "{}", "{a,b}", "'", "%s", "a,b", " x "]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
ZONES = st.sampled_from(
    [datetime.UTC, ZoneInfo("Europe/Berlin"), datetime.timezone(datetime.timedelta(hours=-9, minutes=-30))]
)
MOMENTS = st.datetimes(datetime.datetime(1, 1, 3), datetime.datetime(9999, 12, 29), timezones=ZONES)
DECIMALS = st.decimals(-999999, 999999, places=3, allow_nan=False) | st.sampled_from(
    [decimal.Decimal("1E+3"), decimal.Decimal("-0")]
)


def ranges(bounds):
    pairs = st.tuples(bounds, bounds).map(lambda pair: tuple(sorted(pair)))
    return st.builds(lambda pair, kind: Range(*pair, kind), pairs, st.sampled_from(["[)", "(]", "[]", "()"])) | st.just(
        Range(empty=True)
    )


VALUES = {
    "small": st.integers(-(2**15), 2**15),  # the last one does not fit
    "big": st.integers(-(2**63), 2**63 - 1),
    "positive": st.integers(-1, 2**63 - 1),
    "flag": st.booleans() | st.sampled_from([0, 1, "true"]),
    "ratio": st.floats() | st.integers(-5, 5),
    "money": DECIMALS | st.integers(-99, 99) | st.sampled_from([1.005, "12.345", decimal.Decimal("NaN")]),
    "short": st.text(NO_NUL, max_size=6)
    | st.sampled_from(["abcde  ", mark_safe("<b>"), gettext_lazy("x"), 12345, Color.RED]),
    "text": TEXT | st.text(max_size=5),
    "slug": TEXT,
    "email": st.emails().filter(lambda value: len(value) < 100),
    "day": st.dates() | st.sampled_from(["2024-02-29", datetime.datetime(2024, 1, 1, 23, tzinfo=datetime.UTC)]),
    "moment": MOMENTS | st.sampled_from(["2024-02-29T12:00:00+02:00", datetime.date(2024, 1, 1)]),
    "clock": st.times() | st.just("12:30"),
    "span": st.timedeltas() | st.just("3 04:05:06"),
    "uid": st.uuids() | st.sampled_from(["{12345678-1234-5678-1234-567812345678}", "not one"]),
    "address": st.ip_addresses().map(str) | st.sampled_from(["", "::ffff:1.2.3.4", "1.2.3"]),
    "blob": st.binary(max_size=8) | st.binary(max_size=3).map(bytearray) | st.binary(max_size=3).map(memoryview),
    "data": JSON | st.sampled_from([float("nan"), "\0", Value(None, models.JSONField())]),
    "rich": st.dictionaries(st.just("x"), st.uuids() | MOMENTS | DECIMALS, max_size=1),
    "level": st.sampled_from([*Level, 7]),
    "color": st.sampled_from([*Color, "green"]),
    "file": st.sampled_from(["a/b.txt", ""]),
    "tags": st.lists(st.none() | st.text(NO_NUL, max_size=5) | st.sampled_from(["NULL", "", '"', "\\"]), max_size=3),
    "grid": st.lists(st.lists(st.integers(-5, 5), min_size=2, max_size=2), max_size=3) | st.just([[1], [2, 3]]),
    "prices": st.lists(DECIMALS, max_size=2),
    "moments": st.lists(MOMENTS, max_size=2),
    "bag": st.lists(JSON.filter(lambda value: value is not None), max_size=2),
    "window": ranges(st.integers(-9, 9)) | st.just((5, 2)),
    "wide": ranges(st.integers(-9, 9)) | st.just((None, 2**40)),
    "exact": ranges(DECIMALS),
    "period": ranges(MOMENTS),
}


def test_every_column_has_values():
    """A column that is added to the model is added to the comparison."""
    assert {field.name for field in Every._meta.concrete_fields} == {"id", *VALUES}


@st.composite
def columns(draw):
    names = draw(st.lists(st.sampled_from(sorted(VALUES)), min_size=1, max_size=4, unique=True))
    return {name: draw(st.none() | VALUES[name]) for name in names}


@given(st.lists(columns(), min_size=1, max_size=4), st.lists(columns(), max_size=4), columns())
@runs(1000)
def test_values_are_stored_as_the_orm_stores_them(inserted, updated, upserted):
    """Whatever a field takes, insert, update and upsert leave the same column behind as Django does."""
    assert_equivalent(
        lambda: [
            *[Insert(Every(id=number, **values)) for number, values in enumerate(inserted)],
            *[Update(Every, {"id": number}, **values) for number, values in enumerate(updated)],
            Upsert(Every(id=0, **upserted)),
            Upsert(Every(id=99, **upserted)),
        ],
        [Every],
    )


#: Their updates are the ORM's: whether the server takes such a value is not known before it is asked.
UPDATED_BY_THE_ORM = {"grid", "prices", "exact"}

#: Their updates follow the insert in a layer of their own: what they overwrite might have been refused.
UNMERGED = {"tags", "moments", "bag", "window", "wide", "period"}


@pytest.mark.parametrize("name", sorted(VALUES))
def test_each_column_folds_its_usual_values(name):
    """Ten rows of one column are one insert and one update, whatever the column's type is."""
    usual = {
        "small": 5, "big": 2**40, "positive": 3, "flag": True, "ratio": 1.5, "money": decimal.Decimal("12.50"), "short": "abc",
        "text": 'a"b\\c', "slug": "a-b", "email": "a@example.org", "day": datetime.date(2024, 5, 6), "moment": EPOCH,
        "clock": datetime.time(1, 2, 3), "span": datetime.timedelta(-1, 5, 7), "uid": uuid.UUID(int=5), "address": "10.0.0.1",
        "blob": b"\0\xff\\", "data": {"a": [None, 'q"']}, "rich": {"at": EPOCH}, "level": Level.HIGH, "color": Color.BLUE,
        "file": "a.txt", "tags": ["a", None, "NULL"], "grid": [[1, 2], [3, 4]], "prices": [decimal.Decimal("1.10")],
        "moments": [EPOCH], "bag": [{"a": 1}], "window": Range(1, 5), "wide": Range(1, 2**40), "exact": Range(None, 5),
        "period": Range(EPOCH, None),
    }  # fmt: skip
    outcome = assert_equivalent(
        lambda: [
            *[Insert(Every(id=number, **{name: usual[name]})) for number in range(10)],
            *[Update(Every, {"id": number}, **{name: usual[name]}) for number in range(5, 15)],
        ],
        [Every],
        seeds=lambda: [Insert(Every(id=number)) for number in range(10, 15)],
    )
    assert outcome.error is None
    assert outcome.unmatched == 0
    if name not in UPDATED_BY_THE_ORM:
        assert outcome.statements == (3 if name in UNMERGED else 2)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ratio", -0.0),
        ("ratio", float("nan")),
        ("ratio", float("-inf")),
        ("ratio", 5e-324),
        ("money", decimal.Decimal("999999.995")),  # too large once it is rounded
        ("money", decimal.Decimal("-1E-30")),
        ("money", decimal.Decimal("sNaN")),
        ("clock", datetime.time(1, 2, tzinfo=datetime.timezone(datetime.timedelta(hours=3)))),
        ("moment", datetime.datetime(2024, 1, 1, tzinfo=datetime.timezone(datetime.timedelta(hours=23, minutes=59)))),
        ("moment", datetime.datetime(1850, 1, 1, tzinfo=ZoneInfo("Europe/Amsterdam"))),  # an offset with seconds
        ("moment", datetime.datetime.min.replace(tzinfo=datetime.UTC)),
        ("moment", datetime.datetime.max.replace(tzinfo=datetime.UTC)),
        ("span", datetime.timedelta.min),
        ("span", datetime.timedelta.max),
        ("address", "fe80::1%eth0"),
        ("data", 10**400),
        ("data", "null"),
        ("tags", [[], []]),
        ("tags", [None]),
        ("tags", ()),
        ("window", Range(5, 2)),
        ("window", [1, 5]),
    ],
)
def test_odd_values_are_the_same_or_the_same_failure(name, value):
    """Edges of a type are stored, or refused, as the ORM stores or refuses them; found row or not."""
    for build in (
        lambda: [Insert(Every(id=1, **{name: value})), Insert(Every(id=2))],
        lambda: [Update(Every, {"id": 0}, **{name: value})],
        lambda: [Update(Every, {"id": 9}, **{name: value})],
        lambda: [Update(Every, {"id": 0}, **{name: value}), Update(Every, {"id": 0}, **{name: None})],
        lambda: [Update(Every, {"id": 9}, **{name: value}), Delete(Every, {"id": 9})],
    ):
        assert_equivalent(build, [Every], seeds=lambda: [Insert(Every(id=0))])


def test_numbers_that_are_none_are_the_orms():
    """Not every decimal is a number: how such a one is stored, or refused, is for the ORM to say."""
    text = KINDS["numeric"].texts[decimal.Decimal]
    assert text(decimal.Decimal("1E+2")) == "1E+2"
    for name in ("NaN", "sNaN", "Infinity"):
        with pytest.raises(NotFoldable):
            text(decimal.Decimal(name))


def test_times_without_a_zone_mean_the_sessions(settings):
    """Where a project uses no time zones, a naive time is what it is in the session's zone."""
    settings.USE_TZ = False
    naive = datetime.datetime(2024, 3, 31, 2, 30)  # does not exist in that zone
    with connection.cursor() as cursor:
        cursor.execute("SET LOCAL timezone = 'Europe/Berlin'")
    outcome = assert_equivalent(
        lambda: [
            *[Insert(Every(id=number, moment=naive)) for number in range(5)],
            *[Update(Every, {"id": number}, moment=naive.replace(month=10, day=27)) for number in range(5)],
        ],
        [Every],
    )
    assert outcome.statements == 1


def test_expressions_are_the_orms():
    """An expression is never folded, and sees what was written before it."""
    assert_equivalent(
        lambda: [
            Insert(Every(id=1, small=1, data=Value(None, models.JSONField()))),
            Update(Every, {"id": 1}, small=F("small") + 1),
            Update(Every, {"id": 1}, data=Value(None, models.JSONField())),
            Update(Every, {"id": 1}, big=5),
            Insert(Every(id=2, small=Value(3) + Value(4))),
        ],
        [Every],
    )
