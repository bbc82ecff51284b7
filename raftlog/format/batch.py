"""Record batches: encode and decode one, and walk over several in a buffer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from raftlog.errors import CorruptRecordError, InvalidRecord
from raftlog.format.columns import decode_body, encode_body, schema_for
from raftlog.format.compression import DEFAULT_LIMITS, InflateLimits, compress, inflate
from raftlog.format.header import (
    HEADER_BYTES,
    MAGIC,
    NO_PRODUCER_ID,
    Attributes,
    BatchHeader,
    Buffer,
    build_batch,
    check_header,
    checksum,
    parse_header,
)
from raftlog.types import Codec

_MAX_BODY_BYTES = (1 << 31) - HEADER_BYTES
"""The limit of Arrow's 32-bit binary offsets."""


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns of a batch: Arrow arrays of one length.

    `value` binary; `key` binary or None when every key is null; `timestamp_ms` int64 without nulls or None when every
    record has `base_timestamp_ms`; `headers` map<utf8, binary> or None; `offset_delta` uint32, increasing, or None.
    """

    value: Any
    key: Any = None
    timestamp_ms: Any = None
    headers: Any = None
    offset_delta: Any = None


def encode_batch(
    columns: Columns,
    base_timestamp_ms: int,
    *,
    codec: Codec = Codec.NONE,
    level: int | None = None,
    attributes: int = 0,
    producer_id: int = NO_PRODUCER_ID,
    producer_epoch: int = -1,
    base_sequence: int = -1,
    base_offset: int = 0,
    leader_epoch: int = -1,
    last_offset_delta: int | None = None,
) -> bytes:
    """Return a record batch of format 1.

    Omits a timestamp column that only repeats `base_timestamp_ms`. `attributes` takes the bits transactional, control
    and log append time; the others follow from the columns.

    Raises:
        InvalidRecord: no rows, columns of different lengths, or more than 2 GiB of data.
    """
    rows = len(columns.value)
    max_timestamp_ms = base_timestamp_ms
    timestamps = columns.timestamp_ms
    if timestamps is not None and rows:
        extremes = pc.min_max(timestamps).as_py()
        max_timestamp_ms = extremes["max"]
        if extremes["min"] == base_timestamp_ms == max_timestamp_ms:
            timestamps = None
    arrays = []
    for bit, array in (
        (Attributes.TIMESTAMP, timestamps),
        (Attributes.KEY, columns.key),
        (None, columns.value),
        (Attributes.HEADERS, columns.headers),
        (Attributes.SPARSE_OFFSETS, columns.offset_delta),
    ):
        if array is None:
            continue
        if len(array) != rows:
            raise InvalidRecord(f"columns of different lengths: {len(array)} and {rows}")
        arrays.append(array)
        if bit is not None:
            attributes |= bit
    if rows == 0 and columns.offset_delta is None:
        raise InvalidRecord("a batch holds at least one record")
    body = encode_body(pa.RecordBatch.from_arrays(arrays, schema=schema_for(attributes)))
    if body.size > _MAX_BODY_BYTES:
        raise InvalidRecord(f"a batch of {body.size} bytes is beyond the 2 GiB that Arrow's binary columns address")
    packed = body if codec is Codec.NONE else compress(body, codec, level)
    header = BatchHeader(
        base_offset=base_offset,
        batch_length=0,
        leader_epoch=leader_epoch,
        magic=MAGIC,
        crc32c=0,
        attributes=attributes | codec,
        last_offset_delta=rows - 1 if last_offset_delta is None else last_offset_delta,
        record_count=rows,
        base_timestamp_ms=base_timestamp_ms,
        max_timestamp_ms=max_timestamp_ms,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        base_sequence=base_sequence,
        reserved=b"\0\0\0",
    )
    return build_batch(header, packed)


def stamp_producer(encoded: Buffer, producer_id: int, producer_epoch: int, base_sequence: int) -> bytes:
    """Return the batch with other producer numbers (KIP-98): a new header and checksum, and the same body.

    Raises:
        CorruptRecordError: the batch is shorter than a header.
    """
    header = parse_header(encoded)
    numbered = header._replace(producer_id=producer_id, producer_epoch=producer_epoch, base_sequence=base_sequence)
    return build_batch(numbered, memoryview(encoded)[HEADER_BYTES : header.size])


@dataclass(frozen=True, slots=True)
class DecodedBatch:
    """A header and its columns, which share the memory of the batch (or of its inflated body)."""

    header: BatchHeader
    columns: Any
    """`pyarrow.RecordBatch` with the columns that the attributes name."""


def _body(batch: Buffer, position: int, header: BatchHeader) -> Any:
    return pa.py_buffer(batch).slice(position + HEADER_BYTES, header.size - HEADER_BYTES)


def parse_batch(batch: Buffer, position: int = 0) -> BatchHeader:
    """Return the checked header of the batch at `position` after verifying its checksum.

    Raises:
        CorruptRecordError: the batch is cut short, or the checksum does not match; also as `check_header`.
    """
    header = parse_header(batch, position)
    if header.magic == MAGIC and position + header.size > len(batch):
        raise CorruptRecordError(
            f"the batch is cut short: its header claims {header.size} bytes, {len(batch) - position} are there"
        )
    check_header(header)
    actual = checksum(batch, position, header.size)
    if actual != header.crc32c:
        raise CorruptRecordError(
            f"checksum mismatch: the batch says {header.crc32c:#010x}, its bytes give {actual:#010x}"
        )
    return header


def decode_batch(
    batch: Buffer,
    position: int = 0,
    *,
    limits: InflateLimits = DEFAULT_LIMITS,
    check_checksum: bool = True,
    trusted: bool = False,
) -> DecodedBatch:
    """Decode the batch at `position` without copying uncompressed columns.

    `trusted`: as in `decode_body`. A checksum alone says nothing of the contents.

    Raises:
        CorruptRecordError, UnsupportedVersion: as `parse_batch`, or the body does not decode or has another row count.
    """
    if check_checksum:
        header = parse_batch(batch, position)
    else:
        header = parse_header(batch, position)
        check_header(header)
    return DecodedBatch(header, decode_columns(batch, position, header, limits, trusted=trusted))


def decode_columns(
    batch: Buffer, position: int, header: BatchHeader, limits: InflateLimits = DEFAULT_LIMITS, *, trusted: bool = False
) -> Any:
    """Return the `pyarrow.RecordBatch` of the batch at `position`, whose header was checked.

    `trusted`: as in `decode_body`.

    Raises:
        CorruptRecordError: the body does not decode, or has another row count.
    """
    body = inflate(_body(batch, position, header), header.codec, limits)
    columns = decode_body(body, header.attributes, trusted=trusted)
    if columns.num_rows != header.record_count:
        raise InvalidRecord(f"record_count says {header.record_count}, the columns have {columns.num_rows} rows")
    return columns


def iter_headers(data: Buffer) -> Iterator[tuple[int, BatchHeader]]:
    """Yield (position, header) of each whole batch in `data`; a batch that is cut short ends the walk.

    Raises:
        CorruptRecordError, UnsupportedVersion: a header is invalid.
    """
    position, end = 0, len(data)
    while end - position >= HEADER_BYTES:
        header = parse_header(data, position)
        check_header(header)
        if position + header.size > end:
            return
        yield position, header
        position += header.size
