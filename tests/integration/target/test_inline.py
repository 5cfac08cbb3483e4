"""Inside a test's own transaction: no durable block, no fence, and the hooks are run by the writer."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from django.db import IntegrityError, connection, transaction
from django.test import TestCase
from django.test.utils import CaptureQueriesContext

from scriba.models import Position, Segment
from scriba.protocols import Counters, CursorMove, CursorRefused, Identity, Settlement
from scriba.results import Insert
from scriba.targets import OrmTarget
from scriba.targets.orm import OrmWriter
from tests.testapp.models import Row

IDENTITY = Identity("inline", 1)
NO_FENCE = [(-1, -1)]  # would be refused, were it looked at


@pytest.fixture
def writer(db: None) -> Iterator[OrmWriter]:
    writer = OrmTarget().open(IDENTITY, inline=True)
    yield writer
    writer.close()
    assert connection.in_atomic_block, "the test's own connection was closed"


def settlement(position: int) -> Settlement:
    segment, _ = Segment.objects.get_or_create(projection_name="inline", projection_version=1)
    return Settlement([CursorMove("s", position, position, position)], (), Counters(applied=1), segment.pk, 0)


def test_a_batch_is_there_for_the_test_and_gone_afterwards(writer: OrmWriter) -> None:
    """It nests in the test's transaction; the fence of a test is nobody's."""
    with writer.batch(NO_FENCE) as batch:
        batch.add([Insert(Row(id="a"))])
        batch.settle(settlement(1))

    assert connection.in_atomic_block
    assert Row.objects.get().pk == "a"
    assert Position.objects.get(projection_name="inline").position == 1


def test_a_failed_batch_is_undone_alone(writer: OrmWriter) -> None:
    """The test's own rows and the batches before it stay."""
    Row.objects.create(id="the test's")
    with writer.batch(NO_FENCE) as batch:
        batch.add([Insert(Row(id="a"))])
        batch.settle(settlement(2))
    for bad in (IntegrityError, CursorRefused):
        with pytest.raises(bad), writer.batch(NO_FENCE) as batch:
            batch.add([Insert(Row(id="b"))])
            if bad is IntegrityError:
                batch.add([Insert(Row(id="a"))])
            batch.settle(settlement(1))

    assert set(Row.objects.values_list("id", flat=True)) == {"the test's", "a"}


@pytest.mark.case("A15")
def test_hooks_run_when_their_batch_is_done(writer: OrmWriter, caplog: pytest.LogCaptureFixture) -> None:
    """Once, in order, one that raises does not stop the next; those of the test itself are left to the test."""
    ran: list[str] = []

    def explode() -> None:
        raise LookupError

    transaction.on_commit(lambda: ran.append("the test's"))
    with caplog.at_level(logging.ERROR, "scriba"), writer.batch(NO_FENCE) as batch:
        batch.attempt(lambda: transaction.on_commit(lambda: ran.append("first")))
        batch.attempt(lambda: transaction.on_commit(explode))
        batch.attempt(lambda: transaction.on_commit(lambda: ran.append("third")))
        assert ran == []
    with writer.batch(NO_FENCE):
        pass

    assert ran == ["first", "third"]
    assert len(connection.run_on_commit) == 1
    assert "on_commit hook" in caplog.text


def test_hooks_of_a_failed_batch_never_run(writer: OrmWriter) -> None:
    """And none is left behind."""
    ran: list[str] = []
    with pytest.raises(LookupError), writer.batch(NO_FENCE) as batch:
        batch.attempt(lambda: transaction.on_commit(lambda: ran.append("lost")))
        raise LookupError
    with writer.batch(NO_FENCE):
        pass

    assert ran == []
    assert connection.run_on_commit == []


def test_a_failing_handler_is_undone(writer: OrmWriter) -> None:
    """As in a worker."""

    def handler() -> None:
        Row.objects.create(id="mine")
        raise LookupError

    with writer.batch(NO_FENCE) as batch:
        batch.add([Insert(Row(id="a"))])
        with pytest.raises(LookupError):
            batch.attempt(handler)
        batch.settle(settlement(1))

    assert [obj.pk for obj in Row.objects.all()] == ["a"]


def test_a_test_can_count_the_queries(writer: OrmWriter) -> None:
    """The query log is the test's."""
    with CaptureQueriesContext(connection) as captured, writer.batch(NO_FENCE) as batch:
        batch.attempt(Row.objects.count)

    assert any("COUNT" in query["sql"] for query in captured.captured_queries)


class InAnOrdinaryTestCase(TestCase):
    """Where most users will meet it."""

    def test_a_durable_batch_and_an_inline_one(self) -> None:
        """Both work inside of a TestCase; captured callbacks of the test do not run twice."""
        ran: list[str] = []
        writer = OrmTarget().open(IDENTITY, inline=True)
        with self.captureOnCommitCallbacks(execute=True), writer.batch(NO_FENCE) as batch:
            batch.attempt(lambda: transaction.on_commit(lambda: ran.append("once")))
            batch.add([Insert(Row(id="a"))])
            batch.settle(settlement(1))
        writer.close()

        assert ran == ["once"]
        assert Row.objects.count() == 1
