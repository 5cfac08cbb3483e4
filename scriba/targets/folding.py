"""Many declared writes become few set-based statements, with the effect of applying them one by one.

A write on one row that is named by its whole primary key goes into the buffer (`layers.py` keeps the order); any
other write is a barrier: everything buffered is executed first, then the write alone through the ORM. Always holds:
what folding does not understand (a trigger, an expression, a column type, a key) is a barrier. Must not open or end
transactions: the caller's one holds everything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeVar

from django.core.exceptions import FieldDoesNotExist
from django.db import connections, models, transaction
from django.db.models.base import ModelBase
from django.db.models.constants import LOOKUP_SEP

from scriba.exceptions import InvalidReturn, did_you_mean
from scriba.results import Delete, Insert, Update, Upsert, Write
from scriba.round_trips import Script
from scriba.targets.kinds import NotFoldable
from scriba.targets.layers import Entry, Layers
from scriba.targets.one_by_one import apply_write, insert_prepared
from scriba.targets.row_reads import row_read
from scriba.targets.shapes import Shape, model_of_table, shape_of
from scriba.targets.statements import add_layer, forbid_cached_plans

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

    from scriba.targets.columns import Column

__all__ = ["WriteBuffer", "check_result"]


T = TypeVar("T")

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
        script = Script(self._connection)
        self.hand_over(script)
        with transaction.mark_for_rollback_on_error(using=self._alias):
            script.run()

    def hand_over(self, script: Script) -> None:
        """Let `script` execute everything that is buffered, as :meth:`flush` does, together with what follows."""
        self._shapes = {}
        if not self._layers:
            return
        forbid_cached_plans(self._connection, script)
        for layer in self._layers.drain():
            add_layer(script, layer, self._count)

    def _count(self, unmatched: int) -> None:
        self.unmatched += unmatched

    def discard(self) -> None:
        """Forget everything: the transaction was rolled back."""
        self._layers.drain()
        self._shapes = {}
        self.unmatched = 0

    def is_apart(self, sql: Any, params: Any) -> bool:
        """Say whether a query reads one row that no buffered write touches: it sees the same before a flush as after."""
        read = row_read(sql) if isinstance(sql, str) and isinstance(params, (tuple, list)) else None
        if read is None or len(params) != read.parameters:
            return False
        model = model_of_table(self._connection, read.table)
        shape = None if model is None else self._shape(model)
        if shape is None or shape.obstacle or len(shape.keys) != 1 or shape.keys[0].quoted != read.key:
            return False
        try:
            key = shape.single_key(params[-1])
        except NotFoldable:
            return False
        return key is not None and not self._layers.may_hold(shape, key)

    # --- One write ------------------------------------------------------------------------------------

    def _fold(self, write: Write) -> bool:
        """Buffer `write`, or return False when the ORM has to apply it by itself."""
        model = write.model if isinstance(write, _BY_FILTER) else type(write.obj)
        shape = self._shape(model)
        if shape.obstacle:
            return False
        take = self._TAKES.get(type(write)) or _inherited(self._TAKES, write)
        if not shape.runs_foreign_code:
            return take(self, shape, write)
        with self._connection.execute_wrapper(self._flush_first):
            return take(self, shape, write)

    def _upsert(self, shape: Shape, write: Upsert) -> bool:
        takes_over = shape.takes_over(write.unique_fields, write.update_fields)
        return takes_over is not None and self._put(shape, write, takes_over)

    def _shape(self, model: type[models.Model]) -> Shape:
        shape = self._shapes.get(model)
        if shape is None:
            shape = self._shapes[model] = shape_of(self._connection, model)
        return shape

    def _put(self, shape: Shape, write: Insert | Upsert, takes_over: tuple[Column, ...] | None = None) -> bool:
        obj = write.obj
        if vars(obj._state).get("fields_cache") and not _settle_references(obj):
            return False
        try:
            attributes = shape.attributes(obj)
        except NotFoldable:
            return False
        try:
            entry = _row(shape, obj, attributes, takes_over)
        except NotFoldable:
            self.flush()
            insert_prepared(write, dict(zip(shape.fields, attributes, strict=True)), self._alias)
            return True
        self._layers.place(entry)
        return True

    def _update(self, shape: Shape, write: Update) -> bool:
        try:
            form = shape.update_form(tuple(write.values))
            key = shape.key_in(write.filter) if form is not None else None
            if form is None or key is None:
                return False
            texts = form.texts_of(write.values.values())
        except NotFoldable:
            return False
        self._layers.place(Entry(form, key, texts))
        return True

    def _delete(self, shape: Shape, write: Delete) -> bool:
        try:
            key = shape.key_in(write.filter)
        except NotFoldable:
            return False
        if key is None or not shape.folds_deletes():
            return False
        self._layers.place(Entry(shape.delete_form, key, []))
        return True

    _TAKES: ClassVar[dict[type, Callable[..., bool]]] = {
        Insert: _put, Upsert: _upsert, Update: _update, Delete: _delete,
    }  # fmt: skip

    def _flush_first(self, execute: Any, sql: Any, params: Any, many: Any, context: Any) -> Any:
        """Show a field that asks the database while it prepares its value everything that came before."""
        self.flush()
        return execute(sql, params, many, context)


def _inherited(takes: dict[type, T], write: Write) -> T:
    return next(takes[kind] for kind in type(write).__mro__ if kind in takes)


def _settle_references(obj: Any) -> bool:
    """Take over the keys of instances that foreign keys were given; False when one of them has no key yet."""
    related = obj._state.fields_cache.values()
    if any(isinstance(other, models.Model) and not other._is_pk_set() for other in related):  # type: ignore[attr-defined]
        return False  # it may wait in the buffer for its key
    obj._prepare_related_fields_for_save(operation_name="bulk_create")
    return True


def _row(shape: Shape, obj: models.Model, attributes: Sequence[Any], takes_over: tuple[Column, ...] | None) -> Entry:
    """Return the entry that puts `obj`. Raises `NotFoldable`."""
    left_out = shape.left_to_the_database(attributes)
    form = shape.insert_form(left_out, takes_over)
    is_drawn = bool(left_out) and not left_out.isdisjoint(shape.keys)
    key = None if is_drawn else shape.key_of_row(attributes)
    if form is None or (key is None and (not is_drawn or takes_over is not None)):
        raise NotFoldable
    return Entry(form, key, form.texts_of(attributes), obj if is_drawn and len(shape.keys) == 1 else None)


# --- What a handler may return ----------------------------------------------------------------------------


def check_result(result: object) -> bool:
    """Say whether every write of `result`, one write or a list of them, names an instance or a concrete model.

    Raises :class:`~scriba.exceptions.InvalidReturn` for a field name that the model does not have.
    """
    if isinstance(result, (list, tuple)):
        return all(map(_is_applicable, result))
    return _is_applicable(result)


def _is_applicable(write: Any) -> bool:
    if type(write) is Update and type(write.model) is ModelBase and type(write.filter) is dict:  # the usual, quickly
        model: Any = write.model
        known = _names.get(model)
        if known is not None and known.issuperset(write.filter) and known.issuperset(write.values):
            return True
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


_names: Final[dict[type[models.Model], set[str]]] = {}  #: lookups of concrete models that are known to start well


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
