"""★ One ``atomic()`` per batch: fence, handlers, folded writes, cursors, dead letters, counters. All or nothing.

The second of the two files that explain an event's way (the first is ``engine/pipeline.py``). What always holds:

* the first statement of a batch checks the epoch, so a process that lost its segment writes nothing;
* a handler that touches the database sees everything before it: at its first statement the buffered writes are
  flushed and a savepoint is set, a raw one, because Django's stack must not learn of it (the first statement may lie
  inside ``atomic(savepoint=False)``, as in every multi-table save);
* an attempt that fails leaves nothing: no row, no ``on_commit`` hook, no broken flag;
* ``atomic()`` is never left while the transaction could only roll back: that would look like a commit.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, TypeVar

from django.db import DEFAULT_DB_ALIAS, connections, reset_queries, transaction
from django.db.transaction import TransactionManagementError
from psycopg.pq import TransactionStatus

from scriba import positions
from scriba.exceptions import PermanentFailure
from scriba.failure import chain, classify
from scriba.letters import held_keys, lock, next_parked, resolve, store
from scriba.protocols import (
    Failure,
    FailureKind,
    Fence,
    FenceLost,
    Identity,
    Resolution,
    Settlement,
    StoredLetter,
    WriteFailed,
)
from scriba.targets.folding import WriteBuffer, check_result

if TYPE_CHECKING:
    from django.core.checks import CheckMessage
    from django.db.backends.base.base import BaseDatabaseWrapper

__all__ = ["HandlerMisuse", "OrmTarget"]

logger = logging.getLogger("scriba")

T = TypeVar("T")

_COMMENTS: Final = re.compile(r"\A(?:\s+|--[^\n]*(?:\n|\Z)|/\*.*?\*/|\()*", re.DOTALL)
_ENDS_TRANSACTION: Final = re.compile(
    r"(?:COMMIT|END|ABORT|BEGIN|START\s+TRANSACTION|PREPARE\s+TRANSACTION|ROLLBACK(?!\s+(?:WORK\s+|TRANSACTION\s+)?TO\b))\b",
    re.IGNORECASE,
)
_READS: Final = re.compile(
    r"(?:SELECT|VALUES|TABLE|SHOW|EXPLAIN|FETCH|MOVE|DECLARE|CLOSE|SET|RESET|SAVEPOINT|RELEASE|ROLLBACK|LISTEN|LOCK)\b",
    re.IGNORECASE,
)
_WITH: Final = re.compile(r"WITH\b", re.IGNORECASE)
_CHANGES: Final = re.compile(r"\b(?:INSERT|UPDATE|DELETE|MERGE)\b(?!\s*OF\b)", re.IGNORECASE)


class HandlerMisuse(PermanentFailure):
    """A handler did what cannot be part of the batch's transaction. The message says what to do instead."""


class OrmTarget:
    """Read models in the Django database `using`. Scriba's own tables live in the same database."""

    def __init__(self, using: str = DEFAULT_DB_ALIAS) -> None:
        self.using = using

    def __repr__(self) -> str:
        return f"OrmTarget(using={self.using!r})"

    def open(self, identity: Identity, *, inline: bool = False) -> OrmWriter:
        return OrmWriter(self.using, identity, inline=inline)

    def valid_result(self, result: object) -> bool:
        return check_result(result)

    def classify(self, error: Exception) -> Failure:
        return classify(error)

    def identity(self) -> str:
        return f"orm:{self.using}"

    def checks(self, models: Collection[Any]) -> list[CheckMessage]:
        from scriba.targets.orm_checks import target_checks  # noqa: PLC0415 - checks load when they run

        return target_checks(self.using, models)


class OrmWriter:
    """One worker's connection: the calling thread's own for the alias."""

    def __init__(self, using: str, identity: Identity, *, inline: bool) -> None:
        self._using = using
        self._identity = identity
        self._inline = inline

    @contextmanager
    def batch(self, fence: Fence, *, verdict: bool = False) -> Iterator[OrmBatch]:
        del verdict
        connection = connections[self._using]
        nested = connection.in_atomic_block
        hooks_before = len(connection.run_on_commit)
        try:
            with transaction.atomic(using=self._using, durable=not self._inline):
                if not self._inline:
                    _check_fence(connection, fence)
                batch = OrmBatch(connection, self._identity)
                with batch.guards():
                    yield batch
                batch.assert_good()
                _make_robust(connection, hooks_before)
            if nested:
                _run_hooks(connection, hooks_before)
        finally:
            self._recycle(connection)

    def next_parked(self, key: str, partition: str, after: int) -> StoredLetter | None:
        with connections[self._using].cursor() as cursor:
            return next_parked(cursor, self._identity, key, partition, after)

    def close(self) -> None:
        """Close the connections of this thread. Inside somebody's transaction (`inline`) there is nothing to close."""
        if self._inline:
            return
        for connection in connections.all(initialized_only=True):
            connection.close()

    def _recycle(self, connection: BaseDatabaseWrapper) -> None:
        """Leave no broken connection, no growing query log, and no connection that a pool is short of, behind."""
        if connection.queries_logged:
            reset_queries()
        if connection.in_atomic_block or connection.connection is None:
            return
        if connection.connection.closed or connection.errors_occurred and not connection.is_usable():
            connection.close()
        elif connection.settings_dict.get("OPTIONS", {}).get("pool"):
            connection.close()  # back to the pool: others may be waiting for one
        connection.errors_occurred = False


