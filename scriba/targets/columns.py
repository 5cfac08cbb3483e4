"""From a model field's value to the text that its column reads, exactly as the ORM would have stored it.

The column's type comes from the database; the value goes through the field (`get_db_prep_save`), unless field and
type are Django's own and the conversion is known to change nothing. Always holds: a value whose Python type is not
one that the column's type is known to take raises :class:`NotFoldable`, and the ORM writes that row by itself.
Must not execute anything.
"""

from __future__ import annotations

import decimal
import enum
import json
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from django.contrib.postgres.fields import ArrayField
from django.contrib.postgres.fields.ranges import RangeField
from django.db import models
from django.db.models.query_utils import DeferredAttribute
from django.utils.safestring import SafeString
from psycopg.adapt import PyFormat, Transformer
from psycopg.types.json import Jsonb
from psycopg.types.range import Range

from scriba.targets.kinds import KINDS, TEXT, TIMESTAMP, Kind, NotFoldable

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

    from scriba.targets.catalog import ColumnFacts

__all__ = ["NULL", "Column", "Encoder", "quoted"]

Encoder = Callable[[Any], "str | None"]

NULL: Final[Callable[[Any], None]] = {}.get  #: None for None, without a frame of Python

# --- A column ---------------------------------------------------------------------------------------------


class Column:
    """One column of a model: its SQL, and how values become its text.

    `text` turns a value into its text; it always refuses where the column is not understood. `known` is the short
    way for the Python types that it hands over unchanged: type -> text of a value; `fitting` is the same, but refuses
    what does not fit. `update_text` and `update_known` are for updates: they refuse what the type might refuse,
    because the ORM's statement fails on such a value even when it finds no row.
    `fits` says of a text that the type surely takes it. `accepts` says that nothing else could refuse it either, so
    that nobody can tell whether it was ever written before it is overwritten. `is_foreign`: code that is not
    Django's turns its values into what is stored.
    """

    __slots__ = (
        "accepts", "attname", "cast", "element", "field", "fits", "fitting", "is_exclusive", "is_foreign", "is_guarded",
        "known", "name", "pre_save", "quoted", "text", "update_known", "update_text",
    )  # fmt: skip

    def __init__(
        self, field: models.Field[Any, Any], facts: ColumnFacts | None, connection: BaseDatabaseWrapper
    ) -> None:
        self.field = field
        self.attname = field.attname
        self.name = str(field.column)
        self.quoted = quoted(connection, self.name)
        self.pre_save = not _reads_its_attribute(field)
        self.is_foreign = (self.pre_save and not _is_automatic(field)) or not (
            _is_djangos_own(field) and _is_djangos_own(_stored_field(field))
        )
        self.is_exclusive = facts is None or facts.is_exclusive
        self.is_guarded = facts is None or facts.is_guarded
        self.element = "text"  #: the type whose array carries the values
        self.cast = ""  #: what turns an element into the column's type, where assignment does not do it
        self.text: Encoder = _not_foldable
        self.known: Mapping[type, Encoder] = {}
        self.fitting: Mapping[type, Encoder] = {}
        self.update_known: Mapping[type, Encoder] = {}
        self.accepts: Callable[[str | None], bool] = _never
        self.fits: Callable[[str], bool] = _never
        self.update_text: Encoder = _not_foldable
        if facts is None or facts.is_generated or field.generated:
            return
        if (kind := KINDS.get(facts.type)) is not None and not _has_placeholder(field):
            self.element = facts.type
            self.known = _unchanged(field, kind)
            self.text = self.update_text = _encoder(field, kind, self.known, connection)
            self.fits = _fit(kind, facts)
            self.accepts = _acceptance(self.fits, facts)
            self.fitting = {kind_: _only_fitting(text, self.fits, {}) for kind_, text in self.known.items()}
            if kind is TEXT and str in self.known:
                self.fitting = {**self.fitting, str: _fitting_string(facts.length, self.fits)}
            if facts.whole_digits is not None and decimal.Decimal in self.known:
                self.fitting = {**self.fitting, decimal.Decimal: _fitting_decimal(facts.whole_digits, self.fits)}
            self.update_known = self.known
            if facts.length is not None or facts.whole_digits is not None:
                self.update_text = _only_fitting(self.text, self.fits, self.known)
                self.update_known = self.fitting
        elif _is_composed(field) and facts.type not in KINDS:
            self.cast = f"::{field.db_type(connection)}".replace("%", "%%")
            self.text = partial(_encode_composed, field, connection, lambda _value: True)
            self.update_text = partial(_encode_composed, field, connection, _soundness(facts.type))

    @property
    def folds(self) -> bool:
        return self.text is not _not_foldable


