"""Kafka's messages, from a table of definitions: `definitions` reads the table, `Message` decodes and encodes.

A definition is a head and an indented list of fields:

    FindCoordinatorRequest 10 0-4 flexible 3        name, API key (requests only), versions, first flexible version
        key: string 0-3                             a field, and the versions that have it (all, if none are named)
        key_type: int8 1+
        coordinator_keys: []string 4+               an array; `[]` alone is an array of the structures indented below
        host: string null3+ = null                  may be null, from version 3 on; the default after `=`
        hint: struct 4+ tag0                        a tagged field (KIP-482); encoded only if it is not the default

A message is a dict by field name. A field that a version lacks has its default after decoding, and is left out when
encoding. `records` are decoded to a `memoryview` of the request, not copied; every other value is a copy.

Bounds: nothing is allocated for a length or count that the bytes left cannot hold, and a message holds at most
`Message.max_elements` array elements, so a small frame cannot become a large object. Unknown tagged fields are skipped;
a header or structure has at most MAX_TAGGED_FIELDS, which count as elements too.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from raftlog.errors import InvalidRequestError

Fields: TypeAlias = dict[str, Any]
"""A message, or a structure in one."""

MAX_ELEMENTS: Final = 20_000
"""Array elements of one message, of all arrays together: 10,000 topics of one partition each, or one of 19,999."""
MAX_WITH_REPLICAS: Final = 100_000
"""Of a message whose partitions have lists of replicas."""
MAX_TAGGED_FIELDS: Final = 16
"""Of one structure, or of a header, where clients send none."""
FOREVER: Final = 1 << 15
_VARINT_BYTES: Final = 5

Read: TypeAlias = Callable[["Reader"], Any]
Write: TypeAlias = Callable[[list[bytes], Any], None]


class LargeMessage(Exception):
    """A message has more elements than are to be decoded at once."""


class Reader:
    """A position in the bytes of a message."""

    __slots__ = ("at", "data", "elements_left", "end", "limit", "most")

    def __init__(self, data: memoryview, at: int = 0, most: int = MAX_ELEMENTS, limit: int = MAX_ELEMENTS) -> None:
        """`most`: elements to be read now. `limit`: elements that the message may have."""
        self.data = data
        self.at = at
        self.end = len(data)
        self.elements_left = self.most = min(most, limit)
        self.limit = limit

    def take(self, size: int) -> memoryview:
        """Return the next `size` bytes without a copy. Raises InvalidRequestError: they are not there."""
        begin = self.at
        if not 0 <= size <= self.end - begin:
            raise InvalidRequestError(f"the request claims {size} more bytes, {self.end - begin} are left")
        self.at = begin + size
        return self.data[begin : begin + size]

    def varint(self) -> int:
        """Return an unsigned varint of at most 32 bits."""
        value = 0
        for number, byte in enumerate(self.data[self.at : self.at + _VARINT_BYTES]):
            value |= (byte & 0x7F) << (7 * number)
            if byte < 0x80:
                self.at += number + 1
                if value >> 32:
                    break
                return value
        raise InvalidRequestError("the request has a length that is no varint of 32 bits")

    def tagged_fields(self) -> Iterator[tuple[int, memoryview]]:
        """Yield the tags and values of the tagged fields that begin here. Raises InvalidRequestError: too many."""
        count = self.varint()
        if count > MAX_TAGGED_FIELDS:
            raise InvalidRequestError(f"a structure has {count} tagged fields, at most {MAX_TAGGED_FIELDS} are taken")
        for _ in range(self.count(count)):
            tag, size = self.varint(), self.varint()
            yield tag, self.take(size)

    def count(self, count: int) -> int:
        """Return the number of an array's elements, checked. Raises InvalidRequestError, LargeMessage: too many."""
        if not 0 <= count <= self.end - self.at:  # each has at least one byte
            raise InvalidRequestError(f"the request claims {count} elements in {self.end - self.at} bytes")
        self.elements_left -= count
        if self.elements_left < 0:
            if self.most < self.limit:
                raise LargeMessage
            raise InvalidRequestError(f"this request may have {self.limit} array elements: split it")
        return count


def varint(value: int) -> bytes:
    """Return an unsigned varint."""
    if value < 0x80:
        return _ONE_BYTE[value]
    found = bytearray()
    while value >= 0x80:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


_ONE_BYTE: Final = tuple(bytes((value,)) for value in range(0x80))


# Primitive types


def _number(code: str) -> tuple[Read, Write]:
    packed = struct.Struct(f">{code}")
    size = packed.size
    unpack_from, pack = packed.unpack_from, packed.pack

    def read(reader: Reader) -> Any:
        at = reader.at
        reader.at = at + size
        return unpack_from(reader.data, at)[0]  # struct.error where the bytes end

    return read, lambda out, value: out.append(pack(value))


