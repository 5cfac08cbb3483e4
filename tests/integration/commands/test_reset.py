"""scriba_reset: forgets everything in one transaction, after asking, and only when nobody runs the projection."""

from __future__ import annotations

import builtins
from collections.abc import Iterator

import pytest

from scriba.models import DeadLetter, Lane, Position, Segment
from scriba.registry import forget
from tests.integration.commands.conftest import Shell, Subject, declare
from tests.testapp.models import Row


@pytest.fixture
def writing(db: None, scratch_name: str) -> Iterator[Subject]:
    """A stopped projection that declares a read model, and has some of everything."""
    made = declare(f"{scratch_name}-writing", models=[Row])
    subject = Subject(made)
    subject.segment(live=False, status="stopped", watermark=50)
    subject.lanes((10, 5, 1))
    subject.letter(7)
    Position.objects.create(**subject.keys, stream_id="order-1", position=50)
    Row.objects.create(id="order-1")
    yield subject
    forget(made)


@pytest.mark.case("D6")
def test_a_reset_forgets_cursors_watermark_and_counters(shell: Shell, writing: Subject) -> None:
    """Afterwards every event comes again; the rows of the read model and the letters' history stay."""
    shown = shell("scriba_reset", writing.name, "--no-input")

    assert "1 cursors forgotten, 1 dead letters discarded, 0 rows of read models deleted" in shown
    assert not Position.objects.filter(**writing.keys).exists()
    assert Segment.objects.get(**writing.keys).watermark is None
    assert Lane.objects.get(segment__projection_name=writing.name).applied == 0
    assert DeadLetter.objects.get(**writing.keys).status == "discarded"
    assert Row.objects.filter(id="order-1").exists()


def test_declared_read_models_are_emptied_on_request(shell: Shell, writing: Subject) -> None:
    """``--truncate`` deletes the rows of what the projection declares; ``--dead-letters`` the letters."""
    shown = shell("scriba_reset", writing.name, "--no-input", "--truncate", "--dead-letters")

    assert "1 dead letters deleted, 1 rows of read models deleted" in shown
    assert not Row.objects.exists()
    assert not DeadLetter.objects.filter(**writing.keys).exists()


def test_a_read_model_can_be_named(shell: Shell, writing: Subject) -> None:
    """``--model`` names one that is not declared."""
    shell("scriba_reset", writing.name, "--no-input", "--model", "testapp.Row")

    assert not Row.objects.exists()


@pytest.mark.parametrize("label", ["testapp.Nothing", "Row", "nowhere.Row", "a.b.c"])
def test_an_unknown_model_is_a_usage_error(label: str, shell: Shell, writing: Subject) -> None:
    """Nothing is forgotten when a name is wrong."""
    code, message = shell.refused("scriba_reset", writing.name, "--no-input", "--model", label)

    assert code == 2
    assert "app_label.ModelName" in message
    assert Position.objects.filter(**writing.keys).exists()


def test_truncate_without_declared_models_is_a_usage_error(shell: Shell, subject: Subject) -> None:
    """There is nothing to truncate; the message says both ways to name something."""
    code, message = shell.refused("scriba_reset", subject.name, "--no-input", "--truncate")

    assert code == 2
    assert "--model" in message


@pytest.mark.case("D6")
def test_a_running_projection_is_not_reset(shell: Shell, writing: Subject) -> None:
    """While a process runs it: exit code 1, and nothing is touched."""
    writing.segment(live=True, status="running")

    code, message = shell.refused("scriba_reset", writing.name, "--no-input", "--truncate")

    assert code == 1
    assert "stop it first" in message
    assert Row.objects.exists()
    assert Position.objects.filter(**writing.keys).exists()


@pytest.mark.case("D6")
def test_a_projection_that_never_ran_is_reset_to_nothing(shell: Shell, subject: Subject) -> None:
    """Fine, with zeros."""
    assert "0 cursors forgotten, 0 dead letters discarded" in shell("scriba_reset", subject.name, "--no-input")


def test_a_reset_asks_and_says_what_goes(shell: Shell, writing: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """The question names the read models and the letters; another answer than yes does nothing."""
    monkeypatch.setattr(builtins, "input", lambda prompt: "no")

    code, message = shell.refused("scriba_reset", writing.name, "--truncate", "--dead-letters")

    assert (code, message) == (2, "Nothing was done.")
    assert "Every row of testapp.Row is deleted." in shell.out
    assert "Its 1 dead letters are deleted." in shell.out
    assert Position.objects.filter(**writing.keys).exists()
