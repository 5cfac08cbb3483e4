#!/usr/bin/env python
"""The example project's command line; `--settings tests.settings` is what the test suite runs under."""

from __future__ import annotations

import os
import sys


def main() -> None:
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "example_project.settings")
    try:
        from django.core.management import execute_from_command_line  # noqa: PLC0415 - a clear error comes first
    except ImportError as error:
        message = 'Django is not installed here. In a virtual environment: python -m pip install -e ".[demo]"'
        raise SystemExit(message) from error
    if os.environ["DJANGO_SETTINGS_MODULE"] == "example_project.settings":
        from example_project.database import provide_database  # noqa: PLC0415 - needs nothing of Django

        provide_database(sys.argv)
    execute_from_command_line(sys.argv)


if __name__ == "__main__":
    main()
