"""The statements that read an event table: compiled once per subscription, keyset pages only.

Django compiles what it knows best (columns, foreign keys, the user's `filter`); around that stands plain SQL, so that
a page costs one index range and an event costs one tuple. Payloads come as text and are decoded by a worker. A page is
bounded by rows and by bytes: the running sum is taken over sizes that need no decompression where nothing is
compressed, and payloads beyond the bound never leave the server.
"""

from __future__ import annotations

from datetime import UTC, tzinfo
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import psycopg
from django.core.exceptions import FieldError
from django.db import connections, models
from django.db.models import BooleanField, Case, F, Q, Value, When

from scriba.connection import OwnConnection
from scriba.event import Event, Payload
from scriba.exceptions import ConfigurationError
from scriba.sources.decoding import JsonColumn, RawColumn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from django.db.backends.base.base import BaseDatabaseWrapper

    from scriba.event import Codec
    from scriba.sources.decoding import Column, Hook
    from scriba.sources.table_fields import AnyField, EventFields

__all__ = ["SEPARATOR", "RowShape", "Statements", "column_of", "compile_statements", "quoted", "select_rows"]

SEPARATOR: Final = ":"  #: between the parts of a stream id that is made of several columns
_PREFIX: Final = "scriba_"
_new: Final = tuple.__new__  #: past the generated constructor, which is Python: once for each event


class Statements(NamedTuple):
    """SQL with named parameters.

    `page`: every row behind `after` (``limit``, ``budget``); `wanted`: only those that the filters let through, up to
    `upto`; `bound`: the position `rows` rows behind `after`, as far as `upto`; `one`: at `position`; `last`: the
    highest position and its time.
    """

    page: str
    wanted: str
    bound: str
    one: str
    last: str


class RowShape(NamedTuple):
    """How a row becomes an event."""

    codec: Codec
    stream_id_of: Callable[[Event], str] | None
    zone: tzinfo

    def events(self, rows: Iterable[Sequence[Any]]) -> list[Event]:
        """Return the events of `rows`: the columns of a page, payloads undecoded."""
        codec = self.codec
        found = [
            _new(
                Event,
                (position, stream, kind, key, data, metadata, at, version, correlation, causation, "", size, codec),
            )
            for position, stream, kind, key, data, metadata, at, version, correlation, causation, size, _wanted in rows
        ]
        if self.zone is not UTC:
            found = [
                event._replace(occurred_at=event.occurred_at and event.occurred_at.astimezone(UTC)) for event in found
            ]
        return found if self.stream_id_of is None else [_with_stream(event, self.stream_id_of) for event in found]


class _BrokenStream:
    """The codec of an event whose stream id could not be computed: its own dead letter, never a crash of the reader."""

    def __init__(self, codec: Codec, error: Exception) -> None:
        self._codec = codec
        self._error = error

    def decode(self, event: Event) -> Payload:
        del event
        raise self._error

    def stored(self, event: Event) -> tuple[Any, Any]:
        return self._codec.stored(event)


def _with_stream(event: Event, stream_id_of: Callable[[Event], str]) -> Event:
    try:
        stream_id: Any = stream_id_of(event)
        if not isinstance(stream_id, str):
            msg = f"stream_id=… must return a string, not {stream_id!r}"
            raise TypeError(msg)  # noqa: TRY301 - one event's fault, like any error of the callable
    except Exception as error:  # noqa: BLE001 - any callable of the team's
        return event._replace(stream_id=f"position {event.position}", codec=_BrokenStream(event.codec, error))  # type: ignore[arg-type]
    return event._replace(stream_id=stream_id)


# --- columns --------------------------------------------------------------------------------------------


def column_of(field: AnyField | None, alias: str, decode: Hook | None = None) -> Column:
    """Return how what `field` stores is decoded; `decode` is the user's own way."""
    if decode is not None:
        return RawColumn(decode)
    if isinstance(field, models.JSONField):
        return JsonColumn(decoder=field.decoder)
    if isinstance(field, models.BinaryField):
        return JsonColumn(is_binary=True)
    read = getattr(field, "from_db_value", None)
    if read is not None:  # a field of the team's: encrypted, compressed
        return RawColumn(lambda raw, _type: read(raw, None, connections[alias]))
    return JsonColumn()


def quoted(connection: BaseDatabaseWrapper, name: str) -> str:
    """Return a table or column name as SQL."""
    return str(connection.ops.quote_name(name))


# --- statements -----------------------------------------------------------------------------------------


def compile_statements(
    fields: EventFields, connection: BaseDatabaseWrapper, *, where: Q | None, has_types: bool
) -> Statements:
    """Compile for the database behind `connection`. `where` is the user's filter; `has_types`: ``types`` is given too."""
    source = _source(fields, connection, where)
    is_wanted = " AND ".join(["scriba_wanted"] * (where is not None) + ["scriba_type = ANY(%(types)s)"] * has_types)
    columns = _columns(fields, is_wanted)
    cost = _cost(fields)
    wanted = is_wanted or "true"
    table = quoted(connection, fields.model._meta.db_table)
    key = quoted(connection, fields.field(fields.position).column or "")
    page = f"""
SELECT {columns}, {wanted} FROM (
  SELECT *, sum(scriba_cost) OVER (ORDER BY scriba_position ROWS UNBOUNDED PRECEDING) - scriba_cost AS scriba_before FROM (
    SELECT *, CASE WHEN {wanted} THEN {cost} ELSE 0 END AS scriba_cost FROM ({source}) AS source
    WHERE scriba_position > %(after)s AND scriba_position <= %(upto)s {{filtered}}
    ORDER BY scriba_position LIMIT %(limit)s) AS sized) AS summed
WHERE scriba_before < %(budget)s ORDER BY scriba_position"""
    return Statements(
        page=page.format(filtered=""),
        wanted=page.format(filtered=f"AND {wanted}"),
        bound=f"SELECT {key} FROM {table} WHERE {key} > %(after)s AND {key} <= %(upto)s ORDER BY {key} "
        f"OFFSET %(rows)s - 1 LIMIT 1",
        one=f"SELECT {_columns(fields, '')}, true FROM (SELECT *, 0 AS scriba_cost FROM ({source}) AS source) AS sized "
        "WHERE scriba_position = %(position)s",
        last=f"SELECT scriba_position, {_time(fields)} FROM ({source}) AS source ORDER BY scriba_position DESC LIMIT 1",
    )


