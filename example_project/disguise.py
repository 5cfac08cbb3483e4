"""How root runs a server that refuses root.

Three ways, in this order: an ordinary user runs it as it is; root runs it as the user 1000 of a namespace of its own;
where namespaces are forbidden, root runs it as an unprivileged uid. No system user is made, and no mode of anybody's
folders is widened: what the server cannot reach in its disguise is put elsewhere by the launcher.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["IN_A_NAMESPACE", "UNCHANGED", "UNPRIVILEGED", "Disguise"]

NOBODY = 65534


@dataclass(frozen=True)
class Disguise:
    """As whom programs run: a command prefix, or another uid (and group of that number)."""

    prefix: tuple[str, ...] = ()
    uid: int | None = None

    @staticmethod
    @functools.cache
    def needed() -> Disguise:
        """Return the one that PostgreSQL accepts here."""
        if os.geteuid() != 0:
            return UNCHANGED
        return IN_A_NAMESPACE if IN_A_NAMESPACE.works() else UNPRIVILEGED

    def works(self) -> bool:
        """Say whether a program can be run so. Containers often forbid namespaces."""
        return not self.prefix or (shutil.which(self.prefix[0]) is not None and not self.run(["true"]).returncode)

    def can(self, letter: str, path: Path) -> bool:
        """Say whether `path` may be read (``"r"``), written (``"w"``) or entered and run (``"x"``) so."""
        return self == UNCHANGED or not self.run(["test", f"-{letter}", str(path)]).returncode

    def run(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """Run `command` to its end; what it says on either stream is in ``stdout``."""
        return subprocess.run(
            [*self.prefix, *command], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            cwd="/", check=False, env={**os.environ, "LC_ALL": "C"}, **self._identity(),
        )  # fmt: skip

    def start(self, command: Sequence[str], log: Path, **environment: str) -> subprocess.Popen[bytes]:
        """Start `command` apart from this terminal: Ctrl-C here is not for it."""
        with log.open("ab") as output:
            return subprocess.Popen(
                [*self.prefix, *command], stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
                cwd="/", env={**os.environ, "LC_ALL": "C", **environment}, **self._identity(),
            )  # fmt: skip

    def hand_over(self, folder: Path) -> None:
        """Make a private folder for the server; it must own it."""
        folder.mkdir(mode=0o700, exist_ok=True)
        if self.uid is not None:
            os.chown(folder, self.uid, self.uid)

    def _identity(self) -> dict[str, Any]:
        return {} if self.uid is None else {"user": self.uid, "group": self.uid, "extra_groups": []}


UNCHANGED = Disguise()
IN_A_NAMESPACE = Disguise(prefix=("unshare", "-U", "--map-user=1000", "--map-group=1000"))
UNPRIVILEGED = Disguise(uid=NOBODY)
