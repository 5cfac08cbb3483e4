"""The ear on a store's NOTIFY channel, over a connection of the source's own making (see :mod:`scriba.listening`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from scriba.listening import Ear

if TYPE_CHECKING:
    from collections.abc import Callable

    from scriba.sources.commanded_connections import Connection

__all__ = ["Listener"]


class Listener(Ear):
    """Calls `on_hint` whenever `channel` says something on a connection that `connect` opens."""

    def __init__(self, connect: Callable[[], Connection], channel: str, on_hint: Callable[[], None], name: str) -> None:
        super().__init__("", channel, on_hint, name)
        self._connect = connect

    def _wrapper(self) -> Any:
        return _Opened(self._connect)


class _Opened:
    """What an ear asks of Django's wrappers, for a plain connection."""

    def __init__(self, connect: Callable[[], Connection]) -> None:
        self._connect = connect
        self.connection: Connection | None = None

    def ensure_connection(self) -> None:
        self.connection = self._connect()

    def close(self) -> None:
        if self.connection is not None:
            self.connection.close()
