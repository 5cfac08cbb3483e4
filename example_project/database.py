"""Which database the example project uses: DATABASE_URL wins, otherwise the embedded server.

The server is started by the command line, before Django reads its settings, and only for commands that need a
database: `--help`, `check` or `makemigrations` must not start a server.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from example_project.embedded import EmbeddedPostgres, EmbeddedPostgresError

__all__ = ["demo_server", "provide_database"]

REPOSITORY = Path(__file__).resolve().parent.parent

#: Commands that say something without a database. Everything else gets one.
WITHOUT_DATABASE = {
    "", "help", "version", "check", "makemigrations", "demo_db", "startapp", "diffsettings", "compilemessages",
}  # fmt: skip


def demo_server() -> EmbeddedPostgres:
    """Return the demo's server (running or not).

    Its data lives in the git-ignored folder ``.pg``, or where SCRIBA_DEMO_FOLDER says. It is as durable as any.
    """
    folder = Path(os.environ.get("SCRIBA_DEMO_FOLDER") or REPOSITORY / ".pg")
    return EmbeddedPostgres(folder, settings={"max_connections": 200, "max_prepared_transactions": 10})


def provide_database(argv: list[str]) -> None:
    """Set DATABASE_URL for this process, starting or joining the embedded server if need be."""
    command = next((word for word in argv[1:] if not word.startswith("-")), "")
    if os.environ.get("DATABASE_URL") or command == "demo_db" or {"--help", "-h", "--version"} & set(argv):
        return
    try:
        server = demo_server()
        if command not in WITHOUT_DATABASE:
            os.environ["DATABASE_URL"] = server.ensure_running()
        elif server.is_running():  # makemigrations looks at the history, where there is one
            os.environ["DATABASE_URL"] = server.url()
    except EmbeddedPostgresError as error:
        if command not in WITHOUT_DATABASE:
            sys.exit(f"{error}")
