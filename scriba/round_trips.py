"""Several statements in one round trip: for a batch of one event, waiting for answers costs more than the statements.

Always holds: statements are executed in the order in which they were added, and each finds what those before it did; when
one fails, none behind it has been executed, and the transaction can only be rolled back. Must not begin or end
transactions, but for :func:`begin`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from psycopg import ClientCursor, OperationalError
from psycopg.errors import error_from_result
from psycopg.pq import ExecStatus, TransactionStatus

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

__all__ = ["Script", "begin"]


def begin(connection: BaseDatabaseWrapper, statement: str) -> int:
    """Begin the driver's transaction with `statement`, a query without parameters; return how many rows it found.

    The driver would send BEGIN by itself, and wait for its answer, before the first statement.
    """
    driver: Any = connection.connection
    options = (driver.isolation_level, driver.read_only, driver.deferrable)
    is_plain = driver.pgconn.transaction_status == TransactionStatus.IDLE and options == (None, None, None)
    if driver.autocommit or not is_plain:
        with connection.cursor() as cursor:
            cursor.execute(statement)
            return len(cursor.fetchall())
    with connection.wrap_database_errors:
        result = driver.pgconn.exec_(f"BEGIN; {statement}".encode())
        if result.status != ExecStatus.TUPLES_OK:
            error = error_from_result(result, encoding=driver.info.encoding)
            raise error if error.sqlstate else OperationalError(str(error))  # without a code: the connection is gone
    return int(result.ntuples)


class Script:
    """Statements that wait to be executed together.

    Only the driver's client-side binding can put parameters into several statements at once, Django's default; with
    ``server_side_binding`` each goes by itself.
    """

    def __init__(self, connection: BaseDatabaseWrapper) -> None:
        self._connection = connection
        self._waiting: list[tuple[str, Any, Callable[[Any], None] | None]] = []

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, sql: str, parameters: Any = None, then: Callable[[Any], None] | None = None) -> None:
        """Append a statement; `then` is called with a cursor on its result."""
        self._waiting.append((sql, parameters, then))

    def run(self) -> None:
        """Execute what waits, and forget it."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        with self._connection.cursor() as cursor:
            driver_cursor = cursor.cursor
            if len(waiting) == 1 or not isinstance(driver_cursor, ClientCursor):
                for sql, parameters, then in waiting:
                    cursor.execute(sql, parameters)
                    if then is not None:
                        then(cursor)
                return
            texts = [
                sql if parameters is None else driver_cursor.mogrify(sql, parameters) for sql, parameters, _ in waiting
            ]
            cursor.execute("; ".join(texts))
            for place, (_sql, _parameters, then) in enumerate(waiting):
                if place:
                    cursor.nextset()
                if then is not None:
                    then(cursor)
