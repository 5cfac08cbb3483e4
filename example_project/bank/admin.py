from django.contrib import admin

from example_project.bank.models import AccountBalance, AccountEvent
from example_project.shop.admin import ReadOnly


@admin.register(AccountEvent)
class AccountEventAdmin(ReadOnly):
    list_display = ("id", "event_type", "account_id", "created_at")


@admin.register(AccountBalance)
class AccountBalanceAdmin(ReadOnly):
    list_display = ("account_id", "owner", "balance", "is_open")
