"""What only the server can tell about an event table, and whether its evidence can be trusted there.

The horizon (:mod:`scriba.sources.horizon`) is right as long as a number is drawn in the transaction that inserts the
row, and as long as locks can be seen. Whatever contradicts that is found here, once by ``manage.py check --database``
and once more whenever a projection starts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from django.db import connections

from scriba.sources.horizon import Relations
from scriba.sources.table_fields import Problem
from scriba.sources.table_statements import quoted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from scriba.sources.horizon import Query
    from scriba.sources.table_fields import EventFields

__all__ = ["STANDBY_ID", "Facts", "look_at_table"]

STANDBY_ID: Final = "scriba.E222"
SERIAL_DRAWS: Final = 1


class Facts(NamedTuple):
    """The relations that evidence is taken from (None when there is no sequence), and everything that forbids it."""

    relations: Relations | None
    errors: list[Problem]
    warnings: list[Problem]


class _Sequence(NamedTuple):
    oid: int
    name: str
    cache: int
    increment: int
    lowest: int
    cycles: bool


def look_at_table(query: Query, fields: EventFields, alias: str, sequence: str | None = None) -> Facts:
    """Ask the server behind `query`. `sequence` is the user's word for which sequence fills the position.

    Raises the driver's errors when the server cannot be asked.
    """
    connection = connections[alias]
    table = quoted(connection, fields.model._meta.db_table)
    column = fields.field(fields.position).column or ""
    oid = query("SELECT to_regclass(%s)::oid", (table,))[0][0]
    if oid is None:
        return Facts(None, [_missing(table, alias)], [])
    found = _find_sequence(query, int(oid), column, sequence)
    errors = [*_server_problems(query, table, alias), *_replication_problems(query, table, int(oid))]
    errors += _sequence_problems(found, table, column, sequence)
    if errors or found is None:
        return Facts(None, errors, [])
    locked = tuple(int(row[0]) for row in query(_WITH_PARTITIONS, (oid,)))
    relations = Relations(table, quoted(connection, column), found.name, (*locked, found.oid), found.lowest)
    return Facts(relations, [], list(_index_problems(query, table, int(oid), column)))


def _find_sequence(query: Query, table: int, column: str, given: str | None) -> _Sequence | None:
    if given is not None:
        oid = query("SELECT to_regclass(%s)::oid", (given,))[0][0]
    else:
        rows = query(_SEQUENCE_OF_COLUMN, (table, column, table, column))
        oid = rows[0][0] if rows else None
    rows = query(_SEQUENCE, (oid,)) if oid is not None else ()
    return _Sequence(*rows[0]) if rows else None


# --- what is wrong --------------------------------------------------------------------------------------


def _missing(table: str, alias: str) -> Problem:
    return Problem(
        "scriba.E225",
        f"The database {alias!r} has no table {table}.",
        f"Run manage.py migrate --database={alias}, or name the alias where the events are: using=….",
    )


def _server_problems(query: Query, table: str, alias: str) -> Iterator[Problem]:
    if query("SELECT pg_is_in_recovery()", ())[0][0]:
        yield Problem(
            STANDBY_ID,
            f"The database {alias!r} is a standby: the locks of writers of {table} are invisible there, so events that "
            "commit late would be lost.",
            "Name an alias of the primary server: using=….",
        )


def _replication_problems(query: Query, table: str, oid: int) -> Iterator[Problem]:
    if query(_REPLICATED, (oid, oid)):
        yield Problem(
            "scriba.E223",
            f"{table} is fed by logical replication: its rows arrive in the order of commits elsewhere, with positions "
            "that were drawn elsewhere, and no lock here says which are still to come.",
            "Read the table on the server where the events are written: using=….",
        )


def _sequence_problems(found: _Sequence | None, table: str, column: str, given: str | None) -> Iterator[Problem]:
    if found is None:
        what = f"there is no sequence {given}" if given else f"no sequence fills {table}.{column}"
        yield Problem(
            "scriba.E220",
            f"Positions of {table} cannot be trusted: {what}, so nothing says which are still to come.",
            "Let the database draw the position (BigAutoField, EventPosition). If a trigger draws it from a sequence, name "
            'that: sequence="schema.name". Numbers from elsewhere (hi/lo, a counter row, another server) cannot be tailed.',
        )
        return
    if found.cache > SERIAL_DRAWS:
        yield Problem(
            "scriba.E221",
            f"The sequence {found.name} of {table} has CACHE {found.cache}: sessions hold numbers back and use them in "
            "later transactions, so events that appear late would be lost.",
            f"ALTER SEQUENCE {found.name} CACHE 1; then let every writer reconnect.",
        )
    if found.increment < 1 or found.cycles:
        how = "cycles" if found.cycles else f"counts by {found.increment}"
        yield Problem(
            "scriba.E224",
            f"The sequence {found.name} of {table} {how}: later events must have higher positions.",
            f"ALTER SEQUENCE {found.name} INCREMENT BY 1 NO CYCLE;",
        )


def _index_problems(query: Query, table: str, oid: int, column: str) -> Iterator[Problem]:
    if not query(_INDEX, (column, oid)):
        yield Problem(
            "scriba.W226",
            f"No index of {table} begins with {column}: each page would scan the whole table.",
            f"CREATE UNIQUE INDEX CONCURRENTLY ON {table} ({column});",
        )


# --- statements -----------------------------------------------------------------------------------------

#: Owned by the column (serial, identity), or drawn from in its default.
_SEQUENCE_OF_COLUMN: Final = """
SELECT depends.objid::bigint, 0 AS rank FROM pg_depend AS depends
JOIN pg_class AS sequence ON sequence.oid = depends.objid AND sequence.relkind = 'S'
JOIN pg_attribute AS owner ON owner.attrelid = depends.refobjid AND owner.attnum = depends.refobjsubid
WHERE depends.classid = 'pg_class'::regclass AND depends.refclassid = 'pg_class'::regclass
  AND depends.deptype IN ('a', 'i') AND owner.attrelid = %s AND owner.attname = %s