class OrmBatch:
    """One open transaction."""

    def __init__(self, connection: BaseDatabaseWrapper, identity: Identity) -> None:
        self._connection = connection
        self._identity = identity
        self._buffer = WriteBuffer(connection)
        self._in_handler = False
        self._touched = False
        self._wrote = False
        self._broke_early: Exception | None = None  #: a flush for a handler failed: an earlier event's error
        self._noted: list[BaseException] = []  #: errors of this connection's statements in the running attempt
        self._opened: list[Any] = []  #: driver cursors that the running attempt has opened

    @property
    def wrote(self) -> bool:
        return self._wrote

    # --- one handler call ---------------------------------------------------------------------------------

    def attempt(self, call: Callable[[], T]) -> T:
        connection = self._connection
        hooks, depth = len(connection.run_on_commit), len(connection.savepoint_ids)
        self._touched = self._wrote = False
        self._noted.clear()
        self._in_handler = True
        try:
            result = call()
        except BaseException as error:
            self._in_handler = False
            self._end_of_failed(error, hooks, depth)
            raise
        self._in_handler = False
        if self._touched or connection.needs_rollback or len(connection.savepoint_ids) != depth:
            self._end_of_touching(hooks, depth)
        return result

    def _end_of_failed(self, error: BaseException, hooks: int, depth: int) -> None:
        """Undo the attempt. Raises WriteFailed when the database is behind the failure; else the caller raises."""
        self._raise_early_break()
        own = self._own_error(error)
        self._undo(hooks, depth)
        if own is not None:
            raise WriteFailed(classify(own), guilty=True) from error

    def _end_of_touching(self, hooks: int, depth: int) -> None:
        """The handler has used the connection and returned: is the transaction still one that can commit?"""
        self._raise_early_break()
        problem = self._problem(depth)
        if problem is None:
            if self._touched:
                self._execute("RELEASE SAVEPOINT scriba_attempt")
                self._close_opened()
            return
        cause = self._noted[-1] if self._noted else problem
        self._undo(hooks, depth)
        raise WriteFailed(_fault_of(cause), guilty=True) from cause

    def _raise_early_break(self) -> None:
        broke, self._broke_early = self._broke_early, None
        if broke is not None:
            raise WriteFailed(classify(broke), guilty=False) from broke

    def _problem(self, depth: int) -> Exception | None:
        """Say what keeps the transaction from committing, or None."""
        connection = self._connection
        if len(connection.savepoint_ids) != depth or not connection.in_atomic_block:
            return TransactionManagementError("the handler left an atomic() block open, or closed one that is not its own")
        status = _status(connection)
        if status is not TransactionStatus.INTRANS:
            return TransactionManagementError(f"the handler left the transaction {status.name}: an error of its query was swallowed")
        if connection.needs_rollback:
            return TransactionManagementError("the handler marked the transaction for rollback (set_rollback, or a swallowed error)")
        return None

    def _own_error(self, error: BaseException) -> BaseException | None:
        """Return the error of this very connection that is behind `error`, if one is. Identity decides, not type: an
        error of another database is the handler's own affair."""
        noted = {id(known) for known in self._noted}
        for link in chain(error):
            if id(link) in noted:
                return link
        if self._touched and _status(self._connection) is not TransactionStatus.INTRANS:
            return self._noted[-1] if self._noted else error
        return None

    def _undo(self, hooks: int, depth: int) -> None:
        """Leave nothing of the attempt behind; a connection that is lost has done so itself."""
        connection = self._connection
        del connection.run_on_commit[hooks:]
        del connection.savepoint_ids[depth:]
        if connection.in_atomic_block:
            connection.set_rollback(False)
        if not self._touched or _status(connection) is TransactionStatus.UNKNOWN:
            return
        if _status(connection) is TransactionStatus.IDLE:
            raise WriteFailed(Failure(FailureKind.STRUCTURAL, "commit:25P01 (no_active_sql_transaction)"), guilty=True)
        self._close_opened()
        self._execute("ROLLBACK TO SAVEPOINT scriba_attempt; RELEASE SAVEPOINT scriba_attempt")

    # --- noticing what a handler does -----------------------------------------------------------------------

    @contextmanager
    def guards(self) -> Iterator[None]:
        """Watch every connection of this thread while the batch is open."""
        watched = [(self._connection, self._on_statement)]
        watched += [
            (other, _ForeignGuard(self, alias)) for alias in connections if (other := _other(alias, self._connection)) is not None
        ]
        for connection, hook in watched:
            connection.execute_wrappers.append(hook)
        with self._watched_driver():
            try:
                yield
            finally:
                for connection, hook in watched:
                    if hook in connection.execute_wrappers:
                        connection.execute_wrappers.remove(hook)

    def _on_statement(self, execute: Any, sql: Any, params: Any, many: bool, context: Any) -> Any:  # noqa: FBT001 - Django's signature
        if not self._in_handler:
            return execute(sql, params, many, context)
        text = _text_of(sql)
        if _ENDS_TRANSACTION.match(text):
            msg = f"a handler runs inside its batch's transaction and cannot say {text.split()[0].upper()}; return Done() and let the batch commit."
            raise HandlerMisuse(msg)
        self._touch()
        if _is_write(text):
            self._wrote = True
        try:
            return execute(sql, params, many, context)
        except Exception as error:
            self._noted.append(error)
            raise

    def _touch(self) -> None:
        """Before a handler's first statement: flush what earlier events declared, and set a savepoint."""
        if self._touched:
            return
        self._in_handler, self._touched = False, True  # our own statements are not the handler's
        try:
            self._buffer.flush()
            self._execute("SAVEPOINT scriba_attempt")
        except Exception as error:
            self._broke_early = error  # wins over whatever the handler makes of it
            raise
        finally:
            self._in_handler = True

    @contextmanager
    def _watched_driver(self) -> Iterator[None]:
        """Notice what bypasses Django's hook: copy(), stream(), callproc() and the raw driver connection.

        They all need a cursor or a transaction block of the driver's connection, so that is where we stand.
        """
        driver = self._connection.connection
        watched = {name: getattr(driver, name) for name in ("cursor", "transaction", "pipeline")}

        def guarded(name: str) -> Callable[..., Any]:
            def call(*args: Any, **options: Any) -> Any:
                if not self._in_handler:
                    return watched[name](*args, **options)
                self._touch()
                made = watched[name](*args, **options)
                if name == "cursor":
                    self._opened.append(made)
                return made

            return call

        for name in watched:
            setattr(driver, name, guarded(name))
        try:
            yield
        finally:
            for name in watched:
                vars(driver).pop(name, None)

    def _close_opened(self) -> None:
        """A cursor that outlives its handler would bypass the next one's flush: using it again is an error."""
        for cursor in self._opened:
            try:
                cursor.close()
            except Exception:  # a server-side cursor of a broken transaction is gone already
                logger.debug("closing a handler's cursor failed", exc_info=True)
        self._opened.clear()

    # --- declared writes, several events, the end -------------------------------------------------------------

    def add(self, result: Any) -> int:
        for write in result:
            self._buffer.add(write)
        return len(result)

    def trial(self, run: Callable[[], T]) -> T:
        connection = self._connection
        self._buffer.flush()
        hooks, unmatched = len(connection.run_on_commit), self._buffer.unmatched
        self._execute("SAVEPOINT scriba_trial")
        try:
            done = run()
            self._buffer.flush()
            self._execute("SET CONSTRAINTS ALL IMMEDIATE; SET CONSTRAINTS ALL DEFERRED")
        except BaseException:
            self._buffer.discard()
            self._buffer.unmatched = unmatched
            del connection.run_on_commit[hooks:]
            if _status(connection) in {TransactionStatus.INTRANS, TransactionStatus.INERROR}:
                connection.set_rollback(False)
                self._execute("ROLLBACK TO SAVEPOINT scriba_trial; RELEASE SAVEPOINT scriba_trial")
            raise
        self._execute("RELEASE SAVEPOINT scriba_trial")
        return done

    def settle(self, settlement: Settlement) -> int:
        self._buffer.flush()
        settlement.counters.unmatched = self._buffer.unmatched
        with self._connection.cursor() as cursor:
            if settlement.letters:
                store(cursor, self._identity, settlement.letters)
            positions.settle(cursor, self._identity, settlement)
        return self._buffer.unmatched

    def assert_good(self) -> None:
        """The last check inside the block: a transaction that can only roll back must not look like a commit."""
        problem = self._problem(len(self._connection.savepoint_ids))
        if problem is not None:
            raise problem

    # --- look-ups -------------------------------------------------------------------------------------------

    def cursors(self, keys: Sequence[str]) -> dict[str, int]:
        with self._connection.cursor() as cursor:
            return positions.cursors_of(cursor, self._identity, keys)

    def held_keys(self, keys: Sequence[str]) -> set[str]:
        with self._connection.cursor() as cursor:
            return held_keys(cursor, self._identity, keys)

    def letter(self, letter: int) -> StoredLetter | None:
        with self._connection.cursor() as cursor:
            return lock(cursor, letter)

    def applied_beyond(self, key: str, position: int) -> bool:
        with self._connection.cursor() as cursor:
            return positions.applied_position(cursor, self._identity, key) > position

    def resolve(self, resolution: Resolution) -> None:
        self._buffer.flush()
        with self._connection.cursor() as cursor:
            resolve(cursor, self._identity, resolution)
            if resolution.applied is not None:
                positions.raise_applied(cursor, self._identity, resolution.applied)

    def _execute(self, sql: str) -> None:
        with self._connection.cursor() as cursor:
            cursor.execute(sql)


