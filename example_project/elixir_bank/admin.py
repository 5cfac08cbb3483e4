from django.contrib import admin

from example_project.elixir_bank.models import Account
from example_project.shop.admin import ReadOnly


@admin.register(Account)
class AccountAdmin(ReadOnly):
    list_display = ("account_id", "owner", "balance", "movements", "overdrafts", "is_open")
