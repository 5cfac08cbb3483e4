"""★ One transaction per batch: fence, handlers, folded writes, cursors, dead letters. The other half of an event's life.

What always holds:

* the first statement checks the fence; whoever has lost the segment writes nothing;
* a handler that touches the database sees everything before it; one that fails leaves nothing behind, no row, no
  ``on_commit`` hook and no broken transaction;
* ``atomic()`` is left as if committing only while the transaction can still commit: Django and PostgreSQL both turn a
  broken one into a silent rollback;
* rows, cursors, letters and counters commit together or not at all.

Savepoints are raw: one that Django does not know of cannot corrupt its stack, wherever in nested blocks a handler's
first statement lies. Must not judge events, wait or repeat: that is ``engine/pipeline.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Final, TypeVar

from django.db import DEFAULT_DB_ALIAS, connections, transaction
from django.db.transaction import TransactionManagementError
from psycopg.pq import TransactionStatus

from scriba.exceptions import HandlerError
from scriba.failure import classify, is_consequence, shown_chain, sqlstate_of
from scriba.letters import find_letter, held_keys, next_parked, resolve_letter, write_letters
from scriba.positions import applied_position, begin_to_settle, cursors_of, settle_the_rest
from scriba.protocols import Failure, FailureKind, FenceLost, WriteFailed
from scriba.round_trips import Script, begin
from scriba.targets.condition import Condition
from scriba.targets.connections import let_go, make_ready, make_robust, run_hooks, tidy_up
from scriba.targets.folding import WriteBuffer, check_result
from scriba.targets.orm_checks import target_checks
from scriba.targets.watch import Elsewhere, Watch

if TYPE_CHECKING:
    from django.core.checks import CheckMessage
    from django.db.backends.base.base import BaseDatabaseWrapper

    from scriba.protocols import Fence, Identity, Resolution, Settlement, StoredLetter

__all__ = ["OrmTarget"]

T = TypeVar("T")

_ATTEMPT: Final = "scriba_attempt"
_TRIAL: Final = "scriba_trial"


class OrmTarget:
    """Read models in the database `using`, where Scriba's own tables live too."""

    def __init__(self, using: str = DEFAULT_DB_ALIAS) -> None:
        self.using = using

    def __repr__(self) -> str:
        return f"OrmTarget(using={self.using!r})"

    def open(self, identity: Identity, *, inline: bool = False) -> OrmWriter:
        return OrmWriter(self.using, identity, inline=inline)

    valid_result = staticmethod(check_result)

    def classify(self, error: Exception) -> Failure:
        return classify(error)

    def identity(self) -> str:
        return f"orm:{self.using}"

    def checks(self, models: Collection[Any]) -> list[CheckMessage]:
        return target_checks(self.using, models)


class OrmWriter:
    """The calling thread's connection to one alias: the same one that handlers use through the ORM."""

    def __init__(self, using: str, identity: Identity, *, inline: bool) -> None:
        self._using = using
        self._identity = identity
        self._inline = inline

    @contextmanager
    def batch(self, fence: Fence, *, verdict: bool = False) -> Iterator[OrmBatch]:
        failed: BaseException | None = None
        with self._connected() as connection:
            hooks = len(connection.run_on_commit)
            try:
                with transaction.atomic(using=self._using, durable=not self._inline):
                    try:
                        with self._opened(connection, fence, verdict=verdict) as batch:
                            yield batch
                            batch.finish()
                        make_robust(connection, hooks, self._identity)
                    except BaseException as error:
                        failed = error
                        let_go(connection)
                        raise
                run_hooks(connection, hooks)
            except BaseException:
                if failed is None:
                    raise
        if failed is not None:  # out here, unchanged, even when the rollback met an error of its own
            raise failed

    @contextmanager
    def _opened(self, connection: BaseDatabaseWrapper, fence: Fence, *, verdict: bool) -> Iterator[OrmBatch]:
        batch = OrmBatch(connection, self._identity, verdict=verdict)
        try:
            if not self._inline:
                batch.check_fence(fence)
            with batch.watched():
                yield batch
        finally:
            batch.forget()

    def next_parked(self, key: str, partition: str, after: int) -> StoredLetter | None:
        with self._connected() as connection, connection.cursor() as cursor:
            return next_parked(cursor, self._identity, key, partition, after)

    @contextmanager
    def _connected(self) -> Iterator[BaseDatabaseWrapper]:
        connection = connections[self._using]
        if self._inline:  # the test's own connection is the test's business
            yield connection
            return
        make_ready(connection)
        try:
            yield connection
        finally:
            tidy_up(connection)

    def close(self) -> None:
        """Close what this thread has opened, the databases that its handlers read from included."""
        for connection in () if self._inline else connections.all(initialized_only=True):
            if not connection.in_atomic_block:
                connection.close()


