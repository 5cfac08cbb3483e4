"""A recorder over UmaDB that implements the library's interface: a third-party store for the tests.

The released recorder for UmaDB asks for a later major version of the library, and its last version that does not cannot
talk to a UmaDB that brings its server along. So the tests have their own, written against the two interfaces.

UmaDB knows tags, no streams: an aggregate's events carry its id as a tag, and each event one more with its version,
which nothing else may carry.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any
from uuid import UUID, uuid4

import umadb
from eventsourcing.persistence import (
    AggregateRecorder,
    ApplicationRecorder,
    InfrastructureFactory,
    IntegrityError,
    Notification,
    ProcessRecorder,
    StoredEvent,
    Subscription,
    TrackingRecorder,
)

__all__ = ["UmaFactory", "UmaRecorder"]


class UmaFactory(InfrastructureFactory):
    def application_recorder(self) -> ApplicationRecorder:
        return UmaRecorder(umadb.Client(self.env["UMADB_URI"]))

    def aggregate_recorder(self, purpose: str = "events") -> AggregateRecorder:
        raise NotImplementedError(purpose)

    def tracking_recorder(self, tracking_recorder_class: type[TrackingRecorder] | None = None) -> TrackingRecorder:
        raise NotImplementedError(tracking_recorder_class)

    def process_recorder(self) -> ProcessRecorder:
        raise NotImplementedError


class UmaRecorder(ApplicationRecorder):
    def __init__(self, client: umadb.Client) -> None:
        self._client = client

    def insert_events(self, stored_events: Sequence[StoredEvent], **kwargs: Any) -> Sequence[int] | None:
        if not stored_events:
            return []
        events = [
            umadb.Event(stored.topic, stored.state, tags=[_stream(stored), _version(stored)], uuid=uuid4())
            for stored in stored_events
        ]
        taken = umadb.Query([umadb.QueryItem(tags=[_version(stored)]) for stored in stored_events])
        try:
            last = self._client.append(events, umadb.AppendCondition(taken))
        except umadb.IntegrityError as error:
            raise IntegrityError(str(error)) from error
        return list(range(last - len(events) + 1, last + 1))

    def select_events(
        self,
        originator_id: UUID | str,
        *,
        gt: int | None = None,
        lte: int | None = None,
        desc: bool = False,
        limit: int | None = None,
    ) -> Sequence[StoredEvent]:
        stream = umadb.Query([umadb.QueryItem(tags=[f"stream:{originator_id}"])])
        found = map(_notification, self._client.read(stream, backwards=desc))
        wanted = (
            n
            for n in found
            if (gt is None or n.originator_version > gt) and (lte is None or n.originator_version <= lte)
        )
        return list(itertools.islice(wanted, limit))

    def select_notifications(
        self,
        start: int | None,
        limit: int,
        stop: int | None = None,
        topics: Sequence[str] = (),
        *,
        inclusive_of_start: bool = True,
    ) -> Sequence[Notification]:
        first = start if start is None or inclusive_of_start else start + 1
        query = umadb.Query([umadb.QueryItem(types=list(topics))]) if topics else None
        found: Iterator[Notification] = map(_notification, self._client.read(query, start=first, limit=limit))
        return [notification for notification in found if stop is None or notification.id <= stop]

    def max_notification_id(self) -> int | None:
        return self._client.head()

    def subscribe(self, gt: int | None = None, topics: Sequence[str] = ()) -> Subscription[ApplicationRecorder]:
        raise NotImplementedError


def _stream(stored: StoredEvent) -> str:
    return f"stream:{stored.originator_id}"


def _version(stored: StoredEvent) -> str:
    return f"version:{stored.originator_id}:{stored.originator_version}"


def _notification(found: umadb.SequencedEvent) -> Notification:
    _, originator_id, version = next(tag for tag in found.event.tags if tag.startswith("version:")).split(":")
    return Notification(
        id=found.position,
        originator_id=_parsed(originator_id),
        originator_version=int(version),
        topic=found.event.event_type,
        state=bytes(found.event.data),
    )


def _parsed(originator_id: str) -> UUID | str:
    try:
        return UUID(originator_id)
    except ValueError:
        return originator_id
