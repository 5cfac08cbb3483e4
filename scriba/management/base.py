"""What all of Scriba's commands share: how projections are named, how mistakes are answered, and the exit codes.

0: done. 1: refused or failed (halted, wrong state, unhealthy). 2: usage, configuration or an unreachable database.
A mistake is one message with its cause and its cure, never a traceback.
"""

from __future__ import annotations

import argparse
import getpass
import os
import socket
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final

from django.core.management.base import BaseCommand, CommandError, CommandParser, DjangoHelpFormatter, SystemCheckError
from django.db import InterfaceError, OperationalError

from scriba.exceptions import ConfigurationError, ScribaError, UnknownProjection, did_you_mean
from scriba.registry import all_projections, find

if TYPE_CHECKING:
    from scriba.registry import Projection

__all__ = ["FAILED", "MISUSED", "ScribaCommand", "operator", "select"]

FAILED: Final = 1  #: exit code: refused, halted, unhealthy
MISUSED: Final = 2  #: exit code: usage, configuration, unreachable database


class _Help(DjangoHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Django's order of options, and examples printed as they are written."""


class ScribaCommand(BaseCommand):
    """A command whose `epilog` shows examples and exit codes, and whose mistakes are one message."""

    epilog: ClassVar[str] = ""

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> CommandParser:  # noqa: ANN401 - Django's
        kwargs.setdefault("formatter_class", _Help)
        kwargs.setdefault("epilog", self.epilog)
        return super().create_parser(prog_name, subcommand, **kwargs)

    def check(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - Django's signature differs between versions
        """Run the system checks; an error of theirs is a configuration error."""
        try:
            super().check(*args, **kwargs)
        except SystemCheckError as error:
            error.returncode = MISUSED
            raise

    def execute(self, *args: Any, **options: Any) -> str | None:  # noqa: ANN401 - Django's signature
        """Turn what Scriba and the database raise on purpose into one message and an exit code."""
        try:
            return super().execute(*args, **options)
        except (ConfigurationError, UnknownProjection) as error:
            raise CommandError(str(error), returncode=MISUSED) from error
        except ScribaError as error:
            raise CommandError(str(error), returncode=FAILED) from error
        except (OperationalError, InterfaceError) as error:
            raise CommandError(_unreachable(error), returncode=MISUSED) from error


def select(names: Sequence[str], exclude: Iterable[str] = ()) -> list[Projection]:
    """Return the projections that `names` (each ``name`` or ``name:version``) mean, all of them when empty.

    A name alone means version 1. Raises :class:`~scriba.exceptions.UnknownProjection` for one that is not registered,
    in `exclude` too: a misspelt exclusion would run what was to be left out.
    """
    chosen = list(dict.fromkeys(_named(name) for name in names)) if names else all_projections()
    unwanted = [_named(name) for name in exclude]
    left = [projection for projection in chosen if projection not in unwanted]
    if not left:
        msg = (
            "no projection is left to work on: --exclude names all of them."
            if chosen
            else "no projection is registered: declare one with @projection in a projections.py of an installed app."
        )
        raise UnknownProjection(msg)
    return left


def operator() -> str:
    """Return who runs this command, for the records: the system's user and host."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user id without a name
        user = f"uid {os.getuid()}"
    return f"{user}@{socket.gethostname()}"


def _named(text: str) -> Projection:
    name, colon, version = text.rpartition(":")
    if not colon or text in {projection.name for projection in all_projections()}:
        return find(text)
    if not version.isdecimal():
        known = [str(projection.identity) for projection in all_projections()]
        msg = f"{text!r} is no projection: the part after the colon is a version, a number{did_you_mean(text, known)}"
        raise UnknownProjection(msg)
    return find((name, int(version)))


def _unreachable(error: Exception) -> str:
    cause = " ".join(str(error).split()) or type(error).__name__
    return (
        f"The database is out of reach: {cause}\n"
        "Check that the server runs and that DATABASES in the settings (or DATABASE_URL) names it. Nothing was changed."
    )