class _ForeignGuard:
    """Stands before the statements of another alias: a write is refused, a read is warned about once."""

    _warned: Final[set[str]] = set()

    def __init__(self, batch: OrmBatch, alias: str) -> None:
        self._batch = batch
        self._alias = alias

    def __call__(self, execute: Any, sql: Any, params: Any, many: bool, context: Any) -> Any:  # noqa: FBT001 - Django's signature
        if self._batch._in_handler:  # noqa: SLF001 - one guard in two halves
            if _is_write(_text_of(sql)):
                msg = (
                    f"a handler wrote to the database alias {self._alias!r}, which is not part of its batch's transaction "
                    f"({self._batch._connection.alias!r}): it would not be undone. Give that read model a projection of "  # noqa: SLF001
                    f"its own with target=OrmTarget(using={self._alias!r})."
                )
                raise HandlerMisuse(msg)
            if self._alias not in self._warned:
                self._warned.add(self._alias)
                logger.warning(
                    "a handler reads from the database alias %r: what it sees there is not ordered with its events", self._alias
                )
        return execute(sql, params, many, context)


# --- helpers ----------------------------------------------------------------------------------------------


def _check_fence(connection: BaseDatabaseWrapper, fence: Fence) -> None:
    """Every segment must still have our epoch, and keep it until this transaction ends."""
    pairs = ", ".join(["(%s::bigint, %s::bigint)"] * len(fence))
    with connection.cursor() as cursor:
        cursor.execute(
            f"SELECT 1 FROM scriba_segments WHERE (id, epoch) IN ({pairs}) FOR KEY SHARE",
            [number for pair in fence for number in pair],
        )
        if len(cursor.fetchall()) != len(fence):
            raise FenceLost


