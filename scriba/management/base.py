"""What all of Scriba's commands share: how projections are named, how mistakes are answered, and the exit codes.

0: done. 1: refused or failed (halted, wrong state, unhealthy). 2: usage, configuration or an unreachable database.
A mistake is one message with its cause and its cure, never a traceback.
"""

from __future__ import annotations

import argparse
import getpass
import os
import socket
from typing import TYPE_CHECKING, Any, ClassVar, Final

from django.core.management.base import BaseCommand, CommandError, CommandParser, DjangoHelpFormatter, SystemCheckError
from django.db import InterfaceError, OperationalError

from scriba.exceptions import ConfigurationError, ScribaError, UnknownProjection, did_you_mean
from scriba.registry import all_projections, find

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from scriba.registry import Projection

__all__ = [
    "FAILED",
    "MISUSED",
    "ScribaCommand",
    "count",
    "operator",
    "positive",
    "seconds",
    "select",
    "select_versions",
]

FAILED: Final = 1  #: exit code: refused, halted, unhealthy
MISUSED: Final = 2  #: exit code: usage, configuration, unreachable database


class _Help(DjangoHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Django's order of options, and examples printed as they are written."""


class ScribaCommand(BaseCommand):
    """A command whose `epilog` shows examples and exit codes, and whose mistakes are one message."""

    epilog: ClassVar[str] = ""

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> CommandParser:
        kwargs.setdefault("formatter_class", _Help)
        kwargs.setdefault("epilog", self.epilog)
        return super().create_parser(prog_name, subcommand, **kwargs)

    def check(self, *args: Any, **kwargs: Any) -> None:
        """Run the system checks; an error of theirs is a configuration error."""
        try:
            super().check(*args, **kwargs)
        except SystemCheckError as error:
            error.returncode = MISUSED
            raise

    def execute(self, *args: Any, **options: Any) -> str | None:
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

    A name alone means version 1, as in every function. Raises :class:`~scriba.exceptions.UnknownProjection` for one that is not registered,
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


def select_versions(names: Sequence[str]) -> list[Projection]:
    """Like :func:`select`, but a name alone means all its versions: for commands that only look."""
    known = all_projections()
    siblings = {name: [str(made.identity) for made in known if made.name == name] for name in names}
    return select([identity for name in names for identity in siblings[name] or [name]])


def count(text: str) -> int:
    """Read a whole number of at least 0 from the command line."""
    if not text.isdecimal():
        msg = f"a whole number is needed, not {text!r}"
        raise argparse.ArgumentTypeError(msg)
    return int(text)


def positive(text: str) -> int:
    """Read a whole number of at least 1 from the command line."""
    if count(text) < 1:
        msg = "at least 1 is needed, not 0"
        raise argparse.ArgumentTypeError(msg)
    return int(text)


def seconds(text: str) -> float:
    """Read seconds, 0 or more, from the command line."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        msg = f"seconds, 0 or more, are needed, not {text!r}"
        raise argparse.ArgumentTypeError(msg)
    return value


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
