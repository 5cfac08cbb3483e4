"""Scriba: a projection engine for event-sourced systems, as a Django reusable app.

You write one function; Scriba calls it at the right time, in the right order, with an effect exactly once in
your read model, and tells you when something is wrong. Importing this module never reaches a model.
"""

from scriba.control import (
    BulkResult,
    Info,
    dead_letters,
    discard,
    discard_all,
    forget,
    info,
    list_projections,
    pause,
    purge_resolved,
    replay,
    replay_all,
    reset,
    resume,
    start,
    start_projection,
    stop,
    wait_for,
)
from scriba.event import Event, EventMeta
from scriba.exceptions import (
    ConfigurationError,
    EventDeadLettered,
    InvalidState,
    PermanentFailure,
    ProjectionHalted,
    RetryAfter,
    ScribaError,
    SourceError,
    UnknownProjection,
    WaitTimeout,
)
from scriba.registry import SERIAL, Projection, projection
from scriba.results import Delete, Done, Fail, Insert, Skip, Update, Upsert
from scriba.retry import RetryPolicy
from scriba.targets import OrmTarget

__version__ = "0.1.0"

__all__ = [
    "SERIAL",
    "BulkResult",
    "ConfigurationError",
    "Delete",
    "Done",
    "Event",
    "EventDeadLettered",
    "EventMeta",
    "Fail",
    "Info",
    "Insert",
    "InvalidState",
    "OrmTarget",
    "PermanentFailure",
    "Projection",
    "ProjectionHalted",
    "RetryAfter",
    "RetryPolicy",
    "ScribaError",
    "Skip",
    "SourceError",
    "UnknownProjection",
    "Update",
    "Upsert",
    "WaitTimeout",
    "dead_letters",
    "discard",
    "discard_all",
    "forget",
    "info",
    "list_projections",
    "pause",
    "projection",
    "purge_resolved",
    "replay",
    "replay_all",
    "reset",
    "resume",
    "start",
    "start_projection",
    "stop",
    "wait_for",
]
