"""A dry run in the admin: what would pass now is said, row by row, and nothing is left behind; whoever else clicks."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from html import unescape
from typing import Any

import pytest
from django.contrib.auth.models import Permission, User
from django.db import connection
from django.test import Client

from scriba import Delete, Insert, Skip, Update, registry, rehearsal
from scriba.models import Audit, DeadLetter
from scriba.panel import rehearsing
from scriba.registry import Projection
from tests.support.waiting import in_thread, wait_until
from tests.support.world import World
from tests.testapp.models import Applied, Row

LIST = "/admin/scriba/deadletter/"
pytestmark = pytest.mark.django_db(transaction=True)


class Mended:
    """A handler that fails until it is told what to do instead."""

    def __init__(self) -> None:
        self.does: Any = None
        self.calls = 0

    def __call__(self, data: Any, meta: Any) -> Any:
        self.calls += 1
        if self.does is None:
            raise LookupError("not yet")
        return self.does(data, meta)


@pytest.fixture
def world(scratch_name: str) -> World:
    return World(scratch_name)


@pytest.fixture
def handler() -> Mended:
    return Mended()


@pytest.fixture
def projection(world: World, handler: Mended, monkeypatch: pytest.MonkeyPatch) -> Projection:
    """The world's projection, found by its name like a declared one."""
    made = world.projection(handler)
    monkeypatch.setitem(registry._registry, made.identity, made)
    return made


@pytest.fixture
def operator(transactional_db: None, client: Client) -> Client:
    client.force_login(User.objects.create_superuser("ann"))
    return client


def fail(world: World, projection: Projection, *streams: str) -> list[DeadLetter]:
    world.append(*streams)
    world.run(projection)
    letters = world.letters()
    assert len(letters) == len(streams)
    return letters


def selected(*letters: DeadLetter, **more: Any) -> dict[str, Any]:
    return {"action": "rehearse_selected", "_selected_action": [letter.pk for letter in letters], **more}


def page_of(answer: Any) -> str:
    assert answer.status_code == 200
    return str(answer.content.decode())


def outcomes(page: str) -> dict[int, str]:
    return {int(pk): found for pk, found in re.findall(r'data-letter="(\d+)" data-outcome="(\w+)"', page)}


def text_of(page: str) -> str:
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", page)).split())


def user_with(client: Client, *codenames: str) -> Client:
    user = User.objects.create_user("bob", is_staff=True)
    user.user_permissions.set(Permission.objects.filter(codename__in=codenames))
    client.force_login(user)
    return client


# --- what is said -----------------------------------------------------------------------------------------------


def test_one_letter_is_tried_from_its_page(
    world: World, projection: Projection, handler: Mended, operator: Client
) -> None:
    """The button is there while the letter is unresolved; the rows are shown before and after; nothing is changed."""
    (letter,) = fail(world, projection, "a")
    Row.objects.create(id="r1", status="new", name="Åsa")
    Row.objects.create(id="r2", name="<b>gone</b>")
    handler.does = lambda data, meta: [
        Update(Row, {"id": "r1"}, status="shipped"),
        Delete(Row, {"id": "r2"}),
        Insert(Row(id="r3", amount=12)),
    ]
    button = f"{LIST}{letter.pk}/rehearse/"
    assert f'action="{button}"' in page_of(operator.get(f"{LIST}{letter.pk}/change/"))

    page = page_of(operator.post(button))

    assert outcomes(page) == {letter.pk: "passes"}
    for text in (
        "Dry run: 1 of 1 would pass", "changed testapp.Row r1", "status new shipped", "deleted testapp.Row r2",
        "name <b>gone</b>", "new testapp.Row r3", "code NULL", "testapp_row +1 ~1 \N{MINUS SIGN}1",
    ):  # fmt: skip
        assert text in text_of(page), text
    assert "name Åsa" not in text_of(page), "what stays as it is, is no difference"
    assert sorted(Row.objects.values_list("id", "status")) == [("r1", "new"), ("r2", "new")]
    letter.refresh_from_db()
    assert (letter.status, letter.wish, letter.attempts) == ("open", "", 1)
    assert not Audit.objects.exists()


