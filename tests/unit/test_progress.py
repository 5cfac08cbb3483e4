"""What run_projections shows: lines that are worth a line, a bar on a terminal, and honest numbers."""

from __future__ import annotations

import io
from typing import Any

import pytest

from scriba.engine.coordinator import Snapshot
from scriba.management.progress import BarDisplay, PlainDisplay, Track, duration
from scriba.protocols import Identity, Status


class Clock:
    """A clock that stands still until it is told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def snapshot(watermark: int | None, head: int | None = 1000, **other: Any) -> Snapshot:
    fields: dict[str, Any] = {
        "identity": Identity("orders", 1),
        "status": Status.RUNNING,
        "watermark": watermark,
        "head": head,
        "rate": 0.0,
        "settled": 0,
        "in_flight": 0,
        "stalled_s": 0.0,
        "reason": "",
    }
    return Snapshot(**fields | other)


@pytest.fixture
def shown() -> tuple[list[str], PlainDisplay, Clock]:
    lines: list[str] = []
    clock = Clock()
    return lines, PlainDisplay(lines.append, clock), clock


Shown = tuple[list[str], PlainDisplay, Clock]


# --- plain lines -------------------------------------------------------------------------------------------------


def test_a_projection_that_does_not_change_is_said_once(shown: Shown) -> None:
    """Five calls a second make one line, not five."""
    lines, display, clock = shown

    for _ in range(50):
        display([snapshot(1000)])
        clock.now += 0.2

    assert lines == ["orders:1: running, caught up at position 1,000"]


def test_every_change_of_status_is_said(shown: Shown) -> None:
    """Pause, halt and the way back each give a line, with the reason."""
    lines, display, _ = shown

    display([snapshot(1000)])
    display([snapshot(1000, status=Status.PAUSED, reason="paused on request; resume it to go on")])
    display([snapshot(1000)])
    display([snapshot(1000, status=Status.HALTED, reason="42703: no such column")])

    assert lines == [
        "orders:1: running, caught up at position 1,000",
        "orders:1: paused: paused on request; resume it to go on",
        "orders:1: running, caught up at position 1,000",
        "orders:1: halted: 42703: no such column",
    ]


def test_a_reason_that_counts_is_no_storm(shown: Shown) -> None:
    """A transaction that holds the source back for ten minutes is ten lines in the log, not six hundred."""
    lines, display, clock = shown

    for second in range(600):
        reason = f"what is written behind position 500 waits for process 7, its transaction open for {second} s"
        display([snapshot(500, reason=reason)])
        clock.now += 1.0
    display([snapshot(500, reason="what is written behind position 500 waits for the prepared transaction 'x'")])

    assert 8 <= len(lines) <= 12
    assert "prepared transaction" in lines[-1]


def test_a_catch_up_is_said_now_and_then(shown: Shown) -> None:
    """Every few seconds: how far, how much is left, how fast and how long; and once at the end."""
    lines, display, clock = shown

    for watermark in range(0, 1001, 20):
        display([snapshot(watermark, rate=100.0)])
        clock.now += 0.2

    assert lines == [
        "orders:1: running, 0%, 1,000 behind, 100 events/s",
        "orders:1: running, 50%, 500 behind, about 5 s left, 100 events/s",
        "orders:1: running, caught up at position 1,000",
    ]


def test_new_events_in_ordinary_life_are_not_said(shown: Shown) -> None:
    """Once caught up, being a few events behind for ever is no news."""
    lines, display, clock = shown

    display([snapshot(1000)])
    for head in range(1001, 1101):
        clock.now += 0.2
        display([snapshot(head - 1, head)])

    assert len(lines) == 1


def test_falling_behind_is_said(shown: Shown) -> None:
    """A head that runs away is said after a few seconds, although nothing else has changed."""
    lines, display, clock = shown

    display([snapshot(1000)])
    for head in range(2000, 100_000, 1000):
        clock.now += 0.2
        display([snapshot(1000, head)])

    assert len(lines) >= 3
    assert "behind" in lines[1]


def test_a_source_without_a_head_makes_no_numbers(shown: Shown) -> None:
    """Before the first look at the source there is nothing to measure against."""
    lines, display, _ = shown

    display([snapshot(None, None, status=Status.INITIALIZING)])

    assert lines == ["orders:1: initializing"]


def test_the_end_is_said_with_its_position(shown: Shown) -> None:
    """The last line says how far it came, and why it ended."""
    lines, display, _ = shown

    display([snapshot(1000)])
    display([snapshot(1000, None, status=Status.DRAINING)])
    display([snapshot(1000, None, status=Status.NOT_RUNNING, reason="caught up")])

    assert lines[1:] == ["orders:1: draining", "orders:1: ended at position 1,000: caught up"]


# --- numbers -----------------------------------------------------------------------------------------------------


def test_a_fraction_counts_from_where_this_process_began() -> None:
    """A restart at 90 % does not show 90 % at once: the bar is this run's way."""
    track = Track(Clock())

    track.update(900, 1000)
    began = track.fraction
    track.update(950, 1000)

    assert (began, track.fraction, track.behind) == (0.0, 0.5, 50)


def test_the_time_left_follows_the_last_seconds() -> None:
    """A start at full speed that slows down is not averaged over its whole life."""
    clock = Clock()
    track = Track(clock)

    track.update(0, 100_000)
    for watermark in (50_000, 50_100, 50_200, 50_300):
        clock.now += 5.0
        track.update(watermark, 100_000)

    assert track.seconds_left == pytest.approx(49_700 / 20)


def test_a_stall_has_no_time_left() -> None:
    """No progress within the window is no estimate, instead of infinity."""
    clock = Clock()
    track = Track(clock)
    for _ in range(3):
        track.update(10, 1000)
        clock.now += 5.0

    assert track.seconds_left is None


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (0.2, "0.2 s"), (8.4, "8 s"), (200, "3 min 20 s"), (7500, "2 h 5 min"), (200_000, "2 d 7 h")],
)
def test_spans_are_for_people(seconds: float, text: str) -> None:
    """Two units at most."""
    assert duration(seconds) == text


# --- the terminal ------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_bar_shows_what_a_line_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Name, status, percentage and what is left are on the screen while it catches up."""
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm-256color")
    terminal = Terminal()
    display = BarDisplay(terminal)

    display([snapshot(0)])
    display([snapshot(250, rate=5000.0)])
    display.close()

    screen = terminal.getvalue()
    for text in ("orders:1", "running", "25%", "5,000 events/s", "750 behind"):
        assert text in screen
