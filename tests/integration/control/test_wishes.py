"""start, pause, resume and stop: wishes that any process writes and the owner follows."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from django.db import connections, transaction

import scriba
from scriba.exceptions import ConfigurationError, InvalidState, ProjectionHalted, UnknownProjection, WaitTimeout
from scriba.protocols import Status
from scriba.registry import forget
from scriba.results import Skip
from scriba.testing import MemorySource
from tests.integration.control.conftest import Owner
from tests.support.processes import database_url
from tests.support.waiting import in_thread, wait_until
from tests.support.world import World

COMMANDS: dict[str, Callable[..., Any]] = {
    "start": scriba.start, "pause": scriba.pause, "resume": scriba.resume, "stop": scriba.stop,
}  # fmt: skip
#: From each state, the commands that are possible and where they lead. Everything else is InvalidState.
POSSIBLE = {
    "running": {"pause": "paused", "stop": "stopped"},
    "paused": {"resume": "running", "stop": "stopped"},
    "stopped": {"start": "running"},
    "halted": {"stop": "stopped"},
    "halted and stopped": {"start": "running"},
}


def bring_to(state: str, world: World, owner: Owner) -> None:
    if state.startswith("halted"):
        owner.halts()
    if state.endswith("stopped"):
        scriba.stop(world.projection())
    if state == "paused":
        scriba.pause(world.projection())


@pytest.mark.case("D1")
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("state", POSSIBLE)
def test_a_command_is_done_or_refused_never_silently_idempotent(
    world: World, owner: Owner, state: str, command: str
) -> None:
    """The table of states and commands, each cell once; a refusal names the state and changes nothing."""
    bring_to(state, world, owner)
    before = world.state.wish

    if command in POSSIBLE[state]:
        COMMANDS[command](world.projection(), by="ann", reason="because")
        assert (world.state.wish, world.state.wish_by, world.state.wish_reason) == (
            POSSIBLE[state][command], "ann", "because",
        )  # fmt: skip
    else:
        with pytest.raises(InvalidState) as refused:
            COMMANDS[command](world.projection())
        assert refused.value.state == (
            "halted"
            if state == "halted" or (state.startswith("halted") and command != "stop")
            else state.rsplit(maxsplit=1)[-1]
        )
        assert world.state.wish == before


@pytest.mark.case("D3")
def test_stop_then_start_leaves_a_halt_and_nothing_else_does(world: World, owner: Owner) -> None:
    """A halt is terminal until a human acts; the refusal says what happened and what to do."""
    owner.halts("no column 'total'")

    with pytest.raises(InvalidState, match=r"stop and start it.*no column 'total'"):
        scriba.resume(world.projection())
    scriba.stop(world.projection())
    assert world.state.halt_cause == "no column 'total'"
    scriba.start(world.projection())

    assert (world.state.halt_cause, world.state.halt_label, world.state.halted_at) == ("", "", None)


@pytest.mark.case("D1")
def test_of_two_operators_at_the_same_moment_one_succeeds(world: World, owner: Owner) -> None:
    """State check and change are one statement: the slower one is told so."""
    for _ in range(10):
        barrier, outcomes = threading.Barrier(2), []

        def pause(barrier: threading.Barrier = barrier, outcomes: list[str] = outcomes) -> None:
            barrier.wait(10)
            try:
                scriba.pause(world.projection())
                outcomes.append("done")
            except InvalidState as error:
                outcomes.append(error.state)
            finally:
                connections.close_all()

        threads = [threading.Thread(target=pause) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert sorted(outcomes) == ["done", "paused"]
        scriba.resume(world.projection())


@pytest.mark.case("D1")
@pytest.mark.parametrize(
    "function", [*COMMANDS.values(), scriba.info, scriba.reset, scriba.dead_letters, scriba.start_projection]
)
def test_an_unknown_projection_is_named(function: Callable[..., Any]) -> None:
    """A misspelt name is an error of its own, with the closest known one where there is one."""
    with pytest.raises(UnknownProjection, match="no-such-projection"):
        function("no-such-projection")
    with pytest.raises(UnknownProjection, match="no projection"):
        function(function)


def test_a_projection_is_named_in_three_ways(world: World) -> None:
    """By the decorated function, by its name (version 1), by (name, version)."""

    @scriba.projection(world.name, source=MemorySource(), parallelism=1)
    def handler(event: Any, meta: Any) -> Any:
        return Skip()

    try:
        scriba.pause(handler)
        scriba.resume(world.name)
        scriba.stop((world.name, 1))
        with pytest.raises(UnknownProjection):
            scriba.stop((world.name, 2))
    finally:
        forget(handler)
    assert world.state.wish == "stopped"


def test_what_never_ran_can_be_paused_but_not_resumed(world: World) -> None:
    """Without a row the wish is *running*: a deployment may stop a projection before its first start."""
    with pytest.raises(InvalidState) as refused:
        scriba.resume(world.projection())
    assert refused.value.state == "running"

    scriba.pause(world.projection())

    assert world.state.wish == "paused"


def test_versions_are_wished_separately(world: World) -> None:
    """(name, version) is the identity."""
    scriba.pause(world.projection(version=2))

    assert scriba.info(world.projection(version=2)).wish == "paused"
    assert scriba.info(world.projection(version=1)).wish == "running"


def test_a_wish_is_announced(world: World, owner: Owner) -> None:
    """Whoever listens need not wait for the next look."""
    with psycopg.connect(database_url(), autocommit=True) as listener:
        listener.execute("LISTEN scriba_wish")

        scriba.pause(world.projection())

        assert next(listener.notifies(timeout=10, stop_after=1)).payload == str(world.identity)


def test_a_wish_in_a_transaction_that_rolls_back_was_never_wished(world: World, owner: Owner) -> None:
    """Commands run on the caller's connection, like everything else in a request."""

    def pause_and_fail() -> None:
        with transaction.atomic():
            scriba.pause(world.projection())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        pause_and_fail()
    assert world.state.wish == "running"


