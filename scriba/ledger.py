"""The ledger: who owns a projection, what is wished of it, how far it is. Rows, a database clock, and guarded writes.

No lock and no session outlives a statement here, so poolers and fail-overs do not matter: ownership is a row with an
owner, an epoch and the end of a lease. What always holds:

* every write to a segment carries the epoch that its writer owns; a write of another epoch changes nothing;
* watermark and ceiling only rise; the database's clock alone decides whether a lease has run out;
* when :meth:`PgLedger.acquire` has returned a lease, no transaction of an older epoch is open and none can begin.
"""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING, Any, Final

from scriba.audit import AUDITED
from scriba.connection import OwnConnection
from scriba.exceptions import ConfigurationError, ScribaError
from scriba.failure import classify
from scriba.listening import Switchboard
from scriba.protocols import FailureKind, FenceLost, Holder, Lease, LetterWish, Orders, Resume, Shard, Wish
from scriba.samples import PRUNE_EVERY_S, forget_old_records, take_sample
from scriba.stored_json import storable_text
from scriba.takeover import insist

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from django.db.backends.utils import CursorWrapper

    from scriba.connection import Row
    from scriba.protocols import Identity, Progress, Recorded

__all__ = ["SETTLED_CHANNEL", "WAITED_FOR_S", "WISH_CHANNEL", "PgLedger", "wish_board"]

WISH_CHANNEL: Final = "scriba_wish"  #: NOTIFY with the payload ``name:version``: a wish changed, a segment became free

SETTLED_CHANNEL: Final = "scriba_settled"  #: the same payload: somebody waits, and there is something new to see

WAITED_FOR_S: Final = 3.0  #: so long after :func:`~scriba.wait_for` said that it waits, somebody waits

LONGEST_TEXT: Final = 10_000  #: characters of a cause or a reason

_WHOLE: Final = Shard()
_COUNTERS: Final = ("applied", "skipped", "dead_lettered", "deduplicated", "unmatched")
_OPTIONS: Final = ("partition_by", "source", "hash_name")


