"""The live page: every projection of every target alias, what is wrong, and the buttons that mend it.

Mounted through the admin of ``scriba_projections``, whose key is simple. What always holds: looking needs the
permission to view projections, acting the one to change them; an act is a POST with a token; what cannot be taken
back is asked for twice; nothing on the page needs an inline style, an inline script or another host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse, HttpResponseBadRequest, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from django.utils.timezone import now
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_GET, require_POST

from scriba import control
from scriba.exceptions import ScribaError
from scriba.forgetting import forget
from scriba.info import alias_of
from scriba.panel.reading import read_sheets, target_aliases
from scriba.protocols import Identity
from scriba.registry import find

if TYPE_CHECKING:
    from django.contrib.admin import AdminSite, ModelAdmin

__all__ = ["MAY_STEER", "LivePage", "who"]

MAY_STEER: Final = "scriba.change_projectionstate"

#: What is asked for twice, and what the question says.
ASKED_TWICE: Final[Mapping[str, str]] = {
    "stop": "finishes what is in flight and rests until somebody starts it. Its read model gets no new events meanwhile.",
    "reset": "forgets its cursors, watermark and counters, so that every event comes again.",
    "forget": "is not in the code any more. Its cursors, dead letters and counters are deleted; its read model stays.",
}
DONE: Final[Mapping[str, str]] = {
    "start": "is started", "pause": "is paused", "resume": "goes on", "stop": "is stopped", "reset": "was reset",
    "forget": "is forgotten",
}  # fmt: skip


class LivePage:
    """The views of the page, for one admin site."""

    def __init__(self, model_admin: ModelAdmin[Any]) -> None:
        self._model_admin = model_admin
        self._site: AdminSite = model_admin.admin_site

    def urls(self) -> list[URLPattern]:
        wrap = self._site.admin_view
        return [
            path("live/", wrap(never_cache(require_GET(self.page))), name="scriba_live"),
            path("live/now/", wrap(never_cache(require_GET(self.now))), name="scriba_live_now"),
            path("live/act/", wrap(require_POST(self.act)), name="scriba_live_act"),
        ]

    # --- looking ----------------------------------------------------------------------------------------------

    def page(self, request: HttpRequest) -> HttpResponse:
        """The whole page; what changes comes again by itself."""
        self._require_view(request)
        self._name_site(request)
        return TemplateResponse(request, "scriba/live.html", {**self._shown(request), **self._around(request, "Live")})

    def now(self, request: HttpRequest) -> HttpResponse:
        """Only what changes."""
        self._require_view(request)
        self._name_site(request)
        return TemplateResponse(request, "scriba/live_now.html", self._shown(request))

    def _shown(self, request: HttpRequest) -> dict[str, Any]:
        sheets = read_sheets()
        cards = [card for sheet in sheets for card in sheet.cards]
        return {
            "sheets": sheets,
            "many": len(sheets) > 1,
            "totals": {
                "running": sum(card.status == "running" for card in cards),
                "halted": sum(bool(card.halt_cause) for card in cards),
                "resting": sum(card.status in {"paused", "stopped"} for card in cards),
                "absent": sum(card.status == "not running" and not card.is_orphan for card in cards),
                "letters": sum(card.unresolved for card in cards),
                "behind": sum(card.lag_events or 0 for card in cards if not card.is_orphan),
            },
            "cards": len(cards),
            "may_steer": self._may_steer(request),
            "read_at": now(),
            "act_url": reverse(f"{self._site.name}:scriba_live_act"),
            "letters_url": reverse(f"{self._site.name}:scriba_deadletter_changelist"),
        }

    def _around(self, request: HttpRequest, title: str) -> dict[str, Any]:
        opts = self._model_admin.model._meta
        return {**self._site.each_context(request), "title": title, "opts": opts, "media": self._model_admin.media}

    # --- acting -----------------------------------------------------------------------------------------------

    def act(self, request: HttpRequest) -> HttpResponse:
        """Do what a button says, or ask first; then go back to the page."""
        if not self._may_steer(request):
            raise PermissionDenied
        action, alias = request.POST.get("action", ""), request.POST.get("alias", "")
        identity = _identity(request.POST)
        if action not in DONE or alias not in target_aliases() or identity is None:
            return HttpResponseBadRequest("No such action, database or projection.")
        if action in ASKED_TWICE and "sure" not in request.POST:
            return self._question(request, action, alias, identity)
        try:
            _ACTS[action](identity, alias, who(request), request.POST)
        except ScribaError as error:
            messages.error(request, str(error))
        else:
            messages.success(request, f"Projection {identity} {DONE[action]}.")
        return HttpResponseRedirect(reverse(f"{self._site.name}:scriba_live"))

    def _name_site(self, request: HttpRequest) -> None:
        """Links lead into this admin site, which need not be the default one."""
        request.current_app = self._site.name

    def _question(self, request: HttpRequest, action: str, alias: str, identity: Identity) -> HttpResponse:
        self._name_site(request)
        context = {
            "action": action,
            "alias": alias,
            "identity": identity,
            "question": f"{identity} {ASKED_TWICE[action]}",
            "models": [model._meta.label for model in find(identity).models] if action == "reset" else [],
            "act_url": reverse(f"{self._site.name}:scriba_live_act"),
            "back_url": reverse(f"{self._site.name}:scriba_live"),
            **self._around(request, f"{action.capitalize()} {identity}?"),
        }
        return TemplateResponse(request, "scriba/sure.html", context)

    def _require_view(self, request: HttpRequest) -> None:
        if not self._model_admin.has_view_permission(request):
            raise PermissionDenied

    def _may_steer(self, request: HttpRequest) -> bool:
        user: Any = request.user
        return bool(user.has_perm(MAY_STEER))


def who(request: HttpRequest) -> str:
    """Return who asks, for the records."""
    return f"{request.user} (admin)"


def _identity(posted: Mapping[str, Any]) -> Identity | None:
    version = str(posted.get("version", ""))
    return Identity(str(posted["name"]), int(version)) if posted.get("name") and version.isdecimal() else None


def _wish(command: Callable[..., None]) -> Callable[[Identity, str, str, Mapping[str, Any]], None]:
    def act(identity: Identity, alias: str, by: str, posted: Mapping[str, Any]) -> None:
        _declared(identity, alias)
        command(identity, by=by, reason=str(posted.get("reason", "")))

    return act


def _reset(identity: Identity, alias: str, by: str, posted: Mapping[str, Any]) -> None:
    _declared(identity, alias)
    control.reset(identity, dead_letters="letters" in posted, truncate="truncate" in posted, by=by)


def _forget(identity: Identity, alias: str, by: str, posted: Mapping[str, Any]) -> None:
    del posted
    forget(identity, alias, by=by)


def _declared(identity: Identity, alias: str) -> None:
    """An orphan of one database may have the name of a projection of another: that one is not meant."""
    if alias_of(find(identity)) != alias:
        msg = f"{identity} does not write to the database {alias!r}: its row there is an orphan."
        raise ScribaError(msg)


_ACTS: Final[Mapping[str, Callable[[Identity, str, str, Mapping[str, Any]], None]]] = {
    "start": _wish(control.start),
    "pause": _wish(control.pause),
    "resume": _wish(control.resume),
    "stop": _wish(control.stop),
    "reset": _reset,
    "forget": _forget,
}
