from __future__ import annotations

import argparse
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from example_project.database import demo_server
from example_project.embedded import EmbeddedPostgres, EmbeddedPostgresError


class Command(BaseCommand):
    help = "Shows, starts or stops the embedded PostgreSQL that the demo starts when DATABASE_URL is not set."
    requires_system_checks: list[str] = []  # noqa: RUF012 - it works without a database

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("action", choices=["status", "start", "stop"], help="what to do with it")

    def handle(self, *_args: Any, action: str, **_options: Any) -> None:
        try:
            self._act(demo_server(), action)
        except EmbeddedPostgresError as error:
            raise CommandError(str(error)) from error

    def _act(self, server: EmbeddedPostgres, action: str) -> None:
        if action == "start":
            server.ensure_running()
        elif action == "stop":
            self.stdout.write("stopped." if server.stop() else "it was not running.")
            return
        if server.is_running():
            self.stdout.write(f"running, process {server.pid}, data in {server.folder}\nDATABASE_URL={server.url()}")
        else:
            self.stdout.write(f"not running; data in {server.folder}")
