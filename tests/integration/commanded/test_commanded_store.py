"""Which stores can be read, in which shape, by which role; and what is said about the others."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest
from django.db import connections
from psycopg.conninfo import make_conninfo

from example_project.embedded import EmbeddedPostgres
from scriba.exceptions import SourceError
from scriba.sources.commanded import CommandedSource
from tests.support.commanded import VERSIONS, Recorded, Store, source_of
from tests.support.processes import database_url
from tests.support.reading import positions, read_all
from tests.support.waiting import wait_until


@pytest.mark.parametrize("column", ["bytea", "jsonb"])
@pytest.mark.parametrize("version", VERSIONS, ids=lambda version: ".".join(map(str, version)))
def test_every_schema_version_is_read(make_store: Any, subscribe: Any, caplog: Any, version: Any, column: str) -> None:
    """From 0.14.0 on, both column types, events come with their times in UTC; before 1.2.0 with a warning."""
    store = make_store(version=version, column=column)
    at = datetime(2026, 3, 4, 5, 6, 7, 89, tzinfo=UTC)
    store.append("a", [Recorded(data='{"n": 1}', created_at=at if version >= (0, 17, 0) else at.replace(tzinfo=None))])
    store.append("b", 2)

    with caplog.at_level(logging.WARNING, "scriba"):
        events = read_all(subscribe(store))

    assert positions(events) == [1, 2, 3]
    assert events[0].payload().data == {"n": 1}
    assert events[0].occurred_at == at
    assert ("legacy mode" in caplog.text) == (version < (1, 2, 0))


@pytest.mark.parametrize("version", [(0, 14, 0), (1, 1, 0), (1, 2, 0), (1, 3, 2)])
def test_a_time_zone_of_the_session_changes_no_time(make_store: Any, subscribe: Any, version: Any) -> None:
    """Times are the appender's, in UTC, whatever zone the server or the role is set to."""
    store = make_store(version=version)
    at = datetime(2026, 7, 1, 12, tzinfo=UTC)
    store.append("a", [Recorded(created_at=at if version >= (0, 17, 0) else at.replace(tzinfo=None))])
    dsn = make_conninfo(store.dsn, options="-c TimeZone=Pacific/Chatham")

    (event,) = read_all(subscribe(store, dsn=dsn))

    assert event.occurred_at == at
    assert event.occurred_at.tzinfo is UTC


def test_a_newer_version_is_read_with_a_warning(make_store: Any, subscribe: Any, caplog: Any) -> None:
    """A version that was never tried is no reason to stop while the tables fit; the highest recorded one counts."""
    store = make_store()
    store.run("INSERT INTO {schema}.schema_migrations VALUES (2, 0, 0)")
    store.append("a")

    with caplog.at_level(logging.WARNING, "scriba"):
        events = read_all(subscribe(store))

    assert len(events) == 1
    assert "has schema version 2.0.0; this reader was tried up to 1.3.2" in caplog.text


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        ("DELETE FROM {schema}.schema_migrations", "is empty: the event store was never initialised"),
        ("UPDATE {schema}.schema_migrations SET major_version = 0, minor_version = 13", "0.14.0 is the oldest"),
        ("DROP TABLE {schema}.schema_migrations", "older than version 0.9.0"),
        ("ALTER TABLE {schema}.stream_events RENAME TO other", "has no table stream_events"),
        ("ALTER TABLE {schema}.events ALTER data TYPE text USING 'x'", "a column of type 'text'"),
    ],
)
def test_a_store_that_cannot_be_read_says_why(store: Any, subscribe: Any, damage: str, says: str) -> None:
    """No store, an old one, a foreign one: the projection halts at once with what was met and what to do."""
    store.run(damage)

    with pytest.raises(SourceError, match=says):
        subscribe(store)


def test_a_schema_that_does_not_exist_is_named(store: Any, subscribe: Any) -> None:
    """A wrong schema= is said to be one."""
    with pytest.raises(SourceError, match="there is no schema 'nowhere' in the database"):
        subscribe(store, schema="nowhere")
    store.run("CREATE SCHEMA IF NOT EXISTS {schema}")
    with pytest.raises(
        SourceError, match="holds no event store of Commanded: it has no table stream_events, events, streams"
    ):
        subscribe(store, schema="pg_catalog")


