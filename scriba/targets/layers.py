"""The order that folding keeps: declared writes go into layers, and layers are executed one after the other.

Always holds: inside a layer no two entries touch the same row, and entries whose order could matter for another
reason share no layer either, so the statements of a layer commute. A later write is merged into an earlier entry
of its row only when nothing can tell the difference. Must not know Django or SQL: tables, keys and columns are
anything hashable, and what may be overwritten unseen is asked of the table.

Two things decide the layer of a write:

* its key: a write on a row that already has an entry is merged into it, or goes behind it;
* its uses of shared things (`Use`), such as the unique values of a table: uses in one mode commute, a use in
  another mode goes behind all of them.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

__all__ = ["Entry", "Layers", "Op", "Table", "Use"]


class Op(enum.Enum):
    """What one entry does to its row."""

    INSERT = "insert"
    UPDATE = "update"
    DELETE = "delete"
    UPSERT = "upsert"

    __hash__ = object.__hash__  # members are single objects; the enumeration's own hash runs Python for each write


class Use(NamedTuple):
    """A use of something that rows of one table share.

    Uses of `thing` in the same `mode` commute, unless they are `ordered`: those keep their order, which inside a
    layer is the order of the entries, and each of them happens. A use in another mode goes to a later layer.
    """

    thing: str
    mode: Hashable
    ordered: bool = False


class Table(Protocol):
    """What layering has to know of a table."""

    def may_overwrite(self, entry: Entry, columns: Iterable[Any]) -> bool:
        """Say whether giving `columns` new values in `entry` is the same as writing both states in turn.

        False when the state in between could be refused (a check, a value too long), or for a column whose
        value the entry leaves to the database.
        """
        ...

    def may_forget(self, entry: Entry) -> bool:
        """Say whether everything `entry` writes may stay unwritten because the row is replaced or deleted."""
        ...


class Entry:
    """One row's write inside a layer. `count` is how many declared writes must each find the row."""

    __slots__ = ("count", "key", "layer", "obj", "op", "table", "takes_over", "values")

    def __init__(  # noqa: PLR0913 - what a write is made of
        self,
        op: Op,
        table: Table,
        key: Hashable | None,
        values: dict[Any, str | None],
        takes_over: tuple[Any, ...] | None = None,
        obj: Any = None,
    ) -> None:
        self.op = op
        self.table = table
        self.key = key  #: None for an insert whose key the database will choose
        self.values = values
        self.takes_over = takes_over  #: an upsert's columns that an existing row takes over
        self.obj = obj
        self.count = 1
        self.layer = 0


class Layers:
    """Entries by layer, in delivery order inside each."""

    def __init__(self) -> None:
        self._layers: list[list[Entry]] = []
        self._rows: dict[Table, dict[Hashable, Entry]] = {}
        self._used: dict[tuple[Table, str], _Used] = {}

    def __bool__(self) -> bool:
        return bool(self._layers)

    def place(self, entry: Entry, uses: Sequence[Use] = ()) -> None:
        """Merge `entry` into the earlier one of its row, or put it into the earliest layer that keeps the order."""
        layer = self._earliest(entry.table, uses) if uses else 0
        rows = self._rows.get(entry.table)
        if rows is None:
            rows = self._rows[entry.table] = {}
        earlier = rows.get(entry.key) if entry.key is not None else None
        if earlier is None:
            self._append(entry, layer)
        elif layer <= earlier.layer and not any(use.ordered for use in uses) and _merge(earlier, entry):
            entry = earlier
        else:
            self._append(entry, max(layer, earlier.layer + 1))
        if entry.key is not None:
            rows[entry.key] = entry
        for use in uses:
            self._used[entry.table, use.thing].note(use, entry.layer)

    def drain(self) -> list[list[Entry]]:
        """Hand over the layers in their order and forget everything."""
        layers = self._layers
        self._layers, self._rows, self._used = [], {}, {}
        return layers

    def _append(self, entry: Entry, layer: int) -> None:
        if layer == len(self._layers):
            self._layers.append([])
        entry.layer = layer
        self._layers[layer].append(entry)

    def _earliest(self, table: Table, uses: Sequence[Use]) -> int:
        return max(self._used.setdefault((table, use.thing), _Used(use.mode)).earliest(use) for use in uses)


class _Used:
    """In which layers a shared thing has been used: `base` and above in the present mode, `top` at most."""

    __slots__ = ("base", "mode", "top")

    def __init__(self, mode: Hashable) -> None:
        self.mode = mode
        self.base = 0
        self.top = 0

    def earliest(self, use: Use) -> int:
        if use.mode != self.mode:
            return self.top + 1
        return self.top if use.ordered else self.base

    def note(self, use: Use, layer: int) -> None:
        if use.mode != self.mode:
            self.mode = use.mode
            self.base = self.top + 1
        self.top = max(self.top, layer)


def _merge(earlier: Entry, later: Entry) -> bool:
    """Fold `later` into `earlier`, the last entry of the same row, if one write can stand for both."""
    merge = _MERGES.get((earlier.op, later.op))
    return merge is not None and merge(earlier, later)


def _set_values(earlier: Entry, later: Entry) -> bool:
    """An update goes into the row that is about to be written."""
    if earlier.takes_over is not None and not set(later.values) <= set(earlier.takes_over):
        return False  # the existing row would keep what the update changes
    if not earlier.table.may_overwrite(earlier, later.values):
        return False
    earlier.values.update(later.values)
    if earlier.op is Op.UPDATE:
        earlier.count += later.count
    return True


def _delete_instead(earlier: Entry, later: Entry) -> bool:
    """An update before a delete leaves nothing behind; both still have to find the row."""
    if not earlier.table.may_forget(earlier):
        return False
    earlier.op = Op.DELETE
    earlier.values = {}
    earlier.count += later.count
    return True


def _put_again(earlier: Entry, later: Entry) -> bool:
    """The later of two upserts wins when it gives every column that the earlier one gives."""
    if earlier.takes_over != later.takes_over or not _is_whole(earlier) or not _is_whole(later):
        return False
    if list(earlier.values) != list(later.values) or not earlier.table.may_forget(earlier):
        return False
    earlier.values = later.values
    return True


def _is_whole(upsert: Entry) -> bool:
    """Say whether an existing row takes over everything but its key."""
    key_columns = len(upsert.key) if isinstance(upsert.key, tuple) else 1
    return len(upsert.values) == key_columns + len(upsert.takes_over or ())


_MERGES: Mapping[tuple[Op, Op], Any] = {
    (Op.INSERT, Op.UPDATE): _set_values,
    (Op.UPDATE, Op.UPDATE): _set_values,
    (Op.UPSERT, Op.UPDATE): _set_values,
    (Op.UPDATE, Op.DELETE): _delete_instead,
    (Op.UPSERT, Op.UPSERT): _put_again,
}
