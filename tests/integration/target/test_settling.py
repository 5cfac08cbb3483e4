"""Cursors, counters and letters: what commits beside the rows, and when it is refused."""

from __future__ import annotations

import threading

import pytest

from scriba.event import LONGEST_KEY, storable_key
from scriba.protocols import CursorMove, CursorRefused
from tests.integration.target.desk import Desk, row
from tests.support.waiting import in_thread, wait_until


def move(key: str, first: int, last: int | None = None, applied: int | None = -1) -> CursorMove:
    last = first if last is None else last
    return CursorMove(key, first, last, last if applied == -1 else applied)


@pytest.mark.case("A16")
def test_one_row_per_key_at_its_last_position(desk: Desk) -> None:
    """New keys are inserted, known ones moved, in one statement; what was applied is remembered beside."""
    desk.seed(known=4)
    with desk.batch() as batch:
        desk.settle(
            batch, move("known", 5, 14), move("new", 6), move("skipped", 7, applied=None), applied=11, skipped=1
        )

    assert desk.cursors() == {"known": 14, "new": 6, "skipped": 7}
    assert desk.applied_positions() == {"known": 14, "new": 6, "skipped": None}


def test_a_later_skip_does_not_lower_what_was_applied(desk: Desk) -> None:
    """The cursor goes on; the last applied position stays."""
    for moved in (move("s", 1, 3), move("s", 4, 6, applied=None)):
        with desk.batch() as batch:
            desk.settle(batch, moved)

    assert desk.cursors() == {"s": 6}
    assert desk.applied_positions() == {"s": 3}


@pytest.mark.case("A16")
def test_ten_thousand_keys_in_one_batch(desk: Desk) -> None:
    """Twice: inserted, then moved."""
    keys = [f"stream-{number}" for number in range(10_000)]
    for position in (1, 2):
        with desk.batch() as batch:
            desk.settle(batch, *(move(key, position) for key in reversed(keys)), applied=len(keys))

    assert desk.cursors() == dict.fromkeys(keys, 2)


@pytest.mark.case("A18")
@pytest.mark.parametrize(("first", "last"), [(0, 0), (0, 2**62), (2**62, 2**63 - 1)])
def test_positions_begin_at_zero_and_reach_the_end_of_bigint(desk: Desk, first: int, last: int) -> None:
    """Gaps of any size."""
    with desk.batch() as batch:
        desk.settle(batch, move("s", first, last), letters=[desk.letter(desk.event(last))], dead_lettered=1)

    assert desk.cursors() == {"s": last}
    assert desk.letters("position") == [(last,)]


@pytest.mark.case("A23")
@pytest.mark.parametrize(("first", "last"), [(1, 3), (2, 5), (3, 3), (3, 9)])
def test_a_cursor_at_or_beyond_the_first_position_refuses_the_batch(desk: Desk, first: int, last: int) -> None:
    """ "Forward" is not enough: a commit whose answer was lost, repeated as part of a larger batch, goes forward."""
    with desk.batch() as batch:
        batch.add([row("once")])
        desk.settle(batch, move("other", 1), move("s", 1, 3), applied=3)

    with pytest.raises(CursorRefused), desk.batch() as batch:
        batch.add([row("twice")])
        desk.settle(batch, move("other", 2), move("s", first, last), move("z", 1), applied=last)

    assert desk.ids() == ["once"]
    assert desk.cursors() == {"other": 1, "s": 3}
    assert desk.counters()["applied"] == 3


@pytest.mark.case("A23")
def test_the_next_position_is_not_refused(desk: Desk) -> None:
    """The cursor's own position is settled, the one behind it is new."""
    desk.seed(s=3)
    with desk.batch() as batch:
        desk.settle(batch, move("s", 4, 9), applied=6)

    assert desk.cursors() == {"s": 9}


def test_cursors_belong_to_name_and_version(desk: Desk) -> None:
    """The same key of another version neither refuses nor moves."""
    desk.execute(
        "INSERT INTO scriba_positions (projection_name, projection_version, stream_id, position) VALUES (%s, 2, 's', 9)",
        desk.identity.name,
    )
    with desk.batch() as batch:
        assert batch.cursors(["s"]) == {}
        desk.settle(batch, move("s", 1), applied=1)

    sql = "SELECT projection_version, position FROM scriba_positions WHERE projection_name = %s ORDER BY 1"
    assert desk.execute(sql, desk.identity.name) == [(1, 1), (2, 9)]


