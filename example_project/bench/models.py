"""The event table and the read model of `manage.py bench`. In a database of its own; here they stay empty."""

from __future__ import annotations

from django.db import models


class BenchEvent(models.Model):
    stream_id = models.CharField(max_length=40)
    type = models.CharField(max_length=40)
    data = models.JSONField()

    class Meta:
        verbose_name = "event of the benchmark"

    def __str__(self) -> str:
        return f"{self.pk} {self.type} of {self.stream_id}"


class BenchRow(models.Model):
    """Seven columns, a primary key and one more index."""

    id = models.CharField(primary_key=True, max_length=40)
    stream_id = models.CharField(max_length=40, db_index=True)
    status = models.CharField(max_length=20)
    amount = models.DecimalField(max_digits=12, decimal_places=2)
    quantity = models.IntegerField()
    note = models.CharField(max_length=200)
    position = models.BigIntegerField()

    class Meta:
        verbose_name = "row of the benchmark"

    def __str__(self) -> str:
        return f"{self.pk} ({self.status})"
