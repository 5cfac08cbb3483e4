"""Purging in the admin: what will be deleted is said first, and only what is resolved for long is deleted."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from html import unescape
from typing import Any

import psycopg
import pytest
from django.contrib.auth.models import Permission, User
from django.test import Client

from scriba import bulk
from scriba.models import Audit, DeadLetter
from scriba.panel import purging

PURGE = "/admin/scriba/deadletter/purge/"
LIST = "/admin/scriba/deadletter/"


def letter(
    position: int, status: str = "replayed", *, days: float = 100, projection: str = "orders", **columns: Any
) -> DeadLetter:
    at = None if status in {"open", "parked"} else datetime.now(UTC) - timedelta(days=days)
    return DeadLetter.objects.create(
        projection_name=projection, projection_version=1, position=position, stream_id="s", event_type="T", error_kind="K",
        error_message="", status=status, resolved_at=at, **columns,
    )  # fmt: skip


def left() -> set[int]:
    return set(DeadLetter.objects.values_list("position", flat=True))


def text_of(page: str) -> str:
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", page)).split())


def question(client: Client, **query: str) -> str:
    answer = client.get(PURGE, query)
    assert answer.status_code == 200
    return str(answer.content.decode())


def answered(client: Client, page: str) -> str:
    """Click on the button of the question; return the page after it."""
    form = page[page.index('<form method="post"', page.index("scriba-lead")) :]
    fields = dict(re.findall(r'name="(before|projection)" value="([^"]*)"', form))
    return text_of(client.post(PURGE, {**fields, "sure": "yes"}, follow=True).content.decode())


def test_what_will_be_deleted_is_said_first(admin_client: Client) -> None:
    """How many, of which projection, resolved how, and since when; nothing is deleted by looking."""
    letter(1, days=100)
    letter(2, days=120)
    letter(3, "discarded")
    letter(4, projection="totals")
    letter(5, days=80)

    shown = text_of(question(admin_client))

    assert "2 orders:1 replayed" in shown
    assert "1 orders:1 discarded" in shown
    assert "1 totals:1 replayed" in shown
    assert "Yes, delete these 4 letters" in shown
    assert left() == {1, 2, 3, 4, 5}


def test_only_what_is_resolved_for_so_long_is_deleted(admin_client: Client) -> None:
    """Open and parked letters stay, however old they are; the records say who purged how many."""
    letter(1)
    letter(2, "discarded")
    letter(3, "open", occurred_at=datetime.now(UTC) - timedelta(days=400))
    letter(4, "parked", occurred_at=datetime.now(UTC) - timedelta(days=400))
    letter(5, days=89)

    said = answered(admin_client, question(admin_client))

    assert "2 resolved dead letters were deleted" in said
    assert left() == {3, 4, 5}
    assert [(entry.action, entry.actor, entry.detail) for entry in Audit.objects.all()] == [
        ("purge", "admin (admin)", "2 letters")
    ]


def test_the_age_and_the_projection_are_chosen(admin_client: Client) -> None:
    """Narrowing narrows the answer as well as the question."""
    letter(1, days=10)
    letter(2, days=2)
    letter(3, days=10, projection="totals")

    said = answered(admin_client, question(admin_client, days="7", projection="orders:1"))

    assert "1 resolved dead letter was deleted" in said
    assert left() == {2, 3}


def test_the_answer_is_about_what_the_question_said(admin_client: Client) -> None:
    """A letter that has grown old enough between the two is not deleted with the others."""
    letter(1, days=100)
    almost = letter(2, days=89.999)
    page = question(admin_client)
    DeadLetter.objects.filter(pk=almost.pk).update(resolved_at=almost.resolved_at - timedelta(minutes=1, seconds=26))

    answered(admin_client, page)

    assert left() == {2}


def test_a_letter_that_has_failed_again_meanwhile_stays(admin_client: Client) -> None:
    """Deleted is what is resolved at that moment, not what was when the question was asked."""
    letter(1)
    again = letter(2)
    page = question(admin_client)
    DeadLetter.objects.filter(pk=again.pk).update(status="open", resolved_at=None)

    said = answered(admin_client, page)

    assert "1 resolved dead letter was deleted" in said
    assert left() == {2}


def test_a_second_click_deletes_nothing_and_says_so(admin_client: Client) -> None:
    """Two operators have the same question open."""
    letter(1)
    page = question(admin_client)
    answered(admin_client, page)
    letter(2, days=1)

    said = answered(admin_client, page)

    assert "Nothing to purge any more: somebody else was faster" in said
    assert left() == {2}
    assert Audit.objects.count() == 1


@pytest.mark.django_db(transaction=True)
def test_two_who_purge_at_once_do_not_wait_for_each_other(postgres: psycopg.Connection, admin_client: Client) -> None:
    """What somebody else is just deleting is left to them: no waiting, no deadlock, no letter counted twice."""
    held, other = letter(1), letter(2)
    with postgres.transaction():
        postgres.execute("SELECT 1 FROM scriba_dead_letters WHERE id = %s FOR UPDATE", [held.pk])
        postgres.execute("SET LOCAL statement_timeout = 0")
        said = answered(admin_client, question(admin_client))

    assert "1 resolved dead letter was deleted" in said
    assert left() == {1}
    assert not DeadLetter.objects.filter(pk=other.pk).exists()


def test_a_large_purge_ends_in_time_and_says_what_is_left(
    admin_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks, one entry in the records for all of them; what was deleted before time was up is deleted."""
    for position in range(5):
        letter(position)
    monkeypatch.setattr(bulk, "PURGED_AT_ONCE", 2)
    page = question(admin_client)
    monkeypatch.setattr(purging, "LONGEST_S", -1.0)

    first = answered(admin_client, page)
    monkeypatch.setattr(purging, "LONGEST_S", 20.0)
    second = answered(admin_client, page)

    assert "2 resolved dead letters were deleted. Time was up" in first
    assert "3 resolved dead letters were deleted." in second
    assert left() == set()
    assert sorted(Audit.objects.values_list("detail", flat=True)) == ["2 letters", "3 letters"]


