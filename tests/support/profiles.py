"""How often properties run: a tenth of their full count by default, the full count with ``SCRIBA_HYPOTHESIS=ci``."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

from hypothesis import HealthCheck, settings

__all__ = ["runs"]

F = TypeVar("F", bound=Callable[..., object])

SHARE = 1 if os.environ.get("SCRIBA_HYPOTHESIS") == "ci" else 10


def runs(full_count: int) -> Callable[[F], F]:
    """Run a property `full_count` times in CI's full pass, and a tenth of that otherwise."""
    return settings(
        max_examples=max(1, full_count // SHARE),
        deadline=None,
        suppress_health_check=[
            HealthCheck.too_slow,
            HealthCheck.function_scoped_fixture,
            HealthCheck.differing_executors,
        ],
    )