def _not_foldable(_value: object) -> str | None:
    raise NotFoldable


def quoted(connection: BaseDatabaseWrapper, name: str) -> str:
    """Return `name` as it stands in SQL that is executed with parameters."""
    return str(connection.ops.quote_name(name)).replace("%", "%%")


def _encoder(
    field: models.Field[Any, Any], kind: Kind, known: Mapping[type, Encoder], connection: BaseDatabaseWrapper
) -> Encoder:
    texts = kind.texts

    def encode(value: Any) -> str | None:
        unchanged = known.get(type(value))
        if unchanged is not None:
            return unchanged(value)
        if hasattr(value, "resolve_expression"):
            raise NotFoldable
        prepared = field.get_db_prep_save(value, connection)
        if prepared is None:
            return None
        text = texts.get(type(prepared))
        if text is None:
            if not _is_plain_text(prepared, kind):
                raise NotFoldable
            text = str.__str__
        return text(prepared)

    return encode


def _unchanged(field: models.Field[Any, Any], kind: Kind) -> dict[type, Encoder]:
    """Return the Python types that `field` hands over to the driver as they are, with their texts."""
    base = _stored_field(field)
    if not _is_djangos_own(field) or not _is_djangos_own(base):
        return {}
    known: dict[type, Encoder] = {type(None): NULL}
    internal_type = base.get_internal_type()
    if internal_type in kind.fields:
        known.update(kind.texts)
    elif internal_type == "JSONField" and Jsonb in kind.texts:
        dumps = partial(json.dumps, cls=base.encoder) if base.encoder else json.dumps
        known.update(dict.fromkeys((dict, list, str, int, float, bool), dumps))
    return known


def _is_plain_text(value: object, kind: Kind) -> bool:
    """Say whether `value` is one of the usual strings in disguise: an enumeration's member or marked-safe HTML."""
    return kind is TEXT and isinstance(value, str) and isinstance(value, enum.Enum | SafeString)


def _only_fitting(text: Encoder, fits: Callable[[str], bool], known: Mapping[type, Encoder]) -> Encoder:
    def encode(value: Any) -> str | None:
        unchanged = known.get(type(value))
        found = unchanged(value) if unchanged is not None else text(value)
        if found is not None and not fits(found):
            raise NotFoldable
        return found

    return encode


def _fitting_string(length: int | None, fits: Callable[[str], bool]) -> Encoder:
    """Return what `_only_fitting` does for a string, in one step for the usual ones: it runs for each key."""
    longest = length if length is not None else sys.maxsize

    def encode(value: str) -> str:
        if not (value.isascii() and len(value) <= longest and "\0" not in value) and not fits(value):
            raise NotFoldable
        return value

    return encode


def _fitting_decimal(whole_digits: int, fits: Callable[[str], bool]) -> Encoder:
    """Return what `_only_fitting` does for a decimal number, in one step for the usual ones."""

    def encode(value: decimal.Decimal) -> str:
        text = str(value)
        if not value.is_finite() or not ((len(text) <= whole_digits and "E" not in text) or fits(text)):
            raise NotFoldable
        return text

    return encode


def _encode_composed(
    field: models.Field[Any, Any], connection: BaseDatabaseWrapper, is_sound: Callable[[Any], bool], value: Any
) -> str | None:
    """Return an array's or a range's own literal, made by the driver: it is cast once it is a row's value."""
    if hasattr(value, "resolve_expression"):
        raise NotFoldable
    prepared = field.get_db_prep_save(value, connection)
    if prepared is None:
        return None
    if not isinstance(prepared, list | Range) or not is_sound(prepared):
        raise NotFoldable
    with connection.wrap_database_errors:
        dumped = Transformer(connection.connection).get_dumper(prepared, PyFormat.TEXT).dump(prepared)
    return bytes(dumped).decode() if dumped is not None else None


def _soundness(type_name: str) -> Callable[[Any], bool]:
    """Return what says that an array or range of this type is surely well made, element by element."""
    kind = KINDS.get(_RANGES.get(type_name, type_name.removesuffix("[]")))
    if kind is None:
        return lambda _value: False

    def is_sound(value: list[Any] | Range[Any]) -> bool:
        if isinstance(value, list):
            return all(_is_taken(kind, element) for element in value)
        bounds = [bound for bound in (value.lower, value.upper) if bound is not None]
        return all(_is_taken(kind, bound) for bound in bounds) and sorted(bounds) == bounds

    return is_sound


