"""Dead letters as rows: written whatever is in them, reopened, resolved, handed on."""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
import uuid
from decimal import Decimal
from typing import Any

import pytest
from django.db import connection
from django.test import override_settings

from scriba.engine.letters import letter_for
from scriba.event import Event, Payload
from scriba.models import DeadLetter
from scriba.protocols import CursorMove, Letter, Resolution, StoredLetter
from scriba.results import Fail
from scriba.stored_json import NotRestorable
from tests.integration.target.desk import Desk, row


def write(desk: Desk, *letters: Letter) -> None:
    with desk.batch() as batch:
        desk.settle(batch, letters=letters, dead_lettered=len(letters))


def only(desk: Desk) -> DeadLetter:
    return DeadLetter.objects.get(projection_name=desk.identity.name)


def stored(desk: Desk, letter: int) -> StoredLetter | None:
    with desk.batch() as batch:
        return batch.letter(letter)


# --- writing ------------------------------------------------------------------------------------------------


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")

    __repr__ = __str__


@dataclasses.dataclass
class Thing:
    name: str
    parts: list[Any]


class Hostile:
    def __repr__(self) -> str:
        raise RuntimeError("no")


class HostileDict(dict[str, Any]):
    def items(self) -> Any:
        raise RuntimeError("no")


RECURSIVE: dict[str, Any] = {"a": 1}
RECURSIVE["self"] = [RECURSIVE]
DEEP: Any = "bottom"
for _ in range(5_000):
    DEEP = [DEEP]

PAYLOADS = {
    "nul": {"a\x00b": "c\x00d"},
    "surrogate": {"a\ud800": "b\udfff"},
    "nan": {"n": float("nan"), "i": float("inf"), "m": float("-inf")},
    "bytes": b"\x00\xff" * 10,
    "decimal": {"d": Decimal("1.10"), "big": Decimal("1e999"), "nan": Decimal("sNaN")},
    "sets": {"s": {1, 2}, "f": frozenset("ab")},
    "times": [dt.datetime(2026, 1, 2, 3, 4, 5, 6, dt.UTC), dt.date.min, dt.time.max, dt.timedelta(microseconds=1)],
    "uuid": uuid.UUID(int=1),
    "tuple": (1, ("two", None)),
    "dataclass": Thing("x", [Thing("y", [])]),
    "object": object(),
    "hostile": {"h": Hostile(), "d": HostileDict(a=1)},
    "recursive": RECURSIVE,
    "deep": DEEP,
    "huge int": 10**5_000,
    "keys": {1: "a", None: "b", (1, 2): "c", "$bytes": "d"},
    "scalars": [True, None, 1.5, "☃", -(2**70)],
    "generator": (n for n in range(3)),
    "5 MB": {"blob": "x" * 5_000_000},
    "5 MB of quotes": '"\\' * 2_500_000,
    "none": None,
}


@pytest.mark.case("B11")
@pytest.mark.parametrize("name", PAYLOADS)
def test_a_letter_is_written_whatever_its_payload(desk: Desk, name: str) -> None:
    """As data and as metadata, within the limit."""
    payload = PAYLOADS[name]
    write(desk, desk.letter(desk.event(1, raw=payload, raw_metadata={"m": payload})))

    letter = only(desk)
    limit = 256_000
    assert len(json.dumps(letter.event_data, ensure_ascii=False).encode()) <= limit
    assert len(json.dumps(letter.event_metadata, ensure_ascii=False).encode()) <= limit


@pytest.mark.case("B11")
def test_long_and_unstorable_texts_are_written(desk: Desk) -> None:
    """A 63-character constraint, 300 characters of everything, NUL, lone surrogates, words that cannot be said."""
    long = "n" * 300
    kind = f"commit:23505 ({'c' * 63})"
    event = desk.event(1, id=long + "\x00", type=long + "\ud800", stream_id=long)
    write(desk, desk.letter(event, Unspeakable(), key=long, kind=kind))

    letter = only(desk)
    assert letter.error_kind == kind
    assert letter.stream_id == long
    assert letter.event_id == long + "\\x00"
    assert letter.event_type == long + "\\ud800"
    assert "cannot be shown" in letter.error_message
    assert "Unspeakable" in letter.error_stacktrace


