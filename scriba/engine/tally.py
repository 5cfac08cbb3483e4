"""What a batch will settle, collected while it is open; and the decision to halt."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from scriba.protocols import Counters, CursorMove

if TYPE_CHECKING:
    from scriba.engine.lanes import Routed
    from scriba.protocols import Letter

__all__ = ["Halt", "Tally"]


class Halt(Exception):  # noqa: N818 - a decision that travels to the coordinator
    """Nothing of this projection may go on until a human has acted; `label` is short, the message says why."""

    def __init__(self, cause: str, label: str) -> None:
        super().__init__(cause)
        self.label = label


_new: Final = tuple.__new__  #: past the generated constructor, which is Python: once for each event


@dataclass(slots=True)
class Tally:
    """The outcomes of a batch's events, in order, up to the point where it was cut."""

    settled: int = 0
    firsts: dict[str, int] = field(default_factory=dict)  #: first, last and last applied position of each key
    lasts: dict[str, int] = field(default_factory=dict)
    applied: dict[str, int] = field(default_factory=dict)
    letters: list[Letter] = field(default_factory=list)
    skips: list[tuple[Routed, str]] = field(default_factory=list)
    counters: Counters = field(default_factory=Counters)
    attempted: int = 0
    wiped: int = 0  #: attempts that failed as their event's own fault (integrity, decoding)
    retry: tuple[int, float] | None = None  #: (failed attempts of the next event, seconds to wait)
    halt: Halt | None = None  #: raise after what came before is committed

    @property
    def is_cut(self) -> bool:
        return self.retry is not None or self.halt is not None

    def pass_by(self, item: Routed) -> None:
        """Move the cursor of the item's key; nothing of it was applied."""
        event, key, _error = item
        self.lasts[key] = event.position
        self.firsts.setdefault(key, event.position)

    def moves(self) -> list[CursorMove]:
        """Return how far each key's cursor moves, in the order of the keys."""
        firsts, lasts, applied = self.firsts, self.lasts, self.applied
        return [_new(CursorMove, (key, firsts[key], lasts[key], applied.get(key))) for key in sorted(lasts)]

    def merge(self, part: Tally) -> None:
        """Add what a later run of events of the same batch settled."""
        self.settled += part.settled
        self.firsts = part.firsts | self.firsts
        self.lasts |= part.lasts
        self.applied |= part.applied
        self.letters += part.letters
        self.skips += part.skips
        for name in ("applied", "skipped", "dead_lettered", "deduplicated"):
            setattr(self.counters, name, getattr(self.counters, name) + getattr(part.counters, name))
        self.attempted += part.attempted
        self.wiped += part.wiped
        self.retry, self.halt = part.retry, part.halt
