"""System checks: each mistake has an id, a sentence and a hint, and nothing here opens a connection.

What needs a server is in ``tests/integration/commands/test_database_checks.py``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.contrib.auth.models import Group, Permission
from django.core.checks import CheckMessage, Error, Tags, Warning, registry, run_checks  # noqa: A004 - Django's word
from django.db.utils import ConnectionHandler
from django.test import override_settings

from scriba import SERIAL, Skip, checks, projection
from scriba.registry import Projection, all_projections, find, forget

POSTGRESQL = {"ENGINE": "django.db.backends.postgresql", "NAME": "nowhere", "HOST": "192.0.2.1"}


class Source:
    """A source that has something to say."""

    def __init__(self, *said: CheckMessage) -> None:
        self.said = said

    def subscribe(self, identity: object, shards: object) -> None: ...

    def identity(self) -> str:
        return "source"

    def checks(self) -> list[CheckMessage]:
        return list(self.said)


class Target:
    """A target on a database alias, or on none."""

    def __init__(self, using: str | None = "default", *said: CheckMessage) -> None:
        if using is not None:
            self.using = using
        self.said = said
        self.asked: list[Any] = []

    def open(self, identity: object, *, inline: bool = False) -> None: ...

    def valid_result(self, result: object) -> bool:
        return True

    def classify(self, error: Exception) -> None: ...

    def identity(self) -> str:
        return "target"

    def checks(self, models: Any) -> list[CheckMessage]:
        self.asked.append(models)
        return list(self.said)


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    """Leave the registry as it was."""
    known = {made.identity for made in all_projections()}
    yield
    for made in all_projections():
        if made.identity not in known:
            forget(made)


@pytest.fixture
def databases(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ConnectionHandler]:
    """Put Django's own wrappers for other DATABASES in place; none of them is ever connected."""

    def use(**others: Any) -> ConnectionHandler:
        handler = ConnectionHandler({"default": POSTGRESQL, **others})
        monkeypatch.setattr(checks, "connections", handler)
        return handler

    return use


def declare(name: str = "subject", **options: Any) -> Projection:
    """Declare a projection; by default nothing is wrong with it."""

    @projection(name, **{"source": Source(), "target": Target(), "parallelism": 2, **options})
    def handler(event: object, meta: object) -> Skip:
        return Skip()

    return find(handler)


def ids(messages: list[CheckMessage]) -> list[str | None]:
    return [message.id for message in messages]


def test_a_sound_projection_is_not_remarked_on(databases: Callable[..., Any]) -> None:
    """No message without a mistake: a warning that always shows is never read."""
    databases()

    assert checks.problems([declare()]) == []


def test_the_checks_run_with_manage_py_check() -> None:
    """They are registered when the app is loaded, under a tag of their own."""
    registered = registry.registry.get_checks()

    assert checks.check_projections in registered
    assert checks.check_database in registered
    assert "scriba" in registry.registry.tags_available()


def test_nothing_is_asked_of_a_database_without_its_name(databases: Callable[..., Any]) -> None:
    """Plain ``check`` connects nowhere: only ``--database`` names what may be looked at."""
    databases()
    declare()

    assert Tags.database in checks.check_database.tags  # type: ignore[attr-defined]  # set by the decorator
    assert checks.check_database(None) == []
    assert checks.check_database(None, databases=["other"]) == []


# --- declarations ------------------------------------------------------------------------------------------------


def test_two_projections_under_one_identity_are_an_error() -> None:
    """Only the last one would run: both places are named."""
    declare()
    projection("subject", source=Source(), target=Target(), parallelism=1)(lambda event, meta: Skip())

    (error,) = [message for message in run_checks(tags=["scriba"], databases=[]) if message.id == "scriba.E001"]

    assert "declare.<locals>.handler" in error.msg
    assert "<lambda>" in error.msg


def test_two_versions_are_no_duplicates() -> None:
    """(name, version) is the identity."""
    declare()
    declare(version=2)

    assert "scriba.E001" not in ids(run_checks(tags=["scriba"], databases=[]))


@pytest.mark.parametrize(
    ("name", "hint"), [("orders_v2", "Name it 'orders' with version=2"), ("a_b_v10", "version=10")]
)
def test_a_version_in_the_name_is_a_warning(name: str, hint: str, databases: Callable[..., Any]) -> None:
    """Versions belong into their own option, where siblings are shown side by side."""
    databases()

    (warning,) = checks.problems([declare(name)])

    assert warning.id == "scriba.W002"
    assert hint in str(warning.hint)


@pytest.mark.parametrize("name", ["orders_v", "v2", "orders_v2_new", "orders2"])
def test_other_names_are_fine(name: str, databases: Callable[..., Any]) -> None:
    """Only a name that ends in ``_v<digits>`` carries a version."""
    databases()

    assert checks.problems([declare(name)]) == []


