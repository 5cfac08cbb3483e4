"""Event tables in the shapes that teams build, each with the SQL that makes it. The app `shapes` is not installed:
tables are made and dropped by the tests that use them, so every test begins at position 1."""

from __future__ import annotations

import uuid

from django.db import models

from scriba.fields import EventPosition

__all__ = [
    "AggregateEvent", "BinaryEvent", "ChildEvent", "PartitionedEvent", "PlainEvent", "StreamRow", "TextEvent",
    "TriggeredEvent", "UuidEvent", "ZeroEvent",
]  # fmt: skip


class Shape(models.Model):
    class Meta:
        abstract = True

    def __str__(self) -> str:
        return f"{type(self).__name__} {self.pk}"


class PlainEvent(Shape):
    """An automatic id and everything that an event can have."""

    event_id = models.UUIDField(default=uuid.uuid4, unique=True)
    stream_id = models.TextField()
    stream_version = models.IntegerField(null=True)
    event_type = models.CharField(max_length=100)
    data = models.JSONField(default=dict)
    metadata = models.JSONField(null=True)
    occurred_at = models.DateTimeField(null=True)
    correlation_id = models.UUIDField(null=True)
    causation_id = models.TextField(null=True)

    class Meta:
        app_label = "shapes"


class AggregateEvent(Shape):
    """A UUID key and a version per aggregate: the commonest shape, which cannot be tailed."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4)
    aggregate_type = models.CharField(max_length=50)
    aggregate_id = models.UUIDField()
    version = models.PositiveIntegerField()
    event_type = models.CharField(max_length=100)
    payload = models.JSONField(default=dict)
    created_at = models.DateTimeField()

    class Meta:
        app_label = "shapes"
        constraints = [models.UniqueConstraint(fields=["aggregate_id", "version"], name="shapes_one_version")]


class UuidEvent(Shape):
    """The same with a position that the database draws, and a stream of several columns."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4)
    position = EventPosition()
    aggregate_type = models.CharField(max_length=50)
    aggregate_id = models.TextField()
    version = models.PositiveIntegerField(default=1)
    event_type = models.CharField(max_length=100)
    payload = models.JSONField(default=dict)

    class Meta:
        app_label = "shapes"


class TextEvent(Shape):
    """JSON in a text column."""

    stream_id = models.TextField()
    type = models.TextField()
    payload = models.TextField()

    class Meta:
        app_label = "shapes"


class BinaryEvent(Shape):
    """A payload that only the team can read."""

    stream_id = models.TextField()
    type = models.TextField()
    payload = models.BinaryField()

    class Meta:
        app_label = "shapes"


class StreamRow(Shape):
    name = models.TextField(unique=True)
    is_hidden = models.BooleanField(default=False)

    class Meta:
        app_label = "shapes"


class ChildEvent(Shape):
    """The stream is a row of another table."""

    stream = models.ForeignKey(StreamRow, on_delete=models.CASCADE, related_name="events")
    type = models.TextField()
    data = models.JSONField(default=dict)

    class Meta:
        app_label = "shapes"


class TriggeredEvent(Shape):
    """A UUID key and a number that a trigger draws before the row is inserted."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4)
    global_sequence = models.BigIntegerField(unique=True, null=True)
    stream_id = models.TextField()
    type = models.TextField()
    data = models.JSONField(default=dict)

    class Meta:
        app_label = "shapes"


TRIGGER = """
CREATE SEQUENCE shapes_numbers;
CREATE FUNCTION shapes_number() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN NEW.global_sequence := nextval('shapes_numbers'); RETURN NEW; END $$;
CREATE TRIGGER numbered BEFORE INSERT ON shapes_triggeredevent FOR EACH ROW EXECUTE FUNCTION shapes_number();
"""
NO_TRIGGER = "DROP FUNCTION IF EXISTS shapes_number() CASCADE; DROP SEQUENCE IF EXISTS shapes_numbers"


class PartitionedEvent(Shape):
    """Partitioned by month, so the key of the table is more than the id."""

    stream_id = models.TextField()
    type = models.TextField()
    data = models.JSONField(default=dict)
    occurred_at = models.DateTimeField()

    class Meta:
        app_label = "shapes"
        managed = False
        db_table = "shapes_partitioned"


PARTITIONED = """
CREATE TABLE shapes_partitioned (
    id bigserial, stream_id text NOT NULL, type text NOT NULL, data jsonb NOT NULL DEFAULT '{}',
    occurred_at timestamptz NOT NULL, PRIMARY KEY (id, occurred_at)) PARTITION BY RANGE (occurred_at);
CREATE TABLE shapes_partitioned_early PARTITION OF shapes_partitioned FOR VALUES FROM (MINVALUE) TO ('2026-01-01');
CREATE TABLE shapes_partitioned_late PARTITION OF shapes_partitioned FOR VALUES FROM ('2026-01-01') TO ('2027-01-01');
"""


class ZeroEvent(Shape):
    """Positions that begin at 0."""

    id = models.BigIntegerField(primary_key=True)
    stream_id = models.TextField()
    type = models.TextField()
    data = models.JSONField(default=dict)

    class Meta:
        app_label = "shapes"
        managed = False
        db_table = "shapes_zero"


ZERO = """
CREATE SEQUENCE shapes_zero_numbers AS bigint MINVALUE 0 START 0;
CREATE TABLE shapes_zero (
    id bigint PRIMARY KEY DEFAULT nextval('shapes_zero_numbers'), stream_id text NOT NULL DEFAULT 's',
    type text NOT NULL DEFAULT 't', data jsonb NOT NULL DEFAULT '{}');
"""
NO_ZERO = "DROP TABLE IF EXISTS shapes_zero; DROP SEQUENCE IF EXISTS shapes_zero_numbers"
