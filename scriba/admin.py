"""Dead letters and projections in Django's admin: rows to read, wishes to make; nothing here edits a row by hand.

Scriba's tables exist in every database that a projection writes to. The lists show one database at a time, by default
the one Django's router would read from; with several, a filter chooses. No page needs an inline style, an inline
script or anything from another host, so a strict content security policy may stay.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import urlencode

from django.contrib import admin
from django.contrib.admin.views.main import ChangeList
from django.utils.formats import date_format
from django.utils.html import format_html
from django.utils.safestring import mark_safe
from django.utils.timezone import localtime

from scriba.bulk import UNRESOLVED, holders, waiting_behind
from scriba.checks import target_alias
from scriba.models import DeadLetter, ProjectionState
from scriba.panel.live import LivePage
from scriba.panel.resolving import MAY_RESOLVE, Resolver, discard_selected, groups_of, replay_selected
from scriba.registry import all_projections

if TYPE_CHECKING:
    from datetime import datetime

    from django.db.models import Model, QuerySet
    from django.http import HttpRequest, HttpResponse
    from django.urls import URLPattern
    from django.utils.safestring import SafeString

__all__ = ["DeadLetterAdmin", "ProjectionStateAdmin"]

DATABASE = "database"  #: the query parameter that names the alias
SHORT = 90  #: characters of a message in the list


class DatabaseFilter(admin.SimpleListFilter):
    """Chooses the database whose rows are shown; hidden where there is only one."""

    title = "database"
    parameter_name = DATABASE

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:  # noqa: ARG002 - Django's
        aliases = aliases_shown(model_admin.model)
        return [(alias, alias) for alias in aliases] if len(aliases) > 1 else []

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:  # noqa: ARG002 - Django's
        return queryset  # already on the chosen database, see ReadOnlyAdmin.get_queryset


class OneDatabaseChangeList(ChangeList):
    """Keeps the chosen database in the links to the single rows."""

    def url_for_result(self, result: Model) -> str:
        alias = self.params.get(DATABASE) or self.filter_params.get(DATABASE)
        alias = alias[-1] if isinstance(alias, list) else alias
        url = super().url_for_result(result)
        return f"{url}?{urlencode({DATABASE: alias})}" if alias else url


class ReadOnlyAdmin(admin.ModelAdmin):  # type: ignore[type-arg]  # generic in the stubs only
    """Looking is allowed to those who may look; nothing else is, to anybody."""

    show_full_result_count = False  # counting a large table twice helps nobody

    class Media:
        css: ClassVar = {"all": ["scriba/admin.css"]}

    def has_add_permission(self, request: HttpRequest) -> bool:  # noqa: ARG002 - Django's signature
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:  # noqa: ARG002 - Django's
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:  # noqa: ARG002 - Django's
        return False

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:  # noqa: ARG002 - Django's
        return OneDatabaseChangeList

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        alias = request.GET.get(DATABASE)
        rows = super().get_queryset(request)
        return rows.using(alias) if alias in aliases_shown(self.model) else rows


@admin.register(DeadLetter)
class DeadLetterAdmin(ReadOnlyAdmin):
    list_display = ("failure", "state", "event", "projection", "occurred")
    list_display_links = ("failure",)
    list_filter = (
        DatabaseFilter,
        "status",
        ("projection_name", admin.AllValuesFieldListFilter),
        ("projection_version", admin.AllValuesFieldListFilter),
        ("error_kind", admin.AllValuesFieldListFilter),
        ("event_type", admin.AllValuesFieldListFilter),
        ("occurred_at", admin.DateFieldListFilter),
    )
    search_fields = ("event_id", "stream_id")
    search_help_text = "Event id or stream (a part of it is enough)."
    ordering = ("-occurred_at", "-id")
    list_per_page = 50
    actions = (replay_selected, discard_selected)
    change_list_template = "admin/scriba/deadletter/change_list.html"
    change_form_template = "admin/scriba/deadletter/change_form.html"
    readonly_fields = ("projection", "data", "metadata", "traceback", "message_whole", "state")
    fieldsets = (
        (None, {"fields": (("projection", "state", "attempts"), "error_kind", "message_whole", "occurred_at")}),
        (
            "Event",
            {
                "fields": (
                    "event_type",
                    "event_id",
                    ("stream_id", "position", "partition"),
                    "event_occurred_at",
                    "data",
                    "metadata",
                )
            },
        ),
        ("Traceback", {"fields": ("traceback", "fingerprint")}),
        (
            "Resolution",
            {
                "fields": (
                    ("resolved_at", "resolved_by"),
                    ("wish", "wish_by", "wished_at"),
                    "allow_out_of_order",
                    "note",
                )
            },
        ),
    )

    def get_urls(self) -> list[URLPattern]:
        return [*Resolver(self).urls(), *super().get_urls()]

    def has_resolve_permission(self, request: HttpRequest) -> bool:
        """Replays and discards are for those who may change dead letters."""
        user: Any = request.user
        return bool(user.has_perm(MAY_RESOLVE))

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        answer = super().changelist_view(request, extra_context)
        context: dict[str, Any] | None = getattr(answer, "context_data", None)
        if context and "cl" in context:
            shown = context["cl"].queryset
            groups = groups_of(shown.filter(status__in=UNRESOLVED))
            context["scriba_groups"] = groups if len(groups) > 1 or (groups and groups[0]["letters"] > 1) else []
            found = list(context["cl"].result_list)
            context["cl"].result_list = found
            behind, held_by = waiting_behind(found), holders(found)
            for letter in found:
                letter.scriba_waiting, letter.scriba_held_by = behind.get(letter.pk, 0), held_by.get(letter.pk)
        return answer

    def change_view(
        self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        may = {
            "scriba_may_resolve": self.has_resolve_permission(request),
            "scriba_database": request.GET.get(DATABASE, ""),
        }
        return super().change_view(request, object_id, form_url, {**may, **(extra_context or {})})

    @admin.display(description="projection", ordering="projection_name")
    def projection(self, letter: DeadLetter) -> str:
        return f"{letter.projection_name}:{letter.projection_version}"

    @admin.display(description="failure", ordering="error_kind")
    def failure(self, letter: DeadLetter) -> SafeString:
        line = " ".join(letter.error_message.split())
        short = f"{line[:SHORT]}…" if len(line) > SHORT else line
        return format_html("{}{}", letter.error_kind, _second_line(short))

    @admin.display(description="event", ordering="event_type")
    def event(self, letter: DeadLetter) -> SafeString:
        return format_html("{}{}", letter.event_type, _second_line(f"{letter.stream_id} at {letter.position}"))

    @admin.display(description="dead-lettered", ordering="occurred_at")
    def occurred(self, letter: DeadLetter) -> str:
        return _moment(letter.occurred_at)

    @admin.display(description="status", ordering="status")
    def state(self, letter: DeadLetter) -> SafeString:
        words = [f"{letter.wish} asked for"] if letter.wish else []
        if getattr(letter, "scriba_waiting", 0):
            words.append(f"{letter.scriba_waiting:,} wait behind it")  # type: ignore[attr-defined]
        if getattr(letter, "scriba_held_by", None):
            words.append(f"behind letter {letter.scriba_held_by}")  # type: ignore[attr-defined]
        return format_html("{} {}", _badge(letter.status), ", ".join(words))

    @admin.display(description="error message")
    def message_whole(self, letter: DeadLetter) -> SafeString:
        return _block(letter.error_message)

    @admin.display(description="data")
    def data(self, letter: DeadLetter) -> SafeString:
        return _block(_pretty(letter.event_data))

    @admin.display(description="metadata")
    def metadata(self, letter: DeadLetter) -> SafeString:
        return _block(_pretty(letter.event_metadata))

    @admin.display(description="traceback")
    def traceback(self, letter: DeadLetter) -> SafeString:
        return _block(letter.error_stacktrace)


@admin.register(ProjectionState)
class ProjectionStateAdmin(ReadOnlyAdmin):
    list_display = ("projection", "state", "wished", "halt")
    list_display_links = ("projection",)
    list_filter = (DatabaseFilter, "wish", ("halt_label", admin.AllValuesFieldListFilter))
    search_fields = ("projection_name",)
    ordering = ("projection_name", "projection_version")
    change_list_template = "admin/scriba/projectionstate/change_list.html"
    readonly_fields = ("cause", "state")
    fieldsets = (
        (None, {"fields": (("projection_name", "projection_version"), "created_at")}),
        ("What is wished", {"fields": (("state", "wish_by", "wished_at"), "wish_reason")}),
        ("Halt", {"fields": (("halt_label", "halted_at"), "cause")}),
        (
            "Recorded",
            {
                "fields": ("source_identity", "partition_by", "hash_name", "floor", "reset_count"),
                "description": "What may not change under one version: a start with others is refused.",
            },
        ),
    )

    def get_urls(self) -> list[URLPattern]:
        return [*LivePage(self).urls(), *super().get_urls()]

    @admin.display(description="wish", ordering="wish")
    def state(self, projection: ProjectionState) -> SafeString:
        if not projection.halt_cause:
            return _badge(projection.wish)
        return format_html("{} {}", _badge(projection.wish), _badge("halted"))

    @admin.display(description="projection", ordering="projection_name")
    def projection(self, projection: ProjectionState) -> str:
        return str(projection)

    @admin.display(description="wished", ordering="wished_at")
    def wished(self, projection: ProjectionState) -> str:
        by = f" by {projection.wish_by}" if projection.wish_by else ""
        return f"{_moment(projection.wished_at)}{by}"

    @admin.display(description="halted", ordering="halted_at")
    def halt(self, projection: ProjectionState) -> str:
        return f"{_moment(projection.halted_at)}: {projection.halt_label}" if projection.halted_at else "-"

    @admin.display(description="halt cause")
    def cause(self, projection: ProjectionState) -> SafeString:
        return _block(projection.halt_cause)


def aliases_shown(model: type[Model]) -> list[str]:
    """Return the databases that projections write to, the one Django would read `model` from first."""
    default = model._default_manager.db  # noqa: SLF001 - public by convention
    return list(dict.fromkeys([default, *filter(None, map(target_alias, all_projections()))]))


def _pretty(value: object) -> str:
    return "" if value is None else json.dumps(value, indent=2, ensure_ascii=False, sort_keys=False)


def _moment(moment: datetime | None) -> str:
    """Return a time to the second, in the zone that the admin shows times in."""
    return date_format(localtime(moment), "j M Y, H:i:s") if moment else "-"


def _second_line(text: str) -> SafeString:
    return format_html('<span class="scriba-second">{}</span>', text)


def _badge(word: str) -> SafeString:
    return format_html('<span class="scriba-badge scriba-{}">{}</span>', word, word)


def _block(text: str) -> SafeString:
    """Return `text` as it is, line breaks and all; its box scrolls, the page does not."""
    return format_html('<pre class="scriba-block">{}</pre>', text) if text else mark_safe("-")
