"""A desk per test: fresh names and own connections instead of flushed tables.

The test's own connection lies in a transaction that is rolled back, as in any ordinary test: a ledger must neither see
nor disturb it.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.ledger.support import Desk


@pytest.fixture
def desk(db: None) -> Iterator[Desk]:
    desk = Desk()
    try:
        yield desk
    finally:
        desk.close()
