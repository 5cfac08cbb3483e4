"""Where a projection may begin that takes over from a projector of ``commanded_ecto_projections``.

That library keeps one row per projector in `projection_versions`: the global number of the last event that it
projected, written in the transaction of the event. It is the truth about the read model, and it says nothing when
the projector did not subscribe to ``$all``: the number is then one stream's version. The subscription's `last_seen`
is only an acknowledgement: behind the number after a crash, ahead of it when the newest events did not concern the
projector. Nothing is written here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from django.db import connections
from psycopg import sql

from scriba.exceptions import ConfigurationError
from scriba.sources.commanded_checkpoint import SubscriptionName, holder_of
from scriba.sources.commanded_store import ALL, inspect_store

if TYPE_CHECKING:
    from collections.abc import Sequence

    from scriba.protocols import Identity
    from scriba.sources.commanded import CommandedSource

__all__ = ["Finding", "Projector", "StoreView", "Subscribed", "judge", "look_at_store", "read_projectors"]


class Projector(NamedTuple):
    """A row of `projection_versions`."""

    name: str
    number: int | None


class Subscribed(NamedTuple):
    """A row of the store's `subscriptions`, and who holds its lock, in words (empty: nobody)."""

    stream: str
    last_seen: int
    holder: str = ""


class StoreView(NamedTuple):
    """What the event store says: how far the stream that we read goes, and each handler's subscriptions."""

    stream: str
    counter: int
    subscriptions: dict[str, list[Subscribed]]


class Finding(NamedTuple):
    """The judgement about one projector. `start` None: no number can be trusted, and `remarks` say why."""

    projector: Projector
    subscription: Subscribed | None
    start: int | None
    remarks: Sequence[str]

    @property
    def holder(self) -> str:
        """Who still works under the projector's name."""
        return self.subscription.holder if self.subscription else ""


# --- reading ----------------------------------------------------------------------------------------------


def read_projectors(using: str, table: str) -> list[Projector]:
    """Return the rows of `table` (``projection_versions``, or ``schema.projection_versions``), by name.

    Raises :class:`~scriba.exceptions.ConfigurationError` when there is no such table in the database `using`.
    """
    with connections[using].cursor() as cursor:
        cursor.execute("SELECT to_regclass(%s)", [_quoted(table)])
        if cursor.fetchone() == (None,):
            msg = (
                f"the database {using!r} has no table {table}. In which database and schema did the Elixir application keep "
                "its read models (repo: and schema_prefix:)? Name them with --database and --table."
            )
            raise ConfigurationError(msg)
        cursor.execute(f"SELECT projection_name, last_seen_event_number FROM {_quoted(table)} ORDER BY 1")
        return [Projector(*row) for row in cursor.fetchall()]


def look_at_store(source: CommandedSource, identity: Identity) -> StoreView:
    """Read the counter of the source's stream, every subscription, and the holders of their locks."""
    with source.session_connector.connect(identity, "import") as connection:
        shape = inspect_store(connection, source.schema)
        names = {
            "streams": sql.Identifier(source.schema, "streams"),
            "rows": sql.Identifier(source.schema, "subscriptions"),
        }
        counted = connection.execute(
            sql.SQL("SELECT coalesce(max(stream_version), 0) FROM {streams} WHERE stream_uuid = %s").format(**names),
            (source.stream,),
        ).fetchone()
        rows = connection.execute(
            sql.SQL("SELECT subscription_name, stream_uuid, subscription_id, coalesce(last_seen, 0) FROM {rows} ORDER BY 1, 2")
            .format(**names)
        ).fetchall()  # fmt: skip
        found: dict[str, list[Subscribed]] = {}
        for name, stream, row_id, last_seen in rows:
            key = SubscriptionName(source.schema, stream, name)
            holder = holder_of(connection, key, source.lock_style or shape.lock_style, row_id)
            found.setdefault(name, []).append(Subscribed(stream, last_seen, holder))
    return StoreView(source.stream, counted[0] if counted else 0, found)


def _quoted(table: str) -> str:
    return sql.Identifier(*table.split(".", 1)).as_string(None)


# --- judging ----------------------------------------------------------------------------------------------


def judge(projector: Projector, store: StoreView | None) -> Finding:
    """Say after which number a projection may begin that continues this projector's read model, and what to know."""
    remarks: list[str] = []
    if projector.number is None:
        return Finding(projector, None, None, [_NO_NUMBER])
    if store is None:
        return Finding(projector, None, projector.number, [_NOT_COMPARED])
    subscriptions = store.subscriptions.get(projector.name, [])
    here = next((each for each in subscriptions if each.stream == store.stream), None)
    others = [each for each in subscriptions if each is not here]
    start: int | None = projector.number
    if others:
        remarks.append(_elsewhere(others, store))
        start = projector.number if here and not _is_doubtful(here, projector.number) else None
    elif here is None:
        remarks.append(_NO_SUBSCRIPTION)
    if projector.number > store.counter:
        remarks.append(
            f"{projector.number} is beyond the end of {store.stream} ({store.counter}): another event store, or one that "
            "was reset or restored since"
        )
        start = None
    if here is not None:
        remarks += _compared(here, projector.number)
    return Finding(projector, here, start, remarks)


_NO_NUMBER: Final = "its number is NULL, so the old library took every event for seen: nothing says what the read model holds; rebuild it"
_NOT_COMPARED: Final = "not compared with an event store: name a projection whose source is one"
_NO_SUBSCRIPTION: Final = (
    f"no subscription of this name in the event store: make sure that the projector subscribed to {ALL} (no subscribe_to:), "
    "otherwise the number is a stream's version"
)


def _is_doubtful(here: Subscribed, number: int) -> bool:
    """A projector with subscriptions to several streams may have written the number of any of them."""
    return here.last_seen < number


def _elsewhere(others: Sequence[Subscribed], store: StoreView) -> str:
    names = ", ".join(each.stream for each in others)
    return f"it was subscribed to {names}, not only to {store.stream}: its number may be the version of another stream"


def _compared(here: Subscribed, number: int) -> list[str]:
    remarks = []
    if here.holder:
        remarks.append(
            f"its subscription is in use by {here.holder}: stop it, and look again, before anything is written"
        )
    if here.last_seen < number:
        remarks.append(
            f"its subscription acknowledges only {here.last_seen}: {here.last_seen + 1} to {number} are in the read model and "
            "would be handed out again; the imported floor settles them without applying them twice"
        )
    if here.last_seen > number:
        remarks.append(
            f"its subscription is at {here.last_seen}: what came after {number} did not concern the projector; beginning after "
            f"{number} offers it to the new handler, which matters only if that handles more event types"
        )
    return remarks


def unknown_projector(name: str, known: Sequence[Any]) -> str:
    """Return the message for a name that `projection_versions` does not hold."""
    return f"there is no projector {name!r}; known: {', '.join(each.name for each in known) or 'none'}."
