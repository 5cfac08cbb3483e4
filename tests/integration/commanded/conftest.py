"""Event stores for tests: a database of their own per worker, a schema of its own per store, dropped afterwards."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from scriba.connection import OwnConnection
from scriba.protocols import Identity, Shard
from scriba.sources.commanded_subscription import CommandedSubscription
from tests.support.commanded import Store, source_of
from tests.support.leftovers import forget
from tests.support.world import World

_numbers = itertools.count(1)

MakeStore = Callable[..., Store]
Subscribe = Callable[..., CommandedSubscription]


@pytest.fixture(scope="session")
def store_dsn() -> Iterator[str]:
    """A database for event stores only."""
    url = os.environ["DATABASE_URL"]
    name = f"commanded_{os.getpid()}"
    with psycopg.connect(url, autocommit=True) as server:
        server.execute(f"CREATE DATABASE {name}")
        try:
            yield make_conninfo("", **{**conninfo_to_dict(url), "dbname": name})
        finally:
            server.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
def make_store(store_dsn: str) -> Iterator[MakeStore]:
    """Make a store in a schema that no other test uses; `seed=False` for one that is filled from a dump."""
    with ExitStack() as cleanup:

        def make(*, seed: bool = True, schema: str | None = None, **options: Any) -> Store:
            store = Store(store_dsn, schema or f"store_{next(_numbers)}", **options)
            cleanup.callback(store.close)
            cleanup.callback(store.drop)
            return store.create(seed=seed)

        yield make


@pytest.fixture
def store(make_store: MakeStore) -> Store:
    """An empty store of the newest schema version, with bytea columns."""
    return make_store()


@pytest.fixture
def identity() -> Identity:
    return Identity(f"commanded-{os.getpid()}-{next(_numbers)}", 1)


@pytest.fixture
def subscribe(identity: Identity) -> Iterator[Subscribe]:
    """Open a subscription on a store, polling unless asked otherwise; closed after the test."""
    with ExitStack() as cleanup:

        def open_one(
            store: Store,
            *,
            resume: int | None = None,
            settled: int | None = None,
            anchor: str = "",
            source: Any = None,
            **options: Any,
        ) -> Any:
            name = options.pop("identity", identity)
            source = source or source_of(store, **options)
            subscription = source.subscribe(name, [Shard(resume=resume, settled=settled, anchor=anchor)])
            cleanup.callback(subscription.close)
            return subscription

        yield open_one


@pytest.fixture
def world(db: None, scratch_name: str) -> Iterator[World]:
    """A world whose rows the engine commits under a name of its own; they are deleted afterwards.

    The test itself looks from inside a transaction, and commits nothing, unless it asks for `transactional_db`.
    """
    yield World(scratch_name)
    rows = OwnConnection("default")
    forget(scratch_name, rows.rows)
    rows.rows("DELETE FROM testapp_applied WHERE projection = %s", [scratch_name])
    rows.close()
