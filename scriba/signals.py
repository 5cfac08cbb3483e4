"""Telemetry: one signal per event, sent with ``send_robust`` and not at all when nobody listens.

`projection` is always the :class:`~scriba.protocols.Identity` (name, version). Outcome signals are sent after
the commit; a receiver of :data:`event_started` runs inside the batch's transaction and may not use its
connection. Durations and times are seconds; `monotonic_time` and `system_time` are ``time.monotonic()`` and
``time.time()``.

========================== ======================================================================================
signal                     keyword arguments besides `projection`
========================== ======================================================================================
event_started              monotonic_time, system_time, event_type, stream_id, position, event_id, correlation_id
event_stopped              duration, monotonic_time, event_type, stream_id, position, event_id, correlation_id, reason
event_exception            duration, monotonic_time, event_type, stream_id, position, event_id, correlation_id, kind, reason, stacktrace
event_skipped              system_time, reason (``dedup`` or ``handler``), event_type, stream_id, position, event_id, correlation_id
batch_stopped              duration, batch_size, lane
batch_failed               count, reason, lane
dead_lettered              system_time, position, stream_id, event_type, error_kind, event_id, correlation_id, status
writes_unmatched           count, lane
projection_started         system_time
projection_paused          system_time
projection_resumed         system_time
projection_halted          system_time, reason, label
lag_reported               lag_events, lag_seconds, watermark, status
cache_initialized          wiped_count, preloaded_count, source
source_standby             attempt, retry_in, owner
source_subscribed          attempts
========================== ======================================================================================
"""

from __future__ import annotations

from django.dispatch import Signal

__all__ = [
    "batch_failed",
    "batch_stopped",
    "cache_initialized",
    "dead_lettered",
    "event_exception",
    "event_skipped",
    "event_started",
    "event_stopped",
    "lag_reported",
    "projection_halted",
    "projection_paused",
    "projection_resumed",
    "projection_started",
    "source_standby",
    "source_subscribed",
    "writes_unmatched",
]

event_started = Signal()
event_stopped = Signal()
event_exception = Signal()
event_skipped = Signal()
batch_stopped = Signal()
batch_failed = Signal()
dead_lettered = Signal()
writes_unmatched = Signal()
projection_started = Signal()
projection_paused = Signal()
projection_resumed = Signal()
projection_halted = Signal()
lag_reported = Signal()
cache_initialized = Signal()
source_standby = Signal()
source_subscribed = Signal()
