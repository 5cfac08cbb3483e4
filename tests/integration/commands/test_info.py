"""scriba_info: rows become a table, a text or JSON, and the remarks that numbers cannot make."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

import pytest

from scriba.management.overview import JSON_KEYS
from tests.integration.commands.conftest import Shell, Subject


def test_a_running_projection_is_one_line(shell: Shell, subject: Subject) -> None:
    """State, watermark, head, lag, counters, letters and owner stand in one row."""
    subject.segment(watermark=9_000, head=10_000, rate=1234.5)
    subject.lanes((700, 20, 1), (300, 5, 1))
    subject.letter(17)

    heading, line = shell("scriba_info", subject.name).splitlines()

    assert heading.split()[:3] == ["projection", "status", "watermark"]
    assert line.split() == [
        f"{subject.name}:1", "running", "9,000", "10,000", "1,000", "1,234", "1,000", "25", "1", "shop-1:42:abc",
    ]  # fmt: skip


def test_the_columns_stand_below_each_other(shell: Shell, subject: Subject, sibling: Subject) -> None:
    """Plain output is aligned, so that people and `cut` can read it."""
    subject.segment()
    sibling.segment(watermark=9_000_000, head=9_000_000)

    heading, *lines = shell("scriba_info", subject.name).splitlines()

    starts = {heading.index("status"), *(line.index("running") for line in lines)}
    assert len(starts) == 1
    assert len(lines) == 2


def test_a_name_alone_shows_all_versions(shell: Shell, subject: Subject, sibling: Subject) -> None:
    """Versions are siblings; one of them is named with a colon."""
    both, one = shell("scriba_info", subject.name), shell("scriba_info", f"{subject.name}:2")

    assert f"{subject.name}:1" in both
    assert f"{subject.name}:2" in both
    assert f"{subject.name}:1" not in one


def test_an_owner_that_fell_silent_runs_nothing(shell: Shell, subject: Subject) -> None:
    """The database's clock decides: a lease that ran out means `not running`, and what to do about it."""
    subject.segment(live=False)

    shown = shell("scriba_info", subject.name)

    assert "not running" in shown
    assert "shop-1:42:abc" not in shown
    assert f"run_projections {subject.name}:1" in shown


def test_a_halt_is_shown_with_cause_and_cure(shell: Shell, subject: Subject) -> None:
    """Whoever looks at three in the morning reads what happened and the two commands that leave it."""
    subject.segment()
    subject.state(halt_cause="42703: no such column", halt_label="42703", halted_at=datetime.now(UTC))

    shown = shell("scriba_info", subject.name)

    assert "halted" in shown.splitlines()[1]
    assert f"{subject.name}:1 halted: 42703: no such column" in shown
    assert f"scriba_stop {subject.name}:1, then scriba_start {subject.name}:1" in shown


@pytest.mark.parametrize("is_halted", [True, False])
@pytest.mark.parametrize(
    ("head", "shown", "plain"), [(100, "≥ 10", (10, True)), (90, "unknown", (None, False)), (None, "-", (None, False))]
)
def test_a_lag_that_nobody_looks_at_is_no_zero(
    shell: Shell, subject: Subject, head: int | None, shown: str, plain: tuple[int | None, bool], is_halted: bool
) -> None:
    """Who is halted or gone does not look at its source: a lower bound, or unknown, in the table and for programs."""
    subject.segment(live=is_halted, watermark=90, head=head)
    if is_halted:
        subject.state(halt_cause="42703: no such column", halt_label="42703", halted_at=datetime.now(UTC))

    line = shell("scriba_info", subject.name).splitlines()[1]
    (found,) = json.loads(shell("scriba_info", subject.name, "--json"))

    assert f"  {shown}  " in line
    assert (found["lag_events"], found["lag_is_lower_bound"]) == plain
    assert found["lag_seconds"] is None


def test_a_pause_says_who_and_why(shell: Shell, subject: Subject) -> None:
    """A wish that differs from running is shown with its author and reason."""
    subject.segment(status="paused")
    subject.state(wish="paused", wish_by="eve@host", wish_reason="deploy")

    assert f"{subject.name}:1 is wished paused by eve@host: deploy" in shell("scriba_info", subject.name)


