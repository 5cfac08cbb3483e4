"""Scriba's tables as migrations make them."""

from __future__ import annotations

import subprocess
import sys

import pytest
from django.core.management import call_command
from django.db import connection

from tests.support.processes import REPOSITORY

FILLFACTORS = {"scriba_positions": 70, "scriba_lanes": 50, "scriba_segments": 50}


@pytest.mark.django_db
def test_the_migrations_say_what_the_models_say() -> None:
    """No user's ``makemigrations`` may find anything to do in Scriba."""
    call_command("makemigrations", "scriba", "--check", "--dry-run", verbosity=0)


@pytest.mark.django_db
def test_the_busiest_tables_leave_room_for_hot_updates() -> None:
    """Cursors, counters and leases are updated in place; no index holds what changes."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT relname, reloptions FROM pg_class WHERE relname = ANY(%s)", [list(FILLFACTORS)])
        found = dict(cursor.fetchall())

    assert found == {table: [f"fillfactor={percent}"] for table, percent in FILLFACTORS.items()}


def test_another_database_of_the_project_can_be_migrated_there_and_back() -> None:
    """``migrate`` visits every alias a router allows, SQLite too; that the engine refuses it is another matter."""
    program = f"""
from django.conf import settings
lite = {{"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}
settings.configure(INSTALLED_APPS=["scriba"], DATABASES={{"default": lite}})
import django
django.setup()
from django.core.management import call_command
from django.db import connection
call_command("migrate", "scriba", verbosity=0)
assert set({list(FILLFACTORS)}) <= set(connection.introspection.table_names())
call_command("migrate", "scriba", "zero", verbosity=0)
assert not set({list(FILLFACTORS)}) & set(connection.introspection.table_names())
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=REPOSITORY, timeout=60)