class PgLedger:
    """The ledger of one projection in the database `using`. One thread at a time; opens its connection when needed."""

    def __init__(self, identity: Identity, using: str, *, shard: Shard = _WHOLE) -> None:
        self._identity = identity
        self._shard = shard
        self._connection = OwnConnection(using)
        self._pruned_at = float("-inf")
        self._row: dict[str, Any] = {
            "name": identity.name,
            "version": identity.version,
            "partition": shard.partition,
            "slice_from": shard.slice_from,
            "slice_to": shard.slice_to,
        }

    # --- rows and orders ----------------------------------------------------------------------------------

    def register(self, recorded: Recorded) -> None:
        """Create the projection's rows if they are missing; refuse a start with other recorded options.

        Raises :class:`~scriba.exceptions.ConfigurationError` that names what changed and the cure.
        """
        known = self._recorded()
        if known is None or not known[-1]:  # the last one is empty until a first start has recorded all of them
            self._record(recorded)
            known = self._recorded()
        changed = [
            f"{option} was {old!r} and is now {new!r}"
            for option, old, new in zip(_OPTIONS, known or recorded, recorded, strict=True)
            if old != new
        ]
        if changed:
            name, version = self._identity
            msg = (
                f"{self._identity} cannot start: {'; '.join(changed)}. Its cursors were written under the recorded "
                "options; going on with others would lose events or apply them twice. Give the projection a new "
                f"version (version={version + 1}), or make it forget everything: manage.py scriba_reset {name}:{version}"
            )
            raise ConfigurationError(msg)

    def orders(self) -> Orders:
        """Read the wish and the halt. Without a row the wish is *running*."""
        found = self._connection.rows(
            "SELECT wish, halt_cause, halt_label, reset_count, "
            "       COALESCE(waited_at > now() - make_interval(secs => %(waited_s)s), false) "
            f"FROM scriba_projections WHERE {_PROJECTION}",
            self._row | {"waited_s": WAITED_FOR_S},
        )
        if not found:
            return Orders(Wish.RUNNING)
        wish, cause, label, resets, waited_for = found[0]
        return Orders(Wish(wish), cause, label, resets, waited_for)

    def set_wish(self, wish: Wish, *, by: str = "", reason: str = "") -> None:
        """Set the wish without asking for the state; *running* after *stopped* leaves a halt behind."""
        leaves_halt = "excluded.wish = 'running' AND known.wish = 'stopped'"
        texts = {"wish": wish.value, "by": _stored(by), "reason": _stored(reason), "action": _ACTIONS[wish]}
        self._connection.rows(
            "WITH done AS (INSERT INTO scriba_projections AS known "
            "  (projection_name, projection_version, wish, wish_by, wish_reason) "
            "  VALUES (%(name)s, %(version)s, %(wish)s, %(by)s, %(reason)s) "
            "  ON CONFLICT (projection_name, projection_version) DO UPDATE SET wish = excluded.wish, "
            "    wish_by = excluded.wish_by, wish_reason = excluded.wish_reason, wished_at = now(), "
            f"   halt_cause = CASE WHEN {leaves_halt} THEN '' ELSE known.halt_cause END, "
            f"   halt_label = CASE WHEN {leaves_halt} THEN '' ELSE known.halt_label END, "
            f"   halted_at = CASE WHEN {leaves_halt} THEN NULL ELSE known.halted_at END RETURNING 1), "
            f"noted AS ({AUDITED}) SELECT pg_notify(%(channel)s, %(payload)s) FROM done",
            self._row | self._notice() | texts,
        )

    # --- ownership ----------------------------------------------------------------------------------------

    def acquire(self, owner: str, lease_s: float) -> Lease | Holder:
        """Take the segment if it is free or its lease ran out, in two steps, or say who holds it.

        First the epoch is raised and committed: from now on every new batch of the old owner is refused. Then those
        that had passed their check before are waited for, and ended if they do not end.
        """
        holder = self._holder(owner)
        if holder is not None:
            return holder
        claim = self._claim(owner, lease_s)
        lease = self._clear(claim, lease_s) if claim else None
        return lease or self._holder(owner) or Holder("", 0.0)

    def _holder(self, owner: str) -> Holder | None:
        """Return the live owner, or None when `owner` may have the segment. A look costs no write."""
        found = self._connection.rows(
            f"SELECT owner, EXTRACT(EPOCH FROM lease_expires_at - now())::float8, {_IS_FREE} "
            f"FROM scriba_segments WHERE {_SEGMENT}",
            self._row | {"owner": owner},
        )
        if not found:
            msg = f"{self._identity} has no row in scriba_segments: it was deleted while the projection ran. Start it again."
            raise ScribaError(msg)
        held_by, expires_in_s, is_free = found[0]
        return None if is_free else Holder(held_by, max(0.0, expires_in_s))

    def _claim(self, owner: str, lease_s: float) -> Lease | None:
        """Step one: a plain guarded update. It waits for no batch, so nobody who keeps coming can starve it."""
        with self._connection.transaction() as cursor:
            found = insist(
                cursor,
                "UPDATE scriba_segments SET owner = %(owner)s, epoch = epoch + 1, status = 'initializing', reason = '', "
                f"  heartbeat_at = now(), lease_expires_at = {_LEASE_END} "
                f"WHERE {_SEGMENT} AND {_IS_FREE} RETURNING id, epoch",
                self._row | {"owner": owner, "lease_s": lease_s},
                using=self._connection.using,
                identity=self._identity,
            )
        if not found:
            return None
        segment, epoch = found[0]
        return Lease(segment, owner, epoch, self._shard.partition, self._shard.slice_from, self._shard.slice_to)

    def _clear(self, claim: Lease, lease_s: float) -> Lease | None:
        """Step two: wait until no batch leans on the row, and raise the epoch once more in the same transaction.

        The second raise is for a check that saw the row as it was before step one and has not been answered yet: an
        unchanged row would let it pass, a row changed under FOR UPDATE makes PostgreSQL evaluate it again.
        """
        with self._connection.transaction() as cursor:
            if not self._lock(cursor, claim):
                return None
            cursor.execute(
                "UPDATE scriba_segments SET epoch = epoch + 1, heartbeat_at = clock_timestamp(), "
                f"  lease_expires_at = {_LEASE_END} WHERE id = %(segment)s RETURNING epoch",
                {"segment": claim.segment, "lease_s": lease_s},
            )
            (epoch,) = cursor.fetchone() or (claim.epoch,)
        return claim._replace(epoch=epoch)

    def resume(self, lease: Lease) -> Resume:
        """Read where to continue. Raises :class:`FenceLost` when the epoch is not ours any more."""
        found = self._connection.rows(
            "SELECT segment.watermark, segment.ceiling, projection.floor, segment.anchor "
            "FROM scriba_segments AS segment JOIN scriba_projections AS projection "
            "  USING (projection_name, projection_version) "
            f"WHERE segment.id = %(segment)s AND {_OURS}",
            _params(lease),
        )
        if not found:
            raise FenceLost
        watermark, ceiling, floor, anchor = found[0]
        ceiling = self._first_ceiling(lease) if ceiling is None else ceiling
        return Resume(watermark, ceiling, -1 if floor is None else floor, anchor)

    def _first_ceiling(self, lease: Lease) -> int:
        """Start a new segment's ceiling at the highest cursor there is: seeded and carried-over ones count.

        The only look at all cursors of a projection, and only before its first event.
        """
        found = self._connection.rows(
            "UPDATE scriba_segments SET ceiling = GREATEST(ceiling, watermark, COALESCE((SELECT max(position) "
            f"  FROM scriba_positions WHERE {_PROJECTION}), -1)) WHERE id = %(segment)s AND {_OURS} RETURNING ceiling",
            self._row | _params(lease),
        )
        if not found:
            raise FenceLost
        return int(found[0][0])

    def open_lanes(self, lease: Lease, lanes: int) -> None:
        """Make sure that each lane of the segment has its counter row."""
        self._connection.rows(
            "INSERT INTO scriba_lanes (segment_id, lane) SELECT id, lane "
            f"FROM scriba_segments, generate_series(0, %(lanes)s - 1) AS lane WHERE id = %(segment)s AND {_OURS} "
            "ON CONFLICT (segment_id, lane) DO NOTHING",
            _params(lease) | {"lanes": lanes},
        )

    def heartbeat(self, lease: Lease, lease_s: float, progress: Progress) -> bool:
        """Prolong the lease and report. False: it is not ours any more."""
        return self._write(
            lease,
            f"lease_expires_at = {_LEASE_END}, heartbeat_at = now(), status = %(status)s, reason = %(reason)s, "
            f"rate = %(rate)s, {_PROGRESS}",
            {"lease_s": lease_s, **_reported(progress)},
        )

    def letter_wishes(self, limit: int) -> Sequence[LetterWish]:
        """Return the oldest wishes that operators have written on unresolved letters, by position."""
        found = self._connection.rows(
            "SELECT id, position, partition, stream_id, wish, wish_by, allow_out_of_order FROM scriba_dead_letters "
            f"WHERE {_PROJECTION} AND wish <> '' AND status IN ('open', 'parked') ORDER BY position LIMIT %(limit)s",
            self._row | {"limit": limit},
        )
        return [LetterWish(*row) for row in found]

    def release(self, lease: Lease) -> None:
        """Give the segment up at once, so that a standby need not wait for the lease to run out."""
        self._connection.rows(
            "WITH done AS (UPDATE scriba_segments SET owner = '', lease_expires_at = now(), status = 'not running', "
            f" reason = '', rate = 0 WHERE id = %(segment)s AND {_OURS} RETURNING 1) "
            "SELECT pg_notify(%(channel)s, %(payload)s) FROM done",
            _params(lease) | self._notice(),
        )

    # --- how far it is ------------------------------------------------------------------------------------

    def raise_ceiling(self, lease: Lease, ceiling: int) -> bool:
        """Durably promise that no handed-out event passes `ceiling` (never lowered). False: fenced."""
        return self._write(lease, "ceiling = GREATEST(ceiling, %(ceiling)s)", {"ceiling": ceiling})

    def save_watermark(self, lease: Lease, progress: Progress) -> bool:
        """Durably move the watermark (never back). False: fenced. The lease is the heartbeat's business."""
        return self._write(lease, _PROGRESS, _reported(progress))

    def save_anchor(self, lease: Lease, anchor: str) -> bool:
        """Durably keep what the source says that positions are counted in. False: fenced."""
        return self._write(lease, "anchor = %(anchor)s", {"anchor": _stored(anchor)})

    def halt(self, lease: Lease, cause: str, label: str) -> Lease | None:
        """Record a halt (the first cause is kept) and raise the epoch, so that nothing commits after it.

        A batch that is still open, because its handler did not come back in time, is ended like one in a takeover.
        Returns the lease under its new epoch; None when the epoch is not ours.
        """
        cause, label = _stored(cause) or "no cause given", _stored(label)
        with self._connection.transaction() as cursor:
            if not self._lock(cursor, lease):
                return None
            cursor.execute(
                "UPDATE scriba_segments SET epoch = epoch + 1, status = 'halted', reason = %(cause)s "
                "WHERE id = %(segment)s RETURNING epoch",
                {"segment": lease.segment, "cause": cause},
            )
            (epoch,) = cursor.fetchone() or (lease.epoch,)
            cursor.execute(
                "UPDATE scriba_projections SET halt_cause = %(cause)s, halt_label = %(label)s, halted_at = now() "
                f"WHERE {_PROJECTION} AND halted_at IS NULL",
                self._row | {"cause": cause, "label": label},
            )
        return lease._replace(epoch=epoch)

    def sample(self, lease: Lease, progress: Progress) -> bool:
        """Note how far it is, for the charts; old notes and old records are forgotten. False: fenced, nothing was noted."""
        values = self._row | _reported(progress) | _params(lease)
        is_ours = take_sample(self._connection.rows, values)
        if is_ours and time.monotonic() - self._pruned_at >= PRUNE_EVERY_S:
            forget_old_records(self._connection.rows, self._row)
            self._pruned_at = time.monotonic()
        return is_ours

    def announce(self) -> None:
        """Wake those who wait for an event of the projection. In a transaction of its own, never in a batch's."""
        notice = {"channel": SETTLED_CHANNEL, "payload": str(self._identity)}
        self._connection.rows("SELECT pg_notify(%(channel)s, %(payload)s)", notice)

    def counters(self, lease: Lease) -> Mapping[str, int]:
        """Return the sums of the lanes' counters of this segment."""
        sums = ", ".join(f"COALESCE(sum({name}), 0)::bigint" for name in _COUNTERS)
        found = self._connection.rows(f"SELECT {sums} FROM scriba_lanes WHERE segment_id = %s", [lease.segment])
        return dict(zip(_COUNTERS, found[0], strict=True))

    def transient(self, error: Exception) -> bool:
        """Say whether `error`, raised by this ledger, may go away by itself."""
        return classify(error).kind is FailureKind.TRANSIENT

    def close(self) -> None:
        """Close the connection. Twice is fine."""
        self._connection.close()

    # --- helpers ------------------------------------------------------------------------------------------

    def _recorded(self) -> Row | None:
        """Return what is recorded, in the order of :class:`Recorded`; None when a row is missing."""
        found = self._connection.rows(
            "SELECT partition_by, source_identity, hash_name FROM scriba_projections "
            f"WHERE {_PROJECTION} AND EXISTS (SELECT FROM scriba_segments WHERE {_SEGMENT})",
            self._row,
        )
        return found[0] if found else None

    def _record(self, recorded: Recorded) -> None:
        self._connection.rows(
            "INSERT INTO scriba_projections (projection_name, projection_version) VALUES (%(name)s, %(version)s) "
            "ON CONFLICT (projection_name, projection_version) DO NOTHING",
            self._row,
        )
        self._connection.rows(
            "INSERT INTO scriba_segments (projection_name, projection_version, partition, slice_from, slice_to) "
            "VALUES (%(name)s, %(version)s, %(partition)s, %(slice_from)s, %(slice_to)s) "
            "ON CONFLICT (projection_name, projection_version, partition, slice_from) DO NOTHING",
            self._row,
        )
        self._connection.rows(
            "UPDATE scriba_projections SET partition_by = %(partition_by)s, source_identity = %(source)s, "
            f"  hash_name = %(hash_name)s WHERE {_PROJECTION} AND hash_name = ''",
            self._row | recorded._asdict(),
        )

    def _lock(self, cursor: CursorWrapper, lease: Lease) -> bool:
        """Wait until no batch leans on the segment's row, and lock it. False: the epoch is another one."""
        return bool(
            insist(
                cursor,
                f"SELECT 1 FROM scriba_segments WHERE id = %(segment)s AND {_OURS} FOR UPDATE",
                _params(lease),
                using=self._connection.using,
                identity=self._identity,
            )
        )

    def _write(self, lease: Lease, assignments: str, values: Mapping[str, Any]) -> bool:
        """Change the segment's row if the epoch is still ours; say whether it was."""
        return bool(
            self._connection.rows(
                f"UPDATE scriba_segments SET {assignments} WHERE id = %(segment)s AND {_OURS} RETURNING 1",
                {**values, **_params(lease)},
            )
        )

    def _notice(self) -> dict[str, Any]:
        return {"channel": WISH_CHANNEL, "payload": str(self._identity)}


