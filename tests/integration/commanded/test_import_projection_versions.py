"""The cut-over from commanded_ecto_projections: in place, checked, and exact at the boundary."""

from __future__ import annotations

import io
from typing import Any

import psycopg
import pytest
from django.core.management import CommandError, call_command

from scriba.management.base import operator
from scriba.models import Audit, Position, Segment
from scriba.registry import _remember, forget
from scriba.sources import commanded_checkpoint
from scriba.testing import MemorySource
from tests.support.commanded import source_of
from tests.support.world import World

COMMAND = "scriba_import_projection_versions"
NAME = "accounts_read_model"


@pytest.fixture
def old(world: World) -> Any:
    """The old library's table in the read models' database; call it with projector=number."""
    world.execute(
        "CREATE TABLE projection_versions (projection_name text PRIMARY KEY, last_seen_event_number bigint, "
        "inserted_at timestamp NOT NULL DEFAULT now(), updated_at timestamp NOT NULL DEFAULT now())"
    )

    def remember(**numbers: int | None) -> None:
        for name, number in numbers.items():
            world.execute("INSERT INTO projection_versions VALUES (%s, %s)", name, number)

    yield remember
    world.execute("DROP TABLE projection_versions")


@pytest.fixture
def declare(world: World) -> Any:
    """Register a projection of the test's own name."""
    made: list[Any] = []

    def register(source: Any, **options: Any) -> Any:
        projection = world.projection(source=source, **options)
        _remember(projection)
        made.append(projection)
        return projection

    yield register
    for projection in made:
        forget(projection)


def run(*arguments: str) -> str:
    out = io.StringIO()
    call_command(COMMAND, *arguments, stdout=out)
    return out.getvalue()


def refused(*arguments: str) -> tuple[int, str]:
    with pytest.raises(CommandError) as caught:
        run(*arguments)
    return caught.value.returncode, str(caught.value)


# --- showing ----------------------------------------------------------------------------------------------


def test_it_shows_every_projector_and_writes_nothing(world: World, store: Any, old: Any, declare: Any) -> None:
    """Without --write it is a look: the safe number of each projector, what to know, and no row anywhere."""
    store.append("account-1", 20)
    store.subscribe("in_step", 20)
    store.subscribe("behind", 15)
    store.subscribe("of_one_stream", 9, stream="account-1")
    old(in_step=20, behind=18, of_one_stream=9, unknown=7, empty=None, foreign=99)
    declare(source_of(store))

    shown = run()
    shown += run(world.name, "--projector", "in_step")

    for line in (
        "in_step: safe to go on after 20\nof_one_stream: no trustworthy number",
        "behind: safe to go on after 18\n  - its subscription acknowledges only 15: 16 to 18 are in the read model",
        "of_one_stream: no trustworthy number\n  - it was subscribed to account-1, not only to $all",
        "unknown: safe to go on after 7\n  - no subscription of this name in the event store",
        "empty: no trustworthy number\n  - its number is NULL",
        "foreign: no trustworthy number",
        f"{world.name}:1 would begin after 20. Nothing was written: give --write.",
    ):
        assert line in shown
    assert not Segment.objects.filter(projection_name=world.name).exists()


def test_without_an_event_store_it_shows_the_numbers(old: Any) -> None:
    """No projection reads an event store yet: the table is shown all the same, and says that nothing was compared."""
    old(accounts=20)

    assert "accounts: safe to go on after 20\n  - not compared with an event store" in run()


def test_an_empty_table_is_said_to_be_empty(old: Any) -> None:
    """Nothing to show is said."""
    assert run() == "The table holds no projector.\n"


def test_the_table_may_be_elsewhere(world: World, store: Any, declare: Any) -> None:
    """`schema_prefix` put the table into another schema; a name without a table is refused with a hint."""
    world.execute("CREATE SCHEMA tenant_1")
    world.execute("CREATE TABLE tenant_1.projection_versions (projection_name text, last_seen_event_number bigint)")
    try:
        world.execute("INSERT INTO tenant_1.projection_versions VALUES ('accounts', 5)")
        assert "accounts: safe to go on after 5" in run("--table", "tenant_1.projection_versions")
        code, message = refused("--table", "projection_versions")
    finally:
        world.execute("DROP SCHEMA tenant_1 CASCADE")

    assert code == 2
    assert "has no table projection_versions" in message


# --- writing ----------------------------------------------------------------------------------------------


@pytest.mark.case("A22")
@pytest.mark.usefixtures("transactional_db")
@pytest.mark.parametrize("last_seen", [12, 15, 20])
@pytest.mark.parametrize("checkpoint", ["own", "shared"])
def test_the_window_between_both_numbers_is_applied_once(
    world: World, store: Any, old: Any, declare: Any, monkeypatch: Any, last_seen: int, checkpoint: str
) -> None:
    """Wherever the subscription stands, the first event applied is the one after the projector's own number.

    In shared mode a subscription that is ahead is believed: what lies between did not concern the old projector.
    """
    monkeypatch.setattr(commanded_checkpoint, "RETRY_S", (0.05, 0.1))
    store.append("account-1", 25)
    store.subscribe(NAME, last_seen)
    old(**{NAME: 15})
    options = {} if checkpoint == "own" else {"checkpoint": "shared", "subscription_name": NAME}
    projection = declare(source_of(store, **options, start_from="origin"))

    said = run(world.name, "--projector", NAME, "--write")
    assert world.run(projection) == 0

    first = 16 if checkpoint == "own" else max(15, last_seen) + 1
    assert f"{world.name}:1 begins after 15, where '{NAME}' stopped." in said
    assert world.applied() == list(range(first, 26))
    assert world.state.floor == 15
    assert world.segment.watermark == 25
    (entry,) = Audit.objects.filter(projection_name=world.name)
    assert (entry.action, entry.actor, entry.detail) == (
        "import", operator(), f"begins after 15, where '{NAME}' stopped",
    )  # fmt: skip
    assert store.subscription(NAME)[1] == (last_seen if checkpoint == "own" else 25)