_RANGES: Final = {"int4range": "integer", "int8range": "bigint", "daterange": "date", "tstzrange": TIMESTAMP}


def _is_taken(kind: Kind, value: object) -> bool:
    text = kind.texts.get(type(value))
    return value is None or (text is not None and kind.accepts(text(value)))


def _fit(kind: Kind, facts: ColumnFacts) -> Callable[[str], bool]:
    length = facts.length
    if facts.type == "numeric":
        return _fits_precision(facts.whole_digits)
    if length is None:
        return kind.accepts
    return lambda text: len(text) <= length and kind.accepts(text)


def _fits_precision(whole_digits: int | None) -> Callable[[str], bool]:
    if whole_digits is None:
        return lambda text: len(text) < 1000 and "E" not in text  # noqa: PLR2004 - far below the type's own limit
    limit = decimal.Decimal(10) ** whole_digits - 1

    def fits(text: str) -> bool:
        # No more characters than digits are allowed: it cannot be too large, unless an exponent makes it so.
        return (len(text) <= whole_digits and "E" not in text) or abs(decimal.Decimal(text)) <= limit

    return fits


def _acceptance(fits: Callable[[str], bool], facts: ColumnFacts) -> Callable[[str | None], bool]:
    if facts.is_guarded:
        return _never
    longest, nullable, positive = facts.longest_text, not facts.is_required, facts.is_positive

    def accept(text: str | None) -> bool:
        if text is None:
            return nullable
        if longest is not None and len(text) > longest:
            return False
        return fits(text) and not (positive and text.startswith("-"))

    return accept


def _never(_text: str | None) -> bool:
    return False


# --- Whose code a field is --------------------------------------------------------------------------------

_CONVERSIONS: Final = (
    "pre_save", "get_db_prep_save", "get_db_prep_value", "get_prep_value", "to_python", "get_pk_value_on_save",
    "get_internal_type", "db_type",
)  # fmt: skip


def _is_djangos_own(field: models.Field[Any, Any]) -> bool:
    """Say whether every conversion of `field` is code of Django, however its class is called."""
    return all(getattr(type(field), name).__module__.startswith("django.") for name in _CONVERSIONS)


def _stored_field(field: models.Field[Any, Any]) -> Any:
    """Follow foreign keys to the field whose conversions they borrow."""
    while isinstance(field, models.ForeignKey):
        field = field.target_field
    return field


def _reads_its_attribute(field: models.Field[Any, Any]) -> bool:
    """Say whether the value to store is what stands in the instance's ``__dict__``."""
    stored = getattr(type(field).pre_save, "__module__", "").startswith("django.db.models.fields")
    descriptor = type(_class_attribute(field.model, field.attname))
    plain = descriptor.__module__.startswith("django.") and issubclass(descriptor, DeferredAttribute)
    return stored and plain and not _is_automatic(field) and not isinstance(field, models.FileField)


def _is_automatic(field: models.Field[Any, Any]) -> bool:
    """Say whether the field takes the time of the write."""
    return bool(getattr(field, "auto_now", False) or getattr(field, "auto_now_add", False))


def _class_attribute(model: type[models.Model], name: str) -> object:
    """Return the class attribute `name` of `model`, without asking the attribute what it is."""
    return next((vars(cls)[name] for cls in model.__mro__ if name in vars(cls)), None)


def _has_placeholder(field: models.Field[Any, Any]) -> bool:
    """Say whether the field wraps its values into SQL of its own (Django's binary field only pretends to)."""
    hooks = ("get_placeholder_sql", "get_placeholder")  # Django 6.1's, and before
    own = next((getattr(type(field), hook) for hook in hooks if hasattr(type(field), hook)), None)
    return own not in (None, *[getattr(models.BinaryField, hook, None) for hook in hooks])


def _is_composed(field: models.Field[Any, Any]) -> bool:
    """Say whether `field` is Django's own array or range field, down to its base."""
    if isinstance(field, ArrayField):
        return _is_djangos_own(field) and _is_composed_or_plain(field.base_field)
    return isinstance(field, RangeField) and _is_djangos_own(field)


def _is_composed_or_plain(field: models.Field[Any, Any]) -> bool:
    return _is_composed(field) or (_is_djangos_own(field) and not _has_placeholder(field))