_NUMBERS: Final = {
    name: _number(code)
    for name, code in (
        ("bool", "?"),
        ("int8", "b"),
        ("int16", "h"),
        ("int32", "i"),
        ("int64", "q"),
        ("uint16", "H"),
        ("float64", "d"),
    )
}
_read_i16, _write_i16 = _NUMBERS["int16"]
_read_i32, _write_i32 = _NUMBERS["int32"]


def _uuid() -> tuple[Read, Write]:
    return lambda reader: bytes(reader.take(16)), lambda out, value: out.append(value)


def _length(flexible: bool, short: bool) -> tuple[Read, Write]:
    """Return how a length is read and written; -1 stands for null."""
    if flexible:
        return lambda reader: reader.varint() - 1, lambda out, value: out.append(varint(value + 1))
    return (_read_i16, _write_i16) if short else (_read_i32, _write_i32)


def _text_or_bytes(kind: str, flexible: bool, nullable: bool) -> tuple[Read, Write]:
    read_length, write_length = _length(flexible, kind == "string")

    def read(reader: Reader) -> Any:
        length = read_length(reader)
        if length == -1 and nullable:
            return None
        taken = reader.take(length)
        if kind == "string":
            return str(taken, "utf-8")
        return taken if kind == "records" else bytes(taken)

    def write(out: list[bytes], value: Any) -> None:
        if value is None:
            if not nullable:
                raise ValueError(f"a {kind} of this version cannot be null")
            write_length(out, -1)
            return
        if isinstance(value, list):  # records: the batches one after the other
            write_length(out, sum(map(len, value)))
            out += value
            return
        encoded = value.encode() if isinstance(value, str) else value
        write_length(out, len(encoded))
        out.append(encoded)

    return read, write


# Definitions


@dataclass(slots=True)
class _Field:
    name: str
    kind: str
    """A primitive type, or `struct`."""
    is_array: bool
    first: int
    last: int
    null_from: int
    tag: int | None
    default: Any
    fields: list[_Field] = field(default_factory=list)

    def empty(self) -> Any:
        """Return the default value; those of arrays are not to be changed."""
        if self.default is not _UNSET:
            return self.default
        if self.is_array:
            return ()
        if self.kind == "struct":
            return None
        return {"string": "", "bytes": b"", "records": None, "uuid": bytes(16), "bool": False}.get(self.kind, 0)


_UNSET: Final = object()
_HEAD = re.compile(r"(\w+?)(Request|Response)(?: (\d+))? (\d+)-(\d+) flexible (\d+|never)")
_LINE = re.compile(r"( +)(\w+): (\[\])?(\w*)(?: (\d+)(\+|-\d+)?)?(?: (null)(\d+)?\+?)?(?: tag(\d+))?(?: = (-?\w+))?")


class Message:
    """One request or response in all its versions."""

    def __init__(self, name: str, api_key: int, first: int, last: int, flexible_from: int) -> None:
        self.name = name
        self.api_key = api_key
        """-1: a response."""
        self.first = first
        self.last = last
        self.flexible_from = flexible_from
        self.fields: list[_Field] = []
        self.max_elements = MAX_ELEMENTS
        self._made: dict[int, tuple[Read, Write]] = {}

    def is_flexible(self, version: int) -> bool:
        """Whether that version has compact lengths and tagged fields (KIP-482)."""
        return version >= self.flexible_from

    def decode(self, data: memoryview, version: int, at: int = 0, most: int = MAX_WITH_REPLICAS) -> Fields:
        """Return the message that begins at `at`. Bytes after it are ignored, as Kafka does: librdkafka sends some.

        Raises:
            InvalidRequestError: it is cut short, or exceeds a bound.
            LargeMessage: it has more than `most` elements.
        """
        reader = Reader(data, at, most, self.max_elements)
        try:
            found: Fields = self._codec(version)[0](reader)
        except (struct.error, UnicodeDecodeError) as error:
            raise InvalidRequestError(f"{self.name} version {version} does not decode: {error}") from None
        return found

    def encode(self, message: Fields, version: int) -> list[bytes]:
        """Return the pieces of the encoded message."""
        out: list[bytes] = []
        self._codec(version)[1](out, message)
        return out

    def _codec(self, version: int) -> tuple[Read, Write]:
        made = self._made.get(version)
        if made is None:
            assert self.first <= version <= self.last, f"{self.name} has no version {version}"
            made = self._made[version] = _structure(self.fields, version, self.is_flexible(version))
        return made


