"""The failure cases: a marker ``case("A6", …)`` names a case that exists, and ``pytest --cases`` says which have tests.

A case is a schedule and what must hold after it: A, nothing lost, doubled or out of order; B, failures and dead
letters; C, reading handlers and folding; D, the life of a process.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import pytest

__all__ = ["CASES", "report", "unknown"]

#: How many cases each group has.
CASES = frozenset(
    f"{group}{n}" for group, last in {"A": 25, "B": 24, "C": 8, "D": 11}.items() for n in range(1, last + 1)
)


def cases_of(item: pytest.Item) -> set[str]:
    return {str(number) for marker in item.iter_markers("case") for number in marker.args}


def unknown(items: Iterable[pytest.Item]) -> list[str]:
    """Return a sentence for each test that names a case that does not exist."""
    return [f"{item.nodeid}: no case {number}" for item in items for number in sorted(cases_of(item) - CASES)]


def report(items: Iterable[pytest.Item]) -> list[str]:
    """Return a line for each case: its number and the files that prove it."""
    proofs: dict[str, set[str]] = defaultdict(set)
    for item in items:
        for number in cases_of(item):
            proofs[number].add(item.nodeid.partition("::")[0])
    ordered = sorted(CASES, key=lambda number: (number[0], int(number[1:])))
    missing = [number for number in ordered if number not in proofs]
    lines = [f"{number:<4} {', '.join(sorted(proofs[number])) or '(no test)'}" for number in ordered]
    return [
        *lines,
        f"{len(ordered) - len(missing)} of {len(ordered)} cases have tests; without: {' '.join(missing) or 'none'}",
    ]
