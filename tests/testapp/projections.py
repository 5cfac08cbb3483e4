"""Projections that tests run in processes of their own. What a handler does is steered by the event's payload."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from django.db import connection
from django.db.models import F

from scriba import SERIAL, Insert, RetryPolicy, Skip, Update, projection
from scriba.sources import TableSource
from tests.testapp.models import Applied, Counter, Event


def apply(name: str, data: dict[str, Any], meta: Any) -> Any:
    """Count and note the event: neither write is idempotent, so a second application is seen.

    `touch` makes a file when the event is reached; `until` waits for a file to appear before going on; `fail` raises
    unless the file `fixed` is there; `skip` skips.
    """
    if "touch" in data:
        Path(data["touch"]).touch()
    if "until" in data:
        _wait_for(Path(data["until"]))
    if data.get("fail") and not Path(str(data.get("fixed", "/nowhere"))).exists():
        raise ValueError("told to fail")
    if data.get("skip"):
        return Skip()
    noted = Insert(Applied(projection=name, stream_id=meta.stream_id, position=meta.position))
    return (
        [noted, Update(Counter, {"key": f"{name}:{meta.stream_id}"}, value=F("value") + 1)]
        if "count" in data
        else noted
    )


def _wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.005)  # noqa: TID251 - a handler in a process of its own, not a test


FAST = RetryPolicy(2, (0.01,))


@projection("noting", source=TableSource(Event), parallelism=4, retry=FAST, batch_size=50)
def noting(data: Any, meta: Any) -> Any:
    return apply("noting", data, meta)


@projection("patient", source=TableSource(Event), parallelism=4, retry=RetryPolicy(2, (60.0,)), batch_size=50)
def patient(data: Any, meta: Any) -> Any:
    return apply("patient", data, meta)


@projection("parking", source=TableSource(Event), parallelism=2, retry=False, on_failure="park", batch_size=50)
def parking(data: Any, meta: Any) -> Any:
    return apply("parking", data, meta)


@projection("halting", source=TableSource(Event), parallelism=2, retry=False, on_failure="halt", batch_size=50)
def halting(data: Any, meta: Any) -> Any:
    return apply("halting", data, meta)


@projection("serial", source=TableSource(Event), parallelism=4, partition_by=SERIAL, batch_size=50)
def serial(data: Any, meta: Any) -> Any:
    return apply("serial", data, meta)


@projection("keyed", source=TableSource(Event), parallelism=4, partition_by=lambda event: str(event.data["n"]))
def keyed(data: Any, meta: Any) -> Any:
    """Another ordering key than the stream: one stream's events go through several lanes."""
    return apply("keyed", data, meta)


@projection("writing", source=TableSource(Event), parallelism=2, retry=FAST, batch_size=20)
def writing(data: Any, meta: Any) -> Any:
    """Writes through the ORM, and marks where its transaction stands for schedules that freeze it there."""
    from scriba import Done

    with connection.cursor() as cursor:
        cursor.execute("SELECT 1")
    Applied.objects.create(projection="writing", stream_id=meta.stream_id, position=meta.position)
    apply("writing", data, meta)
    return Done()


if os.environ.get("SCRIBA_TEST_PROJECTIONS"):  # a module of a test's own, for projections that only it needs
    __import__(os.environ["SCRIBA_TEST_PROJECTIONS"])
