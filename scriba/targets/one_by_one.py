"""One declared write as one call of the ORM: what the contract says each write means.

Folding is measured against this, and hands over to it whatever it cannot prove: rows are written through the model's
base manager, without ``save()`` overrides and save signals. Always holds: nothing is buffered here. Must not decide
what may be folded.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from django.db import models, transaction
from django.db.models.constants import OnConflict

from scriba.results import Delete, Insert, Update, Upsert, Write

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["apply_write", "insert_prepared"]


def apply_write(write: Write, alias: str) -> int:
    """Execute `write` on the database `alias`. Return 1 for an update or delete that matched no row, else 0."""
    match write:
        case Insert(obj):
            _insert(obj, alias)
        case Upsert(obj):
            _upsert(write, alias)
        case Update():
            return 0 if _filtered(write, alias).update(**write.values) else 1
        case Delete():
            deleted, _per_model = _filtered(write, alias).delete()
            return 0 if deleted else 1
    return 0


def insert_prepared(write: Insert | Upsert, values: dict[models.Field[Any, Any], Any], alias: str) -> None:
    """Insert a row whose fields have already been asked for their values: ``pre_save`` must not run twice."""
    model = type(write.obj)
    fields = [field for field in values if values[field] is not None or not isinstance(field, models.AutoField)]
    row = SimpleNamespace(**{field.attname: value for field, value in values.items()})
    with transaction.mark_for_rollback_on_error(using=alias):
        returned = _rows(model, alias)._insert(
            [row], fields=fields, using=alias, raw=True, returning_fields=[model._meta.pk], **_conflict_fields(write)
        )
    if returned and len(fields) < len(values):
        write.obj.pk = returned[0][0]


def _filtered(write: Update | Delete, alias: str) -> models.QuerySet[Any]:
    rows: models.QuerySet[Any] = _rows(write.model, alias).all()
    return rows.filter(**write.filter) if isinstance(write.filter, dict) else rows.filter(write.filter)


def _insert(obj: models.Model, alias: str) -> None:
    if _has_parents(obj):
        _save_tables(obj, alias, force_insert=(models.Model,))
    else:
        _rows(type(obj), alias).bulk_create([obj])


def _upsert(write: Upsert, alias: str) -> None:
    obj = write.obj
    if _has_parents(obj) and write.unique_fields is None and write.update_fields is None:
        obj._state.adding = False  # lets Django look for the row before it inserts one
        _save_tables(obj, alias, force_insert=())
        return
    unique_fields, update_fields = conflict_names(write)
    if update_fields:
        conflict: dict[str, Any] = {
            "update_conflicts": True,
            "unique_fields": unique_fields,
            "update_fields": update_fields,
        }
    else:
        conflict = {"ignore_conflicts": True}
    _rows(type(obj), alias).bulk_create([obj], **conflict)


def conflict_names(upsert: Upsert) -> tuple[Sequence[str], Sequence[str]]:
    """Return the names of the unique fields and of the fields that an existing row takes over."""
    opts = type(upsert.obj)._meta
    key = [field.name for field in opts.pk_fields]
    unique = list(upsert.unique_fields) if upsert.unique_fields is not None else key
    if upsert.update_fields is not None:
        return unique, list(upsert.update_fields)
    left = {opts.get_field(opts.pk.name if name == "pk" else name).name for name in unique} | set(key)
    return unique, [field.name for field in opts.concrete_fields if field.name not in left and not field.generated]


def _conflict_fields(write: Insert | Upsert) -> dict[str, Any]:
    if isinstance(write, Insert):
        return {}
    get_field = type(write.obj)._meta.get_field
    unique_fields, update_fields = conflict_names(write)
    if not update_fields:
        return {"on_conflict": OnConflict.IGNORE}
    return {
        "on_conflict": OnConflict.UPDATE,
        "unique_fields": [get_field(name) for name in unique_fields],
        "update_fields": [get_field(name) for name in update_fields],
    }


def _rows(model: type[models.Model], alias: str) -> Any:
    return model._base_manager.using(alias)


def _has_parents(obj: models.Model) -> bool:
    return any(parent._meta.concrete_model is not obj._meta.concrete_model for parent in obj._meta.all_parents)


def _save_tables(obj: Any, alias: str, *, force_insert: tuple[type[models.Model], ...]) -> None:
    """Write one row into each table of a multi-table model, which ``bulk_create`` refuses; no signal is sent."""
    concrete = obj._meta.concrete_model
    with transaction.atomic(using=alias, savepoint=False):
        obj._prepare_related_fields_for_save(operation_name="save")
        inserted = obj._save_parents(cls=concrete, using=alias, update_fields=None, force_insert=force_insert)
        obj._save_table(cls=concrete, using=alias, force_insert=bool(force_insert) or inserted)
    obj._state.db = alias
    obj._state.adding = False
