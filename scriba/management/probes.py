"""``run_projections --health-port``: is this process alive, and is it ready? Answered from real progress.

``/live`` fails when a lane has had events for longer than allowed without a commit, or a coordinator has ended by a
failure: restarting the process may help. ``/ready`` fails also while nothing is owned yet: standby and paused are
ready, because that is all that this process can do. Answers come from memory: a probe costs no statement, and a
database that is away makes no restart storm.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Final

from scriba.protocols import Status

if TYPE_CHECKING:
    from scriba.engine.coordinator import Snapshot

__all__ = ["STALLED_AFTER_S", "ProbeServer", "verdict"]

STALLED_AFTER_S: Final = 60.0  #: handled but not committed for so long: not healthy
_AT_WORK: Final = frozenset({Status.RUNNING, Status.PAUSED, Status.STOPPED, Status.STANDBY})


def verdict(snapshots: Sequence[Snapshot], path: str, *, stalled_after_s: float) -> list[str]:
    """Return what speaks against this process, one line per projection; nothing when all is well."""
    return [
        f"{snapshot.identity}: {problem}"
        for snapshot in snapshots
        if (problem := _problem(snapshot, ready=path == "/ready", stalled_after_s=stalled_after_s))
    ]


def _problem(snapshot: Snapshot, *, ready: bool, stalled_after_s: float) -> str:
    if snapshot.stalled_s > stalled_after_s:
        return f"nothing committed for {snapshot.stalled_s:.0f} s although {snapshot.in_flight:,} events are in flight"
    if ready and snapshot.status is Status.HALTED:
        return f"halted: {snapshot.reason}"
    if ready and snapshot.status not in _AT_WORK:
        return str(snapshot.status)
    return ""


class ProbeServer:
    """Answers ``/live`` and ``/ready`` on `port` until it is closed; 200 or 503, with the reasons as JSON."""

    def __init__(self, port: int, snapshots: Callable[[], Sequence[Snapshot]], *, stalled_after_s: float) -> None:
        self._server = ThreadingHTTPServer(("", port), _handler(snapshots, stalled_after_s))
        self._server.daemon_threads = True
        self.port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, name="scriba probes", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _handler(snapshots: Callable[[], Sequence[Snapshot]], stalled_after_s: float) -> type[BaseHTTPRequestHandler]:
    class Probe(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path not in {"/live", "/ready"}:
                self.send_error(404, "only /live and /ready")
                return
            problems = verdict(snapshots(), self.path, stalled_after_s=stalled_after_s)
            body = json.dumps({"ok": not problems, "problems": problems}).encode()
            self.send_response(503 if problems else 200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Say nothing: a probe every few seconds is no news."""

    return Probe
