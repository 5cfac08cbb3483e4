"""The database of a Commanded event store: what shape it has, and every statement that reads it.

The global number of an event is the `stream_version` of its link to stream 0 (``$all``). It is handed out under a
row lock that is kept until the commit, so numbers become visible in order: a page is simply *greater than the cursor,
in order, at most n*. A missing number was hard-deleted and stays missing; nobody ever waits for one. Nothing here
locks a row of the store: a lock on stream 0 would stop every appender.

Statements are never prepared on the server: a plan that was cached while the store was small would read the whole of
`events` for every page once it is large.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from psycopg import sql

from scriba.exceptions import SourceError

if TYPE_CHECKING:
    import psycopg

__all__ = ["ALL", "Statements", "StoreShape", "inspect_store"]

Version = tuple[int, int, int]

ALL: Final = "$all"  #: the name of stream 0; the library lets nobody create a stream of that name
OLDEST: Final[Version] = (0, 14, 0)  #: the first version with today's tables
FULL: Final[Version] = (1, 2, 0)  #: older ones are read in legacy mode
NEWEST: Final[Version] = (1, 3, 2)  #: the newest one this reader was tried with
_SCHEMA_CHANNELS: Final[Version] = (1, 1, 0)  #: since then each schema has its own channel, and the lock two keys
_NEEDED: Final = ("stream_events", "events", "streams")


class StoreShape(NamedTuple):
    """What was found in the database: asked of the catalog wherever it knows, not of settings."""

    schema: str
    version: Version | None  #: None: not readable for this role, but no legacy store
    column: str  #: ``bytea`` or ``jsonb``
    has_deleted_at: bool
    has_time_zones: bool
    in_recovery: bool  #: a replica: no LISTEN, and its locks are not the primary's
    role: str

    @property
    def is_legacy(self) -> bool:
        return self.version is not None and self.version < FULL

    @property
    def remark(self) -> str:
        """What operators should know about the version; empty for one that is read fully and was tried."""
        if self.version is None or FULL <= self.version <= NEWEST:
            return ""
        what = "is read in legacy mode" if self.is_legacy else f"this reader was tried up to {_name(NEWEST)}"
        return f"the event store in schema {self.schema!r} has schema version {_name(self.version)}; {what}"

    @property
    def channel(self) -> str:
        """The channel of NOTIFY. It contains a dot, so LISTEN needs it quoted."""
        return "events" if self._is_older_than_channels else f"{self.schema}.events"

    @property
    def lock_style(self) -> str:
        """The form of the advisory lock that the library of that time takes."""
        return "legacy_bigint" if self._is_older_than_channels else "two_int"

    @property
    def _is_older_than_channels(self) -> bool:
        return self.version is not None and self.version < _SCHEMA_CHANNELS


# --- what is there ----------------------------------------------------------------------------------------


def inspect_store(connection: psycopg.Connection[Any], schema: str) -> StoreShape:
    """Look at the store in `schema` of this database.

    Raises :class:`~scriba.exceptions.SourceError`, with the cure, when there is none, when the role may not read it,
    or when its version is older than 0.14.0.
    """
    role, database, in_recovery, may_use = _one(connection, _WHERE_AM_I, {"schema": schema})
    if may_use is None:
        msg = (
            f"there is no schema {schema!r} in the database {database!r}. Which database and schema does the event store "
            "use? Name them with using= (or dsn=) and schema=."
        )
        raise SourceError(msg)
    tables = dict(connection.execute(_TABLES, {"schema": schema}).fetchall())
    _check_tables(tables, schema, database)
    _check_privileges(tables, schema, role, may_use=may_use)
    columns = dict(connection.execute(_COLUMNS, {"schema": schema}).fetchall())
    version = _version(connection, schema, tables)
    shape = StoreShape(
        schema,
        version,
        columns.get("events.data", ""),
        "streams.deleted_at" in columns,
        columns.get("events.created_at") == "timestamp with time zone",
        in_recovery,
        role,
    )
    _check_version(shape)
    return shape


_WHERE_AM_I: Final = """
    SELECT current_user::text, current_database()::text, pg_is_in_recovery(),
           (SELECT has_schema_privilege(oid, 'USAGE') FROM pg_namespace WHERE nspname = %(schema)s)
"""
_TABLES: Final = """
    SELECT relname::text, has_table_privilege(pg_class.oid, 'SELECT')
      FROM pg_class JOIN pg_namespace ON pg_namespace.oid = relnamespace
     WHERE nspname = %(schema)s AND relkind IN ('r', 'p', 'v', 'm', 'f')
"""
_COLUMNS: Final = """
    SELECT relname || '.' || attname, format_type(atttypid, NULL)
      FROM pg_attribute JOIN pg_class ON pg_class.oid = attrelid JOIN pg_namespace ON pg_namespace.oid = relnamespace
     WHERE nspname = %(schema)s AND relname IN ('events', 'streams') AND attnum > 0 AND NOT attisdropped
