"""The third example: the events are another system's, written by Elixir; only the read model is Django's."""

from __future__ import annotations

from django.db import models


class Account(models.Model):
    """The read model."""

    account_id = models.CharField(primary_key=True, max_length=40)
    owner = models.CharField(max_length=80)
    balance = models.DecimalField(max_digits=14, decimal_places=2, default=0)
    movements = models.IntegerField(default=0)
    overdrafts = models.IntegerField(default=0)
    is_open = models.BooleanField(default=True)

    def __str__(self) -> str:
        return f"{self.account_id}: {self.balance}"
