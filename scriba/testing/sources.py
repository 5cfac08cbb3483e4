"""What every source must do, as tests: subclass :class:`SourceContract` for a source of your own.

::

    class TestMyStore(SourceContract):
        def make_source(self, **options):
            return MyStoreSource(URL, **options)

        def append(self, count=1, *, type="counted", stream_id="stream-1", padding=0):
            return [my_store.append(stream_id, type, {"padding": "x" * padding}) for _ in range(count)]

        def break_connection(self, subscription):
            my_store.disconnect_everybody()

pytest collects the subclass; fixtures of yours work as in any test class. The first version of a stream is whatever
:meth:`SourceContract.first_version` says. Override a test, with your reason, where a source cannot do what it asks.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Final

from django.test import override_settings

from scriba.event import Event
from scriba.protocols import Identity, Shard, Source, Subscription

__all__ = ["SourceContract"]

IDENTITY: Final = Identity("contract", 1)
LONG_S: Final = 30.0  #: a wait that a test must never see the end of
PROMPT_S: Final = 10.0  #: what is called prompt on the slowest machine


class SourceContract:
    """Subclass it as ``Test…`` and override the first three methods. Each test starts with an empty store."""

    # --- to override --------------------------------------------------------------------------------------

    def make_source(self, **options: Any) -> Source:
        """Return a source over the store under test; the only option given is `start_from`."""
        raise NotImplementedError

    def append(
        self,
        count: int = 1,
        *,
        type: str = "counted",  # noqa: A002 - the event's word
        stream_id: str = "stream-1",
        padding: int = 0,
    ) -> list[int]:
        """Append and commit `count` events, each with `padding` bytes of payload besides; return their positions."""
        raise NotImplementedError

    def break_connection(self, subscription: Subscription) -> None:
        """Cut the connection over which `subscription` fetches, as a network or a server would."""
        raise NotImplementedError

    def first_version(self) -> int | None:
        """Return the version of a stream's first event; None where the source knows no versions."""
        return None

    # --- order and completeness ---------------------------------------------------------------------------

    def test_an_empty_source_is_caught_up(self) -> None:
        """Nothing to read is no error: no event, no head, and the reader knows that it has seen everything."""
        subscription = self._subscribe()
        page = subscription.fetch(10, 0.0)
        assert not page.events
        assert page.caught_up
        assert subscription.head() is None
        subscription.close()

    def test_events_come_in_position_order_and_only_once(self) -> None:
        """Positions rise from page to page; what was handed out is not handed out again."""
        appended = self.append(7) + self.append(4, stream_id="stream-2")
        assert self._read(limit=3) == appended

    def test_a_page_holds_at_most_limit_events(self) -> None:
        """`limit` bounds a page; the rest comes with the next."""
        appended = self.append(5)
        subscription = self._subscribe()
        page = subscription.fetch(2, 0.0)
        assert [event.position for event in page.events] == appended[:2]
        assert page.scanned == appended[1]
        assert not page.caught_up
        subscription.close()

    def test_scanned_reaches_what_was_handed_out(self) -> None:
        """`scanned` never stays behind the events of its page, and never moves back."""
        appended = self.append(3)
        subscription = self._subscribe()
        page = self._until_caught_up(subscription)[-1]
        assert page.scanned >= appended[-1]
        assert subscription.fetch(10, 0.0).scanned >= page.scanned
        subscription.close()

    def test_an_append_is_found_by_looking_again(self) -> None:
        """Polling alone is enough: no notification has to arrive."""
        subscription = self._subscribe()
        self._until_caught_up(subscription)
        appended = self.append(2)
        assert self._positions(self._until_caught_up(subscription)) == appended
        subscription.close()

    # --- where reading begins -----------------------------------------------------------------------------

    def test_nothing_comes_before_resume(self) -> None:
        """A reader that resumes behind a position gets the next one first."""
        appended = self.append(5)
        assert self._read(resume=appended[2]) == appended[3:]

    def test_start_from_a_position_begins_behind_it(self) -> None:
        """``start_from=N`` delivers the event after N first."""
        appended = self.append(4)
        assert self._read(start_from=appended[1]) == appended[2:]

    def test_start_from_current_skips_what_is_there(self) -> None:
        """``start_from="current"`` delivers only what is appended after the first look."""
        self.append(3)
        subscription = self._subscribe(start_from="current")
        self._until_caught_up(subscription)
        appended = self.append(2)
        assert self._positions(self._until_caught_up(subscription)) == appended
        subscription.close()

    def test_a_known_position_outranks_start_from(self) -> None:
        """Once a projection has read, it resumes there, whatever `start_from` says."""
        appended = self.append(4)
        assert self._read(resume=appended[0], start_from="current") == appended[1:]

    # --- filters ------------------------------------------------------------------------------------------

    def test_filtered_events_still_move_scanned(self) -> None:
        """What a source leaves out counts as scanned, or the watermark would wait for it."""
        source: Any = self.make_source()
        if not hasattr(source, "narrow"):
            return
        wanted = self.append(2)
        last = self.append(6, type="ignored")[-1]
        subscription = source.narrow({"counted"}).subscribe(IDENTITY, [Shard()])
        pages = self._until_caught_up(subscription)
        assert self._positions(pages) == wanted
        assert pages[-1].scanned >= last
        subscription.close()

    # --- single events ------------------------------------------------------------------------------------

    def test_head_is_the_highest_position(self) -> None:
        """The head is what lag is measured against."""
        appended = self.append(3)
        subscription = self._subscribe()
        head = subscription.head()
        assert head is not None
        assert head.position == appended[-1]
        subscription.close()

    def test_an_event_can_be_read_again_by_position(self) -> None:
        """A replay reads its event anew; a position that holds nothing gives None."""
        first, second = self.append(2)
        subscription = self._subscribe()
        fetched = self._events(self._until_caught_up(subscription))[1]
        again = subscription.read(second)
        assert again is not None
        assert (again.position, again.id, again.stream_id, again.type) == (
            second,
            fetched.id,
            fetched.stream_id,
            fetched.type,
        )
        assert again.payload() == fetched.payload()
        assert subscription.read(second + 1_000_000) is None
        assert first < second
        subscription.close()

    def test_what_a_dead_letter_keeps_decodes_like_the_event(self) -> None:
        """`restore` turns stored data back into an event that decodes to the same payload."""
        self.append(1, padding=10)
        subscription = self._subscribe()
        event = self._events(self._until_caught_up(subscription))[0]
        data, metadata = event.stored()
        restored = subscription.restore(event._replace(raw=data, raw_metadata=metadata, codec=None))
        assert restored.payload() == event.payload()
        subscription.close()

    def test_an_event_is_located_by_its_id(self) -> None:
        """`wait_for(event_id=…)` finds a position; an unknown id gives None."""
        appended = self.append(3)
        subscription = self._subscribe()
        event = self._events(self._until_caught_up(subscription))[1]
        assert subscription.locate(event_id=event.id) == ("", appended[1])
        assert subscription.locate(event_id="no such id") is None
        subscription.close()

    def test_an_event_is_located_by_stream_and_version(self) -> None:
        """`wait_for(stream_id=…, stream_version=…)` finds a position, where streams have versions."""
        first = self.first_version()
        if first is None:
            return
        self.append(1, stream_id="stream-2")
        appended = self.append(2, stream_id="stream-1")
        subscription = self._subscribe()
        assert subscription.locate(stream_id="stream-1", stream_version=first + 1) == ("", appended[1])
        assert subscription.locate(stream_id="stream-1", stream_version=first + 2) is None
        subscription.close()

    # --- life ---------------------------------------------------------------------------------------------

    def test_wake_ends_a_waiting_fetch(self) -> None:
        """A stop never waits for a poll interval."""
        subscription = self._subscribe()
        self._until_caught_up(subscription)
        timer = threading.Timer(0.05, subscription.wake)
        done = threading.Event()
        watchdog = threading.Timer(PROMPT_S, lambda: None if done.is_set() else subscription.wake())
        timer.start()
        watchdog.start()
        page = subscription.fetch(10, LONG_S)
        late = not watchdog.is_alive()
        done.set()
        watchdog.cancel()
        timer.join()
        assert not late
        assert not page.events
        subscription.close()

    def test_an_event_that_is_there_ends_the_wait_at_once(self) -> None:
        """`timeout` is for waiting, not for events that can be handed out at the first look."""
        appended = self.append(1)
        subscription = self._subscribe()
        watchdog = threading.Timer(PROMPT_S, subscription.wake)
        watchdog.start()
        page = subscription.fetch(10, LONG_S)
        late = not watchdog.is_alive()
        watchdog.cancel()
        assert not late
        assert self._positions([page]) == appended
        subscription.close()

    def test_a_lost_connection_is_transient_and_costs_nothing(self) -> None:
        """The engine closes, subscribes again behind what it has, and goes on: nothing lost, nothing twice."""
        appended = self.append(3)
        subscription = self._subscribe()
        pages = self._until_caught_up(subscription)
        self.break_connection(subscription)
        appended += self.append(2)
        try:
            pages += self._until_caught_up(subscription)
        except Exception as error:  # noqa: BLE001 - whatever the driver raises
            assert subscription.transient(error), f"not transient: {error!r}"
            subscription.close()
            subscription = self._subscribe(resume=pages[-1].scanned)
            pages += self._until_caught_up(subscription)
        assert self._positions(pages) == appended
        subscription.close()

    def test_close_twice_is_fine(self) -> None:
        """Whoever cleans up last need not know who cleaned up first; nor need anything have been read."""
        unread = self._subscribe()
        unread.close()
        self.append(1)
        subscription = self._subscribe()
        self._until_caught_up(subscription)
        subscription.close()
        subscription.close()

    def test_acknowledging_never_fails(self) -> None:
        """The engine tells every source what is settled, whether it keeps that or not."""
        appended = self.append(3)
        subscription = self._subscribe()
        self._until_caught_up(subscription)
        for position in appended:
            subscription.ack(position)
        subscription.close()

    def test_payloads_in_a_page_are_bounded_by_bytes(self) -> None:
        """A page of heavy events is cut short, so that memory is bounded whatever people store."""
        most, padding, count = 400_000, 50_000, 30
        appended = self.append(count, padding=padding)
        with override_settings(SCRIBA={"max_bytes_in_flight": most}):
            subscription = self._subscribe()
            pages = self._until_caught_up(subscription, limit=1_000)
        assert self._positions(pages) == appended
        assert max(len(page.events) for page in pages) * padding <= most
        assert sum(event.size for event in self._events(pages)) >= count * padding
        subscription.close()

    def test_the_identity_is_the_same_for_every_object(self) -> None:
        """It is recorded: a projection that is deployed anew must recognise its source."""
        assert self.make_source().identity() == self.make_source(start_from=3).identity() != ""

    def test_nothing_is_wrong_with_a_source_that_works(self) -> None:
        """``manage.py check`` stays silent."""
        assert self.make_source().checks() == []

    # --- helpers ------------------------------------------------------------------------------------------

    def _subscribe(self, *, resume: int | None = None, **options: Any) -> Subscription:
        return self.make_source(**options).subscribe(IDENTITY, [Shard(resume=resume)])

    def _read(self, *, limit: int = 100, resume: int | None = None, **options: Any) -> list[int]:
        subscription = self._subscribe(resume=resume, **options)
        found = self._positions(self._until_caught_up(subscription, limit))
        subscription.close()
        return found

    def _until_caught_up(self, subscription: Subscription, limit: int = 100) -> list[Any]:
        pages = [subscription.fetch(limit, 0.0)]
        while not pages[-1].caught_up:
            pages.append(subscription.fetch(limit, 0.0))
        return pages

    def _events(self, pages: Sequence[Any]) -> list[Event]:
        return [event for page in pages for event in page.events]

    def _positions(self, pages: Sequence[Any]) -> list[int]:
        return [event.position for event in self._events(pages)]