def _structure(fields: list[_Field], version: int, flexible: bool) -> tuple[Read, Write]:
    present = [each for each in fields if each.first <= version <= each.last]
    plain = [(each.name, each.empty(), *_codec_of(each, version, flexible)) for each in present if each.tag is None]
    tagged = {
        each.tag: (each.name, each.empty(), *_codec_of(each, version, flexible))
        for each in present
        if each.tag is not None
    }
    defaults = {each.name: each.empty() for each in fields}
    readers = [(name, read) for name, _, read, _ in plain]

    def read_tagged(reader: Reader, found: Fields) -> None:
        for tag, body in reader.tagged_fields():
            if tag in tagged:
                name, _, read, _ = tagged[tag]
                inner = Reader(body, most=reader.most, limit=reader.limit)
                inner.elements_left = reader.elements_left
                found[name] = read(inner)
                reader.elements_left = inner.elements_left

    def read_structure(reader: Reader) -> Fields:
        found = defaults.copy()
        for name, read in readers:
            found[name] = read(reader)
        if flexible:
            read_tagged(reader, found)
        return found

    def write_structure(out: list[bytes], message: Fields) -> None:
        for name, default, _, write in plain:
            write(out, message.get(name, default))
        if flexible:
            said = []
            for tag in sorted(tagged):
                name, default, _, write = tagged[tag]
                value = message.get(name, default)
                if value != default and value != []:
                    body: list[bytes] = []
                    write(body, value)
                    said.append((tag, b"".join(body)))
            out.append(varint(len(said)))
            for tag, encoded in said:
                out += (varint(tag), varint(len(encoded)), encoded)

    return read_structure, write_structure


def _codec_of(each: _Field, version: int, flexible: bool) -> tuple[Read, Write]:
    nullable = version >= each.null_from
    if each.kind == "struct":
        of_one = _structure(each.fields, version, flexible)
        if nullable and not each.is_array:
            of_one = _or_null(of_one)
    elif each.kind in _NUMBERS:
        of_one = _NUMBERS[each.kind]
    elif each.kind == "uuid":
        of_one = _uuid()
    else:
        of_one = _text_or_bytes(each.kind, flexible, nullable and not each.is_array)
    return _array(of_one, flexible, nullable) if each.is_array else of_one


def _or_null(of_one: tuple[Read, Write]) -> tuple[Read, Write]:
    """Return how a structure is read and written that a byte comes before: 1, or -1 for null."""
    read_number, write_number = _NUMBERS["int8"]
    read_one, write_one = of_one

    def read(reader: Reader) -> Any:
        return None if read_number(reader) < 0 else read_one(reader)

    def write(out: list[bytes], value: Any) -> None:
        write_number(out, -1 if value is None else 1)
        if value is not None:
            write_one(out, value)

    return read, write


def _array(of_one: tuple[Read, Write], flexible: bool, nullable: bool) -> tuple[Read, Write]:
    read_length, write_length = _length(flexible, short=False)
    read_one, write_one = of_one

    def read(reader: Reader) -> Any:
        count = read_length(reader)
        if count == -1 and nullable:
            return None
        return [read_one(reader) for _ in range(reader.count(count))]

    def write(out: list[bytes], value: Any) -> None:
        if value is None:
            if not nullable:
                raise ValueError("an array of this version cannot be null")
            write_length(out, -1)
            return
        write_length(out, len(value))
        for each in value:
            write_one(out, each)

    return read, write


def definitions(table: str) -> dict[str, Message]:
    """Return the messages of a table by name (`FetchRequest`). Raises ValueError: a line is not of its form."""
    found: dict[str, Message] = {}
    levels: list[list[_Field]] = []
    for line in filter(str.strip, table.splitlines()):
        if head := _HEAD.fullmatch(line):
            name, kind, api_key, first, last, flexible = head.groups()
            message = Message(
                name + kind,
                int(api_key or -1),
                int(first),
                int(last),
                FOREVER if flexible == "never" else int(flexible),
            )
            found[message.name] = message
            levels = [message.fields]
            continue
        made = _LINE.fullmatch(line)
        if made is None:
            raise ValueError(f"a definition has a line of another form: {line!r}")
        indent, name, array, kind, since, until, null, null_from, tag, default = made.groups()
        if kind and kind != "struct" and kind not in (*_NUMBERS, "string", "bytes", "records", "uuid"):
            raise ValueError(f"{line!r}: there is no type {kind}")
        lowest = int(since or 0)
        last = FOREVER if not since or until == "+" else int((until or f"-{since}")[1:])
        entry = _Field(
            name=name,
            kind=kind or "struct",
            is_array=array is not None,
            first=lowest,
            last=int(last),
            null_from=int(null_from or lowest) if null else FOREVER,
            tag=None if tag is None else int(tag),
            default=_UNSET if default is None else (None if default == "null" else int(default)),
        )
        depth = len(indent) // 4
        if not 1 <= depth <= len(levels):
            raise ValueError(f"{line!r} is indented below nothing")
        del levels[depth:]
        levels[-1].append(entry)
        levels.append(entry.fields)
    return found
