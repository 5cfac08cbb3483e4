"""Read Erlang's External Term Format: what the term serializer of a Commanded event store writes.

Only data comes out: numbers, strings, bytes, lists, tuples and dicts. Nothing is ever created or called because of
what the bytes say: an atom is a string, a struct is a dict without its module name. The bytes may be hostile: how
deep, how large and how many terms is bounded, and whatever does not fit raises :class:`TermError`, nothing else.

The values are those that the JSON serializer would have stored for the same event, so that a handler need not know
which of them wrote it: `nil` is None, other atoms are strings, a Decimal is a string (``"10.50"``), dates and times
are ISO 8601 strings, and a list of small integers, which Erlang stores like a string, is a list.
"""

from __future__ import annotations

import math
import re
import struct
import zlib
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from scriba.sources.elixir_structs import plain_struct

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["VERSION_BYTE", "Limits", "TermError", "decode_term"]

VERSION_BYTE: Final = 131  #: the first byte of every term; no JSON text begins with it
_COMPRESSED: Final = 80
_ATOM_TAGS: Final = frozenset({100, 115, 118, 119})
#: The longest number that ``str()`` and JSON text can still carry in Python (4,300 digits).
_LONGEST_NUMBER: Final = 1_785
_OLD_FLOAT: Final = re.compile(rb"-?\d\.\d{1,24}e[+-]\d{2,3}\0*")
#: What has no meaning outside the virtual machine that wrote it.
_WITHOUT_MEANING: Final = {
    77: "a bit string that is not whole bytes", 82: "a reference to an atom cache", 88: "a process", 89: "a port",
    90: "a reference", 101: "a reference", 102: "a port", 103: "a process", 112: "a function", 113: "a function",
    114: "a reference", 117: "a function", 120: "a port", 121: "a local term",
}  # fmt: skip

_u16 = struct.Struct(">H").unpack_from
_u32 = struct.Struct(">I").unpack_from
_i32 = struct.Struct(">i").unpack_from
_f64 = struct.Struct(">d").unpack_from


class TermError(ValueError):
    """The bytes are no term that could be read; the message says what was met, and at which byte."""


class Limits(NamedTuple):
    """How much one value may cost: bytes after decompression, levels of nesting, and terms in all."""

    max_bytes: int = 32_000_000
    max_depth: int = 128
    max_terms: int = 4_000_000


_DEFAULT: Final = Limits()


def decode_term(data: bytes | memoryview, limits: Limits = _DEFAULT) -> Any:
    """Return the value of one encoded term, which must fill `data` exactly.

    Raises :class:`TermError` for everything else: truncated or trailing bytes, a tag without meaning here, a value
    beyond `limits`, two map keys that would be one key in Python.
    """
    data = bytes(data)
    if len(data) < 2 or data[0] != VERSION_BYTE:  # noqa: PLR2004 - the version byte and one tag
        msg = f"not Erlang's external term format: it begins with byte {VERSION_BYTE}, this with {data[:1]!r}"
        raise TermError(msg)
    body = _inflate(data, limits) if data[1] == _COMPRESSED else data[1:]
    if len(body) > limits.max_bytes:
        msg = f"the term has {len(body)} bytes; at most {limits.max_bytes} are read"
        raise TermError(msg)
    reader = _Reader(body, limits)
    try:
        value = reader.term(0)
    except (IndexError, struct.error):
        msg = f"the term is cut off after {len(body)} bytes"
        raise TermError(msg) from None
    if reader.at != len(body):
        msg = f"{len(body) - reader.at} bytes follow the end of the term"
        raise TermError(msg)
    return value


def _inflate(data: bytes, limits: Limits) -> bytes:
    """Decompress, but never more than was announced, and never more than is allowed."""
    if len(data) < 6:  # noqa: PLR2004 - version, tag and the announced size
        msg = "the compressed term is cut off before its size"
        raise TermError(msg)
    (size,) = _u32(data, 2)
    if size > limits.max_bytes:
        msg = f"the compressed term announces {size} bytes; at most {limits.max_bytes} are read"
        raise TermError(msg)
    inflater = zlib.decompressobj()
    try:
        body = inflater.decompress(data[6:], size + 1)
    except zlib.error as error:
        msg = f"the compressed term cannot be decompressed: {error}"
        raise TermError(msg) from error
    if len(body) != size or not inflater.eof or inflater.unused_data:
        msg = f"the compressed term does not hold the {size} bytes that it announces"
        raise TermError(msg)
    return body


