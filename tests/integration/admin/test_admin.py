"""The admin: dead letters and projections to read, for those who may look, with a strict content security policy."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from html import unescape
from typing import Any

import pytest
from django.contrib.auth.models import Permission, User
from django.core.checks import Tags, run_checks
from django.test import Client
from django.urls import reverse

from scriba import OrmTarget, Skip, projection
from scriba.models import DeadLetter, ProjectionState
from scriba.registry import find, forget
from scriba.testing import MemorySource

LIST = "/admin/scriba/deadletter/"
PROJECTIONS = "/admin/scriba/projectionstate/"


def letter(position: int = 7, using: str = "default", **columns: Any) -> DeadLetter:
    defaults: dict[str, Any] = {
        "projection_name": "orders", "projection_version": 1, "stream_id": "order-1", "event_id": f"event-{position}",
        "event_type": "OrderPlaced", "error_kind": "KeyError", "error_message": "'shipping_address'",
        "event_data": {"customer": "Åsa <script>alert(1)</script>"}, "event_metadata": {"user": "eve"},
        "error_stacktrace": 'Traceback (most recent call last):\n  File "projections.py", line 12',
    }  # fmt: skip
    return DeadLetter.objects.using(using).create(position=position, **defaults | columns)


def page_of(client: Client, path: str, **query: str) -> str:
    answer = client.get(path, query)
    assert answer.status_code == 200
    return answer.content.decode()


def rows(page: str) -> list[str]:
    """Return the text of each row of a list."""
    body = page.split("<tbody>")[1].split("</tbody>", maxsplit=1)[0] if "<tbody>" in page else ""
    return [
        " ".join(unescape(re.sub(r"<[^>]+>", " ", row)).split())
        for row in re.findall(r"<tr>(.*?)</tr>", body, re.DOTALL)
    ]


def positions(page: str) -> set[int]:
    return {int(found) for row in rows(page) for found in re.findall(r" at (\d+) ", row)}


@pytest.fixture
def elsewhere(scratch_name: str) -> Iterator[None]:
    """A projection that writes to a second database."""

    @projection(scratch_name, source=MemorySource(), target=OrmTarget(using="other"), parallelism=1)
    def handler(event: object, meta: object) -> Skip:
        return Skip()

    yield
    forget(find(handler))


# --- the list ----------------------------------------------------------------------------------------------------


def test_a_letter_is_one_row(admin_client: Client) -> None:
    """What failed, which event, of which projection, and what became of it."""
    letter(position=7)

    (row,) = rows(page_of(admin_client, LIST))

    for text in ("KeyError", "'shipping_address'", "OrderPlaced", "order-1 at 7", "orders:1", "open"):
        assert text in row


def test_a_long_message_is_cut_in_the_list(admin_client: Client) -> None:
    """The list stays a list; the page of the letter has the whole text."""
    made = letter(error_message="word " * 200)

    (row,) = rows(page_of(admin_client, LIST))
    page = page_of(admin_client, f"{LIST}{made.pk}/change/")

    assert len(row) < 300
    assert "…" in row
    assert "word " * 199 in page


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ({"status": "parked"}, {2}),
        ({"status__exact": "parked"}, {2}),
        ({"status": "resolved"}, {9, 10}),
        ({"status": "replayed"}, {9}),
        ({"status": "all"}, set(range(1, 11))),
        ({}, set(range(1, 9))),
        ({"projection_name": "totals"}, {3}),
        ({"projection_version": "2"}, {4}),
        ({"error_kind": "invalid_return"}, {5}),
        ({"event_type": "OrderShipped"}, {6}),
        ({"q": "event-7"}, {7}),
        ({"q": "order-special"}, {8}),
        ({"q": "nothing-like-it"}, set()),
    ],
)
def test_letters_are_found(query: dict[str, str], found: set[int], admin_client: Client) -> None:
    """By status, projection, version, kind and type; by event id and stream. At first what is not resolved."""
    letter(1)
    letter(2, status="parked")
    letter(3, projection_name="totals")
    letter(4, projection_version=2)
    letter(5, error_kind="invalid_return")
    letter(6, event_type="OrderShipped")
    letter(7)
    letter(8, stream_id="order-special")
    letter(9, status="replayed")
    letter(10, status="discarded")

    assert positions(page_of(admin_client, LIST, **query)) == found


def test_letters_are_counted_by_status(admin_client: Client) -> None:
    """ "Show counts" of the admin, on the filter of our own."""
    letter(1)
    letter(2, status="replayed")

    page = page_of(admin_client, LIST, _facets="True")

    assert "replayed or discarded (1)" in page
    assert "all (2)" in page


def test_letters_are_found_by_date(admin_client: Client) -> None:
    """The date filter of the admin narrows by when the letter was written."""
    now = datetime.now(UTC)
    letter(1, occurred_at=now - timedelta(days=400))
    letter(2)

    since = (now - timedelta(days=7)).isoformat()

    assert positions(page_of(admin_client, LIST, occurred_at__gte=since)) == {2}


def test_the_newest_letter_is_first(admin_client: Client) -> None:
    """Whoever opens the page wants to know what happens now."""
    letter(1)
    letter(2, occurred_at=datetime.now(UTC) + timedelta(seconds=5))

    assert [int(re.findall(r" at (\d+) ", row)[0]) for row in rows(page_of(admin_client, LIST))] == [2, 1]


@pytest.mark.parametrize(
    ("query", "said"),
    [({}, "No event is given up on"), ({"error_kind": "KeyError"}, "Nothing matches these filters")],
)
def test_an_empty_list_says_whether_that_is_good(query: dict[str, str], said: str, admin_client: Client) -> None:
    """Nothing failed, or nothing matches: two different things at night."""
    letter(1, status="replayed")

    assert said in page_of(admin_client, LIST, **query)


def test_the_list_costs_the_same_for_one_and_for_fifty(
    admin_client: Client, django_assert_max_num_queries: Any
) -> None:
    """No query per row."""
    for position in range(50):
        letter(position)

    with django_assert_max_num_queries(14):
        page_of(admin_client, LIST)


# --- the letter --------------------------------------------------------------------------------------------------


def test_payload_metadata_and_traceback_are_readable(admin_client: Client) -> None:
    """JSON is indented, line breaks stay, and nothing of a payload becomes markup."""
    made = letter(note="failed again")

    page = page_of(admin_client, f"{LIST}{made.pk}/change/")
    blocks = [unescape(block) for block in re.findall(r'<pre class="scriba-block[^"]*">(.*?)</pre>', page, re.DOTALL)]

    assert '{\n  "customer": "Åsa <script>alert(1)</script>"\n}' in blocks
    assert '{\n  "user": "eve"\n}' in blocks
    assert any(block.startswith("Traceback (most recent call last):\n  File") for block in blocks)
    assert "<script>alert(1)</script>" not in page
    assert "failed again" in page


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"status": "parked"}, "held behind an earlier letter"),
        ({"wish": "replay", "wish_by": "ann", "allow_out_of_order": True}, "replay asked for by ann, -, also out of order"),
        ({"status": "discarded", "resolved_by": "bob", "resolved_at": datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)},
         "by bob, 2 Jan 2026, 03:04:05"),
    ],
)  # fmt: skip
def test_what_became_of_a_letter_is_one_line(columns: dict[str, Any], said: str, admin_client: Client) -> None:
    """Not nine fields of which eight are empty."""
    made = letter(**columns)

    assert said in page_of(admin_client, f"{LIST}{made.pk}/change/")


def test_a_letter_leads_to_those_like_it(admin_client: Client) -> None:
    """From one failure to its group in one step."""
    made = letter(1, fingerprint="6f1c2d")
    letter(2, fingerprint="6f1c2d")
    letter(3, fingerprint="other")

    link = unescape(
        re.findall(r'href="([^"]+fingerprint=[^"]+)"', page_of(admin_client, f"{LIST}{made.pk}/change/"))[0]
    )

    assert positions(page_of(admin_client, link)) == {1, 2}


def test_an_empty_letter_is_shown(admin_client: Client) -> None:
    """No payload, no metadata and no traceback are no error."""
    made = letter(event_data=None, event_metadata=None, error_stacktrace="", error_message="")

    page_of(admin_client, f"{LIST}{made.pk}/change/")
    assert rows(page_of(admin_client, LIST))


@pytest.mark.parametrize("path", [LIST, PROJECTIONS, f"{LIST}{{letter}}/change/", f"{PROJECTIONS}{{state}}/change/"])
def test_the_pages_need_nothing_that_a_strict_policy_forbids(path: str, admin_client: Client) -> None:
    """No inline style, no inline script, no event attribute, nothing from another host."""
    made = letter()
    state = ProjectionState.objects.create(projection_name="orders", projection_version=1, halt_cause="why")

    page = page_of(admin_client, path.format(letter=made.pk, state=state.pk))

    assert "/static/scriba/admin.css" in page
    assert not re.search(r"<style|\sstyle=|\son\w+=", page)
    assert not [
        tag for tag in re.findall(r"<script[^>]*>", page) if "src=" not in tag and "application/json" not in tag
    ]
    assert not re.findall(r'(?:src|href)="(?:https?:)?//', page)


# --- permissions -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [LIST, PROJECTIONS])
def test_nothing_can_be_added_changed_or_deleted(path: str, admin_client: Client) -> None:
    """Not even by a superuser: these rows belong to the engine."""
    made = letter()
    state = ProjectionState.objects.create(projection_name="orders", projection_version=1)
    one = f"{path}{made.pk if path == LIST else state.pk}"

    assert admin_client.get(f"{path}add/").status_code == 403
    assert admin_client.post(f"{one}/change/", {"status": "discarded", "wish": "stopped"}).status_code == 403
    assert admin_client.post(f"{one}/delete/", {"post": "yes"}).status_code == 403
    assert "delete_selected" not in page_of(admin_client, path)
    made.refresh_from_db()
    state.refresh_from_db()
    assert (made.status, state.wish) == ("open", "running")


@pytest.mark.parametrize(("allowed", "status"), [(True, 200), (False, 403)])
def test_looking_needs_the_permission(allowed: bool, status: int, client: Client, db: None) -> None:
    """Payloads are personal data: staff without the permission sees nothing."""
    user = User.objects.create_user("operator", is_staff=True)
    if allowed:
        user.user_permissions.add(Permission.objects.get(codename="view_deadletter"))
    client.force_login(user)

    assert client.get(LIST).status_code == status
    assert client.get(f"{LIST}{letter().pk}/change/").status_code == status


# --- projections -------------------------------------------------------------------------------------------------


def test_a_halted_projection_is_shown_with_its_cause(admin_client: Client) -> None:
    """The list shows the halt, the page the whole cause."""
    state = ProjectionState.objects.create(
        projection_name="orders", projection_version=2, wish="paused", wish_by="eve", halt_cause="no such column\nline 2",
        halt_label="42703", halted_at=datetime.now(UTC),
    )  # fmt: skip

    (row,) = rows(page_of(admin_client, PROJECTIONS))
    page = page_of(admin_client, f"{PROJECTIONS}{state.pk}/change/")

    for text in ("orders:2", "paused halted", "by eve", "42703"):
        assert text in row
    assert "no such column\nline 2" in page


# --- several databases -------------------------------------------------------------------------------------------


def test_one_database_needs_no_filter(admin_client: Client) -> None:
    """Where there is nothing to choose, nothing is offered."""
    letter()

    assert "By database" not in page_of(admin_client, LIST)


@pytest.mark.django_db(databases=["default", "other"])
def test_each_database_is_shown_by_itself(admin_client: Client, elsewhere: None) -> None:
    """The filter chooses; the links to single rows keep the choice, although ids repeat between databases."""
    here = letter(1, event_data={"where": "here"})
    there = letter(2, using="other", id=here.pk, event_data={"where": "there"})

    page = page_of(admin_client, LIST, database="other")
    link = unescape(re.findall(rf'href="([^"]*/{there.pk}/change/[^"]*)"', page)[0])

    assert "By database" in page
    assert positions(page) == {2}
    assert positions(page_of(admin_client, LIST)) == {1}
    assert "there" in page_of(admin_client, link)
    assert "here" in page_of(admin_client, f"{LIST}{here.pk}/change/")


@pytest.mark.django_db(databases=["default", "other"])
def test_an_unknown_database_is_not_read(admin_client: Client, elsewhere: None) -> None:
    """The parameter names one of the projections' databases, nothing else."""
    letter(1)

    assert positions(page_of(admin_client, LIST, database="no-such-alias")) == {1}


def test_the_admin_passes_djangos_own_checks() -> None:
    """No admin.E… of our two classes."""
    assert run_checks(tags=[Tags.admin]) == []
    assert reverse("admin:scriba_deadletter_changelist") == LIST
