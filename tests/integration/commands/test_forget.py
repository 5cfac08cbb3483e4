"""scriba_forget: deletes what the code does not declare any more, after asking, and nothing else."""

from __future__ import annotations

import builtins

import pytest

from scriba.management.base import operator
from scriba.models import Audit, DeadLetter, Lane, Position, ProjectionState, Segment
from scriba.registry import forget as undeclare
from tests.integration.commands.conftest import Shell, Subject, declare


@pytest.fixture
def orphan(db: None, scratch_name: str) -> Subject:
    """Rows of a projection whose declaration is gone."""
    made = declare(f"{scratch_name}-gone")
    subject = Subject(made)
    subject.segment(live=False, status="stopped", watermark=50)
    subject.lanes((10, 5, 1))
    subject.letter(7)
    Position.objects.create(**subject.keys, stream_id="order-1", position=50)
    undeclare(made)
    return subject


def has_rows(subject: Subject) -> bool:
    return any(
        model.objects.filter(**subject.keys).exists() for model in (ProjectionState, Segment, DeadLetter, Position)
    )


def test_an_orphan_is_forgotten_with_every_row(shell: Shell, orphan: Subject) -> None:
    """State, segment, lanes, cursors and letters go; who did it is in the records."""
    shown = shell("scriba_forget", orphan.name, "--no-input")

    assert shown == f"{orphan.name}:1: forgotten, 5 rows deleted.\n"
    assert not has_rows(orphan)
    assert not Lane.objects.filter(segment__projection_name=orphan.name).exists()
    entry = Audit.objects.get(**orphan.keys, action="forget")
    assert entry.actor == operator()


def test_a_version_is_named_with_a_colon(shell: Shell, orphan: Subject) -> None:
    """Another version than the one that is there is a usage error that says what there is."""
    code, message = shell.refused("scriba_forget", f"{orphan.name}:2", "--no-input")

    assert code == 2
    assert f"{orphan.name}:1" in message
    assert has_rows(orphan)
    shell("scriba_forget", f"{orphan.name}:1", "--no-input")
    assert not has_rows(orphan)


def test_a_projection_of_the_code_is_not_forgotten(shell: Shell, subject: Subject) -> None:
    """It would begin anew at the next start: that is a reset, and the message says so."""
    subject.segment(live=False)

    code, message = shell.refused("scriba_forget", subject.name, "--no-input")

    assert code == 2
    assert "scriba_reset" in message
    assert has_rows(subject)


def test_one_that_a_process_runs_is_not_forgotten(shell: Shell, orphan: Subject) -> None:
    """Another deployment may still declare it: exit code 1, and nothing is touched."""
    orphan.segment(live=True, status="running")

    code, message = shell.refused("scriba_forget", orphan.name, "--no-input")

    assert code == 1
    assert "shop-1:42:abc runs it" in message
    assert has_rows(orphan)


def test_it_asks_first(shell: Shell, orphan: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """The question says what goes and what stays; another answer than yes does nothing."""
    monkeypatch.setattr(builtins, "input", lambda prompt: "no")

    code, message = shell.refused("scriba_forget", orphan.name)

    assert (code, message) == (2, "Nothing was done.")
    assert "watermark 50" in shell.out
    assert "its read model stays" in shell.out
    assert has_rows(orphan)


def test_an_unknown_database_is_a_usage_error(shell: Shell, orphan: Subject) -> None:
    """The names of the settings are what can be named."""
    code, message = shell.refused("scriba_forget", orphan.name, "--database", "defualt", "--no-input")

    assert code == 2
    assert "did you mean 'default'" in message.lower()
    assert has_rows(orphan)
