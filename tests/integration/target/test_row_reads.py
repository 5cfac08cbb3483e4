"""A handler's read of one row goes ahead of what is buffered when it cannot tell the difference, and only then."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from django.db import connection, connections
from django.db.models import F
from hypothesis import given
from hypothesis import strategies as st

from scriba.protocols import CursorMove, FailureKind, WriteFailed
from scriba.results import Delete, Insert, Update, Upsert
from scriba.targets.row_reads import row_read
from tests.integration.target.desk import Desk, own_connection, row
from tests.support.profiles import runs
from tests.testapp.models import Applied, Child, Counter, Row

ROWS = Row.objects.all()


@contextmanager
def executed() -> Iterator[list[str]]:
    """Note what is executed on the read models, by handlers and for them. Around the batch: it keeps what it finds."""
    seen: list[str] = []

    def note(execute: Any, sql: Any, params: Any, many: Any, context: Any) -> Any:
        if "testapp_" in str(sql):
            seen.append(str(sql).split(None, 1)[0])
        return execute(sql, params, many, context)

    wrappers = connections["default"].execute_wrappers
    wrappers.insert(0, note)
    try:
        yield seen
    finally:
        wrappers.remove(note)


@pytest.mark.parametrize(
    "read",
    [
        lambda key: ROWS.get(pk=key),
        lambda key: ROWS.get(id=key),
        lambda key: ROWS.filter(pk=key).first(),
        lambda key: ROWS.filter(pk=key).exists(),
        lambda key: ROWS.only("name").get(pk=key),
        lambda key: list(ROWS.filter(pk=key).values_list("name", "status")),
    ],
)
def test_a_row_that_nothing_waits_for_is_read_without_a_flush(desk: Desk, read: Callable[[str], Any]) -> None:
    """What is buffered stays in the buffer: it becomes one statement at the end, not one for each read."""
    Row.objects.create(id="old", code=None)
    with executed() as seen, desk.batch() as batch:
        batch.add(row("new"))
        assert batch.attempt(lambda: read("old"))
        assert seen == ["SELECT"]
        desk.settle(batch, CursorMove("s", 1, 2, 2), applied=2)

    assert desk.ids() == ["new", "old"]


@pytest.mark.parametrize(
    "write", [row("a"), Update(Row, {"pk": "a"}, name="x"), Delete(Row, {"pk": "a"}), Upsert(Row(id="a"))]
)
def test_a_row_that_a_write_waits_for_is_read_after_it(desk: Desk, write: Any) -> None:
    """Read your own writes: whatever was declared before is there."""
    with desk.batch() as batch:
        if not isinstance(write, Insert):
            batch.add(row("a"))
        batch.add(write)
        found = batch.attempt(lambda: list(ROWS.filter(pk="a").values_list("name", flat=True)))

    assert found == ([] if isinstance(write, Delete) else ["x" if isinstance(write, Update) else ""])


def test_a_row_with_a_key_that_the_database_will_draw_may_be_any_row(desk: Desk) -> None:
    """As long as one waits, each read of its table comes after it."""
    with executed() as seen, desk.batch() as batch:
        batch.add(Insert(Applied(projection="p", stream_id="s", position=1)))
        batch.attempt(lambda: Applied.objects.filter(pk=1).exists())
        assert "INSERT" in seen


@pytest.mark.parametrize(
    "query",
    [
        ROWS.filter(pk="a", name="x"),
        ROWS.filter(pk__in=["a"]),
        ROWS.filter(pk="a").annotate(twice=F("amount") * 2),
        ROWS.filter(pk=F("code")),
        ROWS.exclude(pk="a"),
        Child.objects.filter(pk="a").select_related("parent"),
        Child.objects.filter(parent__id="a", id="b"),
    ],
)
def test_any_other_query_is_no_row_read(query: Any) -> None:
    """One table, plain columns, one value for one column: everything else waits for the flush."""
    sql, _ = query.query.get_compiler("default").as_sql()
    assert row_read(sql) is None


@pytest.mark.parametrize(
    "sql",
    [
        'SELECT "t"."a" FROM "t" WHERE "t"."id" = %s; DELETE FROM "t"',
        'SELECT "t"."a", "u"."b" FROM "t" WHERE "t"."id" = %s',
        'SELECT "t"."a" FROM "t" WHERE "u"."id" = %s',
        'SELECT "t"."a" FROM "t" WHERE "t"."id" = %s OR true',
        'SELECT f("t"."a") FROM "t" WHERE "t"."id" = %s',
        'SELECT "t"."a" FROM "t", "u" WHERE "t"."id" = %s',
        'SELECT "t"."a" FROM "t" WHERE "t"."id" = %s FOR UPDATE',
    ],
)
def test_a_text_that_only_resembles_one_is_no_row_read(sql: str) -> None:
    """The whole text counts."""
    assert row_read(sql) is None


def test_a_column_that_is_not_the_key_names_no_row(desk: Desk) -> None:
    """The text is one of a row read, but many rows may answer, some of which wait."""
    assert row_read(ROWS.filter(code="c").query.get_compiler("default").as_sql()[0])
    with desk.batch() as batch:
        batch.add(row("a", code="c"))
        assert batch.attempt(lambda: ROWS.get(code="c").pk) == "a"


@pytest.mark.parametrize("swallowing", [False, True])
def test_a_read_ahead_that_fails_is_judged_again_with_a_savepoint(desk: Desk, swallowing: bool) -> None:
    """It has left the transaction broken and no savepoint to return to: nobody is blamed before the verdict pass."""

    def read() -> None:
        try:
            ROWS.get(pk="a")
        except Exception:
            if not swallowing:
                raise

    failures = []
    with desk.driver() as other:
        other.execute(f"LOCK TABLE {Row._meta.db_table} IN ACCESS EXCLUSIVE MODE")
        connection.cursor().execute("SET lock_timeout = '20ms'")
        for verdict in (False, True):
            with pytest.raises(WriteFailed) as failed, desk.batch(verdict=verdict) as batch:
                batch.attempt(read)
            failures.append((failed.value.guilty, failed.value.failure.kind))
        connection.cursor().execute("RESET lock_timeout")

    assert failures == [(False, FailureKind.INTEGRITY), (True, FailureKind.TRANSIENT)]


KEYS = st.sampled_from("abc")
STEPS = st.one_of(
    st.tuples(st.just("read"), KEYS, st.none()),
    st.tuples(st.sampled_from(["put", "change", "take"]), KEYS, st.integers(0, 9)),
)


@given(steps=st.lists(STEPS, min_size=1, max_size=30))
@runs(300)
def test_reads_see_what_was_declared_before_them(
    db: None, scratch_name: str, steps: list[tuple[str, str, int | None]]
) -> None:
    """Any order of writes and reads: each read finds the row as it is after everything before, and nothing behind."""
    with own_connection("default"):
        desk = Desk(scratch_name)
        try:
            _compare(desk, steps)
        finally:
            desk.close()


def _compare(desk: Desk, steps: list[tuple[str, str, int | None]]) -> None:
    expected: dict[str, int | None] = {}
    with desk.batch() as batch:
        for what, key, value in steps:
            if what == "read":
                found = batch.attempt(lambda key=key: Counter.objects.filter(pk=key).first())
                assert (found.value if found else None) == expected.get(key)
            elif what == "put":
                batch.add(Upsert(Counter(key=key, value=value)))
                expected[key] = value
            elif what == "change":
                batch.add(Update(Counter, {"pk": key}, value=value))
                expected = {**expected, key: value} if key in expected else expected
            else:
                batch.add(Delete(Counter, {"pk": key}))
                expected.pop(key, None)
    assert dict(desk.rows.rows("SELECT key, value FROM testapp_counter")) == expected
