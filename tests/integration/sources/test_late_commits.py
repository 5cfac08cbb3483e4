"""Numbers are handed out at the insert and appear at the commit: what a reader of an event table must survive.

Each test is a schedule of transactions on a real PostgreSQL. A reader that remembers the last position it saw loses
an event in most of them.
"""

from __future__ import annotations

import psycopg
import pytest

from scriba.sources import TableSource
from tests.integration.sources.conftest import run
from tests.integration.sources.reading import Reader, append
from tests.integration.sources.shapes import (
    NO_TRIGGER,
    PARTITIONED,
    TRIGGER,
    PartitionedEvent,
    PlainEvent,
    TriggeredEvent,
)
from tests.support.processes import database_url
from tests.support.waiting import wait_until


@pytest.fixture
def reader(plain):
    opened = Reader(TableSource(PlainEvent))
    opened.look()
    return opened


def ended(pid: int) -> bool:
    return not run("SELECT 1 FROM pg_stat_activity WHERE pid = %s", pid)


# --- the seven situations -------------------------------------------------------------------------------


def test_the_lower_position_commits_last(reader, writer):
    """A position that is missing below a visible one is waited for, and comes first."""
    slow, fast = writer(), writer()
    late = append(slow)
    early = append(fast)
    fast.commit()
    assert reader.look() == []
    assert not reader.last.caught_up
    assert reader.last.scanned < late
    slow.commit()
    assert reader.look_until_quiet() == [late, early]


def test_another_table_is_written_first(reader, writer):
    """An old transaction that appends late is waited for: its age says nothing about its position."""
    run("CREATE TABLE IF NOT EXISTS shapes_other (id int)")
    old, between = writer(), writer()
    old.execute("INSERT INTO shapes_other VALUES (1)")
    first = append(between)
    between.commit()
    assert reader.look() == [first]
    late = append(old)
    last = append(between)
    between.commit()
    assert reader.look() == []
    old.commit()
    assert reader.look_until_quiet() == [late, last]
    run("DROP TABLE shapes_other")


@pytest.mark.case("A25")
def test_a_number_is_drawn_before_the_insert(reader, writer):
    """`nextval` alone, without a row, a table lock or a transaction id, holds the horizon."""
    hilo, other = writer(), writer()
    drawn = hilo.execute("SELECT nextval('shapes_plainevent_id_seq')").fetchone()[0]
    later = append(other)
    other.commit()
    assert reader.look() == []
    hilo.execute(
        "INSERT INTO shapes_plainevent (id, event_id, stream_id, event_type, data) VALUES (%s, gen_random_uuid(), 's', 't', '{}')",
        (drawn,),
    )
    assert reader.look() == []
    hilo.commit()
    assert reader.look_until_quiet() == [drawn, later]


def test_a_rolled_back_number_is_passed_at_once(reader, writer):
    """A missing number that nobody can commit any more costs one look, no waiting time."""
    undone, kept = writer(), writer()
    append(undone)
    later = append(kept)
    kept.commit()
    undone.rollback()
    assert reader.look() == [later]


def test_a_sequence_that_hands_out_blocks_is_refused(plain, writer):
    """With CACHE a session uses numbers in later transactions: no evidence covers that, so nothing is read."""
    run("ALTER SEQUENCE shapes_plainevent_id_seq CACHE 20")
    reader = Reader(TableSource(PlainEvent))
    with pytest.raises(Exception, match="CACHE 20"):
        reader.look()
    assert [message.id for message in TableSource(PlainEvent).database_checks(["default"])] == ["scriba.E221"]


def test_other_databases_and_other_tables_do_not_matter(reader, writer):
    """An open write transaction that cannot append to this table does not hold the horizon."""
    run("CREATE TABLE IF NOT EXISTS shapes_other (id int)")
    elsewhere = psycopg.connect(_maintenance_url())
    elsewhere.execute("CREATE TABLE IF NOT EXISTS scriba_elsewhere (id int)")
    unrelated, undone, kept = writer(), writer(), writer()
    unrelated.execute("INSERT INTO shapes_other VALUES (1)")
    append(undone)
    undone.rollback()
    later = append(kept)
    kept.commit()
    assert reader.look() == [later]
    elsewhere.rollback()
    elsewhere.close()
    unrelated.rollback()
    run("DROP TABLE shapes_other")