def test_a_serializer_that_does_not_fit_the_column_is_refused(make_store: Any, subscribe: Any) -> None:
    """Terms in jsonb, or jsonb in bytea, cannot be: one clear message instead of a dead letter per event."""
    with pytest.raises(SourceError, match="reads columns of type bytea"):
        subscribe(make_store(column="jsonb"), serializer="term")
    with pytest.raises(SourceError, match="reads columns of type jsonb"):
        subscribe(make_store(), serializer="jsonb")


@pytest.mark.case("A12")
def test_stores_in_one_database_are_separate(make_store: Any, subscribe: Any) -> None:
    """Several stores, one schema each, with names that need quotes: each source reads its own."""
    first, second = make_store(schema='Store "A"'), make_store(schema="store b", column="jsonb")
    first.append("a", 2)
    second.append("b", 3)

    assert [event.stream_id for event in read_all(subscribe(first))] == ["a", "a"]
    assert [event.stream_id for event in read_all(subscribe(second))] == ["b", "b", "b"]
    assert source_of(first).identity() != source_of(second).identity()


# --- privileges -------------------------------------------------------------------------------------------


@contextmanager
def role(store: Any, *grants: str) -> Iterator[str]:
    """A new role with `grants` on the store; yields its connection string."""
    name = f"reader_{store.schema}"
    store.run(f"CREATE ROLE {name} LOGIN")
    try:
        for grant in grants:
            store.run(f"GRANT {grant} TO {name}")
        yield make_conninfo(store.dsn, user=name)
    finally:
        store.run(f"DROP OWNED BY {name}")
        store.run(f"DROP ROLE {name}")


READ = ("USAGE ON SCHEMA {schema}", "SELECT ON {schema}.streams, {schema}.events, {schema}.stream_events")


def test_usage_and_three_selects_are_enough(store: Any, subscribe: Any) -> None:
    """A role that may only read the three tables reads a store of today, with LISTEN, without its version."""
    store.append("a", 2)
    with role(store, *READ) as dsn:
        subscription = subscribe(store, dsn=dsn, wakeup="notify")

        assert positions(read_all(subscription)) == [1, 2]
        assert subscription.head().position == 2
        subscription.close()


def test_an_old_store_needs_its_version(make_store: Any, subscribe: Any) -> None:
    """Where the tables look old and the version may not be read, the missing grant is named."""
    store = make_store(version=(1, 1, 0))
    with (
        role(store, *READ) as dsn,
        pytest.raises(SourceError, match=r"GRANT SELECT ON store_\d+.schema_migrations TO reader"),
    ):
        subscribe(store, dsn=dsn)


@pytest.mark.parametrize("grants", [(), READ[:1], READ[1:], (READ[0], "SELECT ON {schema}.streams, {schema}.events")])
def test_missing_privileges_name_the_grant(store: Any, subscribe: Any, grants: Any) -> None:
    """A role that may not read is told the GRANT that is missing."""
    with (
        role(store, *grants) as dsn,
        pytest.raises(SourceError, match=r"may not read .* GRANT SELECT ON .*stream_events"),
    ):
        subscribe(store, dsn=dsn)


def test_sharing_needs_more_than_reading(store: Any, subscribe: Any) -> None:
    """A role that may read but not write subscriptions is told the grant, or the other mode."""
    store.append("a")
    with role(store, *READ) as dsn:
        subscription = subscribe(store, dsn=dsn, checkpoint="shared")

        with pytest.raises(SourceError, match=r"GRANT SELECT, INSERT, UPDATE ON .*subscriptions TO .*checkpoint='own'"):
            subscription.fetch(10, 0.0)
        subscription.close()


# --- connections ------------------------------------------------------------------------------------------


def test_a_lost_connection_is_transient_and_reading_goes_on_after_it(store: Any, subscribe: Any) -> None:
    """A terminated backend raises what the engine repeats; a new subscription continues behind the last page."""
    store.append("a", 3)
    subscription = subscribe(store)
    page = subscription.fetch(2, 0.0)
    store.run(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name LIKE %s AND datname = current_database()",
        ("scriba%reader",),
    )

    with pytest.raises(psycopg.OperationalError) as caught:
        subscription.fetch(10, 0.0)

    assert subscription.transient(caught.value)
    subscription.close()
    assert positions(read_all(subscribe(store, resume=page.scanned))) == [3]


