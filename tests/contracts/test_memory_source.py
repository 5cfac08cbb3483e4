"""The memory double keeps the contract of every source: what a projection does in a user's test, it does in production."""

from __future__ import annotations

from typing import Any

import pytest

from scriba.event import Event
from scriba.testing import MemorySource
from scriba.testing.sources import SourceContract


class TestMemorySource(SourceContract):
    @pytest.fixture(autouse=True)
    def an_empty_store(self) -> None:
        self.events: list[Event] = []
        self.sources: list[MemorySource] = []
        self.versions: dict[str, int] = {}

    def make_source(self, **options: Any) -> MemorySource:
        self.sources.append(MemorySource(self.events, **options))
        return self.sources[-1]

    def append(
        self, count: int = 1, *, type: str = "counted", stream_id: str = "stream-1", padding: int = 0
    ) -> list[int]:
        return [self._append(stream_id, type, {"padding": "x" * padding}, padding) for _ in range(count)]

    def _append(self, stream_id: str, kind: str, data: Any, size: int) -> int:
        self.versions[stream_id] = version = self.versions.get(stream_id, 0) + 1
        event = Event(
            len(self.events) + 1, stream_id, kind, f"{stream_id}:{version}", data, stream_version=version, size=size
        )
        self.events.append(event)
        for source in self.sources:
            source.append(event)
        return event.position

    def break_connection(self, subscription: Any) -> None:
        subscription._source.fail_with(ConnectionError("cut"))

    def first_version(self) -> int:
        return 1
