"""Everything about a model that is worked out once: whether and how its writes fold, and the SQL for it.

A `Shape` joins what the model says (fields, conversions, relations) with what the database says (`catalog.py`).
Always holds: a model, a column or a key that is not understood does not fold; the reason is kept in words
(`Shape.obstacle`). Must not execute writes.
"""

from __future__ import annotations

import datetime
import enum
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final

from django.apps import apps
from django.core.exceptions import FieldDoesNotExist
from django.db import models
from django.db.models.deletion import Collector
from django.db.models.expressions import DatabaseDefault
from django.db.models.signals import post_delete, pre_delete

from scriba.targets.catalog import TableFacts, facts_of
from scriba.targets.columns import Column, quoted
from scriba.targets.forms import RowForm
from scriba.targets.kinds import KEY_KINDS, TIMESTAMP, NotFoldable
from scriba.targets.layers import Entry, Form, Op, Use

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

__all__ = ["Shape", "model_of_table", "shape_of"]


_NOTHING: Final[frozenset[Any]] = frozenset()

Key = str | tuple[str, ...]  #: the text of a row's key; several texts when several columns make it


def shape_of(connection: BaseDatabaseWrapper, model: type[models.Model]) -> Shape:
    """Return the shape of `model`, compiled anew when the connection to the server sees other facts."""
    # Kept on the connection, which the shapes refer to: in a table of weak keys they would keep it alive for ever.
    shapes: dict[type[models.Model], Shape] = vars(connection).setdefault("scriba_shapes", {})
    facts = facts_of(connection, model._meta.db_table)
    shape = shapes.get(model)
    if shape is None or (shape.facts is not facts and shape.facts != facts):
        shape = shapes[model] = Shape(model, facts, connection)
    return shape


def model_of_table(connection: BaseDatabaseWrapper, table: str) -> type[models.Model] | None:
    """Return a model whose table is called `table` in SQL; None when there is none."""
    found: dict[str, type[models.Model] | None] = vars(connection).setdefault("scriba_models", {})
    if table not in found:
        every = apps.get_models(include_auto_created=True, include_swapped=True)
        names = ((quoted(connection, model._meta.db_table), model) for model in every if not model._meta.proxy)
        found[table] = next((model for name, model in names if name == table), None)
    return found[table]


