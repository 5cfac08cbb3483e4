"""Many declared writes become few set-based statements, with the effect of applying them one by one.

A write on one row that is named by its whole primary key goes into the buffer (`layers.py` keeps the order); any
other write is a barrier: everything buffered is executed first, then the write alone through the ORM. Always holds:
what folding does not understand (a trigger, an expression, a column type, a key) is a barrier. Must not open or end
transactions: the caller's one holds everything.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, cast
from weakref import WeakKeyDictionary

from django.core.exceptions import FieldDoesNotExist
from django.db import connections, models, transaction
from django.db.models.constants import LOOKUP_SEP

from scriba.exceptions import InvalidReturn, did_you_mean
from scriba.results import Delete, Insert, Update, Upsert, Write
from scriba.targets.columns import Column
from scriba.targets.kinds import NotFoldable
from scriba.targets.layers import Entry, Layers, Op, Use
from scriba.targets.one_by_one import apply_write, insert_prepared
from scriba.targets.shapes import Shape, shape_of
from scriba.targets.statements import execute_layer, forbid_cached_plans

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

__all__ = ["WriteBuffer", "check_result"]


_OF_OBJECT: Final = (Insert, Upsert)
_BY_FILTER: Final = (Update, Delete)


class WriteBuffer:
    """The declared writes of one transaction, in the order in which they were declared.

    `unmatched` counts the updates and deletes that found no row, as applying them one by one would have.
    """

    def __init__(self, connection: BaseDatabaseWrapper) -> None:
        self.unmatched = 0
        self._connection = connections[connection.alias]  # a proxy is told from the connection itself
        self._alias = connection.alias
        self._layers = Layers()
        self._shapes: dict[type[models.Model], Shape] = {}

    def add(self, write: Write) -> None:
        """Take `write`; may execute it and everything before it. An error belongs to some write since the last flush."""
        if not self._fold(write):
            self.flush()
            self.unmatched += apply_write(write, self._alias)

    def flush(self) -> None:
        """Execute everything that is buffered. After an error the transaction can only be rolled back."""
        self._shapes = {}
        if not self._layers:
            return
        layers = self._layers.drain()
        with transaction.mark_for_rollback_on_error(using=self._alias), self._connection.cursor() as cursor:
            forbid_cached_plans(self._connection, cursor)
            for layer in layers:
                self.unmatched += execute_layer(cursor, layer)

    def discard(self) -> None:
        """Forget everything: the transaction was rolled back."""
        self._layers.drain()
        self._shapes = {}
        self.unmatched = 0

    # --- One write ------------------------------------------------------------------------------------

    def _fold(self, write: Write) -> bool:
        """Buffer `write`, or return False when the ORM has to apply it by itself."""
        model = write.model if isinstance(write, _BY_FILTER) else type(write.obj)
        shape = self._shapes.get(model)
        if shape is None:
            shape = self._shapes[model] = shape_of(self._connection, model)
        if shape.obstacle:
            return False
        if not shape.runs_foreign_code:
            return self._take(shape, write)
        with self._connection.execute_wrapper(self._flush_first):
            return self._take(shape, write)

    def _take(self, shape: Shape, write: Write) -> bool:
        if isinstance(write, _OF_OBJECT):
            return self._put(shape, write)
        try:
            return self._update(shape, write) if isinstance(write, Update) else self._delete(shape, write)
        except NotFoldable:
            return False

    def _put(self, shape: Shape, write: Insert | Upsert) -> bool:
        takes_over = shape.takes_over(write.unique_fields, write.update_fields) if isinstance(write, Upsert) else None
        if (takes_over is None and isinstance(write, Upsert)) or not _settle_references(write.obj):
            return False
        try:
            attributes = shape.attributes(write.obj)
        except NotFoldable:
            return False
        try:
            entry, uses = _row(shape, write.obj, attributes, takes_over)
        except NotFoldable:
            self.flush()
            insert_prepared(write, dict(zip(shape.fields, attributes, strict=True)), self._alias)
            return True
        self._layers.place(entry, uses)
        return True

    def _update(self, shape: Shape, write: Update) -> bool:
        columns = shape.update_columns(tuple(write.values))
        key = shape.key_in(write.filter) if columns is not None else None
        if columns is None or key is None:
            return False
        values = {}
        for column, value in zip(columns, write.values.values()):  # noqa: B905 - of one length: found by these names
            known = column.update_known.get(type(value))
            values[column] = known(value) if known is not None else _update_text(column, value)
        self._layers.place(Entry(Op.UPDATE, shape, key, values), shape.update_uses)
        return True

    def _delete(self, shape: Shape, write: Delete) -> bool:
        key = shape.key_in(write.filter)
        if key is None or not shape.folds_deletes():
            return False
        self._layers.place(Entry(Op.DELETE, shape, key, {}), shape.delete_uses)
        return True

    def _flush_first(self, execute: Any, sql: Any, params: Any, many: Any, context: Any) -> Any:
        """Show a field that asks the database while it prepares its value everything that came before."""
        self.flush()
        return execute(sql, params, many, context)


def _settle_references(obj: Any) -> bool:
    """Take over the keys of instances that foreign keys were given; False when one of them has no key yet."""
    related = vars(obj._state).get("fields_cache")
    if related:
        if any(isinstance(other, models.Model) and not _has_key(other) for other in related.values()):
            return False  # it may wait in the buffer for its key
        obj._prepare_related_fields_for_save(operation_name="bulk_create")
    return True


def _has_key(obj: Any) -> bool:
    return bool(obj._is_pk_set())


def _row(
    shape: Shape, obj: models.Model, attributes: Sequence[Any], takes_over: tuple[Column, ...] | None
) -> tuple[Entry, Sequence[Use]]:
    """Return the entry that puts `obj`, and what it shares with other rows. Raises `NotFoldable`."""
    left_out = shape.left_to_the_database(attributes)
    plan = shape.insert_plan(left_out, takes_over)
    is_drawn = bool(left_out) and not left_out.isdisjoint(shape.keys)
    key = None if is_drawn else shape.key_of([attributes[place] for place in shape.key_places])
    if plan is None or (key is None and (not is_drawn or takes_over is not None)):
        raise NotFoldable
    values = {}
    for place, column, known in plan.columns:
        value = attributes[place]
        unchanged = known.get(type(value))
        values[column] = unchanged(value) if unchanged is not None else column.text(value)
    if takes_over is not None:
        return Entry(Op.UPSERT, shape, key, values, takes_over), plan.uses
    return Entry(Op.INSERT, shape, key, values, obj=obj if is_drawn and len(shape.keys) == 1 else None), plan.uses


def _update_text(column: Column, value: Any) -> str | None:
    """Return the text that an update sets, a foreign key's for an instance. Raises `NotFoldable`."""
    if isinstance(value, models.Model):
        if not column.field.is_relation or not _has_key(value):
            raise NotFoldable  # it waits for its key, or is none
        value = cast("Any", value).prepare_database_save(column.field)
    return column.update_text(value)


