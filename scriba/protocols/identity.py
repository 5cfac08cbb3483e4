"""What names a projection, and the hash range that its segments share: the words that all three protocols use."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["SLICES", "Identity"]

SLICES = 1024  #: an ordering key's hash falls into one of these; a segment owns a run of them


class Identity(NamedTuple):
    """(name, version): what cursors, watermark, letters and failure counters are kept by."""

    name: str
    version: int

    def __str__(self) -> str:
        return f"{self.name}:{self.version}"
