"""Taking over from an owner that is dead, frozen, or busy and unaware.

Each test fails when one of the takeover's parts is left out: the first raise of the epoch, the lock, the second raise,
the end of those who hold the lock.
"""

from __future__ import annotations

import itertools
import logging
import os
import signal
import threading
import time

import pytest
from django.db import DatabaseError, OperationalError

from scriba.protocols import Holder, Lease
from scriba.takeover import Eviction, insist, wear_reset_mark
from tests.integration.ledger.support import LEASE_S, RUNNING, SOON_S, Desk, ProxiedConnection, is_waiting
from tests.support.processes import database_url
from tests.support.proxy import Proxy
from tests.support.waiting import in_thread, wait_until


@pytest.mark.case("A6", "A7")
def test_a_batch_frozen_behind_its_check_is_ended_before_the_new_owner_begins(desk: Desk) -> None:
    """When a lease is handed out, no transaction that passed an older epoch's check can still commit."""
    _, old = desk.owned("old")
    zombie = desk.worker()
    assert zombie.passes(old)
    desk.expire()

    new = desk.ledger().acquire("new", LEASE_S)

    assert isinstance(new, Lease)
    assert not zombie.commits()
    assert not desk.worker().passes(old)
    assert desk.worker().passes(new)


@pytest.mark.case("A7")
def test_what_a_frozen_batch_has_written_is_gone_before_the_new_owner_reads(desk: Desk) -> None:
    """A zombie frozen between its rows and its commit holds row locks: they must neither last nor take effect."""
    _, old = desk.owned("old")
    zombie = desk.worker()
    assert zombie.passes(old)
    zombie.writes(desk.identity, "a")
    desk.expire()

    ledger = desk.ledger()
    new = ledger.acquire("new", LEASE_S)

    assert isinstance(new, Lease)
    assert ledger.resume(new).ceiling == -1
    assert not zombie.commits()
    desk.seed(a=1)  # the same row: nobody holds it, nobody wrote it


@pytest.mark.case("A7")
def test_eight_busy_workers_that_keep_coming_do_not_starve_a_takeover(desk: Desk) -> None:
    """Workers of the old owner overlap without a gap; the first raise turns every new one away."""
    _, old = desk.owned("old")
    busy = threading.Semaphore(0)

    def work(worker_number: int) -> None:
        worker = desk.worker()
        for batch in itertools.count():
            try:
                if not worker.passes(old):
                    return
                busy.release()
                worker.execute("SELECT pg_sleep(%s)", [0.03 + 0.005 * worker_number])  # a batch takes its time
                worker.writes(desk.identity, f"{worker_number}/{batch}")
                worker.commits()
            except DatabaseError:  # ended by the takeover: a worker that does not know better comes again
                worker = desk.worker()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for _ in threads:
        assert busy.acquire(timeout=SOON_S)
    desk.expire()
    began = time.monotonic()
    new = desk.ledger().acquire("new", LEASE_S)
    took_s, committed = time.monotonic() - began, desk.cursors()
    for thread in threads:
        thread.join(SOON_S)

    assert isinstance(new, Lease)
    assert took_s < 3.0
    assert not any(thread.is_alive() for thread in threads)
    assert len(committed) >= len(threads) / 2
    assert desk.cursors() == committed


@pytest.mark.case("A7")
def test_a_check_older_than_the_first_raise_is_answered_by_the_second(desk: Desk) -> None:
    """A check may have looked at the row before step one and be answered after step two.

    Its backend is stopped on the way along the row's versions, behind a transaction that held one of them. Going on, it
    finds a newest version that nobody has locked against it; only because that one was changed *under FOR UPDATE*
    does PostgreSQL compare the epoch again.
    """
    _, old = desk.owned("old")
    desk.expire()
    door, stale = desk.worker(), desk.worker()
    if not stale.is_local:
        pytest.skip("the server runs on another machine: its processes cannot be stopped from here")
    door.execute("UPDATE scriba_segments SET reason = 'a version in between' WHERE id = %s", [old.segment])
    door.execute("SELECT 1 FROM scriba_segments WHERE id = %s FOR UPDATE", [old.segment])

    with in_thread(lambda: stale.passes(old)) as answer:
        wait_until(lambda: is_waiting(desk.rows, stale.pid), what="the check waits at the door")
        os.kill(stale.pid, signal.SIGSTOP)
        try:
            assert door.commits()
            new = desk.ledger().acquire("new", LEASE_S)
        finally:
            os.kill(stale.pid, signal.SIGCONT)

    assert isinstance(new, Lease)
    assert answer == [False]
    assert new.epoch == old.epoch + 2  # each step raises it


