"""A log storm is throttled and counted."""

from __future__ import annotations

import logging

from scriba.throttle import Throttle


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def record(message: str = "%s: lost", about: object = "orders:1", level: int = logging.ERROR) -> logging.LogRecord:
    return logging.LogRecord("scriba", level, __file__, 1, message, (about,), None)


def test_equal_lines_are_bounded_and_counted() -> None:
    """After the window the next line says how many were left out."""
    clock = Clock()
    throttle = Throttle(most=3, window_s=60, clock=clock)

    passed = [throttle.filter(record()) for _ in range(10)]
    clock.now = 61
    late = record()

    assert passed == [True] * 3 + [False] * 7
    assert throttle.filter(late)
    assert late.suppressed == 7  # type: ignore[attr-defined]
    assert late.getMessage() == "orders:1: lost (7 more like this were left out before)"


def test_other_lines_pass() -> None:
    """Another message, another projection, and whatever is no warning."""
    throttle = Throttle(most=1, window_s=60, clock=Clock())
    assert throttle.filter(record())

    assert throttle.filter(record(about="orders:2"))
    assert throttle.filter(record("%s: gone"))
    assert all(throttle.filter(record(level=logging.INFO)) for _ in range(5))
    assert not throttle.filter(record())


def test_the_logger_is_throttled() -> None:
    """Setting Django up installs it, once."""
    assert sum(isinstance(known, Throttle) for known in logging.getLogger("scriba").filters) == 1
