"""Named threads: start, stop, join, surface errors. Knows no events.

Every thread of a projection belongs to a :class:`Crew`. A thread that ends with an error stops nobody by itself: the
crew remembers the first error and tells its owner, who decides. Threads are daemons, so that a handler that never
returns cannot keep a process alive beyond its drain timeout; what such a thread still commits is stopped by the fence.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

__all__ = ["Crew"]


class Crew:
    """The threads of one term of ownership."""

    def __init__(self, name: str, on_change: Callable[[], None]) -> None:
        self._name = name
        self._on_change = on_change
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self.error: BaseException | None = None

    def start(self, role: str, work: Callable[[], None]) -> None:
        """Run `work` in a thread named after the projection and its role."""
        thread = threading.Thread(target=self._run, args=(work,), name=f"scriba {self._name} {role}", daemon=True)
        thread.start()
        self._threads.append(thread)  # only then: one that could not be started cannot be waited for

    def join(self, timeout: float) -> list[str]:
        """Wait at most `timeout` seconds for all threads; return the names of those that are late."""
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return [thread.name for thread in self._threads if thread.is_alive()]

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - the owner decides; a dead thread must never go unnoticed
            with self._lock:
                self.error = self.error or error
        finally:
            self._on_change()
