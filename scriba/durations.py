"""Spans of time in words."""

from __future__ import annotations

__all__ = ["duration"]


def duration(seconds: float) -> str:
    """Return a span for people: ``8 s``, ``3 min 20 s``, ``2 h 5 min``."""
    whole = round(seconds)
    if whole < 60:  # noqa: PLR2004 - a minute
        return f"{whole} s" if whole or not seconds else f"{seconds:.1f} s"
    minutes, seconds_left = divmod(whole, 60)
    if minutes < 60:  # noqa: PLR2004 - an hour
        return f"{minutes} min {seconds_left} s"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:  # noqa: PLR2004 - two days
        return f"{hours} h {minutes} min"
    return f"{hours // 24} d {hours % 24} h"
