"""The whole path: an application's events, written for real, in ordinary Django models."""

from __future__ import annotations

import base64
import logging
import random
from collections.abc import Iterator
from contextlib import closing
from decimal import Decimal
from typing import Any
from uuid import UUID

import psycopg
import pytest
from django.apps import apps
from django.db import connection
from django.db.models import F

import scriba
from scriba import Insert, Skip, Update
from scriba.exceptions import EventDeadLettered, HandlerError
from scriba.models import DeadLetter
from scriba.registry import Projection
from scriba.sources.eventsourcing import EventSourcingSource, database_env
from scriba.testing import drain
from tests.integration.eventsourcing.bank import Account, Bank, InsufficientFunds
from tests.integration.eventsourcing.conftest import Store
from tests.integration.eventsourcing.school import Dog, School
from tests.integration.eventsourcing.writers import stored
from tests.support.processes import database_url
from tests.support.waiting import wait_until
from tests.support.world import World
from tests.testapp.models import Counter, Row

KEY, OTHER_KEY = (base64.b64encode(letter * 32).decode() for letter in (b"k", b"o"))
SECRET = "XX00-TOP-SECRET"


def accounts(event: Any, meta: Any) -> Any:
    """Balances: not idempotent, so an event that is applied twice shows."""
    row = {"id": meta.stream_id}
    match event:
        case Account.Opened(holder=holder):
            return Insert(Row(id=meta.stream_id, name=holder, code=meta.id))
        case Account.Moved(amount=amount):
            return Update(Row, row, amount=F("amount") + amount)
        case Account.Closed():
            return Update(Row, row, status="closed")
    return Skip()


def tricks(event: Any, meta: Any) -> Any:
    """How many tricks each dog knows."""
    match event:
        case Dog.Enrolled(name=name):  # type: ignore[attr-defined]
            return Insert(Counter(key=f"{name} {meta.stream_id}"))
        case Dog.TrickLearned():  # type: ignore[attr-defined]
            return Update(Counter, {"key__endswith": meta.stream_id}, value=F("value") + 1, last_position=meta.position)
    return Skip()


def busy_day(bank: Bank, seed: int) -> list[UUID]:
    """Open ten accounts and move money between them, as far as the bank allows it."""
    rng = random.Random(seed)
    ids = [bank.open(f"holder {n}", f"{n}@example.org") for n in range(10)]
    for account in ids:
        bank.move(account, Decimal(100))
    for _ in range(60):
        debited, credited = rng.sample(ids, 2)
        try:
            bank.transfer(debited, credited, Decimal(rng.randint(1, 9000)) / 100)
        except InsufficientFunds:
            bank.allow_overdraft(debited, Decimal(50))
    bank.close_account(ids[0])
    return ids


def as_told_by(bank: Bank, ids: list[UUID]) -> dict[str, tuple[str, Decimal, str]]:
    """What the aggregates say: the read model must say the same."""
    found = [bank.repository.get(account) for account in ids]
    return {str(a.id): (a.holder, a.balance, "closed" if a.is_closed else "new") for a in found}


def as_projected() -> dict[str, tuple[str, Decimal, str]]:
    return {row.id: (row.name, row.amount, row.status) for row in Row.objects.all()}


def test_a_bank_becomes_a_read_model(world: World, store: Store) -> None:
    """Accounts, transfers, closings: every row says what its aggregate says, and each event is settled once."""
    bank = store.open(Bank)
    ids = busy_day(bank, seed=1)
    recorded = bank.recorder.max_notification_id()

    assert world.run(world.projection(accounts, source=store.source(Bank))) == 0

    assert as_projected() == as_told_by(bank, ids)
    assert world.segment.watermark == recorded
    assert world.letters() == []
    world.check_conservation(recorded)  # type: ignore[arg-type]
    bank.close()


