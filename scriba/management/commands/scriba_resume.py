"""The wish *running*, from the command line."""

from __future__ import annotations

from typing import ClassVar

from scriba import resume
from scriba.management.wishes import WishCommand, epilog_for


class Command(WishCommand):
    help = "Lets paused projections go on."
    epilog: ClassVar[str] = epilog_for("resume")
    verb = staticmethod(resume)
    done = "running"