def test_a_selection_is_counted_and_those_that_pass_are_offered_for_a_replay(
    world: World, projection: Projection, handler: Mended, operator: Client
) -> None:
    """From a dry run to the replay of exactly those letters, with the usual question between."""
    good, bad, late = fail(world, projection, "good", "bad", "late")
    world.execute("UPDATE scriba_positions SET applied_position = position + 1 WHERE stream_id = 'late'")
    handler.does = lambda data, meta: 1 / 0 if meta.stream_id == "bad" else Skip()

    page = page_of(operator.post(LIST, selected(good, bad, late)))

    assert outcomes(page) == {good.pk: "skips", bad.pk: "fails", late.pk: "refused"}
    assert "1 ZeroDivisionError: division by zero" in text_of(page)
    assert "1 a later event of the same key has been applied already" in text_of(page)
    form = page[page.index('value="replay_selected"') : page.index("Replay the one that would pass")]
    assert re.findall(r'name="_selected_action" value="(\d+)"', form) == [str(good.pk)]

    path = f"{LIST}?status=all"
    question = page_of(operator.post(path, {"action": "replay_selected", "_selected_action": [good.pk]}))
    assert "Replay 1 dead letter?" in text_of(question)
    assert not DeadLetter.objects.exclude(wish="").exists()
    operator.post(path, {"action": "replay_selected", "_selected_action": [good.pk], "sure": "yes"})
    assert set(DeadLetter.objects.exclude(wish="").values_list("pk", flat=True)) == {good.pk}


def test_out_of_order_can_be_tried_too(world: World, projection: Projection, handler: Mended, operator: Client) -> None:
    """The page offers it where it was refused, and the replay that follows knows of it."""
    (late,) = fail(world, projection, "late")
    world.execute("UPDATE scriba_positions SET applied_position = position + 1")
    handler.does = lambda data, meta: Skip()
    offered = page_of(operator.post(LIST, selected(late)))

    page = page_of(operator.post(LIST, selected(late, allow_out_of_order="on")))

    assert 'name="allow_out_of_order"' in offered
    assert outcomes(page) == {late.pk: "skips"}
    assert '<input type="hidden" name="allow_out_of_order" value="on">' in page
    question = operator.post(
        f"{LIST}?status=all", {**selected(late, allow_out_of_order="on"), "action": "replay_selected"}
    )
    assert 'name="allow_out_of_order" checked' in page_of(question)


def test_a_group_is_tried_with_one_click(
    world: World, projection: Projection, handler: Mended, operator: Client
) -> None:
    """The form above the list means all equal failures, on whatever page they are, and no other."""
    letters = fail(world, projection, "a", "b", "c")
    other = DeadLetter.objects.create(
        projection_name=world.name, projection_version=1, position=10**9, stream_id="z", event_type="T",
        error_kind="ValueError", error_message="", fingerprint="other",
    )  # fmt: skip
    page = page_of(operator.get(LIST))
    forms = re.findall(r'<form method="post" action="(\?[^"]+)" class="scriba-act">(.*?)</form>', page, re.DOTALL)
    action, body = next(form for form in forms if letters[0].fingerprint in form[0])
    fields = dict(re.findall(r'name="(\w+)" value="(\w+)"', body.split("<button")[0]))
    handler.does = lambda data, meta: Skip()

    result = page_of(operator.post(f"{LIST}{unescape(action)}", {**fields, "action": "rehearse_selected"}))

    assert outcomes(result) == {letter.pk: "skips" for letter in letters}
    assert other.pk not in outcomes(result)


def test_values_are_for_those_who_may_view_the_rows(
    world: World, projection: Projection, handler: Mended, client: Client
) -> None:
    """A read model may hold what its own admin would not show to this operator: then names only."""
    (letter,) = fail(world, projection, "a")
    Row.objects.create(id="secret-id", name="secret-name")
    handler.does = lambda data, meta: Update(Row, {"id": "secret-id"}, name="other-secret")
    permissions = ["view_deadletter", "change_deadletter"]

    blind = page_of(user_with(client, *permissions).post(LIST, selected(letter)))
    User.objects.get(username="bob").user_permissions.add(Permission.objects.get(codename="view_row"))
    seeing = page_of(client.post(LIST, selected(letter)))

    assert "secret" not in blind
    assert "changed testapp.Row name" in text_of(blind)
    assert "secret-name other-secret" in text_of(seeing)


