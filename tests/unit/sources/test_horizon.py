"""The horizon on a scripted server: which evidence settles what, and in which order it is taken."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scriba.exceptions import SourceError
from scriba.sources.horizon import MOST_PAIRS, Horizon, Relations, run_length


class Server:
    """Answers the horizon's two questions, and remembers in which order they came."""

    def __init__(self) -> None:
        self.written: int | None = None
        self.drawn: int | None = None
        self.holders: set[str] = set()
        self.log = self.durable = 100
        self.started = "monday"
        self.in_recovery = False
        self.questions: list[str] = []
        self.oldest: list[tuple] = []

    def query(self, statement: str, parameters=()):
        if "last_value" in statement:
            self.questions.append("numbers")
            return [(self.in_recovery, self.written, self.drawn or 1, self.drawn is not None, self.log)]
        if "array_agg" in statement:
            self.questions.append("holders")
            assert parameters == ([7, 8],)
            return [(sorted(self.holders) or None, self.durable, self.started)]
        self.questions.append("oldest")
        return self.oldest

    def write(self, position: int) -> None:
        self.written = self.drawn = position


@pytest.fixture
def server():
    return Server()


@pytest.fixture
def horizon(server):
    return Horizon(server.query, Relations('"events"', '"id"', '"public"."events_id_seq"', (7, 8)))


def test_positions_are_looked_at_before_locks(server, horizon):
    """The other way round, a number drawn in between would be settled while its transaction is not among the holders."""
    server.write(5)
    horizon.advance(0)
    assert server.questions == ["numbers", "holders"]


def test_without_a_holder_everything_written_is_settled_at_once(server, horizon):
    """Usually nobody holds a lock: one look is enough."""
    server.write(5)
    assert horizon.advance(0)
    assert horizon.settled == 5


def test_a_holder_keeps_everything_back_until_it_ends(server, horizon):
    """What was written at the first look is settled when those who were there then have ended."""
    server.write(5)
    server.holders = {"3/1"}
    assert not horizon.advance(0)
    assert horizon.settled == 0
    server.holders = set()
    assert horizon.advance(0)
    assert horizon.settled == 5


def test_later_holders_do_not_count(server, horizon):
    """A writer who came after the look has a higher number, or is seen by the next pair."""
    server.write(5)
    server.holders = {"3/1"}
    horizon.advance(0)
    server.write(9)
    server.holders = {"3/2"}
    assert horizon.advance(0)
    assert horizon.settled == 5


def test_waits_overlap(server, horizon):
    """A second pair starts its wait while the first still waits."""
    for position, holders in ((5, {"a"}), (9, {"a", "b"}), (12, {"b", "c"})):
        server.write(position)
        server.holders = holders
        horizon.advance(0)
    assert horizon.settled == 5
    server.holders = {"c", "d"}
    horizon.advance(0)
    assert horizon.settled == 9
    server.holders = {"d"}
    horizon.advance(0)
    assert horizon.settled == 12


def test_a_pair_that_waits_for_more_and_reaches_less_is_not_kept(server, horizon):
    """Looking ten thousand times at one idle transaction remembers one pair."""
    server.write(5)
    server.holders = {"a"}
    for _ in range(10_000):
        horizon.advance(0)
    assert len(horizon._pairs) == 1


def test_the_number_of_pairs_is_bounded(server, horizon):
    """A writer who holds for hours below a busy table costs bounded memory, and is still waited for."""
    for position in range(1, 10_000):
        server.write(position)
        server.holders = {"a", f"busy/{position}"}
        horizon.advance(0)
    assert len(horizon._pairs) <= MOST_PAIRS
    server.holders = {"new"}
    horizon.advance(0)
    assert horizon.settled == 9_999


def test_forgetting_keeps_what_is_settled(server, horizon):
    """After a reconnect holders may have other names: waits begin anew, final numbers stay final."""
    server.write(5)
    horizon.advance(0)
    server.write(9)
    server.holders = {"-1/700"}
    horizon.advance(0)
    horizon.forget()
    server.holders = {"-1/701"}
    assert not horizon.advance(0)
    assert horizon.settled == 5


@pytest.mark.case("A25")
def test_a_server_that_restarted_behind_a_pooler_voids_what_was_waited_for(server, horizon):
    """A prepared transaction changes its name at a restart; its old name's end is no evidence."""
    server.write(5)
    server.holders = {"3/44"}
    horizon.advance(0)
    server.started = "tuesday"
    server.holders = {"-1/700"}
    assert not horizon.advance(0)
    server.holders = set()
    assert horizon.advance(0)
    assert horizon.settled == 5


def test_burnt_numbers_behind_the_last_row_are_settled_too(server, horizon):
    """A number that was drawn and rolled back is passed without waiting for another row."""
    server.written, server.drawn = 5, 8
    assert horizon.advance(5)
    assert horizon.settled == 8


def test_a_burnt_number_waits_for_the_log(server, horizon):
    """A server that crashes before its log is written hands the same number out again: until then it is not settled."""
    server.written, server.drawn = 5, 8
    server.log, server.durable = 200, 150
    assert not horizon.advance(5)
    server.durable = 200
    server.log = 300
    assert horizon.advance(5)
    assert horizon.settled == 8


def test_rows_do_not_wait_for_the_log_of_burnt_numbers_beyond_them(server, horizon):
    """An older look that reaches further, but needs the log, does not stand in for one that needs nothing."""
    server.written, server.drawn = 5, 8
    server.log, server.durable = 200, 150
    assert not horizon.advance(5)
    server.written = 7
    assert horizon.advance(5)
    assert horizon.settled == 7


