"""The smallest example: accounts, deposits, withdrawals, and a balance kept by a projection."""

from __future__ import annotations

from django.db import models


class AccountEvent(models.Model):
    """An append-only ledger of what happened to accounts."""

    account_id = models.CharField(max_length=40)
    event_type = models.CharField(max_length=40)
    payload = models.JSONField(default=dict)
    created_at = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return f"{self.pk} {self.event_type} of {self.account_id}"


class AccountBalance(models.Model):
    """The read model."""

    account_id = models.CharField(primary_key=True, max_length=40)
    owner = models.CharField(max_length=80)
    balance = models.DecimalField(max_digits=14, decimal_places=2, default=0)
    is_open = models.BooleanField(default=True)

    def __str__(self) -> str:
        return f"{self.account_id}: {self.balance}"