class Shape:
    """A model on one connection: a `Table` for the layers."""

    def __init__(self, model: type[models.Model], facts: TableFacts, connection: BaseDatabaseWrapper) -> None:
        opts = model._meta
        self.model = model
        self.facts = facts
        self.table = quoted(connection, opts.db_table)
        self.columns = tuple(
            Column(field, facts.columns.get(str(field.column)), connection)
            for field in opts.concrete_fields
            if not field.generated
        )
        by_field = {column.field: column for column in self.columns}
        self.keys = tuple(by_field[field] for field in opts.pk_fields if field in by_field)
        self.obstacle = _obstacle(model, facts, self.keys)
        self.runs_foreign_code = any(column.is_foreign for column in self.columns)
        self.automatic_key = opts.auto_field if opts.auto_field is opts.pk else None
        self.fields = tuple(column.field for column in self.columns)
        self.key_places = tuple(self.columns.index(key) for key in self.keys)
        self._defaulted = tuple(place for place, column in enumerate(self.columns) if column.field.has_db_default())
        self._attributes = _getter([column.attname for column in self.columns])
        self._key_attnames = tuple(key.attname for key in self.keys)
        self._plain = frozenset(column.attname for column in self.columns if not column.pre_save)
        self._presaved = len(self._plain) < len(self.columns)
        self._drawn_place = self.key_places[0] if self.automatic_key is not None and self.keys else None
        self._may_leave_out = bool(self._defaulted) or self._drawn_place is not None
        is_short = len(self.keys) == 1 and self.keys[0].element != TIMESTAMP
        self._key_texts = self.keys[0].fitting if is_short else {}  #: for the types that are their own canonical form
        self._key_words = _key_words(model)
        self._fast_delete: bool | None = None
        self._insert_forms: dict[Any, RowForm] = {}
        self._takes_over: dict[Any, tuple[Column, ...] | None] = {}
        self._update_forms: dict[tuple[str, ...], RowForm | None] = {}
        self._update_uses = (Use("rows", "keyed"),) if self.automatic_key is not None else ()
        delete_uses = (*self._update_uses, Use("exclusion", "delete")) if facts.has_exclusive else self._update_uses
        self.delete_form = Form(Op.DELETE, self, (), uses=delete_uses)

    # --- What the layers ask --------------------------------------------------------------------------

    def may_overwrite(self, entry: Entry, columns: Iterable[Column]) -> bool:
        """Say whether new values for `columns` in `entry` hide nothing that the database could have refused."""
        writes_all, values = entry.form.op is not Op.UPDATE, entry.values
        for column in columns:
            if column in values:
                if not column.accepts(values[column]):
                    return False
            elif writes_all or column.is_guarded:
                return False
        return True

    def may_forget(self, entry: Entry) -> bool:
        """Say whether the database surely accepts everything in `entry`."""
        return all(column.accepts(text) for column, text in entry.values.items())

    # --- Keys -----------------------------------------------------------------------------------------

    def key_in(self, lookups: object) -> Key | None:
        """Return the key that `lookups`, an update's or delete's filter, names wholly; None for any other filter."""
        if not isinstance(lookups, dict):
            return None
        if len(self.keys) > 1:
            return self._key_of_many_in(lookups)
        if len(lookups) != 1:
            return None
        ((word, value),) = lookups.items()
        return self.single_key(value) if self._key_words.get(word) == 0 else None

    def _key_of_many_in(self, lookups: dict[str, Any]) -> Key | None:
        if len(lookups) == 1 and "pk" in lookups and isinstance(lookups["pk"], tuple | list):
            return self.key_of(lookups["pk"])
        places = [self._key_words.get(word) for word in lookups]
        if None in places or sorted(places) != list(range(len(self.keys))):  # type: ignore[type-var]
            return None
        values = dict(zip(places, lookups.values(), strict=True))
        return self.key_of([values[place] for place in range(len(self.keys))])

    def single_key(self, value: Any) -> str | None:
        """Return the canonical text of a key of one column. None, or `NotFoldable`, when it is not known to be one."""
        short = self._key_texts.get(type(value))
        return short(value) if short is not None else _key_text(self.keys[0], value)

    def key_of(self, values: Sequence[Any]) -> Key | None:
        """Return the canonical text of a key: equal for what the database calls equal. None: not known to be."""
        if len(values) != len(self.keys):
            return None
        if len(values) == 1:
            return self.single_key(values[0])
        texts = tuple(_key_text(column, value) for column, value in zip(self.keys, values, strict=True))
        return None if None in texts else texts  # type: ignore[return-value]

    def key_of_row(self, attributes: Sequence[Any]) -> Key | None:
        """Return the canonical text of the key in a row's `attributes`; None: not known to be one."""
        if len(self.keys) == 1:
            return self.single_key(attributes[self.key_places[0]])
        return self.key_of([attributes[place] for place in self.key_places])

    # --- Forms ----------------------------------------------------------------------------------------

    def attributes(self, obj: models.Model) -> Sequence[Any]:
        """Return what is to be stored of `obj`, column by column. Raises `NotFoldable` when it is not all loaded."""
        found = vars(obj)
        for attname in self._key_attnames:
            if found.get(attname) is None:
                obj.pk = self.model._meta.pk.get_pk_value_on_save(obj)
                break
        if not self._presaved:
            try:
                return self._attributes(found)
            except KeyError:
                raise NotFoldable from None
        if not found.keys() >= self._plain:
            raise NotFoldable
        return [
            column.field.pre_save(obj, True) if column.pre_save else found[column.attname] for column in self.columns
        ]

    def left_to_the_database(self, attributes: Sequence[Any]) -> frozenset[Column]:
        """Return the columns that the database gives their values: defaults of its own, and keys that it draws."""
        if not self._may_leave_out:
            return _NOTHING
        places = [place for place in self._defaulted if type(attributes[place]) is DatabaseDefault]
        if self._drawn_place is not None and attributes[self._drawn_place] is None:
            places.append(self._drawn_place)
        return frozenset(self.columns[place] for place in places) if places else _NOTHING

    def insert_form(self, left_out: frozenset[Column], takes_over: tuple[Column, ...] | None) -> RowForm | None:
        """Return the form of a row whose `left_out` columns take the database's default. None: by the ORM."""
        form = self._insert_forms.get((left_out, takes_over))
        if form is None:
            places = tuple(place for place, column in enumerate(self.columns) if column not in left_out)
            columns = tuple(self.columns[place] for place in places)
            given = {column.name for column in columns}
            calls = any(facts.calls for name, facts in self.facts.columns.items() if name not in given)
            if not columns or calls or not all(column.folds for column in columns):
                return None
            op, uses = Op.INSERT if takes_over is None else Op.UPSERT, self._insert_uses(left_out, takes_over)
            form = RowForm(op, self, columns, uses, takes_over, places if left_out else None)
            self._insert_forms[left_out, takes_over] = form
        return form

    def update_form(self, names: tuple[str, ...]) -> RowForm | None:
        """Return the form of an update of `names`, or None when the ORM has to write it."""
        try:
            return self._update_forms[names]
        except KeyError:
            columns = self._resolve(names)
            form = None if columns is None else RowForm(Op.UPDATE, self, columns, self._update_uses)
            return self._update_forms.setdefault(names, form)

    def takes_over(self, unique: tuple[str, ...] | None, update: tuple[str, ...] | None) -> tuple[Column, ...] | None:
        """Return the columns that an upsert's existing row takes over, or None when the ORM has to write it."""
        if (unique, update) not in self._takes_over:
            self._takes_over[unique, update] = self._resolve_upsert(unique, update)
        return self._takes_over[unique, update]

    def folds_deletes(self) -> bool:
        """Say whether a delete touches this table's row and nothing else: no cascade, no receiver of a signal."""
        if self.facts.deletes_spread or pre_delete.has_listeners(self.model) or post_delete.has_listeners(self.model):
            return False
        if self._fast_delete is None:
            rows = self.model._base_manager.all()
            self._fast_delete = Collector(using=rows.db, origin=rows).can_fast_delete(rows)
        return self._fast_delete

    def _resolve_upsert(
        self, unique: tuple[str, ...] | None, update: tuple[str, ...] | None
    ) -> tuple[Column, ...] | None:
        is_by_key = unique is None or {self._key_words.get(name) for name in unique} == set(range(len(self.keys)))
        if self.facts.has_exclusive or not is_by_key:
            return None
        if update is None:
            return tuple(column for column in self.columns if column not in self.keys)
        return self._resolve(update)

    def _resolve(self, names: tuple[str, ...]) -> tuple[Column, ...] | None:
        columns: list[Column] = []
        for name in names:
            try:
                field = self.model._meta.get_field(name)
            except FieldDoesNotExist:
                return None
            column = next((column for column in self.columns if column.field is field), None)
            if column is None or not column.folds or column.is_exclusive or column in self.keys or column in columns:
                return None
            columns.append(column)
        return tuple(columns)

    def _insert_uses(self, left_out: frozenset[Column], takes_over: tuple[Column, ...] | None) -> tuple[Use, ...]:
        """Rows that draw from a sequence keep their order; one whose key is drawn might be any keyed row.

        The mode of a draw is what makes a statement of its own: two statements in one layer would not keep the order.
        """
        uses = [*self._update_uses, *([Use("exclusion", "insert")] if self.facts.has_exclusive else [])]
        given = {column.name for column in self.columns if column not in left_out}
        if any(key in left_out for key in self.keys):
            uses = [Use("rows", "drawn"), *(use for use in uses if use.thing != "rows")]
        if any(facts.draws for name, facts in self.facts.columns.items() if name not in given):
            uses.append(Use("sequence", (left_out, takes_over), ordered=True))
        return tuple(uses)