def _maintenance_url() -> str:
    url = database_url()
    name = run("SELECT current_database()")[0][0]
    return url.replace(f"/{name}", "/postgres", 1)


def test_stream_order_is_the_order_of_appending(reader, writer):
    """A transaction that began first and appends second comes second, whatever its transaction id says."""
    run("CREATE TABLE IF NOT EXISTS shapes_other (id int)")
    second, first = writer(), writer()
    second.execute("INSERT INTO shapes_other VALUES (1)")
    append(first, version=1)
    first.commit()
    append(second, version=2)
    second.commit()
    reader.look_until_quiet()
    assert [event.stream_version for event in reader.events] == [1, 2]
    run("DROP TABLE shapes_other")


# --- more ways to write ---------------------------------------------------------------------------------


def test_a_savepoint_that_was_rolled_back_still_holds(reader, writer):
    """ROLLBACK TO SAVEPOINT gives up the lock on the table, not the one on the sequence: both are looked at."""
    undecided, other = writer(), writer()
    undecided.execute("SAVEPOINT s")
    append(undecided)
    undecided.execute("ROLLBACK TO SAVEPOINT s")
    later = append(other)
    other.commit()
    assert reader.look() == []
    again = append(undecided)
    undecided.commit()
    assert reader.look_until_quiet() == [later, again]


def test_a_writer_that_fills_a_hole_by_hand_is_waited_for(reader, writer):
    """An explicit number draws nothing from the sequence; the lock on the table is evidence enough while it is at work."""
    undone, fast, by_hand = writer(), writer(), writer()
    hole = append(undone)
    undone.rollback()
    last = append(fast)
    fast.commit()
    by_hand.execute(
        "INSERT INTO shapes_plainevent (id, event_id, stream_id, event_type, data) VALUES (%s, gen_random_uuid(), 's', 't', '{}')",
        (hole,),
    )
    assert reader.look() == []
    by_hand.commit()
    assert reader.look_until_quiet() == [hole, last]


def test_copy_and_insert_select_are_waited_for(reader, writer):
    """Rows that come in bulk draw their numbers like others."""
    bulk, copying, fast = writer(), writer(), writer()
    columns = "(event_id, stream_id, event_type, data)"
    bulk.execute(
        f"INSERT INTO shapes_plainevent {columns} SELECT gen_random_uuid(), 's', 't', '{{}}' FROM generate_series(1, 50)"
    )
    with copying.cursor().copy(f"COPY shapes_plainevent {columns} FROM STDIN") as copy:
        for number in range(50):
            copy.write_row((f"00000000-0000-0000-0000-{number:012}", "s", "t", "{}"))
    last = append(fast)
    fast.commit()
    assert reader.look() == []
    copying.commit()
    assert reader.look() == []
    bulk.commit()
    assert reader.look_until_quiet() == list(range(1, last + 1))


def test_a_killed_writer_holds_nothing(reader, writer):
    """The locks of a backend that dies go with it."""
    killed, fast = writer(), writer()
    append(killed)
    pid = killed.info.backend_pid
    last = append(fast)
    fast.commit()
    assert reader.look() == []
    run("SELECT pg_terminate_backend(%s)", pid)
    wait_until(lambda: ended(pid), what="the writer's end")
    assert reader.look() == [last]


def test_new_writers_do_not_prolong_the_wait(reader, writer):
    """Only those matter who were there when the gap was seen: a busy table never starves its reader."""
    slow, busy, fast = writer(), writer(), writer()
    append(slow)
    visible = append(fast)
    fast.commit()
    assert reader.look() == []
    append(busy)  # after the evidence, and open until the end
    slow.rollback()
    assert reader.look() == [visible]


def test_a_wait_reads_no_payloads(reader, writer, monkeypatch):
    """While a slow writer holds the horizon, the backlog behind it is not read again and again."""
    slow, fast = writer(), writer()
    append(slow)
    for _ in range(20):
        append(fast)
    fast.commit()
    connection, read = reader.subscription._connection, []
    page = connection.page

    def counted(statement, parameters):
        found = page(statement, parameters)
        read.append(len(found))
        return found

    monkeypatch.setattr(connection, "page", counted)
    for _ in range(3):
        assert reader.look() == []
    assert read == [20, 1, 1]
    slow.commit()
    assert len(reader.look_until_quiet()) == 21