def _source(fields: EventFields, connection: BaseDatabaseWrapper, where: Q | None) -> str:
    """Return Django's SELECT of every row, with the parts of an event under names of ours, parameters written in."""
    rows = select_rows(fields, connection.alias, where)
    statement, parameters = rows.query.get_compiler(using=connection.alias).as_sql()
    return _written_in(statement, parameters, connection.alias) if parameters else statement


def _written_in(statement: str, parameters: Sequence[Any], alias: str) -> str:
    """Write `parameters` into `statement`, as the driver quotes them for this server."""
    own = OwnConnection(alias)
    try:
        with own.transaction() as cursor:
            return psycopg.ClientCursor(cursor.connection).mogrify(statement, parameters).replace("%", "%%")
    finally:
        own.close()


def select_rows(fields: EventFields, alias: str, where: Q | None) -> models.QuerySet[Any]:
    """Return the query over every row; raises ConfigurationError for a `where` that cannot be one. Opens no connection."""
    named: dict[str, Any] = {_PREFIX + "position": F(fields.position)}
    named |= {f"{_PREFIX}stream_{number}": F(path) for number, path in enumerate(fields.stream_id)}
    for part in ("type", "data", "id", "metadata", "occurred_at", "stream_version", "correlation_id", "causation_id"):
        path = getattr(fields, part)
        if path is not None:
            named[_PREFIX + part] = F(path)
    if where is not None:
        named[_PREFIX + "wanted"] = Case(
            When(where, then=Value(True)), default=Value(False), output_field=BooleanField()
        )
    try:
        # No manager: one that leaves rows out would turn them into numbers that never come.
        rows: models.QuerySet[Any] = models.QuerySet(model=fields.model, using=alias)
        rows = rows.annotate(**named).values_list(*named)
    except FieldError as error:
        msg = f"TableSource({fields.model.__name__}): filter={where!r} does not fit the model: {error}"
        raise ConfigurationError(msg) from error
    _refuse_many(rows.query.alias_map.values(), where)
    return rows


def _refuse_many(joins: Iterable[Any], where: Q | None) -> None:
    for join in joins:
        relation = getattr(join, "join_field", None)
        if relation is not None and not (relation.many_to_one or relation.one_to_one):
            msg = (
                f"TableSource: filter={where!r} follows a relation to many rows ({relation.name}), which would deliver an "
                "event once per row. Filter by Exists(…), or by columns of the event's own row."
            )
            raise ConfigurationError(msg)


def _columns(fields: EventFields, is_wanted: str) -> str:
    """Return the columns of an event in the order of :meth:`RowShape.events`."""
    payload = "CASE WHEN " + is_wanted + " THEN {} END" if is_wanted else "{}"
    stream = f" || '{SEPARATOR}' || ".join(
        f"coalesce(scriba_stream_{number}::text, '')" for number in range(len(fields.stream_id))
    )
    return ", ".join(
        (
            "scriba_position::bigint",
            stream or "''",
            "coalesce(scriba_type::text, '')",
            "coalesce(scriba_id::text, '')",
            payload.format(_payload(fields, fields.data, "scriba_data")),
            payload.format(_payload(fields, fields.metadata, "scriba_metadata")),
            _time(fields),
            "scriba_stream_version::bigint" if fields.stream_version else "NULL::bigint",
            "scriba_correlation_id::text" if fields.correlation_id else "NULL::text",
            "scriba_causation_id::text" if fields.causation_id else "NULL::text",
            "scriba_cost::int",
        )
    )


def _payload(fields: EventFields, path: str | None, column: str) -> str:
    if path is None:
        return "NULL::text"
    return column if _is_binary(fields.field(path)) else f"{column}::text"


def _time(fields: EventFields) -> str:
    """A time without a zone is in the connection's, as Django wrote it; one that Python cannot hold is left out."""
    if fields.occurred_at is None:
        return "NULL::timestamptz"
    at = "scriba_occurred_at::timestamptz"
    return f"CASE WHEN {at} >= '0001-01-02+00' AND {at} < '9999-12-31+00' THEN {at} END"


def _cost(fields: EventFields) -> str:
    """Return the bytes of an event's payload, without decompressing where the size is known."""
    sizes = [_size(fields.field(path), column) for path, column in _payloads(fields) if path is not None]
    return " + ".join(f"coalesce({size}, 0)" for size in sizes)


def _payloads(fields: EventFields) -> tuple[tuple[str | None, str], ...]:
    return (fields.data, "scriba_data"), (fields.metadata, "scriba_metadata")


def _size(field: AnyField, column: str) -> str:
    if not isinstance(field, models.JSONField):
        return f"octet_length({column}{'' if _is_binary(field) else '::text'})"
    return f"CASE WHEN pg_column_compression({column}) IS NULL THEN pg_column_size({column}) ELSE octet_length({column}::text) END"


def _is_binary(field: AnyField) -> bool:
    return isinstance(field, models.BinaryField) or field.get_internal_type() == "BinaryField"
