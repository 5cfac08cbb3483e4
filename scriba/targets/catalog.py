"""What the database itself says about a table: the facts that decide whether writes on it may be folded.

The model is not asked, because a trigger, a unique index or a check may come from a migration's ``RunSQL``. Read once
per driver connection and table; a reconnect reads again. Always holds: what is not understood counts as a reason
against folding (`obstacle`), never as permission.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from collections.abc import Mapping

    from django.db.backends.base.base import BaseDatabaseWrapper

__all__ = ["ColumnFacts", "TableFacts", "facts_of"]


class ColumnFacts(NamedTuple):
    """One column. `type` is PostgreSQL's full name of it, without length or precision."""

    type: str
    length: int | None  #: the n of varchar(n)
    whole_digits: int | None  #: digits before the point that numeric(p, s) has room for
    longest_text: int | None  #: characters that fit `length` and every index row
    is_required: bool  #: NOT NULL
    is_positive: bool  #: has exactly the check that Django's positive fields have
    is_generated: bool
    is_exclusive: bool  #: part of a unique index or an exclusion constraint beside the primary key
    is_guarded: bool  #: part of something that may refuse a value: a check, an expression, a condition
    draws: bool  #: its default is worked out at each insert (a sequence, a function)
    calls: bool  #: its default calls a function that is not PostgreSQL's own, which may read anything
    merges_equals: bool  #: its collation calls different texts equal


class TableFacts(NamedTuple):
    """One table. `obstacle` says why nothing on it is folded (empty: nothing in the way)."""

    obstacle: str
    columns: Mapping[str, ColumnFacts]
    primary_key: frozenset[str]  #: its columns; empty without one that identifies a row at any moment
    has_exclusive: bool  #: rows exclude each other by something beside the primary key
    deletes_spread: bool  #: a foreign key elsewhere makes the database itself change rows on delete


_read: WeakKeyDictionary[Any, dict[str, TableFacts]] = WeakKeyDictionary()


def facts_of(connection: BaseDatabaseWrapper, db_table: str) -> TableFacts:
    """Return the facts about `db_table` as the present connection to the server first saw them."""
    connection.ensure_connection()
    known = _read.setdefault(connection.connection, {})
    facts = known.get(db_table)
    if facts is None:
        facts = known[db_table] = _facts(_ask(connection, db_table))
    return facts


def _ask(connection: BaseDatabaseWrapper, db_table: str) -> dict[str, Any] | None:
    with connection.cursor() as cursor:
        cursor.execute(_QUERY, [connection.ops.quote_name(db_table)])
        row = cursor.fetchone()
    return json.loads(row[0]) if row else None


def _facts(told: dict[str, Any] | None) -> TableFacts:
    if told is None:
        return TableFacts("the table does not exist", {}, frozenset(), has_exclusive=False, deletes_spread=False)
    indexes = told["indexes"]
    exclusive = [index for index in indexes if index["excludes"] or (index["unique"] and not index["primary"])]
    return TableFacts(
        obstacle=next((reason for reason, holds in told["obstacles"].items() if holds), ""),
        columns={column["name"]: _column(column, told) for column in told["columns"]},
        primary_key=frozenset(*(index["columns"] for index in indexes if index["primary"] and index["identifies"])),
        has_exclusive=bool(exclusive),
        deletes_spread=told["deletes_spread"],
    )


