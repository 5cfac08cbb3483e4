"""scriba_dead_letters replay and discard, followed by a process that runs the projection."""

from __future__ import annotations

from pathlib import Path

import pytest

from scriba import info
from scriba.models import DeadLetter
from scriba.registry import find
from tests.integration.commands.conftest import Shell
from tests.support.waiting import wait_until
from tests.support.world import World

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

COMMAND = "scriba_dead_letters"


@pytest.fixture
def world(transactional_db: None) -> World:
    return World("noting")


def failed(world: World, *streams: str, fixed: Path) -> list[int]:
    """Append events that fail until the file `fixed` exists, and wait for their letters."""
    positions = world.append(*streams, fail=True, fixed=str(fixed))
    wait_until(lambda: len(world.letters()) >= len(positions), what="the dead letters")
    return positions


def test_after_the_fix_all_are_replayed(world: World, shell: Shell, tmp_path: Path) -> None:
    """The command waits for the results and counts them; what was missing is there, nothing is applied twice."""
    fixed = tmp_path / "fixed"
    with world.running(find("noting")):
        positions = failed(world, "a", "b", "c", fixed=fixed)
        fixed.touch()

        shown = shell(COMMAND, "replay", "--projection", "noting", "--kind", "ValueError", "--no-input")

    assert shown == "3 replayed\n"
    assert sorted(world.applied()) == positions
    assert info("noting").dead_letters == {"open": 0, "parked": 0, "replayed": 3, "discarded": 0}


@pytest.mark.case("B16")
def test_without_the_fix_they_fail_again(world: World, shell: Shell, tmp_path: Path) -> None:
    """Exit code 1, each with its new error; the letters stay open and count the attempt."""
    with world.running(find("noting")):
        failed(world, "a", fixed=tmp_path / "never")
        before = DeadLetter.objects.get().attempts

        code, _ = shell.refused(COMMAND, "replay", "--all", "--no-input")

    letter = DeadLetter.objects.get()
    assert code == 1
    assert shell.out == "1 failed again\n"
    assert "told to fail" in shell.err
    assert (letter.status, letter.wish, letter.error_kind) == ("open", "", "ValueError")
    assert letter.attempts > before


def test_a_discarded_letter_stays_as_history(world: World, shell: Shell, tmp_path: Path) -> None:
    """It is resolved, by whom and when; its event is never applied."""
    with world.running(find("noting")):
        failed(world, "a", fixed=tmp_path / "never")

        shown = shell(COMMAND, "discard", "--all", "--no-input")

    letter = DeadLetter.objects.get()
    assert shown == "1 discarded\n"
    assert letter.status == "discarded"
    assert letter.resolved_at is not None
    assert "@" in letter.resolved_by
    assert world.applied() == []


def test_some_pass_and_some_do_not(world: World, shell: Shell, tmp_path: Path) -> None:
    """A partial success is said in numbers, and is a failure to a script."""
    fixed = tmp_path / "fixed"
    with world.running(find("noting")):
        failed(world, "a", "b", fixed=fixed)
        world.append("c", fail=True, fixed=str(tmp_path / "never"))
        wait_until(lambda: len(world.letters()) == 3, what="the dead letters")
        fixed.touch()

        code, _ = shell.refused(COMMAND, "replay", "--all", "--no-input")

    assert code == 1
    assert "2 replayed" in shell.out
    assert "1 failed again" in shell.out


@pytest.mark.case("B14")
def test_a_run_that_ends_carries_out_what_was_wished(shell: Shell, tmp_path: Path, transactional_db: None) -> None:
    """``--until-caught-up`` does not leave while a replay is wished, nor while those parked behind it wait."""
    world, fixed = World("parking"), tmp_path / "fixed"
    first = world.append("a", fail=True, fixed=str(fixed))
    behind = world.append(*["a"] * 200)
    shell("run_projections", "parking", "--until-caught-up")
    parked = len(world.letters(status="parked"))
    fixed.touch()

    shell(COMMAND, "replay", str(world.letters(status="open")[0].pk))
    shell("run_projections", "parking", "--until-caught-up")

    assert parked == len(behind)
    assert world.applied("a") == [*first, *behind]
    assert {letter.status for letter in world.letters()} == {"replayed"}


def test_a_dry_run_says_what_would_pass(world: World, shell: Shell, tmp_path: Path) -> None:
    """After a deploy: which letters pass now, what they change, why the others do not; and nothing is changed."""
    fixed = tmp_path / "fixed"
    with world.running(find("noting")):
        first, second = failed(world, "a", "b", fixed=fixed)
        (third,) = world.append("c", fail=True, fixed=str(tmp_path / "never"))
        wait_until(lambda: len(world.letters()) == 3, what="the dead letters")
    fixed.touch()
    before = list(DeadLetter.objects.order_by("pk").values())

    code, _ = shell.refused(COMMAND, "replay", "--all", "--dry-run")

    assert code == 1
    assert "2 of 3 would pass. Nothing was changed." in shell.out
    for position in (first, second):
        assert f"noting:1 at {position}: would pass (testapp_applied +1)" in shell.out
    assert "+ testapp.Applied(" in shell.out
    assert f"noting:1 at {third}: would fail: ValueError: told to fail" in shell.out
    assert "1 letters: ValueError: told to fail" in shell.err
    assert list(DeadLetter.objects.order_by("pk").values()) == before
    assert world.applied() == []


@pytest.mark.case("B14")
def test_a_bulk_replay_releases_what_is_parked_in_order(shell: Shell, tmp_path: Path, transactional_db: None) -> None:
    """Only the head is asked for; what waits behind it is released by it, and counted as such."""
    world, fixed = World("parking"), tmp_path / "fixed"
    with world.running(find("parking")):
        positions = world.append("a", fail=True, fixed=str(fixed)) + world.append("a", "a")
        wait_until(lambda: len(world.letters()) == 3, what="the letters")
        listed = shell(COMMAND, "list", "--projection", "parking")
        fixed.touch()
        shown = shell(COMMAND, "replay", "--projection", "parking", "--no-input")
        wait_until(lambda: world.applied() == positions, what="all three in order")

    head = world.letters()[0]
    assert "open, 2 wait behind it" in listed
    assert listed.count(f"parked behind {head.pk}") == 2
    assert shown == "2 parked behind another, 1 replayed\n"
