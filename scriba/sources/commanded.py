"""A real Commanded event store as a source: the PostgreSQL database of the Elixir library ``eventstore``.

Nothing of the store is changed, except, with ``checkpoint="shared"``, one row of its `subscriptions`. Nothing is
locked that an appender needs. See the how-to page *Commanded* for cut-overs, privileges and poolers.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, Final

from django.core.checks import Error
from django.db import connections

from scriba.exceptions import ConfigurationError, did_you_mean
from scriba.sources.commanded_checkpoint import LOCK_STYLES, LockLost, SubscriptionName, delete_subscription
from scriba.sources.commanded_connections import Connector, is_transient
from scriba.sources.commanded_serializers import ElixirTypes, checked_serializer
from scriba.sources.commanded_store import ALL, inspect_store
from scriba.sources.commanded_subscription import CommandedSubscription
from scriba.sources.decoding import Decoding

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from django.core.checks import CheckMessage

    from scriba.protocols import Identity, Shard
    from scriba.sources.building import Types, UnknownKeys
    from scriba.sources.decoding import UnknownType, Upcasters

__all__ = ["CommandedSource"]

CHECKPOINTS: Final = ("own", "shared")
WAKEUPS: Final = ("notify", "poll")
STARTS: Final = ("origin", "current")


class CommandedSource:
    """The events of a Commanded application, in the order of their global numbers.

    `using`, `dsn`
        The database of the event store: an alias of ``DATABASES``, or a connection string. One of them is required.
    `schema`
        The PostgreSQL schema of the store (the library's option `schema`, or `prefix`): ``"public"``.
    `stream`
        ``"$all"``, or the name of one stream. A single stream is numbered by its own versions; so is `start_from`.
    `serializer`
        What the columns hold: ``"auto"`` recognises each value; ``"json"``, ``"jsonb"``, ``"term"`` (Erlang's external
        term format) insist; a callable ``(bytes, event type or None for metadata)`` decodes anything else.
    `types`, `upcast`, `unknown_type`, `unknown_keys`
        As for every source. A class stands for the event type of its name, with or without Elixir modules before it:
        ``OrderPlaced`` for ``Elixir.Shop.Events.OrderPlaced``.
    `checkpoint`
        ``"own"``: progress is in Scriba's tables only. ``"shared"``: additionally the row of a subscription of the
        store is used, with the lock that an Elixir handler of that name takes; either side can take over.
    `subscription_name`
        The subscription's name in shared mode: the `name` of the Elixir handler. The projection's name by default.
    `start_from`
        ``"origin"``, ``"current"``, or a number N: the first event delivered is N + 1. It counts once, at the first
        start; in shared mode only if the subscription does not exist yet. *Current* is the last number that is
        committed at the first look: the store numbers events in the order of their commits, so whatever is in flight
        then comes behind it.
    `wakeup`
        ``"notify"`` listens to the store's notifications besides polling; ``"poll"`` only polls.
    `stream_prefix`
        Only streams whose names begin so. The others still move the watermark.
    `session`
        Another way to the same database for the lock and for LISTEN, where `using` goes through a pooler in
        transaction mode or to a replica: an alias or a connection string.
    `lock_style`
        ``"two_int"`` or ``"legacy_bigint"``, the form of the advisory lock; by default that of the store's version.

    ``meta.position`` is the global number, ``meta.stream_id`` the name of the stream, ``meta.type`` the event type as
    stored, ``meta.metadata`` the map given at dispatch; correlation id, causation id and stream version have fields.
    """

    def __init__(  # noqa: PLR0913 - options of a source
        self,
        *,
        using: str | None = None,
        dsn: str | None = None,
        schema: str = "public",
        stream: str = ALL,
        serializer: str | Callable[[bytes, str | None], Any] = "auto",
        types: Types | None = None,
        upcast: Upcasters = (),
        unknown_type: UnknownType = "deliver",
        unknown_keys: UnknownKeys = "ignore",
        checkpoint: str = "own",
        subscription_name: str | None = None,
        start_from: str | int = "origin",
        wakeup: str = "notify",
        stream_prefix: str | None = None,
        session: str | None = None,
        lock_style: str | None = None,
    ) -> None:
        if (using is None) == (dsn is None):
            msg = "CommandedSource needs the event store's database: either using='alias' or dsn='postgresql://…'."
            raise ConfigurationError(msg)
        if subscription_name is not None and checkpoint != "shared":
            msg = "CommandedSource: subscription_name is for checkpoint='shared'; with 'own' no subscription is used."
            raise ConfigurationError(msg)
        self.using = using
        self.connector = Connector(using, dsn)
        self.session = session
        self.session_connector = _connector(session) if session is not None else self.connector
        self.schema = _text("schema", schema)
        self.stream = _text("stream", stream)
        self.serializer: Any = checked_serializer(serializer)
        self.decoding = _decoding(types, upcast, unknown_type, unknown_keys)
        self.checkpoint = _one_of("checkpoint", checkpoint, CHECKPOINTS)
        self.subscription_name = subscription_name
        self.start_from = _start(start_from)
        self.wakeup = _one_of("wakeup", wakeup, WAKEUPS)
        self.stream_prefix = stream_prefix
        self.lock_style = None if lock_style is None else _one_of("lock_style", lock_style, LOCK_STYLES)
        self.event_types: list[str] | None = None

    @property
    def is_filtered(self) -> bool:
        """Whether some events are left out inside the database."""
        return self.event_types is not None or self.stream_prefix is not None

    def narrow(self, event_types: Collection[str]) -> CommandedSource:
        """Return a source that leaves out other event types: their payloads never leave the database.

        A name may be the whole event type, the type without ``Elixir.``, or its last part alone.
        """
        narrowed = copy.copy(self)
        narrowed.event_types = sorted(self.decoding.names_of(frozenset(event_types)))
        return narrowed

    def subscribe(self, identity: Identity, shards: Sequence[Shard]) -> CommandedSubscription:
        """Connect and look at the store. Raises :class:`~scriba.exceptions.SourceError` for one that cannot be read."""
        return CommandedSubscription(self, identity, shards[0])

    def identity(self) -> str:
        """Name the store and the stream; another serializer or checkpoint is the same source."""
        return f"commanded:{self.connector.name}/{self.schema}/{self.stream}"

    def checks(self) -> list[CheckMessage]:
        """Return what is wrong with the aliases, as far as it can be seen without a connection."""
        aliases = {connector.using for connector in (self.connector, self.session_connector)} - {None}
        return [problem for alias in sorted(map(str, aliases)) for problem in _alias_problems(alias)]

    def transient(self, error: Exception) -> bool:
        """Say whether `error` may go away by itself: a lost connection, a server that restarts, a lost lock."""
        return isinstance(error, LockLost) or is_transient(error)

    def delete_subscription(self, name: str, *, force: bool = False) -> bool:
        """Delete the subscription `name` of this stream, so that it can begin anew; return whether there was one.

        Works without a running subscriber on either side. Raises :class:`~scriba.protocols.SourceBusy`, which names
        the holder, while one runs. With `force` it is deleted all the same; its holder notices at its next
        acknowledgement if it is Scriba, and not at all if it is Elixir.
        """
        from scriba.protocols import Identity  # noqa: PLC0415 - only here

        with self.session_connector.connect(Identity(name, 1), "admin") as connection:
            style = self.lock_style or inspect_store(connection, self.schema).lock_style
            row = SubscriptionName(self.schema, self.stream, name)
            return delete_subscription(connection, row, style, force=force)


def _alias_problems(alias: str) -> list[CheckMessage]:
    if alias not in connections:
        return [
            Error(
                f"CommandedSource names the database alias {alias!r}, which is not in DATABASES.",
                hint=f"Known aliases: {', '.join(connections)}. Or give a connection string: dsn='postgresql://…'.",
                id="scriba.E301",
            )
        ]
    if connections[alias].vendor != "postgresql":
        return [
            Error(
                f"CommandedSource names the database alias {alias!r}, which is {connections[alias].display_name}.",
                hint="A Commanded event store is in PostgreSQL.",
                id="scriba.E302",
            )
        ]
    return []


def _decoding(types: Any, upcast: Any, unknown_type: Any, unknown_keys: Any) -> Decoding:
    where = "CommandedSource"
    decoding = Decoding(where, types=types, upcast=upcast, unknown_type=unknown_type, unknown_keys=unknown_keys)
    if types is not None:
        decoding.types = ElixirTypes(where, types, unknown_keys)
    return decoding


def _connector(session: str) -> Connector:
    is_dsn = "=" in session or "://" in session
    return Connector(None, session) if is_dsn else Connector(session, None)


def _text(option: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        msg = f"CommandedSource: {option} must be a name, not {value!r}."
        raise ConfigurationError(msg)
    return value


def _one_of(option: str, value: object, accepted: Sequence[str]) -> str:
    if value not in accepted:
        msg = f"CommandedSource: {option}={value!r} is unknown{did_you_mean(str(value), accepted)}"
        raise ConfigurationError(msg)
    return str(value)


def _start(value: object) -> str | int:
    if value in STARTS or (isinstance(value, int) and not isinstance(value, bool) and value >= 0):
        return value
    msg = f"CommandedSource: start_from must be 'origin', 'current', or a number of 0 or more, not {value!r}."
    raise ConfigurationError(msg)
