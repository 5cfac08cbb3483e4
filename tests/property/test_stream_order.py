"""P1: the events of a stream reach the read model in source order, whatever the lanes, batches and failures."""

from __future__ import annotations

import threading
from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scriba.protocols import FailureKind
from scriba.retry import RetryPolicy
from scriba.testing.memory import MemoryBatch, StoreError
from tests.support.engine import Running, conserved, events, insert_position, make_projection, memory_world
from tests.support.profiles import runs


@pytest.mark.case("A3")
@runs(1_000)
@given(
    streams=st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=60),
    parallelism=st.integers(1, 4),
    batch_size=st.integers(1, 16),
    raises=st.sets(st.integers(1, 60), max_size=6),
    transients=st.integers(0, 2),
    bad=st.sets(st.integers(1, 60), max_size=3),
)
def test_committed_order_is_source_order(
    streams: list[str], parallelism: int, batch_size: int, raises: set[int], transients: int, bad: set[int]
) -> None:
    """Read from the target's commit log, so it measures what was durably applied: per stream the positions rise, each
    event is settled exactly once, and failures of some never reorder or lose others."""
    calls: dict[int, int] = defaultdict(int)
    lock = threading.Lock()
    left = [transients]

    def handler(data: Any, meta: Any) -> Any:
        with lock:
            calls[meta.position] += 1
            first = calls[meta.position] == 1
        if meta.position in raises and first:
            raise ValueError("not yet")
        return insert_position(data, meta)

    def fault(stage: str, batch: MemoryBatch) -> None:
        positions = {write.obj[1] for write in batch.writes}
        if stage in {"trial", "settle"} and positions & bad and not positions <= bad:
            raise StoreError(FailureKind.INTEGRITY, "commit:23505")
        if stage == "commit":
            with lock:
                broken = left[0] > 0
                left[0] -= 1
            if broken:
                raise StoreError(FailureKind.TRANSIENT, "commit:40001")

    source, target, state = memory_world(*events(*streams), fault=fault)
    projection = make_projection(
        handler, source, target, parallelism=parallelism, batch_size=batch_size, retry=RetryPolicy(2, (0.0,))
    )
    with Running(projection, state, until_caught_up=True) as coordinator:
        assert coordinator.ended.wait(20)

    applied: dict[str, list[int]] = defaultdict(list)
    for write in target.log:
        applied[write.obj[0]].append(write.obj[1])
    assert all(positions == sorted(set(positions)) for positions in applied.values())
    settled = sorted([write.obj[1] for write in target.log] + list(target.letters))
    assert settled == list(range(1, len(streams) + 1))
    assert state.resume.watermark == len(streams)
    assert conserved(target, len(streams))
