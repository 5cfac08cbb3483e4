"""A Commanded event store without Elixir: our own DDL for each schema version, and writers that number as it does.

The tables, triggers and notifications are those that a reader can observe; the statements are ours.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

import psycopg
from psycopg import sql

from scriba.sources.commanded import CommandedSource

DATA = Path(__file__).parent.parent / "data" / "commanded"
BATCH: Final = 1_000  #: most events that the library writes in one statement
VERSIONS: Final = ((0, 14, 0), (0, 17, 0), (1, 1, 0), (1, 2, 0), (1, 3, 2))
TABLES: Final = ("stream_events", "events", "streams", "subscriptions", "snapshots", "schema_migrations")


class Recorded(NamedTuple):
    """An event as an appender hands it over; `data` and `metadata` are what the column will hold."""

    type: str = "Elixir.Shop.Placed"
    data: str | bytes = "{}"
    metadata: str | bytes | None = "{}"
    event_id: uuid.UUID | None = None
    causation_id: uuid.UUID | None = None
    correlation_id: uuid.UUID | None = None
    created_at: datetime | None = None


class Store:
    """One event store: a schema of a database, at one schema version, with one type of data column."""

    def __init__(
        self, dsn: str, schema: str = "public", version: tuple[int, int, int] = (1, 3, 2), column: str = "bytea"
    ) -> None:
        self.dsn = dsn
        self.schema = schema
        self.version = version
        self.column = column
        self.connection = psycopg.connect(dsn, autocommit=True)

    def close(self) -> None:
        self.connection.close()

    # --- tables -------------------------------------------------------------------------------------------

    def create(self, *, seed: bool = True) -> Store:
        """Create the schema anew; `seed` adds the row of `$all` and the version, which dumps bring themselves."""
        times = "timestamptz" if self.version >= (0, 17, 0) else "timestamp"
        now = "now()" if self.version >= (0, 17, 0) else "(now() AT TIME ZONE 'UTC')"
        deleted = "deleted_at timestamptz," if self.version >= (1, 2, 0) else ""
        self.drop()
        self.run("CREATE SCHEMA IF NOT EXISTS {schema}")
        self.run(
            f"""
            CREATE TABLE {{schema}}.streams (
                stream_id bigserial PRIMARY KEY, stream_uuid text NOT NULL, stream_version bigint NOT NULL DEFAULT 0,
                {deleted} created_at {times} NOT NULL DEFAULT {now});
            CREATE UNIQUE INDEX ix_streams_stream_uuid ON {{schema}}.streams (stream_uuid);
            CREATE TABLE {{schema}}.events (
                event_id uuid PRIMARY KEY, event_type text NOT NULL, causation_id uuid, correlation_id uuid,
                data {self.column} NOT NULL, metadata {self.column}, created_at {times} NOT NULL DEFAULT {now});
            CREATE TABLE {{schema}}.stream_events (
                event_id uuid NOT NULL REFERENCES {{schema}}.events,
                stream_id bigint NOT NULL REFERENCES {{schema}}.streams,
                stream_version bigint NOT NULL,
                original_stream_id bigint REFERENCES {{schema}}.streams,
                original_stream_version bigint, PRIMARY KEY (event_id, stream_id));
            CREATE UNIQUE INDEX ix_stream_events ON {{schema}}.stream_events (stream_id, stream_version);
            CREATE TABLE {{schema}}.subscriptions (
                subscription_id bigserial PRIMARY KEY, stream_uuid text NOT NULL, subscription_name text NOT NULL,
                last_seen bigint, created_at {times} NOT NULL DEFAULT {now});
            CREATE UNIQUE INDEX ix_subscriptions_stream_uuid_subscription_name
                ON {{schema}}.subscriptions (stream_uuid, subscription_name);
            CREATE TABLE {{schema}}.snapshots (
                source_uuid text PRIMARY KEY, source_version bigint NOT NULL, source_type text NOT NULL,
                data {self.column} NOT NULL, metadata {self.column}, created_at {times} NOT NULL DEFAULT {now});
            CREATE TABLE {{schema}}.schema_migrations (
                major_version int, minor_version int, patch_version int, migrated_at {times} NOT NULL DEFAULT {now},
                PRIMARY KEY (major_version, minor_version, patch_version));
            """
        )
        self._notifications()
        self._guards()
        if seed:
            self.run("INSERT INTO {schema}.streams (stream_id, stream_uuid) VALUES (0, '$all')")
            self.run("INSERT INTO {schema}.schema_migrations VALUES (%s, %s, %s)", self.version)
        return self

    def _notifications(self) -> None:
        channel = f"{self.schema}.events" if self.version >= (1, 1, 0) else "events"
        on_insert = "INSERT OR " if self.version >= (1, 3, 0) else ""
        self.run(
            f"""
            CREATE FUNCTION {{schema}}.notify_events() RETURNS trigger LANGUAGE plpgsql AS $body$
            DECLARE before bigint := 0;
            BEGIN
                IF TG_OP = 'UPDATE' THEN before := OLD.stream_version; END IF;
                PERFORM pg_notify({{channel}},
                    concat_ws(',', NEW.stream_uuid, NEW.stream_id, before + 1, NEW.stream_version));
                RETURN NULL;
            END $body$;
            CREATE TRIGGER event_notification AFTER {on_insert}UPDATE ON {{schema}}.streams
                FOR EACH ROW EXECUTE FUNCTION {{schema}}.notify_events();
            """,
            channel=sql.Literal(channel),
        )

    def _guards(self) -> None:
        """Forbid changes of what was written: rules before schema version 1.2.0, triggers since."""
        guarded = [("UPDATE", "events"), ("UPDATE", "stream_events"), ("DELETE", "events"), ("DELETE", "stream_events")]
        if self.version < (1, 2, 0):
            for action, table in guarded:
                self.run(
                    f"CREATE RULE no_{action.lower()}_{table} AS ON {action} TO {{schema}}.{table} DO INSTEAD NOTHING"
                )
            return
        self.run(
            """
            CREATE FUNCTION {schema}.refuse_change() RETURNS trigger LANGUAGE plpgsql AS $body$
            BEGIN
                IF TG_OP = 'DELETE' AND 'on' IN (
                    current_setting('eventstore.enable_hard_deletes', true), current_setting('eventstore.reset', true)
                ) THEN RETURN NULL; END IF;
                RAISE EXCEPTION '% of % is not allowed', TG_OP, TG_TABLE_NAME USING ERRCODE = 'feature_not_supported';
            END $body$
            """
        )
        for action, table in [*guarded, ("DELETE", "streams")]:
            self.run(
                f"CREATE TRIGGER no_{action.lower()}_{table} BEFORE {action} ON {{schema}}.{table} "
                "FOR EACH STATEMENT EXECUTE FUNCTION {schema}.refuse_change()"
            )

    def drop(self) -> None:
        for table in TABLES:
            self.run(f"DROP TABLE IF EXISTS {{schema}}.{table} CASCADE")
        self.run("DROP FUNCTION IF EXISTS {schema}.notify_events(), {schema}.refuse_change() CASCADE")
        if self.schema != "public":
            self.run("DROP SCHEMA IF EXISTS {schema} CASCADE")

    def load(self, name: str) -> list[dict[str, Any]]:
        """Fill this empty store with rows that the real library wrote; return what Elixir itself read from `$all`."""
        script = (DATA / f"{name}.data-only.sql").read_text().replace("public.", f"{self.schema}.")
        with psycopg.connect(self.dsn, autocommit=True) as loader:
            loader.execute(script)
        return list(expected(name)["all"])

    # --- writing ------------------------------------------------------------------------------------------

    def append(self, stream: str, events: Sequence[Recorded] | int = 1, *, into: Any = None) -> int:
        """Append in one transaction, in batches of 1,000; return the last global number.

        `into` is a connection with an open transaction to append in, instead of a transaction of our own.
        """
        recorded = [Recorded()] * events if isinstance(events, int) else events
        last = 0
        with nullcontext() if into else self.connection.transaction():
            for start in range(0, len(recorded), BATCH):
                last = self._append_batch(into or self.connection, stream, recorded[start : start + BATCH])
        return last

    def _append_batch(self, connection: Any, stream: str, events: Sequence[Recorded]) -> int:
        """The numbering rule: raise the stream's version, then that of `$all`, and number from the values before."""
        ids = [event.event_id or uuid.uuid4() for event in events]
        count = len(events)
        with connection.cursor() as cursor:
            cursor.executemany(
                self.sql(
                    "INSERT INTO {schema}.events "
                    "(event_id, event_type, causation_id, correlation_id, data, metadata, created_at) "
                    f"VALUES (%s, %s, %s, %s, %s::{self.column}, %s::{self.column}, %s)"
                ),
                [
                    (key, event.type, event.causation_id, event.correlation_id, self._stored(event.data),
                     self._stored(event.metadata), event.created_at or datetime.now(UTC))
                    for key, event in zip(ids, events, strict=True)
                ],
            )  # fmt: skip
            raised = cursor.execute(
                self.sql(
                    "INSERT INTO {schema}.streams (stream_uuid, stream_version) VALUES (%s, %s) "
                    "ON CONFLICT (stream_uuid) DO UPDATE SET stream_version = streams.stream_version + %s "
                    "RETURNING stream_id, stream_version - %s"
                ),
                (stream, count, count, count),
            ).fetchone()
            stream_id, before = raised
            all_before = cursor.execute(
                self.sql(
                    "UPDATE {schema}.streams SET stream_version = stream_version + %s WHERE stream_id = 0 "
                    "RETURNING stream_version - %s"
                ),
                (count, count),
            ).fetchone()[0]
            cursor.execute(
                self.sql(
                    "INSERT INTO {schema}.stream_events "
                    "(event_id, stream_id, stream_version, original_stream_id, original_stream_version) "
                    "SELECT id, target, base + n, %(stream)s, %(before)s + n "
                    "FROM unnest(%(ids)s::uuid[]) WITH ORDINALITY AS new (id, n), "
                    "(VALUES (%(stream)s, %(before)s), (0, %(all_before)s)) AS part (target, base)"
                ),
                {"ids": ids, "stream": stream_id, "before": before, "all_before": all_before},
            )
        return int(all_before + count)

    def _stored(self, value: str | bytes | None) -> str | bytes | None:
        if value is None:
            return None
        if self.column == "bytea":
            return value.encode() if isinstance(value, str) else value
        return value.decode() if isinstance(value, bytes) else value

    def link(self, stream: str, event_ids: Sequence[uuid.UUID]) -> None:
        """Link events that exist into `stream`, which is created with version 0 first, as the library does."""
        with self.connection.transaction():
            self.run("INSERT INTO {schema}.streams (stream_uuid) VALUES (%s) ON CONFLICT DO NOTHING", (stream,))
            self.run(
                "WITH raised AS (UPDATE {schema}.streams SET stream_version = stream_version + %s "
                "WHERE stream_uuid = %s RETURNING stream_id, stream_version - %s AS base) "
                "INSERT INTO {schema}.stream_events "
                "(event_id, stream_id, stream_version, original_stream_id, original_stream_version) "
                "SELECT id, raised.stream_id, base + n, link.original_stream_id, link.original_stream_version "
                "FROM raised, unnest(%s::uuid[]) WITH ORDINALITY AS new (id, n) "
                "JOIN {schema}.stream_events AS link ON link.event_id = id AND link.stream_id = 0",
                (len(event_ids), stream, len(event_ids), list(event_ids)),
            )

    def soft_delete(self, stream: str) -> None:
        self.run("UPDATE {schema}.streams SET deleted_at = now() WHERE stream_uuid = %s", (stream,))

    def hard_delete(self, stream: str) -> None:
        """Remove a stream with its events everywhere; `$all` keeps its version, so the numbers become a hole."""
        with self.connection.transaction():
            self.connection.execute("SET LOCAL eventstore.enable_hard_deletes = 'on'")
            stream_id = self.value("SELECT stream_id FROM {schema}.streams WHERE stream_uuid = %s", (stream,))
            ids = self.event_ids(stream)
            self.run("DELETE FROM {schema}.stream_events WHERE event_id = ANY(%s)", (ids,))
            self.run("DELETE FROM {schema}.events WHERE event_id = ANY(%s)", (ids,))
            self.run("DELETE FROM {schema}.streams WHERE stream_id = %s", (stream_id,))

    def reset(self) -> None:
        """Empty the store so that its numbers begin at 1 again, as the library's own reset does."""
        with self.connection.transaction():
            self.connection.execute("SET LOCAL eventstore.reset = 'on'")
            self.run(
                "TRUNCATE {schema}.snapshots, {schema}.subscriptions, {schema}.stream_events, {schema}.streams, "
                "{schema}.events RESTART IDENTITY"
            )
            self.run("INSERT INTO {schema}.streams (stream_id, stream_uuid) VALUES (0, '$all')")

    def fill(self, count: int, *, streams: int = 1_000, payload: str | None = None) -> None:
        """Append `count` events to an empty store quickly, interleaved over `streams` streams, in SQL."""
        text = payload or '{"account_id": "@", "amount": 12, "note": "' + "x" * 180 + '"}'
        content = "convert_to({text}, 'UTF8')" if self.column == "bytea" else "({text})::jsonb"
        with self.connection.transaction():
            # What is made here fits together: neither foreign keys nor guards have to look at every row.
            self.connection.execute("SET LOCAL session_replication_role = replica")
            self.run(
                "INSERT INTO {schema}.streams (stream_id, stream_uuid, stream_version) "
                "SELECT n + 1, 'account-' || n, (%s - n + %s - 1) / %s FROM generate_series(0, %s) AS n",
                (count, streams, streams, streams - 1),
            )
            self.run(
                "INSERT INTO {schema}.events (event_id, event_type, data, metadata) "
                f"SELECT md5(n::text)::uuid, 'Elixir.Shop.Placed', {content}, {content.replace('{text}', '{empty}')} "
                "FROM generate_series(1, %s) AS n",
                (count,),
                text=sql.SQL("replace({}, '@', n::text)").format(sql.Literal(text)),
                empty=sql.Literal("{}"),
            )
            self.run(
                "INSERT INTO {schema}.stream_events "
                "SELECT md5(n::text)::uuid, target, version, (n - 1) %% %s + 1, (n - 1) / %s + 1 "
                "FROM generate_series(1, %s) AS n, LATERAL (VALUES (0, n), ((n - 1) %% %s + 1, (n - 1) / %s + 1)) "
                "AS part (target, version)",
                (streams, streams, count, streams, streams),
            )
            self.run("UPDATE {schema}.streams SET stream_version = %s WHERE stream_id = 0", (count,))
            self.run("SELECT setval(pg_get_serial_sequence({name}, 'stream_id'), %s)", (streams,),
                     name=sql.Literal(f"{self.schema}.streams"))  # fmt: skip
        self.run("ANALYZE {schema}.streams, {schema}.events, {schema}.stream_events")

    # --- looking ------------------------------------------------------------------------------------------

    def event_ids(self, stream: str) -> list[uuid.UUID]:
        rows = self.run(
            "SELECT link.event_id FROM {schema}.stream_events AS link JOIN {schema}.streams USING (stream_id) "
            "WHERE stream_uuid = %s ORDER BY link.stream_version",
            (stream,),
        )
        return [row[0] for row in rows]

    def subscription(self, name: str, stream: str = "$all") -> tuple[int, int | None] | None:
        """Return (subscription_id, last_seen) of a subscription, or None."""
        rows = self.run(
            "SELECT subscription_id, last_seen FROM {schema}.subscriptions "
            "WHERE subscription_name = %s AND stream_uuid = %s",
            (name, stream),
        )
        return (rows[0][0], rows[0][1]) if rows else None

    def subscribe(self, name: str, last_seen: int | None = None, stream: str = "$all") -> int:
        """Insert a subscription's row, as an Elixir handler would; return its id."""
        return int(
            self.value(
                "INSERT INTO {schema}.subscriptions (stream_uuid, subscription_name, last_seen) "
                "VALUES (%s, %s, %s) RETURNING subscription_id",
                (stream, name, last_seen),
            )
        )

    def value(self, statement: str, parameters: Sequence[Any] = ()) -> Any:
        return self.run(statement, parameters)[0][0]

    def run(self, statement: str, parameters: Sequence[Any] = (), **parts: sql.Composable) -> list[Any]:
        cursor = self.connection.execute(self.sql(statement, **parts), parameters or None)
        return cursor.fetchall() if cursor.description else []

    def sql(self, statement: str, **parts: sql.Composable) -> sql.Composed:
        return sql.SQL(statement).format(schema=sql.Identifier(self.schema), **parts)  # type: ignore[arg-type]


def expected(name: str) -> dict[str, Any]:
    """Return what Elixir itself read back from the store `name`, and what its subscriptions were given."""
    found: dict[str, Any] = json.loads((DATA / f"{name}.expected.json").read_text())
    return found


def as_json(*payloads: Any) -> list[Recorded]:
    """Wrap payloads as events whose columns hold JSON."""
    return [Recorded(data=json.dumps(payload)) for payload in payloads]


def source_of(store: Store, **options: Any) -> CommandedSource:
    """Return a source on `store` that polls, unless `options` say otherwise."""
    return CommandedSource(**{"dsn": store.dsn, "schema": store.schema, "wakeup": "poll", **options})
