"""What operators and programs ask of projections, from any process: a web request, a shell, the admin, another host.

A command writes a **wish** into a row; the process that owns the projection follows it within a second. What always
holds: the state check and the change are one guarded UPDATE, so two operators cannot both succeed; a command in the
wrong state raises, it is never silently idempotent. The statements run on the caller's own connection: inside a
transaction a wish takes effect when that commits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from django.db import connections

from scriba.audit import AUDITED
from scriba.exceptions import InvalidState, ProjectionHalted, WaitTimeout
from scriba.forgetting import forget
from scriba.info import Info, ListedProjection, State, alias_of, info, list_projections, read_state
from scriba.letter_wishes import BulkResult, dead_letters, discard, discard_all, purge_resolved, replay, replay_all
from scriba.protocols import Status, Wish
from scriba.registry import find
from scriba.resetting import Forgotten, reset
from scriba.waiting import is_so_within, refuse_to_wait_in_transaction, wait_for

if TYPE_CHECKING:
    from collections.abc import Callable

    from scriba.engine.runner import RunningProjection
    from scriba.registry import Projection

__all__ = [
    "BulkResult",
    "Forgotten",
    "Info",
    "ListedProjection",
    "dead_letters",
    "discard",
    "discard_all",
    "forget",
    "info",
    "list_projections",
    "pause",
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


class Command(NamedTuple):
    """What a command wishes, which wishes it may follow, and whether it is allowed on a halted projection."""

    verb: str
    wish: Wish
    after: tuple[Wish, ...]
    while_halted: bool
    followed: Callable[[State], bool]


# --- commands ---------------------------------------------------------------------------------------------------


def start(p: object, *, by: str = "", reason: str = "", wait: bool = False, timeout: float = 10.0) -> None:
    """Let a stopped projection run again; leaves a halt behind.

    `p` is the decorated function, a name (version 1), or (name, version). `by` and `reason` are recorded. With `wait`
    it returns when the owner has followed, within `timeout` seconds.

    Raises :class:`~scriba.exceptions.InvalidState` when it is not stopped (a halted one is stopped first),
    :class:`~scriba.exceptions.UnknownProjection`, and with `wait` :class:`~scriba.exceptions.WaitTimeout` or
    :class:`~scriba.exceptions.ProjectionHalted`.
    """
    _command(p, _START, by, reason, wait_s=timeout if wait else None)


def pause(p: object, *, by: str = "", reason: str = "", wait: bool = False, timeout: float = 10.0) -> None:
    """Let a projection take nothing new; what is in flight is finished. Survives restarts. See :func:`start`."""
    _command(p, _PAUSE, by, reason, wait_s=timeout if wait else None)


def resume(p: object, *, by: str = "", reason: str = "", wait: bool = False, timeout: float = 10.0) -> None:
    """Let a paused projection go on. See :func:`start`."""
    _command(p, _RESUME, by, reason, wait_s=timeout if wait else None)


def stop(p: object, *, by: str = "", reason: str = "", wait: bool = False, timeout: float = 10.0) -> None:
    """Drain a projection and let it rest until :func:`start`. Allowed on a halted one, too. See :func:`start`."""
    _command(p, _STOP, by, reason, wait_s=timeout if wait else None)


def start_projection(p: object, /, *, by: str = "", **overrides: Any) -> RunningProjection:
    """Wish *running* and run the projection in threads of this process; return its handle.

    The handle has ``wait()`` and ``stop()`` and is a context manager. `overrides` are options that are not part of
    the identity (``parallelism=32``); `by` is recorded. Raises :class:`~scriba.exceptions.ConfigurationError` and
    :class:`~scriba.exceptions.UnknownProjection`.
    """
    from scriba.engine.runner import start_in_background  # noqa: PLC0415 - only those who run a projection need threads

    projection = find(p)
    return start_in_background(projection.override(**overrides) if overrides else projection, by=by)


def _command(p: object, command: Command, by: str, reason: str, *, wait_s: float | None) -> None:
    projection = find(p)
    alias = alias_of(projection)
    if wait_s is not None:
        refuse_to_wait_in_transaction(alias)
    if not _change_wish(projection, alias, command, by, reason):
        _refuse(projection, command, read_state(projection.identity, alias))
    if wait_s is not None:
        _wait_until_followed(projection, alias, command, wait_s)


def _change_wish(projection: Projection, alias: str, command: Command, by: str, reason: str) -> bool:
    """Check the state and change the wish, in one statement. A projection without a row is wished *running*."""
    params: dict[str, Any] = {
        "name": projection.name,
        "version": projection.version,
        "wish": command.wish.value,
        "after": [wish.value for wish in command.after],
        "halted": command.while_halted,
        "action": command.verb,
        "by": by,
        "reason": reason,
        "payload": str(projection.identity),
    }
    with connections[alias].cursor() as cursor:
        if Wish.RUNNING in command.after:
            cursor.execute(_CREATE, params)
        cursor.execute(_CHANGE, params)
        return bool(cursor.fetchall())


def _refuse(projection: Projection, command: Command, state: State) -> None:
    wish = state.wish or Wish.RUNNING
    if state.halt_cause and not (command.while_halted and wish is Wish.STOPPED):
        shown: str = Status.HALTED.value
        cure = f"Mend the cause, then stop and start it. It halted because: {state.halt_cause}"
    else:
        shown = wish.value
        cure = f"Possible when it is {' or '.join(command.after)}."
    msg = f"cannot {command.verb} {projection.identity} while it is {shown}. {cure}"
    raise InvalidState(shown, msg)


def _wait_until_followed(projection: Projection, alias: str, command: Command, timeout: float) -> None:
    def is_followed() -> bool:
        state = read_state(projection.identity, alias)
        if state.halt_cause and not command.while_halted:
            msg = f"{projection.identity} halted: {state.halt_cause}"
            raise ProjectionHalted(msg)
        return command.followed(state)

    if not is_so_within(is_followed, timeout):
        state = read_state(projection.identity, alias)
        shown = f"{state.owner} shows it {state.status}" if state.is_live else "no process runs it"
        msg = (
            f"{projection.identity} is wished {command.wish} but did not follow within {timeout:g} s: {shown}. The wish "
            "stays; whoever runs the projection follows it."
        )
        raise WaitTimeout(msg, reached=state.watermark)


# --- helpers ----------------------------------------------------------------------------------------------------


def _is_at_rest(state: State) -> bool:
    return not state.is_live or state.owner_status in {Status.STOPPED, Status.HALTED}


def _shows(status: Status) -> Callable[[State], bool]:
    return lambda state: state.is_live and state.owner_status == status


_START: Final = Command("start", Wish.RUNNING, (Wish.STOPPED,), True, _shows(Status.RUNNING))
_PAUSE: Final = Command("pause", Wish.PAUSED, (Wish.RUNNING,), False, _shows(Status.PAUSED))
_RESUME: Final = Command("resume", Wish.RUNNING, (Wish.PAUSED,), False, _shows(Status.RUNNING))
_STOP: Final = Command("stop", Wish.STOPPED, (Wish.RUNNING, Wish.PAUSED), True, _is_at_rest)

_CREATE: Final = """
INSERT INTO scriba_projections (projection_name, projection_version) VALUES (%(name)s, %(version)s)
ON CONFLICT (projection_name, projection_version) DO NOTHING
"""
#: A start comes after a stop: that is the human act which leaves a halt behind.
_CHANGE: Final = (
    """
WITH done AS (
  UPDATE scriba_projections
  SET wish = %(wish)s, wish_by = %(by)s, wish_reason = %(reason)s, wished_at = now(),
      halt_cause = CASE WHEN %(wish)s = 'running' THEN '' ELSE halt_cause END,
      halt_label = CASE WHEN %(wish)s = 'running' THEN '' ELSE halt_label END,
      halted_at = CASE WHEN %(wish)s = 'running' THEN NULL ELSE halted_at END
  WHERE projection_name = %(name)s AND projection_version = %(version)s
    AND wish = ANY(%(after)s) AND (%(halted)s OR halted_at IS NULL)
  RETURNING 1),
noted AS ("""
    + AUDITED
    + """)
SELECT pg_notify('scriba_wish', %(payload)s) FROM done
"""
)
