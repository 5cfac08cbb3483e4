"""``start_from="current"``: nothing that commits after the start is missed, whoever is at work at that moment.

The highest visible position is no start: a writer in flight may hold a lower one.
"""

from __future__ import annotations

import threading

import psycopg
import pytest

from scriba.protocols import Identity, Shard
from scriba.sources import TableSource, starting
from scriba.sources.horizon import Horizon
from scriba.sources.starting import StartUnknown
from tests.integration.sources.conftest import run
from tests.integration.sources.reading import Reader, append
from tests.integration.sources.shapes import PARTITIONED, PartitionedEvent, PlainEvent
from tests.support.waiting import wait_until


def current(**options) -> Reader:
    return Reader(TableSource(PlainEvent, start_from="current", **options))


def committed(writer: psycopg.Connection, count: int = 1) -> list[int]:
    positions = [append(writer) for _ in range(count)]
    writer.commit()
    return positions


def refuses_to_start(reader: Reader) -> bool:
    with pytest.raises(StartUnknown) as caught:
        reader.look()
    assert reader.subscription.transient(caught.value)
    return True


def test_without_a_writer_current_is_behind_the_last_row(plain, writer):
    """Nobody is at work: nothing is waited for, and nothing old is delivered."""
    someone = writer()
    last = committed(someone, 3)[-1]
    reader = current()
    assert reader.look() == []
    assert reader.last.scanned == last
    assert reader.last.caught_up
    following = committed(someone)
    assert reader.look() == following


def test_an_empty_table_starts_at_once_and_misses_nothing(plain, writer):
    """Where no row is visible, whatever commits from now on is new, also what is in flight."""
    in_flight = writer()
    first = append(in_flight)
    reader = current()
    assert reader.look() == []
    in_flight.commit()
    assert reader.look_until_quiet() == [first]


def test_an_event_in_flight_with_a_lower_position_is_delivered(plain, writer):
    """The start lies before what commits after the first look, though a higher position was visible already."""
    slow, fast = writer(), writer()
    committed(fast, 2)
    late = append(slow)
    early = committed(fast)
    reader = current()
    refuses_to_start(reader)
    slow.commit()
    assert reader.look_until_quiet() == [late, *early]


def test_a_writer_that_rolls_back_leaves_the_start_where_it_was(plain, writer):
    """What was visible at the first look is not delivered, what came during the wait is."""
    slow, fast = writer(), writer()
    append(slow)
    committed(fast)
    reader = current()
    refuses_to_start(reader)
    meanwhile = committed(fast)
    refuses_to_start(reader)
    slow.rollback()
    assert reader.look_until_quiet() == meanwhile


def test_old_holes_do_not_move_the_start_back(plain, writer):
    """Only numbers that have become events since the first look count: rolled-back ones are nobody's."""
    slow, fast, undone = writer(), writer(), writer()
    append(undone)
    undone.rollback()
    committed(fast)
    append(undone)
    undone.rollback()
    committed(fast)
    late = append(slow)
    early = committed(fast)
    reader = current()
    refuses_to_start(reader)
    slow.commit()
    assert reader.look_until_quiet() == [late, *early]


def test_later_writers_do_not_prolong_the_wait(plain, writer):
    """A busy table is begun as soon as those of the first look have ended; the others' events lie behind the start."""
    slow, fast, busy = writer(), writer(), writer()
    late = append(slow)
    early = committed(fast)
    reader = current()
    refuses_to_start(reader)
    held = append(busy)
    slow.commit()
    assert reader.look_until_quiet() == [late, *early]
    busy.commit()
    assert reader.look_until_quiet() == [held]


def test_a_number_drawn_in_advance_is_waited_for(plain, writer):
    """A transaction that only called `nextval` holds no lock on the table, and its event is delivered."""
    hilo, fast = writer(), writer()
    drawn = hilo.execute("SELECT nextval('shapes_plainevent_id_seq')").fetchone()[0]
    early = committed(fast)
    reader = current()
    refuses_to_start(reader)
    hilo.execute(
        "INSERT INTO shapes_plainevent (id, event_id, stream_id, event_type, data) VALUES (%s, gen_random_uuid(), 's', 't', '{}')",
        (drawn,),
    )
    hilo.commit()
    assert reader.look_until_quiet() == [drawn, *early]


