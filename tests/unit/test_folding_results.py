"""Which results the ORM target takes."""

from __future__ import annotations

import pytest
from django.db.models import F, Q

from scriba import Delete, Insert, Update, Upsert
from scriba.exceptions import InvalidReturn
from scriba.targets.folding import check_result
from tests.testapp.models import Child, Counter, Row

pytestmark = pytest.mark.case("B2")


@pytest.mark.parametrize(
    "result",
    [
        Insert(Counter(key="a")),
        Upsert(Counter(key="a"), unique_fields=["pk"], update_fields=["value"]),
        Update(Counter, {"key": "a"}, value=F("value") + 1),
        Update(Child, {"parent__id__startswith": "a"}, parent_id="b"),
        Update(Child, Q(parent=None), parent="b"),
        Update.all(Counter, value=1),
        Delete(Counter, {"pk__in": ["a"]}),
        Delete.all(Counter),
        [Insert(Counter(key="a")), Delete(Row, {"code": None})],
        (),
    ],
)
def test_writes_on_models_are_taken(result):
    """Instances, concrete models, and the lookups that Django knows."""
    assert check_result(result)


@pytest.mark.parametrize(
    "result",
    [
        Insert({"key": "a"}),
        Insert(Counter),
        Upsert("a"),
        Update("Counter", {"key": "a"}, value=1),
        Update(Counter(key="a"), {"key": "a"}, value=1),
        Update(Counter.objects, {"key": "a"}, value=1),
        Update(Counter, ["a"], value=1),
        Delete(dict, {"key": "a"}),
        Delete(Counter, "a"),
        [Insert(Counter(key="a")), None],
        None,
    ],
)
def test_anything_else_is_not(result):
    """A result that names no instance and no model is no result."""
    assert not check_result(result)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (
            lambda: Update(Counter, {"kye": "a"}, value=1),
            r"Update\(Counter, …\): Counter has no field 'kye'; did you mean 'key'\?",
        ),
        (lambda: Update(Counter, {"key": "a"}, valeu=1), "did you mean 'value'"),
        (
            lambda: Delete(Counter, {"nothing__like__it": "a"}),
            "has no field 'nothing'; accepted: key, last_position, value",
        ),
        (lambda: Upsert(Counter(key="a"), update_fields=["valu"]), "did you mean 'value'"),
        (lambda: [Insert(Counter(key="a")), Delete(Counter, {"idd": 1})], "has no field 'idd'"),
    ],
)
def test_a_misspelt_field_is_named(result, message):
    """The message says which field of which model, and what was meant."""
    with pytest.raises(InvalidReturn, match=message):
        check_result(result())
