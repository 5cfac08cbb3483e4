"""A desk per test. Real commits, and no table flushed: Django's own flush costs more than a second per test.

The fixture `db` puts the test's connection into a transaction that is rolled back; while the desk stands, this thread
works on a copy of that connection, which commits like a worker's.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.target.desk import Desk, own_connection


@pytest.fixture
def desk(db: None, scratch_name: str) -> Iterator[Desk]:
    """A writer with a segment of its own, on a connection that commits."""
    with own_connection("default"):
        desk = Desk(scratch_name)
        try:
            yield desk
        finally:
            desk.close()