def test_a_filter_sees_the_same_start(plain, writer):
    """What is left out does not hide where the start is."""
    slow, fast = writer(), writer()
    late = append(slow)
    early = committed(fast)
    reader = Reader(TableSource(PlainEvent, start_from="current").narrow({"counted"}))
    refuses_to_start(reader)
    slow.commit()
    assert reader.look_until_quiet() == [late, *early]


def test_a_writer_of_one_partition_is_waited_for(database, writer):
    """Evidence covers every partition, also one that is written past the parent."""
    run("DROP TABLE IF EXISTS shapes_partitioned CASCADE")
    run(PARTITIONED)
    direct, fast = writer(), writer()
    insert = "INSERT INTO {} (stream_id, type, occurred_at) VALUES ('s', 't', %s) RETURNING id"
    late = direct.execute(insert.format("shapes_partitioned_late"), ("2026-05-01",)).fetchone()[0]
    early = fast.execute(insert.format("shapes_partitioned"), ("2025-05-01",)).fetchone()[0]
    fast.commit()
    reader = Reader(TableSource(PartitionedEvent, start_from="current"))
    refuses_to_start(reader)
    direct.commit()
    assert reader.look_until_quiet() == [late, early]
    reader.close()
    run("DROP TABLE shapes_partitioned CASCADE")


def test_how_far_is_looked_back_is_bounded_by_numbers(plain, writer, monkeypatch):
    """Of what was in flight, an event is left out only if its number is that much older than the last one."""
    monkeypatch.setattr(starting, "LOOKED_BACK", 3)
    oldest, old, fast = writer(), writer(), writer()
    append(oldest)
    late = append(old)
    early = committed(fast, 2)
    reader = current()
    refuses_to_start(reader)
    oldest.commit()
    refuses_to_start(reader)
    old.commit()
    assert reader.look_until_quiet() == [late, *early]
    following = committed(fast)
    assert reader.look() == following


def test_the_waiting_start_names_the_writer(plain, writer):
    """An operator sees for whom a projection waits that has not begun."""
    slow, fast = writer(application_name="forgetful"), writer()
    append(slow)
    committed(fast)
    reader = current()
    assert "'forgetful'" in reader.waiting_for()
    with pytest.raises(StartUnknown, match="forgetful"):
        reader.look()
    slow.rollback()
    assert reader.look() == []
    assert reader.waiting_for() == ""


def test_a_waiting_start_hands_out_no_page(plain, writer, monkeypatch):
    """A fetch returns when the start is known: how far any page has scanned would be taken for it."""
    slow, fast = writer(), writer()
    late = append(slow)
    early = committed(fast)
    reader = current()
    found: list[list[int]] = []
    looks = count_looks(monkeypatch)
    fetching = threading.Thread(target=lambda: found.append(reader.look(timeout=0.01)), name="fetching")
    fetching.start()
    wait_until(lambda: len(looks) >= 5, what="several looks at the writer")
    assert found == []
    slow.commit()
    fetching.join(30)
    assert found == [[late, *early]]


def test_wake_ends_a_waiting_start(plain, writer, monkeypatch):
    """A stop or a pause never waits for somebody else's transaction, and remembers no start."""
    slow, fast = writer(), writer()
    late = append(slow)
    early = committed(fast)
    reader = current()
    ended: list[Exception] = []

    def fetch() -> None:
        try:
            reader.look(timeout=30.0)
        except Exception as error:
            ended.append(error)

    looks = count_looks(monkeypatch)
    fetching = threading.Thread(target=fetch, name="fetching")
    fetching.start()
    wait_until(lambda: len(looks) >= 2, what="a look at the writer")
    reader.subscription.wake()
    fetching.join(30)
    assert [type(error) for error in ended] == [StartUnknown]
    slow.commit()
    assert reader.look_until_quiet() == [late, *early]


def count_looks(monkeypatch) -> list[int]:
    looks: list[int] = []
    advance = Horizon.advance
    monkeypatch.setattr(Horizon, "advance", lambda self, after: looks.append(after) or advance(self, after))
    return looks


def test_a_known_position_waits_for_nobody(plain, writer):
    """After the first start it is the watermark that counts: a restart in the middle of a write resumes there."""
    slow, fast = writer(), writer()
    known = committed(fast)[0]
    append(slow)
    committed(fast)
    subscription = TableSource(PlainEvent, start_from="current").subscribe(Identity("x", 1), [Shard(resume=known)])
    page = subscription.fetch(10, 0.0)
    assert not page.events
    assert page.scanned == known
    subscription.close()
