"""What the columns `data` and `metadata` of a Commanded store hold, and the plain values they stand for.

A value arrives as it was stored: ``bytes`` from a bytea column, the JSON text (``str``) from a jsonb column. Which
serializer wrote it is a setting of the Elixir application, so ``auto`` decides per value. The decoded values are plain:
dicts, lists, strings, numbers. Decoding happens in the worker, and whatever it raises is that one event's dead letter.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Final

from scriba.exceptions import ConfigurationError, SourceError, did_you_mean
from scriba.sources.building import Build, TypeMap
from scriba.sources.decoding import Decoding, PayloadCodec, RawColumn, load_json
from scriba.sources.erlang_terms import VERSION_BYTE, decode_term

__all__ = ["SERIALIZERS", "ElixirTypes", "SerializedColumn", "checked_serializer", "codec_for", "type_forms"]

Raw = bytes | str
Serializer = str | Callable[[bytes, "str | None"], Any]


def codec_for(serializer: Serializer, column: str, schema: str, decoding: Decoding) -> PayloadCodec:
    """Return the codec of a store whose columns are of the type `column` (``bytea`` or ``jsonb``).

    Raises :class:`~scriba.exceptions.SourceError` for a serializer that cannot have written such a column.
    """
    wanted = _COLUMNS.get(serializer) if isinstance(serializer, str) else None
    if wanted is not None and wanted != column:
        msg = (
            f"serializer={serializer!r} reads columns of type {wanted}, but {schema}.events.data is of type {column}. "
            "Leave the option out: each value is then recognised by itself."
        )
        raise SourceError(msg)
    data = SerializedColumn(serializer, column)
    return PayloadCodec(data, SerializedColumn(serializer, column, is_metadata=True), decoding)


def checked_serializer(serializer: object) -> Any:
    """Return the option `serializer`: one of four names, or a callable.

    Raises :class:`~scriba.exceptions.ConfigurationError`.
    """
    if callable(serializer) or (isinstance(serializer, str) and serializer in SERIALIZERS):
        return serializer
    hint = (
        did_you_mean(serializer, SERIALIZERS)
        if isinstance(serializer, str)
        else f"; accepted: {', '.join(SERIALIZERS)}."
    )
    msg = f"CommandedSource: serializer must be a name or a callable (bytes, event_type), not {serializer!r}{hint}"
    raise ConfigurationError(msg)


def type_forms(event_type: str) -> tuple[str, str, str]:
    """Return the names that mean an event type of Elixir: whole, without ``Elixir.``, and its last part alone."""
    return event_type, event_type.removeprefix("Elixir."), event_type.rpartition(".")[2]


class ElixirTypes(TypeMap):
    """The option ``types=``, where a class also stands for its name behind Elixir modules."""

    def find(self, name: str) -> Build | None:
        """Return what builds events of the type `name`, or of one of its shorter forms."""
        return next((build for form in type_forms(name) if (build := super(ElixirTypes, self).find(form))), None)


class SerializedColumn(RawColumn):
    """A column of the store. A callable serializer gets (bytes, event type), and (bytes, None) for metadata."""

    def __init__(self, serializer: Serializer, column: str, *, is_metadata: bool = False) -> None:
        super().__init__(_called(serializer) if callable(serializer) else SERIALIZERS[serializer])
        self._is_binary = column == "bytea"
        self._is_opaque = callable(serializer) and self._is_binary
        self._is_metadata = is_metadata

    def load(self, raw: Raw | None, event_type: str) -> Any:
        """Return the decoded value; None for NULL."""
        return None if raw is None else self._hook(raw, None if self._is_metadata else event_type)  # type: ignore[arg-type]

    def stored(self, raw: Raw | None) -> Any:
        """Return what a dead letter keeps: the JSON value where it is JSON, and the bytes where it is not."""
        if raw is None or (isinstance(raw, bytes) and (self._is_opaque or raw[:1] == _VERSION)):
            return raw
        try:
            return json.loads(raw)
        except (ValueError, RecursionError):
            return raw

    def restored(self, stored: Any) -> Any:
        """Return what the column held: the inverse of :meth:`stored`, up to the spelling of the JSON."""
        if stored is None or isinstance(stored, bytes):
            return stored
        text = json.dumps(stored)
        return text.encode() if self._is_binary else text


def _called(serializer: Callable[[bytes, str | None], Any]) -> Callable[[Raw, str | None], Any]:
    return lambda raw, event_type: serializer(raw.encode() if isinstance(raw, str) else raw, event_type)


def _auto(raw: Raw, event_type: str | None) -> Any:
    if isinstance(raw, bytes):
        return _term(raw, event_type) if raw[:1] == _VERSION else load_json(raw)
    try:
        return _json(raw, event_type)
    except ValueError:
        return load_json(raw)  # a string after all, not JSON in a string


def _json(raw: Raw, _event_type: str | None) -> Any:
    value = load_json(raw)
    # A serializer that writes JSON text, with jsonb columns: the column then holds a JSON string that holds JSON.
    return load_json(value) if isinstance(raw, str) and isinstance(value, str) else value


def _jsonb(raw: Raw, _event_type: str | None) -> Any:
    return load_json(raw)


def _term(raw: Raw, _event_type: str | None) -> Any:
    return decode_term(raw.encode() if isinstance(raw, str) else raw)


_VERSION: Final = bytes([VERSION_BYTE])
_COLUMNS: Final = {"term": "bytea", "jsonb": "jsonb"}
SERIALIZERS: Final[Mapping[str, Callable[[Any, Any], Any]]] = {
    "auto": _auto,
    "json": _json,
    "jsonb": _jsonb,
    "term": _term,
}
