"""Waiting: for a condition, the only place where a test lets time pass, and for what is done beside the test."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from django.db import connections

__all__ = ["in_thread", "wait_until"]


def wait_until(condition: Callable[[], object], timeout: float = 15.0, what: str = "the condition") -> None:
    """Wait until `condition` is true; fail after `timeout` seconds with the name of what was waited for."""
    pause, deadline = threading.Event(), time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {timeout:g} s in vain for {what}")
        pause.wait(0.005)


@contextmanager
def in_thread(work: Callable[[], Any]) -> Iterator[list[Any]]:
    """Run `work` beside the block; its answer, or its exception, is in the list after the block."""
    answer: list[Any] = []

    def run() -> None:
        try:
            answer.append(work())
        except BaseException as error:
            answer.append(error)
        finally:
            connections.close_all()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield answer
    finally:
        thread.join(15)
        assert not thread.is_alive()
