"""A handler that swallows what went wrong is found out before the commit: never a silent rollback, never a halt."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import DatabaseError, IntegrityError, connection, transaction

from scriba import Done
from tests.support.world import World, note
from tests.testapp.models import Applied, Row


def swallows_an_integrity_error(world: World) -> None:
    try:
        Row.objects.create(id=world.name, code="x")
        Row.objects.create(id=world.name, code="y")
    except IntegrityError:
        pass


def swallows_an_error_of_a_plain_select(world: World) -> None:
    try:
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1 / 0")
    except DatabaseError:
        pass


def asks_for_a_rollback(world: World) -> None:
    Applied.objects.create(projection=world.name + "x", stream_id="s", position=0)
    transaction.set_rollback(True)


@pytest.mark.case("B19")
@pytest.mark.parametrize(
    ("swallow", "kind"),
    [
        (swallows_an_integrity_error, "23505"),
        (swallows_an_error_of_a_plain_select, "22012"),
        (asks_for_a_rollback, ""),
    ],
)
def test_the_event_that_broke_the_transaction_is_the_culprit(world: World, swallow: Any, kind: str) -> None:
    """Its neighbours are applied, it is dead-lettered with the original cause, nothing of it is left."""

    def handler(data: Any, meta: Any) -> Any:
        if data["n"] == 1:
            swallow(world)
            return Done()
        return note(world.name)(data, meta)

    positions = world.append("s", "s", "s")
    assert world.run(world.projection(handler)) == 0

    world.check(positions, dead=[positions[1]])
    (letter,) = world.letters()
    assert kind in letter.error_kind
    assert not Row.objects.filter(id=world.name).exists()
