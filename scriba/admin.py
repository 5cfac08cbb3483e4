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
from django.urls import reverse
from django.utils.formats import date_format
from django.utils.html import format_html
from django.utils.safestring import mark_safe
from django.utils.timezone import is_aware, localtime, now

from scriba.bulk import RESOLVED, UNRESOLVED, holders, waiting_behind
from scriba.checks import target_alias
from scriba.durations import duration
from scriba.models import DeadLetter, ProjectionState
from scriba.panel.live import LivePage
from scriba.panel.purging import MAY_PURGE, PurgePage
from scriba.panel.rehearsing import rehearse_selected
from scriba.panel.resolving import MAY_RESOLVE, Resolver, discard_selected, groups_of, replay_selected
from scriba.registry import all_projections

if TYPE_CHECKING:
    from collections.abc import Iterator
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


class StatusFilter(admin.SimpleListFilter):
    """What is not resolved, unless something else is asked for: that is what somebody has to look at."""

    title = "status"
    parameter_name = "status"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:  # noqa: ARG002 - Django's
        return [*DeadLetter.Status.choices, ("resolved", "replayed or discarded"), ("all", "all")]

    def choices(self, changelist: Any) -> Iterator[Any]:
        first, *others = super().choices(changelist)
        yield {**first, "display": "open or parked"}
        yield from others

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        wanted = self.value()
        ticked = request.method == "POST" and request.POST.get("select_across") != "1"
        if wanted == "all" or "status__exact" in request.GET or ticked:  # what was ticked is told, resolved or not
            return queryset
        meant = {None: UNRESOLVED, "resolved": RESOLVED}.get(wanted, (wanted,))
        return queryset.filter(status__in=meant)


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
    list_display = ("failure", "state", "event", "occurred")
    list_display_links = ("failure",)
    list_filter = (
        DatabaseFilter,
        StatusFilter,
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
    actions = (rehearse_selected, replay_selected, discard_selected)
    change_list_template = "admin/scriba/deadletter/change_list.html"
    change_form_template = "admin/scriba/deadletter/change_form.html"
    readonly_fields = (
        "failed",
        "became",
        "data",
        "metadata",
        "traceback",
        "message_whole",
        "place",
        "happened",
        "group",
    )
    fieldsets = (
        (None, {"fields": ("failed", "became", "error_kind", "message_whole")}),
        ("Event", {"fields": ("event_type", "place", "happened", "event_id", "data", "metadata")}),
        ("Traceback", {"fields": ("traceback", "group")}),
    )

    def get_urls(self) -> list[URLPattern]:
        return [*PurgePage(self).urls(), *Resolver(self).urls(), *super().get_urls()]

    def has_resolve_permission(self, request: HttpRequest) -> bool:
        """Replays and discards are for those who may change dead letters."""
        user: Any = request.user
        return bool(user.has_perm(MAY_RESOLVE))

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        answer = super().changelist_view(request, {**self._asked(request), **(extra_context or {})})
        context: dict[str, Any] | None = getattr(answer, "context_data", None)
        if context and "cl" in context:
            changelist = context["cl"]
            context["title"] = "Dead letters"
            context["scriba_is_narrowed"] = bool(set(request.GET) - {DATABASE})
            groups = groups_of(changelist.queryset.filter(status__in=UNRESOLVED))
            context["scriba_groups"] = groups if len(groups) > 1 or (groups and groups[0]["letters"] > 1) else []
            found = list(changelist.result_list)
            changelist.result_list = found
            behind, held_by = waiting_behind(found), holders(found)
            for letter in found:
                letter.scriba_waiting, letter.scriba_held_by = behind.get(letter.pk, 0), held_by.get(letter.pk)
        return answer

    def change_view(
        self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        more = {"title": f"Dead letter {object_id}", **self._asked(request), **(extra_context or {})}
        return super().change_view(request, object_id, form_url, more)

    def _asked(self, request: HttpRequest) -> dict[str, Any]:
        """Return what the templates have to know of who asks, and where."""
        user: Any = request.user
        return {
            "scriba_may_resolve": self.has_resolve_permission(request),
            "scriba_may_purge": user.has_perm(MAY_PURGE),
            "scriba_database": request.GET.get(DATABASE, ""),
        }

    # --- the list -------------------------------------------------------------------------------------------------

    @admin.display(description="failure", ordering="error_kind")
    def failure(self, letter: DeadLetter) -> SafeString:
        line = " ".join(letter.error_message.split())
        short = f"{line[:SHORT]}…" if len(line) > SHORT else line
        return format_html("{}{}", letter.error_kind, _second_line(short))

    @admin.display(description="event", ordering="event_type")
    def event(self, letter: DeadLetter) -> SafeString:
        return format_html("{}{}", letter.event_type, _second_line(f"{letter.stream_id} at {letter.position}"))

    @admin.display(description="dead-lettered", ordering="occurred_at")
    def occurred(self, letter: DeadLetter) -> SafeString:
        name = f"{letter.projection_name}:{letter.projection_version}"
        return format_html("{}{}", _moment(letter.occurred_at), _second_line(name))

    @admin.display(description="status", ordering="status")
    def state(self, letter: DeadLetter) -> SafeString:
        words = [f"{letter.wish} asked for"] if letter.wish else []
        if getattr(letter, "scriba_waiting", 0):
            words.append(f"{letter.scriba_waiting:,} wait behind it")  # type: ignore[attr-defined]
        if getattr(letter, "scriba_held_by", None):
            words.append(f"behind letter {letter.scriba_held_by}")  # type: ignore[attr-defined]
        return format_html("{} {}", _badge(letter.status), ", ".join(words))

    # --- one letter -----------------------------------------------------------------------------------------------

    @admin.display(description="failed")
    def failed(self, letter: DeadLetter) -> str:
        times = "once" if letter.attempts == 1 else f"{letter.attempts:,} times"
        name = f"{letter.projection_name}:{letter.projection_version}"
        return f"in {name}, tried {times}, given up {_moment(letter.occurred_at)} ({_ago(letter.occurred_at)})"

    @admin.display(description="status")
    def became(self, letter: DeadLetter) -> SafeString:
        """Say in one line what became of it, or what is to become of it."""
        words = ""
        if letter.resolved_at is not None:
            words = f"by {letter.resolved_by or 'nobody in particular'}, {_moment(letter.resolved_at)}"
        elif letter.wish:
            late = ", also out of order" if letter.allow_out_of_order else ""
            words = f"{letter.wish} asked for by {letter.wish_by or 'somebody'}, {_moment(letter.wished_at)}{late}"
        elif letter.status == DeadLetter.Status.PARKED:
            words = "held behind an earlier letter of the same stream, whose replay releases it"
        return format_html("{} {}{}", _badge(letter.status), words, _second_line(letter.note) if letter.note else "")

    @admin.display(description="stream")
    def place(self, letter: DeadLetter) -> str:
        where = f"{letter.stream_id} at {letter.position:,}"
        return f"{where}, partition {letter.partition}" if letter.partition else where

    @admin.display(description="happened")
    def happened(self, letter: DeadLetter) -> str:
        return _moment(letter.event_occurred_at)

    @admin.display(description="group")
    def group(self, letter: DeadLetter) -> SafeString:
        if not letter.fingerprint:
            return mark_safe("-")
        alias = letter._state.db
        query = {"fingerprint": letter.fingerprint, **({DATABASE: alias} if len(aliases_shown(DeadLetter)) > 1 else {})}
        url = reverse(f"{self.admin_site.name}:scriba_deadletter_changelist")
        return format_html('<a href="{}?{}">{}</a>', url, urlencode(query), f"all like this ({letter.fingerprint})")

    @admin.display(description="message")
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
        return _block(letter.error_stacktrace, "scriba-block scriba-trace")


@admin.register(ProjectionState)
class ProjectionStateAdmin(ReadOnlyAdmin):
    """What is wished and recorded; how projections *are* is on the live page."""

    list_display = ("projection", "state", "wished", "halt")
    list_display_links = ("projection",)
    list_filter = (DatabaseFilter, "wish", ("halt_label", admin.AllValuesFieldListFilter))
    search_fields = ("projection_name",)
    ordering = ("projection_name", "projection_version")
    change_list_template = "admin/scriba/projectionstate/change_list.html"
    change_form_template = "admin/scriba/projectionstate/change_form.html"
    readonly_fields = ("cause", "state", "wished", "halt", "first_seen")
    fieldsets = (
        (None, {"fields": ("state", "wished", "wish_reason", "first_seen")}),
        ("Halt", {"fields": ("halt", "cause")}),
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

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        return super().changelist_view(request, {"title": "Projections", **(extra_context or {})})

    @admin.display(description="should be", ordering="wish")
    def state(self, projection: ProjectionState) -> SafeString:
        if not projection.halt_cause:
            return format_html("{}", projection.wish)
        return format_html("{} {}", projection.wish, _badge("halted"))

    @admin.display(description="projection", ordering="projection_name")
    def projection(self, projection: ProjectionState) -> str:
        return str(projection)

    @admin.display(description="first started")
    def first_seen(self, projection: ProjectionState) -> str:
        return _moment(projection.created_at)

    @admin.display(description="since", ordering="wished_at")
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
    if moment is None:
        return "-"
    return date_format(localtime(moment) if is_aware(moment) else moment, "j M Y, H:i:s")


def _second_line(text: str) -> SafeString:
    return format_html('<span class="scriba-second">{}</span>', text)


def _badge(word: str) -> SafeString:
    return format_html('<span class="scriba-badge scriba-{}">{}</span>', word, word)


def _block(text: str, css: str = "scriba-block") -> SafeString:
    """Return `text` as it is, line breaks and all; its box scrolls, the page does not."""
    return format_html('<pre class="{}">{}</pre>', css, text) if text else mark_safe("-")


def _ago(moment: datetime) -> str:
    return f"{duration(max(0.0, (now() - moment).total_seconds()))} ago"