"""


def _check_tables(tables: dict[str, bool], schema: str, database: str) -> None:
    missing = [table for table in _NEEDED if table not in tables]
    if missing:
        msg = (
            f"schema {schema!r} of the database {database!r} holds no event store of Commanded: it has no table "
            f"{', '.join(missing)}. Is schema= the option `schema` (or `prefix`) of the Elixir application?"
        )
        raise SourceError(msg)
    if "schema_migrations" not in tables:
        msg = (
            f"the event store in schema {schema!r} has no table schema_migrations: it is older than version 0.9.0, and "
            f"{_name(OLDEST)} is the oldest that can be read. Run the library's migrations (`mix event_store.migrate`)."
        )
        raise SourceError(msg)


def _check_privileges(tables: dict[str, bool], schema: str, role: str, *, may_use: bool) -> None:
    unreadable = [table for table in _NEEDED if not tables[table]]
    if may_use and not unreadable:
        return
    names = ", ".join(f"{schema}.{table}" for table in unreadable or _NEEDED)
    msg = (
        f"the role {role!r} may not read the event store in schema {schema!r}. Grant it: "
        f"GRANT USAGE ON SCHEMA {schema} TO {role}; GRANT SELECT ON {names}, {schema}.schema_migrations TO {role};"
    )
    raise SourceError(msg)


def _version(connection: psycopg.Connection[Any], schema: str, tables: dict[str, bool]) -> Version | None:
    if not tables["schema_migrations"]:
        return None
    row = connection.execute(
        sql.SQL(
            "SELECT major_version, minor_version, patch_version FROM {}.schema_migrations ORDER BY 1 DESC, 2 DESC, 3 DESC"
            " LIMIT 1"
        ).format(sql.Identifier(schema))
    ).fetchone()
    if row is None:
        msg = f"{schema}.schema_migrations is empty: the event store was never initialised, or its version was deleted."
        raise SourceError(msg)
    return (row[0], row[1], row[2])


def _check_version(shape: StoreShape) -> None:
    where = f"the event store in schema {shape.schema!r}"
    if shape.version is None and not shape.has_deleted_at:
        msg = (
            f"{where} is an old one, and the role {shape.role!r} may not read its version: "
            f"GRANT SELECT ON {shape.schema}.schema_migrations TO {shape.role};"
        )
        raise SourceError(msg)
    if shape.version is not None and shape.version < OLDEST:
        msg = (
            f"{where} has schema version {_name(shape.version)}; {_name(OLDEST)} is the oldest that can be read. "
            "Run the library's migrations (`mix event_store.migrate`)."
        )
        raise SourceError(msg)
    if shape.column not in {"bytea", "jsonb"}:
        msg = f"{where} keeps its payloads in a column of type {shape.column!r}; bytea and jsonb are understood."
        raise SourceError(msg)


def _name(version: Version) -> str:
    return ".".join(map(str, version))


def _one(connection: psycopg.Connection[Any], statement: str, parameters: dict[str, Any]) -> Any:
    return connection.execute(statement, parameters).fetchone()


# --- the statements ---------------------------------------------------------------------------------------


class Statements:
    """Every statement that reads one store, as SQL for its schema and version.

    A page yields, per row: position, stream name, type, event id, data, metadata, time, stream version, correlation
    id, causation id, size in bytes, whether the event is wanted, the row's number in what was looked at, and how many
    rows that was.
    """

    def __init__(self, shape: StoreShape, *, is_filtered: bool = False) -> None:
        self._schema = sql.Identifier(shape.schema)
        self._parts = {
            "links": sql.Identifier(shape.schema, "stream_events"),
            "events": sql.Identifier(shape.schema, "events"),
            "streams": sql.Identifier(shape.schema, "streams"),
            "deleted_at": sql.SQL("deleted_at" if shape.has_deleted_at else "NULL::timestamptz"),
            "size": sql.SQL(_SIZES[shape.column]),
            "payload": sql.SQL("data, metadata" if shape.column == "bytea" else "data::text, metadata::text"),
            # A time that Python cannot hold must not stop the page it is in.
            "time": sql.SQL(_TIME if shape.has_time_zones else f"({_TIME}) AT TIME ZONE 'UTC'"),
            "wanted": sql.SQL(_WANTED if is_filtered else "true"),
        }
        self.page = self._fill(_PAGE)
        self.one = self._fill(_ONE)
        self.head = self._fill(_HEAD)
        self.stream = self._fill(
            "SELECT stream_id, stream_version, {deleted_at} IS NOT NULL,"
            " stream_id || '@' || (extract(epoch FROM created_at) * 1000000)::bigint"
            " FROM {streams} WHERE stream_uuid = %(name)s"
        )
        self.position_of_id = self._fill(
            "SELECT stream_version FROM {links} WHERE event_id = %(event_id)s AND stream_id = %(stream)s"
        )
        self.position_of_version = self._fill(_POSITION_OF_VERSION)

    def _fill(self, statement: str) -> sql.Composed:
        return sql.SQL(statement).format(**self._parts)


#: The size of what will be sent, without reading what lies out of line: only a compressed jsonb has to be unpacked.
_RAW_JSONB: Final = (
    "CASE WHEN pg_column_compression(ev.{0}) IS NULL THEN pg_column_size(ev.{0}) ELSE octet_length(ev.{0}::text) END"
)
_SIZES: Final = {
    "bytea": "octet_length(ev.data) + coalesce(octet_length(ev.metadata), 0)",
    "jsonb": f"{_RAW_JSONB.format('data')} + coalesce({_RAW_JSONB.format('metadata')}, 0)",
}
_TIME: Final = "CASE WHEN created_at BETWEEN '0001-01-02' AND '9999-12-30' THEN created_at END"
_WANTED: Final = """(
    (%(types)s::text[] IS NULL OR ev.event_type = ANY(%(types)s::text[])
        OR split_part(ev.event_type, '.', -1) = ANY(%(types)s::text[])
        OR CASE WHEN ev.event_type LIKE 'Elixir.%%' THEN substr(ev.event_type, 8) END = ANY(%(types)s::text[]))
    AND (%(prefix)s::text IS NULL OR starts_with(src.stream_uuid, %(prefix)s::text)))"""
_FOUND: Final = """
    position, stream_uuid, event_type, event_id::text, {payload}, {time}, version, correlation_id::text,
    causation_id::text"""
#: OFFSET 0 keeps the planner from turning the probes into a join: near the end of a store of some ten thousand events
#: it would rather read all of `events` for one page.
_LINKED: Final = """
 CROSS JOIN LATERAL (SELECT * FROM {events} WHERE event_id = link.event_id OFFSET 0) AS ev
 CROSS JOIN LATERAL (SELECT * FROM {streams} WHERE stream_id = link.original_stream_id OFFSET 0) AS src"""

#: One statement is one snapshot: a hard delete at the same moment cannot tear a page. The page ends after `limit` rows or
#: before the `budget` of bytes is passed, whichever comes first; the first event always comes. Of unwanted rows only the last
#: one comes, without its payload, to say how far the page has looked.
_PAGE: Final = f"""
SELECT {_FOUND}, size, wanted, number, looked
  FROM (SELECT page.*,
               sum(size) OVER (ORDER BY position ROWS UNBOUNDED PRECEDING) AS total,
               row_number() OVER (ORDER BY position) AS number,
               count(*) OVER () AS looked
          FROM (SELECT link.stream_version AS position, src.stream_uuid, link.original_stream_version AS version,
                       ev.event_id, ev.event_type, ev.causation_id, ev.correlation_id, ev.created_at, wanted,
                       CASE WHEN wanted THEN ev.data END AS data, CASE WHEN wanted THEN ev.metadata END AS metadata,
                       CASE WHEN wanted THEN {{size}} ELSE 0 END AS size
                  FROM (SELECT * FROM {{links}}
                         WHERE stream_id = %(stream)s AND stream_version > %(cursor)s
                         ORDER BY stream_version
                         LIMIT %(limit)s) AS link
                  {_LINKED}
                 CROSS JOIN LATERAL (SELECT {{wanted}} AS wanted) AS chosen) AS page) AS measured
 WHERE (total <= %(budget)s OR total = size) AND (wanted OR number = looked)
 ORDER BY position"""
_ONE: Final = f"""
SELECT {_FOUND}, size, true, 1, 1
  FROM (SELECT link.stream_version AS position, src.stream_uuid, link.original_stream_version AS version,
               ev.event_id, ev.event_type, ev.causation_id, ev.correlation_id, ev.created_at, ev.data, ev.metadata,
               {{size}} AS size
          FROM {{links}} AS link
          {_LINKED}
         WHERE link.stream_id = %(stream)s AND link.stream_version = %(position)s) AS found"""
_HEAD: Final = """
SELECT stream_version, {time}
  FROM {links} AS link JOIN {events} AS ev ON ev.event_id = link.event_id
 WHERE link.stream_id = %(stream)s
 ORDER BY stream_version DESC
 LIMIT 1"""
#: From a stream's own version to its number among the events of `stream`, both by index.
_POSITION_OF_VERSION: Final = """
SELECT number.stream_version
  FROM {streams} AS src
  JOIN {links} AS link ON link.stream_id = src.stream_id AND link.stream_version = %(version)s
  JOIN {links} AS number ON number.event_id = link.event_id AND number.stream_id = %(stream)s
 WHERE src.stream_uuid = %(name)s"""
