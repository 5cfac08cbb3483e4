"""One SQL statement for many rows: text compiled once per model and column set, values bound as array literals.

Every statement joins the table with ``unnest`` of the rows' columns. Updates and deletes say ``key = ANY (…)`` beside
the join: with the literal in the text the planner knows how many rows to expect and takes the index, without it a
large table may be read whole. Always holds: nothing here chooses what goes together or in which order (`layers.py`
does); each statement touches a row once. Must not keep server-side state, because poolers may hand out another
server connection afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from scriba.targets.layers import Entry, Form, Op
from scriba.targets.literals import array_literal

if TYPE_CHECKING:
    from scriba.round_trips import Script
    from scriba.targets.columns import Column
    from scriba.targets.shapes import Shape

__all__ = ["MAX_BYTES", "add_layer", "forbid_cached_plans"]

MAX_BYTES: Final = 4_000_000  #: characters of values in one statement; more rows are split, never a single row


def forbid_cached_plans(connection: Any, script: Script) -> None:
    """Keep the server from planning these statements for an empty table and keeping the plan.

    Only a driver that prepares statements on the server can run into that; Django's default binds on the client.
    """
    options = connection.settings_dict.get("OPTIONS") or {}
    if options.get("server_side_binding") and connection.connection.prepare_threshold is not None:
        script.add("SET LOCAL plan_cache_mode = force_custom_plan")


def add_layer(script: Script, layer: Sequence[Entry], unmatched: Callable[[int], None]) -> None:
    """Add the statements that write one layer; `unmatched` is told how many updates and deletes found no row."""
    groups: dict[Form, list[Entry]] = {}
    for entry in layer:
        group = groups.get(entry.form)
        if group is None:
            groups[entry.form] = [entry]
        else:
            group.append(entry)
    for form, entries in groups.items():
        _add(script, form, entries, unmatched)


def _add(script: Script, form: Form, entries: list[Entry], unmatched: Callable[[int], None]) -> None:
    if form.op in _KEYED and len(entries) > 1:
        entries.sort(key=_key)  # two workers lock shared rows in one order
    parameters = _BINDERS[form.op](entries)
    if len(entries) > 1 and sum(map(len, parameters)) > MAX_BYTES:
        half = len(entries) // 2
        _add(script, form, entries[:half], unmatched)
        script.run()
        _add(script, form, entries[half:], unmatched)
        return
    afterwards = _AFTERWARDS[form.op]
    script.add(_statement(form, entries), parameters, lambda cursor: unmatched(afterwards(cursor, entries)))


# --- Text -------------------------------------------------------------------------------------------------


def _statement(form: Form, entries: Sequence[Entry]) -> str:
    returns = _needs_count(entries) if form.op in _KEYED else entries[0].obj is not None
    sql = form.sql.get(returns)
    if sql is None:
        sql = form.sql[returns] = _COMPILERS[form.op](form, returns)
    return sql


def _insert_text(form: Form, returns: bool) -> str:  # noqa: FBT001 - one of two texts, as below
    shape: Any = form.table
    names = ", ".join(column.quoted for column in form.columns)
    values = ", ".join(f"v.c{place}{column.cast}" for place, column in enumerate(form.columns))
    sql = f"INSERT INTO {shape.table} ({names}) SELECT {values} FROM {_unnested(form.columns, 'c')}"
    return sql + (f" RETURNING {shape.keys[0].quoted}" if returns else "")


def _upsert_text(form: Form, returns: bool) -> str:  # noqa: FBT001
    shape: Any = form.table
    key = ", ".join(column.quoted for column in shape.keys)
    taken = ", ".join(f"{column.quoted} = EXCLUDED.{column.quoted}" for column in form.takes_over or ())
    action = f"DO UPDATE SET {taken}" if taken else "DO NOTHING"
    return f"{_insert_text(form, returns)} ON CONFLICT ({key}) {action}"


def _update_text(form: Form, returns: bool) -> str:  # noqa: FBT001
    shape: Any = form.table
    sets = ", ".join(f"{column.quoted} = v.c{place}{column.cast}" for place, column in enumerate(form.columns))
    source = _keyed_source(shape, form.columns, returns)
    return f"UPDATE {shape.table} AS t SET {sets} FROM {source} WHERE {_same_row(shape)}{_places(returns)}"


def _delete_text(form: Form, returns: bool) -> str:  # noqa: FBT001
    shape: Any = form.table
    source = _keyed_source(shape, (), returns)
    return f"DELETE FROM {shape.table} AS t USING {source} WHERE {_same_row(shape)}{_places(returns)}"


def _unnested(columns: Sequence[Column], prefix: str) -> str:
    arrays = ", ".join(f"%s::{column.element}[]" for column in columns)
    names = ", ".join(f"{prefix}{place}" for place in range(len(columns)))
    return f"unnest({arrays}) AS v({names})"


def _keyed_source(shape: Shape, columns: Sequence[Column], returns_places: bool) -> str:  # noqa: FBT001
    arrays = ", ".join(f"%s::{column.element}[]" for column in (*shape.keys, *columns))
    names = ", ".join(
        [*(f"k{place}" for place in range(len(shape.keys))), *(f"c{place}" for place in range(len(columns)))]
    )
    if returns_places:
        return f"unnest({arrays}) WITH ORDINALITY AS v({names}, place)"
    return f"unnest({arrays}) AS v({names})"


def _same_row(shape: Shape) -> str:
    joins = [f"t.{key.quoted} = v.k{place}" for place, key in enumerate(shape.keys)]
    known = [f"t.{key.quoted} = ANY (%s::{key.element}[])" for key in shape.keys]
    return " AND ".join(joins + known)


def _places(returns_places: bool) -> str:  # noqa: FBT001
    return " RETURNING v.place" if returns_places else ""


# --- Parameters -------------------------------------------------------------------------------------------


def _rows(entries: Sequence[Entry]) -> list[str]:
    return [array_literal(texts) for texts in zip(*[entry.texts for entry in entries], strict=True)]


def _keys(entries: Sequence[Entry]) -> list[str]:
    keys: list[Any] = [entry.key for entry in entries]
    return (
        [array_literal(texts) for texts in zip(*keys, strict=True)]
        if isinstance(keys[0], tuple)
        else [array_literal(keys)]
    )


def _updated(entries: Sequence[Entry]) -> list[str]:
    keys = _keys(entries)
    return [*keys, *_rows(entries), *keys]


def _deleted(entries: Sequence[Entry]) -> list[str]:
    return _keys(entries) * 2


# --- What came of it --------------------------------------------------------------------------------------


def _needs_count(entries: Sequence[Entry]) -> bool:
    """Say whether the row count is not enough: an entry that stands for several writes counts as many."""
    return any(entry.count > 1 for entry in entries)


def _count_unmatched(cursor: Any, entries: Sequence[Entry]) -> int:
    if cursor.rowcount == len(entries):
        return 0
    if not _needs_count(entries):
        return len(entries) - int(cursor.rowcount)
    found = {place for (place,) in cursor.fetchall()}
    return sum(entry.count for place, entry in enumerate(entries, 1) if place not in found)


def _hand_out_keys(cursor: Any, entries: Sequence[Entry]) -> int:
    """Tell instances the keys that the database drew, because others may be waiting to refer to them."""
    if entries[0].obj is not None:
        for entry, (key,) in zip(entries, cursor.fetchall(), strict=True):
            shape: Any = entry.form.table
            setattr(entry.obj, shape.keys[0].attname, key)
    return 0


def _key(entry: Entry) -> Any:
    return entry.key


def _nothing(_cursor: Any, _entries: Sequence[Entry]) -> int:
    return 0


_KEYED: Final = (Op.UPDATE, Op.DELETE)
_COMPILERS: Final[dict[Op, Callable[[Form, bool], str]]] = {
    Op.INSERT: _insert_text, Op.UPDATE: _update_text, Op.DELETE: _delete_text, Op.UPSERT: _upsert_text,
}  # fmt: skip
_BINDERS: Final[dict[Op, Callable[[Sequence[Entry]], list[str]]]] = {
    Op.INSERT: _rows, Op.UPDATE: _updated, Op.DELETE: _deleted, Op.UPSERT: _rows,
}  # fmt: skip
_AFTERWARDS: Final[dict[Op, Callable[[Any, Sequence[Entry]], int]]] = {
    Op.INSERT: _hand_out_keys, Op.UPDATE: _count_unmatched, Op.DELETE: _count_unmatched, Op.UPSERT: _nothing,
}  # fmt: skip
