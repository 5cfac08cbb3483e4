"""Noticing what a handler does on the batch's connection, whichever way it takes.

While a handler runs, its first statement must find everything before it executed and a savepoint set (`before_first`).
Django's hook sees what goes through ``connection.cursor().execute``; ``copy()``, ``stream()``, ``callproc()`` and the
driver's own connection pass beside it. So the driver's connection is watched too, in three rings: cursors that it
makes are given a watching class, ``transaction()`` and ``pipeline()`` count as statements, and what still reaches the
driver's ``wait()`` unnoticed (a cursor built by hand) is refused. What always holds: nothing of a handler reaches the
server before `before_first` has run; nothing ends the transaction or closes the connection; the first error of the
connection is remembered, whatever the handler makes of it. Must not undo or judge anything: that is ``orm.py``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, TypeVar

import psycopg
from django.db.transaction import TransactionManagementError

from scriba.exceptions import PermanentFailure
from scriba.failure import is_consequence
from scriba.log_fields import about
from scriba.targets.sql_kinds import Kind, kind_of

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

    from scriba.protocols import Identity

__all__ = ["Elsewhere", "HandlerMisuse", "Watch"]

logger = logging.getLogger("scriba")

T = TypeVar("T")

_WATCH: Final = "_scriba_watch"  #: attribute of a driver's connection, for the cursors that it has made


class HandlerMisuse(PermanentFailure):
    """A handler did what cannot be part of its batch's transaction. The message says what to do instead."""