def test_what_holds_the_projection_up_is_said(shell: Shell, subject: Subject) -> None:
    """The owner's words about a writer that holds the horizon back, or a lost connection, are shown."""
    subject.segment(reason="waiting for pid 4711 (12 s): INSERT INTO shop_event")

    assert "waiting for pid 4711 (12 s): INSERT INTO shop_event" in shell("scriba_info", subject.name)


def test_parked_events_are_told_apart(shell: Shell, subject: Subject) -> None:
    """One open letter with two events behind it is not three failures."""
    subject.letter(1)
    subject.letter(2, status="parked")
    subject.letter(3, status="parked")
    subject.letter(4, status="replayed")

    assert "1 + 2 parked" in shell("scriba_info", subject.name)


def test_a_projection_that_never_ran_is_shown(shell: Shell, subject: Subject) -> None:
    """No row yet is no error."""
    assert f"{subject.name}:1" in shell("scriba_info", subject.name)


def test_json_has_a_stable_shape(shell: Shell, subject: Subject) -> None:
    """A list of objects, always with the same keys, also for one that never ran."""
    (never,) = json.loads(shell("scriba_info", subject.name, "--json"))
    subject.segment(watermark_at=datetime.now(UTC) - timedelta(seconds=30))
    subject.lanes((5, 4, 3))
    (running,) = json.loads(shell("scriba_info", subject.name, "--json"))

    assert tuple(never) == tuple(running) == JSON_KEYS
    assert (never["status"], never["watermark"], never["lag_events"]) == ("not running", None, None)
    assert (running["status"], running["wish"], running["lag_events"]) == ("running", "running", 10)
    assert 30 <= running["lag_seconds"] < 60
    assert running["counters"] == {"applied": 5, "skipped": 4, "dead_lettered": 3, "deduplicated": 0, "unmatched": 0}
    assert running["dead_letters"] == {"open": 0, "parked": 0, "replayed": 0, "discarded": 0}


def test_a_terminal_gets_the_same_facts(shell: Shell, subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table for a terminal says what the plain one says."""
    monkeypatch.setenv("COLUMNS", "160")
    subject.segment(watermark=9_000, head=10_000, reason="waiting for pid 4711")

    shown = shell("scriba_info", subject.name, terminal=True)

    for text in (f"{subject.name}:1", "running", "9,000", "10,000", "shop-1:42:abc", "waiting for pid 4711"):
        assert text in shown


def test_an_unknown_name_is_a_usage_error(shell: Shell, subject: Subject) -> None:
    """Exit code 2, and the name that was probably meant."""
    code, message = shell.refused("scriba_info", f"{subject.name}x")

    assert code == 2
    assert f"did you mean '{subject.name}'" in message


@pytest.mark.parametrize("wrong", [":2x", ":", ":-1"])
def test_a_version_is_a_number(shell: Shell, subject: Subject, wrong: str) -> None:
    """What stands behind the colon is a version."""
    code, message = shell.refused("scriba_info", subject.name + wrong)

    assert code == 2
    assert "a version, a number" in message


def test_an_unknown_version_names_those_there_are(shell: Shell, subject: Subject, sibling: Subject) -> None:
    """The message lists the versions of the name."""
    code, message = shell.refused("scriba_info", f"{subject.name}:7")

    assert code == 2
    assert "version(s) 1, 2" in message


def test_the_history_is_shown_newest_first(shell: Shell, subject: Subject) -> None:
    """Who asked what, when and why, for people and for programs."""
    shell("scriba_pause", subject.name, "--reason", "deploy 4711")
    shell("scriba_resume", subject.name)

    lines = shell("scriba_info", subject.name, "--history").splitlines()
    entries = json.loads(shell("scriba_info", subject.name, "--history", "--json"))

    assert "resume" in lines[0]
    assert lines[1].endswith(": deploy 4711")
    assert [(entry["action"], "@" in entry["actor"]) for entry in entries] == [("resume", True), ("pause", True)]