@pytest.mark.case("B11")
def test_a_63_character_constraint_name_reaches_the_letter(desk: Desk) -> None:
    """The original's column of 64 characters stopped a projection here."""
    name = "c" * 63
    desk.execute(f"ALTER TABLE testapp_counter ADD CONSTRAINT {name} CHECK (value < 10)")
    try:
        with pytest.raises(Exception) as caught, desk.batch():
            connection.cursor().execute("INSERT INTO testapp_counter (key, value, last_position) VALUES ('k', 11, 0)")
        label = desk.target.classify(caught.value).label
        write(desk, desk.letter(desk.event(1), caught.value, kind=label))
    finally:
        desk.execute(f"ALTER TABLE testapp_counter DROP CONSTRAINT {name}")

    assert only(desk).error_kind == f"commit:23514 ({name})"


@pytest.mark.case("B11")
@pytest.mark.parametrize(
    ("moment", "kept"),
    [
        (dt.datetime(2026, 10, 25, 2, 30, tzinfo=dt.timezone(dt.timedelta(hours=2))), True),
        (dt.datetime(2026, 1, 1), True),
        (dt.datetime.min, True),  # noqa: DTZ901
        (dt.datetime.max.replace(tzinfo=dt.timezone(-dt.timedelta(hours=14))), False),
        ("yesterday", False),
        (None, False),
    ],
)
def test_the_time_of_an_event_never_keeps_its_letter_from_being_written(desk: Desk, moment: Any, kept: bool) -> None:
    """What PostgreSQL cannot hold is left out."""
    write(desk, desk.letter(desk.event(1, occurred_at=moment)))

    assert (only(desk).event_occurred_at is not None) is kept


def test_many_letters_cost_one_statement(desk: Desk) -> None:
    """Parking a thousand events is one round trip, and each row is its own."""
    letters = [desk.letter(desk.event(n, raw={"n": n}), key=f"k{n}", status="parked") for n in range(1, 1_001)]
    connection.force_debug_cursor = True
    with desk.batch() as batch:
        before = len(connection.queries)
        desk.settle(batch, letters=letters, dead_lettered=1_000)
        statements = len(connection.queries) - before

    assert statements == 3  # counters (made first), letters
    found = desk.letters("position, event_data->>'n', stream_id, status")
    assert found == [(n, str(n), f"k{n}", "parked") for n in range(1, 1_001)]


@pytest.mark.case("B22")
def test_two_events_of_one_id_are_two_letters(desk: Desk) -> None:
    """A letter is known by its position."""
    write(desk, desk.letter(desk.event(1, id="same")), desk.letter(desk.event(2, id="same")))

    assert desk.letters("position, event_id") == [(1, "same"), (2, "same")]


def test_partitions_have_positions_of_their_own(desk: Desk) -> None:
    """The same position in two partitions is two letters."""
    write(desk, *(desk.letter(desk.event(1, partition=name), key=f"{name}/s") for name in ("p", "q")))

    assert desk.letters("partition, position, stream_id") == [("p", 1, "p/s"), ("q", 1, "q/s")]


def test_failing_again_reopens_the_row_and_adds_up_attempts(desk: Desk) -> None:
    """After a reset: one row, the new error, open; a wish that somebody has written stays."""
    write(desk, desk.letter(desk.event(1), ValueError("first"), attempts=3))
    letter = only(desk)
    with desk.batch() as batch:
        batch.resolve(Resolution(letter.pk, "discarded", "somebody", "a note"))
    DeadLetter.objects.update(wish="replay", wish_by="operator")
    write(desk, desk.letter(desk.event(1), KeyError("second"), attempts=2))

    again = only(desk)
    assert (again.pk, again.status, again.attempts, again.error_kind) == (letter.pk, "open", 5, "KeyError")
    assert (again.resolved_at, again.resolved_by, again.note) == (None, "", "")
    assert (again.wish, again.wish_by) == ("replay", "operator")


# --- redaction ------------------------------------------------------------------------------------------------


def leaky(event_type: str, data: Any) -> Any:
    raise ValueError(f"cannot redact {data}")