def test_several_waits_overlap(reader, writer):
    """What was written later does not wait for the first gap to close before its own wait begins."""
    first, second, fast = writer(), writer(), writer()
    append(first)
    low = append(fast)
    fast.commit()
    assert reader.look() == []
    append(second)
    high = append(fast)
    fast.commit()
    assert reader.look() == []
    assert len(reader.subscription._horizon._pairs) == 2
    third = writer()
    append(third)  # holds whatever is looked at from now on
    first.rollback()
    second.rollback()
    assert reader.look_until_quiet() == [low, high]


def test_what_follows_without_a_hole_needs_no_evidence(reader, writer):
    """The usual case costs one statement: open writers behind it do not delay what is complete."""
    writing = writer()
    first = append(writing)
    writing.commit()
    held = writer()
    append(held)
    assert reader.look() == [first]


def test_the_page_is_read_again_after_the_evidence(plain, writer, monkeypatch):
    """A row that commits between the page and the evidence is in the page that is handed out."""
    reader = Reader(TableSource(PlainEvent))
    reader.look()
    slow, fast = writer(), writer()
    late = append(slow)
    early = append(fast)
    fast.commit()
    horizon = reader.subscription._horizon
    look = horizon._look_at_numbers

    def commit_first():
        slow.commit()  # the page has been read without `late`; now nobody holds a lock any more
        monkeypatch.setattr(horizon, "_look_at_numbers", look)
        return look()

    monkeypatch.setattr(horizon, "_look_at_numbers", commit_first)
    assert reader.look() == [late, early]


def test_a_writer_that_draws_while_evidence_is_taken_is_waited_for(plain, writer, monkeypatch):
    """Positions are looked at before locks: a number drawn in between belongs to somebody who is seen, or lies beyond."""
    reader = Reader(TableSource(PlainEvent))
    undone, slow, fast = writer(), writer(), writer()
    append(undone)
    undone.rollback()
    visible = append(fast)
    fast.commit()
    reader.subscription._opened()
    horizon = reader.subscription._horizon
    reader.look_until_quiet()
    append(undone)
    undone.rollback()
    gap_end = append(fast)
    fast.commit()
    look = horizon._look_at_holders
    drawn: list[int] = []

    def draw_first():
        drawn.append(append(slow))
        drawn.append(append(fast))
        fast.commit()
        monkeypatch.setattr(horizon, "_look_at_holders", look)
        return look()

    monkeypatch.setattr(horizon, "_look_at_holders", draw_first)
    reader.look_until_quiet()
    assert set(drawn).isdisjoint(reader.seen)
    assert reader.last.scanned < drawn[0]
    slow.commit()
    reader.look_until_quiet()
    assert reader.seen == [visible, gap_end, *drawn]


# --- holes ----------------------------------------------------------------------------------------------


def test_a_burnt_range_is_one_gap(reader, writer):
    """A thousand rolled-back numbers cost one look, like one."""
    burning, kept = writer(), writer()
    burning.execute("SELECT nextval('shapes_plainevent_id_seq') FROM generate_series(1, 1000)")
    burning.rollback()
    last = append(kept)
    kept.commit()
    assert reader.look() == [last]
    assert last == 1001


@pytest.mark.case("A25")
def test_trailing_numbers_that_were_rolled_back_are_scanned(reader, writer):
    """Nobody has to append another event before a wait for a burnt number can end."""
    kept, undone = writer(), writer()
    first = append(kept)
    kept.commit()
    burnt = append(undone)
    assert reader.look_until_quiet() == [first]
    assert reader.last.scanned < burnt
    undone.rollback()
    wait_until(lambda: reader.look() == [] and reader.last.scanned >= burnt, what="the burnt number to be passed")
    following = append(kept)
    kept.commit()
    assert reader.look() == [following]


def test_a_drawn_number_that_may_still_come_is_not_scanned(reader, writer):
    """A trailing number is passed only when its transaction has ended, however long that takes."""
    held, other = writer(), writer()
    late = append(held)
    for _ in range(20):
        reader.look(timeout=0.02)
    assert reader.last.scanned < late
    assert reader.last.caught_up
    held.commit()
    assert reader.look_until_quiet() == [late]
    assert other.info.backend_pid