# --- Whether a model folds at all -------------------------------------------------------------------------


def _obstacle(model: type[models.Model], facts: TableFacts, keys: tuple[Column, ...]) -> str:
    """Return why no write on `model` is folded, or "" when nothing is in the way."""
    opts = model._meta
    reasons = {
        "a proxy model": opts.proxy,
        "multi-table inheritance": bool(opts.parents),
        "another model has the same table": _shares_its_table(model),
        "a base manager of its own": type(model._base_manager) is not models.Manager,
        "order_with_respect_to": opts.order_with_respect_to is not None,
        facts.obstacle: bool(facts.obstacle),
        "the primary key is not the table's": facts.primary_key != {key.name for key in keys} or not keys,
        "a primary key whose equality is not known": not all(_has_known_equality(key, facts) for key in keys),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def _shares_its_table(model: type[models.Model]) -> bool:
    same = [
        other
        for other in apps.get_models(include_auto_created=True, include_swapped=True)
        if other._meta.db_table == model._meta.db_table and not other._meta.proxy
    ]
    return len(same) > 1


def _has_known_equality(key: Column, facts: TableFacts) -> bool:
    told = facts.columns.get(key.name)
    exact = key.field.get_lookup("exact")
    return (
        told is not None
        and told.type in KEY_KINDS
        and not told.merges_equals
        and key.folds
        and not key.is_foreign
        and exact is not None
        and exact.__module__.startswith("django.")
    )


# --- Keys as canonical texts ------------------------------------------------------------------------------


def _getter(names: Sequence[str]) -> Callable[[Mapping[str, Any]], Sequence[Any]]:
    """Return what picks `names` out of a mapping; KeyError for one that is not there."""
    return itemgetter(*names) if len(names) > 1 else lambda found: [found[name] for name in names]


def _key_words(model: type[models.Model]) -> dict[str, int]:
    """Return the lookups that name a whole key column, with the column's place in the key."""
    words = {}
    fields = model._meta.pk_fields
    for place, field in enumerate(fields):
        names = [field.name, field.attname, *(["pk"] if len(fields) == 1 else [])]
        for name in names:
            words[name] = words[f"{name}__exact"] = place
    return words


_KEY_TYPES: Final = (int, str, uuid.UUID, datetime.date, datetime.datetime)


def _key_text(column: Column, value: Any) -> str | None:
    kind = type(value)
    if kind not in _KEY_TYPES and not (isinstance(value, str) and isinstance(value, enum.Enum)):
        return None
    if kind is datetime.datetime:
        if value.utcoffset() is None:
            return None
        value = value.astimezone(datetime.UTC)
    elif column.element == TIMESTAMP:
        return None
    text = column.text(value)
    return text if text is not None and column.fits(text) else None
