"""Asking before something is done that cannot be taken back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from django.core.management.base import CommandError

from scriba.management.base import MISUSED

if TYPE_CHECKING:
    from django.core.management.base import BaseCommand

__all__ = ["confirm"]


def confirm(command: BaseCommand, question: str, *, interactive: bool) -> None:
    """Ask `question` and go on only after ``yes``; without `interactive` go on at once.

    Raises CommandError (2) for any other answer, and where nobody can answer.
    """
    if not interactive:
        return
    command.stdout.write(question)
    try:
        answer = input("Type 'yes' to go on: ")
    except EOFError:
        msg = "Nobody is there to answer: give --no-input to go on without asking."
        raise CommandError(msg, returncode=MISUSED) from None
    if answer.strip() != "yes":
        msg = "Nothing was done."
        raise CommandError(msg, returncode=MISUSED)