def _make_robust(connection: BaseDatabaseWrapper, start: int) -> None:
    """A hook that raises must not swallow those of later events: Django logs the error of a robust one and goes on."""
    hooks = connection.run_on_commit
    hooks[start:] = [(savepoints, hook, True) for savepoints, hook, _ in hooks[start:]]


def _run_hooks(connection: BaseDatabaseWrapper, start: int) -> None:
    """Inside a test's transaction nothing commits: run the batch's hooks as its commit would have."""
    hooks = connection.run_on_commit[start:]
    del connection.run_on_commit[start:]
    for _, hook, _ in hooks:
        try:
            hook()
        except Exception:
            logger.exception("an on_commit hook failed: %r", hook)


def _status(connection: BaseDatabaseWrapper) -> TransactionStatus:
    driver = connection.connection
    return TransactionStatus.UNKNOWN if driver is None else TransactionStatus(driver.info.transaction_status)


def _fault_of(cause: BaseException) -> Failure:
    """What a handler swallowed is that event's fault, unless it is the kind of error that passes by itself."""
    failure = classify(cause)
    return failure if failure.kind is FailureKind.TRANSIENT else failure._replace(kind=FailureKind.INTEGRITY)


def _other(alias: str, own: BaseDatabaseWrapper) -> BaseDatabaseWrapper | None:
    return None if alias == own.alias else connections[alias]


def _text_of(sql: Any) -> str:
    text = sql if isinstance(sql, str) else str(sql)
    return text[match.end() :] if (match := _COMMENTS.match(text)) else text


def _is_write(text: str) -> bool:
    if _WITH.match(text):
        return bool(_CHANGES.search(text))
    return not _READS.match(text)
