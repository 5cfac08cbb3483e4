"""A worker's connection between its batches, and the ``on_commit`` hooks behind them.

What always holds: a connection that broke never meets a second batch; a pool gets its connection back after each one;
the query log of ``DEBUG=True`` does not grow; a hook that raises neither swallows the hooks of later events nor looks
like a failed commit. Must not call ``close_old_connections()``: with the default ``CONN_MAX_AGE`` of 0 that would
connect anew for every batch.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from django.db import reset_queries
from psycopg.pq import TransactionStatus

from scriba.log_fields import about

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

    from scriba.protocols import Identity

__all__ = ["driver_blocks", "let_go", "make_ready", "make_robust", "run_hooks", "tidy_up"]

logger = logging.getLogger("scriba")

OLDEST_S: Final = 3600.0  #: with CONN_MAX_AGE = 0: a worker's connection is renewed once in an hour
LONGEST_IDLE_S: Final = 30.0  #: after that a firewall may have dropped it: it is tried before it is used

_USED_AT: Final = "_scriba_used_at"  #: on the driver's connection: when its last batch ended


def make_ready(connection: BaseDatabaseWrapper) -> None:
    """Close the connection if it broke, grew old or fell silent; leave it open and in autocommit."""
    if connection.in_atomic_block:
        return
    driver = connection.connection
    if driver is not None and (
        driver.closed or _is_old(connection) or (_is_idle(driver) and not connection.is_usable())
    ):
        connection.close()
    if not connection.get_autocommit():  # left so, or said in the settings: atomic() would leave the commit to others
        connection.rollback()
        connection.set_autocommit(True)


def tidy_up(connection: BaseDatabaseWrapper) -> None:
    """After a batch: forget its queries, give a pool its connection back, drop a broken one."""
    if connection.queries_logged:
        reset_queries()
    driver = connection.connection
    if driver is None or connection.in_atomic_block:
        return
    if driver.closed or connection.settings_dict.get("OPTIONS", {}).get("pool"):
        connection.close()
    else:
        setattr(driver, _USED_AT, time.monotonic())


def let_go(connection: BaseDatabaseWrapper) -> None:
    """Show a connection on which no rollback can be said any more to ``atomic()`` as closed.

    One that broke would be opened anew only to roll back; one with an unfinished copy() would wait for itself, for ever.
    """
    driver: Any = connection.connection
    if driver is None:
        return
    if not driver.closed and driver.pgconn.transaction_status == TransactionStatus.ACTIVE:
        driver.pgconn.finish()
    if driver.closed or driver.pgconn.pipeline_status or driver_blocks(driver):
        connection.close()


def driver_blocks(driver: Any) -> int:
    """Return how many of psycopg's own transaction() blocks are open; it refuses to commit inside of one."""
    return int(getattr(driver, "_num_transactions", 0))


def _is_old(connection: BaseDatabaseWrapper) -> bool:
    if connection.close_at is None:  # CONN_MAX_AGE = None: for ever, said on purpose
        return False
    extra_s = 0.0 if connection.settings_dict.get("CONN_MAX_AGE") else OLDEST_S
    return time.monotonic() >= connection.close_at + extra_s


def _is_idle(driver: Any) -> bool:
    return time.monotonic() - getattr(driver, _USED_AT, float("inf")) > LONGEST_IDLE_S


# --- hooks ----------------------------------------------------------------------------------------------


def make_robust(connection: BaseDatabaseWrapper, start: int, identity: Identity) -> None:
    """Wrap the batch's hooks before it commits: whatever one raises is logged, and the next one runs.

    Django's own robust hooks are not enough: one without a name (a partial) makes its logging fail.
    """
    hooks: list[Any] = connection.run_on_commit
    hooks[start:] = [(savepoints, _robust(hook, identity), True) for savepoints, hook, _ in hooks[start:]]


def run_hooks(connection: BaseDatabaseWrapper, start: int) -> None:
    """Run what Django has not: inside a test's transaction nothing commits."""
    if not connection.in_atomic_block:
        return
    hooks: list[Any] = connection.run_on_commit[start:]
    del connection.run_on_commit[start:]
    for _, hook, _ in hooks:
        hook()


def _robust(hook: Callable[[], object], identity: Identity) -> Callable[[], None]:
    def robust() -> None:
        try:
            hook()
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
                raise  # a person at the keyboard, not the hook
            logger.exception(
                "%s: an on_commit hook of a handler failed (%r); the batch is committed all the same",
                identity,
                hook,
                extra=about(identity),
            )

    return robust
