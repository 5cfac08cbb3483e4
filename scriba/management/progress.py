"""How ``run_projections`` shows what happens: a bar per projection on a terminal, plain lines everywhere else.

A display is called about five times a second with one snapshot per projection. It decides by itself what is worth a
line: a change of status or of its reason, and now and then how far a catch-up is.
"""

from __future__ import annotations

import re
import time
from collections import deque
from typing import TYPE_CHECKING, Final, Protocol, TextIO

from scriba.durations import duration
from scriba.protocols import Status

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.console import Console
    from rich.table import Table

    from scriba.engine.coordinator import Snapshot

__all__ = ["BarDisplay", "Display", "PlainDisplay", "Track", "duration"]

LINE_EVERY_S: Final = 5.0  #: so often a catch-up is worth a plain line
REASON_EVERY_S: Final = 60.0  #: the same while it says what it waits for
_NUMBER: Final = re.compile(r"\d+")
ORDINARY_S: Final = 2.0  #: a head that will be reached so soon is no catch-up
WINDOW_S: Final = 5.0  #: span that the speed of the watermark is taken from
BAR_WIDTH: Final = 28
WIDTHS: Final = (12, BAR_WIDTH, 4, 15)  #: status, bar, per cent, speed: the table should not jump while numbers grow


class Display(Protocol):
    """Shows snapshots; `close` leaves a final state behind."""

    def __call__(self, snapshots: Sequence[Snapshot]) -> None: ...

    def close(self) -> None: ...


class Track:
    """One projection's way from where it was first seen to the head: how far, how fast, how long still."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: deque[tuple[float, int]] = deque()
        self._first: int | None = None
        self.behind: int | None = None
        self.fraction = 0.0

    def update(self, watermark: int | None, head: int | None) -> None:
        if watermark is None or head is None:
            return
        now = self._clock()
        if self._first is None:
            self._first = watermark
        self._seen.append((now, watermark))
        while len(self._seen) > 2 and now - self._seen[0][0] > WINDOW_S:  # noqa: PLR2004 - a span has two ends
            self._seen.popleft()
        self.behind = max(0, head - watermark)
        way = head - self._first
        self.fraction = (
            1.0 if self.behind == 0 else max(0.0, min(1.0, (watermark - self._first) / way)) if way > 0 else 0.0
        )

    @property
    def is_catching_up(self) -> bool:
        """Whether the head is further away than the little that ordinary life leaves open."""
        left = self.seconds_left
        return bool(self.behind) and (left is None or left > ORDINARY_S)

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the head as it is now, at the speed of the last few seconds; None when that is unknown."""
        if not self.behind or len(self._seen) < 2:  # noqa: PLR2004 - a span has two ends
            return None
        (began, first), (ended, last) = self._seen[0], self._seen[-1]
        return self.behind * (ended - began) / (last - first) if last > first else None


class PlainDisplay:
    """One line per change, and one every few seconds while a projection catches up."""

    def __init__(self, write: Callable[[str], object], clock: Callable[[], float] = time.monotonic) -> None:
        self._write = write
        self._clock = clock
        self._said: dict[object, tuple[str, bool]] = {}
        self._quiet_since: dict[object, float] = {}
        self._tracks: dict[object, Track] = {}

    def __call__(self, snapshots: Sequence[Snapshot]) -> None:
        for snapshot in snapshots:
            track = self._tracks.setdefault(snapshot.identity, Track(self._clock))
            track.update(snapshot.watermark, snapshot.head)
            self._consider(snapshot, track)

    def close(self) -> None:
        pass

    def _consider(self, snapshot: Snapshot, track: Track) -> None:
        now, name = self._clock(), snapshot.identity
        # A reason that counts ("its transaction open for 29 s") is said anew when it changes its words, not its numbers.
        state, caught_up = f"{snapshot.status}{_NUMBER.sub('', snapshot.reason)}", track.behind == 0
        known_state, was_caught_up = self._said.get(name, ("", False))
        if snapshot.status is not Status.RUNNING or not track.is_catching_up:
            self._quiet_since[name] = now
        every_s = REASON_EVERY_S if snapshot.reason else LINE_EVERY_S
        if state != known_state or (caught_up and not was_caught_up) or now - self._quiet_since[name] >= every_s:
            self._said[name], self._quiet_since[name] = (state, caught_up or was_caught_up), now
            self._write(f"{name}: {sentence(snapshot, track)}")


