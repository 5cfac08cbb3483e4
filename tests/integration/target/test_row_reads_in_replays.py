"""A replay and a dry run try single events: a read that fails there has its savepoint, as in a verdict pass."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from django.db import connection

from scriba import rehearsal
from scriba.engine.replay import Replayer
from scriba.models import DeadLetter
from scriba.protocols import CursorMove, LetterWish
from scriba.registry import Projection
from tests.integration.target.desk import Desk, row
from tests.testapp.models import Counter


class Reading:
    """A source's answers, as far as a replay asks: the events are gone, their letters are all there is."""

    def read(self, position: int, partition: str = "") -> None:
        del position, partition

    def restore(self, event: Any) -> Any:
        return event

    def subscribe(self, *_: Any) -> Reading:
        return self

    def close(self) -> None:
        """Nothing is open."""


def handler(data: Any, meta: Any) -> Any:
    if meta.position == 1:
        Counter.objects.filter(pk="a").first()
    return row(f"row {meta.position}")


def projection_at(desk: Desk) -> Projection:
    source: Any = Reading()
    return Projection(desk.identity.name, 1, handler, source, desk.target, parallelism=1)


def dead_letters(desk: Desk, *positions: int) -> list[DeadLetter]:
    letters = [desk.letter(desk.event(position)) for position in positions]
    with desk.batch() as batch:
        desk.settle(
            batch, CursorMove("s", positions[0], positions[-1], None), letters=letters, dead_lettered=len(letters)
        )
    return list(DeadLetter.objects.filter(projection_name=desk.identity.name).order_by("position"))


@pytest.mark.case("B24")
def test_a_replay_whose_read_meets_a_lock_waits_for_the_next_look(desk: Desk) -> None:
    """Transient is transient: the letter is neither resolved nor failed again, and the wish stays."""
    (letter,) = dead_letters(desk, 1)
    replayer = Replayer(projection_at(desk), desk.writer, SimpleNamespace(fence=desk.fence, segment=desk.segment))  # type: ignore[arg-type]
    wish = LetterWish(letter.pk, 1, "", "s", "replay")
    with desk.driver() as other:
        other.execute(f"LOCK TABLE {Counter._meta.db_table} IN ACCESS EXCLUSIVE MODE")
        connection.cursor().execute("SET lock_timeout = '20ms'")
        replayer.carry_out(wish, Reading())  # type: ignore[arg-type]
        connection.cursor().execute("RESET lock_timeout")

    before = (letter.status, letter.error_kind, letter.attempts)
    letter.refresh_from_db()
    assert (letter.status, letter.error_kind, letter.attempts) == before


@pytest.mark.case("B24")
def test_a_dry_run_calls_a_read_that_meets_a_lock_busy(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Busy is not failed; and the next letter is tried all the same."""
    monkeypatch.setattr(rehearsal, "LOCK_TIMEOUT", "20ms")
    letters = dead_letters(desk, 1, 2)
    stage = rehearsal._Stage(projection_at(desk), allow_out_of_order=False)
    with desk.driver() as other:
        other.execute(f"LOCK TABLE {Counter._meta.db_table} IN ACCESS EXCLUSIVE MODE")
        found = stage.play(letters)

    assert [one.outcome for one in found] == ["busy", "passes"]
