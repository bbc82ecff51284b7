"""Batches of a few short records without Arrow: the same bytes as from `encode_batch`, in a fraction of the time.

All Arrow messages with the same columns have the same shape and differ only in some numbers. So Arrow writes one
template of each shape, and this module fills in the numbers: lengths of columns and buffers, and buffer positions.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import Final, NamedTuple

import google_crc32c
import pyarrow as pa

from raftlog.errors import InvalidRecord
from raftlog.format.columns import binary_array, encode_body, message_layout, schema_for
from raftlog.format.header import (
    CODEC_MASK,
    HEADER_BYTES,
    LENGTH_END,
    MAGIC,
    NO_PRODUCER_ID,
    Attributes,
    BatchHeader,
    Buffer,
    pack_checked,
)

FEW: Final = 64
"""Up to this many short records, this module is certainly faster than Arrow."""
SHORT_BYTES: Final = 64 << 10
"""The most bytes of all records of a batch."""

_KEY: Final = int(Attributes.KEY)
_NEITHER_KEY_NOR_VALUE: Final = CODEC_MASK | int(Attributes.TIMESTAMP | Attributes.HEADERS | Attributes.SPARSE_OFFSETS)
_PADDING: Final = (b"", b"\0" * 7, b"\0" * 6, b"\0" * 5, b"\0" * 4, b"\0" * 3, b"\0" * 2, b"\0")
_FRONT = struct.Struct("<qIiBI")
_I64 = struct.Struct("<q")


class _Template(NamedTuple):
    """The metadata of a message, and the positions of its numbers."""

    metadata: bytes
    body_length_at: int
    rows_at: int
    nodes_at: int
    buffers_at: int
    nodes: struct.Struct
    buffers: struct.Struct


@cache
def _template(columns: int) -> _Template:
    attributes = _KEY if columns == 2 else 0  # key and value
    array = binary_array([b"-"])
    message = encode_body(pa.RecordBatch.from_arrays([array] * columns, schema=schema_for(attributes)))
    layout = message_layout(message)
    return _Template(
        bytes(message)[: layout.metadata_bytes],
        layout.body_length_at,
        layout.rows_at,
        layout.nodes_at,
        layout.buffers_at,
        struct.Struct("<" + "qq" * columns),
        struct.Struct("<" + "qqqqqq" * columns),
    )


def _column(cells: Sequence[bytes], begin: int) -> tuple[tuple[int, ...], bytes, bytes, int]:
    """Return the numbers of a binary column's buffers, the buffers, and the position of the next one."""
    ends = [0, *accumulate(map(len, cells))]
    offsets_bytes, data_bytes = 4 * len(ends), ends[-1]
    offsets = struct.pack(f"<{len(ends)}i", *ends) + _PADDING[offsets_bytes % 8]
    data_begin = begin + len(offsets)
    padding = _PADDING[data_bytes % 8]
    numbers = (begin, 0, begin, offsets_bytes, data_begin, data_bytes)
    return numbers, offsets, b"".join(cells) + padding, data_begin + data_bytes + len(padding)


def _filled(template: _Template, nodes: tuple[int, ...], buffers: tuple[int, ...], end: int) -> bytearray:
    """Return the metadata of a message with these numbers, whose buffers have `end` bytes in all."""
    metadata = bytearray(template.metadata)
    _I64.pack_into(metadata, template.body_length_at, end)
    _I64.pack_into(metadata, template.rows_at, nodes[0])
    template.nodes.pack_into(metadata, template.nodes_at, *nodes)
    template.buffers.pack_into(metadata, template.buffers_at, *buffers)
    return metadata


def encode_few(
    keys: Sequence[bytes] | None,
    values: Sequence[bytes],
    base_timestamp_ms: int,
    *,
    attributes: int = 0,
    producer_id: int = NO_PRODUCER_ID,
    producer_epoch: int = -1,
    base_sequence: int = -1,
    base_offset: int = 0,
    leader_epoch: int = -1,
) -> bytes:
    """Return the same bytes as an uncompressed `encode_batch` of these records, none of which is null.

    Raises:
        InvalidRecord: there are no records, or not as many keys as values.
    """
    rows = len(values)
    if not rows:
        raise InvalidRecord("a batch holds at least one record")
    body_of_keys: tuple[bytes, ...] = ()
    numbers: tuple[int, ...] = ()
    nodes: tuple[int, ...] = (rows, 0)
    end = 0
    if keys is not None:
        if len(keys) != rows:
            raise InvalidRecord(f"columns of different lengths: {len(keys)} and {rows}")
        attributes |= _KEY
        numbers, *pieces, end = _column(keys, 0)
        body_of_keys, nodes = tuple(pieces), (rows, 0, rows, 0)
    of_values, *pieces, end = _column(values, end)
    template = _template(1 if keys is None else 2)
    metadata = _filled(template, nodes, (*numbers, *of_values), end)
    checked = b"".join(
        (
            pack_checked(
                attributes, rows - 1, rows, base_timestamp_ms, base_timestamp_ms,
                producer_id, producer_epoch, base_sequence,
            ),
            metadata,
            *body_of_keys,
            *pieces,
        )
    )  # fmt: skip
    return (
        _FRONT.pack(
            base_offset,
            HEADER_BYTES - LENGTH_END + len(metadata) + end,
            leader_epoch,
            MAGIC,
            google_crc32c.value(checked),
        )
        + checked
    )


def is_of_few(batch: Buffer, header: BatchHeader) -> bool:
    """Whether the body certainly has the form that `encode_few` makes: a few records, none of them null, which decode.

    `header` was checked; `batch` may have more bytes after the batch. False proves nothing: then Arrow must check.
    """
    rows = header.record_count
    if not 0 < rows <= FEW or header.size > SHORT_BYTES or header.attributes & _NEITHER_KEY_NOR_VALUE:
        return False
    columns = 2 if header.attributes & _KEY else 1
    template = _template(columns)
    begin = HEADER_BYTES + len(template.metadata)
    if begin >= header.size:
        return False
    offsets_bytes = 4 * (rows + 1)
    buffers: tuple[int, ...] = ()
    at = begin
    for _ in range(columns):
        data_at = at + offsets_bytes + len(_PADDING[offsets_bytes % 8])
        if data_at > header.size:
            return False
        ends = struct.unpack_from(f"<{rows + 1}i", batch, at)
        if ends[0] != 0 or list(ends) != sorted(ends):
            return False
        data_bytes = ends[-1]
        buffers += (at - begin, 0, at - begin, offsets_bytes, data_at - begin, data_bytes)
        at = data_at + data_bytes + len(_PADDING[data_bytes % 8])
    if at != header.size:
        return False
    expected = _filled(template, (rows, 0) * columns, buffers, at - begin)
    return memoryview(batch)[HEADER_BYTES:begin] == expected