UNION ALL
SELECT depends.refobjid::bigint, 1 FROM pg_attrdef AS filled
JOIN pg_attribute AS owner ON owner.attrelid = filled.adrelid AND owner.attnum = filled.adnum
JOIN pg_depend AS depends ON depends.classid = 'pg_attrdef'::regclass AND depends.objid = filled.oid
    AND depends.refclassid = 'pg_class'::regclass
JOIN pg_class AS sequence ON sequence.oid = depends.refobjid AND sequence.relkind = 'S'
WHERE owner.attrelid = %s AND owner.attname = %s
ORDER BY rank DESC LIMIT 1
"""
_SEQUENCE: Final = """
SELECT seqrelid::bigint, format('%%I.%%I', nspname, relname), seqcache, seqincrement, seqmin, seqcycle
FROM pg_sequence JOIN pg_class ON pg_class.oid = seqrelid JOIN pg_namespace ON pg_namespace.oid = relnamespace
WHERE seqrelid = %s
"""
_WITH_PARTITIONS: Final = """
WITH RECURSIVE tree AS (
    SELECT %s::oid AS oid UNION SELECT inhrelid FROM pg_inherits JOIN tree ON inhparent = tree.oid
) SELECT oid::bigint FROM tree
"""
_REPLICATED: Final = """
SELECT 1 FROM pg_subscription_rel WHERE srrelid = %s
UNION ALL SELECT 1 FROM pg_subscription_rel JOIN pg_inherits ON inhrelid = srrelid WHERE inhparent = %s LIMIT 1
"""
_INDEX: Final = """
SELECT 1 FROM pg_index JOIN pg_attribute ON attrelid = indrelid AND attnum = indkey[0] AND attname = %s
WHERE indrelid = %s AND indisvalid AND indpred IS NULL LIMIT 1
"""
