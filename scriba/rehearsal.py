"""A replay that leaves nothing behind: which dead letters would pass now, and what they would change.

Each key's letters are run in order through the same handler, in one transaction of the calling process, which is
always rolled back. What always holds: no row, no cursor, no letter and no ``on_commit`` hook is left; nobody's lease
is touched; the live projection is kept waiting by our row locks for one key's events at most, and we never wait for
its locks for long. Handlers see ``meta.replaying``: what they do outside of the database is theirs to hold back.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from django.db import connections
from django.db.models import Q

from scriba.engine.handling import DecodeFailed, FailReturned, HandlerCall, HandlerExited
from scriba.engine.lanes import Routed
from scriba.engine.letters import describe
from scriba.engine.replay import OUT_OF_ORDER, refusal, rekeyed, restored
from scriba.event import SkipEvent, storable_key
from scriba.exceptions import ConfigurationError
from scriba.info import alias_of
from scriba.protocols import FailureKind, Shard, WriteFailed
from scriba.registry import find
from scriba.results import Fail, Insert, Upsert

if TYPE_CHECKING:
    from scriba.models import DeadLetter
    from scriba.protocols import Batch, StoredLetter, Subscription, Writer
    from scriba.registry import Projection

__all__ = ["Change", "Rehearsal", "rehearse"]

MOST_ROWS: Final = 20  #: rows of one write whose values are compared; all are counted
LOCK_TIMEOUT: Final = "2s"
_RESOLVED: Final = "resolved already"
_LATE: Final = "a later event of the same key has been applied already"
_PARKED_BEHIND: Final = "parked behind letter {letter}"
_BEHIND_EARLIER: Final = "behind an earlier event of the same key, which would not pass"


class Change(NamedTuple):
    """One row of a read model, as it was and as it would be; None where there is no row."""

    model: str
    key: Any
    before: Mapping[str, Any] | None
    after: Mapping[str, Any] | None

    def __str__(self) -> str:
        if self.before is None or self.after is None:
            row = self.before if self.after is None else self.after
            fields = ", ".join(f"{name}={value!r}" for name, value in (row or {}).items())
            return f"{'-' if self.after is None else '+'} {self.model}({fields})"
        changed = [name for name, value in self.after.items() if self.before[name] != value]
        words = ", ".join(f"{name}: {self.before[name]!r} → {self.after[name]!r}" for name in changed)
        return f"~ {self.model} {self.key!r} {words or 'as it is'}"


class Rehearsal(NamedTuple):
    """What would become of one letter: `outcome` is ``passes``, ``skips``, ``fails``, ``waits``, ``refused`` or ``busy``.

    ``waits`` is what stays parked behind another letter, ``busy`` what could not be tried, because the database or
    another transaction was in the way: the next try may find out.
    `rows` counts (inserted, updated, deleted) rows by table, whichever way they were written, cascades included;
    `changes` are the rows of declared writes, at most 20 per write.
    """

    letter: DeadLetter
    outcome: str
    error_kind: str = ""
    error: str = ""
    rows: Mapping[str, tuple[int, int, int]] = {}
    changes: Sequence[Change] = ()

    @property
    def would_pass(self) -> bool:
        return self.outcome in {"passes", "skips"}


def rehearse(letters: Iterable[DeadLetter], *, allow_out_of_order: bool = False) -> Generator[Rehearsal, None, None]:
    """Say of each of `letters` what its replay would do now; nothing is left behind.

    Raises :class:`~scriba.exceptions.UnknownProjection` for letters of a projection that is not registered, and
    :class:`~scriba.exceptions.ConfigurationError` for a target that is no Django database.
    """
    identified = sorted(letters, key=_place)
    for identity, of_one in itertools.groupby(identified, key=lambda letter: _place(letter)[:2]):
        stage = _Stage(find(identity), allow_out_of_order=allow_out_of_order)
        try:
            for _, of_key in itertools.groupby(of_one, key=lambda letter: _place(letter)[:4]):
                yield from stage.play(list(of_key))
        finally:
            stage.close()


def _place(letter: DeadLetter) -> tuple[str, int, str, str, int]:
    return letter.projection_name, letter.projection_version, letter.partition, letter.stream_id, letter.position


class _RolledBack(Exception):  # noqa: N818 - the ordinary end
    """Leaves a transaction that must not commit."""


class _Stage:
    """One projection's handler, source and database, for a rehearsal."""

    def __init__(self, projection: Projection, *, allow_out_of_order: bool) -> None:
        if getattr(projection.target, "using", None) is None:
            msg = f"{projection.identity} writes to {projection.target.identity()}: only Django databases can be rehearsed in."
            raise ConfigurationError(msg)
        self._projection = projection
        self._alias = alias_of(projection)
        self._allow_out_of_order = allow_out_of_order
        self._writer: Writer = projection.target.open(projection.identity)
        self._subscription: Subscription = projection.source.subscribe(projection.identity, [Shard()])

    def close(self) -> None:
        self._subscription.close()

    def play(self, letters: Sequence[DeadLetter]) -> list[Rehearsal]:
        """Run the letters of one key in order, each seeing what those before it wrote, and roll all of it back."""
        found: list[Rehearsal] = []
        try:
            head = self._head_of(letters[0])
            if head is not None:
                return [Rehearsal(letter, "waits", error=_PARKED_BEHIND.format(letter=head)) for letter in letters]
            held: set[str] = set()  # the keys that an earlier one would still hold
            with self._writer.batch((), verdict=True) as batch:
                self._execute(f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT}'")
                for letter in letters:
                    found.append(self._one(batch, letter, held))  # noqa: PERF401 - kept when the next one raises
                raise _RolledBack  # noqa: TRY301 - there is no other way out of a batch without a commit
        except _RolledBack:
            return found
        except Exception as error:  # noqa: BLE001 - the transaction is past saving; it is gone, and the rest untried
            return found + [self._failed(letter, error) for letter in letters[len(found) :]]

    def _head_of(self, letter: DeadLetter) -> int | None:
        """Return the letter that a parked one waits behind and that is not tried with it; None when it is free."""
        if letter.status != "parked":
            return None
        return self._first_before(letter, letter.stream_id)

    def _first_before(self, letter: DeadLetter, key: str) -> int | None:
        name, version, partition, _, position = _place(letter)
        found = self._execute(_HEAD, [name, version, partition, storable_key(key), position])
        return found[0][0] if found else None

    def _one(self, batch: Batch, letter: DeadLetter, held: set[str]) -> Rehearsal:
        stored = None if letter.stream_id in held else batch.letter(letter.pk)
        if letter.stream_id in held:
            return Rehearsal(letter, "waits", error=_BEHIND_EARLIER)
        if stored is None:
            return Rehearsal(letter, "refused", error=_RESOLVED)
        event = self._subscription.read(stored.event.position, stored.event.partition)
        item = rekeyed(self._projection, stored, event) or Routed(restored(stored, self._subscription), stored.key)
        tried = self._tried(batch, letter, stored, item, held)
        if self._projection.on_failure == "park" and not tried.would_pass:
            held.add(stored.key if tried.outcome == "refused" else item.key)
        return tried

    def _tried(self, batch: Batch, letter: DeadLetter, stored: StoredLetter, item: Routed, held: set[str]) -> Rehearsal:
        """Say what becomes of a letter that is first in line for its own key, or moves to that of its event."""
        free = stored._replace(behind=None)  # those in front of it have been tried before it
        if why := refusal(batch, free, item.key, allow_out_of_order=self._allow_out_of_order):
            words = _LATE if why == OUT_OF_ORDER else why.removeprefix("refused: ")
            return Rehearsal(letter, "refused", error=words)
        if self._projection.on_failure == "park" and item.key != stored.key:
            if item.key in held:
                return Rehearsal(letter, "waits", error=_BEHIND_EARLIER)
            if (head := self._first_before(letter, item.key)) is not None:
                return Rehearsal(letter, "waits", error=_PARKED_BEHIND.format(letter=head))
        return self._run(batch, letter, item)

    def _run(self, batch: Batch, letter: DeadLetter, item: Routed) -> Rehearsal:
        rows = _Rows(self._alias)
        call = HandlerCall(self._projection, batch)
        call.item, call.replaying = item, True
        counted = self._counts()
        try:
            outcome = batch.trial(_with_writes(batch, call, rows))
        except SkipEvent:
            return Rehearsal(letter, "skips")
        except Exception as error:  # noqa: BLE001 - whatever it is, the operator wants to know
            return self._failed(letter, error)
        written = self._counts()
        tables = {
            table: (number[0] - known[0], number[1] - known[1], number[2] - known[2])
            for table, number in written.items()
            if number != (known := counted.get(table, (0, 0, 0)))
        }
        is_skip = outcome is not None and not outcome
        return Rehearsal(letter, "skips" if is_skip else "passes", rows=tables, changes=rows.changes())

    def _failed(self, letter: DeadLetter, error: Exception) -> Rehearsal:
        kind, words = self._described(error)
        failure = error.failure if isinstance(error, WriteFailed) else self._projection.target.classify(error)
        is_busy = not isinstance(error, _HandlerFailed) and failure.kind is FailureKind.TRANSIENT
        return Rehearsal(letter, "busy" if is_busy else "fails", kind, words)

    def _described(self, error: Exception) -> tuple[str, str]:
        """Return kind and message, as the letter would have them."""
        if isinstance(error, _HandlerFailed) and isinstance(error.__cause__, Exception):
            cause: BaseException = error.__cause__
            if isinstance(cause, FailReturned):
                found = describe(Fail(cause.args[0]))
            elif isinstance(cause, DecodeFailed) and cause.__cause__ is not None:
                found = describe(cause.__cause__)
                return f"decode:{type(cause.__cause__).__qualname__}", found.message
            else:
                found = describe(cause.__cause__ if isinstance(cause, HandlerExited) and cause.__cause__ else cause)
            return found.kind, found.message
        if isinstance(error, WriteFailed):
            return error.failure.label, describe(error.__cause__ or error).message
        return self._projection.target.classify(error).label or type(error).__qualname__, describe(error).message

    def _execute(self, sql: str, params: Sequence[Any] | None = None) -> list[tuple[Any, ...]]:
        with connections[self._alias].cursor() as cursor:
            cursor.execute(sql, params)
            return cursor.fetchall() if cursor.description else []

    def _counts(self) -> dict[str, tuple[int, int, int]]:
        """Return how many rows this transaction has written by now, by table: PostgreSQL counts them itself."""
        return {table: (inserted, updated, deleted) for table, inserted, updated, deleted in self._execute(_COUNTS)}