def test_what_is_parked_behind_another_letter_waits(
    world: World, handler: Mended, operator: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tried alone it would tell nothing: its replay is refused until that of the letter before it."""
    parking = world.projection(handler, on_failure="park")
    monkeypatch.setitem(registry._registry, parking.identity, parking)
    head, follower = fail(world, parking, "a", "a")
    handler.does = lambda data, meta: Skip()

    alone = page_of(operator.post(LIST, selected(follower)))
    together = page_of(operator.post(LIST, selected(head, follower)))

    assert outcomes(alone) == {follower.pk: "waits"}
    assert f"parked behind letter {head.pk}" in text_of(alone)
    assert outcomes(together) == {head.pk: "skips", follower.pk: "skips"}


def test_letters_of_a_projection_that_is_gone_are_a_message(operator: Client) -> None:
    """There is no handler to try them with; the others of the selection are tried all the same."""
    gone = DeadLetter.objects.create(
        projection_name="gone",
        projection_version=1,
        position=1,
        stream_id="z",
        event_type="T",
        error_kind="",
        error_message="",
    )

    page = page_of(operator.post(LIST, selected(gone)))

    assert "nothing could be tried" in text_of(page)
    assert "gone:1 cannot be tried (1 of the letters): no projection 'gone'" in text_of(page)


def test_the_page_needs_nothing_that_a_strict_policy_forbids(
    world: World, projection: Projection, handler: Mended, operator: Client
) -> None:
    """No inline style, script or event attribute, nothing from another host."""
    fail(world, projection, "a", "b")
    handler.does = lambda data, meta: Insert(Applied(projection="p", stream_id="s", position=1))

    page = page_of(operator.post(LIST, selected(*world.letters())))

    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)|(?:src|href)=\"(?:https?:)?//", page)


# --- who may, and how ---------------------------------------------------------------------------------------------


def test_only_a_post_with_a_token_calls_a_handler(
    world: World, projection: Projection, handler: Mended, operator: Client
) -> None:
    """A handler may do more than write rows: no link, and no form of another site, calls it."""
    (letter,) = fail(world, projection, "a")
    handler.calls = 0
    careful = Client(enforce_csrf_checks=True)
    careful.force_login(User.objects.get(username="ann"))

    assert operator.get(f"{LIST}{letter.pk}/rehearse/").status_code == 302
    assert careful.post(f"{LIST}{letter.pk}/rehearse/").status_code == 403
    assert careful.post(LIST, selected(letter)).status_code == 403
    assert handler.calls == 0


def test_trying_needs_the_permission_to_resolve(
    world: World, projection: Projection, handler: Mended, client: Client
) -> None:
    """Who may only look sees no buttons, and is refused when posting by hand."""
    (letter,) = fail(world, projection, "a")
    handler.calls = 0
    user_with(client, "view_deadletter")

    assert client.post(f"{LIST}{letter.pk}/rehearse/").status_code == 403
    client.post(LIST, selected(letter))
    assert handler.calls == 0
    assert "rehearse" not in page_of(client.get(LIST)) + page_of(client.get(f"{LIST}{letter.pk}/change/"))


def test_a_request_in_a_transaction_tries_in_another_one(
    world: World, projection: Projection, handler: Mended, operator: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ATOMIC_REQUESTS the view is inside a transaction, in which no batch could be opened."""
    letters = fail(world, projection, "a")
    handler.does = lambda data, meta: Insert(Applied(projection="p", stream_id="s", position=1))
    monkeypatch.setitem(connection.settings_dict, "ATOMIC_REQUESTS", True)

    page = page_of(operator.post(LIST, selected(*letters)))

    assert outcomes(page) == {letters[0].pk: "passes"}
    assert not Applied.objects.exists()


# --- bounds -------------------------------------------------------------------------------------------------------


def test_what_was_left_out_is_said(
    world: World, projection: Projection, handler: Mended, operator: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten thousand letters are no reason for a request that never ends: neither by their number nor by their time."""
    letters = fail(world, projection, "a", "b", "c")
    handler.does = lambda data, meta: Skip()
    monkeypatch.setattr(rehearsing, "MOST_LETTERS", 2)

    some = page_of(operator.post(LIST, selected(*letters)))
    monkeypatch.setattr(rehearsing, "LONGEST_S", 0.0)
    one = page_of(operator.post(LIST, selected(*letters)))

    assert len(outcomes(some)) == 2
    assert "1 letter more was not tried" in text_of(some)
    assert len(outcomes(one)) <= 1
    assert re.search(r"[23] letters more were not tried", text_of(one))


def test_no_connection_is_left_behind(world: World, projection: Projection, handler: Mended, operator: Client) -> None:
    """The thread of a dry run closes what it has opened."""
    letters = fail(world, projection, "a")
    handler.does = lambda data, meta: Skip()
    count = (
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND backend_type = 'client backend'"
    )

    def backends() -> int:
        with connection.cursor() as cursor:
            cursor.execute(count)
            return int(cursor.fetchone()[0])

    before = backends()
    for _ in range(3):
        page_of(operator.post(LIST, selected(*letters)))

    wait_until(lambda: backends() <= before, what="the connections to be closed")


# --- two at once --------------------------------------------------------------------------------------------------


class Standing:
    """What a handler does that stands still until it is let go."""

    def __init__(self) -> None:
        self.reached, self.released = threading.Event(), threading.Event()

    def __call__(self, data: Any, meta: Any) -> Skip:
        self.reached.set()
        assert self.released.wait(30)
        return Skip()


@pytest.fixture
def standing() -> Iterator[Standing]:
    made = Standing()
    yield made
    made.released.set()


@pytest.mark.case("B15")
def test_two_operators_try_the_same_letter_at_once(
    world: World, projection: Projection, handler: Mended, operator: Client, standing: Standing,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The second one is told soon that it could not be tried just now, not that it would fail; the first gets its answer."""
    (letter,) = fail(world, projection, "a")
    monkeypatch.setattr(rehearsal, "LOCK_TIMEOUT", "50ms")
    handler.does = standing

    with in_thread(lambda: page_of(operator.post(LIST, selected(letter)))) as first:
        assert standing.reached.wait(30)
        second = page_of(operator.post(LIST, selected(letter)))
        standing.released.set()

    assert outcomes(second) == {letter.pk: "busy"}
    assert "could not be tried just now" in text_of(second)
    assert outcomes(first[0]) == {letter.pk: "skips"}


def test_a_discard_waits_for_a_dry_run_and_is_not_lost(
    world: World, projection: Projection, handler: Mended, operator: Client, standing: Standing
) -> None:
    """One operator rehearses while the other one gives the letter up."""
    (letter,) = fail(world, projection, "a")
    handler.does = standing

    with in_thread(lambda: page_of(operator.post(LIST, selected(letter)))) as tried:
        assert standing.reached.wait(30)
        discard = {**selected(letter, sure="yes"), "action": "discard_selected"}
        with in_thread(lambda: operator.post(LIST, discard).status_code) as discarded:
            standing.released.set()

    letter.refresh_from_db()
    assert (letter.wish, discarded) == ("discard", [302])
    assert outcomes(tried[0]) == {letter.pk: "skips"}


def test_a_letter_resolved_meanwhile_is_said_to_be(
    world: World, projection: Projection, handler: Mended, operator: Client
) -> None:
    """The list on the screen may be old."""
    (letter,) = fail(world, projection, "a")
    DeadLetter.objects.update(status="replayed")

    page = page_of(operator.post(LIST, selected(letter)))

    assert outcomes(page) == {letter.pk: "refused"}
    assert "resolved already" in text_of(page)
