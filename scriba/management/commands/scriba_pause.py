"""The wish *paused*, from the command line."""

from __future__ import annotations

from typing import ClassVar

from scriba import pause
from scriba.management.wishes import WishCommand, epilog_for


class Command(WishCommand):
    help = "Lets projections take nothing new; what is in flight is finished."
    epilog: ClassVar[str] = epilog_for("pause")
    verb = staticmethod(pause)
    done = "paused"
