"""One-by-one application through the ORM, and what a batch leaves behind: what folding is compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple
from unittest import mock

from django.db import connection, models, transaction
from django.utils import timezone

from scriba.results import Delete, Insert, Update, Upsert, Write
from scriba.round_trips import Script
from scriba.targets.folding import WriteBuffer
from tests.property_db.folding.app.fields import CallsField
from tests.property_db.folding.app.models import EPOCH, Defaulting

__all__ = ["Outcome", "assert_equivalent", "executed", "folded", "one_by_one"]

Build = Callable[[], Sequence[Write]]  #: makes fresh writes: a batch is never applied twice


class Outcome(NamedTuple):
    rows: dict[str, list[tuple[Any, ...]]]
    unmatched: int
    error: Exception | None
    statements: int


def assert_equivalent(build: Build, tables: Iterable[type[models.Model]], seeds: Build = tuple) -> Outcome:
    """Apply what `build` makes in both ways, each in a transaction that is rolled back; return the folded outcome."""
    tables = list(tables)
    expected = one_by_one(build, tables, seeds)
    found = folded(build, tables, seeds)
    if expected.error is not None:
        assert found.error is not None, f"one by one raises {expected.error!r}, folded does not"
        return found
    assert found.error is None, f"folded raises {found.error!r}, one by one does not"
    assert found.rows == expected.rows
    assert found.unmatched == expected.unmatched
    return found


def one_by_one(build: Build, tables: Iterable[type[models.Model]], seeds: Build = tuple) -> Outcome:
    return _outcome(lambda: sum(_apply(write) for write in build()), tables, seeds)


def folded(build: Build, tables: Iterable[type[models.Model]], seeds: Build = tuple) -> Outcome:
    def run() -> int:
        buffer = WriteBuffer(connection)
        for write in build():
            buffer.add(write)
        buffer.flush()
        return buffer.unmatched

    return _outcome(run, tables, seeds)


def _apply(write: Write) -> int:
    """The contract, word for word. Return 1 for an update or delete that matched nothing."""
    match write:
        case Insert(obj):
            if type(obj)._meta.parents:
                obj._prepare_related_fields_for_save(operation_name="save")
                models.Model.save_base(obj, force_insert=(models.Model,))
            else:
                type(obj)._base_manager.bulk_create([obj])
        case Upsert(obj) if type(obj)._meta.parents:
            obj._state.adding = False  # look for the row first
            models.Model.save_base(obj)
        case Upsert(obj):
            opts = type(obj)._meta
            key = [field.name for field in opts.pk_fields]
            unique = write.unique_fields or key
            others = [f.name for f in opts.concrete_fields if f.name not in {*key, *unique} and not f.generated]
            update = write.update_fields if write.update_fields is not None else others
            options = {"update_conflicts": True, "unique_fields": unique, "update_fields": update}
            type(obj)._base_manager.bulk_create([obj], **(options if update else {"ignore_conflicts": True}))
        case Update(model, filter, values):
            rows = model._base_manager.all()
            rows = rows.filter(**filter) if isinstance(filter, dict) else rows.filter(filter)
            return 0 if rows.update(**values) else 1
        case Delete(model, filter):
            rows = model._base_manager.all()
            rows = rows.filter(**filter) if isinstance(filter, dict) else rows.filter(filter)
            return 0 if rows.delete()[0] else 1
    return 0


def _outcome(run: Callable[[], int], tables: Iterable[type[models.Model]], seeds: Build) -> Outcome:
    CallsField.calls = 0
    seen: list[tuple[str, Any]] = []
    with mock.patch.object(timezone, "now", lambda: EPOCH):
        try:
            with transaction.atomic():
                _restart_sequences()
                for seed in seeds():
                    _apply(seed)
                with executed() as seen:
                    unmatched = run()
                with connection.cursor() as cursor:
                    cursor.execute("SET CONSTRAINTS ALL IMMEDIATE")
                rows = {model.__name__: _rows(model) for model in tables}
                transaction.set_rollback(True)
        except Exception as error:  # what it is belongs to the comparison
            return Outcome({}, 0, error, len(seen))
    return Outcome(rows, unmatched, None, len(seen))


class executed:  # noqa: N801 - reads as what it is: with executed() as statements
    """Lists the statements of folded writes and of the ORM, catalogue look-ups left out, each by itself."""

    def __init__(self) -> None:
        self._seen: list[tuple[str, Any]] = []

    def __enter__(self) -> list[tuple[str, Any]]:
        add, run, seen = Script.add, Script.run, self._seen
        in_script = []

        def noting_add(script: Script, sql: str, parameters: Any = None, then: Any = None) -> None:
            seen.append((sql, parameters))
            add(script, sql, parameters, then)

        def quiet_run(script: Script) -> None:
            in_script.append(True)
            try:
                run(script)
            finally:
                in_script.pop()

        def note(execute: Any, sql: Any, params: Any, many: Any, context: Any) -> Any:
            if "pg_class" not in sql and not in_script:
                seen.append((sql, params))
            return execute(sql, params, many, context)

        self._patches = ExitStack()
        self._patches.enter_context(mock.patch.object(Script, "add", noting_add))
        self._patches.enter_context(mock.patch.object(Script, "run", quiet_run))
        self._patches.enter_context(connection.execute_wrapper(note))
        return seen

    def __exit__(self, *error: object) -> None:
        self._patches.close()


def _rows(model: type[models.Model]) -> list[tuple[Any, ...]]:
    """Every column's text, so that 1 and 1.0, NULL and JSON null, -0.0 and 0.0 differ."""
    with connection.cursor() as cursor:
        cursor.execute(f'SELECT * FROM "{model._meta.db_table}" LIMIT 0')
        columns = [column.name for column in cursor.description]
        volatile = {"made"} if model is Defaulting else set()
        texts = [f'"{name}" IS NULL' if name in volatile else f'"{name}"::text' for name in columns]
        cursor.execute(f'SELECT {", ".join(texts)} FROM "{model._meta.db_table}"')
        return sorted(cursor.fetchall(), key=repr)


def _restart_sequences() -> None:
    """Draws are not rolled back: both ways begin with the same."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT setval(c.oid::regclass, 1, false) FROM pg_class c WHERE c.relkind = 'S' AND c.relname LIKE 'folding%'"
        )
