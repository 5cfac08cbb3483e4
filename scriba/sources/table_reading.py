"""Everything that readings of one event table share: resolved and compiled once per source, never changed.

Needs the app registry; opens a connection only to write a filter's values into SQL.
"""

from __future__ import annotations

import threading
from datetime import UTC, tzinfo
from typing import TYPE_CHECKING, Final, NamedTuple
from zoneinfo import ZoneInfo

import psycopg
from django.db import DatabaseError, InterfaceError, connections

from scriba.failure import classify
from scriba.protocols import FailureKind
from scriba.sources.decoding import PayloadCodec
from scriba.sources.starting import StartUnknown
from scriba.sources.table_statements import RowShape, Statements, column_of, compile_statements

if TYPE_CHECKING:
    from django.db.models import Q

    from scriba.sources.decoding import Decoding, Hook
    from scriba.sources.table_fields import EventFields

__all__ = ["SourceAway", "TableReading", "is_transient", "make_reading"]

_UTC_NAMES: Final = frozenset({"UTC", "Etc/UTC", "GMT"})


class SourceAway(Exception):  # noqa: N818 - a state of the world
    """The primary server is away for the moment: the alias leads to a standby, and led to a primary before."""


class TableReading(NamedTuple):
    """What a subscription is made from."""

    fields: EventFields
    alias: str
    sequence: str | None
    start_from: str | int
    channel: str
    listens: bool
    is_filtered: bool
    types: list[str]  #: stored names of the types wanted; empty: all
    codec: PayloadCodec
    shape: RowShape
    statements: Statements
    was_read: threading.Event  #: set once the server has been found fit


def make_reading(  # noqa: PLR0913 - the options of a source
    fields: EventFields,
    alias: str,
    decoding: Decoding,
    *,
    sequence: str | None,
    start_from: str | int,
    channel: str,
    listens: bool,
    where: Q | None,
    types: frozenset[str] | None,
    decode: Hook | None,
) -> TableReading:
    """Compile. Raises :class:`~scriba.exceptions.ConfigurationError` for a filter that cannot be used."""
    connection = connections[alias]
    metadata = None if fields.metadata is None else fields.field(fields.metadata)
    codec = PayloadCodec(column_of(fields.field(fields.data), alias, decode), column_of(metadata, alias), decoding)
    zone: tzinfo = UTC if connection.timezone_name in _UTC_NAMES else ZoneInfo(connection.timezone_name)
    return TableReading(
        fields=fields,
        alias=alias,
        sequence=sequence,
        start_from=start_from,
        channel=channel,
        listens=listens,
        is_filtered=where is not None or types is not None,
        types=sorted(types or ()),
        codec=codec,
        shape=RowShape(codec, fields.stream_id_of, zone),
        statements=compile_statements(fields, connection, where=where, has_types=types is not None),
        was_read=threading.Event(),
    )


def is_transient(error: Exception) -> bool:
    """Say whether `error` of a reading may go away by itself."""
    if isinstance(error, SourceAway | StartUnknown):
        return True
    return (
        isinstance(error, psycopg.Error | DatabaseError | InterfaceError)
        and classify(error).kind is FailureKind.TRANSIENT
    )
