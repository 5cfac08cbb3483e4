"""The notification log on the library's own PostgreSQL recorder: read through it, woken by its notices.

Pages come through the recorder, on its pool. Evidence about gaps, and the notices, have connections of their own: the
pool is the application's, and its connections come and go.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import psycopg
from psycopg import sql

from scriba.connection import NOTICES_DEATH
from scriba.listening import Ear
from scriba.sources.eventsourcing_gaps import CheckedLog
from scriba.sources.eventsourcing_logs import has_text_ids, parsed_id

if TYPE_CHECKING:
    from uuid import UUID

    from eventsourcing.persistence import Notification
    from eventsourcing.postgres import PostgresApplicationRecorder

__all__ = ["PostgresLog"]

Connection = psycopg.Connection[tuple[Any, ...]]

_LONGEST_NAME: Final = 63


class PostgresLog(CheckedLog):
    """Used by the fetching thread; `at`, `locate` and `wake` by any, as the pool lends each its own connection."""

    def __init__(
        self, recorder: PostgresApplicationRecorder, topics: Sequence[str] = (), *, listen: bool, name: str
    ) -> None:
        self._recorder = recorder
        self._topics = topics
        self._name = name
        self._table = sql.Identifier(recorder.datastore.schema, recorder.events_table_name)
        self._connection = self._connect()
        self._ear: Ear | None = None
        try:
            super().__init__(self._query, self._table.as_string(), "notification_id", is_filtered=bool(topics))
        except BaseException:
            self._connection.close()
            raise
        self._listens = listen

    def _select(self, after: int, limit: int, up_to: int | None) -> Sequence[Notification]:
        start = None if after < 0 else after
        found: Sequence[Notification] = self._recorder.select_notifications(
            start, limit, up_to, self._topics, inclusive_of_start=False
        )
        return found

    def at(self, position: int) -> Notification | None:
        found = self._recorder.select_notifications(position, 1, position)
        return found[0] if found else None

    def locate(self, originator_id: str, version: int) -> int | None:
        key = self.original_id(originator_id)
        if isinstance(key, str) and not has_text_ids(self._recorder):
            return None
        statement = sql.SQL("SELECT notification_id FROM {} WHERE originator_id = %s AND originator_version = %s")
        with self._recorder.datastore.get_connection() as connection:
            row = connection.execute(statement.format(self._table), (key, version)).fetchone()
        return row["notification_id"] if row else None

    def original_id(self, text: str) -> UUID | str:
        return text if has_text_ids(self._recorder) else parsed_id(text)

    def wait(self, timeout: float) -> None:
        """Wait for a notice. The first time begins to listen, which is a notice too: what came before is looked for."""
        if self._listens and self._ear is None:
            self._ear = Ear(self._connect, self._recorder.channel_name, self.wake, f"scriba {self._name}")
            self._ear.start()
        super().wait(timeout)

    def close(self) -> None:
        if self._ear is not None:
            self._ear.close()
        self._connection.close()
        self.wake()

    def _query(self, statement: str, parameters: Sequence[object]) -> Sequence[Sequence[Any]]:
        return self._connection.execute(statement, parameters).fetchall()

    def _connect(self) -> Connection:
        """Open a connection to where the recorder's pool connects, as the same user."""
        pool: Any = self._recorder.datastore.pool
        parameters = {**NOTICES_DEATH, **{key: value for key, value in pool.kwargs.items() if key != "row_factory"}}
        if pool.get_password_func is not None:
            parameters["password"] = pool.get_password_func()
        parameters["application_name"] = f"scriba {self._name}"[:_LONGEST_NAME]
        return psycopg.connect(pool.conninfo, **parameters, autocommit=True, prepare_threshold=None)