def test_a_taker_frozen_in_its_own_takeover_is_taken_over_itself(desk: Desk) -> None:
    """A process stopped while it holds the row FOR UPDATE must not keep everybody else away."""
    _, old = desk.owned("old")
    frozen = desk.worker()
    frozen.execute("SELECT 1 FROM scriba_segments WHERE id = %s FOR UPDATE", [old.segment])
    desk.rows.close()
    waiter = desk.ledger()

    with in_thread(lambda: desk.ledger().acquire("old", LEASE_S)) as answer:  # the owner itself, coming back
        pass

    assert isinstance(answer[0], Lease)
    assert not frozen.commits()
    assert isinstance(waiter.acquire("third", LEASE_S), Holder)


@pytest.mark.case("A13")
def test_two_that_start_at_the_same_moment_get_one_lease(desk: Desk) -> None:
    """One owns, the other learns who does; never both, never none."""
    for round_number in range(20):
        desk.expire() if round_number else desk.ledger()
        barrier = threading.Barrier(2)
        answers: list[Lease | Holder] = []

        def start(name: str, barrier: threading.Barrier = barrier, answers: list[Lease | Holder] = answers) -> None:
            ledger = desk.ledger(registered=False)
            barrier.wait(SOON_S)
            answers.append(ledger.acquire(name, LEASE_S))

        threads = [threading.Thread(target=start, args=(f"{name}-{round_number}",)) for name in "ab"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SOON_S)

        leases = [answer for answer in answers if isinstance(answer, Lease)]
        holders = [answer for answer in answers if isinstance(answer, Holder)]
        assert len(leases) == len(holders) == 1
        assert holders[0].owner == leases[0].owner
        assert desk.segment("owner", "epoch") == (leases[0].owner, leases[0].epoch)


