"""Waiting out what goes away by itself: an outage of the database, a thread that ended with an error.

What always holds: the waits grow and end at once when the process is told to leave; an error that will not go away is
raised, never repeated; and each wait is told, in the log and to whoever asks for the state.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Final

from scriba.engine.pipeline import BACKOFF_S
from scriba.exceptions import ConfigurationError
from scriba.log_fields import about
from scriba.protocols import FenceLost

if TYPE_CHECKING:
    from collections.abc import Callable

    from scriba.protocols import Identity

__all__ = ["Patience"]

logger = logging.getLogger("scriba")

CALM_AFTER_S: Final = 60.0  #: what lived so long ended by accident, not in a loop


class Patience:
    """Used by the coordinator's thread. `may_pass` judges an error, `say` is told why there is a wait."""

    def __init__(
        self,
        identity: Identity,
        may_pass: Callable[[Exception], bool],
        say: Callable[[str], None],
        stopping: threading.Event,
    ) -> None:
        self._identity = identity
        self._may_pass = may_pass
        self._say = say
        self._stopping = stopping
        self._failures = 0
        self._restarts = 0

    def guard(self, work: Callable[[], None]) -> None:
        """Do `work`; an outage of the database is waited for, everything else is raised."""
        try:
            work()
        except (FenceLost, ConfigurationError):
            raise
        except Exception as error:
            if not self._may_pass(error):
                raise
            self.back_off(f"the database is out of reach: {' '.join(str(error).split())}", self._failures)
            self._failures += 1
        else:
            self._failures = 0

    def guard_exit(self, work: Callable[[], object]) -> None:
        """Do `work` on the way out; without a database the watermark trails and the lease runs out by itself."""
        try:
            work()
        except Exception as error:
            if not self._may_pass(error):
                raise
            logger.warning("%s: leaving without the database: %s", self._identity, error, extra=about(self._identity))

    def restart_after(self, error: BaseException, lived_s: float) -> None:
        """Wait before what `error` ended after `lived_s` seconds is begun again."""
        logger.error(
            "%s: a thread ended with an error; starting again",
            self._identity,
            extra=about(self._identity),
            exc_info=error,
        )
        self._restarts = 0 if lived_s > CALM_AFTER_S else self._restarts + 1
        self.back_off(f"restarting after {type(error).__qualname__}: {error}", self._restarts)

    def back_off(self, reason: str, failures: int) -> None:
        """Wait, the longer the more `failures` there were in a row."""
        wait_s = BACKOFF_S[min(failures, len(BACKOFF_S) - 1)]
        self._say(reason)
        logger.warning(
            "%s: %s; next try in %.1f s", self._identity, reason, wait_s, extra=about(self._identity, wait_s=wait_s)
        )
        self._stopping.wait(wait_s)
