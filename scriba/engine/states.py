"""What a projection can be in one process, which step may follow which, and how it looks from outside.

``initializing → running ⇄ paused → draining → stopped``, ``standby`` while another process owns it, and ``halted``,
which only a human leaves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple

from scriba.protocols import Status

if TYPE_CHECKING:
    from scriba.protocols import Identity

__all__ = ["TRANSITIONS", "Listen", "Outcome", "Snapshot", "step"]

#: Lets a function be called whenever somebody wishes something of the projection; returns what ends that.
Listen = Callable[[Callable[[], None]], Callable[[], None]]

_LIVE: Final = frozenset(set(Status) - {Status.NOT_RUNNING})
TRANSITIONS: Final = {
    Status.NOT_RUNNING: frozenset({Status.INITIALIZING}),
    Status.INITIALIZING: _LIVE - {Status.INITIALIZING} | {Status.NOT_RUNNING},
    Status.STANDBY: _LIVE - {Status.STANDBY} | {Status.NOT_RUNNING},
    Status.RUNNING: _LIVE - {Status.RUNNING} | {Status.NOT_RUNNING},
    Status.PAUSED: _LIVE - {Status.PAUSED} | {Status.NOT_RUNNING},
    Status.DRAINING: frozenset({Status.STOPPED, Status.NOT_RUNNING, Status.INITIALIZING, Status.HALTED, Status.STANDBY}),
    Status.STOPPED: frozenset({Status.INITIALIZING, Status.RUNNING, Status.PAUSED, Status.STANDBY, Status.DRAINING,
                               Status.HALTED, Status.NOT_RUNNING}),
    Status.HALTED: frozenset({Status.INITIALIZING, Status.STOPPED, Status.STANDBY, Status.DRAINING, Status.NOT_RUNNING,
                              Status.RUNNING, Status.PAUSED}),
}  # fmt: skip


def step(before: Status, after: Status, identity: Identity) -> Status:
    """Return `after`, which may follow `before`. Raises ``RuntimeError`` when it may not: a mistake of ours."""
    if after not in TRANSITIONS[before]:
        msg = f"{identity}: {before} → {after} is no transition"
        raise RuntimeError(msg)
    return after


class Snapshot(NamedTuple):
    """What a projection looks like from its own process, for progress bars and health checks."""

    identity: Identity
    status: Status
    watermark: int | None
    head: int | None
    rate: float
    settled: int
    in_flight: int
    stalled_s: float
    reason: str


class Outcome(NamedTuple):
    """How a coordinator ended: an exit code (0 drained, 1 halted or failed), and why in words."""

    code: int
    reason: str = ""