def _params(lease: Lease) -> dict[str, Any]:
    return {"segment": lease.segment, "epoch": lease.epoch, "owner": lease.owner}


def _reported(progress: Progress) -> dict[str, Any]:
    return progress._asdict() | {"status": progress.status.value, "reason": _stored(progress.reason)}


def _stored(text: str) -> str:
    """A message must never be the reason why it is not recorded."""
    return storable_text(text, LONGEST_TEXT)


@functools.cache
def wish_board(using: str) -> Switchboard:
    """Return what tells this process of wishes in the database `using`: payloads are projections, ``name:version``."""
    return Switchboard(using, WISH_CHANNEL)


_ACTIONS: Final = {Wish.RUNNING: "start", Wish.PAUSED: "pause", Wish.STOPPED: "stop"}  #: as the records call it
_PROJECTION: Final = "projection_name = %(name)s AND projection_version = %(version)s"
_SEGMENT: Final = f"{_PROJECTION} AND partition = %(partition)s AND slice_from = %(slice_from)s"
_IS_FREE: Final = "(owner = '' OR owner = %(owner)s OR lease_expires_at IS NULL OR lease_expires_at < now())"
#: The owner too: after a release the epoch is still ours, and a late heartbeat must not bring the lease back to life.
_OURS: Final = "epoch = %(epoch)s AND owner = %(owner)s"
_LEASE_END: Final = "clock_timestamp() + make_interval(secs => %(lease_s)s)"
#: GREATEST passes over NULL on either side; the time belongs to whichever watermark stays.
_PROGRESS: Final = """
  watermark_at = CASE WHEN %(watermark)s::bigint > COALESCE(watermark, -1)
                      THEN COALESCE(%(watermark_at)s::timestamptz, watermark_at) ELSE watermark_at END,
  watermark = GREATEST(watermark, %(watermark)s::bigint),
  head_at = CASE WHEN %(head)s::bigint IS NULL THEN head_at ELSE %(head_at)s::timestamptz END,
  head = COALESCE(%(head)s::bigint, head)
"""
