"""The body of a batch: an Arrow IPC encapsulated RecordBatch message, without a schema message.

The attributes determine the schema, so a batch does not carry it:

    [timestamp_ms: int64 not null]   attributes bit 9; absent: every record has base_timestamp_ms
    [key: binary]                    attributes bit 8; absent: every key is null
    value: binary
    [headers: map<utf8, binary>]     attributes bit 10; absent: no record has headers
    [offset_delta: uint32 not null]  attributes bit 6; absent: row i has base_offset + i

Arrow's own body compression (`BodyCompression`) is not allowed: only the codec in the attributes is subject to the
inflate limits.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa

from raftlog.errors import CorruptRecordError
from raftlog.format.header import Attributes

_SHAPE_BITS: Final = int(Attributes.KEY | Attributes.TIMESTAMP | Attributes.HEADERS | Attributes.SPARSE_OFFSETS)
HEADERS_TYPE: Final = pa.map_(pa.utf8(), pa.binary())

_CONTINUATION: Final = 0xFFFFFFFF
_PREFIX = struct.Struct("<II")
_U16 = struct.Struct("<H")
_I32 = struct.Struct("<i")
_U32 = struct.Struct("<I")
_I64 = struct.Struct("<q")

# Field numbers in Arrow's Message.fbs.
_MESSAGE_HEADER_TYPE: Final = 1
_MESSAGE_HEADER: Final = 2
_MESSAGE_BODY_LENGTH: Final = 3
_BATCH_LENGTH: Final = 0
_BATCH_NODES: Final = 1
_BATCH_BUFFERS: Final = 2
_BATCH_COMPRESSION: Final = 3
_HEADER_TYPE_RECORD_BATCH: Final = 3

# How many field nodes and buffers a column takes in an IPC message.
_NODES_AND_BUFFERS: Final = {
    "timestamp_ms": (1, 2),
    "key": (1, 3),
    "value": (1, 3),
    "headers": (4, 9),
    "offset_delta": (1, 2),
}


@cache
def _schema(shape: int) -> Any:
    fields = []
    if shape & Attributes.TIMESTAMP:
        fields.append(pa.field("timestamp_ms", pa.int64(), nullable=False))
    if shape & Attributes.KEY:
        fields.append(pa.field("key", pa.binary()))
    fields.append(pa.field("value", pa.binary()))
    if shape & Attributes.HEADERS:
        fields.append(pa.field("headers", HEADERS_TYPE))
    if shape & Attributes.SPARSE_OFFSETS:
        fields.append(pa.field("offset_delta", pa.uint32(), nullable=False))
    return pa.schema(fields)


@cache
def _expected_counts(shape: int) -> tuple[int, int]:
    counts = [_NODES_AND_BUFFERS[name] for name in _schema(shape).names]
    return sum(nodes for nodes, _ in counts), sum(buffers for _, buffers in counts)


def schema_for(attributes: int) -> Any:
    """Return the `pyarrow.Schema` of a body under these attributes."""
    return _schema(attributes & _SHAPE_BITS)


def _field(table: memoryview, start: int, number: int) -> int:
    """Return the position of field `number` of the flatbuffer table at `start`, or 0 when it is absent."""
    vtable = start - int(_I32.unpack_from(table, start)[0])
    slot = 4 + 2 * number
    if slot >= _U16.unpack_from(table, vtable)[0]:
        return 0
    relative = int(_U16.unpack_from(table, vtable + slot)[0])
    return start + relative if relative else 0


class MessageLayout(NamedTuple):
    """The positions of the numbers (int64) in the metadata of an encapsulated RecordBatch message."""

    metadata_bytes: int
    """The position at which the buffers begin."""
    body_length_at: int
    rows_at: int
    nodes_at: int
    """For each field: its length, and its number of nulls."""
    buffers_at: int
    """For each buffer: its position and its length."""


def message_layout(message: Any) -> MessageLayout:
    """Return the layout of a message that `encode_body` made of at least one row."""
    view = memoryview(message)
    metadata_bytes = _PREFIX.size + int(_PREFIX.unpack_from(view)[1])
    table = view[_PREFIX.size : metadata_bytes]
    root = int(_U32.unpack_from(table)[0])
    header_at = _field(table, root, _MESSAGE_HEADER)
    batch = header_at + int(_U32.unpack_from(table, header_at)[0])
    nodes, buffers = (_vector(table, batch, number) for number in (_BATCH_NODES, _BATCH_BUFFERS))
    found = (_field(table, root, _MESSAGE_BODY_LENGTH), _field(table, batch, _BATCH_LENGTH), nodes + 4, buffers + 4)
    return MessageLayout(metadata_bytes, *(_PREFIX.size + at for at in found))


def _vector(table: memoryview, start: int, number: int) -> int:
    """Return the position of a vector's length; its elements follow."""
    at = _field(table, start, number)
    return at + int(_U32.unpack_from(table, at)[0])


def _vector_length(table: memoryview, start: int, number: int) -> int:
    at = _field(table, start, number)
    return int(_U32.unpack_from(table, at + int(_U32.unpack_from(table, at)[0]))[0]) if at else 0