@pytest.mark.parametrize(
    ("columns", "said"),
    [(None, "No letter is resolved"), ({"days": 3}, "1 letter is resolved, the oldest on")],
)
def test_nothing_to_purge_is_explained(columns: dict[str, Any] | None, said: str, admin_client: Client) -> None:
    """No button for nothing, and the reason."""
    if columns:
        letter(1, **columns)

    page = question(admin_client)

    assert said in text_of(page)
    assert "Yes, delete" not in page


@pytest.mark.parametrize(("codename", "status"), [("change_deadletter", 403), ("delete_deadletter", 200)])
def test_purging_needs_the_permission_to_delete(codename: str, status: int, client: Client, db: None) -> None:
    """Who may resolve letters may not yet delete their traces; the link is for those who may."""
    user = User.objects.create_user("bob", is_staff=True)
    user.user_permissions.set(Permission.objects.filter(codename__in=["view_deadletter", codename]))
    client.force_login(user)
    letter(1)
    before = datetime.now(UTC).isoformat()

    assert client.get(PURGE).status_code == status
    assert (PURGE in client.get(LIST).content.decode()) is (status == 200)
    assert client.post(PURGE, {"before": before}, follow=True).status_code == status
    assert left() == ({1} if status == 403 else set())


def test_a_purge_needs_a_token(db: None) -> None:
    """A form of another site deletes nothing."""
    letter(1)
    client = Client(enforce_csrf_checks=True)
    client.force_login(User.objects.create_superuser("root"))

    assert client.post(PURGE, {"before": datetime.now(UTC).isoformat()}).status_code == 403
    assert left() == {1}


@pytest.mark.parametrize("before", ["", "yesterday", "2026-13-01T00:00:00Z", "2026-01-01T00:00:00"])
def test_an_answer_without_a_moment_is_refused(before: str, admin_client: Client) -> None:
    """No default: what is deleted is what a question has named."""
    letter(1)

    assert admin_client.post(PURGE, {"before": before}).status_code == 400
    assert left() == {1}


@pytest.mark.parametrize(
    "query",
    [{"days": "x"}, {"days": "9" * 30}, {"days": "-3"}, {"projection": "no such"}, {"projection": "a:" + "9" * 20}],
)
def test_nonsense_in_the_question_deletes_nothing(query: dict[str, str], admin_client: Client) -> None:
    """A number that is none is the usual one; a projection that is none has no letters."""
    letter(1, days=95)

    assert ("Yes, delete this letter" in question(admin_client, **query)) is ("projection" not in query)
