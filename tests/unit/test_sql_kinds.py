"""What a handler is about to execute: read, write, or control of the transaction."""

from __future__ import annotations

from typing import Any

import pytest
from psycopg import sql

from scriba.targets.sql_kinds import Kind, kind_of

READS = [
    "SELECT 1",
    "  ( select 1 )",
    "-- a comment; COMMIT\nSELECT 1",
    "/* DELETE FROM x; */ SELECT 1",
    "SELECT 'COMMIT; DELETE FROM x'",
    'SELECT "commit" FROM "delete from"',
    "SELECT $$; COMMIT; $$",
    "SELECT $tag$; COMMIT; $tag$",
    r"SELECT E'\'; COMMIT; --'",
    "SELECT 'it''s; COMMIT'",
    "SELECT * FROM a FOR UPDATE",
    "WITH a AS (SELECT 1) SELECT * FROM a FOR NO KEY UPDATE",
    "VALUES (1)",
    "TABLE a",
    "SHOW search_path",
    "SET LOCAL statement_timeout = 1",
    "SAVEPOINT a",
    "RELEASE SAVEPOINT a",
    "ROLLBACK TO SAVEPOINT a",
    "ROLLBACK WORK TO a",
    "rollback transaction to savepoint a",
    "DECLARE c CURSOR FOR SELECT 1",
    "FETCH 1 FROM c",
    "EXPLAIN SELECT 1",
    "COPY (SELECT f(a) FROM b) TO STDOUT",
    "COPY a (x, y) TO STDOUT",
    "LOCK TABLE a",
    "SELECT 1; SELECT 2;",
    "",
    b"SELECT 1",
    sql.SQL("SELECT {}").format(sql.Identifier("commit")),
]
WRITES = [
    "INSERT INTO a VALUES (1)",
    "update a set b = 1",
    "DELETE FROM a",
    "MERGE INTO a USING b ON true WHEN MATCHED THEN DELETE",
    "TRUNCATE a",
    "CREATE TABLE a ()",
    "WITH gone AS (DELETE FROM a RETURNING *) SELECT * FROM gone",
    "WITH a AS (SELECT 1) UPDATE b SET c = 1",
    "EXPLAIN ANALYZE DELETE FROM a",
    "COPY a FROM STDIN",
    "COPY a (x, y) FROM STDIN WITH (FORMAT csv)",
    "COPY a FROM '/a/file'",
    "COPY a (x) FROM PROGRAM 'x'",
    "CALL a()",
    "DO $$ BEGIN END $$",
    "NOTIFY a",
    "SELECT 1; DELETE FROM a",
    b"INSERT INTO a VALUES (1)",
    sql.SQL("DELETE FROM {}").format(sql.Identifier("a")),
]
CONTROLS = [
    "COMMIT",
    "commit work",
    "COMMIT AND CHAIN",
    "COMMIT PREPARED 'x'",
    "END",
    "ABORT",
    "BEGIN",
    "BEGIN ISOLATION LEVEL SERIALIZABLE",
    "START  TRANSACTION",
    "ROLLBACK",
    "ROLLBACK AND CHAIN",
    "ROLLBACK PREPARED 'x'",
    "PREPARE TRANSACTION 'x'",
    "SET TRANSACTION READ ONLY",
    "/* x */ -- y\n commit",
    "SELECT 1;\nCOMMIT;",
    "SELECT 'a;b'; rollback",
    b"COMMIT",
    sql.SQL("COM{}").format(sql.SQL("MIT")),
]


@pytest.mark.parametrize("query", READS)
def test_reads(query: Any) -> None:
    """They neither count as the handler's writes nor are refused elsewhere."""
    assert kind_of(query) is Kind.READ


@pytest.mark.parametrize("query", WRITES)
def test_writes(query: Any) -> None:
    """Whatever is not known to read."""
    assert kind_of(query) is Kind.WRITE


@pytest.mark.parametrize("query", CONTROLS)
def test_control_of_the_transaction(query: Any) -> None:
    """Seen behind comments and other statements."""
    assert kind_of(query) is Kind.CONTROL


def test_long_statements_are_judged_and_not_remembered() -> None:
    """Texts with their values in them would fill the memory."""
    from scriba.targets import sql_kinds

    before = sql_kinds._remembered.cache_info().currsize

    assert kind_of("INSERT INTO a VALUES " + ", ".join(["(1)"] * 5_000)) is Kind.WRITE
    assert sql_kinds._remembered.cache_info().currsize == before