# --- wait=True --------------------------------------------------------------------------------------------------


@pytest.mark.case("D1")
def test_wait_returns_when_the_owner_has_followed(world: World) -> None:
    """Pause, resume, stop and start of a running projection, each followed by the process that owns it."""
    projection = world.projection()
    with world.running(projection):
        wait_until(lambda: scriba.info(projection).status == Status.RUNNING, what="it to run")
        for command, status in (
            (scriba.pause, Status.PAUSED), (scriba.resume, Status.RUNNING), (scriba.stop, Status.STOPPED),
            (scriba.start, Status.RUNNING),
        ):  # fmt: skip
            command(projection, wait=True)
            assert scriba.info(projection).status == status


def test_without_an_owner_a_stop_is_done_at_once_and_the_others_say_that_nobody_runs_it(world: World) -> None:
    """A stop waits for nothing to be running; a pause or start waits for somebody to follow."""
    with pytest.raises(WaitTimeout, match="no process runs it"):
        scriba.pause(world.projection(), wait=True, timeout=0.02)
    assert world.state.wish == "paused"

    scriba.stop(world.projection(), wait=True, timeout=0.02)


def test_wait_says_what_a_slow_owner_shows(world: World, owner: Owner) -> None:
    """The wish stays, and the message says who has it and what that process does instead."""
    owner.shows(Status.RUNNING, 7)

    with pytest.raises(WaitTimeout, match="owner shows it running") as late:
        scriba.stop(world.projection(), wait=True, timeout=0.02)

    assert late.value.reached == 7
    assert world.state.wish == "stopped"


def test_wait_sees_a_halt_instead(world: World, owner: Owner) -> None:
    """A projection that halts while it should pause will never be paused."""
    owner.shows(Status.RUNNING)
    with in_thread(lambda: scriba.pause(world.projection(), wait=True)) as answer:
        wait_until(lambda: world.state.wish == "paused", what="the wish")
        owner.halts("meanwhile")

    assert isinstance(answer[0], ProjectionHalted)
    assert "meanwhile" in str(answer[0])


def test_a_stop_of_a_halted_projection_is_followed_by_its_owner_showing_halted(world: World, owner: Owner) -> None:
    """A halted owner has nothing left to stop."""
    owner.halts()
    owner.shows(Status.HALTED)

    scriba.stop(world.projection(), wait=True, timeout=0.02)


def test_waiting_inside_a_transaction_is_refused(world: World, owner: Owner) -> None:
    """Nobody could see the wish before the transaction ends; waiting there would only time out."""
    with transaction.atomic(), pytest.raises(transaction.TransactionManagementError, match="inside a transaction"):
        scriba.pause(world.projection(), wait=True)
    assert world.state.wish == "running"


# --- start_projection -------------------------------------------------------------------------------------------


@pytest.mark.case("D10")
def test_start_projection_runs_here_wishes_running_and_returns_a_handle(world: World) -> None:
    """The original's name for it: whoever calls it wants it to run, whatever was wished before."""
    scriba.pause(world.projection())
    positions = world.append("a", "b", "a")

    with scriba.start_projection(world.projection(), parallelism=1) as handle:
        world.wait_applied(3)
        assert world.state.wish == "running"
        assert sum(thread.name.startswith(f"scriba {world.identity} lane-") for thread in threading.enumerate()) == 1
    assert handle.wait(0)

    world.check(positions)


@pytest.mark.parametrize("option", ["name", "version", "source", "target", "partition_by", "no_such_option"])
def test_the_identity_cannot_be_overridden(world: World, option: str) -> None:
    """A start with another identity would silently be another projection."""
    with pytest.raises(ConfigurationError, match=option):
        scriba.start_projection(world.projection(), **{option: 2})