class OrmBatch:
    """One open transaction."""

    def __init__(self, connection: BaseDatabaseWrapper, identity: Identity, *, verdict: bool = False) -> None:
        self._connection = connection
        self._identity = identity
        self._cursor = connection.cursor()
        self._driver: Any = connection.connection
        self._buffer = WriteBuffer(connection)
        self._unmatched = 0  #: what buffers had counted that a trial has thrown away since
        # In a verdict pass each handler's first statement has its savepoint: a read that fails is its event's fault.
        apart = {} if verdict else {"is_apart": self._buffer.is_apart}
        self._watch = Watch(connection, self._before_first_statement, **apart)
        self._condition = Condition(connection)
        self._is_good = self._condition.is_good
        self._attempt_is_open = False  #: the savepoint of some earlier attempt is still there

    def check_fence(self, fence: Fence) -> None:
        """The first statement: hold each segment's row against a takeover, if its epoch is still ours."""
        if not fence:
            return
        epochs = " OR ".join(f"(id = {segment:d} AND epoch = {epoch:d})" for segment, epoch in fence)
        query = f"SELECT id FROM scriba_segments WHERE {epochs} ORDER BY id FOR KEY SHARE"
        if begin(self._connection, query) != len(fence):
            raise FenceLost

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch every database that the handlers of this thread can reach."""
        own = self._connection.alias
        with ExitStack() as stack:
            stack.enter_context(self._watch.in_place())
            for alias in connections:
                if alias != own:
                    elsewhere = Elsewhere(connections[alias], own, self._watch, self._identity)
                    stack.enter_context(elsewhere.in_place())
            yield

    def forget(self) -> None:
        """It is over: be no part of a cycle, and let Django keep no error with a traceback that leads here."""
        del self._watch
        self._connection.rollback_exc = None  # type: ignore[attr-defined]

    # --- one handler call ---------------------------------------------------------------------------------

    @property
    def wrote(self) -> bool:
        return self._watch.wrote

    def attempt(self, call: Callable[[], T]) -> T:
        hooks, watch = len(self._connection.run_on_commit), self._watch
        watch.start()
        try:
            outcome = call()
        except Exception as error:
            watch.running = False
            self._after_failure(error, hooks)
            raise
        finally:
            watch.running = False
        if watch.early_error is not None or not self._is_good():
            self._after_swallowing(hooks)
        return outcome

    def _before_first_statement(self) -> None:
        """Execute what earlier events declared, then set a savepoint: what follows can be undone by itself."""
        script = Script(self._connection)
        self._buffer.hand_over(script)
        if self._attempt_is_open:
            script.add(f"RELEASE SAVEPOINT {_ATTEMPT}")
        script.add(f"SAVEPOINT {_ATTEMPT}")
        with transaction.mark_for_rollback_on_error(using=self._connection.alias):
            script.run()
        self._attempt_is_open = True

    def _after_failure(self, error: Exception, hooks: int) -> None:
        """Undo a failed attempt. Raises :class:`WriteFailed` when it was the connection's failure, not the handler's."""
        self._raise_early_error()
        cause = self._own_error_behind(error)
        self._undo(hooks, cause or error)
        if cause is None:
            return
        failure = classify(cause)
        if isinstance(error, HandlerError) and failure.kind is not FailureKind.TRANSIENT:
            return  # the handler has met the error and says itself what shall become of its event
        if failure.kind is FailureKind.TRANSIENT and sqlstate_of(cause) is None:
            return  # the driver complains, but the connection is in order: a closed cursor, for example
        raise WriteFailed(failure, guilty=True) from cause

    def _after_swallowing(self, hooks: int) -> None:
        """The handler returned as if nothing were wrong: the event is to blame, what it swallowed is the cause."""
        self._raise_early_error()
        cause = self._watch.broken_by or getattr(self._connection, "rollback_exc", None)
        cause = cause or TransactionManagementError(self._condition.what_is_wrong())
        self._undo(hooks, cause)
        failure = classify(cause)
        if failure.kind is not FailureKind.TRANSIENT:
            failure = failure._replace(kind=FailureKind.INTEGRITY)
        raise WriteFailed(failure, guilty=True) from cause

    def _raise_early_error(self) -> None:
        """What broke while earlier writes were flushed for this handler is not its fault, whatever it made of it."""
        error = self._watch.early_error
        if error is not None:
            raise WriteFailed(classify(error), guilty=False) from error

    def _own_error_behind(self, error: Exception) -> BaseException | None:
        """Return the error of this very connection that `error` comes from; None when there is none."""
        is_good = self._is_good()
        for link in shown_chain(error):
            if is_consequence(link) and not is_good:
                return self._watch.broken_by or link
            if self._watch.is_own(link):
                return link
        is_broken = self._condition.status() is not TransactionStatus.INTRANS
        return (self._watch.broken_by or error) if is_broken else None

    def _undo(self, hooks: int, cause: BaseException) -> None:
        """Put everything back to before the attempt. Raises :class:`WriteFailed` when the transaction is past that."""
        lost = self._condition.lost(cause)
        if lost is not None:
            raise WriteFailed(lost, guilty=True) from cause
        self._condition.leave_blocks()
        if not self._watch.touched and self._condition.status() is not TransactionStatus.INTRANS:
            raise WriteFailed(_NO_SAVEPOINT, guilty=False) from cause
        if self._watch.touched:
            try:
                self._execute(f"ROLLBACK TO SAVEPOINT {_ATTEMPT}")
            except Exception as error:
                raise WriteFailed(classify(error), guilty=False) from error
        del self._connection.run_on_commit[hooks:]

    def finish(self) -> None:
        """The last look before the commit: nothing may be left in the buffer, nothing be wrong."""
        self._buffer.flush()
        if not self._is_good():
            wrong = TransactionManagementError(self._condition.what_is_wrong())
            raise WriteFailed(_NOT_COMMITTABLE, guilty=False) from wrong

    # --- declared writes ----------------------------------------------------------------------------------

    def add(self, result: Any) -> int:
        writes = result if isinstance(result, (tuple, list)) else (result,)
        for write in writes:
            self._buffer.add(write)
        return len(writes)

    def trial(self, run: Callable[[], T]) -> T:
        self._buffer.flush()
        hooks, counted = len(self._connection.run_on_commit), self._buffer.unmatched
        release = f"RELEASE SAVEPOINT {_ATTEMPT}; " if self._attempt_is_open else ""
        self._execute(f"{release}SAVEPOINT {_TRIAL}")
        self._attempt_is_open = False
        try:
            done = run()
            self._buffer.flush()
            self._execute(_CHECK_AND_RELEASE)
        except BaseException as error:
            self._undo_trial(hooks, counted, error)
            raise
        finally:
            self._attempt_is_open = False
        return done

    def _undo_trial(self, hooks: int, counted: int, error: BaseException) -> None:
        self._buffer.discard()
        self._unmatched += counted
        lost = self._condition.lost(error)
        if lost is None:
            self._connection.set_rollback(False)
            self._execute(f"ROLLBACK TO SAVEPOINT {_TRIAL}; RELEASE SAVEPOINT {_TRIAL}")
            del self._connection.run_on_commit[hooks:]
        elif isinstance(error, Exception) and not isinstance(error, WriteFailed):
            raise WriteFailed(lost, guilty=False) from error  # no verdict: nothing can be tried in here any more

    def settle(self, settlement: Settlement) -> int:
        script = Script(self._connection)
        self._buffer.hand_over(script)
        moved = begin_to_settle(script, self._identity, settlement)
        with transaction.mark_for_rollback_on_error(using=self._connection.alias):
            script.run()
        settlement.counters.unmatched = self._unmatched + self._buffer.unmatched
        settle_the_rest(self._cursor, self._identity, settlement, moved)
        write_letters(self._cursor, self._identity, settlement.letters)
        return settlement.counters.unmatched

    # --- cursors and letters ------------------------------------------------------------------------------

    def cursors(self, keys: Sequence[str]) -> dict[str, int]:
        return cursors_of(self._cursor, self._identity, keys)

    def held_keys(self, keys: Sequence[str]) -> set[str]:
        return held_keys(self._cursor, self._identity, keys)

    def letter(self, letter: int) -> StoredLetter | None:
        return find_letter(self._cursor, self._identity, letter)

    def applied_beyond(self, key: str, position: int) -> bool:
        return applied_position(self._cursor, self._identity, key) > position

    def resolve(self, resolution: Resolution) -> None:
        self._buffer.flush()
        resolve_letter(self._cursor, self._identity, resolution)

    def _execute(self, statements: str) -> None:
        """Execute constant statements in one round trip. Several at once must not be prepared."""
        with self._connection.wrap_database_errors:
            self._driver.cursor().execute(statements, prepare=False)


#: Check deferred constraints now, and leave them deferred exactly as they are declared: rolling back to the inner
#: savepoint takes back the mode and nothing else.
_CHECK_AND_RELEASE: Final = (
    "SAVEPOINT scriba_check; SET CONSTRAINTS ALL IMMEDIATE; ROLLBACK TO SAVEPOINT scriba_check; "
    f"RELEASE SAVEPOINT {_TRIAL}"
)

#: A read that went ahead of any savepoint has failed: the verdict pass sets one, and says whose fault it was.
_NO_SAVEPOINT: Final = Failure(FailureKind.INTEGRITY, "commit:25P02 (in_failed_sql_transaction)")
_NOT_COMMITTABLE: Final = Failure(FailureKind.STRUCTURAL, "commit:25000 (invalid_transaction_state)")
