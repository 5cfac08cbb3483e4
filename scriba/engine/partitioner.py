"""Ordering key → lane, by a stable hash: a key is in one lane for the life of a run, in every process.

Python's own ``hash()`` is salted per process and would scatter a key's events over lanes after a restart.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

from scriba.event import LONGEST_KEY, storable_key
from scriba.protocols import SLICES

if TYPE_CHECKING:
    from scriba.protocols import Lease

__all__ = ["HASH_NAME", "lane_of", "owns", "owns_all", "slice_of"]

HASH_NAME = "crc32"  #: recorded per projection: a start with another hash function is refused


def slice_of(key: str) -> int:
    """Return which of the 1,024 slices `key` falls into: what segments are cut by."""
    return zlib.crc32(key.encode("utf-8", "surrogatepass")) % SLICES


def lane_of(key: str, lanes: int) -> int:
    """Return the lane of `key`, or of what is stored for it: a wish on a letter has to find the lane of its live events.

    Uses other bits than :func:`slice_of`, so that a segment fills all its lanes.
    """
    if len(key) > LONGEST_KEY or not key.isprintable():  # the usual key is stored as it is
        key = storable_key(key)
    return (zlib.crc32(key.encode("utf-8", "surrogatepass")) // SLICES) % lanes


def owns(lease: Lease, key: str) -> bool:
    """Say whether `key` belongs to the segment of `lease`."""
    return owns_all(lease) or lease.slice_from <= slice_of(key) <= lease.slice_to


def owns_all(lease: Lease) -> bool:
    """Say whether the segment of `lease` has every key."""
    return lease.slice_from == 0 and lease.slice_to == SLICES - 1
