"""System checks that look at a server: only at the databases they are given, and never fatal when one is away."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from django.core.checks import CheckMessage
from django.core.management import call_command
from django.core.management.base import SystemCheckError
from django.db import connection, connections

from scriba import OrmTarget, checks
from scriba.registry import forget
from scriba.sources import TableSource
from tests.integration.commands.conftest import Subject, declare
from tests.testapp.models import Event

pytestmark = pytest.mark.django_db(databases=["default", "other"])


def ids(messages: list[CheckMessage]) -> list[str | None]:
    return [message.id for message in messages]


@pytest.fixture
def elsewhere(subject: Subject) -> Iterator[Subject]:
    """A projection that writes to the second database."""
    made = declare(f"{subject.name}-elsewhere", target=OrmTarget(using="other"))
    yield Subject(made)
    forget(made)


def test_sound_databases_are_not_remarked_on(subject: Subject, elsewhere: Subject) -> None:
    """Tables are there, connections suffice: no message."""
    assert checks.database_problems([subject.made, elsewhere.made], ["default", "other"]) == []


@pytest.mark.case("B13")
@pytest.mark.parametrize("table", ["scriba_positions", "scriba_dead_letters"])
def test_a_missing_table_is_an_error(table: str, subject: Subject) -> None:
    """Found by ``check --database``, not by the first failure; the hint is the command that makes it."""
    with connection.cursor() as cursor:
        cursor.execute(f"ALTER TABLE {table} RENAME TO away")

    (error,) = checks.database_problems([subject.made], ["default"])

    assert error.id == "scriba.E010"
    assert error.msg == f"The database 'default' has no {table}; {subject.name}:1 would write there."
    assert error.hint == "Run: python manage.py migrate --database=default"


def test_each_alias_is_looked_at_by_itself(subject: Subject, elsewhere: Subject) -> None:
    """A table that is missing in the second database is not looked for in the first, and not when nobody asks."""
    with connections["other"].cursor() as cursor:
        cursor.execute("ALTER TABLE scriba_lanes RENAME TO away")

    both = [subject.made, elsewhere.made]

    assert ids(checks.database_problems(both, ["default"])) == []
    assert ids(checks.database_problems(both, [])) == []
    (error,) = checks.database_problems(both, ["default", "other"])
    assert f"{elsewhere.name}:1 would write there" in error.msg
    assert f"{subject.name}:1" not in error.msg


def test_more_connections_than_the_server_allows_are_a_warning(subject: Subject) -> None:
    """Lanes and the four beside them, over all projections of the database, and the ear of the process."""
    greedy = declare(f"{subject.name}-greedy")
    forget(greedy)
    many = greedy.override(parallelism=100_000)

    (warning,) = checks.database_problems([many], ["default"])

    assert warning.id == "scriba.W009"
    assert "open 100005 connections" in warning.msg


def test_a_database_that_is_away_is_a_remark(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checking while a server is down must not fail: an image is built without any database."""
    from django.db.utils import ConnectionHandler

    away = {"ENGINE": "django.db.backends.postgresql", "NAME": "nowhere", "HOST": "127.0.0.1", "PORT": "1"}
    monkeypatch.setattr(checks, "connections", ConnectionHandler({"default": away}))

    (remark,) = checks.database_problems([subject.made], ["default"])

    assert remark.id == "scriba.I011"
    assert not remark.is_serious()
    assert "could not be looked at" in remark.msg


@pytest.mark.django_db(transaction=True)
def test_a_sources_server_is_looked_at_too(scratch_name: str) -> None:
    """What a source asks of its server appears beside the rest, once for all projections over it."""
    both = [declare(f"{scratch_name}-{n}", source=TableSource(Event)) for n in (1, 2)]
    for made in both:
        forget(made)

    with connection.cursor() as cursor:
        cursor.execute("ALTER SEQUENCE testapp_event_id_seq CACHE 50")
        try:
            found = checks.database_problems(both, ["default"])
        finally:
            cursor.execute("ALTER SEQUENCE testapp_event_id_seq CACHE 1")

    assert ids(found) == ["scriba.E221"]


def test_check_takes_the_option(subject: Subject) -> None:
    """``manage.py check --database default`` finds what only a server can tell."""
    with connection.cursor() as cursor:
        cursor.execute("ALTER TABLE scriba_lanes RENAME TO away")

    with pytest.raises(SystemCheckError) as caught:
        call_command("check", databases=["default"])

    assert "scriba.E010" in str(caught.value)