# --- What a handler may return ----------------------------------------------------------------------------


def check_result(result: object) -> bool:
    """Say whether every write of `result`, one write or a list of them, names an instance or a concrete model.

    Raises :class:`~scriba.exceptions.InvalidReturn` for a field name that the model does not have.
    """
    if isinstance(result, list | tuple):
        return all(_is_applicable(write) for write in result)
    return _is_applicable(result)


def _is_applicable(write: Any) -> bool:
    if isinstance(write, _OF_OBJECT):
        if not isinstance(write.obj, models.Model):
            return False
        if isinstance(write, Upsert) and (write.unique_fields or write.update_fields):
            _check_names(type(write.obj), (*(write.unique_fields or ()), *(write.update_fields or ())), write)
        return True
    if not isinstance(write, _BY_FILTER) or not _is_concrete(write.model):
        return False
    if isinstance(write.filter, dict):
        _check_names(write.model, write.filter, write)
    elif not isinstance(write.filter, models.Q):
        return False
    if isinstance(write, Update):
        _check_names(write.model, write.values, write)
    return True


def _is_concrete(model: object) -> bool:
    return isinstance(model, type) and issubclass(model, models.Model) and not model._meta.abstract


_names: WeakKeyDictionary[type[models.Model], set[str]] = WeakKeyDictionary()  #: lookups that are known to start well


def _check_names(model: type[models.Model], lookups: Iterable[str], write: Write) -> None:
    known = _names.get(model)
    if known is None:
        known = _names.setdefault(model, {"pk"})
    if known.issuperset(lookups):
        return
    for lookup in lookups:
        if lookup in known:
            continue
        name = str(lookup).split(LOOKUP_SEP)[0]
        if name != "pk":
            try:
                model._meta.get_field(name)
            except FieldDoesNotExist:
                accepted = [field.name for field in model._meta.get_fields()]
                msg = (
                    f"{type(write).__name__}({model.__name__}, …): {model.__name__} has no field {name!r}"
                    f"{did_you_mean(name, accepted)}"
                )
                raise InvalidReturn(msg) from None
        known.add(lookup)
