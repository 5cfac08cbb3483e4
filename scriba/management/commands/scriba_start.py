"""The wish *running*, from the command line."""

from __future__ import annotations

from typing import ClassVar

from scriba import start
from scriba.management.wishes import WishCommand, epilog_for


class Command(WishCommand):
    help = "Lets stopped projections run again; this is also how a halt is left behind (stop, then start)."
    epilog: ClassVar[str] = epilog_for("start")
    verb = staticmethod(start)
    done = "running"
