"""What a TableSource is told, what it guesses, and how it says what is missing. No connection is opened."""

from __future__ import annotations

import pytest
from django.apps.registry import Apps
from django.db import models
from django.db.models import Q

from scriba.exceptions import ConfigurationError
from scriba.fields import EventPosition
from scriba.sources import TableSource
from scriba.sources.table import LONGEST_CHANNEL, channel_of
from scriba.sources.table_fields import find_fields


def model(**fields):
    """Return a model class with `fields`; its table is never made."""
    meta = type("Meta", (), {"app_label": "options", "apps": Apps(), **fields.pop("meta", {})})
    body = {"__module__": __name__, "Meta": meta, "__str__": lambda self: "row", **fields}
    return type("Event", (models.Model,), body)


def text():
    return models.TextField()


def found(made, **given):
    fields, problems = find_fields(made, given)
    assert problems == []
    return fields


def said(source: TableSource) -> list[str]:
    return [problem.id for problem in source.checks()]


# --- guesses --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", ["stream_id", "aggregate_id", "originator_id", "entity_id", "object_id"])
@pytest.mark.parametrize("kind", ["event_type", "type", "name", "topic"])
def test_common_names_need_no_option(stream, kind):
    """The names of public code are accepted, in any combination."""
    fields = found(model(**{stream: text(), kind: text(), "payload": models.JSONField()}))
    assert (fields.stream_id, fields.type, fields.data, fields.position, fields.id) == (
        (stream,),
        kind,
        "payload",
        "id",
        "id",
    )


def test_the_first_name_of_the_list_wins():
    """A model with `event_type` and `name` has its type in the former."""
    fields = found(
        model(
            stream_id=text(), aggregate_id=text(), name=text(), event_type=text(), state=models.JSONField(),
            event_data=models.JSONField(), headers=models.JSONField(), event_context=models.JSONField(),
            created_at=models.DateTimeField(), timestamp=models.DateTimeField(), uuid=models.UUIDField(),
            event_id=models.UUIDField(), aggregate_version=models.IntegerField(), version=models.IntegerField(),
            correlation_id=models.UUIDField(), causation_id=models.UUIDField(),
        )
    )  # fmt: skip
    assert fields[2:] == (
        ("stream_id",), None, "event_type", "event_data", "event_id", "event_context", "created_at", "aggregate_version",
        "correlation_id", "causation_id",
    )  # fmt: skip


def test_a_name_of_the_wrong_kind_is_no_guess():
    """A version that is a text and a time that is a number are left alone."""
    fields = found(model(stream_id=text(), type=text(), data=text(), version=text(), timestamp=models.FloatField()))
    assert (fields.stream_version, fields.occurred_at) == (None, None)


@pytest.mark.parametrize(
    ("fields", "position"),
    [
        ({}, "id"),
        ({"position": EventPosition(), "id": models.UUIDField(primary_key=True)}, "position"),
        ({"number": EventPosition()}, "number"),
        ({"global_sequence": models.BigIntegerField(unique=True), "id": models.UUIDField(primary_key=True)}, "global_sequence"),
        ({"position": models.IntegerField()}, "id"),  # a position inside a stream: not unique
        ({"meta": {"constraints": [models.UniqueConstraint(fields=["position"], name="one")]}, "position": models.IntegerField()}, "position"),
    ],
)  # fmt: skip
def test_the_position_is_a_unique_number_over_the_table(fields, position):
    """What the database draws for each row; a number that is not unique is none."""
    assert found(model(stream_id=text(), type=text(), data=text(), **fields)).position == position


def test_a_position_is_a_column_of_the_table_itself():
    """A parent's number lies in another table; a proxy's in the same."""
    parent = model(stream_id=text(), type=text(), data=text(), position=EventPosition())
    registry = {"app_label": "options", "apps": parent._meta.apps}
    child = type("Child", (parent,), {"__module__": __name__, "Meta": type("Meta", (), dict(registry))})
    proxy = type("Proxy", (parent,), {"__module__": __name__, "Meta": type("Meta", (), {**registry, "proxy": True})})
    assert said(TableSource(child)) == ["scriba.E215"]
    assert said(TableSource(child, position="position")) == ["scriba.E212"]
    assert found(proxy).position == "position"
    assert found(proxy, position="pk").field("pk").name == "id"


# --- what is missing ------------------------------------------------------------------------------------