def exiting(event_type: str, data: Any) -> Any:
    raise SystemExit(str(data))


@pytest.mark.parametrize("redact", [leaky, exiting])
def test_a_redaction_that_fails_hides_everything_and_stops_nothing(desk: Desk, redact: Any) -> None:
    """Not even its message is kept: it may quote what it should have hidden."""
    with override_settings(SCRIBA={"redact": redact}):
        write(desk, desk.letter(desk.event(1, raw={"card": "4711"})))

    assert "4711" not in str(desk.letters("scriba_dead_letters::text"))
    assert "redact" in str(only(desk).event_data)


def test_a_redaction_decides_what_is_stored_and_such_a_letter_needs_its_source(desk: Desk) -> None:
    """The stored part alone must never be applied as if it were the event."""
    with override_settings(SCRIBA={"redact": lambda event_type, data: {**data, "card": event_type}}):
        write(desk, desk.letter(desk.event(1, raw={"card": "4711", "n": 1})))

    assert only(desk).event_data == {"$redacted": {"card": "Happened", "n": 1}}
    found = stored(desk, only(desk).pk)
    assert found is not None
    with pytest.raises(NotRestorable, match="redacted"):
        found.event.payload()


def test_a_redaction_that_works_in_place_does_not_change_the_event(desk: Desk) -> None:
    """Its batch may be repeated, and its handler must then see what it saw before."""

    def in_place(event_type: str, data: Any) -> Any:
        data["card"] = "****"
        return data

    event = desk.event(1, raw={"card": "4711"})
    with override_settings(SCRIBA={"redact": in_place}):
        write(desk, desk.letter(event))

    assert event.raw == {"card": "4711"}
    assert only(desk).event_data == {"$redacted": {"card": "****"}}


def test_a_redaction_that_changes_nothing_leaves_the_letter_as_it_is(desk: Desk) -> None:
    """It can be replayed without its source."""
    with override_settings(SCRIBA={"redact": lambda event_type, data: data}):
        write(desk, desk.letter(desk.event(1, raw={"n": 1})))

    found = stored(desk, only(desk).pk)
    assert found is not None
    assert found.event.payload() == Payload("Happened", {"n": 1}, {})


def test_a_codec_that_cannot_say_what_it_stored_stops_nothing(desk: Desk) -> None:
    """Its promise never to raise is not relied upon."""

    class Broken:
        def decode(self, event: Event) -> Payload:
            raise ValueError

        def stored(self, event: Event) -> tuple[Any, Any]:
            raise ZeroDivisionError

    write(desk, desk.letter(desk.event(1, codec=Broken())))

    assert "ZeroDivisionError" in str(only(desk).event_data)


# --- reading back ---------------------------------------------------------------------------------------------


def test_an_unresolved_letter_comes_back_with_what_its_source_had_stored(desk: Desk) -> None:
    """Types included, so that a replay without the source decodes the same."""
    data = {
        "d": Decimal("1.10"),
        "b": b"\x00",
        "t": dt.datetime(2026, 1, 2, tzinfo=dt.UTC),
        "s": "a\x00b",
        "l": [1, (2,)],
    }
    at = dt.datetime(2026, 5, 6, 7, 8, 9, 10, dt.UTC)
    write(desk, desk.letter(desk.event(4, raw=data, raw_metadata={"m": 1}, occurred_at=at), attempts=2))

    found = stored(desk, only(desk).pk)

    assert found is not None
    assert found == (only(desk).pk, Event(4, "s", "Happened", "id-4", data, {"m": 1}, at), "s", "open", 2, None)


def test_a_payload_that_was_cut_is_never_applied(desk: Desk) -> None:
    """Decoding it says why; storing it again keeps what is there."""
    write(desk, desk.letter(desk.event(1, raw={"blob": "x" * 300_000})))

    found = stored(desk, only(desk).pk)

    assert found is not None
    with pytest.raises(NotRestorable, match="not stored completely"):
        found.event.payload()
    assert found.event.stored()[0]["$cut"]