def test_a_first_start_waits_for_writers_that_are_at_work(plain, writer):
    """Numbers below the lowest visible row are a gap like any other."""
    slow, fast = writer(), writer()
    late = append(slow)
    early = append(fast)
    fast.commit()
    reader = Reader(TableSource(PlainEvent))
    assert reader.look() == []
    slow.commit()
    assert reader.look_until_quiet() == [late, early]


# --- two phases -----------------------------------------------------------------------------------------


@pytest.mark.case("A25")
def test_a_prepared_transaction_is_waited_for(reader, writer):
    """A two-phase transaction has no process, and its locks count all the same."""
    preparing, fast = writer(autocommit=True), writer()
    preparing.execute("BEGIN")
    late = append(preparing)
    early = append(fast)
    fast.commit()
    assert reader.look() == []
    preparing.execute("PREPARE TRANSACTION 'shapes'")
    try:
        assert reader.look() == []
        assert "'shapes'" in reader.waiting_for()
        preparing.execute("COMMIT PREPARED 'shapes'")
    except BaseException:
        preparing.execute("ROLLBACK PREPARED 'shapes'")
        raise
    assert reader.look_until_quiet() == [late, early]


# --- other tables ---------------------------------------------------------------------------------------


def test_a_partitioned_table_is_read_as_one(database, writer):
    """A writer of any partition, also past the parent, holds the horizon; order goes over all partitions."""
    run("DROP TABLE IF EXISTS shapes_partitioned CASCADE")
    run(PARTITIONED)
    reader = Reader(TableSource(PartitionedEvent))
    assert reader.look() == []
    run(
        "CREATE TABLE shapes_partitioned_next PARTITION OF shapes_partitioned FOR VALUES FROM ('2027-01-01') TO (MAXVALUE)"
    )
    direct, fast = writer(), writer()
    insert = "INSERT INTO {} (stream_id, type, occurred_at) VALUES ('s', 't', %s) RETURNING id"
    late = direct.execute(insert.format("shapes_partitioned_late"), ("2026-05-01",)).fetchone()[0]
    early = fast.execute(insert.format("shapes_partitioned"), ("2025-05-01",)).fetchone()[0]
    fast.commit()
    assert reader.look() == []
    added = fast.execute(insert.format("shapes_partitioned_next"), ("2027-05-01",)).fetchone()[0]
    direct.commit()
    assert reader.look_until_quiet() == [late, early]
    fast.commit()
    assert reader.look_until_quiet() == [added]
    run("DROP TABLE shapes_partitioned CASCADE")


def test_a_position_that_a_trigger_draws_is_tailed(table, writer):
    """A number filled by a trigger needs its sequence named, and is then as safe as any."""
    table(TriggeredEvent)
    run(NO_TRIGGER)
    run(TRIGGER)
    insert = "INSERT INTO shapes_triggeredevent (id, stream_id, type, data) VALUES (gen_random_uuid(), 's', 't', '{}') RETURNING global_sequence"
    assert [message.id for message in TableSource(TriggeredEvent).database_checks(["default"])] == ["scriba.E220"]
    reader = Reader(TableSource(TriggeredEvent, sequence="shapes_numbers"))
    assert reader.look() == []
    slow, fast = writer(), writer()
    late = slow.execute(insert).fetchone()[0]
    early = fast.execute(insert).fetchone()[0]
    fast.commit()
    assert reader.look() == []
    slow.commit()
    assert reader.look_until_quiet() == [late, early]
    run(NO_TRIGGER)


# --- who holds it ---------------------------------------------------------------------------------------


def test_the_head_names_who_holds_the_horizon(reader, writer):
    """An operator sees the process, its age, state and statement, without the values that it inserted."""
    holder, fast = writer(application_name="forgetful"), writer()
    append(holder, "secret-stream")
    position = append(fast)
    fast.commit()
    reader.look()
    assert reader.subscription.head().position == position
    told = reader.waiting_for()
    assert f"process {holder.info.backend_pid} of 'forgetful'" in told
    assert "idle in transaction" in told
    assert "INSERT INTO shapes_plainevent" in told
    assert "secret-stream" not in told
    holder.rollback()
    reader.look_until_quiet()
    assert reader.waiting_for() == ""