class Watch:
    """Watches one connection from the beginning of a batch to its end; active while a handler runs."""

    def __init__(
        self,
        connection: BaseDatabaseWrapper,
        before_first: Callable[[], None],
        is_apart: Callable[[Any, Any], bool] = lambda _sql, _params: False,
    ) -> None:
        self._connection = connection
        self._is_apart = is_apart
        self._driver = connection.connection
        self._before_first = before_first
        self._is_passing = False  #: a noticed statement, or one of our own, is on its way
        self._is_used = False  #: the last handler has left something behind in what follows
        self._errors: list[BaseException] = []
        self._outer_wrappers = list(connection.execute_wrappers)
        self._originals: dict[str, Callable[..., Any]] = {}
        self.running = False  #: a handler is being called; whoever has called it says when it has ended
        self.touched = False
        self.wrote = False
        self.broken_by: BaseException | None = None  #: the error behind a transaction that is broken, if it is
        self.early_error: Exception | None = None  #: `before_first` failed: some earlier event's write

    @property
    def is_active(self) -> bool:
        return self.running and not self._is_passing

    # --- one handler call ---------------------------------------------------------------------------------

    def start(self) -> None:
        """A handler begins."""
        self._connection.rollback_exc = None  # type: ignore[attr-defined]  # Django keeps the last one, whose ever it was
        if self._is_used:
            self._is_used = self.touched = self.wrote = False
            self.broken_by = self.early_error = None
            self._errors.clear()
        self.running = True

    def touch(self) -> None:
        """Before the first statement of a handler: let everything before it be executed and a savepoint be set."""
        self._is_used = True
        if self.early_error is not None:
            raise self.early_error
        if self._connection.needs_rollback:
            msg = "the handler goes on after an error inside atomic(): leave the block it happened in first."
            raise TransactionManagementError(msg) from getattr(self._connection, "rollback_exc", None)
        if self.touched:
            return
        self._is_passing = True
        wrappers = self._connection.execute_wrappers
        self._connection.execute_wrappers = self._outer_wrappers  # not those that the handler has installed
        try:
            self._before_first()
        except Exception as error:
            self.early_error = error
            raise
        finally:
            self._connection.execute_wrappers = wrappers
            self._is_passing = False
        self.touched = True

    @contextmanager
    def statement(self, query: Any) -> Iterator[None]:
        """Surround one statement of a handler. Raises :class:`HandlerMisuse` for one that ends the transaction."""
        kind = kind_of(query)
        if kind is Kind.CONTROL:
            raise HandlerMisuse(_NO_CONTROL)
        self.touch()
        self.wrote = self.wrote or kind is Kind.WRITE
        self._is_passing = True
        try:
            yield
        except BaseException as error:
            self._note(error)
            raise
        finally:
            self._is_passing = False

    def is_own(self, error: BaseException) -> bool:
        """Say whether a statement on this very connection raised `error` during this handler call."""
        return any(error is own or error.__cause__ is own or own.__cause__ is error for own in self._errors)

    def _note(self, error: BaseException) -> None:
        self._errors.append(error)
        if self.broken_by is None or not is_consequence(error):
            self.broken_by = error

    # --- in place while the batch is open -----------------------------------------------------------------

    @contextmanager
    def in_place(self) -> Iterator[None]:
        connection, driver = self._connection, self._driver
        self._originals = {name: getattr(driver, name) for name in self._REPLACED}
        instead = {name: getattr(self, replacement) for name, replacement in self._REPLACED.items()}
        connection.execute_wrappers.append(self._on_execute)
        with _attributes(driver, {**instead, _WATCH: self}), _attributes(connection, {"close": self._refuse_close}):
            try:
                yield
            finally:
                self.running = False
                if self._on_execute in connection.execute_wrappers:
                    connection.execute_wrappers.remove(self._on_execute)

    _REPLACED: Final = {
        "cursor": "_make_cursor",
        "transaction": "_enter_transaction",
        "pipeline": "_enter_pipeline",
        "commit": "_refuse_commit",
        "rollback": "_refuse_rollback",
        "close": "_refuse_driver_close",
        "wait": "_wait",
    }

    def _on_execute(self, execute: Any, sql: Any, params: Any, many: bool, context: Any) -> Any:  # noqa: FBT001 - Django's
        if not self.is_active:
            return execute(sql, params, many, context)
        if not self.touched and not many and self._can_go_first(sql, params, context["cursor"].cursor):
            return self._go_first(execute, sql, params, many, context)
        with self.statement(sql):
            return execute(sql, params, many, context)

    def _can_go_first(self, sql: Any, params: Any, cursor: Any) -> bool:
        """Say whether a read needs nothing before it: no flush, because it would see the same, and no savepoint."""
        if self.early_error is not None or isinstance(cursor, psycopg.ServerCursor):
            return False
        self._is_passing = True  # what is asked about the table is no statement of the handler
        try:
            return self._is_apart(sql, params)
        finally:
            self._is_passing = False

    def _go_first(self, execute: Any, sql: Any, params: Any, many: Any, context: Any) -> Any:
        self._is_used = self._is_passing = True
        try:
            return execute(sql, params, many, context)
        except BaseException as error:
            self._note(error)
            raise
        finally:
            self._is_passing = False

    def _make_cursor(self, *args: Any, **options: Any) -> Any:
        made = self._originals["cursor"](*args, **options)
        return _watching(made) if self.running else made

    def _enter_transaction(self, *args: Any, **options: Any) -> Any:
        return self._touched("transaction", *args, **options)

    def _enter_pipeline(self, *args: Any, **options: Any) -> Any:
        return self._touched("pipeline", *args, **options)

    def _touched(self, name: str, *args: Any, **options: Any) -> Any:
        if self.is_active:
            self.touch()
        return self._originals[name](*args, **options)

    def _wait(self, *args: Any, **options: Any) -> Any:
        if self.is_active and not self.touched:
            raise HandlerMisuse(_UNKNOWN_CURSOR)
        return self._originals["wait"](*args, **options)

    def _refuse_commit(self) -> Any:
        return self._refused("commit", _NO_CONTROL)

    def _refuse_rollback(self) -> Any:
        return self._refused("rollback", _NO_CONTROL)

    def _refuse_driver_close(self) -> Any:
        return self._refused("close", _NO_CLOSE)

    def _refused(self, name: str, reason: str) -> Any:
        if self.running:
            raise HandlerMisuse(reason)
        return self._originals[name]()

    def _refuse_close(self) -> None:
        """Django's ``close()``: looked up on the class again, because this attribute hides it."""
        if self.running:
            raise HandlerMisuse(_NO_CLOSE)
        type(self._connection).close(self._connection)


