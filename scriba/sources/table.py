"""An append-only Django table as a source: for teams whose events live in a model of their own.

:mod:`scriba.sources.horizon` says how nothing is lost although positions become visible out of order. The rest of the
path: `table_fields` (which column is what), `table_statements` (how a page is read), `table_facts` (what the server
must fulfil), `table_reading` (all of that, compiled), `table_subscription` (an open reading).
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

from django.core.checks import CheckMessage, Error, Info, Warning  # noqa: A004 - Django's word
from django.db import DatabaseError, InterfaceError, connections, models, router
from django.db.models import Q
from django.utils.connection import ConnectionDoesNotExist

from scriba.connection import OwnConnection
from scriba.exceptions import ConfigurationError, did_you_mean
from scriba.sources.decoding import Decoding
from scriba.sources.table_facts import look_at_table
from scriba.sources.table_fields import OPTIONS, Problem, find_fields, resolve_model
from scriba.sources.table_reading import TableReading, is_transient, make_reading
from scriba.sources.table_statements import select_rows
from scriba.sources.table_subscription import InlineSubscription, TableSubscription

if TYPE_CHECKING:
    from scriba.protocols import Identity, Shard
    from scriba.sources.building import Types, UnknownKeys
    from scriba.sources.decoding import Hook, UnknownType, Upcasters
    from scriba.sources.table_fields import EventFields, StreamId

__all__ = ["TableSource", "notify_appended"]

STARTS: Final = ("origin", "current")
WAKEUPS: Final = ("poll", "notify")
LONGEST_CHANNEL: Final = 63  #: bytes: PostgreSQL refuses longer names


class TableSource:
    """Events in the rows of `model`, a class or ``"app.Model"``.

    `using`
        The database alias; by default the one that the model's router writes to. It must lead to the primary server.
    `position`, `stream_id`, `type`, `data`, `metadata`, `id`, `occurred_at`, `stream_version`, `correlation_id`, `causation_id`
        Names of fields (``"stream__name"`` follows a foreign key). What is not said is guessed from the names that
        teams use; ``manage.py check`` says what is missing. `position` is a unique integer that the database draws in
        the transaction that inserts the row. `stream_id` may be a tuple of names, whose values are joined by ``:``, or
        a callable that gets the event and returns the stream's id.
    `sequence`
        The SQL name of the sequence, for a position that a trigger fills.
    `decode`
        A callable (what the data column holds, the event's type) -> data, for payloads that are not JSON: bytes of a
        BinaryField, text of any other column.
    `filter`
        A ``Q`` over the event's own row: what else to project. Applied after the scan: others move the watermark.
    `types`, `unknown_type`, `unknown_keys`
        Classes for the data: a list, or a mapping or callable from the type's name. Without them handlers get the plain
        value. An event of another type is delivered plain (``"deliver"``), skipped (``"skip"``), or dead-lettered
        (``"fail"``). Keys that a class does not know are left out (``"ignore"``) or its event's fault (``"forbid"``).
    `upcast`
        Functions (Payload) -> Payload, or to a tuple (type, data, metadata), run in order before `types`.
    `start_from`
        ``"origin"``, ``"current"``, or the position to begin after. Counts once, at the first start. *Current* is
        behind the highest position of the first look; when somebody is writing at that moment, the start waits until
        they have ended, and lies before what they have committed (:mod:`scriba.sources.starting` says how far back).
    `wakeup`
        ``"poll"``, or ``"notify"`` to look at once when :func:`notify_appended` was called.

    Raises :class:`~scriba.exceptions.ConfigurationError` for an option that is wrong in itself; what the model and the
    server lack is said by :meth:`checks` and :meth:`database_checks`, and again when a projection starts.
    """

    def __init__(  # noqa: PLR0913 - options of a source
        self,
        model: type[models.Model] | str,
        *,
        using: str | None = None,
        position: str | None = None,
        stream_id: StreamId = None,
        type: str | None = None,  # noqa: A002 - the event's word
        data: str | None = None,
        metadata: str | None = None,
        id: str | None = None,  # noqa: A002 - the event's word
        occurred_at: str | None = None,
        stream_version: str | None = None,
        correlation_id: str | None = None,
        causation_id: str | None = None,
        sequence: str | None = None,
        decode: Hook | None = None,
        filter: Q | None = None,  # noqa: A002 - Django's word
        types: Types | None = None,
        upcast: Upcasters = (),
        unknown_type: UnknownType = "deliver",
        unknown_keys: UnknownKeys = "ignore",
        start_from: Literal["origin", "current"] | int = "origin",
        wakeup: Literal["poll", "notify"] = "poll",
    ) -> None:
        given = locals()
        self._given = {option: given[option] for option in OPTIONS}
        self._model = model
        self._using = using
        self._sequence = sequence
        where = f"TableSource({_shown(model)})"
        self._decode = _checked(where, "decode", decode, "a callable (stored value, event type) -> data", callable)
        self._filter = _checked(where, "filter", filter, "a Q object", lambda value: isinstance(value, Q))
        self._decoding = Decoding(
            where, types=types, upcast=upcast, unknown_type=unknown_type, unknown_keys=unknown_keys
        )
        self._start_from = _checked_start(where, start_from)
        self._wakeup = _checked_word(where, "wakeup", wakeup, WAKEUPS)
        self._event_types: frozenset[str] | None = None
        self._reading: TableReading | None = None

    # --- protocol -----------------------------------------------------------------------------------------

    def subscribe(self, identity: Identity, shards: Sequence[Shard]) -> TableSubscription:
        """Return a reading; the server is looked at by its first fetch."""
        return TableSubscription(self._compiled(), identity, shards)

    def subscribe_inline(self, identity: Identity, shards: Sequence[Shard]) -> InlineSubscription:
        """Return a reading inside the calling thread's transaction, for tests (:func:`scriba.testing.drain`)."""
        del identity
        return InlineSubscription(self._compiled(), shards)

    def narrow(self, types: Collection[str]) -> TableSource:
        """Return a copy that delivers only events of `types`: stored names, or qualified names of classes in `types=`.

        The rest is left out by the server, and its positions are scanned all the same.
        """
        narrowed = copy.copy(self)
        narrowed._event_types = self._decoding.names_of(frozenset(types))  # noqa: SLF001 - a copy of ours
        narrowed._reading = None  # noqa: SLF001 - as above
        return narrowed

    def identity(self) -> str:
        fields = self._fields()
        return (
            f"table:{self._alias(fields.model)}.{fields.model._meta.db_table}({fields.field(fields.position).column})"
        )

    def transient(self, error: Exception) -> bool:
        """Say whether `error` may go away by itself."""
        return is_transient(error)

    def checks(self) -> list[CheckMessage]:
        """Say what the model lacks. Opens no connection."""
        try:
            model = resolve_model(self._model)
        except ConfigurationError as error:
            return [Error(str(error), id="scriba.E210")]
        fields, problems = find_fields(model, self._given)
        try:
            alias = self._alias(model)
        except ConfigurationError as error:
            problems.append(Problem("scriba.E216", str(error), "Events are read from PostgreSQL only."))
        else:
            problems += _filter_problems(fields, alias, self._filter)
        return [Error(problem.message, hint=problem.hint, obj=model, id=problem.id) for problem in problems]

    def database_checks(self, databases: Collection[str]) -> list[CheckMessage]:
        """Say what the server lacks, when its alias is one of `databases` and it can be reached."""
        if self.checks():
            return []
        fields = self._fields()
        alias = self._alias(fields.model)
        if alias not in databases:
            return []
        own = OwnConnection(alias)
        try:
            facts = look_at_table(own.rows, fields, alias, self._sequence)
        except (DatabaseError, InterfaceError) as error:
            message = f"The event table {fields.model._meta.db_table!r} could not be looked at: {' '.join(str(error).split())}"
            return [
                Info(message, hint="Its sequence and its server were not checked.", obj=fields.model, id="scriba.I227")
            ]
        finally:
            own.close()
        found: list[CheckMessage] = [_as(Error, problem, fields.model) for problem in facts.errors]
        return found + [_as(Warning, problem, fields.model) for problem in facts.warnings]

    # --- resolved late, because models are ----------------------------------------------------------------

    def channel(self) -> str:
        """Return the name of the NOTIFY channel of this table."""
        return channel_of(resolve_model(self._model))

    def database(self) -> str:
        """Return the alias that is read."""
        return self._alias(resolve_model(self._model))

    def _compiled(self) -> TableReading:
        if self._reading is None:
            fields = self._fields()
            self._reading = make_reading(
                fields,
                self._alias(fields.model),
                self._decoding,
                sequence=self._sequence,
                start_from=self._start_from,
                channel=channel_of(fields.model),
                listens=self._wakeup == "notify",
                where=self._filter,
                types=self._event_types,
                decode=self._decode,
            )
        return self._reading

    def _fields(self) -> EventFields:
        fields, problems = find_fields(resolve_model(self._model), self._given)
        if fields is None:
            raise ConfigurationError(" ".join(f"{problem.message} {problem.hint}" for problem in problems))
        return fields

    def _alias(self, model: type[models.Model]) -> str:
        alias = self._using or router.db_for_write(model)
        try:
            connection = connections[alias]
        except ConnectionDoesNotExist as error:
            msg = f"TableSource({_shown(self._model)}): using={alias!r} is no database{did_you_mean(alias, connections.settings)}"
            raise ConfigurationError(msg) from error
        if connection.vendor != "postgresql":
            msg = f"TableSource({_shown(self._model)}): the database {alias!r} is {connection.display_name}, not PostgreSQL."
            raise ConfigurationError(msg)
        return alias


def notify_appended(model_or_source: type[models.Model] | str | TableSource, using: str | None = None) -> None:
    """Tell projections with ``wakeup="notify"`` that events were appended to a table.

    Call it last in the transaction that appends: the notice leaves with the commit. Transactions that notify commit one
    after the other, server-wide, which costs busy writers about half of their throughput; polling costs them nothing.
    """
    source = model_or_source if isinstance(model_or_source, TableSource) else TableSource(model_or_source, using=using)
    with connections[using or source.database()].cursor() as cursor:
        cursor.execute("SELECT pg_notify(%s, '')", (source.channel(),))


def channel_of(model: type[models.Model]) -> str:
    """Return the NOTIFY channel of a model's table: the table's name where it fits, and a digest of it where not."""
    table = model._meta.db_table
    name = f"scriba:{table}"
    if len(name.encode()) <= LONGEST_CHANNEL:
        return name
    return f"scriba:{hashlib.sha256(table.encode()).hexdigest()[:40]}"


def _filter_problems(fields: EventFields | None, alias: str, where: Q | None) -> Iterator[Problem]:
    if fields is not None and where is not None:
        try:
            select_rows(fields, alias, where)
        except ConfigurationError as error:
            yield Problem(
                "scriba.E217", str(error), "A filter is a Q over the event's own row and the rows it points to."
            )


def _as(kind: type[CheckMessage], problem: Problem, model: type[models.Model]) -> CheckMessage:
    made: Any = kind  # Error and Warning know their level; their base does not
    message: CheckMessage = made(problem.message, hint=problem.hint, obj=model, id=problem.id)
    return message


# --- options --------------------------------------------------------------------------------------------


def _shown(model: object) -> str:
    return model.__name__ if isinstance(model, type) else repr(model)


def _checked(where: str, option: str, value: Any, accepted: str, fits: Any) -> Any:
    if value is not None and not fits(value):
        msg = f"{where}: {option} must be {accepted}, not {value!r}."
        raise ConfigurationError(msg)
    return value


def _checked_word(where: str, option: str, value: Any, accepted: Sequence[str]) -> str:
    if value not in accepted:
        msg = f"{where}: {option}={value!r} is no choice{did_you_mean(str(value), accepted)}"
        raise ConfigurationError(msg)
    return str(value)


def _checked_start(where: str, start: Any) -> str | int:
    if start in STARTS or (isinstance(start, int) and not isinstance(start, bool) and start >= 0):
        return start  # type: ignore[no-any-return]
    msg = f"{where}: start_from must be 'origin', 'current', or a position of 0 or more, not {start!r}."
    raise ConfigurationError(msg)