def test_a_model_without_an_order_is_an_error_with_the_way_out():
    """A UUID key and a version per aggregate: the error names the operation and the field."""
    shape_a = model(
        id=models.UUIDField(primary_key=True), aggregate_id=models.UUIDField(), version=models.IntegerField(),
        event_type=text(), payload=models.JSONField(),
    )  # fmt: skip
    [problem] = TableSource(shape_a).checks()
    assert problem.id == "scriba.E215"
    assert 'AddEventPosition("event"' in problem.hint
    with pytest.raises(ConfigurationError, match="no number that grows"):
        TableSource(shape_a).identity()


def test_everything_that_is_missing_is_said_at_once():
    """One run of `check` tells the whole list, with the names that were tried."""
    problems = TableSource(model(blob=models.BinaryField())).checks()
    assert [problem.id for problem in problems] == ["scriba.E211"] * 3
    assert "stream_id, aggregate_id" in problems[0].hint
    assert "blob" in problems[2].hint


@pytest.mark.parametrize(
    ("options", "problem", "told"),
    [
        ({"type": "kind"}, "scriba.E212", "'kind' is no field"),
        ({"data": "dta"}, "scriba.E212", "did you mean 'data'"),
        ({"stream_id": ("type", "stram_id")}, "scriba.E212", "did you mean 'stream_id'"),
        ({"stream_id": 5}, "scriba.E212", "a tuple of names, or a callable"),
        ({"metadata": "data__key"}, "scriba.E212", "is no field"),
        ({"position": "data__id"}, "scriba.E212", "is no field"),
        ({"position": "stream_id"}, "scriba.E213", "is a TextField"),
        ({"position": "count"}, "scriba.E214", "not unique"),
        ({"occurred_at": "type"}, "scriba.E213", "cannot be the event's occurred_at"),
        ({"stream_version": "type"}, "scriba.E213", "cannot be the event's stream_version"),
        ({"filter": Q(missing=1)}, "scriba.E217", "does not fit the model"),
        ({"using": "elsewhere"}, "scriba.E216", "is no database"),
    ],
)
def test_an_option_that_does_not_fit_the_model(options, problem, told):
    """Found by check, with the value and the fields there are."""
    made = model(stream_id=text(), type=text(), data=models.JSONField(), count=models.IntegerField())
    [message] = TableSource(made, **options).checks()
    assert message.id == problem
    assert told in message.msg
    assert message.hint


@pytest.mark.parametrize("name", ["testapp.Evnt", "Event", "nowhere.Event"])
def test_a_model_that_is_not_there(name):
    """A name is resolved late, and a wrong one is found by check."""
    source = TableSource(name)
    assert said(source) == ["scriba.E210"]
    with pytest.raises(ConfigurationError, match="no such model"):
        source.identity()


def test_something_that_is_no_model():
    assert said(TableSource(5)) == ["scriba.E210"]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"start_from": "begin"}, "'origin', 'current', or a position"),
        ({"start_from": -1}, "'origin', 'current', or a position"),
        ({"start_from": True}, "'origin', 'current', or a position"),
        ({"wakeup": "notfy"}, "did you mean 'notify'"),
        ({"filter": {"a": 1}}, "a Q object"),
        ({"decode": 5}, "a callable"),
        ({"types": [int]}, "no dataclass"),
    ],
)
def test_an_option_that_is_wrong_in_itself_is_refused_at_once(options, told):
    """The decorator's line fails, not the first event."""
    with pytest.raises(ConfigurationError, match=told):
        TableSource("testapp.Event", **options)


# --- names ----------------------------------------------------------------------------------------------


def test_the_identity_names_database_table_and_column():
    """It is recorded: a projection never starts on another table by accident, or on another order of the same."""
    made = model(
        stream_id=text(), type=text(), data=text(), number=EventPosition(db_column="No"), meta={"db_table": "Log"}
    )
    assert TableSource(made).identity() == "table:default.Log(No)"
    assert TableSource(made, using="other", position="id").identity() == "table:other.Log(id)"


def test_a_channel_fits_whatever_the_table_is_called():
    """PostgreSQL refuses channel names of 64 bytes, so long ones become digests: the same for writer and reader."""
    short, long = model(meta={"db_table": "events"}), model(meta={"db_table": "ü" * 40})
    assert channel_of(short) == "scriba:events"
    assert len(channel_of(long).encode()) <= LONGEST_CHANNEL
    assert channel_of(long) != channel_of(model(meta={"db_table": "ü" * 41}))


def test_narrowing_leaves_the_original_alone():
    """A source may be shared by projections that want different events."""
    source = TableSource("testapp.Event")
    assert source.narrow({"a"}) is not source
    assert source.narrow({"a"}).identity() == source.identity()
    assert source._event_types is None
