"""Fixtures and profiles of every tier. The database is started by tests/support/server.py."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator

import psycopg
import pytest
from hypothesis import HealthCheck, settings

from tests.support import cases, leftovers
from tests.support.processes import database_url

_numbers = itertools.count(1)

settings.register_profile(
    "default",
    deadline=None,
    max_examples=50,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.differing_executors],
)
settings.register_profile("ci", settings.get_profile("default"), max_examples=500)
settings.load_profile("ci" if os.environ.get("SCRIBA_HYPOTHESIS") == "ci" else "default")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cases", action="store_true", help="say which failure cases the collected tests prove; run nothing"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if wrong := cases.unknown(items):
        raise pytest.UsageError("\n".join(wrong))
    if config.getoption("--cases"):
        config.stash[PROOFS] = cases.report(items)
        items.clear()
    if os.environ.get("SCRIBA_SLOW"):
        return
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.skip(reason="slow: runs with SCRIBA_SLOW=1, in CI's full pass"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    yield  # its fixtures are gone
    leftovers.check(item)


PROOFS = pytest.StashKey[list[str]]()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for line in config.stash.get(PROOFS, []):
        terminalreporter.write_line(line)


@pytest.fixture
def scratch_name() -> str:
    """A projection name that no other test uses: isolation without flushing."""
    return f"p{os.getpid()}-{next(_numbers)}"


@pytest.fixture
def postgres(transactional_db: None) -> Iterator[psycopg.Connection]:
    """A direct connection (autocommit) to the test database, beside Django's."""
    with psycopg.connect(database_url(), autocommit=True) as connection:
        yield connection


@pytest.fixture
def second_database(request: pytest.FixtureRequest) -> str:
    """The alias of a second database on the same server; the test's marker has to name it.

    ``@pytest.mark.django_db(transaction=True, databases=["default", "other"])``
    """
    marker = request.node.get_closest_marker("django_db")
    if marker is None or "other" not in marker.kwargs.get("databases", []):
        message = 'second_database needs @pytest.mark.django_db(databases=["default", "other"], …) on the test'
        raise pytest.UsageError(message)
    request.getfixturevalue("transactional_db" if marker.kwargs.get("transaction") else "db")
    return "other"
