"""Scriba's own tables: every state of the system can be read with SQL.

Only ``scriba_positions`` has a composite key (Django cannot migrate one: a once-only decision); the others have
an id and unique constraints, so that they can grow. The engine writes these tables with raw SQL (positions.py,
dead_letters.py, ledger.py); the models are for migrations, the admin and your own queries.
"""

from __future__ import annotations

from typing import ClassVar

from django.db import models
from django.db.models.functions import Now

__all__ = ["Audit", "DeadLetter", "Lane", "Position", "ProjectionState", "Sample", "Segment"]


class Position(models.Model):
    """The cursor of one ordering key (column `stream_id`) for one projection: its last settled position."""

    pk = models.CompositePrimaryKey("projection_name", "projection_version", "stream_id")
    projection_name = models.CharField(max_length=255)
    projection_version = models.IntegerField()
    stream_id = models.TextField()
    position = models.BigIntegerField()
    applied_position = models.BigIntegerField(null=True)
    updated_at = models.DateTimeField(db_default=Now())

    class Meta:
        db_table = "scriba_positions"

    def __str__(self) -> str:
        return f"{self.projection_name}:{self.projection_version} {self.stream_id} at {self.position}"


class DeadLetter(models.Model):
    """An event given up on, or held behind one: one row per (projection, partition, position)."""

    class Status(models.TextChoices):
        OPEN = "open", "open"
        PARKED = "parked", "parked"
        REPLAYED = "replayed", "replayed"
        DISCARDED = "discarded", "discarded"

    id = models.BigAutoField(primary_key=True)
    projection_name = models.CharField(max_length=255)
    projection_version = models.IntegerField()
    partition = models.TextField(db_default="", default="")
    position = models.BigIntegerField()
    stream_id = models.TextField()
    event_id = models.TextField(db_default="", default="")
    event_type = models.TextField()
    event_data = models.JSONField(null=True)
    event_metadata = models.JSONField(null=True)
    event_occurred_at = models.DateTimeField(null=True)
    error_kind = models.TextField()
    error_message = models.TextField()
    error_stacktrace = models.TextField(db_default="", default="")
    fingerprint = models.TextField(db_default="", default="")
    attempts = models.IntegerField(db_default=1, default=1)
    status = models.TextField(choices=Status.choices, db_default="open", default="open")
    occurred_at = models.DateTimeField(db_default=Now())
    resolved_at = models.DateTimeField(null=True)
    resolved_by = models.TextField(db_default="", default="")
    wish = models.TextField(db_default="", default="")
    wish_by = models.TextField(db_default="", default="")
    wished_at = models.DateTimeField(null=True)
    allow_out_of_order = models.BooleanField(db_default=False, default=False)
    note = models.TextField(db_default="", default="")

    class Meta:
        db_table = "scriba_dead_letters"
        verbose_name = "dead letter"
        constraints: ClassVar = [
            models.UniqueConstraint(
                fields=["projection_name", "projection_version", "partition", "position"],
                name="scriba_letter_unique_position",
            ),
        ]
        indexes: ClassVar = [
            models.Index(
                fields=["projection_name", "projection_version", "stream_id", "position"],
                condition=models.Q(status__in=["open", "parked"]),
                name="scriba_letter_held",
            ),
            models.Index(fields=["occurred_at"], name="scriba_letter_occurred"),
            models.Index(
                fields=["projection_name", "projection_version"],
                condition=~models.Q(wish=""),
                name="scriba_letter_wish",
            ),
        ]

    def __str__(self) -> str:
        return f"{self.projection_name}:{self.projection_version} at {self.position}: {self.error_kind}"


class ProjectionState(models.Model):
    """One projection: what is wished of it, whether it is halted, and what may not change under its version."""

    id = models.BigAutoField(primary_key=True)
    projection_name = models.CharField(max_length=255)
    projection_version = models.IntegerField()
    wish = models.TextField(db_default="running", default="running")
    wish_reason = models.TextField(db_default="", default="")
    wish_by = models.TextField(db_default="", default="")
    wished_at = models.DateTimeField(db_default=Now())
    halt_cause = models.TextField(db_default="", default="")
    halt_label = models.TextField(db_default="", default="")
    halted_at = models.DateTimeField(null=True)
    floor = models.BigIntegerField(null=True)
    partition_by = models.TextField(db_default="", default="")
    source_identity = models.TextField(db_default="", default="")
    hash_name = models.TextField(db_default="", default="")
    reset_count = models.IntegerField(db_default=0, default=0)
    waited_at = models.DateTimeField(null=True)
    created_at = models.DateTimeField(db_default=Now())

    class Meta:
        db_table = "scriba_projections"
        verbose_name = "projection"
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["projection_name", "projection_version"], name="scriba_projection_unique"),
        ]

    def __str__(self) -> str:
        return f"{self.projection_name}:{self.projection_version}"