@pytest.mark.case("B20")
def test_an_async_handler_behind_a_wrapper_is_an_error(databases: Callable[..., Any]) -> None:
    """The decorator refuses a plain coroutine function; a wrapped one, or a callable object, is found here."""
    databases()

    async def coroutine(event: object, meta: object) -> Skip:
        return Skip()

    @functools.wraps(coroutine)
    def wrapper(event: object, meta: object) -> Any:
        return coroutine(event, meta)

    class Handler:
        async def __call__(self, event: object, meta: object) -> Skip:
            return Skip()

    for handler in (wrapper, Handler()):
        made = projection("subject", source=Source(), target=Target(), parallelism=1)(handler)
        assert ids(checks.problems([find(made)])) == ["scriba.E006"]


def test_one_read_model_of_two_projections_is_a_warning(databases: Callable[..., Any]) -> None:
    """Two cursors over one table overwrite each other, versions of one name included."""
    databases()
    both = [
        declare("a", models=[Group, Permission]),
        declare("b", models=[Group]),
        declare("b", version=2, models=[Group]),
    ]

    (warning,) = checks.problems(both)

    assert warning.id == "scriba.W012"
    assert "3 projections write the read model Group: a:1, b:1, b:2" in warning.msg


# --- sources and targets -----------------------------------------------------------------------------------------


def test_sources_and_targets_are_asked(databases: Callable[..., Any]) -> None:
    """What they find appears as it is; the target is told which read models there are."""
    databases()
    of_source, of_target = Error("no order", id="scriba.E050"), Warning("save() is overridden", id="scriba.W060")
    target = Target("default", of_target)

    found = checks.problems([declare(source=Source(of_source), target=target, models=[Group])])

    assert found == [of_target, of_source]
    assert target.asked == [(Group,)]


# --- databases ---------------------------------------------------------------------------------------------------


def test_a_database_that_cannot_serve_is_left_to_the_target(databases: Callable[..., Any]) -> None:
    """The target says what is wrong with its alias; nothing here fails because of it, or says it twice."""
    databases(lite={"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"})
    wrong = Error("no such alias", id="scriba.E100")

    found = checks.problems([declare("a", target=Target("nowhere", wrong)), declare("b", target=Target("lite"))])

    assert found == [wrong]


def test_the_older_driver_is_an_error(databases: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Django falls back to psycopg2 when it is all there is: Scriba says so instead of failing later."""
    handler = databases()

    class psycopg2: ...  # noqa: N801 - the module's name

    monkeypatch.setattr(handler["default"], "Database", psycopg2)

    (error,) = checks.problems([declare()])

    assert error.id == "scriba.E013"
    assert "psycopg[binary]>=3.2" in str(error.hint)


def test_a_target_without_an_alias_is_left_alone(databases: Callable[..., Any]) -> None:
    """A target that is no Django database has its own checks."""
    databases()

    assert checks.problems([declare(target=Target(None))]) == []


# --- connection budget -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pool", "lanes", "expected"),
    [
        (None, 100, []),
        (True, 4, []),  # psycopg_pool opens four
        (True, 5, ["scriba.W007"]),
        ({"max_size": 8}, 8, []),
        ({"max_size": 7}, 8, ["scriba.W007"]),
        ({"min_size": 9}, 9, []),
        ({"min_size": 2, "max_size": None}, 3, ["scriba.W007"]),
    ],
)
def test_a_pool_has_a_connection_for_each_lane(
    pool: Any,
    lanes: int,
    expected: list[str],
    databases: Callable[..., Any],
) -> None:
    """A lane without a connection waits for another one: parallelism that is paid for and not had."""
    databases(pooled={**POSTGRESQL, "OPTIONS": {"pool": pool}})

    assert ids(checks.problems([declare(target=Target("pooled"), parallelism=lanes)])) == expected


def test_a_pool_that_is_small_for_all_together_is_a_warning(databases: Callable[..., Any]) -> None:
    """Each would fit alone; ``run_projections`` without a name runs them all in one process."""
    databases(pooled={**POSTGRESQL, "OPTIONS": {"pool": {"max_size": 3}}})

    (warning,) = checks.problems([declare(name, target=Target("pooled")) for name in ("a", "b")])

    assert warning.id == "scriba.W008"
    assert "4 lanes together" in warning.msg


def test_global_order_needs_one_connection(databases: Callable[..., Any]) -> None:
    """``SERIAL`` runs one lane, whatever `parallelism` says."""
    databases(pooled={**POSTGRESQL, "OPTIONS": {"pool": {"max_size": 1}}})

    assert checks.problems([declare(target=Target("pooled"), parallelism=50, partition_by=SERIAL)]) == []


# --- settings ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [{"lease": 5}, {"lease_s": "5"}, ["lease_s"]])
def test_a_wrong_setting_is_an_error(wrong: object) -> None:
    """The check says the sentence that the start would fail with."""
    with override_settings(SCRIBA=wrong):
        found = run_checks(tags=["scriba"], databases=[])

    assert "scriba.E005" in ids(found)


def test_a_right_setting_is_not_remarked_on() -> None:
    """The counterpart: a valid setting gives no message."""
    with override_settings(SCRIBA={"lease_s": 5}):
        assert "scriba.E005" not in ids(run_checks(tags=["scriba"], databases=[]))