def test_a_restart_applies_only_what_is_new(world: World, store: Store) -> None:
    """The watermark is Scriba's; the library has no durable subscription."""
    bank = store.open(Bank)
    ids = busy_day(bank, seed=2)
    world.run(world.projection(accounts, source=store.source(Bank)))

    bank.move(ids[1], Decimal(1000))
    world.run(world.projection(accounts, source=store.source(Bank)))

    assert as_projected() == as_told_by(bank, ids)
    assert world.counters()["deduplicated"] == 0
    bank.close()


def test_a_request_reads_its_own_write(world: World, postgres_store: Store) -> None:
    """Wait for the event by what saving returned, or by the aggregate's id and version."""
    bank = postgres_store.open(Bank)
    projection = world.projection(accounts, source=postgres_store.source(Bank))
    with world.running(projection):
        ada = bank.open("Ada", "ada@example.org")
        position = bank.move(ada, Decimal("12.50"))

        scriba.wait_for(projection, position=position, timeout=20)
        assert Row.objects.get(id=str(ada)).amount == Decimal("12.50")

        bank.move(ada, Decimal("0.50"))
        scriba.wait_for(projection, stream_id=str(ada), stream_version=3, timeout=20)
        assert Row.objects.get(id=str(ada)).amount == Decimal("13.00")
    bank.close()


def test_filtered_topics_leave_nothing_behind(world: World, postgres_store: Store) -> None:
    """A projection of a rare event is caught up when everything has been looked at."""
    bank = postgres_store.open(Bank)
    busy_day(bank, seed=3)

    source = postgres_store.source(Bank, topics=[Account.Opened, Account.Closed])
    assert world.run(world.projection(accounts, source=source)) == 0

    assert world.segment.watermark == bank.recorder.max_notification_id()
    assert world.counters() == {"applied": 11, "skipped": 0, "dead_lettered": 0, "deduplicated": 0, "unmatched": 0}
    bank.close()


def test_the_log_may_lie_in_a_django_database(world: World, postgres_store: Store) -> None:
    """Named by its alias, on both sides: one place for host, user and password."""
    schema = {"POSTGRES_SCHEMA": postgres_store.env["POSTGRES_SCHEMA"]}
    with closing(Bank(env={**database_env("default"), **schema})) as bank:
        ids = busy_day(bank, seed=6)
        source = EventSourcingSource(Bank, using="default", env=schema)

        assert world.run(world.projection(accounts, source=source)) == 0

        assert as_projected() == as_told_by(bank, ids)


@pytest.mark.django_db
def test_a_test_drains_a_projection(postgres_store: Store, scratch_name: str) -> None:
    """In an ordinary test case, without threads: the log is outside of the test's transaction, the rows are inside."""
    school = postgres_store.open(School)
    fido = school.enrol("Fido")
    school.teach(fido, "sit")
    projection = Projection(scratch_name, 1, tricks, postgres_store.source(School), scriba.OrmTarget(), 1)

    drained = drain(projection)
    last = school.teach(fido, "roll over")
    again = drain(projection)

    assert (drained.applied, again.applied, again.deduplicated) == (2, 1, 2)
    assert Counter.objects.get(key=f"Fido {fido}").last_position == last
    school.close()


# --- what cannot be decoded, and what cannot be handled -----------------------------------------------------------


BROKEN = {
    "decode:TopicError": stored("no.such.module:Thing"),
    "decode:MapperDeserialisationError": stored(f"{Account.__module__}:Account.Closed", b"\xff\x00"),
    "decode:AttributeError": stored(f"{__name__}:Upcasted", b'{"x": 1}'),
}


class Upcasted(Account.Closed):
    """At its third version; nobody wrote the way from the first to the second."""

    class_version = 3


def test_events_that_cannot_be_decoded_are_dead_letters(world: World, store: Store) -> None:
    """Module gone, wrong bytes, missing upcaster: one letter each, of that kind; the others are applied."""
    bank = store.open(Bank)
    ids = [bank.open("Ada", "a@example.org")]
    bank.recorder.insert_events(list(BROKEN.values()))
    ids.append(bank.open("Bob", "b@example.org"))

    assert world.run(world.projection(accounts, source=store.source(Bank), parallelism=1)) == 0

    assert as_projected() == as_told_by(bank, ids)
    assert [letter.error_kind for letter in world.letters()] == list(BROKEN)
    assert [letter.event_type for letter in world.letters()] == ["Thing", "Account.Closed", "Upcasted"]
    assert world.letters()[2].event_data == {"x": 1}
    bank.close()