@pytest.mark.case("A13")
def test_a_taker_that_is_overtaken_between_its_steps_stands_back(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Step two is only for the epoch of step one: who stalls in between has lost."""
    slow, fast = desk.ledger(), desk.ledger()
    lock = slow._lock

    def stalled(*args: object) -> bool:
        desk.expire()
        assert isinstance(fast.acquire("fast", LEASE_S), Lease)
        return lock(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(slow, "_lock", stalled)

    answer = slow.acquire("slow", LEASE_S)

    assert isinstance(answer, Holder)
    assert answer.owner == "fast"


def test_a_reset_is_waited_for_not_ended(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    """A reset of millions of cursors holds the row for long and wears a mark; a takeover does not kill it."""
    desk.owned("old")
    desk.expire()
    resetting = desk.worker()
    with resetting._wrapper.cursor() as cursor:
        wear_reset_mark(cursor)
    resetting.execute("SELECT 1 FROM scriba_segments WHERE projection_name = %s FOR UPDATE", [desk.identity.name])

    with caplog.at_level(logging.WARNING, logger="scriba"), in_thread(
        lambda: desk.ledger().acquire("new", LEASE_S)
    ) as answer:  # fmt: skip
        wait_until(
            lambda: f"waiting for the reset of backend {resetting.pid}" in caplog.text, what="the taker sees the reset"
        )
        assert not answer
        assert resetting.commits()

    assert isinstance(answer[0], Lease)


def test_only_row_locks_are_fought_over(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """A migration that locks the table is no zombie: it is waited for."""
    _, lease = desk.owned()
    looks = threading.Semaphore(0)
    look = Eviction._look

    def counted(self: Eviction) -> None:
        look(self)
        looks.release()

    monkeypatch.setattr(Eviction, "_look", counted)
    migration, waiter = desk.worker(), desk.worker()
    migration.execute("LOCK TABLE scriba_segments IN ACCESS EXCLUSIVE MODE")

    def wait() -> object:
        with waiter._wrapper.cursor() as cursor:
            sql = "SELECT 1 FROM scriba_segments WHERE id = %s FOR UPDATE"
            return insist(cursor, sql, [lease.segment], using="default", patience_s=0.0)

    with in_thread(wait) as answer:
        wait_until(lambda: is_waiting(desk.rows, waiter.pid, "relation"), what="the taker waits for the table")
        for _ in range(3):
            assert looks.acquire(timeout=SOON_S)
        assert migration.commits()
    assert answer == [[(1,)]]


def test_another_statement_of_the_same_backend_is_not_helped(desk: Desk) -> None:
    """Behind a pooler the backend may serve another client a moment later; its blockers are nobody's business."""
    _, lease = desk.owned()
    innocent, waiter = desk.worker(), desk.worker()
    sql = "SELECT 1 FROM scriba_segments WHERE id = %s FOR UPDATE"
    innocent.execute(sql, [lease.segment])
    eviction = Eviction("default", waiter.pid, "/* a statement that has ended */")

    with in_thread(lambda: waiter.execute(sql, [lease.segment])):
        wait_until(lambda: is_waiting(desk.rows, waiter.pid), what="the other statement waits")
        eviction._look()
        assert innocent.commits()
    eviction._connection.close()


def test_a_wait_without_end_is_bounded(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """A blocker that cannot be ended costs a transient error, not a thread that never returns."""
    ledger, lease = desk.owned()
    monkeypatch.setattr("scriba.takeover.LONGEST_WAIT_S", 0.3)
    monkeypatch.setattr(
        "scriba.takeover._EVICT", "SELECT 1, '', '', false WHERE %(pid)s = 0 AND %(mark)s = %(reset)s::text"
    )
    blocker = desk.worker()
    blocker.execute("SELECT 1 FROM scriba_segments WHERE id = %s FOR UPDATE", [lease.segment])

    with pytest.raises(OperationalError) as caught:
        ledger.acquire("old", LEASE_S)

    assert ledger.transient(caught.value)
    assert blocker.commits()
    assert ledger.heartbeat(lease, LEASE_S, RUNNING)


def test_help_that_hangs_in_a_dead_network_is_left_behind(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The second connection only helps: when it never answers, whoever got the row goes on and holds nobody up."""
    _, old = desk.owned("old")
    desk.expire()
    blocker = desk.worker()
    assert blocker.passes(old)
    with Proxy(database_url()) as proxy:
        monkeypatch.setattr("scriba.takeover.OwnConnection", lambda using: ProxiedConnection(using, proxy))
        proxy.fall_silent()
        with in_thread(lambda: desk.ledger().acquire("new", LEASE_S)) as answer:
            wait_until(lambda: proxy.connected, what="the helper's connection")
            assert blocker.commits()
        assert isinstance(answer[0], Lease)
        assert "is late: its connection hangs" in caplog.text

    helper = next(record.getMessage().split(" is late")[0] for record in caplog.records if "is late" in record.msg)
    wait_until(lambda: helper not in {thread.name for thread in threading.enumerate()}, what="the helper to end")


def test_the_callers_own_timeout_is_put_back(desk: Desk) -> None:
    """Inside somebody's transaction the bound must not outlive the statement it was for."""
    _, lease = desk.owned()
    worker = desk.worker()
    worker.execute("SET LOCAL statement_timeout = '7s'")

    with worker._wrapper.cursor() as cursor:
        insist(cursor, "SELECT 1 FROM scriba_segments WHERE id = %s FOR UPDATE", [lease.segment], using="default")

    assert worker.execute("SHOW statement_timeout") == [("7s",)]
