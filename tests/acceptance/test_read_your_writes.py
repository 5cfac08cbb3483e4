"""The recipes of "Let a reader see its own write", as the page shows them, with a real engine behind them."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
from django.db import connection
from django.test import Client
from django.urls import clear_url_caches, path

from scriba import Insert, registry
from tests.support.processes import REPOSITORY
from tests.support.waiting import in_thread, wait_until
from tests.support.world import World
from tests.testapp.models import Event, Row

PAGE = REPOSITORY / "docs/howto/read-your-writes.md"
TUTORIAL = REPOSITORY / "docs/tutorial/first-projection.md"
BLOCK = re.compile(r"^```\{code-block\} python\n:caption: ([^\n]+)\n\n(.*?)^```$", re.MULTILINE | re.DOTALL)

pytestmark = pytest.mark.django_db(transaction=True)


class Desk:
    """A handler that makes rows, and that can be held up or be made to fail."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.open.set()
        self.reached = threading.Event()
        self.fails = False

    def __call__(self, data: Any, meta: Any) -> Insert:
        self.reached.set()
        assert self.open.wait(30)
        if self.fails:
            raise ValueError("no such voucher")
        return Insert(Row(id=meta.stream_id, name=data["customer"]))


class Rows:
    """The tutorial's event model, over the tests' event table."""

    @staticmethod
    def append(stream_id: str, event: Any) -> Event:
        return Event.objects.create(stream_id=stream_id, type=type(event).__name__, data=dict(vars(event)))


@pytest.fixture
def desk() -> Desk:
    return Desk()


@pytest.fixture
def world(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """The projection "orders", running in this process."""
    world = World("orders")
    made = world.projection(desk)
    monkeypatch.setitem(registry._registry, made.identity, made)
    with world.running(made):
        yield world
        desk.open.set()


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The page's modules, written down nowhere: the code is compiled from the page itself. Returns its views."""
    files: dict[str, str] = {}
    for page in (TUTORIAL, PAGE):
        for caption, code in BLOCK.findall(page.read_text()):
            name, _, at_the_end = caption.partition(" ")
            files[name] = files.get(name, "") + code if at_the_end else code
    models = ModuleType("orders.models")
    models.Event, models.OrderRow = Rows, Row  # type: ignore[attr-defined]
    package = ModuleType("orders")
    package.__path__ = []  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "orders", package)
    monkeypatch.setitem(sys.modules, "orders.models", models)
    for name in ("events", "reading", "views", "middleware"):
        module = ModuleType(f"orders.{name}")
        monkeypatch.setitem(sys.modules, f"orders.{name}", module)
        exec(compile(files[f"orders/{name}.py"], f"{PAGE.name}:orders/{name}.py", "exec"), module.__dict__)
    views = sys.modules["orders.views"]
    monkeypatch.setattr(
        "tests.urls.urlpatterns", [path("place", views.place), path("show/<order_id>", views.show, name="order")]
    )
    clear_url_caches()
    yield views
    monkeypatch.undo()
    clear_url_caches()


@pytest.fixture(params=[False, True], ids=["autocommit", "ATOMIC_REQUESTS"])
def _transactions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(connection.settings_dict, "ATOMIC_REQUESTS", request.param)


