"""The shop's event table, append-only, and its read models, which only projections write."""

from __future__ import annotations

import uuid

from django.db import models

from example_project.shop import events


class StoredEvent(models.Model):
    """An event as it was recorded. The serial id is the position; a stream is one order."""

    event_id = models.UUIDField(default=uuid.uuid4, unique=True, editable=False)
    stream_id = models.CharField(max_length=80)
    type = models.CharField(max_length=80)
    data = models.JSONField()
    metadata = models.JSONField(default=dict)
    occurred_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        verbose_name = "event"

    def __str__(self) -> str:
        return f"{self.pk} {self.type} of {self.stream_id}"

    @classmethod
    def of(cls, stream_id: str, event: events.OrderEvent, **metadata: str) -> StoredEvent:
        """Return the unsaved row of `event`."""
        return cls(stream_id=stream_id, type=type(event).__name__, data=events.payload(event), metadata=metadata)


class OrderRow(models.Model):
    """An order as the shop's pages show it."""

    id = models.CharField(primary_key=True, max_length=40)
    customer_id = models.CharField(max_length=40, db_index=True)
    amount = models.DecimalField(max_digits=12, decimal_places=2)
    status = models.CharField(max_length=20)
    carrier = models.CharField(max_length=40, default="")
    placed_at = models.DateTimeField(null=True)

    class Meta:
        verbose_name = "order"

    def __str__(self) -> str:
        return f"{self.id} ({self.status})"


class CustomerRow(models.Model):
    """What the shop knows of a customer: the latest order."""

    id = models.CharField(primary_key=True, max_length=40)
    last_order_id = models.CharField(max_length=40)
    last_amount = models.DecimalField(max_digits=12, decimal_places=2)
    last_order_at = models.DateTimeField(null=True)

    class Meta:
        verbose_name = "customer"

    def __str__(self) -> str:
        return f"{self.id}: {self.last_order_id}"
