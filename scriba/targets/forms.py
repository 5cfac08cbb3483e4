"""What the writes of one kind to one model have in common, and how their values become the texts of their columns.

Always holds: a value that a column is not known to take raises :class:`NotFoldable`, and the ORM writes that row by itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, Final

from django.db import models

from scriba.targets.columns import NULL, Column, Encoder
from scriba.targets.kinds import NotFoldable
from scriba.targets.layers import Form, Op, Table, Use

__all__ = ["RowForm"]

MOST_KINDS: Final = 1_000  #: combinations of types that one form remembers


class RowForm(Form):
    """A form that turns Python values into its columns' texts.

    How is looked up once for each combination of their types, because it is the same for nearly all rows.
    """

    __slots__ = ("_encoder", "_places", "_steps")

    def __init__(  # noqa: PLR0913 - what a kind of row is made of
        self,
        op: Op,
        table: Table,
        columns: tuple[Column, ...],
        uses: tuple[Use, ...],
        takes_over: tuple[Column, ...] | None = None,
        places: tuple[int, ...] | None = None,
    ) -> None:
        super().__init__(op, table, columns, takes_over, uses)
        self._encoder = _when_updated if op is Op.UPDATE else _when_inserted
        self._places = places  #: where the columns stand among the values that are given; None: they are all
        self._steps: dict[tuple[type, ...], list[tuple[int, Encoder]]] = {}

    def texts_of(self, values: Iterable[Any]) -> list[str | None]:
        """Return the text of each column. Raises `NotFoldable`; `values` stay as they are."""
        texts = list(values)
        if self._places is not None:
            texts = [texts[place] for place in self._places]
        kinds = tuple(map(type, texts))
        steps = self._steps.get(kinds)
        if steps is None:
            steps = self._learn(kinds)
        for place, encode in steps:
            texts[place] = encode(texts[place])
        return texts

    def _learn(self, kinds: tuple[type, ...]) -> list[tuple[int, Encoder]]:
        encoders = [self._encoder(column, kind) for column, kind in zip(self.columns, kinds, strict=True)]
        steps = [
            (place, encode)
            for place, (kind, encode) in enumerate(zip(kinds, encoders, strict=True))
            if encode is not NULL and not (encode is str and kind is str)
        ]
        if len(self._steps) >= MOST_KINDS:
            self._steps.clear()
        self._steps[kinds] = steps
        return steps


def _when_inserted(column: Column, kind: type) -> Encoder:
    return column.known.get(kind, column.text)


def _when_updated(column: Column, kind: type) -> Encoder:
    usual = partial(_reference, column) if issubclass(kind, models.Model) else column.update_text
    return column.update_known.get(kind, usual)


def _reference(column: Column, other: Any) -> str | None:
    """Return a foreign key's text for the instance it refers to. Raises `NotFoldable`."""
    if not column.field.is_relation or not other._is_pk_set():
        raise NotFoldable  # it waits for its key, or is none
    return column.update_text(other.prepare_database_save(column.field))
