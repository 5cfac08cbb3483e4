"""Purging resolved letters in the admin: first what would be deleted, by projection and status, then the deletion.

What always holds: nothing is deleted before a POST with a token by somebody who may delete dead letters; only letters
that are resolved at that moment, and were before the time that the question named; the answer says how many.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.db.models import Count, Max, Min
from django.http import HttpRequest, HttpResponse, HttpResponseBadRequest, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from django.utils.dateparse import parse_datetime
from django.utils.http import urlencode
from django.utils.timezone import is_naive

from scriba.bulk import RESOLVED, purge
from scriba.panel.live import who

if TYPE_CHECKING:
    from django.contrib.admin import ModelAdmin
    from django.db.models import QuerySet

    from scriba.models import DeadLetter

__all__ = ["MAY_PURGE", "PurgePage"]

MAY_PURGE: Final = "scriba.delete_deadletter"
DEFAULT_DAYS: Final = 90
MOST_DAYS: Final = 36_500
LONGEST_NUMBER: Final = 9  #: digits
LONGEST_S: Final = 20.0  #: a web server ends requests that take long; what is left is asked for again


class PurgePage:
    """The question, and its answer."""

    def __init__(self, model_admin: ModelAdmin[Any]) -> None:
        self._model_admin = model_admin

    def urls(self) -> list[URLPattern]:
        wrap = self._model_admin.admin_site.admin_view
        return [path("purge/", wrap(self.page), name="scriba_deadletter_purge")]

    def page(self, request: HttpRequest) -> HttpResponse:
        """Ask with GET (``days``, ``projection``), delete with POST (``before``, ``projection``)."""
        user: Any = request.user
        if not user.has_perm(MAY_PURGE):
            raise PermissionDenied
        request.current_app = self._model_admin.admin_site.name
        if request.method != "POST":
            return self._question(request)
        before = _moment(request.POST.get("before", ""))
        if before is None:
            return HttpResponseBadRequest("No moment is named before which letters were resolved.")
        letters = _of(self._resolved(request), request.POST.get("projection", ""))
        self._delete(request, letters, before)
        return HttpResponseRedirect(self._list_url(request))

    def _question(self, request: HttpRequest) -> HttpResponse:
        days, projection = _days(request.GET.get("days", "")), request.GET.get("projection", "")
        before = datetime.now(UTC) - timedelta(days=days)
        resolved = self._resolved(request)
        found = _of(resolved, projection).filter(resolved_at__lt=before)
        groups = _groups(found)
        total = sum(group["letters"] for group in groups)
        context = {
            **self._model_admin.admin_site.each_context(request),
            "title": "Purge resolved dead letters",
            "opts": self._model_admin.model._meta,
            "media": self._model_admin.media,
            "days": days,
            "before": before,
            "before_exactly": before.isoformat(),
            "groups": groups,
            "total": total,
            "projection": projection,
            "projections": [f"{name}:{version}" for name, version in _identities(resolved)],
            "resolved": resolved.aggregate(number=Count("pk"), oldest=Min("resolved_at")),
            "database": request.GET.get("database", ""),
            "list_url": self._list_url(request),
        }
        return TemplateResponse(request, "scriba/purge.html", context)

    def _delete(self, request: HttpRequest, letters: QuerySet[DeadLetter], before: datetime) -> None:
        deleted, deadline, is_over = 0, time.monotonic() + LONGEST_S, True
        for number in purge(letters, before=before, by=who(request)):
            deleted += number
            if time.monotonic() > deadline:
                is_over = False
                break
        if not deleted:
            messages.info(
                request, "Nothing to purge any more: somebody else was faster, or the letters have failed again."
            )
            return
        words = f"{deleted:,} resolved dead letter{' was' if deleted == 1 else 's were'} deleted."
        more = "" if is_over else " Time was up before all of them were: purge again for the rest."
        messages.add_message(request, messages.SUCCESS if is_over else messages.WARNING, words + more)

    def _resolved(self, request: HttpRequest) -> QuerySet[DeadLetter]:
        return self._model_admin.get_queryset(request).filter(status__in=RESOLVED)

    def _list_url(self, request: HttpRequest) -> str:
        url = reverse(f"{self._model_admin.admin_site.name}:scriba_deadletter_changelist")
        database = request.GET.get("database")
        return f"{url}?{urlencode({'database': database})}" if database else url


def _days(text: str) -> int:
    number = _number(text)
    return DEFAULT_DAYS if number is None else min(number, MOST_DAYS)


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= LONGEST_NUMBER else None


def _moment(text: str) -> datetime | None:
    try:
        found = parse_datetime(text)
    except ValueError:
        return None
    return None if found is None or is_naive(found) else found


def _of(letters: QuerySet[DeadLetter], projection: str) -> QuerySet[DeadLetter]:
    """Narrow to one projection, if one is named; to none when there is none of that name."""
    if not projection:
        return letters
    name, _, version = projection.rpartition(":")
    number = _number(version)
    return letters.none() if number is None else letters.filter(projection_name=name, projection_version=number)


def _groups(letters: QuerySet[DeadLetter]) -> list[Any]:
    counted = letters.order_by().values("projection_name", "projection_version", "status")
    summed = counted.annotate(letters=Count("pk"), first=Min("resolved_at"), last=Max("resolved_at"))
    return list(summed.order_by("projection_name", "projection_version", "status"))


def _identities(letters: QuerySet[DeadLetter]) -> QuerySet[DeadLetter, tuple[Any, ...]]:
    names = ("projection_name", "projection_version")
    return letters.order_by(*names).values_list(*names).distinct()
