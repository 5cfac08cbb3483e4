"""The wish *stopped*, from the command line."""

from __future__ import annotations

from typing import ClassVar

from scriba import stop
from scriba.management.wishes import WishCommand, epilog_for


class Command(WishCommand):
    help = "Drains projections and lets them rest until scriba_start."
    epilog: ClassVar[str] = epilog_for("stop")
    verb = staticmethod(stop)
    done = "stopped"