class Mended:
    """A handler that fails until it is mended."""

    is_mended = False

    def __call__(self, event: Any, meta: Any) -> Any:
        if isinstance(event, Account.Moved) and not self.is_mended:
            msg = "not mended"
            raise ValueError(msg)
        return accounts(event, meta)


@pytest.mark.parametrize("is_gone", [False, True], ids=["in the log", "gone from the log"])
def test_a_dead_letter_is_replayed(world: World, postgres_store: Store, is_gone: bool) -> None:
    """From the log, or, when the event has gone there, from what the letter keeps: the handler gets the same event."""
    bank = postgres_store.open(Bank)
    handler = Mended()
    projection = world.projection(handler, source=postgres_store.source(Bank))
    ada = bank.open("Ada", "a@example.org")
    with world.running(projection):
        position = bank.move(ada, Decimal("7.25"))
        with pytest.raises(EventDeadLettered):
            scriba.wait_for(projection, position=position, timeout=20)
        (letter,) = scriba.dead_letters(projection)
        if is_gone:
            with psycopg.connect(database_url(), autocommit=True) as direct:
                table = f"{postgres_store.env['POSTGRES_SCHEMA']}.bank_events"
                direct.execute(f"DELETE FROM {table} WHERE notification_id = %s", (position,))
        handler.is_mended = True

        scriba.replay(letter, wait=True, timeout=20)

    assert Row.objects.get(id=str(ada)).amount == Decimal("7.25")
    bank.close()


# --- an encrypted store -------------------------------------------------------------------------------------------


@pytest.fixture
def encrypted_store(postgres_store: Store) -> Iterator[Store]:
    pytest.importorskip("Crypto", reason="pip install pycryptodome")
    compressor = "eventsourcing.compressor:ZlibCompressor"
    env = {**postgres_store.env, "CIPHER_KEY": KEY, "COMPRESSOR_TOPIC": compressor}
    return Store("encrypted", env, postgres_store.options)


def everything_stored() -> str:
    """All rows of all our tables, as text."""
    found = []
    with connection.cursor() as cursor:
        for model in apps.get_app_config("scriba").get_models():
            cursor.execute(f"SELECT t::text FROM {model._meta.db_table} AS t")
            found += [row[0] for row in cursor.fetchall()]
    return "\n".join(found)


def test_an_encrypted_bank_becomes_a_read_model(world: World, encrypted_store: Store) -> None:
    """The handler gets decrypted events; what it writes into the read model is its decision."""
    bank = encrypted_store.open(Bank)
    ids = busy_day(bank, seed=4)

    world.run(world.projection(accounts, source=encrypted_store.source(Bank)))

    assert as_projected() == as_told_by(bank, ids)
    bank.close()


def test_a_wrong_key_halts(world: World, encrypted_store: Store) -> None:
    """It hits every event: no letters, no cursor moved, and the cause says what to look at."""
    with closing(encrypted_store.open(Bank)) as bank:
        busy_day(bank, seed=5)
    source = encrypted_store.source(Bank, env={"CIPHER_KEY": OTHER_KEY})

    assert world.run(world.projection(accounts, source=source, parallelism=1)) == 1

    assert "the key is not the one it was encrypted with" in world.state.halt_cause
    assert world.letters() == []
    assert world.cursors() == {}


