"""Tables of every shape, made anew for each test on the real server; writers beside Django's connection."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import psycopg
import pytest
from django.db import connection, connections, models

from tests.integration.sources import shapes
from tests.integration.sources.reading import Reader
from tests.support.processes import database_url


@pytest.hookimpl(trylast=True)  # after -k has taken its tests away
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let one test ask for a database in pytest-django's way, so that the session has a test database.

    The others make and drop their own tables, and need none of the flushing (with permissions and content types made
    anew) that costs more than the test.
    """
    first = next((item for item in items if "database" in getattr(item, "fixturenames", ())), None)
    if first is not None:
        first.fixturenames.append("transactional_db")


@pytest.fixture
def database(django_db_setup: None, django_db_blocker) -> Iterator[None]:
    """The test database, without a transaction around the test: writers beside Django's connection see everything."""
    assert str(connection.settings_dict["NAME"]).startswith("test_"), (
        "these tests make tables: never in a real database"
    )
    with django_db_blocker.unblock():
        yield
        while Reader.opened:
            Reader.opened.pop().close()
        connections.close_all()


@pytest.fixture
def table(database: None) -> Iterator[Callable[..., type[models.Model]]]:
    """Make the tables of models, and drop them after the test."""
    made: list[type[models.Model]] = []

    def make(*wanted: type[models.Model]) -> type[models.Model]:
        for model in wanted:
            run(f"DROP TABLE IF EXISTS {model._meta.db_table} CASCADE")
            made.append(model)
            with connection.schema_editor() as editor:
                editor.create_model(model)
        return wanted[-1]

    yield make
    for model in reversed(made):
        run(f"DROP TABLE IF EXISTS {model._meta.db_table} CASCADE")


@pytest.fixture
def plain(table) -> type[shapes.PlainEvent]:
    return table(shapes.PlainEvent)


@pytest.fixture
def writer(database: None) -> Iterator[Callable[[], psycopg.Connection]]:
    """Open connections of other writers; what they left open is rolled back and closed after the test."""
    opened: list[psycopg.Connection] = []

    def connect(**options) -> psycopg.Connection:
        opened.append(psycopg.connect(database_url(), **options))
        return opened[-1]

    yield connect
    for connected in opened:
        connected.close()


def run(statement: str, *parameters: object) -> list[tuple]:
    """Execute SQL on Django's connection."""
    with connection.cursor() as cursor:
        cursor.execute(statement, parameters or None)
        return cursor.fetchall() if cursor.description else []
