"""scriba_pause, _resume, _stop, _start: wishes with an author, refused in the wrong state, for one or many."""

from __future__ import annotations

import getpass

import pytest

from tests.integration.commands.conftest import Shell, Subject


@pytest.mark.parametrize(
    ("command", "before", "after"),
    [
        ("scriba_pause", "running", "paused"),
        ("scriba_resume", "paused", "running"),
        ("scriba_stop", "running", "stopped"),
        ("scriba_start", "stopped", "running"),
    ],
)
def test_a_command_records_wish_author_and_reason(
    command: str, before: str, after: str, shell: Shell, subject: Subject
) -> None:
    """The row says what is wished, by whom and why."""
    subject.segment()
    subject.state(wish=before)

    shown = shell(command, subject.name, "--reason", "deploy 4711")

    state = subject.state()
    assert (state.wish, state.wish_reason) == (after, "deploy 4711")
    assert state.wish_by.startswith(f"{getpass.getuser()}@")
    assert f"{subject.name}:1: wished {after} (shop-1:42:abc follows within a second)" in shown


def test_a_wish_without_a_process_says_so(shell: Shell, subject: Subject) -> None:
    """Nobody follows now; the next process will."""
    assert "no process runs it now; the next one follows" in shell("scriba_pause", subject.name)


@pytest.mark.case("D1")
@pytest.mark.parametrize(
    ("command", "state"),
    [("scriba_resume", "running"), ("scriba_pause", "paused"), ("scriba_stop", "stopped"), ("scriba_start", "running")],
)
def test_the_wrong_state_is_refused(command: str, state: str, shell: Shell, subject: Subject) -> None:
    """Never silently idempotent: exit code 1, with the state and what would be possible."""
    subject.state(wish=state)

    code, message = shell.refused(command, subject.name)

    assert code == 1
    assert f"while it is {state}" in message
    assert subject.state().wish == state


def test_several_are_done_as_far_as_possible(shell: Shell, subject: Subject, sibling: Subject) -> None:
    """One refusal does not keep the others from being done; the exit code tells."""
    subject.state(wish="paused")
    sibling.state(wish="running")

    code, message = shell.refused("scriba_pause", f"{subject.name}:1", f"{sibling.name}:2")

    assert code == 1
    assert f"cannot pause {subject.name}:1" in message
    assert sibling.state().wish == "paused"
    assert f"{sibling.name}:2: wished paused" in shell.out


def test_a_name_alone_means_version_one(shell: Shell, subject: Subject, sibling: Subject) -> None:
    """A command that changes something touches no sibling."""
    subject.state()
    sibling.state()

    shell("scriba_pause", subject.name)

    assert (subject.state().wish, sibling.state().wish) == ("paused", "running")


@pytest.mark.parametrize("arguments", [[], ["--all", "some-name"]])
def test_nothing_named_and_everything_named_are_usage_errors(arguments: list[str], shell: Shell) -> None:
    """A forgotten name never means all of them."""
    code, message = shell.refused("scriba_pause", *arguments)

    assert code == 2
    assert "Name the projections, or give --all" in message


def test_all_means_all(shell: Shell, subject: Subject, sibling: Subject) -> None:
    """``--all`` reaches every registered projection."""
    subject.state()
    sibling.state()

    shell("scriba_stop", "--all")

    assert (subject.state().wish, sibling.state().wish) == ("stopped", "stopped")


def test_stop_then_start_leaves_a_halt(shell: Shell, subject: Subject) -> None:
    """A halt is left by two commands, on purpose; a start alone is refused with the cause."""
    subject.state(halt_cause="no such column", halt_label="42703", halted_at="2026-01-01T00:00:00Z")

    code, message = shell.refused("scriba_start", subject.name)
    shell("scriba_stop", subject.name)
    shell("scriba_start", subject.name)

    assert code == 1
    assert "no such column" in message
    assert subject.state().halt_cause == ""


def test_an_unknown_name_is_a_usage_error(shell: Shell, subject: Subject) -> None:
    """Exit code 2; the others that were named stay untouched."""
    subject.state()

    code, _ = shell.refused("scriba_pause", subject.name, "no-such-projection")

    assert code == 2
    assert subject.state().wish == "running"
