from __future__ import annotations

import pytest

from tests.support.world import World


@pytest.fixture
def world(transactional_db: None, scratch_name: str) -> World:
    return World(scratch_name)
