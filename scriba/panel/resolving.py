"""Replay, discard and dry run in the admin: one letter, the selected ones, or all that a filter finds.

What always holds: nothing happens before a POST that carries a token, and replay and discard ask first; only those who
may change dead letters are asked; a letter that is resolved or wished already is left alone, and the summary says so.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.core.exceptions import PermissionDenied
from django.db.models import Count, Max, Min
from django.db.models.functions import Left
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from django.utils.http import urlencode

from scriba.bulk import UNRESOLVED, wish_all
from scriba.panel.live import who
from scriba.panel.rehearsing import dry_run

if TYPE_CHECKING:
    from django.contrib.admin import ModelAdmin
    from django.db.models import QuerySet

    from scriba.models import DeadLetter

__all__ = ["MAY_RESOLVE", "Resolver", "discard_selected", "groups_of", "replay_selected"]

MAY_RESOLVE: Final = "scriba.change_deadletter"
MOST_GROUPS: Final = 20
LONGEST_MESSAGE: Final = 300

EXPLAINED: Final = {
    "replay": "Each event is handled again, in its own stream's order, by the process that runs its projection. What is "
    "parked behind a letter is released by its replay.",
    "discard": "Their events are given up for good: the read model stays without them. What is parked behind a letter is "
    "released.",
}


@admin.action(description="Replay selected dead letters", permissions=["resolve"])
def replay_selected(model_admin: Any, request: HttpRequest, letters: QuerySet[DeadLetter]) -> HttpResponse | None:
    """Handle their events again."""
    return _act(model_admin, request, letters, "replay")


@admin.action(description="Discard selected dead letters", permissions=["resolve"])
def discard_selected(model_admin: Any, request: HttpRequest, letters: QuerySet[DeadLetter]) -> HttpResponse | None:
    """Give their events up."""
    return _act(model_admin, request, letters, "discard")


def _act(model_admin: Any, request: HttpRequest, letters: QuerySet[DeadLetter], wish: str) -> HttpResponse | None:
    ordered = letters.order_by("projection_name", "projection_version", "partition", "position")
    if "sure" in request.POST:
        _wish(request, ordered, wish)
        return None
    hidden = [("action", f"{wish}_selected"), ("select_across", request.POST.get("select_across", "0"))]
    hidden += [(ACTION_CHECKBOX_NAME, pk) for pk in request.POST.getlist(ACTION_CHECKBOX_NAME)]
    return _question(model_admin, request, ordered, wish, hidden, request.get_full_path())


class Resolver:
    """The pages of one letter's buttons."""

    def __init__(self, model_admin: ModelAdmin[Any]) -> None:
        self._model_admin = model_admin

    def urls(self) -> list[URLPattern]:
        wrap = self._model_admin.admin_site.admin_view
        return [
            path("<path:object_id>/replay/", wrap(self.replay), name="scriba_deadletter_replay"),
            path("<path:object_id>/discard/", wrap(self.discard), name="scriba_deadletter_discard"),
            path("<path:object_id>/rehearse/", wrap(self.rehearse), name="scriba_deadletter_rehearse"),
        ]

    def replay(self, request: HttpRequest, object_id: str) -> HttpResponse:
        return self._resolve(request, object_id, "replay")

    def discard(self, request: HttpRequest, object_id: str) -> HttpResponse:
        return self._resolve(request, object_id, "discard")

    def rehearse(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """Show whether it would pass now. Only a POST calls its handler."""
        letters = self._asked_for(request, object_id)
        if request.method != "POST":
            return HttpResponseRedirect(self._letter_url(request, object_id))
        return dry_run(self._model_admin, request, letters, ())

    def _resolve(self, request: HttpRequest, object_id: str, wish: str) -> HttpResponse:
        letters = self._asked_for(request, object_id)
        back = self._letter_url(request, object_id)
        if request.method != "POST":
            return _question(self._model_admin, request, letters, wish, [], back)
        _wish(request, letters, wish)
        return HttpResponseRedirect(back)

    def _asked_for(self, request: HttpRequest, object_id: str) -> QuerySet[DeadLetter]:
        user: Any = request.user
        if not user.has_perm(MAY_RESOLVE):
            raise PermissionDenied
        letters = self._model_admin.get_queryset(request).filter(pk=object_id) if object_id.isdecimal() else None
        if letters is None or not letters.exists():
            raise Http404
        return letters

    def _letter_url(self, request: HttpRequest, object_id: str) -> str:
        url = reverse(f"{self._model_admin.admin_site.name}:scriba_deadletter_change", args=[object_id])
        database = request.GET.get("database")
        return f"{url}?{urlencode({'database': database})}" if database else url


def groups_of(letters: QuerySet[DeadLetter]) -> list[dict[str, Any]]:
    """Return the groups of equal failures among `letters`, the largest first, at most 20."""
    by = ("projection_name", "projection_version", "error_kind", "event_type", "fingerprint", "status")
    counted = letters.order_by().values(*by)
    summed = counted.annotate(
        letters=Count("pk"),
        first=Min("occurred_at"),
        last=Max("occurred_at"),
        message=Left(Max("error_message"), LONGEST_MESSAGE),  # of any of them: they are alike
    )
    return list(summed.order_by("-letters", "-last")[:MOST_GROUPS])


def _question(  # noqa: PLR0913 - what the page needs
    model_admin: Any,
    request: HttpRequest,
    letters: QuerySet[DeadLetter],
    wish: str,
    hidden: list[tuple[str, Any]],
    back_url: str,
) -> HttpResponse:
    request.current_app = model_admin.admin_site.name
    context = {
        **model_admin.admin_site.each_context(request),
        "title": f"{wish.capitalize()} {letters.count():,} dead letter{'' if letters.count() == 1 else 's'}?",
        "opts": model_admin.model._meta,
        "media": model_admin.media,
        "wish": wish,
        "explained": EXPLAINED[wish],
        "groups": groups_of(letters),
        "resolved": letters.exclude(status__in=UNRESOLVED).count(),
        "hidden": hidden,
        "back_url": back_url,
        "allow_out_of_order": "allow_out_of_order" in request.POST,
    }
    return TemplateResponse(request, "scriba/resolve.html", context)


def _wish(request: HttpRequest, letters: QuerySet[DeadLetter], wish: str) -> None:
    """Wish it of all, and say in numbers what became of them."""
    may_be_late = {"allow_out_of_order": True} if wish == "replay" and "allow_out_of_order" in request.POST else {}
    results: Counter[str] = Counter()
    for chunk in wish_all(letters, wish, by=who(request), **may_be_late):
        results.update(wished=len(chunk.wished), behind=len(chunk.behind), refused=len(chunk.refused))
    words = [f"{results['wished']:,} to be {_PAST[wish]}: whoever runs the projection does it within a second."]
    if results["behind"]:
        words.append(f"{results['behind']:,} are parked behind another letter, whose replay releases them.")
    if results["refused"]:
        words.append(
            f"{results['refused']:,} were left alone: resolved, asked for already, or a later event is applied."
        )
    messages.add_message(request, messages.WARNING if results["refused"] else messages.SUCCESS, " ".join(words))


_PAST: Final = {"replay": "replayed", "discard": "discarded"}
