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

__all__ = ["Entry", "Form", "Layers", "Op", "Table", "Use"]


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


class Form:
    """What the entries of one statement have in common: compared as an object, so that grouping them costs little.

    `takes_over` are the columns that an upsert's existing row takes over; `uses` what such a row shares with others.
    """

    __slots__ = ("_wider", "columns", "op", "sql", "table", "takes_over", "uses")

    def __init__(
        self,
        op: Op,
        table: Table,
        columns: tuple[Any, ...],
        takes_over: tuple[Any, ...] | None = None,
        uses: Sequence[Use] = (),
    ) -> None:
        self.op = op
        self.table = table
        self.columns = columns
        self.takes_over = takes_over
        self.uses = uses
        self.sql: dict[Any, str] = {}  #: whoever executes keeps compiled texts here
        self._wider: dict[tuple[Any, ...], Form] = {}

    def with_columns(self, columns: tuple[Any, ...]) -> Form:
        """Return the same form for other columns: one object for the same ones."""
        found = self._wider.get(columns)
        if found is None:
            found = Form(self.op, self.table, columns, self.takes_over, self.uses)
            found = self._wider.setdefault(columns, found)
        return found


class Entry:
    """One row's write inside a layer: `texts` are the values of its form's columns.

    `count` is how many declared writes must each find the row. `obj` waits for the key that the database draws.
    """

    __slots__ = ("count", "form", "key", "layer", "obj", "texts")

    def __init__(self, form: Form, key: Hashable | None, texts: list[str | None], obj: Any = None) -> None:
        self.form = form
        self.key = key  #: None for an insert whose key the database will choose
        self.texts = texts
        self.obj = obj
        self.count = 1
        self.layer = 0

    @property
    def values(self) -> dict[Any, str | None]:
        """The text of each column."""
        return dict(zip(self.form.columns, self.texts, strict=True))


class Layers:
    """Entries by layer, in delivery order inside each."""

    def __init__(self) -> None:
        self._layers: list[list[Entry]] = []
        self._rows: dict[Table, dict[Hashable, Entry]] = {}
        self._used: dict[tuple[Table, str], _Used] = {}
        self._drawn: set[Table] = set()  #: tables with a row whose key the database will choose

    def __bool__(self) -> bool:
        return bool(self._layers)

    def place(self, entry: Entry) -> None:
        """Merge `entry` into the earlier one of its row, or put it into the earliest layer that keeps the order."""
        table, key, uses = entry.form.table, entry.key, entry.form.uses
        layer = self._earliest(table, uses) if uses else 0
        rows = self._rows.get(table)
        if rows is None:
            rows = self._rows[table] = {}
        earlier = rows.get(key) if key is not None else None
        if earlier is None:
            self._append(entry, layer)
        elif layer <= earlier.layer and not any(use.ordered for use in uses) and _merge(earlier, entry):
            entry = earlier
        else:
            self._append(entry, max(layer, earlier.layer + 1))
        if key is not None:
            rows[key] = entry
        else:
            self._drawn.add(table)
        for use in uses:
            self._used[table, use.thing].note(use, entry.layer)

    def drain(self) -> list[list[Entry]]:
        """Hand over the layers in their order and forget everything."""
        layers = self._layers
        self._layers, self._rows, self._used, self._drawn = [], {}, {}, set()
        return layers

    def may_hold(self, table: Table, key: Hashable) -> bool:
        """Say whether a write on this row may be waiting here."""
        return table in self._drawn or key in self._rows.get(table, ())

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
    merge = _MERGES.get((earlier.form.op, later.form.op))
    return merge is not None and merge(earlier, later)


def _set_values(earlier: Entry, later: Entry) -> bool:
    """An update goes into the row that is about to be written."""
    form = earlier.form
    if form.takes_over is not None and not set(later.form.columns) <= set(form.takes_over):
        return False  # the existing row would keep what the update changes
    if not form.table.may_overwrite(earlier, later.form.columns):
        return False
    values = earlier.values | later.values
    if len(values) > len(form.columns):
        earlier.form = form.with_columns(tuple(values))
    earlier.texts = list(values.values())
    if form.op is Op.UPDATE:
        earlier.count += later.count
    return True


def _delete_instead(earlier: Entry, later: Entry) -> bool:
    """An update before a delete leaves nothing behind; both still have to find the row."""
    if not earlier.form.table.may_forget(earlier):
        return False
    earlier.form = later.form
    earlier.texts = []
    earlier.count += later.count
    return True


def _put_again(earlier: Entry, later: Entry) -> bool:
    """The later of two upserts wins when it gives every column that the earlier one gives."""
    form = earlier.form
    if form.takes_over != later.form.takes_over or not _is_whole(earlier) or not _is_whole(later):
        return False
    if form.columns != later.form.columns or not form.table.may_forget(earlier):
        return False
    earlier.texts = later.texts
    return True


def _is_whole(upsert: Entry) -> bool:
    """Say whether an existing row takes over everything but its key."""
    key_columns = len(upsert.key) if isinstance(upsert.key, tuple) else 1
    return len(upsert.form.columns) == key_columns + len(upsert.form.takes_over or ())


_MERGES: Mapping[tuple[Op, Op], Any] = {
    (Op.INSERT, Op.UPDATE): _set_values,
    (Op.UPDATE, Op.UPDATE): _set_values,
    (Op.UPSERT, Op.UPDATE): _set_values,
    (Op.UPDATE, Op.DELETE): _delete_instead,
    (Op.UPSERT, Op.UPSERT): _put_again,
}