def test_a_resolved_or_foreign_letter_is_not_found(desk: Desk) -> None:
    """Whoever comes second finds nothing to do."""
    write(desk, desk.letter(desk.event(1)))
    letter = only(desk).pk
    stranger = desk.target.open(desk.identity._replace(version=2))
    with stranger.batch(desk.fence) as batch:
        assert batch.letter(letter) is None
    stranger.close()
    with desk.batch() as batch:
        batch.resolve(Resolution(letter, "replayed"))

    assert stored(desk, letter) is None


@pytest.mark.case("B15")
def test_a_letter_is_locked_while_it_is_looked_at(desk: Desk) -> None:
    """Two replays of one letter go one after the other."""
    write(desk, desk.letter(desk.event(1)))
    with desk.batch() as batch, desk.driver() as other:
        batch.letter(only(desk).pk)
        held = other.execute("SELECT id FROM scriba_dead_letters WHERE id = %s FOR UPDATE SKIP LOCKED", [only(desk).pk])
        assert held.fetchone() is None


def test_held_keys_are_those_with_an_unresolved_letter(desk: Desk) -> None:
    """Open and parked hold; replayed and discarded do not; another version's do not."""
    write(
        desk,
        desk.letter(desk.event(1), key="open"),
        desk.letter(desk.event(2), key="parked", status="parked"),
        desk.letter(desk.event(3), key="done"),
        desk.letter(desk.event(4), key="both"),
        desk.letter(desk.event(5), key="both", status="parked"),
    )
    done = DeadLetter.objects.get(projection_name=desk.identity.name, stream_id="done").pk
    with desk.batch() as batch:
        batch.resolve(Resolution(done, "discarded"))
    with desk.batch() as batch:
        assert batch.held_keys(["open", "parked", "done", "both", "none"]) == {"open", "parked", "both"}
        assert batch.held_keys([]) == set()


# --- resolving ------------------------------------------------------------------------------------------------


def parked(desk: Desk, *positions: int, key: str = "s") -> None:
    first, *rest = positions
    letters = [desk.letter(desk.event(first), key=key)]
    letters += [
        desk.letter(desk.event(position), Fail("behind"), key=key, attempts=0, status="parked") for position in rest
    ]
    with desk.batch() as batch:
        moves = CursorMove(key, first, positions[-1], None)
        desk.settle(batch, moves, letters=letters, dead_lettered=len(letters))


def wishes(desk: Desk) -> dict[int, tuple[str, str]]:
    return {at: (wish, by) for at, wish, by in desk.letters("position, wish, wish_by") if wish}


def pk_at(desk: Desk, position: int) -> int:
    return DeadLetter.objects.get(projection_name=desk.identity.name, position=position).pk


@pytest.mark.case("B14", "B23")
@pytest.mark.parametrize("status", ["replayed", "discarded"])
def test_the_end_of_a_letter_hands_its_wish_to_the_one_behind_it(desk: Desk, status: str) -> None:
    """In the same transaction, to the first of the same key: nothing is ever parked behind no letter."""
    parked(desk, 3, 4, 5)
    parked(desk, 6, 7, key="other")
    with desk.batch() as batch:
        batch.resolve(Resolution(pk_at(desk, 3), status, "operator", "why"))

    assert wishes(desk) == {4: ("replay", "operator")}
    ended = DeadLetter.objects.get(pk=pk_at(desk, 3))
    assert (ended.status, ended.resolved_by, ended.note, ended.wish) == (status, "operator", "why", "")
    assert ended.resolved_at is not None


@pytest.mark.case("B23")
def test_one_that_ends_in_the_middle_hands_its_wish_to_nobody(desk: Desk) -> None:
    """Those behind it still wait for the head; and each says for whom it waits."""
    parked(desk, 3, 4, 5)
    parked(desk, 1, 2, key="other")
    head, middle, last = (pk_at(desk, position) for position in (3, 4, 5))

    with desk.batch() as batch:
        waiting = [stored.behind for pk in (head, middle, last) if (stored := batch.letter(pk))]
        batch.resolve(Resolution(middle, "discarded", "ann"))

    assert waiting == [None, head, head]
    assert wishes(desk) == {}
    found = desk.writer.next_parked("s", "", 4)
    assert found is not None
    assert (found.id, found.behind) == (last, head)


