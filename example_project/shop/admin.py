from __future__ import annotations

from django.contrib import admin

from example_project.shop.models import CustomerRow, OrderRow, StoredEvent


class ReadOnly(admin.ModelAdmin):
    """Events are appended by the application, read models are written by projections: nobody edits them here."""

    def has_add_permission(self, request: object) -> bool:
        return False

    def has_change_permission(self, request: object, obj: object = None) -> bool:
        return False

    def has_delete_permission(self, request: object, obj: object = None) -> bool:
        return False


@admin.register(StoredEvent)
class StoredEventAdmin(ReadOnly):
    list_display = ("id", "type", "stream_id", "occurred_at")
    list_filter = ("type",)
    search_fields = ("stream_id",)


@admin.register(OrderRow)
class OrderRowAdmin(ReadOnly):
    list_display = ("id", "customer_id", "amount", "status", "carrier", "placed_at")
    list_filter = ("status",)
    search_fields = ("id", "customer_id")


@admin.register(CustomerRow)
class CustomerRowAdmin(ReadOnly):
    list_display = ("id", "last_order_id", "last_amount", "last_order_at")
    search_fields = ("id",)