def test_a_server_that_is_away_is_transient(store: Any, subscribe: Any) -> None:
    """A refused connection raises what the engine repeats, before there is a subscription to ask."""
    source = source_of(store, dsn="postgresql://nobody@127.0.0.1:1/nothing")

    with pytest.raises(psycopg.OperationalError) as caught:
        subscribe(store, source=source)

    assert source.transient(caught.value)
    assert not source.transient(ValueError("no"))
    assert not source.transient(psycopg.errors.UndefinedTable("no"))
    assert not source.transient(psycopg.errors.DatabaseDropped("no"))
    assert source.transient(psycopg.errors.AdminShutdown("yes"))


def test_connections_carry_the_name_of_the_projection(store: Any, subscribe: Any, identity: Any) -> None:
    """Operators see in pg_stat_activity which projection a connection belongs to, and what for."""
    subscribe(store, checkpoint="shared", wakeup="notify").fetch(1, 0.0)

    def roles() -> list[str]:
        names = store.run(
            "SELECT application_name FROM pg_stat_activity WHERE application_name LIKE %s ORDER BY 1",
            (f"scriba {identity}%",),
        )
        return [row[0].rpartition(" ")[2] for row in names]

    wait_until(lambda: roles() == ["listener", "lock", "reader"], what="all three, the listener by its own thread")


def test_close_leaves_no_connection_and_may_come_twice(store: Any, subscribe: Any, identity: Any) -> None:
    """Everything that a subscription opened is closed with it."""
    subscription = subscribe(store, checkpoint="shared", wakeup="notify")
    subscription.fetch(1, 0.0)

    subscription.close()
    subscription.close()

    left = "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE %s"
    wait_until(lambda: store.value(left, (f"scriba {identity}%",)) == 0, what="the end of every connection")


def test_a_replica_is_read_by_polling_only(tmp_path: Any, subscribe: Any, caplog: Any) -> None:
    """On a replica there is no LISTEN, its locks are its own, and being behind is no reset: it is polled, or refused."""
    server = EmbeddedPostgres(tmp_path / "server", settings={"fsync": "off"})
    try:
        store = Store(server.ensure_running(), "store").create()
        store.append("a", 2)
        store.close()
        server.stop()
        (server.folder / "data" / "standby.signal").touch()
        server.ensure_running()

        subscription = subscribe(store, wakeup="notify")
        assert positions(read_all(subscription)) == [1, 2]
        assert "LISTEN does not work through a replica: polling only" in caplog.text
        assert subscribe(store, resume=7).fetch(10, 0.0) == ([], 7, True, "")
        with pytest.raises(SourceError, match="needs the primary"):
            subscribe(store, checkpoint="shared").fetch(10, 0.0)
    finally:
        server.stop()


# --- ways to the database ---------------------------------------------------------------------------------


def test_a_store_behind_an_alias_is_read(db: None, subscribe: Any, identity: Any) -> None:
    """`using=` goes to the database of the alias, over connections of our own that carry the projection's name."""
    store = Store(database_url(), "behind_an_alias").create()
    try:
        store.append("a", 2)
        subscription = subscribe(store, source=CommandedSource(using="default", schema=store.schema))

        assert positions(read_all(subscription)) == [1, 2]
        named = "SELECT count(*) FROM pg_stat_activity WHERE application_name = %s"
        assert store.value(named, (f"scriba {identity} reader",)) == 1
        subscription.close()
    finally:
        store.drop()
        store.close()


def test_a_role_to_be_assumed_is_assumed(db: None, subscribe: Any, monkeypatch: Any) -> None:
    """The alias' `assume_role` holds for our own connections too: reading is done with that role's privileges."""
    store = Store(database_url(), "behind_a_role").create()
    try:
        store.append("a", 2)
        with role(store, *READ):
            monkeypatch.setitem(
                connections["default"].settings_dict["OPTIONS"], "assume_role", f"reader_{store.schema}"
            )
            subscription = subscribe(store, source=CommandedSource(using="default", schema=store.schema, wakeup="poll"))

            assert positions(read_all(subscription)) == [1, 2]
            assert subscription._connection.execute("SELECT current_user::text").fetchone() == (
                f"reader_{store.schema}",
            )
            subscription.close()
    finally:
        store.drop()
        store.close()
