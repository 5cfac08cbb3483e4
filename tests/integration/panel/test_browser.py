"""The live page in a real browser, under a strict content security policy: it renews itself, and its buttons work."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.db import connections
from django.test import Client

from scriba import Insert, Upsert, registry
from scriba.models import Audit, DeadLetter, ProjectionState, Segment
from tests.integration.panel.conftest import Scene
from tests.support.world import World
from tests.testapp.models import Child, Parent, Row

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or "/usr/bin/chromium"
pytestmark = [
    pytest.mark.skipif(not Path(CHROMIUM).exists(), reason="chromium is not installed"),
    pytest.mark.django_db(transaction=True, databases=["default", "other"]),
]
POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; form-action 'self'; base-uri 'none'"
LIVE = "/admin/scriba/projectionstate/live/"


@pytest.fixture(autouse=True)
def _orm_beside_a_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Playwright keeps an event loop in this thread; the rows are read between its steps."""
    monkeypatch.setenv("DJANGO_ALLOW_ASYNC_UNSAFE", "1")


@pytest.fixture
def browser(_orm_beside_a_loop: None) -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        connections.close_all()  # those of this thread beside the loop are others than those without it
        browser.close()


class Visit:
    """A signed-in operator's page, every document of which carries the policy."""

    def __init__(self, browser: Any, live_server: Any, **options: Any) -> None:
        self.complaints: list[str] = []
        self.url = live_server.url
        User.objects.create_superuser("ann", password="x")
        client = Client()
        client.login(username="ann", password="x")
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        context.add_cookies([{"name": "sessionid", "value": client.cookies["sessionid"].value, "url": self.url}])
        self.page = context.new_page()
        self.page.on("console", lambda message: self._hear(message.type, message.text))
        self.page.on("pageerror", lambda error: self._hear("error", str(error)))
        self.page.route("**/*", self._with_policy)

    def open(self, path: str = LIVE) -> Any:
        self.page.goto(f"{self.url}{path}")
        return self.page

    def card(self, name: str) -> Any:
        return self.page.locator(f'[data-projection="{name}"]')

    def _hear(self, kind: str, text: str) -> None:
        if kind in {"error", "warning"}:
            self.complaints.append(text)

    def _with_policy(self, route: Any) -> None:
        if route.request.resource_type != "document":
            route.continue_()
            return
        answer = route.fetch(max_redirects=0)
        route.fulfill(response=answer, headers={**answer.headers, "content-security-policy": POLICY})


def test_the_page_renews_itself_under_a_strict_policy(scene: Scene, browser: Any, live_server: Any) -> None:
    """What changes in the rows appears without a reload; the browser has nothing to complain about."""
    orders = scene.declare("orders")
    scene.rows(orders, watermark=90, head=100)
    visit = Visit(browser, live_server)
    page = visit.open()
    sync_api.expect(visit.card("orders:1")).to_contain_text("10 behind")
    page.evaluate("window.untouched = true")

    Segment.objects.update(watermark=100)

    sync_api.expect(visit.card("orders:1")).to_contain_text("caught up", timeout=15_000)
    assert page.evaluate("window.untouched") is True
    assert visit.complaints == []


def test_a_button_pauses_and_the_page_says_who(scene: Scene, browser: Any, live_server: Any) -> None:
    """One click, one wish, one entry in the records."""
    scene.rows(scene.declare("orders"))
    visit = Visit(browser, live_server)
    page = visit.open()

    visit.card("orders:1").get_by_role("button", name="pause").click()

    sync_api.expect(page.locator(".messagelist")).to_contain_text("orders:1 is paused.")
    sync_api.expect(visit.card("orders:1")).to_contain_text("Paused by ann (admin)")
    assert ProjectionState.objects.get().wish == "paused"
    assert Audit.objects.get().actor == "ann (admin)"
    assert visit.complaints == []


def test_a_stop_is_asked_for_twice(scene: Scene, browser: Any, live_server: Any) -> None:
    """The first click only asks; the reason that is given there is kept."""
    scene.rows(scene.declare("orders"))
    visit = Visit(browser, live_server)
    page = visit.open()

    visit.card("orders:1").get_by_role("button", name="stop").click()
    assert ProjectionState.objects.get().wish == "running"
    page.get_by_label("Why, for the records").fill("new disk")
    page.get_by_role("button", name="Yes, stop it").click()

    sync_api.expect(page.locator(".messagelist")).to_contain_text("orders:1 is stopped.")
    assert ProjectionState.objects.get().wish_reason == "new disk"
    assert visit.complaints == []


SCREENS = {
    "light": {},
    "dark": {"color_scheme": "dark"},
    "phone": {"viewport": {"width": 390, "height": 844}, "device_scale_factor": 2, "is_mobile": True},
}


def is_too_wide(page: Any) -> bool:
    """Say whether the page, or anything that does not scroll by itself, is wider than the screen."""
    return bool(
        page.evaluate(
            """() => {
                const width = document.scrollingElement.clientWidth;
                const scrolls = (e) => e && (/auto|scroll|hidden/.test(getComputedStyle(e).overflowX) || scrolls(e.parentElement));
                return document.scrollingElement.scrollWidth > width + 1
                    || [...document.querySelectorAll("#content *")].some(
                        (e) => e.getBoundingClientRect().right > width + 1 && !scrolls(e.parentElement));
            }"""
        )
    )


def keep(page: Any, name: str) -> None:
    if folder := os.environ.get("SCRIBA_SCREENSHOTS"):
        page.screenshot(path=f"{folder}/{name}.png", full_page=bool(os.environ.get("SCRIBA_SCREENSHOTS_WHOLE")))


