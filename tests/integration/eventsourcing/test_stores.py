"""What holds for every recorder: the example applications, written for real, and read page by page."""

from __future__ import annotations

import time
from contextlib import closing
from decimal import Decimal
from typing import Any

import pytest

from scriba.exceptions import SourceError
from tests.integration.eventsourcing.bank import Account, Bank
from tests.integration.eventsourcing.conftest import Store
from tests.integration.eventsourcing.school import Dog, School
from tests.support.reading import positions, read_all


def history(bank: Bank) -> tuple[Any, Any]:
    """Two accounts and seven events, two of them saved together."""
    ada, bob = bank.open("Ada", "ada@example.org"), bank.open("Bob", "bob@example.org")
    bank.move(ada, Decimal("100.00"))
    bank.transfer(ada, bob, Decimal("30.50"))
    bank.allow_overdraft(bob, Decimal(200))
    bank.close_account(ada)
    return ada, bob


def test_the_bank_is_read_as_it_was_written(store: Store) -> None:
    """Every event once, in order, as the domain event that the application saved."""
    bank = store.open(Bank)
    ada, bob = history(bank)
    subscription = store.subscribe(Bank)

    events = read_all(subscription, limit=3)

    told = [(event.stream_id, event.stream_version, event.payload().data) for event in events]
    expected = {
        str(account): [bank.mapper.to_domain_event(stored) for stored in bank.recorder.select_events(account)]
        for account in (ada, bob)
    }
    for account, versions in expected.items():
        assert [(version, data) for stream, version, data in told if stream == account] == [
            (data.originator_version, data) for data in versions
        ]
    assert len(told) == 7
    subscription.close()
    bank.close()


def test_who_polls_looks_every_so_often_however_fast_events_come(sqlite_store: Store) -> None:
    """A look after each event would cost as much as a look after fifty, and find fifty times less."""
    with closing(sqlite_store.open(Bank)) as bank, closing(sqlite_store.subscribe(Bank)) as subscription:
        assert subscription.fetch(10, 0.0).caught_up
        looked_at = time.monotonic()
        bank.open("Ada", "ada@example.org")

        page = subscription.fetch(10, 0.3)

        assert time.monotonic() - looked_at > 0.25
        assert len(page.events) == 1


def test_a_handler_matches_on_the_domain_classes(store: Store) -> None:
    """Attributes keep their types: Decimal is Decimal."""
    bank = store.open(Bank)
    history(bank)
    subscription = store.subscribe(Bank)

    seen = []
    for event in read_all(subscription):
        match event.payload().data:
            case Account.Opened(holder=holder):
                seen.append(holder)
            case Account.Moved(amount=amount):
                seen.append(amount)
            case Account.LimitChanged(overdraft=overdraft):
                seen.append(-overdraft)
            case Account.Closed():
                seen.append("closed")

    assert seen == ["Ada", "Bob", Decimal("100.00"), Decimal("-30.50"), Decimal("30.50"), Decimal(-200), "closed"]
    subscription.close()
    bank.close()


def test_events_that_are_declared_by_a_string_are_read_too(store: Store) -> None:
    """The school's events have classes that the decorator made."""
    school = store.open(School)
    fido = school.enrol("Fido")
    school.teach(fido, "roll over")
    subscription = store.subscribe(School)

    enrolled, learnt = read_all(subscription)

    assert isinstance(enrolled.payload().data, Dog.Enrolled)  # type: ignore[attr-defined]
    assert learnt.payload().data.trick == "roll over"
    assert (learnt.id, learnt.type) == (f"{fido}:2", "Dog.TrickLearned")
    subscription.close()
    school.close()


def test_the_notification_id_that_saving_returns_is_the_position(store: Store) -> None:
    """So a web request can wait for its own write with ``wait_for(position=…)`` or ``wait_for(event_id=…)``."""
    school = store.open(School)
    fido = school.enrol("Fido")
    notification_id = school.teach(fido, "sit")
    subscription = store.subscribe(School)

    assert subscription.read(notification_id).id == f"{fido}:2"  # type: ignore[union-attr]
    assert subscription.locate(event_id=f"{fido}:2") == ("", notification_id)
    assert subscription.locate(stream_id=str(fido), stream_version=2) == ("", notification_id)
    assert subscription.locate(stream_id=str(fido), stream_version=3) is None
    subscription.close()
    school.close()


def test_filtered_topics_move_the_watermark(store: Store) -> None:
    """What is left out was looked at all the same; a restart does not look again."""
    bank = store.open(Bank)
    history(bank)
    subscription = store.subscribe(Bank, topics=[Account.LimitChanged])

    page = subscription.fetch(10, 0.0)
    head = subscription.head()

    assert [event.type for event in page.events] == ["Account.LimitChanged"]
    assert head is not None
    assert page.scanned == head.position
    assert page.caught_up
    subscription.close()
    bank.close()


def test_the_head_is_the_newest_event_with_its_time(store: Store) -> None:
    """What the lag is measured against."""
    school = store.open(School)
    fido = school.enrol("Fido")
    last = school.teach(fido, "sit")
    subscription = store.subscribe(School)

    head = subscription.head()

    stored = school.recorder.select_notifications(last, 1)[0]
    assert head is not None
    assert head.position == last
    assert head.occurred_at == school.mapper.to_domain_event(stored).timestamp  # type: ignore[attr-defined]
    subscription.close()
    school.close()


def test_reading_continues_behind_the_watermark(store: Store) -> None:
    """A restart hands out what came after, and nothing before."""
    school = store.open(School)
    fido = school.enrol("Fido")
    second = school.teach(fido, "sit")
    third = school.teach(fido, "roll")
    subscription = store.subscribe(School, resume=second)

    assert positions(read_all(subscription)) == [third]
    subscription.close()
    school.close()


def test_a_store_behind_its_projection_halts(store: Store) -> None:
    """A restored or truncated log would hand out positions again that count as read."""
    school = store.open(School)
    last = school.teach(school.enrol("Fido"), "sit")

    with pytest.raises(SourceError, match=rf"read .*up to .*{last + 1}\b"):
        store.subscribe(School, resume=last + 1)
    school.close()


def test_a_reader_makes_no_tables(store: Store) -> None:
    """A store in which nothing was ever written is said to be one; creating tables is the writers' business."""
    if store.name == "umadb":
        pytest.skip("UmaDB has no tables")
    with pytest.raises(Exception, match=r"school_events|stored_events") as caught:
        store.subscribe(School).fetch(1, 0.0)

    assert not store.source(School).transient(caught.value)


def test_each_wake_ends_a_wait(store: Store) -> None:
    """Pausing and stopping do not wait for the poll interval."""
    school = store.open(School)
    subscription = store.subscribe(School)
    subscription.wake()

    page = subscription.fetch(10, 60.0)

    assert page.events == []
    subscription.close()
    school.close()
