"""Numbers as the live page shows them."""

from __future__ import annotations

from django import template

__all__ = ["behind", "number", "rate"]

register = template.Library()

ABSENT = "\N{EN DASH}"
FEW = 10


@register.filter
def number(value: float | str | None) -> str:
    """Return a whole number with separators; a dash where there is none (templates say that with an empty text)."""
    return ABSENT if value is None or isinstance(value, str) else f"{value:,.0f}"


@register.filter
def rate(value: float) -> str:
    """Return events per second."""
    shown = f"{value:,.1f}" if 0 < value < FEW else f"{value:,.0f}"
    return f"{shown}/s"


@register.filter
def behind(value: int | None) -> str:
    """Return a lag in events."""
    return ABSENT if value is None else "caught up" if value == 0 else f"{value:,} behind"