@pytest.mark.case("B23")
def test_a_wish_of_its_own_is_not_overwritten(desk: Desk) -> None:
    """A follower that an operator wants to discard is discarded, not replayed."""
    parked(desk, 3, 4)
    DeadLetter.objects.filter(pk=pk_at(desk, 4)).update(wish="discard", wish_by="somebody")
    with desk.batch() as batch:
        batch.resolve(Resolution(pk_at(desk, 3), "replayed", "operator"))

    assert wishes(desk) == {4: ("discard", "somebody")}


@pytest.mark.case("A21", "B23")
def test_a_letter_that_moves_to_its_true_key_takes_its_wish_along_and_releases_those_behind_it(desk: Desk) -> None:
    """The first one behind it gets a wish of its own, in the same transaction; those of the new key get none by this."""
    parked(desk, 3, 4, 5)
    parked(desk, 1, 6, key="true")
    moving = pk_at(desk, 3)
    DeadLetter.objects.filter(pk=moving).update(wish="replay", wish_by="ann", allow_out_of_order=True, note="before")
    with desk.batch() as batch:
        batch.resolve(Resolution(moving, "parked", "ann", key="true"))

    moved = DeadLetter.objects.get(pk=moving)
    assert (moved.stream_id, moved.status, moved.wish, moved.allow_out_of_order) == ("true", "parked", "replay", True)
    assert (moved.wish_by, moved.note, moved.resolved_at) == ("ann", "", None)
    assert wishes(desk) == {3: ("replay", "ann"), 4: ("replay", "ann")}
    found = stored(desk, moving)
    assert found is not None
    assert (found.key, found.behind) == ("true", pk_at(desk, 1))


@pytest.mark.case("B16")
def test_a_replay_that_fails_again_stays_open_with_the_new_error(desk: Desk) -> None:
    """Attempts as counted, the wish taken away, nobody behind it released; the payload untouched."""
    parked(desk, 3, 4)
    letter = pk_at(desk, 3)
    DeadLetter.objects.filter(pk=letter).update(wish="replay", wish_by="operator", allow_out_of_order=True)
    with desk.batch() as batch:
        found = batch.letter(letter)
        assert found is not None
        failed = letter_for(found.event, found.key, KeyError("again"), found.attempts + 1, desk.identity)
        batch.resolve(Resolution(letter, "open", "operator", "failed again", failed=failed))

    row_now = DeadLetter.objects.get(pk=letter)
    assert (row_now.status, row_now.attempts, row_now.error_kind) == ("open", 2, "KeyError")
    assert (row_now.wish, row_now.allow_out_of_order, row_now.note) == ("", False, "failed again")
    assert (row_now.resolved_at, row_now.resolved_by, row_now.event_data) == (None, "", {"n": 3})
    assert wishes(desk) == {}


@pytest.mark.case("B15")
def test_a_replay_raises_what_was_applied_and_never_the_cursor(desk: Desk) -> None:
    """ "Has a later event been applied?" compares with that; it never goes back."""
    parked(desk, 3, 4, 5)
    with desk.batch() as batch:
        assert not batch.applied_beyond("s", 2)
        batch.add([row("by the replay")])
        batch.resolve(Resolution(pk_at(desk, 4), "replayed", applied=CursorMove("s", 4, 4, 4)))
    with desk.batch() as batch:
        assert batch.applied_beyond("s", 3)
        assert not batch.applied_beyond("s", 4)
        batch.resolve(Resolution(pk_at(desk, 3), "replayed", applied=CursorMove("s", 3, 3, 3)))

    assert desk.cursors() == {"s": 5}
    assert desk.applied_positions() == {"s": 4}
    assert desk.ids() == ["by the replay"]


def test_the_next_parked_one_is_found_outside_of_a_batch(desk: Desk) -> None:
    """By position, of this key and partition only."""
    parked(desk, 3, 4, 6)
    parked(desk, 5, 7, key="other")

    found = desk.writer.next_parked("s", "", 4)

    assert found is not None
    assert (found.event.position, found.key, found.status) == (6, "s", "parked")
    assert desk.writer.next_parked("s", "", 6) is None
    assert desk.writer.next_parked("s", "p", 0) is None