class Elsewhere:
    """Watches another database alias while a handler runs: a write is refused, the first read is warned about."""

    _warned: Final[set[tuple[Identity, str]]] = set()

    def __init__(self, connection: BaseDatabaseWrapper, own_alias: str, watch: Watch, identity: Identity) -> None:
        self._connection = connection
        self._own_alias = own_alias
        self._watch = watch
        self._identity = identity
        self._create_cursor: Callable[..., Any] = connection.create_cursor

    @property
    def is_active(self) -> bool:
        return self._watch.running

    @contextmanager
    def in_place(self) -> Iterator[None]:
        connection = self._connection
        connection.execute_wrappers.append(self._on_execute)
        with _attributes(connection, {"create_cursor": self._make_cursor}):
            try:
                yield
            finally:
                if self._on_execute in connection.execute_wrappers:
                    connection.execute_wrappers.remove(self._on_execute)

    @contextmanager
    def statement(self, query: Any) -> Iterator[None]:
        alias, own = self._connection.alias, self._own_alias
        if kind_of(query) is Kind.WRITE:
            raise HandlerMisuse(_NOT_ELSEWHERE.format(alias=alias, own=own))
        if (self._identity, alias) not in self._warned:
            self._warned.add((self._identity, alias))
            logger.warning(
                "%s: a handler reads from the database alias %r: what it finds there is in no order with its events, "
                "which are applied to %r", self._identity, alias, own, extra=about(self._identity),
            )  # fmt: skip
        yield

    def _on_execute(self, execute: Any, sql: Any, params: Any, many: bool, context: Any) -> Any:  # noqa: FBT001 - Django's
        if not self.is_active:
            return execute(sql, params, many, context)
        with self.statement(sql):
            return execute(sql, params, many, context)

    def _make_cursor(self, name: str | None = None) -> Any:
        made = self._create_cursor(name)
        if self.is_active and isinstance(made, psycopg.Cursor | psycopg.ServerCursor):
            setattr(made.connection, _WATCH, self)
            return _watching(made)
        return made


# --- the driver's side ----------------------------------------------------------------------------------


def _watching(cursor: Any) -> Any:
    """Give a driver's cursor the watching subclass of its class: it may be used when its handler is long gone."""
    cursor.__class__ = _watching_class(cursor.__class__)
    return cursor


@lru_cache
def _watching_class(kind: Any) -> Any:
    if getattr(kind, "is_watched_by_scriba", False):
        return kind
    names = ("execute", "executemany", "stream", "copy")
    methods = {name: _watching_method(getattr(kind, name)) for name in names if hasattr(kind, name)}
    return type(kind.__name__, (kind,), {"__slots__": (), "is_watched_by_scriba": True, **methods})


def _watching_method(method: Callable[..., T]) -> Callable[..., T]:
    def watched(self: Any, query: Any, *args: Any, **options: Any) -> T:
        watch = getattr(self.connection, _WATCH, None)
        if watch is None or not watch.is_active:
            return method(self, query, *args, **options)
        with watch.statement(query):
            return method(self, query, *args, **options)

    return watched


@contextmanager
def _attributes(thing: Any, values: dict[str, Any]) -> Iterator[None]:
    """Let attributes of `thing` hide those of its class for the duration."""
    before = {name: vars(thing)[name] for name in values if name in vars(thing)}
    for name, value in values.items():
        setattr(thing, name, value)
    try:
        yield
    finally:
        for name in values:
            if name in before:
                setattr(thing, name, before[name])
            else:
                delattr(thing, name)


_NO_CONTROL: Final = (
    "a handler runs inside its batch's transaction and must not begin, commit or roll back one. Write, return Done(), and "
    "the batch commits with its cursor; for a part that may fail, use django.db.transaction.atomic()."
)
_NO_CLOSE: Final = (
    "a handler runs inside its batch's transaction and must not close its connection (close_old_connections() and "
    "connections.close_all() do, too)."
)
_UNKNOWN_CURSOR: Final = (
    "this cursor was not made by the connection while the handler ran, so it would not see the writes of earlier events. "
    "Take one from django.db.connection.cursor(), or from connection.connection.cursor(), inside the handler."
)
_NOT_ELSEWHERE: Final = (
    "a handler wrote to the database alias {alias!r}, but its batch's transaction is on {own!r}: that write would not be "
    "undone with it. Give that read model a projection of its own, with target=OrmTarget(using={alias!r})."
)
