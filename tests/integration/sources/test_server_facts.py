"""What the server must fulfil before positions are trusted: found by check, and again whenever a projection starts."""

from __future__ import annotations

import re

import pytest
from django.core.management import call_command
from django.core.management.base import SystemCheckError
from django.db import connections

from scriba import Skip, projection
from scriba.connection import OwnConnection
from scriba.exceptions import SourceError
from scriba.protocols import Shard
from scriba.registry import forget
from scriba.sources import TableSource
from scriba.sources.table_facts import look_at_table
from scriba.sources.table_reading import SourceAway
from tests.integration.sources.conftest import run
from tests.integration.sources.reading import IDENTITY, Reader
from tests.integration.sources.shapes import PlainEvent

SEQUENCE = "shapes_plainevent_id_seq"


def said(source: TableSource | None = None) -> list[str]:
    return [problem.id for problem in (source or TableSource(PlainEvent)).database_checks(["default"])]


def refused(pattern: str, **options) -> None:
    reader = Reader(TableSource(PlainEvent, **options))
    with pytest.raises(SourceError, match=pattern):
        reader.look()
    with pytest.raises(SourceError, match=pattern):
        reader.subscription.head()


def test_a_table_that_can_be_tailed_is_silent(plain):
    """An identity column, an index, a primary server: nothing to say."""
    assert said() == []


@pytest.mark.parametrize(
    ("statement", "problem", "told"),
    [
        (f"ALTER SEQUENCE {SEQUENCE} CACHE 20", "scriba.E221", "has CACHE 20"),
        (f"ALTER SEQUENCE {SEQUENCE} INCREMENT BY -1 MINVALUE -9 MAXVALUE 9 RESTART 9", "scriba.E224", "counts by -1"),
        (f"ALTER SEQUENCE {SEQUENCE} CYCLE", "scriba.E224", "cycles"),
        ("ALTER TABLE shapes_plainevent ALTER id DROP IDENTITY", "scriba.E220", "no sequence fills"),
    ],
)
def test_a_sequence_that_cannot_be_trusted_is_refused(plain, statement, problem, told):
    """Numbers that are held back, run backwards or come from elsewhere: an error with the statement that heals it."""
    run(statement)
    [message] = TableSource(PlainEvent).database_checks(["default"])
    assert message.id == problem
    assert told in message.msg
    refused(told)
    cure = re.match(r"ALTER SEQUENCE [^;]+", message.hint or "")
    if cure:
        run(cure[0])
        if problem == "scriba.E221":
            assert said() == []


@pytest.mark.parametrize("owned", ["", "OWNED BY shapes_plainevent.id"])
def test_serial_and_custom_sequences_are_found(plain, owned):
    """The sequence in the column's default counts, whoever owns it."""
    run(f"ALTER TABLE shapes_plainevent ALTER id DROP IDENTITY; CREATE SEQUENCE shapes_own {owned}")
    run("ALTER TABLE shapes_plainevent ALTER id SET DEFAULT nextval('shapes_own')")
    own = OwnConnection("default")
    facts = look_at_table(own.rows, TableSource(PlainEvent)._fields(), "default")
    assert facts.relations.sequence == "public.shapes_own"
    own.close()
    run("DROP SEQUENCE shapes_own CASCADE")


def test_a_sequence_that_is_named_wrongly(plain):
    """The option's value is in the message."""
    refused("there is no sequence shapes_nothing", sequence="shapes_nothing")


def test_a_missing_table(database):
    """Before the first migrate, check and start say what to run."""
    run("DROP TABLE IF EXISTS shapes_plainevent")
    assert said() == ["scriba.E225"]
    refused("migrate --database=default")


def test_a_missing_index_is_a_warning(plain):
    """Every page would scan the table: slow, but not wrong."""
    run("ALTER TABLE shapes_plainevent DROP CONSTRAINT shapes_plainevent_pkey")
    assert said() == ["scriba.W226"]
    Reader(TableSource(PlainEvent)).look()


def test_a_subscriber_of_logical_replication_is_refused(plain):
    """Its rows come in commit order from elsewhere, with numbers that no lock here announces."""
    run("SET allow_system_table_mods = on")
    run("INSERT INTO pg_subscription_rel (srsubid, srrelid, srsubstate) VALUES (1, 'shapes_plainevent'::regclass, 'r')")
    try:
        assert said() == ["scriba.E223"]
        refused("logical replication")
    finally:
        run("DELETE FROM pg_subscription_rel WHERE srsubid = 1")
        run("SET allow_system_table_mods = off")


@pytest.fixture
def standby(monkeypatch):
    """Let the server say that it is in recovery: a second server would say the same."""
    rows = OwnConnection.rows

    def answer(self, sql, params=()):
        return rows(self, sql.replace("pg_is_in_recovery()", "true"), params)

    def go(on: bool) -> None:
        monkeypatch.setattr(OwnConnection, "rows", answer if on else rows)

    return go


def test_a_standby_is_refused_at_the_start(plain, standby):
    """Locks of writers cannot be seen there, so nothing may be read."""
    standby(True)
    assert said() == ["scriba.E222"]
    refused("standby")


def test_a_standby_during_a_fail_over_is_waited_out(plain, standby):
    """A source that has been read from a primary expects one to come back: transient, not a halt."""
    source = TableSource(PlainEvent)
    Reader(source).look()
    standby(True)
    subscription = source.subscribe(IDENTITY, [Shard(resume=0)])
    with pytest.raises(SourceAway) as caught:
        subscription.fetch(1, 0)
    assert subscription.transient(caught.value)
    assert source.transient(caught.value)
    standby(False)
    assert subscription.fetch(1, 0).caught_up
    subscription.close()


def test_only_the_databases_that_are_named_are_asked(plain):
    """`check --database other` opens no connection to this one."""
    run(f"ALTER SEQUENCE {SEQUENCE} CACHE 20")
    assert TableSource(PlainEvent).database_checks(["other"]) == []
    assert TableSource(PlainEvent, type="missing").database_checks(["default"]) == []  # said without a connection


def test_a_server_that_is_away_is_a_remark(plain, monkeypatch):
    """Building an image must not need a database."""
    with monkeypatch.context() as patch:
        patch.setitem(connections["default"].settings_dict, "PORT", "1")
        connections["default"].close()
        [message] = TableSource(PlainEvent).database_checks(["default"])
    assert message.id == "scriba.I227"
    assert not message.is_serious()


def test_the_check_command_finds_it(plain):
    """``manage.py check --database default`` asks the sources of registered projections."""

    @projection("facts", source=TableSource(PlainEvent), parallelism=1)
    def facts(event, meta):
        return Skip()

    try:
        run(f"ALTER SEQUENCE {SEQUENCE} CACHE 20")
        with pytest.raises(SystemCheckError, match=r"scriba\.E221"):
            call_command("check", databases=["default"])
    finally:
        forget(facts)


def test_errors_of_other_kinds_are_not_transient(plain):
    """A missing permission does not go away; a lost connection does; a bug of ours is no state of the database."""
    subscription = TableSource(PlainEvent).subscribe(IDENTITY, [Shard()])
    subscription.fetch(1, 0)
    run("DROP TABLE shapes_plainevent")
    with pytest.raises(Exception, match="does not exist") as caught:
        subscription.fetch(1, 0)
    assert not subscription.transient(caught.value)
    assert not subscription.transient(ValueError("ours"))
    subscription.close()
