"""Python's cyclic garbage collector, in a process that does nothing but run projections.

A batch allocates thousands of small objects that all live until its commit and end without a cycle: the collector
looks at them again and again and finds nothing, and each of its full passes visits everything that Django has loaded.
Measured in a catch-up, that was a sixth of the CPU of Python (`docs/explanation/performance.md`).
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

__all__ = ["spared_collector"]

#: Young objects before a look, looks before a middle one, middle ones before a full one (Python: 700, 10, 10). Cycles are
#: still collected: some megabytes later.
THRESHOLDS: Final = (20_000, 10, 50)


@contextmanager
def spared_collector() -> Iterator[None]:
    """Keep the collector from what is loaded by now, and let it look at young objects less often."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
