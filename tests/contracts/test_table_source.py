"""TableSource keeps the contract of every source, on a real PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.db import connections
from django.utils import timezone

from scriba.sources import TableSource
from scriba.testing.sources import SourceContract
from tests.integration.sources.shapes import PlainEvent


# No app, so nothing to flush: the one table is made and dropped here, and flushing all others costs more than a test.
@pytest.mark.django_db(transaction=True, available_apps=[])
class TestTableSource(SourceContract):
    @pytest.fixture(autouse=True)
    def an_empty_table(self, transactional_db: None) -> Iterator[None]:
        connection = connections["default"]
        with connection.schema_editor() as editor:
            editor.execute("DROP TABLE IF EXISTS shapes_plainevent")
            editor.create_model(PlainEvent)
        self.versions: dict[str, int] = {}
        yield
        with connection.schema_editor() as editor:
            editor.delete_model(PlainEvent)

    def make_source(self, **options: Any) -> TableSource:
        return TableSource(PlainEvent, **options)

    def append(
        self, count: int = 1, *, type: str = "counted", stream_id: str = "stream-1", padding: int = 0
    ) -> list[int]:
        return [self._append(stream_id, type, "x" * padding) for _ in range(count)]

    def _append(self, stream_id: str, event_type: str, padding: str) -> int:
        self.versions[stream_id] = version = self.versions.get(stream_id, 0) + 1
        event = PlainEvent.objects.create(
            stream_id=stream_id, stream_version=version, event_type=event_type, data={"padding": padding},
            metadata={"by": "contract"}, occurred_at=timezone.now(),
        )  # fmt: skip
        return event.pk

    def break_connection(self, subscription: Any) -> None:
        pid = subscription._connection.rows("SELECT pg_backend_pid()")[0][0]
        with connections["default"].cursor() as cursor:
            cursor.execute("SELECT pg_terminate_backend(%s, 5000)", [pid])

    def first_version(self) -> int:
        return 1