class BarDisplay:
    """A live table: status, bar, position, speed and time left of each projection, redrawn in place."""

    def __init__(self, out: TextIO) -> None:
        from rich.console import Console  # noqa: PLC0415 - only on a terminal
        from rich.live import Live  # noqa: PLC0415 - only on a terminal

        self.console: Console = Console(file=out)
        self._tracks: dict[object, Track] = {}
        self._halted: set[object] = set()
        self._live = Live(console=self.console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
        self._live.start()

    def __call__(self, snapshots: Sequence[Snapshot]) -> None:
        for snapshot in snapshots:
            self._tracks.setdefault(snapshot.identity, Track()).update(snapshot.watermark, snapshot.head)
        self._live.update(self._table(snapshots), refresh=True)

    def close(self) -> None:
        self._live.stop()

    def _table(self, snapshots: Sequence[Snapshot]) -> Table:
        from rich.progress_bar import ProgressBar  # noqa: PLC0415 - only on a terminal
        from rich.table import Table  # noqa: PLC0415 - only on a terminal
        from rich.text import Text  # noqa: PLC0415 - only on a terminal

        table = Table.grid(padding=(0, 2), expand=True)
        widths = (max(len(str(snapshot.identity)) for snapshot in snapshots), *WIDTHS)
        for column, width in enumerate(widths):
            table.add_column(no_wrap=True, justify="right" if column in {3, 4} else "left", min_width=width)
        table.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
        for snapshot in snapshots:
            track = self._tracks[snapshot.identity]
            table.add_row(
                Text(str(snapshot.identity), style="bold"),
                Text(str(snapshot.status), style=STYLES.get(snapshot.status, "")),
                ProgressBar(total=1.0, completed=track.fraction, width=BAR_WIDTH),
                Text(f"{track.fraction:4.0%}" if track.behind is not None else ""),
                Text(f"{snapshot.rate:,.0f} events/s" if snapshot.rate >= 1 else ""),
                Text(_tail(snapshot, track)),
            )
        return table


STYLES: Final = {
    Status.RUNNING: "green",
    Status.HALTED: "bold red",
    Status.STANDBY: "cyan",
    Status.PAUSED: "yellow",
    Status.STOPPED: "yellow",
}


def sentence(snapshot: Snapshot, track: Track) -> str:
    """Return what a plain line says about a projection."""
    state = str(snapshot.status)
    if snapshot.status is Status.NOT_RUNNING and snapshot.watermark is not None:
        state = f"ended at position {snapshot.watermark:,}"
    if snapshot.reason:
        return f"{state}: {snapshot.reason}"
    if snapshot.status is not Status.RUNNING or track.behind is None:
        return state
    if track.behind == 0:
        return f"{state}, caught up at position {snapshot.watermark:,}"
    rate = f", {snapshot.rate:,.0f} events/s" if snapshot.rate >= 1 else ""
    return f"{state}, {track.fraction:.0%}, {_tail(snapshot, track)}{rate}"


def _tail(snapshot: Snapshot, track: Track) -> str:
    if snapshot.reason:
        return snapshot.reason
    if track.behind == 0:
        return f"caught up at position {snapshot.watermark:,}"
    if track.behind is None:
        return ""
    if snapshot.status is Status.NOT_RUNNING:
        return f"ended at position {snapshot.watermark:,}, {track.behind:,} behind"
    left = track.seconds_left
    still = f", about {duration(left)} left" if left is not None else ""
    return f"{track.behind:,} behind{still}"
