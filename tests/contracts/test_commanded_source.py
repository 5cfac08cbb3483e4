"""CommandedSource keeps the contract of every source, in each mode and with both types of column."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest

from scriba.sources.commanded import CommandedSource
from scriba.testing.sources import SourceContract
from tests.support.commanded import Recorded, Store


class CommandedContract(SourceContract):
    column = "bytea"
    options: dict[str, Any] = {}

    @pytest.fixture(autouse=True)
    def an_empty_store(self, request: Any) -> Iterator[None]:
        schema = f"contract_{os.getpid()}"
        self.store = Store(os.environ["DATABASE_URL"], schema, column=self.column).create()
        yield
        self.store.drop()
        self.store.close()

    def make_source(self, **options: Any) -> CommandedSource:
        return CommandedSource(dsn=self.store.dsn, schema=self.store.schema, **{**self.options, **options})

    def append(
        self, count: int = 1, *, type: str = "counted", stream_id: str = "stream-1", padding: int = 0
    ) -> list[int]:
        recorded = Recorded(type=type, data=json.dumps({"padding": "x" * padding}), metadata='{"by": "contract"}')
        last = self.store.append(stream_id, [recorded] * count)
        return list(range(last - count + 1, last + 1))

    def break_connection(self, subscription: Any) -> None:
        pid = subscription._connection.execute("SELECT pg_backend_pid()").fetchone()[0]
        self.store.run("SELECT pg_terminate_backend(%s, 5000)", (pid,))

    def first_version(self) -> int:
        return 1


class TestCommandedSource(CommandedContract):
    """bytea columns, own checkpoint, notifications: the defaults."""


class TestPolling(CommandedContract):
    """jsonb columns, and the whole contract without notifications."""

    column = "jsonb"
    options = {"wakeup": "poll"}


class TestSharing(CommandedContract):
    """A subscription shared with Elixir."""

    options = {"checkpoint": "shared", "subscription_name": "contract", "wakeup": "poll"}

    def test_a_known_position_outranks_start_from(self) -> None:
        """Here the row decides: it was created at `start_from`, and nothing below either number comes again."""
        appended = self.append(4)
        assert self._read(resume=appended[0], start_from="current") == appended[1:]
        self.store.run("UPDATE {schema}.subscriptions SET last_seen = %s", (appended[2],))
        assert self._read(resume=appended[0]) == appended[3:]
