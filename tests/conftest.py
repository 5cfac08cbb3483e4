"""Fixtures and profiles of every tier. The database is started by tests/support/server.py."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings


_numbers = itertools.count(1)

settings.register_profile(
    "default",
    deadline=None,
    max_examples=50,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.differing_executors],
)
settings.register_profile("ci", settings.get_profile("default"), max_examples=500)
settings.load_profile("ci" if os.environ.get("SCRIBA_HYPOTHESIS") == "ci" else "default")




def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get("SCRIBA_SLOW"):
        return
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.skip(reason="slow: runs with SCRIBA_SLOW=1, in CI's full pass"))


@pytest.fixture
def scratch_name() -> str:
    """A projection name that no other test uses: isolation without flushing."""
    return f"p{os.getpid()}-{next(_numbers)}"


@pytest.fixture
def postgres(transactional_db: None) -> Iterator[object]:
    """A direct connection (autocommit) to the test database, beside Django's."""
    import psycopg  # noqa: PLC0415

    from tests.support.processes import database_url  # noqa: PLC0415

    with psycopg.connect(database_url(), autocommit=True) as connection:
        yield connection
