"""A prepared transaction survives a server's restart under another name. On a server of its own, which is restarted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from example_project.embedded import EmbeddedPostgres
from scriba.sources.horizon import Horizon, Relations

TABLE = "CREATE TABLE events (id bigserial PRIMARY KEY, at timestamptz DEFAULT now())"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedPostgres]:
    made = EmbeddedPostgres(tmp_path, settings={"max_prepared_transactions": 2, "fsync": "off"})
    made.ensure_running()
    yield made
    made.stop()


class Pooled:
    """A query function that connects anew when it must, as a pooler does: who asks does not see the restart."""

    def __init__(self, server: EmbeddedPostgres) -> None:
        self.url = server.url()
        self.connection = psycopg.connect(self.url, autocommit=True)

    def __call__(self, statement: str, parameters: object = ()) -> list[tuple]:
        try:
            cursor = self.connection.execute(statement, parameters)
        except psycopg.OperationalError:
            self.connection = psycopg.connect(self.url, autocommit=True)
            cursor = self.connection.execute(statement, parameters)
        return cursor.fetchall() if cursor.description else []


@pytest.mark.slow
@pytest.mark.case("A25")
def test_a_prepared_transaction_across_a_restart_is_still_waited_for(server):
    """Its old name has gone, and it has not ended: what was waited for under the old name says nothing."""
    query = Pooled(server)
    query(TABLE)
    oids = [query(f"SELECT '{name}'::regclass::oid::bigint")[0][0] for name in ("events", "events_id_seq")]
    horizon = Horizon(query, Relations("events", "id", "events_id_seq", tuple(oids)))
    preparing = psycopg.connect(server.url(), autocommit=True)
    preparing.execute("BEGIN")
    preparing.execute("INSERT INTO events DEFAULT VALUES")
    query("INSERT INTO events DEFAULT VALUES")
    assert not horizon.advance(0)
    preparing.execute("PREPARE TRANSACTION 'late'")
    assert not horizon.advance(0)
    before = horizon._pairs[0].holders
    preparing.close()
    server.stop()
    server.ensure_running()
    assert not horizon.advance(0)
    assert horizon._pairs[0].holders != before
    assert "'late'" in horizon.waiting_for()
    assert horizon.settled == 0
    query("COMMIT PREPARED 'late'")
    assert horizon.advance(0)
    assert horizon.settled == 2
    query.connection.close()
