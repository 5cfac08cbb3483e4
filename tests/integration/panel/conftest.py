"""A small shop's projections as a busy night leaves them: running, catching up, paused, halted, orphaned."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from scriba import OrmTarget, Skip, projection, registry
from scriba.models import Audit, DeadLetter, Lane, ProjectionState, Sample, Segment
from scriba.protocols import Identity
from scriba.registry import find
from scriba.testing import MemorySource

NOW = datetime.now(UTC)


class Scene:
    """Declares projections and writes the rows that their owners would have written."""

    def declare(self, name: str, version: int = 1, *, using: str = "default") -> Identity:
        @projection(name, version=version, source=MemorySource(), target=OrmTarget(using=using), parallelism=2)
        def handler(event: object, meta: object) -> Skip:
            return Skip()

        return find((name, version)).identity

    def rows(self, identity: Identity, *, live: bool = True, using: str = "default", **columns: Any) -> None:
        """Write wish, halt, owner and progress, by default those of a healthy running projection."""
        key = {"projection_name": identity.name, "projection_version": identity.version}
        of_state = {name: columns.pop(name) for name in STATE if name in columns}
        ProjectionState.objects.using(using).create(**key, **of_state)
        until = datetime.now(UTC) + timedelta(minutes=10 if live else -10)
        defaults = {
            "owner": "worker-2:4711:9f3c1a",
            "status": "running",
            "lease_expires_at": until,
            "watermark": 90,
            "head": 100,
        }
        segment = Segment.objects.using(using).create(**key, **defaults | columns)
        applied = columns.get("watermark", 90) or 0
        Lane.objects.using(using).create(
            segment=segment, lane=0, applied=applied, skipped=applied // 40, dead_lettered=3
        )

    def hour(self, identity: Identity, *, rate: float, behind: int = 0, swell: float = 0.3) -> None:
        """Write an hour of samples: a rate that swells and a lag that follows it."""
        key = {"projection_name": identity.name, "projection_version": identity.version}
        settled, samples = 1_000_000.0, []
        for number in range(358):
            wave = (
                1 + swell * math.sin(number / 21) + 0.06 * math.sin(number * 1.9) + (1.1 if 200 < number < 226 else 0)
            )
            settled += max(0.0, rate * wave) * 10
            grown = (358 - number) / 358 + 1 if behind > 100_000 else max(0.0, (number - 190) / 168)
            lag = behind * grown if behind else max(0.0, 4 * math.sin(number / 5) + 3 * math.sin(number * 1.3))
            samples.append(
                Sample(
                    **key, taken_at=NOW - timedelta(seconds=10 * (358 - number)), watermark=int(settled),
                    head=int(settled + lag), settled=int(settled), lag_seconds=lag,
                )
            )  # fmt: skip
        Sample.objects.bulk_create(samples)

    def letters(self, identity: Identity, number: int, **columns: Any) -> list[DeadLetter]:
        key = {"projection_name": identity.name, "projection_version": identity.version}
        first = DeadLetter.objects.count() * 10 + 1
        defaults = {
            "event_type": "OrderPlaced", "error_kind": "KeyError", "error_message": "'shipping_address'", "fingerprint": "6f1c2d",
        }  # fmt: skip
        return DeadLetter.objects.bulk_create(
            [
                DeadLetter(**key, position=first + n, **{"stream_id": f"order-{first + n}", **defaults, **columns})
                for n in range(number)
            ]
        )

    def busy_night(self) -> None:
        """Everything that the page can show, at once."""
        orders, one, two = self.declare("orders"), self.declare("invoices"), self.declare("invoices", 2)
        search, stock = self.declare("search"), self.declare("stock")
        self.rows(orders, watermark=1_482_113, head=1_482_113, rate=412.0, watermark_at=NOW)
        self.rows(
            one, watermark=1_482_090, head=1_482_113, rate=97.0, watermark_at=NOW - timedelta(seconds=4),
            reason="what is written behind position 1482090 waits for process 2041 of 'nightly-import', idle in transaction, "
            "its transaction open for 192 s: INSERT INTO shop_event (stream_id, type, data) VALUES …",
        )  # fmt: skip
        self.rows(two, watermark=611_240, head=1_482_113, rate=3_870.0, watermark_at=NOW - timedelta(hours=7))
        self.rows(
            search, live=False, watermark=1_480_002, head=1_482_113, watermark_at=NOW - timedelta(minutes=31),
            halt_cause='commit:42703 (undefined_column): column "boost" of relation "search_document" does not exist\n'
            'LINE 1: INSERT INTO "search_document" ("id", "boost") VALUES …\n                                            ^',
            halt_label="commit:42703 (undefined_column)", halted_at=NOW,
        )  # fmt: skip
        self.rows(
            stock, status="paused", wish="paused", wish_by="ann (admin)", wish_reason="stock-taking until 06:00",
            watermark=1_481_900, head=1_482_113, watermark_at=NOW - timedelta(minutes=12),
        )  # fmt: skip
        self.rows(Identity("old_report", 1), live=False, watermark=90_210, head=1_300_000, owner="")
        for identity, rate, behind in (
            (orders, 420, 0),
            (one, 100, 0),
            (two, 3_900, 870_873),
            (stock, 80, 213),
            (search, 60, 2_111),
        ):
            self.hour(identity, rate=rate, behind=behind)
        self.letters(one, 1_204)
        self.letters(one, 3, error_kind="commit:23505 (unique_violation)", fingerprint="a1", event_type="InvoiceIssued",
                     error_message='duplicate key value violates unique constraint "invoice_number_key"')  # fmt: skip
        self.letters(two, 41, status="parked", error_kind="parked", fingerprint="b2", stream_id="order-9",
                     error_message="held behind an earlier dead letter of the same key")  # fmt: skip
        for action, actor, detail in (
            ("stop", "bob (admin)", ""),
            ("replay", "bob (admin)", "1204 letters"),
            ("pause", "ann (admin)", ""),
        ):
            reason = "stock-taking until 06:00" if action == "pause" else ""
            Audit.objects.create(projection_name="stock" if action == "pause" else "invoices", projection_version=1,
                                 action=action, actor=actor, detail=detail, reason=reason)  # fmt: skip


STATE = ("wish", "wish_by", "wish_reason", "halt_cause", "halt_label", "halted_at")


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    """Only what a test declares is declared."""
    monkeypatch.setattr(registry, "_registry", {})
    return Scene()
