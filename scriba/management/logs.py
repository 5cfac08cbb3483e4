"""How ``run_projections`` logs: readable lines for people, one JSON object a line for machines.

A project that configures the logger ``scriba`` (or the root logger) itself is left alone unless a format is asked for.
"""

from __future__ import annotations

import json
import logging
import sys
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["JsonFormatter", "logging_as"]

_STANDARD: Final = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """One object per record: time (UTC), level, logger, thread, message, every ``extra``, and the traceback."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(),
            "level": record.levelname.lower(),
            "logger": record.name,
            "thread": record.threadName,
            "message": record.getMessage(),
        }
        line.update({name: value for name, value in record.__dict__.items() if name not in _STANDARD})
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)


class _Writer(logging.Handler):
    """Hands formatted records to a function, so that they appear above a progress bar instead of inside it."""

    def __init__(self, write: Callable[[str], object]) -> None:
        super().__init__()
        self._write = write

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._write(self.format(record))
        except Exception:  # noqa: BLE001 - logging's own rule: a broken log never breaks the program
            self.handleError(record)


@contextmanager
def logging_as(log_format: str | None, verbosity: int, write: Callable[[str], object] | None = None) -> Iterator[None]:
    """Send the logger ``scriba`` to `write` (standard error without one) in `log_format`, ``plain`` or ``json``.

    Without a format a project's own configuration stays in force; where there is none, plain lines are written.
    """
    logger = logging.getLogger("scriba")
    if log_format is None and logger.hasHandlers():
        yield
        return
    handler: logging.Handler = _Writer(write) if write else logging.StreamHandler(sys.stderr)
    plain = logging.Formatter("%(asctime)s %(levelname)-7s %(message)s")
    handler.setFormatter(JsonFormatter() if log_format == "json" else plain)
    before = (logger.level, logger.propagate, logger.handlers[:])
    logger.handlers[:] = [handler]
    logger.propagate = False
    logger.setLevel(logging.DEBUG if verbosity > 1 else logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(before[0])
        logger.propagate, logger.handlers[:] = before[1], before[2]