def test_cursors_are_found_by_key(desk: Desk) -> None:
    """Those that have none are left out; nothing asked, nothing found."""
    desk.seed(a=1, b=2)
    with desk.batch() as batch:
        assert batch.cursors(["a", "b", "c"]) == {"a": 1, "b": 2}
        assert batch.cursors([]) == {}


@pytest.mark.case("A16")
@pytest.mark.parametrize("known", [True, False])
def test_workers_that_meet_on_the_same_cursors_never_deadlock(desk: Desk, known: bool) -> None:
    """One waits for the other and is refused, whatever order their events came in; rows there are as new ones.

    A third one holds a row in the middle until both stand still: in opposite orders each would then hold what the other
    one wants.
    """
    keys = [f"k{number:02d}" for number in range(40)]
    if known:
        desk.seed(**dict.fromkeys(keys, 0))

    def work(mine: list[str]) -> None:
        writer = desk.open()
        try:
            with writer.batch(desk.fence) as batch:
                desk.settle(batch, *(move(key, 1) for key in mine), applied=1)
        finally:
            writer.close()

    with desk.driver() as third:
        third.execute(HOLD[known], [desk.identity.name, keys[20]])
        with in_thread(lambda: work(keys)) as one, in_thread(lambda: work(keys[::-1])) as other:
            waiting = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock' AND query LIKE '%%given%%'"
            wait_until(lambda: desk.execute(waiting) == [(2,)], what="both to wait")
            third.rollback()

    outcomes = [type(answer) for answer in (*one, *other)]
    assert sorted(outcomes, key=str) == sorted([type(None), CursorRefused], key=str)
    assert desk.cursors() == dict.fromkeys(keys, 1)
    assert desk.counters()["applied"] == 1


HOLD = {
    True: "SELECT 1 FROM scriba_positions WHERE projection_name = %s AND stream_id = %s FOR UPDATE",
    False: "INSERT INTO scriba_positions (projection_name, projection_version, stream_id, position) "
    "VALUES (%s, 1, %s, 0)",
}


@pytest.mark.case("A23")
def test_a_second_settling_of_the_same_events_waits_for_the_first_and_is_refused(desk: Desk) -> None:
    """A repeat that overlaps its own first try (the answer was lost, the backend still commits) finds it done."""
    is_settled = threading.Event()

    def repeat() -> None:
        assert is_settled.wait(10)
        writer = desk.open()
        try:
            with writer.batch(desk.fence) as batch:
                desk.settle(batch, move("s", 1, 9), applied=9)
        finally:
            writer.close()

    with in_thread(repeat) as answer, desk.batch() as batch:
        desk.settle(batch, move("s", 1, 3), applied=3)
        is_settled.set()
        waiting = "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock' AND query LIKE '%%scriba_positions%%'"
        wait_until(lambda: desk.execute(waiting), what="the repeat to wait")
        assert answer == []

    assert [type(found) for found in answer] == [CursorRefused]
    assert desk.cursors() == {"s": 3}
    assert desk.counters()["applied"] == 3


# --- keys ---------------------------------------------------------------------------------------------------

STRANGE = [
    'a"b',
    "a\\b",
    "{a,b}",
    "NULL",
    "",
    " ",
    "%s %(x)s",
    "Ü☃",
    "a'b",
    "a\nb",
    "a\x00b",
    "a\ud800b",
    "x" * 5_000,
    "☃" * 3_000,
]


def test_any_key_has_a_cursor(desk: Desk) -> None:
    """Written, found again, moved and refused under the key that the engine knows; no two keys meet."""
    with desk.batch() as batch:
        desk.settle(batch, *(move(key, 1 + place) for place, key in enumerate(STRANGE)), applied=len(STRANGE))
    with desk.batch() as batch:
        assert batch.cursors(STRANGE) == {key: 1 + place for place, key in enumerate(STRANGE)}
        desk.settle(batch, *(move(key, 100) for key in STRANGE), applied=len(STRANGE))
    with pytest.raises(CursorRefused), desk.batch() as batch:
        desk.settle(batch, move("☃" * 3_000, 100), applied=1)

    assert set(desk.cursors().values()) == {100}
    assert len(desk.cursors()) == len(STRANGE)