def test_a_wrong_key_halts_where_events_come_one_by_one(world: World, encrypted_store: Store) -> None:
    """A single failure is one event's fault; the third in a row, with no success between, is not."""
    source = encrypted_store.source(Bank, env={"CIPHER_KEY": OTHER_KEY})
    with closing(encrypted_store.open(Bank)) as bank:
        with world.running(world.projection(accounts, source=source)):
            for count in (1, 2):
                bank.open("Ada", "a@example.org")
                wait_until(lambda count=count: len(world.letters()) == count, what=f"letter {count}")
            bank.open("Bob", "b@example.org")
            wait_until(lambda: world.state.halt_cause, what="the halt")

        assert len(world.letters()) == 2
        assert bank.recorder.max_notification_id() == 3


def test_no_clear_text_of_an_encrypted_store_is_left_anywhere(
    world: World, encrypted_store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    """A failing handler and events that cannot be decoded leave letters, and nothing in them or in a log tells more."""
    bank = encrypted_store.open(Bank)
    cipher, compressor = bank.mapper.cipher, bank.mapper.compressor
    assert cipher is not None
    assert compressor is not None

    def sealed(state: bytes) -> bytes:
        return cipher.encrypt(compressor.compress(state))

    opened = f"{Account.__module__}:Account.Opened"
    bank.recorder.insert_events([
        stored(opened, sealed(b'{"timestamp": {"_type_": "datetime_iso", "_data_": "%s"}}' % SECRET.encode())),
        stored(opened, sealed(b'{"x": {"_type_": "%s", "_data_": 1}}' % SECRET.encode())),
        stored(opened, sealed(SECRET.encode())),
        stored(f"{__name__}:Quoting", sealed(b'{"iban": "%s"}' % SECRET.encode())),
    ])  # fmt: skip
    bank.open(f"{SECRET} holder", f"{SECRET}@example.org")
    ada = bank.open("Ada", "ada@example.org")

    def picky(event: Any, meta: Any) -> Any:
        if SECRET in event.holder:
            msg = "not this one"
            raise HandlerError(msg)
        return Insert(Row(id=meta.stream_id))

    with caplog.at_level(logging.DEBUG):
        assert world.run(world.projection(picky, source=encrypted_store.source(Bank), parallelism=1)) == 0

    letters = world.letters()
    assert [letter.error_kind.rpartition(".")[2] for letter in letters] == [
        "decode:MapperDeserialisationError",
        "decode:MapperDeserialisationError",
        "decode:MapperDeserialisationError",
        "decode:LookupError",
        "HandlerError",
    ]
    assert [row.id for row in Row.objects.all()] == [str(ada)]
    raw = bank.recorder.select_notifications(letters[4].position, 1)[0].state
    assert base64.b64encode(raw).decode() in str(letters[4].event_data)
    assert letters[4].event_metadata == {"topic": opened}
    assert letters[4].event_occurred_at is None
    text = everything_stored()
    assert len(text) > 1000
    assert SECRET not in text
    assert SECRET not in caplog.text
    bank.close()


class Quoting(Account.Closed):
    """Its upcaster fails, and quotes what it was given."""

    class_version = 2

    @staticmethod
    def upcast_v1_v2(state: dict[str, Any]) -> None:
        msg = f"unknown bank in {state['iban']}"
        raise LookupError(msg)


def test_a_secret_letter_is_replayed(world: World, encrypted_store: Store) -> None:
    """From the encrypted state that the letter keeps, when the event has gone from the log."""
    bank = encrypted_store.open(Bank)
    handler = Mended()
    projection = world.projection(handler, source=encrypted_store.source(Bank))
    ada = bank.open("Ada", "a@example.org")
    with world.running(projection):
        position = bank.move(ada, Decimal("7.25"))
        wait_until(lambda: DeadLetter.objects.filter(projection_name=world.name).exists(), what="the letter")
        (letter,) = scriba.dead_letters(projection)
        with psycopg.connect(database_url(), autocommit=True) as direct:
            table = f"{encrypted_store.env['POSTGRES_SCHEMA']}.bank_events"
            direct.execute(f"DELETE FROM {table} WHERE notification_id = %s", (position,))
        handler.is_mended = True

        scriba.replay(letter, wait=True, timeout=20)

    assert Row.objects.get(id=str(ada)).amount == Decimal("7.25")
    bank.close()
