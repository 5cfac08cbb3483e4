"""What a handler may return. Plain values: they say what to write, and write nothing.

==================================  =====================================================
``Insert(obj)``                     insert one row, as ``bulk_create`` does
``Update(Model, filter, **values)`` what ``QuerySet.filter(...).update(...)`` does
``Delete(Model, filter)``           what ``QuerySet.filter(...).delete()`` does
``Upsert(obj, ...)``                insert, or update the row that stands in the way
``Done()``                          the handler wrote through the ORM itself
a list or tuple of writes           several writes for one event, in order; ``[]`` is ``Skip()``
``Skip()``                          acknowledged, no effect
``Fail(reason)``                    explicit failure: retried, then dead-lettered
==================================  =====================================================

Nothing here knows Django: whether an object is a model is the target's to judge (`valid_result`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Self

from scriba.exceptions import InvalidReturn

__all__ = ["ACCEPTED", "Delete", "Done", "Fail", "Insert", "Result", "Skip", "Update", "Upsert", "Write"]

#: One line that names every accepted shape: part of each ``invalid_return`` message.
ACCEPTED = (
    "Insert(obj), Update(Model, filter, **values), Delete(Model, filter), Upsert(obj), "
    "a list or tuple of these, Done(), Skip() or Fail(reason)"
)


class _Value:
    """Equality and repr by slots, so that users can compare results in their unit tests."""

    __slots__: tuple[str, ...] = ()

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return all(_content(getattr(self, name)) == _content(getattr(other, name)) for name in self.__slots__)

    __hash__ = None  # type: ignore[assignment]  # they hold models and dicts

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={getattr(self, name)!r}" for name in self.__slots__)
        return f"{type(self).__name__}({shown})"


class Insert(_Value):
    """Insert `obj`, an unsaved model instance."""

    __slots__ = ("obj",)
    __match_args__ = ("obj",)

    def __init__(self, obj: Any, /) -> None:
        self.obj = obj


class Update(_Value):
    """Update the rows of `model` that match `filter` (a dict of lookups, or a ``Q``) with `values`.

    An empty filter is an error; :meth:`all` says it on purpose.
    """

    __slots__ = ("filter", "model", "values")
    __match_args__ = ("model", "filter", "values")

    def __init__(self, model: Any, filter: Any, /, **values: Any) -> None:  # noqa: A002 - Django's word
        if not filter:
            msg = f"Update({_name(model)}, …): the filter is empty. Update.all({_name(model)}, …) updates every row."
            raise InvalidReturn(msg)
        if not values:
            msg = f"Update({_name(model)}, …): no values to set. Return Skip() when there is nothing to do."
            raise InvalidReturn(msg)
        self.model = model
        self.filter = filter
        self.values = values

    @classmethod
    def all(cls, model: Any, /, **values: Any) -> Self:
        """Update every row of `model`, on purpose."""
        update = cls(model, {"pk": None}, **values)
        update.filter = {}
        return update


class Delete(_Value):
    """Delete the rows of `model` that match `filter` (a dict of lookups, or a ``Q``), cascades included."""

    __slots__ = ("filter", "model")
    __match_args__ = ("model", "filter")

    def __init__(self, model: Any, filter: Any, /) -> None:  # noqa: A002 - Django's word
        if not filter:
            msg = f"Delete({_name(model)}, …): the filter is empty. Delete.all({_name(model)}) deletes every row."
            raise InvalidReturn(msg)
        self.model = model
        self.filter = filter

    @classmethod
    def all(cls, model: Any, /) -> Self:
        """Delete every row of `model`, on purpose."""
        delete = cls(model, {"pk": None})
        delete.filter = {}
        return delete


class Upsert(_Value):
    """Insert `obj`, or update the row that has the same `unique_fields` (default: the primary key).

    `update_fields` are the columns that an existing row takes over (default: all others).
    """

    __slots__ = ("obj", "unique_fields", "update_fields")
    __match_args__ = ("obj",)

    def __init__(
        self,
        obj: Any,
        /,
        *,
        unique_fields: Sequence[str] | None = None,
        update_fields: Sequence[str] | None = None,
    ) -> None:
        self.obj = obj
        self.unique_fields = _field_names(obj, "unique_fields", unique_fields)
        self.update_fields = _field_names(obj, "update_fields", update_fields)


class Done(_Value):
    """The handler wrote through the ORM itself; nothing more to do."""

    __slots__ = ()


class Skip(_Value):
    """Acknowledged, no effect."""

    __slots__ = ()


class Fail(_Value):
    """Explicit failure: retried, then dead-lettered with error kind ``error``."""

    __slots__ = ("reason",)
    __match_args__ = ("reason",)

    def __init__(self, reason: object) -> None:
        self.reason = reason


Write = Insert | Update | Delete | Upsert
_WRITES: Final = (Insert, Update, Delete, Upsert)
Result = Write | Done | Skip | Fail | Sequence[Write]


def _name(model: object) -> str:
    return getattr(model, "__name__", repr(model))


def _field_names(obj: object, option: str, names: Sequence[str] | None) -> tuple[str, ...] | None:
    if isinstance(names, str):
        msg = f"Upsert({type(obj).__name__}(…), {option}={names!r}): give a list of field names, [{names!r}]."
        raise InvalidReturn(msg)
    return tuple(names) if names is not None else None


def _content(value: Any) -> Any:
    """Return what two results are compared by: a row by all its values, because models are equal by key alone."""
    if hasattr(value, "_state"):
        return type(value), {name: item for name, item in vars(value).items() if name != "_state"}
    return value


def writes_of(result: object) -> Sequence[Write] | None:
    """Return the declared writes of `result` (empty for ``Skip`` and ``[]``), or None when it has no such shape."""
    if isinstance(result, _WRITES):
        return (result,)
    if isinstance(result, Skip):
        return ()
    if isinstance(result, list | tuple) and all(isinstance(write, _WRITES) for write in result):
        return result
    return None