@pytest.mark.case("A22")
@pytest.mark.usefixtures("transactional_db")
def test_what_lies_below_the_floor_is_settled_and_not_applied(world: World, store: Any, old: Any, declare: Any) -> None:
    """Even when such events are handed out again, they are counted as settled before and change nothing."""
    store.append("account-1", 10)
    old(**{NAME: 6})
    projection = declare(source_of(store))
    run(world.name, "--projector", NAME, "--write")
    Segment.objects.filter(projection_name=world.name).update(watermark=2)

    assert world.run(projection) == 0

    assert world.applied() == [7, 8, 9, 10]
    assert world.counters()["deduplicated"] == 4


def test_the_old_table_is_left_alone(world: World, store: Any, old: Any, declare: Any) -> None:
    """Going back is possible: neither the old table nor the store changes by the import."""
    store.append("account-1", 5)
    store.subscribe(NAME, 5)
    old(**{NAME: 5})
    declare(source_of(store))
    before = (store.subscription(NAME), run())

    run(world.name, "--projector", NAME, "--write")

    assert (store.subscription(NAME), run()) == before


# --- refusing ---------------------------------------------------------------------------------------------


def test_a_running_projector_is_refused_unless_forced(world: World, store: Any, old: Any, declare: Any) -> None:
    """While the old subscription's lock is held its number moves: named, refused, and only force goes on."""
    store.append("account-1", 5)
    row = store.subscribe(NAME, 5)
    old(**{NAME: 5})
    declare(source_of(store))
    with psycopg.connect(store.dsn, autocommit=True, application_name="old node") as node:
        node.execute(f"SELECT pg_advisory_lock('{store.schema}.subscriptions'::regclass::oid::int, {row})")

        code, message = refused(world.name, "--projector", NAME, "--write")
        assert (code, "still runs: pid" in message, "old node" in message) == (1, True, True)
        assert not Segment.objects.filter(projection_name=world.name).exists()
        assert "begins after 5" in run(world.name, "--projector", NAME, "--write", "--force")


@pytest.mark.usefixtures("transactional_db")
def test_a_projection_that_has_run_is_refused(world: World, store: Any, old: Any, declare: Any) -> None:
    """A starting point under a projection that has applied events would contradict them."""
    store.append("account-1", 5)
    old(**{NAME: 5})
    projection = declare(source_of(store))
    assert world.run(projection) == 0

    code, message = refused(world.name, "--projector", NAME, "--write")

    assert code == 1
    assert "has run already (watermark 5)" in message
    assert world.state.floor is None
    assert Position.objects.filter(projection_name=world.name).exists()


@pytest.mark.usefixtures("transactional_db")
def test_a_projection_that_runs_now_is_refused(world: World, store: Any, old: Any, declare: Any) -> None:
    """A process that owns the projection has read where to begin already."""
    old(**{NAME: 5})
    store.append("account-1", 5)
    projection = declare(source_of(store))
    with world.running(projection):
        world.wait_applied(5)

        code, message = refused(world.name, "--projector", NAME, "--write")

    assert code == 1
    assert "stop it first" in message


def test_an_untrustworthy_number_is_refused(world: World, store: Any, old: Any, declare: Any) -> None:
    """A stream's version is no global number, and nothing makes it one."""
    store.append("account-1", 5)
    store.subscribe(NAME, 5, stream="account-1")
    old(**{NAME: 5})
    declare(source_of(store))

    code, message = refused(world.name, "--projector", NAME, "--write", "--force")

    assert code == 1
    assert "it was subscribed to account-1" in message
    assert not Segment.objects.filter(projection_name=world.name).exists()


def test_wrong_usage_says_what_is_missing(world: World, store: Any, old: Any, declare: Any) -> None:
    """The projection and the projector are named together, and both must exist."""
    old(accounts=5)
    declare(source_of(store))

    assert refused("--write") == (2, "--write needs the projection that continues, and --projector NAME.")
    assert "Name it: --projector NAME" in refused(world.name)[1]
    assert refused(world.name, "--projector", "acounts")[1] == "there is no projector 'acounts'; known: accounts."
    assert refused("nowhere", "--projector", "accounts")[0] == 2


def test_a_projection_over_another_source_is_refused(world: World, old: Any, declare: Any) -> None:
    """The old numbers mean something in the event store only."""
    old(accounts=5)
    declare(MemorySource())

    code, message = refused(world.name, "--projector", "accounts", "--write")

    assert code == 2
    assert "the old numbers mean nothing there" in message


def test_an_event_store_that_is_away_is_one_message(world: World, store: Any, old: Any, declare: Any) -> None:
    """No traceback: the database cannot be reached, exit code 2."""
    old(accounts=5)
    declare(source_of(store, dsn="postgresql://nobody@127.0.0.1:1/nothing"))

    code, message = refused(world.name, "--projector", "accounts")

    assert code == 2
    assert "the event store cannot be looked at" in message
