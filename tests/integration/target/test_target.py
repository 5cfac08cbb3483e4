"""The target as an object of configuration: what it accepts, names and warns of. No connection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.db import connections, models
from django.db.models import signals
from django.test import override_settings
from django.test.utils import isolate_apps

from scriba.exceptions import InvalidReturn
from scriba.results import Delete, Insert, Update, Upsert
from scriba.targets import OrmTarget
from tests.testapp.models import Row


class Elsewhere:
    def db_for_write(self, model: Any, **hints: Any) -> str:
        return "other"


class NotHere:
    def allow_migrate(self, db: str, app_label: str, **hints: Any) -> bool | None:
        return False if db == "default" and app_label == "testapp" else None


def ids(target: OrmTarget, *read_models: Any) -> list[str]:
    return [message.id for message in target.checks(read_models)]


def test_a_plain_read_model_is_no_remark() -> None:
    """Nothing to say, and nothing is asked of any database."""
    connections["other"].close()
    assert ids(OrmTarget(), Row) == []
    assert ids(OrmTarget("other"), Row) == ["scriba.W102"]
    assert connections["other"].connection is None


def test_an_unknown_alias_is_an_error_that_names_the_known_ones() -> None:
    """And nothing more is looked at."""
    (message,) = OrmTarget("defualt").checks([Row])

    assert message.id == "scriba.E100"
    assert "default, other" in message.hint


def test_another_engine_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """PostgreSQL only."""
    monkeypatch.setattr(connections["other"], "vendor", "sqlite")

    assert ids(OrmTarget("other"), Row) == ["scriba.E101"]


@override_settings(DATABASE_ROUTERS=[Elsewhere()])
def test_a_model_that_is_routed_elsewhere_is_a_warning() -> None:
    """The cure names that database."""
    (message,) = OrmTarget().checks([Row])

    assert message.id == "scriba.W102"
    assert "OrmTarget(using='other')" in message.hint


@override_settings(DATABASE_ROUTERS=[NotHere()])
def test_a_model_whose_table_is_kept_away_is_an_error() -> None:
    """It would halt at the first event."""
    assert ids(OrmTarget(), Row) == ["scriba.E105"]


@isolate_apps("tests.testapp")
def test_overridden_methods_and_connected_signals_are_warned_about() -> None:
    """Declared writes run neither: better said at check time than wondered about later."""

    class Chatty(models.Model):
        class Meta:
            app_label = "testapp"

        def save(self, *args: Any, **options: Any) -> None:
            super().save(*args, **options)

    def receiver(**kwargs: Any) -> None:
        """Would not be called."""

    signals.post_save.connect(receiver, sender=Chatty)
    try:
        found = OrmTarget().checks([Chatty])
    finally:
        signals.post_save.disconnect(receiver, sender=Chatty)

    assert [message.id for message in found] == ["scriba.W103", "scriba.W104"]
    assert "save()" in found[0].msg
    assert "post_save" in found[1].msg


@pytest.mark.case("B2")
@pytest.mark.parametrize(
    ("result", "is_valid"),
    [
        (Insert(Row(id="a")), True),
        ([Upsert(Row(id="a")), Update(Row, {"id": "a"}, name="x"), Delete(Row, {"id": "a"})], True),
        (Insert(Row), False),
        (Insert({"id": "a"}), False),
        (Update("Row", {"id": "a"}, name="x"), False),
        (Row(id="a"), False),
        (None, False),
        (True, False),
    ],
    ids=repr,
)
def test_only_models_can_be_written(result: Any, is_valid: bool) -> None:
    """A class where a row belongs, a dict, a bare model: none of them reaches the database."""
    assert OrmTarget().valid_result(result) is is_valid


@pytest.mark.case("B2")
@pytest.mark.parametrize(
    "make",
    [
        lambda: Update(Row, {"id": "a"}, nmae="x"),
        lambda: Delete(Row, {"idd": "a"}),
        lambda: Update(Row, {"code__": 1}, nam=""),
    ],
)
def test_a_misspelt_field_is_found_before_anything_is_written(make: Callable[[], Any]) -> None:
    """With the name that was meant."""
    with pytest.raises(InvalidReturn, match="did you mean"):
        OrmTarget().valid_result(make())


def test_a_target_says_what_it_is() -> None:
    """For info and for logs."""
    assert OrmTarget("other").identity() == "orm:other"
    assert repr(OrmTarget()) == "OrmTarget(using='default')"
