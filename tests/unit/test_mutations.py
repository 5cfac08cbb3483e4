"""The mutation script is only worth something while its patches apply and its tests exist."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutations.catalogue import MUTATIONS, Mutation

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.guard.replace(" ", "-"))
def test_the_patch_applies_and_its_test_exists(mutation: Mutation) -> None:
    """`old` stands exactly once, and the named test is there."""
    assert (REPOSITORY / mutation.path).read_text().count(mutation.old) == 1
    path, _, name = mutation.test.partition("::")
    assert f"def {name}" in (REPOSITORY / path).read_text()
