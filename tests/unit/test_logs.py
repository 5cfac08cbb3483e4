"""Logging of run_projections: readable by people or by machines, and never against the project's own configuration."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager

from scriba.management.logs import logging_as


@contextmanager
def bare_logger() -> Iterator[logging.Logger]:
    """The logger without any configuration, as in a project that has no LOGGING (pytest's own handlers included)."""
    logger = logging.getLogger("scriba")
    before = (logger.level, logger.propagate, logger.handlers[:])
    logger.handlers[:], logger.propagate = [], False
    try:
        yield logger
    finally:
        logger.setLevel(before[0])
        logger.propagate, logger.handlers[:] = before[1], before[2]


def test_json_lines_carry_the_extras_and_the_traceback() -> None:
    """One object a line: a collector needs no pattern to find the projection or the cause."""
    lines: list[str] = []

    with logging_as("json", 1, lines.append):
        try:
            raise ValueError("broken")
        except ValueError:
            logging.getLogger("scriba").exception("%s halted", "orders:1", extra={"projection": "orders", "version": 1})

    (line,) = map(json.loads, lines)
    assert line["message"] == "orders:1 halted"
    assert (line["level"], line["projection"], line["version"]) == ("error", "orders", 1)
    assert "ValueError: broken" in line["traceback"]
    assert line["time"].endswith("+00:00")


def test_anything_can_be_an_extra() -> None:
    """A value that JSON does not know is written as text: a log line never fails."""
    lines: list[str] = []

    with logging_as("json", 1, lines.append):
        logging.getLogger("scriba").info("x", extra={"cause": KeyError("k")})

    assert json.loads(lines[0])["cause"] == "'k'"


def test_plain_lines_are_written_where_nothing_is_configured() -> None:
    """Without any LOGGING the operator still reads what the engine says."""
    lines: list[str] = []

    with bare_logger(), logging_as(None, 1, lines.append):
        logging.getLogger("scriba").info("standby")
        logging.getLogger("scriba").debug("detail")

    assert len(lines) == 1
    assert lines[0].endswith("INFO    standby")


def test_a_projects_own_logging_is_left_alone() -> None:
    """A project that configured the logger keeps its handlers; asking for a format replaces them for the run."""
    own = logging.NullHandler()

    with bare_logger() as logger:
        logger.addHandler(own)
        with logging_as(None, 1):
            during = logger.handlers[:]
        with logging_as("json", 1):
            asked = logger.handlers[:]
        after = logger.handlers[:]

    assert during == after == [own]
    assert own not in asked


def test_verbosity_two_shows_the_details() -> None:
    """``-v 2`` includes debug records."""
    lines: list[str] = []

    with logging_as("plain", 2, lines.append):
        logging.getLogger("scriba").debug("detail")

    assert len(lines) == 1