@pytest.mark.parametrize(("name", "options"), SCREENS.items())
def test_the_page_fits_every_screen(
    name: str, options: dict[str, Any], scene: Scene, browser: Any, live_server: Any
) -> None:
    """A busy night, on a desk, in the dark and on a phone: nothing is wider than the screen."""
    scene.busy_night()
    visit = Visit(browser, live_server, **options)
    page = visit.open()

    assert not is_too_wide(page)
    assert page.locator(".scriba-card").count() == 6
    assert visit.complaints == []
    keep(page, f"live-{name}")


# --- dead letters -------------------------------------------------------------------------------------------------

LETTERS = "/admin/scriba/deadletter/"


class Mended:
    """A handler as it is before a fix, and after."""

    is_mended = False

    def __call__(self, data: Any, meta: Any) -> Any:
        if meta.stream_id == "order-3":
            raise ValueError("the voucher SUMMER-2025 is not known")
        if not self.is_mended:
            raise KeyError("shipping_address")
        row = {"id": meta.stream_id, "code": "INV-7", "name": "Åsa Öberg", "amount": Decimal("1249.50")}
        return [Upsert(Row(**row, status="shipped")), Insert(Child(id=meta.stream_id, parent_id="p"))]


@pytest.fixture
def dead(monkeypatch: pytest.MonkeyPatch) -> World:
    """Three real letters of a real run, and a fix."""
    world = World("shipments")
    handler = Mended()
    made = world.projection(handler)
    monkeypatch.setattr(registry, "_registry", {made.identity: made})
    Parent.objects.create(id="p")
    Row.objects.create(id="order-1", code="INV-7", name="Åsa Öberg", amount=Decimal("1249.50"), status="paid")
    world.append("order-1", "order-2", "order-3")
    world.run(made)
    handler.is_mended = True
    return world


@pytest.mark.parametrize(("name", "options"), SCREENS.items())
def test_a_dry_run_leads_to_a_replay(
    name: str, options: dict[str, Any], dead: World, browser: Any, live_server: Any
) -> None:
    """From the list to what would pass, to the replay of just that: on a desk, in the dark and on a phone."""
    visit = Visit(browser, live_server, **options)
    page = visit.open(LETTERS)
    assert not is_too_wide(page)
    keep(page, f"letters-{name}")

    page.locator(".scriba-act").first.get_by_role("button", name="Dry run").click()
    sync_api.expect(page.locator("h1").last).to_contain_text("Dry run: 1 of 2 would pass")
    visit.open(LETTERS)
    page.locator("#action-toggle").check()
    page.locator("select[name=action]").select_option("rehearse_selected")
    page.locator("button[name=index]").click()

    sync_api.expect(page.locator("h1").last).to_contain_text("Dry run: 1 of 3 would pass")
    sync_api.expect(page.locator(".scriba-after", has_text="shipped")).to_be_visible()
    assert not is_too_wide(page)
    keep(page, f"dry-run-{name}")
    assert list(Row.objects.values_list("id", "status")) == [("order-1", "paid")]

    page.get_by_role("button", name="Replay the one that would pass").click()
    sync_api.expect(page.locator("h1").last).to_contain_text("Replay 1 dead letter?")
    page.get_by_role("button", name="Yes, replay").click()

    sync_api.expect(page.locator(".messagelist")).to_contain_text("1 to be replayed")
    assert dict(DeadLetter.objects.values_list("stream_id", "wish")) == {
        "order-1": "replay",
        "order-2": "",
        "order-3": "",
    }
    assert visit.complaints == []


@pytest.mark.parametrize(("name", "options"), SCREENS.items())
def test_one_letter_is_tried_from_its_page(
    name: str, options: dict[str, Any], dead: World, browser: Any, live_server: Any
) -> None:
    """Everything about a letter fits the screen; its button says what is still wrong."""
    (letter,) = dead.letters(stream_id="order-3")
    visit = Visit(browser, live_server, **options)
    page = visit.open(f"{LETTERS}{letter.pk}/change/")
    assert not is_too_wide(page)
    keep(page, f"letter-{name}")

    page.get_by_role("button", name="Dry run").click()

    sync_api.expect(page.locator(".scriba-try-reason")).to_contain_text(
        "ValueError: the voucher SUMMER-2025 is not known"
    )
    assert visit.complaints == []


@pytest.mark.parametrize(("name", "options"), SCREENS.items())
def test_old_letters_are_purged_after_a_question(
    name: str, options: dict[str, Any], dead: World, browser: Any, live_server: Any
) -> None:
    """The age is chosen, the question names what goes, the click deletes it."""
    long_ago = datetime.now(UTC) - timedelta(days=40)
    DeadLetter.objects.exclude(stream_id="order-3").update(status="replayed", resolved_at=long_ago)
    visit = Visit(browser, live_server, **options)
    page = visit.open(LETTERS)
    page.get_by_role("link", name="Purge old ones").click()
    sync_api.expect(page.locator(".scriba-empty")).to_contain_text("not long enough ago")

    page.get_by_label("Resolved more than").fill("30")
    page.get_by_role("button", name="Show").click()
    sync_api.expect(page.locator(".scriba-row")).to_contain_text("shipments:1")
    assert not is_too_wide(page)
    keep(page, f"purge-{name}")
    page.get_by_role("button", name="Yes, delete these 2 letters").click()

    sync_api.expect(page.locator(".messagelist")).to_contain_text("2 resolved dead letters were deleted.")
    assert [letter.stream_id for letter in dead.letters()] == ["order-3"]
    assert visit.complaints == []
