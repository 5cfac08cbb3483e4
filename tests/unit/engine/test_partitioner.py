"""A key has one lane, whichever way it has come there: from the source, or from the row of a letter."""

from __future__ import annotations

import pytest

from scriba.engine.partitioner import lane_of
from scriba.event import LONGEST_KEY, storable_key


@pytest.mark.case("B23")
@pytest.mark.parametrize(
    "form",
    ["order-{}", "ä{}\t", "\x00{}", "\ud800{}", "{}" + LONGEST_KEY * "x", "{}" + LONGEST_KEY * "ä"],
    ids=["usual", "odd", "NUL", "surrogate", "long", "long-and-odd"],
)
def test_a_key_and_what_is_stored_for_it_have_the_same_lane(form: str) -> None:
    """A replay beside the lane of its key would race with it: out of order, or an event parked behind no letter."""
    keys = [form.format(number) for number in range(20)]

    assert [lane_of(key, 8) for key in keys] == [lane_of(storable_key(key), 8) for key in keys]
    assert len({lane_of(key, 8) for key in keys}) > 3
