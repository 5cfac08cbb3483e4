"""The optional setting ``SCRIBA``, a dict: typed here, read live, so that ``override_settings`` works."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from django.conf import settings

from scriba.exceptions import ConfigurationError, did_you_mean

__all__ = ["Settings", "scriba_settings"]


@dataclass(frozen=True, slots=True)
class Settings:
    """Every key of ``settings.SCRIBA`` with its default; times are seconds, sizes are bytes."""

    lease_s: float = 15.0  #: how long an owner may be silent before another process takes over
    drain_timeout_s: float = 30.0  #: how long SIGTERM waits for handlers that are still running
    busy_poll_s: float = 0.02  #: from one look at the source to the next while events flow, unless a notice comes
    idle_poll_s: float = 0.25  #: the same when none has come for a second
    max_bytes_in_flight: int = 64_000_000  #: payload bytes read but not settled, per projection
    max_letter_bytes: int = 256_000  #: a dead letter's payload beyond this is cut, with a mark
    redact: Callable[[str, Any], Any] | None = None  #: (event type, data) -> what a dead letter may store
    listen: bool = True  #: hear of wishes and progress by NOTIFY; polling goes on in any case
    audit_kept_s: float = 31_536_000.0  #: how long the records of who asked what are kept: a year
    audit_most: int = 10_000  #: most records of one projection
    transient_sqlstates: tuple[str, ...] = ()  #: further SQLSTATEs (or two-letter classes) to repeat
    integrity_sqlstates: tuple[str, ...] = ()  #: further SQLSTATEs (or classes) that are one event's fault
    structural_sqlstates: tuple[str, ...] = ()  #: further SQLSTATEs (or classes) that halt


def scriba_settings() -> Settings:
    """Return the settings as they are now.

    Raises :class:`~scriba.exceptions.ConfigurationError` for an unknown key or a value of another kind
    (``manage.py check`` says it first).
    """
    given: Any = getattr(settings, "SCRIBA", {})
    if not isinstance(given, Mapping):
        msg = f"settings.SCRIBA must be a dict, not {given!r}."
        raise ConfigurationError(msg)
    known = [field.name for field in fields(Settings)]
    for name in given:
        if name not in known:
            msg = f"settings.SCRIBA: unknown key {name!r}{did_you_mean(str(name), known)}"
            raise ConfigurationError(msg)
    return Settings(**{name: _checked(name, value) for name, value in given.items()})


_DEFAULTS = {field.name: field.default for field in fields(Settings)}
_SQLSTATE = re.compile(r"[0-9A-Z]{2}([0-9A-Z]{3})?")


def _checked(name: str, value: Any) -> Any:
    """Return `value` as the key's type, or say what the key accepts."""
    default = _DEFAULTS[name]
    if name == "redact":
        accepted, fits = "a callable (event type, data) -> data, or None", value is None or callable(value)
    elif isinstance(default, tuple):
        accepted, fits = 'a list of SQLSTATEs ("40P01") or two-letter classes ("40")', _are_sqlstates(value)
        value = tuple(value) if fits else value
    elif isinstance(default, bool):
        if not isinstance(value, bool):
            msg = f"settings.SCRIBA: {name!r} must be True or False, not {value!r}."
            raise ConfigurationError(msg)
        return value
    elif isinstance(default, int):
        unit = "bytes" if "bytes" in name else "entries"
        accepted, fits = f"a whole number of {unit} above 0", isinstance(value, int) and value > 0
    else:
        accepted, fits = "seconds above 0", isinstance(value, int | float) and 0 < value < float("inf")
    if not fits or isinstance(value, bool):
        msg = f"settings.SCRIBA: {name!r} must be {accepted}, not {value!r}."
        raise ConfigurationError(msg)
    return value


def _are_sqlstates(value: object) -> bool:
    return isinstance(value, list | tuple | set | frozenset) and all(
        isinstance(code, str) and _SQLSTATE.fullmatch(code) for code in value
    )
