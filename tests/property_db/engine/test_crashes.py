"""PD1: whatever is killed, whenever, every event is applied exactly once and each stream in order.

Processes are really killed, connections really terminated, commits really refused by the server; the handler is not
idempotent, so a second application would be seen.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
from django.db import connection
from hypothesis import given
from hypothesis import strategies as st

from tests.support.leftovers import forget
from tests.support.profiles import runs
from tests.support.waiting import wait_until
from tests.support.world import World
from tests.support.zygote import Zygote, zygote

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.timeout(1800)]

CODES = ("40001", "40P01", "57014", "53100", "55P03", "57P01")
ACTIONS = ("kill process", "end worker", "end reader", "end control", "end anything", "stop past its lease")

BACKENDS = {
    "end worker": "query LIKE '%scriba_positions%' OR query LIKE '%testapp_applied%' OR query IN ('COMMIT', 'BEGIN')",
    "end reader": "query LIKE '%testapp_event%' OR query LIKE '%pg_locks%'",
    "end control": "query LIKE '%scriba_segments%' AND query NOT LIKE '%KEY SHARE%'",
    "end anything": "true",
}


@pytest.fixture(scope="module")
def processes(django_db_setup: None, django_db_blocker: object) -> Iterator[Zygote]:
    with django_db_blocker.unblock(), zygote() as parent:  # type: ignore[attr-defined]
        yield parent


@pytest.fixture
def faults() -> Iterator[None]:
    """A deferred trigger that refuses the n-th insert's commit with a chosen SQLSTATE, for n in a table."""
    with connection.cursor() as cursor:
        cursor.execute("CREATE TABLE IF NOT EXISTS fault (at bigint, code text)")
        cursor.execute("CREATE SEQUENCE IF NOT EXISTS fault_seq")
        cursor.execute(
            "CREATE OR REPLACE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ "
            "DECLARE found text; number bigint := nextval('fault_seq'); BEGIN "
            "SELECT code INTO found FROM fault WHERE at = number; "
            "IF found IS NOT NULL THEN RAISE EXCEPTION 'told to fail' USING ERRCODE = found; END IF; RETURN NULL; END $$"
        )
        cursor.execute("DROP TRIGGER IF EXISTS refusing ON testapp_applied")
        cursor.execute(
            "CREATE CONSTRAINT TRIGGER refusing AFTER INSERT ON testapp_applied DEFERRABLE INITIALLY DEFERRED "
            "FOR EACH ROW EXECUTE FUNCTION refuse()"
        )
    yield
    with connection.cursor() as cursor:
        cursor.execute("DROP TRIGGER refusing ON testapp_applied; DROP TABLE fault; DROP SEQUENCE fault_seq")


@pytest.mark.case("A8", "A10")
@runs(100)
@given(
    events=st.integers(10, 80),
    streams=st.integers(1, 8),
    actions=st.lists(st.tuples(st.floats(0, 1), st.sampled_from(ACTIONS)), max_size=3),
    refusals=st.dictionaries(st.integers(1, 80), st.sampled_from(CODES), max_size=3),
    two=st.booleans(),
)
def test_every_event_exactly_once_under_any_crash_schedule(
    processes: Zygote,
    faults: None,
    events: int,
    streams: int,
    actions: list[tuple[float, str]],
    refusals: dict[int, str],
    two: bool,
) -> None:
    """None to three kills or freezes at random points, with or without a standby, commits refused by SQLSTATE."""
    world = World("noting")
    _forget(world, refusals)
    running = [processes.start("noting") for _ in range(1 + two)]
    positions: list[int] = []
    planned = sorted(actions)
    try:
        while len(positions) < events:
            positions += world.append(*(f"s{n % streams}" for n in range(min(7, events - len(positions)))))
            while planned and planned[0][0] * events <= len(positions):
                _act(planned.pop(0)[1], world, processes, running)
        world.wait_applied(events, timeout=60)
        wait_until(lambda: world.segment.watermark == positions[-1], timeout=30, what="the watermark")
    finally:
        processes.kill_all()
    world.check(positions)
    assert world.letters() == []


def _act(action: str, world: World, processes: Zygote, running: list[int]) -> None:
    if action == "kill process":
        processes.kill(running.pop(0))
        if not running:
            running.append(processes.start("noting"))
    elif action == "stop past its lease":
        _stop_past_its_lease(world, processes, running)
    else:
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() "
                f"AND pid <> pg_backend_pid() AND ({BACKENDS[action]}) LIMIT 3"
            )


def _stop_past_its_lease(world: World, processes: Zygote, running: list[int]) -> None:
    """Freeze the owner until its lease has run out, or, where somebody stands by, until that one has taken over."""
    wait_until(lambda: _owner(world)[0] in running, what="an owner that lives")
    frozen = _owner(world)[0]
    processes.kill(frozen, signal.SIGSTOP)
    try:
        if len(running) > 1:
            wait_until(lambda: _owner(world)[0] in set(running) - {frozen}, what="the takeover")
        else:
            wait_until(lambda: _owner(world) == (frozen, True), what="the end of the lease")
    finally:
        processes.kill(frozen, signal.SIGCONT)


def _owner(world: World) -> tuple[int, bool]:
    """Return the process that the segment names (0: nobody), and whether its lease has run out."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT owner, lease_expires_at <= clock_timestamp() FROM scriba_segments WHERE projection_name = %s",
            [world.name],
        )
        owner, is_over = cursor.fetchone() or ("", None)
    return int(owner.split(":")[1]) if owner else 0, bool(is_over)


def _forget(world: World, refusals: dict[int, str]) -> None:
    """Isolate by emptying what this projection wrote, not by flushing the database for each example."""
    with connection.cursor() as cursor:
        forget(world.name, cursor.execute)
        cursor.execute("TRUNCATE testapp_event, testapp_applied, fault")
        cursor.execute("ALTER SEQUENCE fault_seq RESTART")
        for at, code in refusals.items():
            cursor.execute("INSERT INTO fault VALUES (%s, %s)", [at, code])
