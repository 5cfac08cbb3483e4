"""What a handler may return: values that say what to write, refuse contradictions, and can be compared in tests."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.auth.models import Group, Permission
from django.db.models import Q

from scriba import Delete, Done, Fail, Insert, Skip, Update, Upsert
from scriba.exceptions import InvalidReturn, PermanentFailure
from scriba.results import ACCEPTED, writes_of


@pytest.mark.parametrize("empty", [{}, Q(), None])
def test_an_update_without_a_filter_is_refused(empty: Any) -> None:
    """An empty filter would update every row: it must be said on purpose, and the message says how."""
    with pytest.raises(InvalidReturn, match=r"Update\.all\(Group, …\) updates every row"):
        Update(Group, empty, name="x")


@pytest.mark.parametrize("empty", [{}, Q(), None])
def test_a_delete_without_a_filter_is_refused(empty: Any) -> None:
    """An empty filter would delete every row: it must be said on purpose, and the message says how."""
    with pytest.raises(InvalidReturn, match=r"Delete\.all\(Group\) deletes every row"):
        Delete(Group, empty)


def test_every_row_can_be_meant_on_purpose() -> None:
    """``all`` makes the same values with an empty filter."""
    assert Update.all(Group, name="x").filter == {}
    assert Delete.all(Group).filter == {}


@pytest.mark.parametrize("make", [lambda: Update(Group, {"pk": 1}), lambda: Update.all(Group)])
def test_an_update_of_nothing_is_refused(make: Any) -> None:
    """An update without values is a mistake: the message names the alternative."""
    with pytest.raises(InvalidReturn, match=r"Return Skip\(\) when there is nothing to do"):
        make()


def test_contradictory_results_are_not_retried() -> None:
    """A result that contradicts itself is the code's fault: calling the handler again changes nothing."""
    assert issubclass(InvalidReturn, PermanentFailure)


def test_fields_may_have_the_names_of_the_parameters() -> None:
    """A read model with fields named `model` and `filter` can be updated."""
    update = Update(Group, {"pk": 1}, model="m", filter="f")

    assert update.values == {"model": "m", "filter": "f"}


def test_results_are_compared_by_their_parts() -> None:
    """A unit test of a handler can compare what it returns with what it should return."""
    assert Update(Group, {"pk": 1}, name="a") == Update(Group, {"pk": 1}, name="a")
    assert Update(Group, {"pk": 1}, name="a") != Update(Group, {"pk": 2}, name="a")
    assert Update(Group, {"pk": 1}, name="a") != Update(Permission, {"pk": 1}, name="a")
    assert Delete(Group, Q(pk=1)) == Delete(Group, Q(pk=1))
    assert Delete(Group, {"pk": 1}) != Update(Group, {"pk": 1}, name="a")
    assert Skip() == Skip()
    assert Skip() != Done()
    assert Fail("why") == Fail("why")
    assert Fail("why") != "why"


def test_rows_are_compared_by_all_their_values() -> None:
    """Django calls two rows equal when their keys are: a test of a handler must see a wrong column all the same."""
    assert Insert(Group(id=1, name="pending")) == Insert(Group(id=1, name="pending"))
    assert Insert(Group(id=1, name="pending")) != Insert(Group(id=1, name="shipped"))
    assert Insert(Group(name="a")) == Insert(Group(name="a"))
    assert Insert(Group(name="a")) != Insert(Permission(name="a"))


def test_results_are_no_dictionary_keys() -> None:
    """They hold dicts and rows, so they cannot be hashed."""
    with pytest.raises(TypeError):
        hash(Skip())


def test_a_result_shows_its_parts() -> None:
    """A failed comparison in a user's test prints what was returned."""
    assert (
        repr(Update(Group, {"pk": 1}, name="a"))
        == f"Update(filter={{'pk': 1}}, model={Group!r}, values={{'name': 'a'}})"
    )


def test_results_can_be_matched() -> None:
    """``match`` takes results apart, in the order of their parameters."""
    match Update(Group, {"pk": 1}, name="a"):
        case Update(model, where, values):
            taken = (model, where, values)

    assert taken == (Group, {"pk": 1}, {"name": "a"})


def test_an_upsert_takes_lists_of_fields() -> None:
    """Lists become tuples; nothing given stays nothing (the key, and all other columns)."""
    upsert = Upsert(Group(name="a"), unique_fields=["name"])

    assert (upsert.unique_fields, upsert.update_fields) == (("name",), None)


@pytest.mark.parametrize("option", ["unique_fields", "update_fields"])
def test_one_field_name_is_no_list(option: str) -> None:
    """A bare string would be taken for its letters: it is refused, and the message shows the list."""
    with pytest.raises(InvalidReturn, match=r"give a list of field names, \['name'\]"):
        Upsert(Group(name="a"), **{option: "name"})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("result", "count"),
    [(Insert(Group()), 1), (Skip(), 0), ([], 0), ((), 0), ([Insert(Group()), Delete(Group, {"pk": 1})], 2)],
)
def test_declared_writes_are_counted(result: object, count: int) -> None:
    """One write, several in order, or none."""
    writes = writes_of(result)

    assert writes is not None
    assert len(writes) == count


@pytest.mark.parametrize(
    "result", [None, True, Group(), "insert", [Skip()], [Done()], [Fail("x")], [[Insert(Group())]], ("insert", Group())]
)
def test_other_shapes_declare_no_writes(result: object) -> None:
    """Anything else is no list of writes; Skip, Done and Fail do not belong inside one."""
    assert writes_of(result) is None


@pytest.mark.parametrize("name", ["Insert", "Update", "Delete", "Upsert", "list", "tuple", "Done", "Skip", "Fail"])
def test_the_accepted_shapes_are_all_named(name: str) -> None:
    """The sentence shown for a wrong return names every right one."""
    assert name in ACCEPTED