def _column(column: dict[str, Any], told: dict[str, Any]) -> ColumnFacts:
    name, indexes = column["name"], [index for index in told["indexes"] if _touches(index, column["name"])]
    checks = [check for check in told["checks"] if name in check["columns"] or not check["columns"]]
    positive = [check for check in checks if check["definition"] == f"CHECK (({column['quoted']} >= 0))"]
    lengths = [column["length"]] if column["length"] is not None else []
    lengths += [_INDEX_ROW // (4 * index["width"]) for index in indexes]
    return ColumnFacts(
        type=column["type"],
        length=column["length"],
        whole_digits=column["whole_digits"],
        longest_text=min(lengths, default=None),
        is_required=column["required"],
        is_positive=bool(positive),
        is_generated=column["generated"],
        is_exclusive=any(index["excludes"] or (index["unique"] and not index["primary"]) for index in indexes),
        is_guarded=(
            len(checks) > len(positive)
            or any(index["computed"] or index["method"] not in _PLAIN_METHODS for index in indexes)
            or any(other["generated"] for other in told["columns"])
        ),
        draws=column["draws"],
        calls=column["calls"],
        merges_equals=column["merges_equals"],
    )


def _touches(index: dict[str, Any], column: str) -> bool:
    return column in index["columns"] or index["whole_row"]


_INDEX_ROW: Final = 2600  #: bytes that surely fit a B-tree's row, which holds a third of a page at most
_PLAIN_METHODS: Final = ("btree", "hash", "brin", "gin")  #: refuse no value that is short enough

# A user trigger is not internal (foreign keys and deferrable constraints have internal ones). An index's expression
# and condition depend on columns that its key does not list: pg_depend knows them (0: the whole row). It also knows
# the functions that a check or a default calls, except for PostgreSQL's own, which are pinned.
_QUERY: Final = """
SELECT json_build_object(
    'obstacles', json_build_object(
        'not an ordinary table', c.relkind <> 'r' OR c.relispartition OR c.relhassubclass,
        'a trigger', EXISTS (SELECT FROM pg_trigger t WHERE t.tgrelid = c.oid AND NOT t.tgisinternal),
        'a rewrite rule', c.relhasrules,
        'row-level security', c.relrowsecurity,
        'a foreign key that is checked at once', EXISTS (
            SELECT FROM pg_constraint k WHERE k.contype = 'f' AND c.oid IN (k.conrelid, k.confrelid)
                AND NOT (k.condeferrable AND k.condeferred)),
        'a check by a function of one''s own', EXISTS (
            SELECT FROM pg_constraint k JOIN pg_depend p ON p.classid = 'pg_constraint'::regclass AND p.objid = k.oid
            WHERE k.conrelid = c.oid AND k.contype = 'c' AND p.refclassid = 'pg_proc'::regclass)
    ),
    'deletes_spread', EXISTS (
        SELECT FROM pg_constraint k WHERE k.contype = 'f' AND k.confrelid = c.oid AND k.confdeltype <> 'a'),
    'columns', (
        SELECT coalesce(json_agg(json_build_object(
            'name', a.attname, 'quoted', quote_ident(a.attname), 'type', format_type(a.atttypid, NULL),
            'length', CASE WHEN a.atttypid = 'varchar'::regtype AND a.atttypmod > 4 THEN a.atttypmod - 4 END,
            'whole_digits', CASE WHEN a.atttypid = 'numeric'::regtype AND a.atttypmod > 4 THEN
                ((a.atttypmod - 4) >> 16 & 65535) - (((a.atttypmod - 4) & 2047) # 1024) + 1024 END,
            'required', a.attnotnull,
            'generated', a.attgenerated <> '',
            'draws', a.attidentity <> '' OR coalesce(pg_get_expr(d.adbin, d.adrelid) LIKE '%%(%%', false),
            'calls', EXISTS (SELECT FROM pg_depend p WHERE p.classid = 'pg_attrdef'::regclass AND p.objid = d.oid
                AND p.refclassid = 'pg_proc'::regclass),
            'merges_equals', coalesce((SELECT NOT l.collisdeterministic FROM pg_collation l
                                       WHERE l.oid = a.attcollation), false)
        )), '[]')
        FROM pg_attribute a LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
        WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped),
    'checks', (
        SELECT coalesce(json_agg(json_build_object(
            'definition', pg_get_constraintdef(k.oid),
            'columns', ARRAY(SELECT a.attname FROM pg_attribute a
                             WHERE a.attrelid = c.oid AND a.attnum = ANY (k.conkey)))), '[]')
        FROM pg_constraint k WHERE k.conrelid = c.oid AND k.contype = 'c'),
    'indexes', (
        SELECT coalesce(json_agg(json_build_object(
            'unique', i.indisunique, 'primary', i.indisprimary, 'excludes', i.indisexclusion,
            'computed', i.indexprs IS NOT NULL OR i.indpred IS NOT NULL,
            'identifies', i.indimmediate AND i.indisvalid AND i.indnkeyatts = i.indnatts,
            'method', m.amname, 'width', i.indnatts,
            'whole_row', EXISTS (SELECT FROM pg_depend p WHERE p.classid = 'pg_class'::regclass
                AND p.objid = i.indexrelid AND p.refclassid = 'pg_class'::regclass AND p.refobjid = c.oid
                AND p.refobjsubid = 0),
            'columns', ARRAY(SELECT a.attname FROM pg_attribute a WHERE a.attrelid = c.oid AND a.attnum > 0 AND (
                a.attnum = ANY (i.indkey) OR EXISTS (
                    SELECT FROM pg_depend p WHERE p.classid = 'pg_class'::regclass AND p.objid = i.indexrelid
                        AND p.refclassid = 'pg_class'::regclass AND p.refobjid = c.oid
                        AND p.refobjsubid = a.attnum))))), '[]')
        FROM pg_index i JOIN pg_class x ON x.oid = i.indexrelid JOIN pg_am m ON m.oid = x.relam
        WHERE i.indrelid = c.oid)
)::text
FROM pg_class c WHERE c.oid = to_regclass(%s)
"""
