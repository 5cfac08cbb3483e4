"""Waiting for a condition: the only place where a test lets time pass."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

__all__ = ["wait_until"]


def wait_until(condition: Callable[[], object], timeout: float = 15.0, what: str = "the condition") -> None:
    """Wait until `condition` is true; fail after `timeout` seconds with the name of what was waited for."""
    pause, deadline = threading.Event(), time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {timeout:g} s in vain for {what}")
        pause.wait(0.005)
