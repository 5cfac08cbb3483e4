"""Small charts as inline SVG: shapes and classes only, so that a strict content security policy and dark mode both fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

__all__ = ["Chart", "Point", "chart"]

WIDTH: Final = 240
HEIGHT: Final = 44
LONGEST_GAP_S: Final = 45.0  #: between two samples; beyond it nobody ran the projection, and the line is broken


class Point(NamedTuple):
    """One value, `age_s` seconds ago."""

    age_s: float
    value: float


class Chart(NamedTuple):
    """Lines and areas in a box of 240 by 44, and the largest value; without shapes when there is nothing to draw."""

    lines: Sequence[str] = ()
    areas: Sequence[str] = ()
    highest: float = 0.0
    last: tuple[float, float] | None = None  #: where the newest point is, for a dot
    width: int = WIDTH
    height: int = HEIGHT


def chart(points: Sequence[Point], *, span_s: float) -> Chart:
    """Draw `points` (the oldest first) over the last `span_s` seconds, from zero to the highest of them."""
    highest = max((point.value for point in points), default=0.0)
    runs = [[_place(point, span_s, highest) for point in run] for run in _runs(points) if len(run) > 1]
    if not runs:
        return Chart(highest=highest)
    return Chart(
        [" ".join(f"{x:.1f},{y:.1f}" for x, y in run) for run in runs],
        [f"M{run[0][0]:.1f},{HEIGHT} " + " ".join(f"L{x:.1f},{y:.1f}" for x, y in run) + f" L{run[-1][0]:.1f},{HEIGHT} Z" for run in runs],
        highest,
        runs[-1][-1],
    )  # fmt: skip


def _place(point: Point, span_s: float, highest: float) -> tuple[float, float]:
    share = point.value / highest if highest else 0.0
    x = WIDTH * (1 - min(1.0, point.age_s / span_s))
    return x, HEIGHT - 1.5 - share * (HEIGHT - 4)


def _runs(points: Sequence[Point]) -> list[list[Point]]:
    """Split where samples are missing."""
    runs: list[list[Point]] = []
    for point in points:
        if runs and runs[-1][-1].age_s - point.age_s <= LONGEST_GAP_S:
            runs[-1].append(point)
        else:
            runs.append([point])
    return runs
