"""How often a failing handler is called again, and how long it waits in between. Pure.

The wait never holds a transaction open: the events before the failing one are committed first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from scriba.exceptions import ConfigurationError, did_you_mean

__all__ = ["RetryPolicy"]


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """`attempts` calls in all, with `backoff` seconds between them.

    The defaults are the original's: three attempts, 0.1 s and 1 s between them; the third wait, 10 s, is
    there for a fourth attempt. Raises :class:`~scriba.exceptions.ConfigurationError` when the list of
    waits is shorter than attempts - 1.
    """

    attempts: int = 3
    backoff: Sequence[float] = (0.1, 1.0, 10.0)

    def __post_init__(self) -> None:
        if isinstance(self.attempts, bool) or not isinstance(self.attempts, int) or self.attempts < 1:
            msg = f"retry: attempts must be a whole number of at least 1, not {self.attempts!r}."
            raise ConfigurationError(msg)
        waits: Any = self.backoff  # checked, whatever its annotation says
        if isinstance(waits, str) or not isinstance(waits, Sequence) or not all(map(_is_wait, waits)):
            msg = f"retry: backoff must be a list of seconds, each 0 or more, not {waits!r}."
            raise ConfigurationError(msg)
        if len(waits) < self.attempts - 1:
            msg = (
                f"retry: {self.attempts} attempts need {self.attempts - 1} waits between them, "
                f"but backoff has {len(waits)}: {list(waits)!r}."
            )
            raise ConfigurationError(msg)
        object.__setattr__(self, "backoff", tuple(waits))

    @classmethod
    def parse(cls, value: object) -> RetryPolicy:
        """Accept what users write: a policy, True or None (defaults), False (one attempt), or a mapping."""
        if isinstance(value, cls):
            return value
        if value is None or value is True:
            return cls()
        if value is False:
            return cls(attempts=1, backoff=())
        if isinstance(value, Mapping):
            known = [field.name for field in fields(cls)]
            for name in value:
                if name not in known:
                    msg = f"retry: unknown key {name!r}{did_you_mean(str(name), known)}"
                    raise ConfigurationError(msg)
            return cls(**value)
        msg = f"retry must be a RetryPolicy, a mapping, True or False, not {value!r}."
        raise ConfigurationError(msg)

    def wait_after(self, attempt: int) -> float | None:
        """Return the seconds to wait after failed attempt number `attempt` (from 1), or None to give up."""
        return None if attempt >= self.attempts else self.backoff[attempt - 1]


def _is_wait(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf")
