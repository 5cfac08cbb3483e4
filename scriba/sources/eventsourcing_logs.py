"""The notification log of an application, as a reader needs it: what may be handed out now, and how far that goes.

Two ways of trusting positions:

* :class:`OrderedLog`: the store hands out positions in the order of its commits. SQLite has one writer at a time, the
  in-memory recorder one lock, and a store such as UmaDB one sequencer; what is visible is complete.
* :mod:`scriba.sources.eventsourcing_gaps`: positions are handed out before their transactions commit, so nothing is
  believed without evidence.

A log is used by the thread that fetches; `at`, `locate` and `wake` may be called from any.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol
from uuid import UUID

from scriba.exceptions import SourceError

if TYPE_CHECKING:
    from eventsourcing.persistence import ApplicationRecorder, Notification, StoredEvent
    from eventsourcing.sqlite import SQLiteApplicationRecorder

    from scriba.sources.eventsourcing_decoding import StoredState

__all__ = ["Log", "Look", "OrderedLog", "SQLiteLog", "has_text_ids", "parsed_id"]

SCAN: Final = 1_000  #: notifications per page while an event is searched for


class Look(NamedTuple):
    """What one look at a log found, in position order, and how far it may be believed.

    `blocked`: something is written beyond `scanned`, but not yet safe to hand out.
    """

    found: Sequence[Notification | StoredState]
    scanned: int
    caught_up: bool
    blocked: bool = False


class Log(Protocol):
    """What a subscription reads from."""

    def look(self, after: int, limit: int) -> Look:
        """Return at most `limit` of what comes after position `after` (-1: from the beginning), complete so far."""
        ...

    def wait(self, timeout: float) -> None:
        """Return when something may have been appended, after :meth:`wake`, or after `timeout` seconds."""
        ...

    def wake(self) -> None: ...

    def head(self) -> int | None:
        """Return the highest position that is recorded, or None."""
        ...

    def current(self) -> int | None:
        """Return the position behind which *current* is: no event that commits later has a lower one.

        None while that is not known; ask again after :meth:`wait`.
        """
        ...

    def check(self, read_up_to: int) -> None:
        """Raise SourceError when the log does not reach as far as it was read: it was restored, or is another one."""
        ...

    def waiting_for(self) -> str:
        """Say in words what holds back positions that are written; empty when nothing does."""
        ...

    def at(self, position: int) -> Notification | StoredState | None: ...

    def locate(self, originator_id: str, version: int) -> int | None:
        """Return the position of one version of an aggregate, or None while it is not recorded."""
        ...

    def original_id(self, text: str) -> UUID | str:
        """Return an originator id, written as text, as the store hands it out."""
        ...

    def close(self) -> None: ...


class OrderedLog:
    """The log of a recorder whose positions appear in order: what is missing below a position never comes."""

    def __init__(self, recorder: ApplicationRecorder, topics: Sequence[str] = ()) -> None:
        self._recorder = recorder
        self._topics = topics
        self._woken = threading.Event()

    def look(self, after: int, limit: int) -> Look:
        # The head is read before the page: what is appended in between is found by the next look, never jumped over.
        head = self.head() if self._topics else None
        found = self.select(after, limit, self._topics)
        scanned = found[-1].id if found else after
        if len(found) < limit and head is not None:
            scanned = max(scanned, head)
        return Look(found, scanned, caught_up=len(found) < limit)

    def select(self, after: int, limit: int, topics: Sequence[str] = ()) -> Sequence[Notification]:
        """Return notifications after position `after`, as the recorder gives them."""
        start = None if after < 0 else after
        return self._recorder.select_notifications(start, limit, topics=topics, inclusive_of_start=False)

    def wait(self, timeout: float) -> None:
        self._woken.wait(timeout)
        self._woken.clear()

    def wake(self) -> None:
        self._woken.set()

    def head(self) -> int | None:
        return self._recorder.max_notification_id()

    def current(self) -> int | None:
        head = self.head()
        return -1 if head is None else head

    def check(self, read_up_to: int) -> None:
        head = self.head()
        if read_up_to > (-1 if head is None else head):
            raise SourceError(_BEHIND.format(head=head or "nothing", read_up_to=read_up_to))

    def waiting_for(self) -> str:
        return ""

    def at(self, position: int) -> Notification | None:
        found = self._recorder.select_notifications(position, 1)
        return found[0] if found and found[0].id == position else None

    def locate(self, originator_id: str, version: int) -> int | None:
        head = self.head()
        if head is None or not self._is_recorded(originator_id, version):
            return None
        # The interface has no such look-up. What is asked for is nearly always recent: search backwards in growing steps.
        below, width = head + 1, SCAN
        while below > 0:
            start = max(head - width, -1)
            for stored in self._between(start, below):
                if stored.originator_version == version and str(stored.originator_id) == originator_id:
                    return stored.id
            below, width = start + 1, width * 10
        return None

    def _is_recorded(self, originator_id: str, version: int) -> bool:
        recorded: Sequence[StoredEvent] = self._recorder.select_events(
            self.original_id(originator_id), gt=version - 1, lte=version
        )
        return bool(recorded)

    def _between(self, start: int, below: int) -> Iterator[Notification]:
        """Yield what lies after `start` and below `below`; a recorder's own upper limit is not relied upon."""
        while page := self.select(start, SCAN):
            for stored in page:
                if stored.id >= below:
                    return
                yield stored
            start = page[-1].id

    def original_id(self, text: str) -> UUID | str:
        return parsed_id(text)

    def close(self) -> None:
        self.wake()


class SQLiteLog(OrderedLog):
    """The log of the library's SQLite recorder: one writer at a time, positions are row ids."""

    _recorder: SQLiteApplicationRecorder

    def locate(self, originator_id: str, version: int) -> int | None:
        key = self.original_id(originator_id)
        with self._recorder.datastore.transaction(commit=False) as cursor:
            cursor.execute(
                f"SELECT rowid FROM {self._recorder.events_table_name} "
                "WHERE originator_id = ? AND originator_version = ?",
                (key.hex if isinstance(key, UUID) else key, version),
            )
            row = cursor.fetchone()
        return int(row[0]) if row else None

    def original_id(self, text: str) -> UUID | str:
        return text if has_text_ids(self._recorder) else parsed_id(text)


_BEHIND: Final = (
    "the log is behind the projection: its last position is {head}, and the projection has read up to {read_up_to}. It was "
    "restored, truncated or replaced; new events would get positions that count as read. Restore the read model to the "
    "same moment, or rebuild it: a new version of the projection, or manage.py scriba_reset."
)


def has_text_ids(recorder: Any) -> bool:
    """Say whether a recorder of the library keeps originator ids as text (possible since 9.5; else they are UUIDs)."""
    return getattr(recorder.datastore, "originator_id_type", "uuid") == "text"


def parsed_id(originator_id: str) -> UUID | str:
    """Return a UUID where the text is one, as recorders want it."""
    try:
        return UUID(originator_id)
    except ValueError:
        return originator_id
