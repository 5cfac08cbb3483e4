"""Numbers and times as Scriba's pages in the admin show them."""

from __future__ import annotations

from datetime import datetime

from django import template
from django.utils.formats import date_format
from django.utils.timezone import is_aware, localtime

__all__ = ["number", "period", "rate"]

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
def period(first: datetime, last: datetime) -> str:
    """Return two moments to the minute, without saying anything twice: one of them, or the second without its day."""
    began, ended = (localtime(moment) if is_aware(moment) else moment for moment in (first, last))
    since, until = date_format(began, "j M H:i"), date_format(ended, "j M H:i")
    if since == until:
        return since
    return f"{since} {ABSENT} {date_format(ended, 'H:i') if began.date() == ended.date() else until}"
