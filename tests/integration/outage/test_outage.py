"""The database goes away and comes back: no restart of ours, no dead letter, nothing lost, nothing doubled."""

from __future__ import annotations

import os
import threading

import psycopg
import pytest

from tests.integration.outage.conftest import Elsewhere
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(240)

DOWN_S = 20.0 if os.environ.get("SCRIBA_SLOW") else 2.5


def stay_down() -> None:
    """Let the outage last: the passing of time is what is tested here."""
    threading.Event().wait(DOWN_S)


@pytest.mark.case("A9")
@pytest.mark.parametrize("how", ["stop", "kill"])
def test_a_database_that_restarts_under_load_is_waited_for(elsewhere: Elsewhere, how: str) -> None:
    """57P01 and 57P03 (stopped), 57P02 (crashed): the same process goes on, exact, with a bounded number of log lines."""
    positions = elsewhere.append(*(f"s{n % 20}" for n in range(300)))
    with elsewhere.running("noting") as process:
        elsewhere.wait_applied("noting", 20)
        getattr(elsewhere.server, how)()
        stay_down()
        elsewhere.server.ensure_running()
        positions += elsewhere.append(*(f"s{n % 20}" for n in range(100)))
        elsewhere.wait_applied("noting", 400)
        assert process.poll() is None, "the process survived"
        process.terminate()
        output, _ = process.communicate(timeout=30)

    assert process.returncode == 0
    assert len(output.splitlines()) < 150, output[-3000:]
    elsewhere.check("noting", positions)


@pytest.mark.case("D4")
def test_sigterm_while_the_database_is_away_leaves_at_once(elsewhere: Elsewhere) -> None:
    """Exit 0; the watermark trails, which costs nothing but a few look-ups."""
    positions = elsewhere.append(*"abcabc")
    with elsewhere.running("noting") as process:
        elsewhere.wait_applied("noting", 6)
        elsewhere.server.stop()
        process.terminate()
        process.wait(30)
        elsewhere.server.ensure_running()
    assert process.returncode == 0
    positions += elsewhere.append("a")
    with elsewhere.running("noting"):
        elsewhere.wait_applied("noting", 7)

    elsewhere.check("noting", positions)


@pytest.mark.case("A25")
def test_a_prepared_transaction_across_a_restart_is_neither_lost_nor_overtaken(elsewhere: Elsewhere) -> None:
    """It holds a lower id, survives the restart under another name, and commits last."""
    positions = elsewhere.append("a", "b")
    with elsewhere.running("noting"):
        elsewhere.wait_applied("noting", 2)
        with psycopg.connect(elsewhere.url) as writer:
            row = writer.execute(
                "INSERT INTO testapp_event (stream_id, type, data, metadata, occurred_at) "
                "VALUES ('late', 'Happened', '{}', '{}', now()) RETURNING id"
            ).fetchone()
            writer.execute("PREPARE TRANSACTION 'late'")
            writer.commit()
        assert row is not None
        above = elsewhere.append("a", "b")
        elsewhere.server.stop()
        elsewhere.server.ensure_running()
        more = elsewhere.append("a")
        wait_until(
            lambda: elsewhere.execute("SELECT reason FROM scriba_segments WHERE reason <> ''"),
            timeout=60,
            what="a reason",
        )
        assert len(elsewhere.applied("noting")) == 2
        elsewhere.execute("COMMIT PREPARED 'late'")
        elsewhere.wait_applied("noting", 6)

    elsewhere.check("noting", [*positions, row[0], *above, *more])


@pytest.mark.case("D8")
def test_an_idle_projection_whose_connections_were_dropped_applies_the_next_event(elsewhere: Elsewhere) -> None:
    """As a firewall does to connections that say nothing for long: the next event is applied, no error row."""
    positions = elsewhere.append("a")
    with elsewhere.running("noting"):
        elsewhere.wait_applied("noting", 1)
        elsewhere.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid() AND state = 'idle'"
        )
        positions += elsewhere.append("a")
        elsewhere.wait_applied("noting", 2)

    elsewhere.check("noting", positions)


def refuse(elsewhere: Elsewhere, code: str, times: int) -> None:
    """Let the server refuse the next `times` inserts into the read model with `code`."""
    elsewhere.execute("CREATE SEQUENCE IF NOT EXISTS refusals")
    elsewhere.execute("ALTER SEQUENCE refusals RESTART")
    elsewhere.execute(
        "CREATE OR REPLACE FUNCTION refuse_some() RETURNS trigger LANGUAGE plpgsql AS "
        f"$$ BEGIN IF nextval('refusals') <= {times} THEN RAISE EXCEPTION 'pressure' USING ERRCODE = '{code}'; END IF; "
        "RETURN NULL; END $$"
    )
    elsewhere.execute("DROP TRIGGER IF EXISTS refusing ON testapp_applied")
    elsewhere.execute(
        "CREATE TRIGGER refusing AFTER INSERT ON testapp_applied FOR EACH STATEMENT EXECUTE FUNCTION refuse_some()"
    )


@pytest.mark.case("B7")
@pytest.mark.parametrize("code", ["53100", "53300", "57014", "55P03", "40001"])
def test_pressure_passes_without_a_dead_letter(elsewhere: Elsewhere, code: str) -> None:
    """A full disk, too many connections, time-outs: escalating waits, status running with a reason, then recovery."""
    refuse(elsewhere, code, times=7)  # enough for a wait that is seen
    try:
        positions = elsewhere.append(*(f"s{n % 7}" for n in range(40)))
        with elsewhere.running("noting") as process:
            shown = "SELECT 1 FROM scriba_segments WHERE status = 'running' AND reason LIKE %s"
            wait_until(lambda: elsewhere.execute(shown, f"%{code}%"), what=f"status running with the reason {code}")
            elsewhere.wait_applied("noting", 40)
            assert process.poll() is None
        refused = elsewhere.execute("SELECT last_value FROM refusals")[0][0]
        assert refused > 7, "the pressure has not passed"
    finally:
        elsewhere.execute("DROP TRIGGER refusing ON testapp_applied")

    elsewhere.check("noting", positions)
