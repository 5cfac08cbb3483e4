"""Reading a source step by step, and appending to a plain table beside Django."""

from __future__ import annotations

from typing import Any, ClassVar

import psycopg

from scriba.protocols import Identity, Page, Shard
from scriba.sources import TableSource

__all__ = ["Reader", "append"]

IDENTITY = Identity("reading", 1)


class Reader:
    """One subscription, and every position that it has handed out so far."""

    opened: ClassVar[list[Reader]] = []  #: closed by the fixture `database`

    def __init__(self, source: TableSource, resume: int | None = None) -> None:
        self.opened.append(self)
        self.subscription = source.subscribe(IDENTITY, [Shard(resume=resume)])
        self.seen: list[int] = []
        self.events: list[Any] = []
        self.last: Page

    def look(self, timeout: float = 0.0, limit: int = 1_000) -> list[int]:
        """Fetch once; return the positions that came."""
        self.last = self.subscription.fetch(limit, timeout)
        found = [event.position for event in self.last.events]
        self.events += self.last.events
        self.seen += found
        return found

    def look_until_quiet(self, limit: int = 1_000) -> list[int]:
        """Fetch until nothing comes any more; return everything that came."""
        found: list[int] = []
        while new := self.look(limit=limit) or (not self.last.caught_up and self.look(limit=limit)):
            found += new
        return found

    def waiting_for(self) -> str:
        head = self.subscription.head()
        return head.waiting_for if head else ""

    def close(self) -> None:
        self.subscription.close()


def append(
    writer: psycopg.Connection, stream: str = "s", *, version: int | None = None, table: str = "shapes_plainevent"
) -> int:
    """Insert one event in the writer's transaction; return its position."""
    row = writer.execute(
        f"INSERT INTO {table} (event_id, stream_id, stream_version, event_type, data) "
        "VALUES (gen_random_uuid(), %s, %s, 'counted', '{}') RETURNING id",
        (stream, version),
    ).fetchone()
    return int(row[0])
