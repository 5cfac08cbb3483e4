"""A pytest plugin (``-p tests.support.server``): one real PostgreSQL for the whole session.

DATABASE_URL wins; otherwise the embedded server is started here, before Django reads its settings. Under pytest-xdist
the controller starts it and its workers find the URL in the environment; Django gives each worker a database of its
own. The server ends with the session however that ends: a guard process waits for the end of a pipe that only this
process holds open, so a killed session leaves nothing behind either.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from example_project.embedded import EmbeddedPostgres

__all__ = ["SETTINGS", "guarded"]

REPOSITORY = Path(__file__).resolve().parents[2]
SETTINGS = {
    "fsync": "off",  # tests end servers, not machines
    "full_page_writes": "off",
    "max_prepared_transactions": 20,
    "max_connections": 300,
    "shared_buffers": "64MB",
    "log_min_messages": "warning",
}


def guarded(server: EmbeddedPostgres) -> subprocess.Popen[bytes]:
    """Remove `server` when this process has ended, or when the returned guard's standard input is closed."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.support.server", str(server.folder)], cwd=REPOSITORY, stdin=subprocess.PIPE,
        start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip


def _start() -> EmbeddedPostgres | None:
    if os.environ.get("DATABASE_URL"):
        return None
    server = EmbeddedPostgres(Path(tempfile.mkdtemp(prefix="scriba-tests-")), settings=SETTINGS)
    global _guard  # noqa: PLW0603 - one per session; kept, because forgetting it would close its pipe
    _guard = guarded(server)  # first: a session that is killed while the server starts leaves nothing either
    os.environ["DATABASE_URL"] = server.ensure_running()
    return server


def _stand_guard(folder: Path) -> None:
    sys.stdin.buffer.read()
    EmbeddedPostgres(folder, settings=SETTINGS).remove()


_guard: subprocess.Popen[bytes] | None = None

if __name__ == "__main__":
    _stand_guard(Path(sys.argv[1]))
else:
    _server = _start()


def pytest_unconfigure() -> None:
    if _server is not None and _guard is not None:
        _guard.communicate(timeout=60)