def test_behind_a_gap_only_what_is_written_is_settled(server, horizon):
    """While rows wait, the numbers drawn behind them are left alone: their log need not be durable yet."""
    server.written, server.drawn = 5, 8
    server.log, server.durable = 200, 150
    assert horizon.advance(0)
    assert horizon.settled == 5


def test_an_empty_table_whose_numbers_are_burnt_is_passed(server, horizon):
    """The first thousand appends were all rolled back."""
    server.drawn = 1_000
    horizon.advance(-1)
    assert horizon.settled == 1_000


def test_nothing_is_asked_when_nothing_was_drawn(server, horizon):
    """At the end of the table a look costs one statement."""
    server.write(5)
    assert not horizon.advance(5)
    assert server.questions == ["numbers"]


def test_positions_beyond_the_sequence_halt(server, horizon):
    """Explicit ids ahead of the sequence: the message says how to heal it."""
    server.written, server.drawn = 1_000, 5
    with pytest.raises(
        SourceError, match=r"position 1000, .* handed out only 5: .*setval\('\"public\"\.\"events_id_seq\"'"
    ):
        horizon.advance(0)
    server.drawn = None
    with pytest.raises(SourceError, match="only nothing"):
        horizon.advance(0)


def test_a_table_behind_what_was_read_halts(server, horizon):
    """A restored table would hand out positions that count as read."""
    server.write(5)
    with pytest.raises(SourceError, match="up to position 9"):
        horizon.check(9)
    with pytest.raises(SourceError, match="up to position 9"):
        horizon.advance(9)
    horizon.check(5)


def test_a_standby_halts(server, horizon):
    """Locks of writers are invisible on a standby."""
    server.write(5)
    server.in_recovery = True
    with pytest.raises(SourceError, match="standby"):
        horizon.advance(0)


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ((42, 61.4, "idle in transaction", "web", "INSERT INTO e\n VALUES ('secret')", None),
         "process 42 of 'web', idle in transaction, its transaction open for 1 min 1 s: INSERT INTO e VALUES …"),
        ((42, 2.0, "active", "", "SELECT " + "x" * 500, None), "SELECT " + "x" * 153 + " …"),
        ((None, 7200.0, None, None, None, "gid-1"), "the prepared transaction 'gid-1' (COMMIT PREPARED or ROLLBACK PREPARED ends it)"),
        ((42, None, None, None, None, None), "process 42, in an unknown state, its transaction open for an unknown time"),
    ],
)  # fmt: skip
def test_the_holder_is_described_without_its_data(server, horizon, row, told):
    """Process, age, state and statement; never the values that it inserts."""
    server.write(5)
    server.holders = {"a", "b"}
    horizon.advance(0)
    server.oldest = [row]
    text = horizon.waiting_for()
    assert told in text
    assert "secret" not in text
    assert text.startswith("what is written behind position 0 waits for ")
    assert text.endswith("and 1 more")


def test_nobody_is_described_when_nobody_holds(server, horizon):
    """No holder, no statement."""
    server.write(5)
    horizon.advance(0)
    assert horizon.waiting_for() == ""
    assert "oldest" not in server.questions


@given(st.sets(st.integers(0, 60)), st.integers(-1, 60), st.integers(-1, 60))
def test_a_run_ends_at_the_first_hole_that_is_not_settled(numbers, after, settled):
    """Handed out is what is settled and what follows without a hole, and nothing else."""
    positions = sorted(number for number in numbers if number > after)
    ready = run_length(after, positions, settled)
    known, expected = set(positions), 0
    for position in positions:
        missing = [number for number in range(max(after, settled) + 1, position) if number not in known]
        if position > settled and missing:
            break
        expected += 1
    assert ready == expected


class Writers:
    """A sequence, transactions that hold locks from their first draw to their end, and rows visible after commit."""

    def __init__(self) -> None:
        self.drawn = 0
        self.open: dict[int, list[int]] = {}
        self.visible: set[int] = set()

    def query(self, statement: str, parameters=()):
        if "last_value" in statement:
            return [(False, max(self.visible, default=None), self.drawn or 1, self.drawn > 0, 0)]
        return [(sorted(map(str, self.open)) or None, 0, "once")]

    def append(self, name: int) -> None:
        self.drawn += 1
        self.open.setdefault(name, []).append(self.drawn)

    def commit(self, name: int) -> None:
        self.visible.update(self.open.pop(name, ()))

    def rollback(self, name: int) -> None:
        self.open.pop(name, None)


class Reading:
    """What a subscription does with a horizon, without a database."""

    def __init__(self, server: Writers) -> None:
        self.server = server
        self.horizon = Horizon(server.query, Relations("t", "id", "s", (7, 8)))
        self.after = 0
        self.seen: list[int] = []

    def look(self, name: int = 0) -> None:
        for _ in range(2):
            page = sorted(number for number in self.server.visible if number > self.after)
            ready = page[: run_length(self.after, page, self.horizon.settled)]
            if ready or not self.horizon.advance(self.after):
                break
        self.seen += ready
        self.after = max([self.after, self.horizon.settled, *ready])


@given(
    st.lists(
        st.tuples(st.sampled_from(["append", "append", "commit", "rollback", "look"]), st.integers(0, 5)), max_size=80
    )
)
def test_no_schedule_of_writers_loses_or_reorders_an_event(schedule):
    """Whatever writers do, in whatever order: everything committed is handed out once, in order."""
    server = Writers()
    reading = Reading(server)
    for what, name in schedule:
        if what == "look":
            reading.look()
        else:
            getattr(server, what)(name)
    for name in list(server.open):
        server.commit(name)
    while reading.after < server.drawn:
        reading.look()
    assert reading.seen == sorted(server.visible)
