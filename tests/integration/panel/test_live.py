"""The live page without a browser: who may see it, who may steer, and what its buttons do to the rows."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from html import unescape
from typing import Any

import pytest
from django.contrib.auth.models import Permission, User
from django.test import Client
from django.urls import clear_url_caches, path

from scriba.exceptions import InvalidState, UnknownProjection
from scriba.forgetting import forget, orphans
from scriba.models import Audit, DeadLetter, Position, ProjectionState, Segment
from scriba.panel.charts import Point, chart
from scriba.protocols import Identity
from tests.integration.panel.conftest import Scene

LIVE = "/admin/scriba/projectionstate/live/"
ACT = f"{LIVE}act/"
pytestmark = pytest.mark.django_db(databases=["default", "other"])


def posted(action: str, identity: Identity, **more: str) -> dict[str, str]:
    return {"action": action, "alias": "default", "name": identity.name, "version": str(identity.version), **more}


def text_of(page: str) -> str:
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", page)).split())


def with_permissions(client: Client, *names: str) -> Client:
    user = User.objects.create_user("bob", password="x", is_staff=True)
    user.user_permissions.set(Permission.objects.filter(codename__in=names))
    client.force_login(user)
    return client


def test_everything_is_on_the_page(scene: Scene, admin_client: Client) -> None:
    """State, owner, lag, horizon holder, halt with its cure, versions beside each other, letters by group, records."""
    scene.busy_night()

    shown = text_of(admin_client.get(LIVE).content.decode())

    for text in (
        "worker-2:4711:9f3c1a", "23 behind", "waits for process 2041 of 'nightly-import'", "pg_terminate_backend(2041)",
        "beside version 2", "does not exist Cure. Mend the cause, then stop and start it", "Paused by ann (admin): stock-taking until 06:00",
        "1,204 KeyError", "41 parked", "orphaned", "pause stock:1",
    ):  # fmt: skip
        assert text in shown, text


def test_whoever_does_not_look_at_the_source_is_not_called_caught_up(scene: Scene, admin_client: Client) -> None:
    """A halted projection knows of no newer event than its last look: its lag is a lower bound, or unknown."""
    halted, gone, orphan = scene.declare("halted"), scene.declare("gone"), Identity("orphan", 1)
    scene.rows(halted, watermark=100, head=100, halt_cause="no such column", halted_at=datetime.now(UTC))
    scene.rows(gone, live=False, watermark=90, head=100)
    scene.rows(orphan, live=False, watermark=0, head=5_000, owner="")

    shown = text_of(admin_client.get(LIVE).content.decode())

    assert "caught up" not in shown
    assert "lag unknown" in shown
    assert "head, last seen 100" in shown
    assert f"lag {chr(0x2265)} 10 behind" in shown
    assert "10 events behind" in shown, "what an orphan has not read is nobody's backlog"


def test_what_needs_somebody_comes_first(scene: Scene, admin_client: Client) -> None:
    """Halted, run by nobody, held back, all the others, and last what is not in the code any more."""
    for name, columns in {
        "a-calm": {}, "b-orphan": {"live": False, "owner": ""}, "c-held": {"reason": "waits for process 7"},
        "d-gone": {"live": False}, "e-halted": {"halt_cause": "why"},
    }.items():  # fmt: skip
        scene.rows(Identity(name, 1) if "orphan" in name else scene.declare(name), **columns)

    order = re.findall(r'data-projection="([^"]+):1"', admin_client.get(LIVE).content.decode())

    assert order == ["e-halted", "d-gone", "c-held", "a-calm", "b-orphan"]


def test_the_pages_lead_into_their_own_admin_site(scene: Scene, rf: Any, admin_user: Any) -> None:
    """A project with an admin site of its own name has no site called "admin"."""
    from django.contrib.admin import AdminSite

    from scriba.admin import DeadLetterAdmin, ProjectionStateAdmin

    scene.rows(scene.declare("orders"))
    site = AdminSite("backoffice")
    site.register(DeadLetter, DeadLetterAdmin)
    site.register(ProjectionState, ProjectionStateAdmin)
    request = rf.get("/")
    request.user = admin_user
    live = site.get_model_admin(ProjectionState).get_urls()[0].callback

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("tests.urls.urlpatterns", [path("backoffice/", site.urls)])
        clear_url_caches()
        try:
            page = live(request).render().content.decode()
        finally:
            patched.undo()
            clear_url_caches()

    assert 'data-url="/backoffice/scriba/projectionstate/live/now/"' in page


def test_the_page_needs_nothing_that_a_strict_policy_forbids(scene: Scene, admin_client: Client) -> None:
    """No inline style, script or event attribute, nothing from another host."""
    scene.busy_night()

    page = admin_client.get(LIVE).content.decode()

    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)|(?:src|href)=\"(?:https?:)?//", page)


@pytest.mark.parametrize(
    ("permissions", "seen", "steered"),
    [
        ((), 403, 403),
        (("view_projectionstate",), 200, 403),
        (("view_projectionstate", "change_projectionstate"), 200, 302),
    ],
)
def test_looking_and_steering_need_their_permissions(
    permissions: tuple[str, ...], seen: int, steered: int, scene: Scene, client: Client
) -> None:
    """Who may not steer sees no buttons, and is refused when posting by hand."""
    orders = scene.declare("orders")
    scene.rows(orders)
    with_permissions(client, *permissions)

    assert client.get(LIVE).status_code == seen
    assert client.get(f"{LIVE}now/").status_code == seen
    assert ("scriba-does-pause" in client.get(LIVE).content.decode()) is (steered == 302)
    assert client.post(ACT, posted("pause", orders)).status_code == steered
    assert ProjectionState.objects.get().wish == ("paused" if steered == 302 else "running")


def test_an_act_needs_a_token_and_a_post(scene: Scene) -> None:
    """A link or a form of another site does nothing."""
    orders = scene.declare("orders")
    scene.rows(orders)
    client = Client(enforce_csrf_checks=True)
    client.force_login(User.objects.create_superuser("root"))

    assert client.post(ACT, posted("pause", orders)).status_code == 403
    assert client.get(ACT, posted("pause", orders)).status_code == 405
    assert ProjectionState.objects.get().wish == "running"


@pytest.mark.parametrize(
    "wrong",
    [{"action": "drop"}, {"alias": "nowhere"}, {"version": "x"}, {"name": ""}],
    ids=lambda wrong: next(iter(wrong)),
)
def test_nonsense_is_refused(wrong: dict[str, str], scene: Scene, admin_client: Client) -> None:
    """An act, a database or a projection that is none."""
    assert admin_client.post(ACT, posted("pause", scene.declare("orders")) | wrong).status_code == 400


def test_a_wrong_state_is_a_message(scene: Scene, admin_client: Client) -> None:
    """Two operators click at once: the second one reads why nothing happened."""
    orders = scene.declare("orders")
    scene.rows(orders)
    admin_client.post(ACT, posted("pause", orders))

    page = admin_client.post(ACT, posted("pause", orders), follow=True).content.decode()

    assert "Cannot pause orders:1 while it is paused" in text_of(page)
    assert Audit.objects.count() == 1


def test_a_reset_is_asked_for_twice(scene: Scene, admin_client: Client) -> None:
    """Only of a stopped one; the question offers what else may be deleted."""
    orders = scene.declare("orders")
    scene.rows(orders, live=False, wish="stopped", owner="")
    Position.objects.create(projection_name="orders", projection_version=1, stream_id="a", position=9)
    assert "scriba-does-reset" in admin_client.get(LIVE).content.decode()

    question = admin_client.post(ACT, posted("reset", orders)).content.decode()
    assert "Delete its dead letters" in question
    assert Position.objects.exists()
    admin_client.post(ACT, posted("reset", orders, sure="yes"))

    assert not Position.objects.exists()
    assert Audit.objects.get().action == "reset"


def test_an_empty_project_is_told_where_to_begin(scene: Scene, admin_client: Client) -> None:
    """Without projections the page is not just empty."""
    assert admin_client.get(LIVE).status_code == 200


def test_every_target_database_is_shown(scene: Scene, admin_client: Client) -> None:
    """Each with its own projections; an orphan of one is no orphan of the other."""
    scene.rows(scene.declare("orders"))
    scene.rows(scene.declare("archive", using="other"), using="other")

    page = admin_client.get(LIVE).content.decode()

    default, other = page.split('data-alias="other"')
    assert 'data-projection="orders:1"' in default
    assert 'data-projection="archive:1"' in other
    assert "orphaned" not in page


# --- orphans ------------------------------------------------------------------------------------------------------


def test_an_orphan_is_forgotten_with_all_its_rows_but_the_records(scene: Scene, admin_client: Client) -> None:
    """Asked for twice; the entry says who did it."""
    gone = Identity("old_report", 1)
    scene.rows(gone, live=False, owner="")
    scene.letters(gone, 2)
    scene.rows(scene.declare("orders"))
    assert orphans("default") == [gone]

    question = admin_client.post(ACT, posted("forget", gone)).content.decode()
    assert "not in the code any more" in question
    assert ProjectionState.objects.count() == 2
    admin_client.post(ACT, posted("forget", gone, sure="yes"))

    assert orphans("default") == []
    assert not DeadLetter.objects.exists()
    assert [segment.projection_name for segment in Segment.objects.all()] == ["orders"]
    assert [(entry.action, entry.projection_name) for entry in Audit.objects.all()] == [("forget", "old_report")]


def test_what_another_process_runs_is_not_forgotten(scene: Scene) -> None:
    """Another deployment declares it."""
    scene.rows(Identity("elsewhere", 1))

    with pytest.raises(InvalidState, match="worker-2"):
        forget(Identity("elsewhere", 1), "default")
    assert ProjectionState.objects.exists()


def test_what_is_declared_is_not_forgotten(scene: Scene) -> None:
    """It is reset instead."""
    orders = scene.declare("orders")
    scene.rows(orders, live=False)

    with pytest.raises(UnknownProjection, match="is no orphan"):
        forget(orders, "default")


# --- dead letters -------------------------------------------------------------------------------------------------

LETTERS = "/admin/scriba/deadletter/"


def selected(letters: list[DeadLetter], wish: str, **more: Any) -> dict[str, Any]:
    return {"action": f"{wish}_selected", "_selected_action": [letter.pk for letter in letters], **more}


@pytest.mark.parametrize("wish", ["replay", "discard"])
def test_selected_letters_are_resolved_after_a_question(wish: str, scene: Scene, admin_client: Client) -> None:
    """The question shows the groups; the answer is counted."""
    letters = scene.letters(scene.declare("orders"), 5)

    question = text_of(admin_client.post(LETTERS, selected(letters[:3], wish)).content.decode())
    assert f"{wish.capitalize()} 3 dead letters?" in question
    assert "3 KeyError · OrderPlaced" in question
    assert not DeadLetter.objects.exclude(wish="").exists()
    answer = admin_client.post(LETTERS, selected(letters[:3], wish, sure="yes"), follow=True)

    assert f"3 to be {wish}ed" in text_of(answer.content.decode())
    assert set(DeadLetter.objects.exclude(wish="").values_list("position", "wish", "wish_by")) == {
        (letter.position, wish, "admin (admin)") for letter in letters[:3]
    }
    assert Audit.objects.get().detail == "3 letters"


def test_all_that_a_filter_finds_are_resolved(scene: Scene, admin_client: Client) -> None:
    """More than one page, and nothing that the filter leaves out."""
    orders = scene.declare("orders")
    letters = scene.letters(orders, 60)
    scene.letters(orders, 2, error_kind="ValueError", fingerprint="v")

    path = f"{LETTERS}?error_kind=KeyError"
    admin_client.post(path, selected(letters[:1], "replay", select_across="1"))
    admin_client.post(path, selected(letters[:1], "replay", select_across="1", sure="yes"))

    assert DeadLetter.objects.filter(wish="replay").count() == 60
    assert not DeadLetter.objects.filter(error_kind="ValueError").exclude(wish="").exists()


def test_what_was_resolved_meanwhile_is_left_alone_and_said(scene: Scene, admin_client: Client) -> None:
    """A summary in numbers, also of what was refused."""
    letters = scene.letters(scene.declare("orders"), 3)
    DeadLetter.objects.filter(pk=letters[0].pk).update(status="replayed")

    answer = admin_client.post(LETTERS, selected(letters, "discard", sure="yes"), follow=True)

    assert "2 to be discarded" in text_of(answer.content.decode())
    assert "1 were left alone" in text_of(answer.content.decode())


@pytest.mark.parametrize(("permission", "allowed"), [("view_deadletter", False), ("change_deadletter", True)])
def test_resolving_needs_the_permission(permission: str, allowed: bool, scene: Scene, client: Client) -> None:
    """Looking is not enough, neither for the actions nor for the buttons of one letter."""
    letters = scene.letters(scene.declare("orders"), 2)
    with_permissions(client, "view_deadletter", permission)

    client.post(LETTERS, selected(letters[:1], "replay", sure="yes"))
    button = client.post(f"{LETTERS}{letters[1].pk}/discard/")

    assert button.status_code == (302 if allowed else 403)
    assert DeadLetter.objects.exclude(wish="").count() == (2 if allowed else 0)


def test_one_letter_is_resolved_from_its_page(scene: Scene, admin_client: Client) -> None:
    """The buttons are there while it is unresolved; a link alone only asks."""
    (letter,) = scene.letters(scene.declare("orders"), 1)
    page = f"{LETTERS}{letter.pk}/"
    assert f"{page}replay/" in admin_client.get(f"{page}change/").content.decode()

    assert "Replay 1 dead letter?" in text_of(admin_client.get(f"{page}replay/").content.decode())
    letter.refresh_from_db()
    assert letter.wish == ""
    admin_client.post(f"{page}replay/")

    letter.refresh_from_db()
    assert letter.wish == "replay"
    DeadLetter.objects.update(status="replayed", wish="")
    assert f"{page}replay/" not in admin_client.get(f"{page}change/").content.decode()


@pytest.mark.case("B14")
def test_parked_streams_are_shown_as_such(scene: Scene, admin_client: Client) -> None:
    """How many events wait behind which letter."""
    orders = scene.declare("orders")
    (head,) = scene.letters(orders, 1, stream_id="a")
    scene.letters(orders, 3, stream_id="a", status="parked")

    shown = text_of(admin_client.get(LETTERS).content.decode())

    assert "open 3 wait behind it" in shown
    assert shown.count(f"parked behind letter {head.pk}") == 3


def test_equal_failures_are_one_line_above_the_list(scene: Scene, admin_client: Client) -> None:
    """A group links to its letters."""
    orders = scene.declare("orders")
    scene.letters(orders, 4)
    scene.letters(orders, 1, fingerprint="rare", error_kind="ValueError")

    page = admin_client.get(LETTERS).content.decode()

    assert "2 groups of equal failures" in page
    assert "fingerprint=6f1c2d" in page
    narrowed = admin_client.get(f"{LETTERS}?fingerprint=rare").content.decode()
    assert narrowed.count('name="_selected_action"') == 1


# --- charts -------------------------------------------------------------------------------------------------------


def test_a_chart_ends_where_samples_are_missing() -> None:
    """Nobody ran it for ten minutes: no line pretends to know what was then."""
    drawn = chart([Point(3000, 1), Point(2990, 2), Point(2000, 4), Point(1990, 4)], span_s=3600)

    assert len(drawn.lines) == 2
    assert drawn.highest == 4


def test_a_flat_zero_is_drawn_at_the_bottom() -> None:
    """No division by the highest value when it is zero."""
    drawn = chart([Point(20, 0), Point(10, 0)], span_s=3600)

    assert {place.split(",")[1] for place in drawn.lines[0].split()} == {"42.5"}
