"""A pytest plugin (``-p tests.support.server``): one real PostgreSQL for the whole session.

DATABASE_URL wins; otherwise the embedded server is started here, before Django reads its settings. Under pytest-xdist
the controller starts it and its workers find the URL in the environment; Django gives each worker a database of its
own.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from example_project.embedded import EmbeddedPostgres

SETTINGS = {
    "fsync": "off",  # tests end servers, not machines
    "full_page_writes": "off",
    "max_prepared_transactions": 20,
    "max_connections": 300,
    "shared_buffers": "64MB",
    "log_min_messages": "warning",
}


def _start() -> EmbeddedPostgres | None:
    if os.environ.get("DATABASE_URL"):
        return None
    server = EmbeddedPostgres(Path(tempfile.mkdtemp(prefix="scriba-tests-")), settings=SETTINGS)
    os.environ["DATABASE_URL"] = server.ensure_running()
    return server


_server = _start()


def pytest_unconfigure() -> None:
    if _server is not None:
        _server.stop()
        shutil.rmtree(_server.folder, ignore_errors=True)