class _Reader:
    """A place in the bytes, and what is left of the budget."""

    __slots__ = ("_data", "_limits", "_terms_left", "at")

    def __init__(self, data: bytes, limits: Limits) -> None:
        self._data = data
        self._limits = limits
        self._terms_left = limits.max_terms
        self.at = 0

    def term(self, depth: int) -> Any:
        tag = self._data[self.at]
        self.at += 1
        self._spend(1)
        read = _READERS.get(tag)
        if read is None:
            raise self._unreadable(tag)
        return read(self, depth)

    # --- containers ---------------------------------------------------------------------------------------

    def map_or_struct(self, depth: int) -> Any:
        count = self._count(2, depth)
        entries: dict[Any, Any] = {}
        struct_name = None
        for _ in range(count):
            is_atom = self._data[self.at] in _ATOM_TAGS
            key = self._key(depth + 1)
            if is_atom and key == "__struct__":
                struct_name = self.term(depth + 1)
                continue
            if key in entries:
                msg = f"two keys of one map would both be {key!r} in a dict (an atom and a string, or 1 and 1.0)"
                raise TermError(msg)
            entries[key] = self.term(depth + 1)
        return entries if struct_name is None else plain_struct(struct_name, entries)

    def proper_list(self, depth: int) -> list[Any]:
        items = [self.term(depth + 1) for _ in range(self._count(1, depth))]
        if self._data[self.at] != 106:  # noqa: PLR2004 - the empty list that ends a proper one
            msg = f"an improper list (byte {self.at}) has no counterpart here"
            raise TermError(msg)
        self.at += 1
        return items

    def small_integers(self, _depth: int) -> list[int]:
        """Read what Erlang stores like a string: a list of integers below 256."""
        items = self._take(self._size16())
        self._spend(len(items))
        return list(items)

    def small_tuple(self, depth: int) -> tuple[Any, ...]:
        return self._tuple(self._size8(), depth)

    def large_tuple(self, depth: int) -> tuple[Any, ...]:
        return self._tuple(self._count(1, depth), depth)

    def _tuple(self, count: int, depth: int) -> tuple[Any, ...]:
        self._descend(depth)
        return tuple([self.term(depth + 1) for _ in range(count)])

    def _key(self, depth: int) -> Any:
        if self._data[self.at] in _ATOM_TAGS:
            tag = self._data[self.at]
            self.at += 1
            self._spend(1)
            return _ATOM_NAMES[tag](self)
        key = self.term(depth)
        try:
            hash(key)
        except TypeError:
            msg = f"a map key of type {type(key).__name__} cannot be the key of a dict"
            raise TermError(msg) from None
        return key

    # --- leaves -------------------------------------------------------------------------------------------

    def empty_list(self, _depth: int) -> list[Any]:
        return []

    def small_integer(self, _depth: int) -> int:
        return self._size8()

    def integer(self, _depth: int) -> int:
        (value,) = _i32(self._data, self.at)
        self.at += 4
        return int(value)

    def small_big(self, _depth: int) -> int:
        return self._big(self._size8())

    def large_big(self, _depth: int) -> int:
        return self._big(self._size32())

    def _big(self, size: int) -> int:
        if size > _LONGEST_NUMBER:
            msg = f"a number of {size} bytes; at most {_LONGEST_NUMBER} (4,300 digits) are read"
            raise TermError(msg)
        negative = self._size8()
        value = int.from_bytes(self._take(size), "little")
        return -value if negative else value

    def new_float(self, _depth: int) -> float:
        (value,) = _f64(self._data, self.at)
        self.at += 8
        if not math.isfinite(value):
            msg = f"a float that is not a number (byte {self.at - 8})"
            raise TermError(msg)
        return float(value)

    def old_float(self, _depth: int) -> float:
        """Read a float as text, as it was written long ago."""
        text = self._take(31)
        if not _OLD_FLOAT.fullmatch(text) or not math.isfinite(value := float(text.rstrip(b"\0"))):
            msg = f"{text!r} is no float"
            raise TermError(msg)
        return value

    def binary(self, _depth: int) -> str | bytes:
        """Return text where the bytes are UTF-8, which is what Elixir calls a string, and bytes otherwise."""
        content = self._take(self._size32())
        try:
            return content.decode()
        except UnicodeDecodeError:
            return content

    def atom_latin1(self, _depth: int) -> Any:
        name = self.name_latin1_16()
        return _CONSTANTS.get(name, name)

    def small_atom_latin1(self, _depth: int) -> Any:
        name = self.name_latin1_8()
        return _CONSTANTS.get(name, name)

    def atom(self, _depth: int) -> Any:
        name = self.name_16()
        return _CONSTANTS.get(name, name)

    def small_atom(self, _depth: int) -> Any:
        name = self.name_8()
        return _CONSTANTS.get(name, name)

    def name_latin1_16(self) -> str:
        return self._take(self._size16()).decode("latin-1")

    def name_latin1_8(self) -> str:
        return self._take(self._size8()).decode("latin-1")

    def name_16(self) -> str:
        return self._utf8(self._take(self._size16()))

    def name_8(self) -> str:
        return self._utf8(self._take(self._size8()))

    # --- bytes and bounds ---------------------------------------------------------------------------------

    def _take(self, size: int) -> bytes:
        start, self.at = self.at, self.at + size
        if self.at > len(self._data):
            msg = (
                f"the term is cut off: {size} bytes were announced at byte {start}, {len(self._data) - start} are there"
            )
            raise TermError(msg)
        return self._data[start : self.at]

    def _size8(self) -> int:
        value = self._data[self.at]
        self.at += 1
        return value

    def _size16(self) -> int:
        (value,) = _u16(self._data, self.at)
        self.at += 2
        return int(value)

    def _size32(self) -> int:
        (value,) = _u32(self._data, self.at)
        self.at += 4
        return int(value)

    def _count(self, bytes_each: int, depth: int) -> int:
        """Read how many elements follow; a number that the remaining bytes cannot hold is refused at once."""
        self._descend(depth)
        count = self._size32()
        if count * bytes_each > len(self._data) - self.at:
            msg = f"{count} elements were announced at byte {self.at - 4}, more than the remaining bytes can hold"
            raise TermError(msg)
        return count

    def _descend(self, depth: int) -> None:
        if depth >= self._limits.max_depth:
            msg = f"the term is nested deeper than {self._limits.max_depth} levels"
            raise TermError(msg)

    def _spend(self, terms: int) -> None:
        self._terms_left -= terms
        if self._terms_left < 0:
            msg = f"the term holds more than {self._limits.max_terms} values"
            raise TermError(msg)

    def _utf8(self, name: bytes) -> str:
        try:
            return name.decode()
        except UnicodeDecodeError:
            msg = f"the name of an atom is not UTF-8: {name!r}"
            raise TermError(msg) from None

    def _unreadable(self, tag: int) -> TermError:
        what = _WITHOUT_MEANING.get(tag)
        reason = f"{what}, which means nothing outside its virtual machine" if what else "no known kind of term"
        return TermError(f"tag {tag} at byte {self.at - 1}: {reason}")


_CONSTANTS: Final[dict[str, Any]] = {"nil": None, "true": True, "false": False}

_READERS: Final[dict[int, Callable[[_Reader, int], Any]]] = {
    70: _Reader.new_float,
    97: _Reader.small_integer,
    98: _Reader.integer,
    99: _Reader.old_float,
    100: _Reader.atom_latin1,
    104: _Reader.small_tuple,
    105: _Reader.large_tuple,
    106: _Reader.empty_list,
    107: _Reader.small_integers,
    108: _Reader.proper_list,
    109: _Reader.binary,
    110: _Reader.small_big,
    111: _Reader.large_big,
    115: _Reader.small_atom_latin1,
    116: _Reader.map_or_struct,
    118: _Reader.atom,
    119: _Reader.small_atom,
}

#: An atom as a map key keeps its name, `nil` and the booleans included: keys are strings, as in JSON.
_ATOM_NAMES: Final[dict[int, Callable[[_Reader], str]]] = {
    100: _Reader.name_latin1_16,
    115: _Reader.name_latin1_8,
    118: _Reader.name_16,
    119: _Reader.name_8,
}
