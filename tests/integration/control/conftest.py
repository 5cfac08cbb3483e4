from __future__ import annotations

from collections.abc import Iterator

import pytest

from scriba.ledger import PgLedger
from scriba.protocols import Lease, Progress, Recorded, Status
from tests.support.world import World

LEASE_S = 60.0


@pytest.fixture
def world(transactional_db: None, scratch_name: str) -> World:
    return World(scratch_name)


class Owner:
    """A process that owns the projection and shows whatever the test says, without doing anything."""

    def __init__(self, world: World) -> None:
        self.ledger = PgLedger(world.identity, world.using)
        self.ledger.register(Recorded("stream_id", "events", "crc"))
        lease = self.ledger.acquire("owner", LEASE_S)
        assert isinstance(lease, Lease)
        self.lease = lease

    def shows(self, status: Status, watermark: int | None = None, **progress: object) -> None:
        news = Progress(status, watermark, **progress)  # type: ignore[arg-type]
        assert self.ledger.heartbeat(self.lease, LEASE_S, news)

    def halts(self, cause: str = "no column 'total'", label: str = "commit:42703") -> None:
        lease = self.ledger.halt(self.lease, cause, label)
        assert lease is not None
        self.lease = lease

    def falls_silent(self) -> None:
        """Its lease runs out: killed, frozen, or cut off."""
        self.ledger.heartbeat(self.lease, -1.0, Progress(Status.RUNNING))


@pytest.fixture
def owner(world: World) -> Iterator[Owner]:
    owner = Owner(world)
    yield owner
    owner.ledger.close()
