"""run_projections as a person and a process manager meet it: lines, signals, exit codes, and clear refusals."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from django.db import connection

from scriba import info
from scriba.models import DeadLetter
from scriba.registry import all_projections
from tests.integration.commands.conftest import Shell
from tests.support.processes import Output, manage, managed
from tests.support.waiting import wait_until
from tests.support.world import World
from tests.testapp.models import Applied

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])


@pytest.fixture
def world(transactional_db: None) -> World:
    """The events of the test app, and its projection ``noting``."""
    return World("noting")


# --- running -----------------------------------------------------------------------------------------------------


def test_until_caught_up_settles_everything_and_leaves(world: World) -> None:
    """A process of its own: exit code 0, every event applied once, and a line that says so."""
    positions = world.append_many(200)

    done = manage("run_projections", "noting", "--until-caught-up")

    assert done.returncode == 0, done.stdout + done.stderr
    assert f"noting:1: ended at position {max(positions):,}: caught up" in done.stdout
    world.check(positions)


def test_a_second_run_has_nothing_to_do(world: World, shell: Shell) -> None:
    """Running it again applies nothing again."""
    positions = world.append_many(50)

    for _ in range(2):
        shell("run_projections", "noting", "--until-caught-up")

    world.check(positions)


def test_several_are_run_and_excluded(world: World, shell: Shell) -> None:
    """No name means all; ``--exclude`` leaves some out."""
    world.append("s")

    others = [str(made.identity) for made in all_projections() if made.name not in {"noting", "serial"}]

    shell("run_projections", "--until-caught-up", *(f"--exclude={name}" for name in others))

    assert set(Applied.objects.values_list("projection", flat=True)) == {"noting", "serial"}


@pytest.mark.case("D4")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains(number: signal.Signals, world: World) -> None:
    """SIGTERM and Ctrl-C end with exit code 0; the lease is given back, so nobody has to wait for it to run out."""
    with managed("run_projections", "noting") as process:
        Output(process).until("running")
        world.append("s", "s")
        world.wait_applied(2)
        process.send_signal(number)
        code = process.wait(20)

    assert code == 0
    assert world.segment.owner == ""
    assert info("noting").wish == "running"


@pytest.mark.case("D4")
def test_a_second_signal_does_not_wait_for_a_handler(world: World, tmp_path: Path) -> None:
    """The first signal waits for the handler that is running, the second one leaves; nothing is applied."""
    touched = tmp_path / "reached"
    world.append("s", touch=str(touched), until=str(tmp_path / "never"))

    with managed("run_projections", "noting", "--drain-timeout", "60") as process:
        output = Output(process)
        wait_until(touched.exists, what="the handler to be reached")
        process.send_signal(signal.SIGTERM)
        output.until("draining")
        process.send_signal(signal.SIGTERM)
        code = process.wait(20)

    assert code == 1
    assert world.applied() == []


@pytest.mark.case("D5")
def test_a_handler_that_does_not_come_back_is_named(world: World, tmp_path: Path) -> None:
    """After the drain timeout it leaves with exit code 1 and the name of the thread."""
    touched = tmp_path / "reached"
    world.append("s", touch=str(touched), until=str(tmp_path / "never"))

    with managed("run_projections", "noting", "--drain-timeout", "0.2") as process:
        output = Output(process)
        wait_until(touched.exists, what="the handler to be reached")
        process.send_signal(signal.SIGTERM)
        code = process.wait(20)

    assert code == 1
    assert "still busy after 0.2 s" in output.whole
    assert "lane-" in output.whole
    assert "Traceback" not in output.whole


def test_a_second_process_stands_by_and_says_so(world: World) -> None:
    """It names the owner, and takes over when the owner leaves."""
    with managed("run_projections", "noting") as first:
        Output(first).until("running")
        with managed("run_projections", "noting") as second:
            output = Output(second)
            seen = output.until("standby: owned")
            first.send_signal(signal.SIGTERM)
            first.wait(20)
            output.until("running")
            second.send_signal(signal.SIGTERM)
            second.wait(20)

    assert re.search(r"standby: owned by \S+:\d+:\w+; takes over when it leaves", seen)


def test_a_stopped_projection_is_said_and_started(world: World, shell: Shell) -> None:
    """A *stopped* wish survives a restart: the run says so and does nothing; ``--start`` wishes it running."""
    positions = world.append("s")
    shell("scriba_stop", "noting")

    idle = shell("run_projections", "noting", "--until-caught-up")
    nothing = world.applied()
    shell("run_projections", "noting", "--until-caught-up", "--start")

    assert "stopped on request" in idle
    assert nothing == []
    world.check(positions)


@pytest.mark.case("D1", "D2")
def test_control_from_another_process_is_followed(world: World, shell: Shell) -> None:
    """Pause, resume and stop reach the process within a second each; ``--wait`` returns when they have."""
    with managed("run_projections", "noting") as process:
        output = Output(process)
        output.until("running")
        shell("scriba_pause", "noting", "--wait")
        output.until("paused on request")
        shell("scriba_resume", "noting", "--wait")
        shell("scriba_stop", "noting", "--wait")
        output.until("stopped on request")
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0


@pytest.mark.case("D10")
def test_overrides_take_effect(world: World, shell: Shell) -> None:
    """``--parallelism`` and ``--batch-size`` change the run, not the declaration."""
    world.append_many(20)

    shell("run_projections", "noting", "--until-caught-up", "--parallelism", "7", "--batch-size", "1")

    with connection.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM scriba_lanes WHERE segment_id = %s", [world.segment.pk])
        assert cursor.fetchone()[0] == 7


# --- failing -----------------------------------------------------------------------------------------------------


def test_a_halt_ends_with_its_cause_and_the_cure(world: World, shell: Shell) -> None:
    """Exit code 1 and one message: what happened, and the commands that leave a halt."""
    world.append("s")
    world.execute("ALTER TABLE testapp_applied RENAME TO away")
    try:
        code, message = shell.refused("run_projections", "noting", "--until-caught-up")
    finally:
        world.execute("ALTER TABLE away RENAME TO testapp_applied")

    assert code == 1
    assert "noting:1 halted: " in message
    assert "42P01" in message
    assert "scriba_stop, then scriba_start" in message
    assert DeadLetter.objects.count() == 0


def test_an_unknown_name_is_refused(world: World) -> None:
    """Exit code 2, one line, no traceback, and the name that was meant."""
    done = manage("run_projections", "notting")

    assert done.returncode == 2
    assert done.stderr.strip() == "CommandError: no projection 'notting' version 1; did you mean 'noting'?"


def test_excluding_everything_is_refused(shell: Shell) -> None:
    """There would be nothing to do, for ever."""
    code, message = shell.refused("run_projections", "noting", "--exclude", "noting")

    assert code == 2
    assert "--exclude names all of them" in message


def test_a_misspelt_exclusion_is_refused(shell: Shell) -> None:
    """It would run what was to be left out."""
    code, message = shell.refused("run_projections", "--exclude", "notting")

    assert code == 2
    assert "did you mean 'noting'" in message


def test_wrong_usage_is_refused(world: World) -> None:
    """A process of its own: exit code 2 and no traceback, before anything starts."""
    done = manage("run_projections", "noting", "--parallelism", "0")

    assert done.returncode == 2
    assert "at least 1 is needed, not 0" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [["--parallelism", "four"], ["--batch-size", "0"], ["--drain-timeout", "-1"], ["--drain-timeout", "nan"]],
)
def test_a_number_is_a_number(arguments: list[str], shell: Shell) -> None:
    """A mistyped override never means the declared value."""
    _, message = shell.refused("run_projections", "noting", *arguments)

    assert "needed, not" in message


def test_an_unreachable_database_is_one_message(world: World) -> None:
    """Exit code 2: which database, why, and what to look at. No traceback."""
    done = manage("run_projections", "noting", DATABASE_URL="postgresql://nobody@127.0.0.1:1/nowhere")

    assert done.returncode == 2
    # Since Django 6.1 its own checks meet the outage first; then the message comes from there, and says as much.
    assert "cannot be reached: " in done.stderr or "The database is out of reach: " in done.stderr
    assert "127.0.0.1" in done.stderr
    assert "DATABASE_URL" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.case("B13")
@pytest.mark.parametrize("table", ["scriba_dead_letters", "scriba_lanes"])
def test_a_missing_table_is_found_before_anything_runs(table: str, world: World, shell: Shell) -> None:
    """Exit code 2: which table, and the command that makes it. Nothing is applied before the first failure."""
    world.append("s")
    world.execute(f"ALTER TABLE {table} RENAME TO away")
    try:
        code, message = shell.refused("run_projections", "noting", "--until-caught-up")
    finally:
        world.execute(f"ALTER TABLE away RENAME TO {table}")

    assert code == 2
    assert f"has no {table}" in message
    assert "migrate --database=default" in message
    assert world.applied() == []


def test_an_unapplied_migration_is_found(world: World, shell: Shell) -> None:
    """Tables of an older release are not written to."""
    world.execute("UPDATE django_migrations SET app = 'away' WHERE app = 'scriba'")
    try:
        code, message = shell.refused("run_projections", "noting", "--until-caught-up")
    finally:
        world.execute("UPDATE django_migrations SET app = 'scriba' WHERE app = 'away'")

    assert code == 2
    assert "migration(s) of scriba: 0001_initial" in message
    assert "migrate --database=default" in message


def test_a_wrong_setting_is_refused(world: World, tmp_path: Path) -> None:
    """A configuration error found by the system checks is exit code 2, too."""
    (tmp_path / "wrong_settings.py").write_text("from tests.settings import *\nSCRIBA = {'lease': 5}\n")

    done = manage(
        "run_projections", "noting", DJANGO_SETTINGS_MODULE="wrong_settings",
        PYTHONPATH=f"{tmp_path}:{Path(__file__).parents[3]}",
    )  # fmt: skip

    assert done.returncode == 2
    assert "did you mean 'lease_s'" in done.stderr


# --- logs --------------------------------------------------------------------------------------------------------


def test_json_logs_are_one_object_a_line(world: World) -> None:
    """Standard error holds nothing but JSON; a halt carries its projection and its traceback."""
    world.append("s")
    world.execute("ALTER TABLE testapp_applied RENAME TO away")
    try:
        done = manage("run_projections", "noting", "--until-caught-up", "--log-format", "json")
    finally:
        world.execute("ALTER TABLE away RENAME TO testapp_applied")

    records: list[dict[str, Any]] = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("{")]
    halts = [record for record in records if "halted" in record["message"]]
    assert halts
    assert (halts[0]["level"], halts[0]["projection"], halts[0]["version"]) == ("error", "noting", 1)
    assert "UndefinedTable" in halts[0]["traceback"]


# --- what others ask of the process ------------------------------------------------------------------------------


def free_port() -> int:
    import socket

    with socket.socket() as held:
        held.bind(("localhost", 0))
        return int(held.getsockname()[1])


def asked(port: int, path: str) -> str:
    import urllib.error
    import urllib.request

    try:
        with urllib.request.urlopen(f"http://localhost:{port}{path}", timeout=10) as answer:
            return str(answer.read().decode())
    except (urllib.error.URLError, OSError) as error:
        return str(error)


def test_probes_and_metrics_are_served(world: World) -> None:
    """While it runs: alive, ready, and counted; the rows and this process' own batches on one page."""
    pytest.importorskip("prometheus_client", reason="prometheus-client is not installed")
    health, metrics = free_port(), free_port()
    world.append("a", "b", "c")

    with managed("run_projections", "noting", "--health-port", str(health), "--metrics-port", str(metrics)) as process:
        Output(process)
        wait_until(lambda: '"ok": true' in asked(health, "/ready"), timeout=30, what="a ready process")
        wait_until(
            lambda: 'scriba_batch_events_sum{projection="noting",version="1"} 3.0' in asked(metrics, "/metrics"),
            timeout=30,
            what="the batch in the metrics",
        )
        assert '"ok": true' in asked(health, "/live")
        wait_until(
            lambda: (
                'scriba_projection_state{projection="noting",state="running",version="1"} 1.0'
                in asked(metrics, "/metrics")
            ),
            what="the state in the metrics",
        )
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


def test_a_port_that_is_taken_is_a_usage_error(world: World) -> None:
    """Exit code 2 and a cure, before anything is run."""
    import socket

    with socket.socket() as held:
        held.bind(("", 0))
        held.listen()
        done = manage("run_projections", "noting", "--until-caught-up", "--health-port", str(held.getsockname()[1]))

    assert done.returncode == 2
    assert "Give a port that is free" in done.stderr


def test_a_dead_letter_is_one_line_with_its_traceback_once(world: World, tmp_path: Path) -> None:
    """Structured: projection, version, lane, position and event id; the traceback is in no second line."""
    (position,) = world.append("a", fail=True, fixed=str(tmp_path / "never"))

    done = manage("run_projections", "noting", "--until-caught-up", "--log-format", "json")

    lines = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("{")]
    failures = [line for line in lines if "dead letter" in line["message"]]
    assert [(line["projection"], line["version"], line["position"]) for line in failures] == [("noting", 1, position)]
    assert {"lane", "event_id"} <= failures[0].keys()
    assert "told to fail" in failures[0]["traceback"]
    assert sum("traceback" in line for line in lines) == 1