@pytest.fixture
def whole_site(site: ModuleType, settings: Any, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The same site with the middleware, and with a view that only appends."""
    (line,) = [code for caption, code in BLOCK.findall(PAGE.read_text()) if caption.startswith("mysite/settings.py")]
    names: dict[str, Any] = {"MIDDLEWARE": list(settings.MIDDLEWARE)}
    exec(line, names)
    settings.MIDDLEWARE = names["MIDDLEWARE"]
    plain = site.place.__wrapped__.__wrapped__  # without the decorators
    monkeypatch.setattr(
        "tests.urls.urlpatterns", [path("place", plain), path("show/<order_id>", site.show, name="order")]
    )
    clear_url_caches()
    return site


def place(client: Client) -> Any:
    answer = client.post("/place", {"customer": "ann", "amount": "12.50"})
    assert answer.status_code == 302
    return answer


# --- the decorator -----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_transactions")
def test_the_answer_leaves_when_the_row_is_there(world: World, site: ModuleType, client: Client) -> None:
    """Ten times in a row the page after the redirect finds the order."""
    for _ in range(10):
        answer = place(client)

        assert answer["X-Read-Model"] == "fresh"
        assert client.get(answer["Location"]).json()["found"] is True


@pytest.mark.usefixtures("_transactions")
def test_the_answer_waits_for_the_handler(world: World, site: ModuleType, desk: Desk, client: Client) -> None:
    """It is the wait that makes it fresh, not luck: while the handler stands still there is no answer."""
    desk.open.clear()

    with in_thread(lambda: place(client)["X-Read-Model"]) as answer:
        assert desk.reached.wait(30)
        wait_until(lambda: waited(world), what="somebody to wait for the event")
        assert answer == []
        assert not Row.objects.exists()
        desk.open.set()

    assert answer == ["fresh"]


@pytest.mark.usefixtures("_transactions")
def test_a_time_out_is_no_error_of_the_request(
    world: World, site: ModuleType, desk: Desk, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event is stored; the header says that the read model has not got it yet."""
    desk.open.clear()
    monkeypatch.setattr(
        "tests.urls.urlpatterns", [path("place", impatient(site)), path("show/<order_id>", site.show, name="order")]
    )
    clear_url_caches()

    answer = place(client)

    assert answer["X-Read-Model"] == "stale"
    assert client.get(answer["Location"]).json()["found"] is False
    desk.open.set()
    wait_until(lambda: client.get(answer["Location"]).json()["found"], what="the order")


def test_an_event_that_is_given_up_on_is_said_to_have_failed(
    world: World, site: ModuleType, desk: Desk, client: Client
) -> None:
    """At once, not after the time-out."""
    desk.fails = True

    assert place(client)["X-Read-Model"] == "failed"
    assert len(world.letters()) == 1


def test_a_view_that_fails_appends_nothing_and_does_not_wait(world: World, site: ModuleType, client: Client) -> None:
    """The transaction that the decorator opens is rolled back."""
    client.raise_request_exception = False

    assert client.post("/place", {"customer": "ann"}).status_code == 500
    assert not Event.objects.exists()


# --- the middleware ----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_transactions")
def test_the_next_page_of_the_visitor_waits(world: World, whole_site: ModuleType, desk: Desk, client: Client) -> None:
    """The write is answered at once; the page after it waits; somebody else's page does not."""
    desk.open.clear()
    answer = place(client)
    assert not answer.has_header("X-Read-Model")
    stranger = Client().get(answer["Location"]).json()

    with in_thread(lambda: client.get(answer["Location"]).json()) as page:
        assert desk.reached.wait(30)
        desk.open.set()

    assert stranger == {"found": False, "read_model": None}
    assert page == [{"found": True, "read_model": "fresh"}]
    assert client.get(answer["Location"]).json()["read_model"] is None, "waited for once"


@pytest.mark.usefixtures("_transactions")
def test_a_page_does_not_wait_for_ever(
    world: World, whole_site: ModuleType, desk: Desk, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is shown as it is, and can say so."""
    monkeypatch.setattr(sys.modules["orders.middleware"], "TIMEOUT_S", 0.05)
    desk.open.clear()
    answer = place(client)

    assert client.get(answer["Location"]).json() == {"found": False, "read_model": "stale"}


def waited(world: World) -> bool:
    return world.state.waited_at is not None


def impatient(site: ModuleType) -> Any:
    """The page's view with a shorter time-out than its decorator's usual one."""
    reading = sys.modules["orders.reading"]
    return reading.sees_own_writes("orders", timeout=0.05)(site.place.__wrapped__.__wrapped__)
