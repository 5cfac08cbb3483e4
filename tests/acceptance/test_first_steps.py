"""The first commands on an empty database: each says what is missing, and ``migrate`` brings it."""

from __future__ import annotations

import re

from tests.acceptance.conftest import Shop
from tests.support.processes import REPOSITORY

DEMO = 'python -m pip install -e ".[demo]" && python manage.py demo'
TEST = 'python -m pip install -e ".[test]" && python -m pytest'


def test_migrate_runs_on_an_empty_database(empty_shop: Shop) -> None:
    """The checks that miss tables do not stand in the way of the command that makes them."""
    said = empty_shop.manage("migrate")

    assert "scriba.0001_initial" in said
    assert "scriba.E" not in said


def test_missing_migrations_are_one_message_with_its_cure(empty_shop: Shop) -> None:
    """Without tables nothing starts, the check fails, and both name the command."""
    ran = empty_shop.manage("run_projections", "--until-caught-up", succeed=False)
    checked = empty_shop.manage("check", "--database", "default", succeed=False)

    for said in (ran, checked):
        assert "migrate --database=default" in said
        assert "Traceback" not in said


def test_the_readmes_commands_are_the_ones_that_are_run() -> None:
    """README's first screens hold exactly two commands, and what is run before a release is the second, word for word."""
    readme = (REPOSITORY / "README.md").read_text().splitlines()
    ci = (REPOSITORY / ".ci" / "run").read_text()

    assert [line for line in readme if line.startswith("python ")] == [DEMO, TEST]
    assert re.search(rf"^{re.escape(TEST)}$", ci, re.MULTILINE)


def test_the_example_works_where_nobody_has_set_anything(shop: Shop) -> None:
    """The example project checks clean, with no migration missing and no warning."""
    assert "no issues" in shop.manage("check")
    assert "No changes detected" in shop.manage("makemigrations", "--check", "--dry-run")