class _HandlerFailed(Exception):  # noqa: N818 - carries its cause out of the trial
    """The handler itself failed, with `__cause__`."""


def _with_writes(batch: Batch, call: HandlerCall, rows: _Rows) -> Callable[[], Sequence[Any] | None]:
    def run() -> Sequence[Any] | None:
        try:
            outcome = batch.attempt(call)
        except (SkipEvent, WriteFailed):
            raise
        except Exception as error:
            raise _HandlerFailed from error
        if outcome:
            writes = [outcome] if not isinstance(outcome, list | tuple) else outcome
            rows.look_before(writes)
            batch.add(outcome)
        return outcome

    return run


class _Rows:
    """The rows that declared writes are about, before and after."""

    def __init__(self, alias: str) -> None:
        self._alias = alias
        self._before: dict[tuple[Any, Any], Mapping[str, Any] | None] = {}
        self._unkeyed: list[Change] = []

    def look_before(self, writes: Sequence[Any]) -> None:
        for write in writes:
            if isinstance(write, Insert | Upsert):
                self._look_for(write)
            else:
                self._keep(write.model, write.filter)

    def changes(self) -> list[Change]:
        """Read the rows again, as they are now, and return what is different."""
        found = [*self._unkeyed]
        for (model, key), before in self._before.items():
            after = self._rows(model, Q(pk=key)).get(key)
            if before != after:
                found.append(Change(model._meta.label, key, before, after))
        return found

    def _look_for(self, write: Insert | Upsert) -> None:
        obj = write.obj
        names = getattr(write, "unique_fields", None)
        if names:
            self._keep(type(obj), {name: getattr(obj, name) for name in names})
        if obj.pk is not None:
            self._before.setdefault((type(obj), obj.pk), self._rows(type(obj), Q(pk=obj.pk)).get(obj.pk))
        elif not names:
            row = {field.attname: getattr(obj, field.attname) for field in obj._meta.concrete_fields}
            self._unkeyed.append(Change(obj._meta.label, None, None, row))

    def _keep(self, model: Any, wanted: Any) -> None:
        for key, row in self._rows(model, wanted if isinstance(wanted, Q) else Q(**wanted)).items():
            self._before.setdefault((model, key), row)

    def _rows(self, model: Any, wanted: Q) -> dict[Any, Mapping[str, Any]]:
        names = [field.attname for field in model._meta.concrete_fields]
        found = model._base_manager.using(self._alias).filter(wanted)[:MOST_ROWS]
        return {row.pk: {name: getattr(row, name) for name in names} for row in found}


_HEAD: Final = """
SELECT id FROM scriba_dead_letters
WHERE projection_name = %s AND projection_version = %s AND partition = %s AND stream_id = %s AND position < %s
  AND status IN ('open', 'parked')
ORDER BY position LIMIT 1
"""
_COUNTS: Final = """
SELECT relname, n_tup_ins, n_tup_upd, n_tup_del FROM pg_stat_xact_user_tables
WHERE n_tup_ins + n_tup_upd + n_tup_del > 0 AND relname NOT LIKE 'scriba\\_%'
"""
