"""scriba_dead_letters: found by filters, shown whole, wished away singly and in bulk, cleared when they are old."""

from __future__ import annotations

import builtins
import json
from datetime import UTC, datetime, timedelta

import pytest

from scriba.models import DeadLetter
from tests.integration.commands.conftest import Shell, Subject

COMMAND = "scriba_dead_letters"


def ids(shell: Shell, *filters: str) -> list[int]:
    return [line["id"] for line in json.loads(shell(COMMAND, "list", "--json", *filters))]


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the operator types, one answer per question; nobody is there when the list is empty."""
    given: list[str] = []

    def answer(prompt: str) -> str:
        if not given:
            raise EOFError
        return given.pop(0)

    monkeypatch.setattr(builtins, "input", answer)
    return given


# --- list --------------------------------------------------------------------------------------------------------


def test_unresolved_letters_are_listed_in_order(shell: Shell, subject: Subject) -> None:
    """Open and parked ones, by position; resolved ones only when they are asked for."""
    third, first = subject.letter(30), subject.letter(10)
    second = subject.letter(20, status="parked")
    done = subject.letter(5, status="replayed")

    assert ids(shell, "--projection", subject.name) == [first.pk, second.pk, third.pk]
    assert ids(shell, "--projection", subject.name, "--status", "replayed") == [done.pk]


@pytest.mark.parametrize(
    ("filters", "positions"),
    [
        (["--kind", "KeyError"], [1, 2]),
        (["--kind", "commit:23505*"], [3]),
        (["--kind", "commit:23505"], []),
        (["--type", "OrderShipped"], [2, 3]),
        (["--stream", "order-9"], [3]),
        (["--event-id", "e-1"], [1]),
        (["--group", "f1"], [1, 2]),
        (["--since", "1h"], [2, 3]),
        (["--since", "1d", "--kind", "KeyError"], [1, 2]),
    ],
)
def test_letters_are_found_by_what_is_known_of_them(
    filters: list[str], positions: list[int], shell: Shell, subject: Subject
) -> None:
    """Each filter narrows; several narrow together."""
    old = datetime.now(UTC) - timedelta(hours=2)
    made = {
        1: subject.letter(1, event_id="e-1", fingerprint="f1", occurred_at=old),
        2: subject.letter(2, event_type="OrderShipped", fingerprint="f1"),
        3: subject.letter(3, event_type="OrderShipped", stream_id="order-9", error_kind="commit:23505 (row_pkey)"),
    }

    assert ids(shell, "--projection", subject.name, *filters) == [made[position].pk for position in positions]


def test_versions_are_told_apart(shell: Shell, subject: Subject, sibling: Subject) -> None:
    """A name alone shows all versions; a version only its own."""
    one, two = subject.letter(1), sibling.letter(1)

    assert ids(shell, "--projection", subject.name) == [one.pk, two.pk]
    assert ids(shell, "--projection", f"{subject.name}:2") == [two.pk]


def test_a_long_list_is_cut_and_says_so(shell: Shell, subject: Subject) -> None:
    """A screen is not flooded; the rest is counted."""
    for position in range(5):
        subject.letter(position)

    shown = shell(COMMAND, "list", "--projection", subject.name, "--limit", "2")

    assert len(shown.splitlines()) == 1 + 2 + 1
    assert "… and 3 more" in shown


def test_equal_failures_are_one_line(shell: Shell, subject: Subject) -> None:
    """Ten thousand equal failures are one group, the largest first."""
    subject.letter(1, fingerprint="rare", error_kind="ValueError")
    for position in range(10, 14):
        subject.letter(position, fingerprint="often")

    groups = json.loads(shell(COMMAND, "list", "--groups", "--json", "--projection", subject.name))

    assert [(group["letters"], group["group"]) for group in groups] == [(4, "often"), (1, "rare")]


def test_no_letters_is_said(shell: Shell, subject: Subject) -> None:
    """An empty list is an answer for people, and an empty list for programs."""
    assert shell(COMMAND, "list", "--projection", subject.name) == "No dead letters.\n"
    assert ids(shell, "--projection", subject.name) == []


@pytest.mark.parametrize("wrong", ["yesterday", "3 fortnights", "2026-13-01", ""])
def test_a_moment_is_a_span_or_a_date(wrong: str, shell: Shell) -> None:
    """The message shows the accepted forms."""
    _, message = shell.refused(COMMAND, "list", f"--since={wrong}")

    assert "2h, 3d" in message


@pytest.mark.parametrize(
    "right", ["2 h", "90s", "5min", "1w", "2026-11-30", "2026-11-30T18:00", "2026-11-30T18:00+01:00"]
)
def test_accepted_moments(right: str, shell: Shell) -> None:
    """Spans, dates, and times with or without a zone."""
    shell(COMMAND, "list", f"--since={right}")


# --- show --------------------------------------------------------------------------------------------------------


def test_a_letter_is_shown_whole(shell: Shell, subject: Subject) -> None:
    """Payload, metadata and traceback are readable; a resolved letter can be looked at, too."""
    letter = subject.letter(
        7, event_data={"lines": [{"sku": "Å"}]}, event_metadata={"user": "eve"}, error_stacktrace="Traceback\n  KeyError",
        status="replayed",
    )  # fmt: skip

    shown = shell(COMMAND, "show", str(letter.pk))

    for text in ('"sku": "Å"', '"user": "eve"', "Traceback\n  KeyError", "replayed", "OrderPlaced"):
        assert text in shown
    assert json.loads(shell(COMMAND, "show", str(letter.pk), "--json"))["event_data"] == {"lines": [{"sku": "Å"}]}


def test_an_unknown_letter_is_a_usage_error(shell: Shell, subject: Subject) -> None:
    """Exit code 2 and where to look."""
    code, message = shell.refused(COMMAND, "show", "999999999")

    assert code == 2
    assert "scriba_dead_letters list" in message


# --- replay and discard ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("action", ["replay", "discard"])
def test_a_wish_is_left_on_the_row(action: str, shell: Shell, subject: Subject) -> None:
    """Without a process nothing waits: the wish is recorded, and the output says who will follow it."""
    letter = subject.letter(7)

    shown = shell(COMMAND, action, str(letter.pk))

    letter.refresh_from_db()
    assert letter.wish == action
    assert "@" in letter.wish_by
    assert shown == "1 still wished\n"
    assert "No process runs the projection now" in shell.err


@pytest.mark.parametrize("action", ["replay", "discard"])
def test_nothing_named_is_a_usage_error(action: str, shell: Shell, subject: Subject) -> None:
    """A forgotten filter never means every letter."""
    subject.letter(7)

    code, message = shell.refused(COMMAND, action)

    assert code == 2
    assert "ids, filters, or --all" in message


def test_bulk_work_is_confirmed(shell: Shell, subject: Subject, answers: list[str]) -> None:
    """The question shows what is meant in groups; another answer than yes does nothing."""
    for position in (1, 2):
        subject.letter(position)
    answers.append("y")

    code, message = shell.refused(COMMAND, "replay", "--projection", subject.name)

    assert (code, message) == (2, "Nothing was done.")
    assert "replay 2 dead letters" in shell.out
    assert not DeadLetter.objects.filter(projection_name=subject.name).exclude(wish="").exists()


def test_a_confirmed_bulk_is_done(shell: Shell, subject: Subject, answers: list[str]) -> None:
    """Yes goes on."""
    for position in (1, 2):
        subject.letter(position)
    answers.append("yes")

    assert shell(COMMAND, "discard", "--projection", subject.name).endswith("2 still wished\n")


def test_a_script_has_to_say_that_nobody_answers(shell: Shell, subject: Subject, answers: list[str]) -> None:
    """Without a terminal the question is a usage error, not a silent yes and not a traceback."""
    for position in (1, 2):
        subject.letter(position)

    code, message = shell.refused(COMMAND, "replay", "--projection", subject.name)

    assert code == 2
    assert "--no-input" in message
    assert shell(COMMAND, "replay", "--projection", subject.name, "--no-input") == "2 still wished\n"


def test_a_second_wish_is_refused_and_the_others_are_done(shell: Shell, subject: Subject) -> None:
    """Bulk work that is repeated says what was asked for already, and does the rest."""
    asked, fresh = subject.letter(1), subject.letter(2)
    shell(COMMAND, "replay", str(asked.pk))

    code, _ = shell.refused(COMMAND, "replay", str(asked.pk), str(fresh.pk), "--no-input")

    assert code == 1
    assert shell.out == "1 refused, 1 still wished\n"
    assert "it is waiting for its replay" in shell.err


@pytest.mark.case("B15")
def test_a_stream_that_has_moved_on_is_refused_unless_told(shell: Shell, subject: Subject) -> None:
    """An event is not applied after its successor, unless somebody takes that upon himself."""
    from scriba.models import Position

    letter = subject.letter(3)
    Position.objects.create(**subject.keys, stream_id="order-1", position=9, applied_position=9)

    code, _ = shell.refused(COMMAND, "replay", str(letter.pk))
    refused = shell.err
    shown = shell(COMMAND, "replay", str(letter.pk), "--allow-out-of-order")

    assert code == 1
    assert "'order-1' has moved on, its event at position 9 is applied" in refused
    assert shown == "1 still wished\n"


def test_a_resolved_letter_is_not_found_again(shell: Shell, subject: Subject) -> None:
    """What is replayed or discarded cannot be replayed once more."""
    letter = subject.letter(3, status="replayed")

    code, message = shell.refused(COMMAND, "replay", str(letter.pk))

    assert code == 2
    assert f"No unresolved dead letter has the id {letter.pk}" in message


# --- purge -------------------------------------------------------------------------------------------------------


def test_only_old_resolved_letters_are_purged(shell: Shell, subject: Subject) -> None:
    """Open ones stay however old they are; young ones stay whatever they are."""
    old, young = datetime.now(UTC) - timedelta(days=100), datetime.now(UTC) - timedelta(days=1)
    kept = [
        subject.letter(1, occurred_at=old),
        subject.letter(2, occurred_at=old, status="parked"),
        subject.letter(3, status="replayed", resolved_at=young),
    ]
    subject.letter(4, status="replayed", resolved_at=old)
    subject.letter(5, status="discarded", resolved_at=old)

    shown = shell(COMMAND, "purge", "--older-than", "90d", "--projection", subject.name, "--no-input")

    assert shown == "2 resolved dead letters deleted.\n"
    left = DeadLetter.objects.filter(projection_name=subject.name).order_by("position")
    assert list(left.values_list("pk", flat=True)) == [letter.pk for letter in kept]


def test_a_purge_needs_an_age(shell: Shell) -> None:
    """How old is old is a decision."""
    _, message = shell.refused(COMMAND, "purge")

    assert "--older-than" in message


def test_a_purge_is_confirmed(shell: Shell, subject: Subject, answers: list[str]) -> None:
    """Deleting asks first."""
    subject.letter(1, status="replayed", resolved_at=datetime.now(UTC) - timedelta(days=100))
    answers.append("no")

    assert shell.refused(COMMAND, "purge", "--older-than", "90d", "--projection", subject.name)[0] == 2
    assert DeadLetter.objects.filter(projection_name=subject.name).exists()


def test_an_interrupted_bulk_says_what_was_done(
    shell: Shell, subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C between two chunks: what was wished stays, the rest is counted, and repeating does it."""
    from scriba import bulk
    from scriba.management import bulk as at_the_terminal

    for position in range(5):
        subject.letter(position, stream_id=f"s{position}")
    monkeypatch.setattr(bulk, "AT_ONCE", 2)

    def interrupted(letters: object, wish: str, **options: object) -> object:
        work = bulk.wish_all(letters, wish, **options)  # type: ignore[arg-type]
        yield next(work)
        raise KeyboardInterrupt

    with monkeypatch.context() as during:
        during.setattr(at_the_terminal, "wish_all", interrupted)
        shown = shell(COMMAND, "replay", "--projection", subject.name, "--no-input")

    assert shown == "3 not asked for, 2 still wished\n"
    assert "it is safe to repeat" in shell.err
    assert shell.refused(COMMAND, "replay", "--projection", subject.name, "--no-input")[0] == 1
    assert "3 still wished" in shell.out
    assert not DeadLetter.objects.filter(projection_name=subject.name, wish="").exists()


@pytest.mark.case("B14")
def test_parked_letters_are_shown_with_their_head(shell: Shell, subject: Subject) -> None:
    """How many wait behind which letter; a replay of a parked one alone names its head."""
    head = subject.letter(1)
    parked = subject.letter(2, status="parked")

    listed = json.loads(shell(COMMAND, "list", "--json", "--projection", subject.name))

    assert [line["status"] for line in listed] == ["open, 1 wait behind it", f"parked behind {head.pk}"]
    assert shell(COMMAND, "replay", str(parked.pk)) == "1 parked behind another\n"