def _check_message(body: Any, shape: int) -> None:
    """Refuse a message that does not match the schema to the last byte; Arrow has verified the flatbuffer."""
    view = memoryview(body)
    continuation, metadata_bytes = _PREFIX.unpack_from(view)
    if continuation != _CONTINUATION:
        raise CorruptRecordError("the body is not an Arrow IPC message: no continuation marker")
    table = view[_PREFIX.size : _PREFIX.size + metadata_bytes]
    message = int(_U32.unpack_from(table)[0])
    header_type_at = _field(table, message, _MESSAGE_HEADER_TYPE)
    if not header_type_at or table[header_type_at] != _HEADER_TYPE_RECORD_BATCH:
        raise CorruptRecordError("the body is an Arrow IPC message of another kind than RecordBatch")
    length_at = _field(table, message, _MESSAGE_BODY_LENGTH)
    buffers_bytes = int(_I64.unpack_from(table, length_at)[0]) if length_at else 0
    if _PREFIX.size + metadata_bytes + buffers_bytes != len(view):
        raise CorruptRecordError(
            f"the Arrow message accounts for {_PREFIX.size + metadata_bytes + buffers_bytes} bytes "
            f"of a body of {len(view)}"
        )
    header_at = _field(table, message, _MESSAGE_HEADER)
    batch = header_at + int(_U32.unpack_from(table, header_at)[0])
    if _field(table, batch, _BATCH_COMPRESSION):
        raise CorruptRecordError("the Arrow message is compressed by itself; use the codec in the attributes")
    counts = (_vector_length(table, batch, _BATCH_NODES), _vector_length(table, batch, _BATCH_BUFFERS))
    if counts != _expected_counts(shape):
        raise CorruptRecordError(
            f"the Arrow message has {counts[0]} field nodes and {counts[1]} buffers, "
            f"the attributes call for {_expected_counts(shape)}"
        )


def binary_array(cells: Sequence[bytes | None]) -> Any:
    """Return a `pyarrow.Array` of binary cells, None for null, as `pyarrow.array` does.

    The first call of `pyarrow.array` imports pandas where it is installed. That would stop the clients' event loop for
    a second or more. So where the import is still to come, the array is made by hand, in twice the time.
    """
    if not would_import_pandas():
        return pa.array(cells, pa.binary())
    return _variable_length(pa.binary(), [cell or b"" for cell in cells], _validity(cells))


def headers_array(rows: Sequence[Sequence[tuple[str, bytes | None]] | None]) -> Any:
    """Return a `pyarrow.Array` of the headers of rows, None for a row without any; see `binary_array`."""
    if not would_import_pandas():
        return pa.array(rows, HEADERS_TYPE)
    entries = [entry for row in rows if row is not None for entry in row]
    names = _variable_length(pa.utf8(), [name.encode() for name, _ in entries])
    contents = binary_array([content for _, content in entries])
    fields = [HEADERS_TYPE.key_field, HEADERS_TYPE.item_field]
    offsets = _offsets((0 if row is None else len(row) for row in rows), len(rows))
    children = [pa.StructArray.from_arrays([names, contents], fields=fields)]
    return pa.Array.from_buffers(HEADERS_TYPE, len(rows), [_validity(rows), offsets], children=children)


def _variable_length(kind: Any, cells: Sequence[bytes], valid: Any = None) -> Any:
    buffers = [valid, _offsets(map(len, cells), len(cells)), pa.py_buffer(b"".join(cells))]
    return pa.Array.from_buffers(kind, len(cells), buffers)


def _offsets(lengths: Iterable[int], count: int) -> Any:
    offsets = np.zeros(count + 1, np.int32)
    np.cumsum(np.fromiter(lengths, np.int32, count), out=offsets[1:])
    return pa.py_buffer(offsets)


def _validity(cells: Sequence[object]) -> Any:
    """Return the buffer that says which cells are not None; None: all."""
    if None not in cells:
        return None
    is_there = np.fromiter((cell is not None for cell in cells), np.bool_, len(cells))
    return pa.py_buffer(np.packbits(is_there, bitorder="little"))


def would_import_pandas() -> bool:
    """Whether the next call of `pyarrow.array` would import pandas."""
    return "pandas" not in sys.modules and _has_pandas()


@cache
def _has_pandas() -> bool:
    try:
        return find_spec("pandas") is not None
    except ModuleNotFoundError:  # a program of raftlog's keeps it out
        return False


def int64_array(numbers: Any, kind: Any = None) -> Any:
    """Return a `pyarrow.Array` of a NumPy array of int64 without nulls, whose memory it shares.

    `kind`: int64 by default, or another type of such numbers.
    """
    return pa.Array.from_buffers(kind or pa.int64(), len(numbers), [None, pa.py_buffer(numbers)], 0)


def encode_body(columns: Any) -> Any:
    """Return the IPC message of a `pyarrow.RecordBatch` whose schema is one of `schema_for`, as a `pyarrow.Buffer`."""
    return columns.serialize()


def decode_body(body: Any, attributes: int, *, trusted: bool = False) -> Any:
    """Return the `pyarrow.RecordBatch` in `body` (a `pyarrow.Buffer`), sharing its memory.

    `trusted` skips the validation of contents, for batches that a broker has validated.

    Raises:
        CorruptRecordError: the body is not exactly one message of the schema.
    """
    shape = attributes & _SHAPE_BITS
    schema = _schema(shape)
    try:
        if not trusted:
            message = pa.ipc.read_message(body)  # verifies the flatbuffer
            _check_message(body, shape)
            columns = pa.ipc.read_record_batch(message, schema)
            columns.validate(full=True)
        else:
            columns = pa.ipc.read_record_batch(body, schema)
    except (OSError, pa.ArrowException, ValueError, EOFError, struct.error, IndexError) as error:
        raise CorruptRecordError(f"the body does not decode as Arrow columns: {error}") from None
    if not trusted:
        for name in ("timestamp_ms", "offset_delta"):
            if schema.get_field_index(name) >= 0 and columns.column(name).null_count:
                raise CorruptRecordError(f"the column {name} has nulls")
    return columns
