"""scriba_health: one verdict, with the reason for each doubt."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from tests.integration.commands.conftest import Shell, Subject


def test_a_running_projection_is_healthy(shell: Shell, subject: Subject) -> None:
    """Owned by a live process, not halted: exit code 0."""
    subject.segment()

    assert shell("scriba_health", subject.name) == f"{subject.name}:1: healthy\n"


def test_a_projection_that_nobody_runs_is_not(shell: Shell, subject: Subject) -> None:
    """Wished running, run by nobody: the alarm this command is for."""
    assert shell.refused("scriba_health", subject.name) == (1, f"{subject.name}:1: run by no process")


def test_a_halt_is_not_healthy(shell: Shell, subject: Subject) -> None:
    """A halted projection is unhealthy although a process holds it, and whatever is wished."""
    subject.segment()
    subject.state(wish="stopped", halt_cause="no such column", halted_at=datetime.now(UTC))

    assert shell.refused("scriba_health", subject.name) == (1, f"{subject.name}:1: halted: no such column")


@pytest.mark.parametrize("wish", ["paused", "stopped"])
def test_what_was_wished_is_healthy(wish: str, shell: Shell, subject: Subject) -> None:
    """A pause is no alarm, however far behind it leaves the projection; the output says who wanted it."""
    subject.segment(live=False, watermark=1, head=1_000_000)
    subject.state(wish=wish, wish_by="eve@host")

    shown = shell("scriba_health", subject.name, "--max-lag-events", "10", "--max-lag-seconds", "1")

    assert shown == f"{subject.name}:1: {wish} on request of eve@host\n"


@pytest.mark.parametrize(("option", "limit"), [("--max-lag-events", "10"), ("--max-lag-seconds", "60")])
def test_a_lag_at_the_limit_is_healthy(option: str, limit: str, shell: Shell, subject: Subject) -> None:
    """The limits are the largest healthy values."""
    subject.segment(watermark=90, head=100, watermark_at=datetime.now(UTC) - timedelta(seconds=30))

    assert "healthy" in shell("scriba_health", subject.name, option, limit)


@pytest.mark.parametrize(
    ("option", "limit", "problem"),
    [("--max-lag-events", "9", "10 positions behind (at most 9"), ("--max-lag-seconds", "29", "behind (at most 29 s")],
)
def test_a_lag_above_the_limit_is_not(option: str, limit: str, problem: str, shell: Shell, subject: Subject) -> None:
    """Both numbers are said."""
    subject.segment(watermark=90, head=100, watermark_at=datetime.now(UTC) - timedelta(seconds=30))

    code, message = shell.refused("scriba_health", subject.name, option, limit)

    assert code == 1
    assert problem in message


def test_an_unknown_lag_is_not_healthy_when_a_limit_is_given(shell: Shell, subject: Subject) -> None:
    """A limit that cannot be judged is no silence."""
    subject.segment(watermark=None, head=None)

    code, message = shell.refused("scriba_health", subject.name, "--max-lag-events", "5")

    assert code == 1
    assert "unknown" in message


def test_dead_letters_that_wait_are_counted(shell: Shell, subject: Subject) -> None:
    """Open and parked ones wait for a human; resolved ones do not."""
    subject.segment()
    subject.letter(1)
    subject.letter(2, status="parked")
    subject.letter(3, status="replayed")

    assert "healthy" in shell("scriba_health", subject.name, "--max-dead-letters", "2")
    assert shell.refused("scriba_health", subject.name, "--max-dead-letters", "1") == (
        1,
        f"{subject.name}:1: 2 dead letters wait (at most 1 are allowed)",
    )


def test_every_problem_is_named(shell: Shell, subject: Subject, sibling: Subject) -> None:
    """One line per problem, each with the projection's name."""
    subject.segment(watermark=0, head=50)
    subject.letter(1)

    _, message = shell.refused("scriba_health", subject.name, "--max-lag-events", "5", "--max-dead-letters", "0")

    assert message.splitlines() == [
        f"{subject.name}:1: 50 positions behind (at most 5 are allowed)",
        f"{subject.name}:1: 1 dead letters wait (at most 0 are allowed)",
        f"{subject.name}:2: run by no process",
    ]


@pytest.mark.parametrize("wrong", ["-1", "x", "1.5"])
def test_a_limit_is_a_number(wrong: str, shell: Shell, subject: Subject) -> None:
    """A mistyped limit never means no limit."""
    code, message = shell.refused("scriba_health", subject.name, f"--max-lag-events={wrong}")

    assert "a whole number is needed" in message
    assert code in {1, 2}  # call_command raises Django's own; the process exits with 2
