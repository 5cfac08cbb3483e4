"""How `scriba.info` looks in a terminal, in a pipe, and to a program: one table, one text, one JSON shape."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from django.utils.timezone import localtime

from scriba.audit import history
from scriba.info import alias_of
from scriba.management.progress import STYLES, duration
from scriba.protocols import Status, Wish

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from scriba.info import Info
    from scriba.registry import Projection

__all__ = ["JSON_KEYS", "as_history", "as_json", "as_table", "as_text", "remarks"]

#: The keys of one object of ``scriba_info --json``: part of the interface, only ever added to.
JSON_KEYS: Final = (
    "name", "version", "status", "wish", "wish_by", "wish_reason", "reason", "owner", "source", "target",
    "halt_reason", "halt_label", "watermark", "safe_position", "head", "lag_events", "lag_seconds", "rate",
    "counters", "dead_letters", "lag_is_lower_bound",
)  # fmt: skip

HEADINGS: Final = (
    "projection", "status", "watermark", "head", "lag", "events/s", "applied", "skipped", "dead letters", "owner",
)  # fmt: skip
_NUMBERS: Final = frozenset(range(2, 9))  #: columns that are aligned to the right


def as_json(infos: Sequence[Info]) -> list[dict[str, Any]]:
    """Return one JSON-ready object per projection, with exactly :data:`JSON_KEYS`."""
    return [_as_object(info) for info in infos]


def _as_object(info: Info) -> dict[str, Any]:
    found: dict[str, Any] = {"lag_is_lower_bound": _is_lower_bound(info)}
    if _is_unknown(info):
        found |= {"lag_events": None, "lag_seconds": None}
    return {key: found[key] if key in found else _plain(getattr(info, key)) for key in JSON_KEYS}


def as_text(infos: Sequence[Info]) -> str:
    """Return an aligned table without any decoration, and the remarks below it."""
    rows = [HEADINGS, *map(_cells, infos)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS))]
    lines = [
        "  ".join(
            text.rjust(width) if column in _NUMBERS else text.ljust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    return "\n".join([*lines, *(remark for info in infos for remark in remarks(info))])


def as_history(projections: Sequence[Projection], *, as_program: bool = False) -> str:
    """Return who asked what of `projections`, one line per act, the newest first."""
    found = [entry for made in projections for entry in history(alias_of(made), made.identity)]
    found.sort(key=lambda entry: entry.happened_at, reverse=True)
    if as_program:
        names = ("projection_name", "projection_version", "action", "actor", "reason", "detail", "happened_at")
        return json.dumps([{name: getattr(entry, name) for name in names} for entry in found], indent=2, default=str)
    lines = [
        f"{localtime(entry.happened_at):%Y-%m-%d %H:%M:%S}  {entry}{_because(entry.reason)}{_because(entry.detail)}"
        for entry in found
    ]
    return "\n".join(lines) or "Nothing was asked of it yet."


def _because(text: str) -> str:
    return f": {text}" if text else ""


def as_table(infos: Sequence[Info]) -> RenderableType:
    """Return the same for a terminal."""
    from rich.console import Group  # noqa: PLC0415 - only on a terminal
    from rich.table import Table  # noqa: PLC0415 - only on a terminal
    from rich.text import Text  # noqa: PLC0415 - only on a terminal

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column, heading in enumerate(HEADINGS):
        table.add_column(
            heading, justify="right" if column in _NUMBERS else "left", no_wrap=column != len(HEADINGS) - 1
        )
    for info in infos:
        cells = [Text(text) for text in _cells(info)]
        cells[0].stylize("bold")
        cells[1].stylize(STYLES.get(info.status, "dim"))
        if info.dead_letters["open"] or info.dead_letters["parked"]:
            cells[8].stylize("red")
        table.add_row(*cells)
    return Group(table, *(Text(remark, style=_remark_style(info)) for info in infos for remark in remarks(info)))


def remarks(info: Info) -> list[str]:
    """Return what a number cannot say: the halt and its cure, the wish when it differs, and what is waited for."""
    who = f"{info.name}:{info.version}"
    found = []
    if info.halt_reason:
        found.append(f"{who} halted: {info.halt_reason}")
        found.append(f"{who} after the fix: scriba_stop {who}, then scriba_start {who}")
    elif info.reason:
        found.append(f"{who}: {info.reason}")
    if info.wish is not Wish.RUNNING:
        by = f" by {info.wish_by}" if info.wish_by else ""
        why = f": {info.wish_reason}" if info.wish_reason else ""
        found.append(f"{who} is wished {info.wish}{by}{why}")
    elif info.status is Status.NOT_RUNNING:
        found.append(f"{who} is owned by no process: run_projections {who}")
    return found


def _cells(info: Info) -> tuple[str, ...]:
    return (
        f"{info.name}:{info.version}",
        str(info.status),
        _number(info.watermark),
        _number(_head(info)),
        _lag(info),
        f"{info.rate:,.0f}" if info.rate >= 1 else "-",
        _number(info.counters["applied"]),
        _number(info.counters["skipped"]),
        _letters(info),
        info.owner or "-",
    )


def _head(info: Info) -> int | None:
    """The owner looks at the head now and then; what it has settled since is readable, too."""
    return max((at for at in (info.head, info.watermark) if at is not None), default=None)


def _lag(info: Info) -> str:
    if info.lag_events is None:
        return "-"
    if _is_unknown(info):
        return "unknown"
    least = "\N{GREATER-THAN OR EQUAL TO} " if _is_lower_bound(info) else ""
    if info.lag_seconds is None or not info.lag_events:
        return f"{least}{info.lag_events:,}"
    return f"{least}{info.lag_events:,} / {duration(info.lag_seconds)}"


def _is_watched(info: Info) -> bool:
    """Whether a live process looks at the source: the last word of one that is halted or gone is old."""
    return bool(info.owner) and info.status is not Status.HALTED


def _is_lower_bound(info: Info) -> bool:
    return bool(info.lag_events) and not _is_watched(info)


def _is_unknown(info: Info) -> bool:
    """It was caught up when somebody last looked, which says nothing of now."""
    return info.lag_events == 0 and not _is_watched(info)


def _letters(info: Info) -> str:
    waiting, parked = info.dead_letters["open"], info.dead_letters["parked"]
    return f"{waiting:,} + {parked:,} parked" if parked else f"{waiting:,}"


def _number(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def _plain(value: object) -> object:
    return str(value) if isinstance(value, Status | Wish) else value


def _remark_style(info: Info) -> str:
    return "red" if info.halt_reason else "yellow"
