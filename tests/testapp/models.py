"""Models that tests of every tier use. The app has no migrations: its tables are synchronised."""

from __future__ import annotations

from django.db import models


class Event(models.Model):
    """An append-only event table with the field names that TableSource guesses."""

    stream_id = models.TextField()
    type = models.TextField()
    data = models.JSONField(default=dict)
    metadata = models.JSONField(default=dict)
    occurred_at = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return f"{self.pk} {self.type} of {self.stream_id}"


class Counter(models.Model):
    """A read model whose handler is not idempotent: an event applied twice is seen."""

    key = models.TextField(primary_key=True)
    value = models.IntegerField(default=0)
    last_position = models.BigIntegerField(default=-1)

    def __str__(self) -> str:
        return f"{self.key}={self.value}"


class Applied(models.Model):
    """One row per applied event, without a unique key: duplicates and order show."""

    projection = models.TextField()
    stream_id = models.TextField()
    position = models.BigIntegerField()

    def __str__(self) -> str:
        return f"{self.projection} {self.position}"


class Row(models.Model):
    """A read model with a unique column and several ordinary ones."""

    id = models.TextField(primary_key=True)
    code = models.TextField(unique=True, null=True)
    name = models.CharField(max_length=20, default="")
    amount = models.DecimalField(max_digits=12, decimal_places=2, default=0)
    status = models.TextField(default="new")
    payload = models.JSONField(default=dict)
    updated_at = models.DateTimeField(auto_now=True)

    def __str__(self) -> str:
        return self.id


class Parent(models.Model):
    id = models.TextField(primary_key=True)

    def __str__(self) -> str:
        return self.id


class Child(models.Model):
    id = models.TextField(primary_key=True)
    parent = models.ForeignKey(Parent, on_delete=models.CASCADE)

    def __str__(self) -> str:
        return self.id
