"""Live and ready: what a process says of itself, from real progress."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

import pytest

from scriba.engine.coordinator import Snapshot
from scriba.management.probes import ProbeServer, verdict
from scriba.protocols import Identity, Status


def snapshot(status: Status = Status.RUNNING, **fields: Any) -> Snapshot:
    usual = Snapshot(Identity("orders", 1), status, 5, 9, 1.0, 5, 0, 0.0, "")
    return usual._replace(**fields)


def asked(port: int, path: str) -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(f"http://localhost:{port}{path}", timeout=10) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error) if error.code == 503 else None


@pytest.mark.parametrize(
    ("found", "live", "ready"),
    [
        (snapshot(), True, True),
        (snapshot(stalled_s=61.0, in_flight=7), False, False),
        (snapshot(stalled_s=59.0, in_flight=7), True, True),
        (snapshot(Status.PAUSED), True, True),
        (snapshot(Status.STANDBY), True, True),
        (snapshot(Status.INITIALIZING), True, False),
        (snapshot(Status.DRAINING), True, False),
        (snapshot(Status.HALTED, reason="no column"), True, False),
    ],
)
def test_a_worker_that_handles_but_does_not_commit_is_not_healthy(found: Snapshot, live: bool, ready: bool) -> None:
    """A restart helps a stalled process, not a halted projection; standby is all that a second process can do."""
    assert (not verdict([found], "/live", stalled_after_s=60)) is live
    assert (not verdict([found], "/ready", stalled_after_s=60)) is ready


def test_the_answers_are_http() -> None:
    """200 or 503 with the reasons; any other path is none of ours."""
    shown = [snapshot()]
    server = ProbeServer(0, lambda: shown, stalled_after_s=60)
    try:
        assert asked(server.port, "/live") == (200, {"ok": True, "problems": []})
        shown[0] = snapshot(stalled_s=90.0, in_flight=7)
        code, answer = asked(server.port, "/live")
        assert code == 503
        assert answer["problems"] == ["orders:1: nothing committed for 90 s although 7 events are in flight"]
        assert asked(server.port, "/elsewhere")[0] == 404
    finally:
        server.close()
