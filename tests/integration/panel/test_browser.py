"""The live page in a real browser, under a strict content security policy: it renews itself, and its buttons work."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client

from scriba.models import Audit, ProjectionState, Segment
from tests.integration.panel.conftest import Scene

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


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("light", {}),
        ("dark", {"color_scheme": "dark"}),
        ("phone", {"viewport": {"width": 390, "height": 844}, "device_scale_factor": 2, "is_mobile": True}),
    ],
)
def test_the_page_fits_every_screen(
    name: str, options: dict[str, Any], scene: Scene, browser: Any, live_server: Any
) -> None:
    """A busy night, on a desk, in the dark and on a phone: nothing is wider than the screen."""
    scene.busy_night()
    visit = Visit(browser, live_server, **options)
    page = visit.open()

    wide = page.evaluate("document.scrollingElement.scrollWidth > document.scrollingElement.clientWidth + 1")

    assert not wide
    assert page.locator(".scriba-card").count() == 6
    assert visit.complaints == []
    if folder := os.environ.get("SCRIBA_SCREENSHOTS"):
        page.screenshot(path=f"{folder}/live-{name}.png", full_page=bool(os.environ.get("SCRIBA_SCREENSHOTS_WHOLE")))