class Segment(models.Model):
    """The share of a projection that one process owns: today one row per projection."""

    id = models.BigAutoField(primary_key=True)
    projection_name = models.CharField(max_length=255)
    projection_version = models.IntegerField()
    partition = models.TextField(db_default="", default="")
    slice_from = models.IntegerField(db_default=0, default=0)
    slice_to = models.IntegerField(db_default=1023, default=1023)
    owner = models.TextField(db_default="", default="")
    epoch = models.BigIntegerField(db_default=0, default=0)
    lease_expires_at = models.DateTimeField(null=True)
    heartbeat_at = models.DateTimeField(null=True)
    status = models.TextField(db_default="not running", default="not running")
    reason = models.TextField(db_default="", default="")
    watermark = models.BigIntegerField(null=True)
    watermark_at = models.DateTimeField(null=True)
    ceiling = models.BigIntegerField(null=True)
    anchor = models.TextField(db_default="", default="")
    head = models.BigIntegerField(null=True)
    head_at = models.DateTimeField(null=True)
    rate = models.FloatField(db_default=0.0, default=0.0)

    class Meta:
        db_table = "scriba_segments"
        constraints: ClassVar = [
            models.UniqueConstraint(
                fields=["projection_name", "projection_version", "partition", "slice_from"],
                name="scriba_segment_unique",
            ),
        ]

    def __str__(self) -> str:
        return f"{self.projection_name}:{self.projection_version} {self.partition}[{self.slice_from}..{self.slice_to}]"


class Lane(models.Model):
    """How many events one lane of a segment has settled, counted in the batches' own transactions."""

    id = models.BigAutoField(primary_key=True)
    segment = models.ForeignKey(Segment, on_delete=models.CASCADE, related_name="lanes", db_index=False)
    lane = models.IntegerField()
    applied = models.BigIntegerField(db_default=0, default=0)
    skipped = models.BigIntegerField(db_default=0, default=0)
    dead_lettered = models.BigIntegerField(db_default=0, default=0)
    deduplicated = models.BigIntegerField(db_default=0, default=0)
    unmatched = models.BigIntegerField(db_default=0, default=0)

    class Meta:
        db_table = "scriba_lanes"
        constraints: ClassVar = [models.UniqueConstraint(fields=["segment", "lane"], name="scriba_lane_unique")]

    def __str__(self) -> str:
        return f"lane {self.lane} of segment {self.segment_id}"


class Audit(models.Model):
    """What an operator asked of a projection: written in the transaction of the wish itself, never changed by others."""

    id = models.BigAutoField(primary_key=True)
    projection_name = models.CharField(max_length=255)
    projection_version = models.IntegerField()
    action = models.TextField()
    actor = models.TextField(db_default="", default="")
    reason = models.TextField(db_default="", default="")
    detail = models.TextField(db_default="", default="")
    happened_at = models.DateTimeField(db_default=Now())

    class Meta:
        db_table = "scriba_audit"
        verbose_name = "audit entry"
        verbose_name_plural = "audit entries"
        indexes: ClassVar = [
            models.Index(fields=["projection_name", "projection_version", "id"], name="scriba_audit_projection"),
        ]

    def __str__(self) -> str:
        return f"{self.action} {self.projection_name}:{self.projection_version} by {self.actor or 'somebody'}"


class Sample(models.Model):
    """How far a projection was at one moment, noted by its owner now and then; the last hour is kept."""

    id = models.BigAutoField(primary_key=True)
    projection_name = models.CharField(max_length=255)
    projection_version = models.IntegerField()
    taken_at = models.DateTimeField(db_default=Now())
    watermark = models.BigIntegerField(null=True)
    head = models.BigIntegerField(null=True)
    settled = models.BigIntegerField(db_default=0, default=0)
    lag_seconds = models.FloatField(null=True)

    class Meta:
        db_table = "scriba_samples"
        indexes: ClassVar = [
            models.Index(fields=["projection_name", "projection_version", "taken_at"], name="scriba_sample_taken"),
        ]

    def __str__(self) -> str:
        return f"{self.projection_name}:{self.projection_version} at {self.watermark}"