@pytest.mark.case("B11")
def test_the_longest_keys_fit_into_the_indexes_under_the_longest_name(desk: Desk) -> None:
    """A 255-character name in the widest letters leaves room for them, in cursors and in letters."""
    identity = desk.identity._replace(name=desk.identity.name.ljust(255, "𝄞"))
    key = "".join(chr(0x10000 + number * 37) for number in range(LONGEST_KEY))
    writer = desk.target.open(identity)
    try:
        with writer.batch(desk.fence) as batch:
            desk.settle(batch, move(key, 1), letters=[desk.letter(desk.event(1), key=key)], dead_lettered=1)
        with writer.batch(desk.fence) as batch:
            assert batch.cursors([key]) == {key: 1}
            assert batch.held_keys([key]) == {key}
    finally:
        writer.close()
        for table in ("scriba_positions", "scriba_dead_letters"):
            desk.execute(f"DELETE FROM {table} WHERE projection_name = %s", identity.name)


@pytest.mark.parametrize("key", STRANGE)
def test_a_stored_key_is_stored_as_itself(key: str) -> None:
    """What a row says about its key leads back to that row."""
    assert storable_key(storable_key(key)) == storable_key(key)


# --- counters -----------------------------------------------------------------------------------------------


def test_counters_add_up_in_the_lanes_row(desk: Desk) -> None:
    """Made when it is missing; another lane has its own."""
    for position in (1, 2):
        with desk.batch() as batch:
            desk.settle(batch, move("s", position), applied=3, skipped=2, dead_lettered=1, deduplicated=1)
    with desk.batch() as batch:
        desk.settle(batch, move("t", 1), lane=5, applied=1)

    assert desk.counters() == {"applied": 6, "skipped": 4, "dead_lettered": 2, "deduplicated": 2, "unmatched": 0}
    assert desk.counters(5)["applied"] == 1


def test_a_batch_of_repeats_only_is_counted_without_a_cursor(desk: Desk) -> None:
    """Every delivered event is settled, those settled before included."""
    with desk.batch() as batch:
        desk.settle(batch, skipped=7, deduplicated=7)

    assert desk.cursors() == {}
    assert desk.counters()["deduplicated"] == 7


def test_counters_roll_back_with_their_batch(desk: Desk) -> None:
    """Rows, cursors, letters and counters commit together or not at all."""
    with pytest.raises(LookupError), desk.batch() as batch:
        batch.add([row("a")])
        desk.settle(batch, move("s", 1), letters=[desk.letter(desk.event(1))], applied=1, dead_lettered=1)
        raise LookupError

    assert (desk.ids(), desk.cursors(), desk.letters()) == ([], {}, [])
    assert desk.execute("SELECT 1 FROM scriba_lanes WHERE segment_id = %s", desk.segment) == []


# --- plans --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_cursors_are_found_by_index_however_the_table_has_grown(desk: Desk) -> None:
    """The statistics still say that the table is empty; a batch must not read all of it for that."""
    from django.db import connection

    from scriba import positions

    desk.execute("ALTER TABLE scriba_positions SET (autovacuum_enabled = off)")
    desk.execute("ANALYZE scriba_positions")
    try:
        desk.execute(
            "INSERT INTO scriba_positions (projection_name, projection_version, stream_id, position) "
            "SELECT %s, 1, 's' || number, 0 FROM generate_series(1, 300000) AS number",
            desk.identity.name,
        )
        for analyse in ("SELECT 1", "ANALYZE scriba_positions"):
            desk.execute(analyse)
            for count in (1, 50, 2_000):
                moves = [move(f"s{number * 100}", 1) for number in range(1, count + 1)]
                params = {**dict.fromkeys(positions._COUNTERS, 0), "segment": desk.segment, "lane": 0}
                with connection.cursor() as cursor:
                    cursor.execute(
                        "EXPLAIN (ANALYZE, TIMING off, SUMMARY off) " + positions._MOVE,
                        {**positions._named(desk.identity), **positions._arrays(moves), **params},
                    )
                    plan = [line for (line,) in cursor.fetchall()]
                reading = [line for line in plan if "on scriba_positions known" in line and "Scan" in line]
                assert reading
                assert not any("Seq Scan" in line for line in reading)
                assert not any(f"rows={300_000}" in line for line in reading)
                desk.execute(
                    "UPDATE scriba_positions SET position = 0 WHERE projection_name = %s AND position > 0",
                    desk.identity.name,
                )
    finally:
        desk.execute("ALTER TABLE scriba_positions RESET (autovacuum_enabled)")
