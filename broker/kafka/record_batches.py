"""Record batches at the edge: Kafka's format (magic 2) in, format 1 on disk, and back.

So one format rests on disk: what a Kafka client writes, Arrow and Spark readers see as columns, and the other way
round.

    Kafka's header, big-endian      position  size  in format 1 (`raftlog/format/header.py`)
        base_offset                        0     8  the leader stamps it
        batch_length                       8     4  bytes after this field
        leader_epoch                      12     4  the leader stamps it
        magic                             16     1  2
        crc32c                            17     4  of everything from `attributes` on
        attributes                        21     2  codec, timestamp type, transactional, control: the same bits 0-5
        last_offset_delta                 23     4  the same
        base_timestamp_ms                 27     8  the first record's timestamp
        max_timestamp_ms                  35     8  the same
        producer_id                       43     8  the same, as are the next two
        producer_epoch                    51     2
        base_sequence                     53     4
        record_count                      57     4  the same
        records                           61        compressed as a whole

aiokafka's compiled codec reads and writes the records; no loop over records runs in Python bytecode except list
comprehensions over what it returns. Codecs are pyarrow's, under the same inflate limits as format 1.

A batch of transaction markers, which in format 1 may end the transactions of many producers, becomes one control batch
for each marker, as Kafka's clients expect.
"""

from __future__ import annotations

import operator
import struct
from itertools import pairwise, repeat
from typing import Any, Final

import google_crc32c
import numpy as np
import pyarrow as pa
from aiokafka.errors import CorruptRecordException
from aiokafka.record.default_records import DefaultRecordBatch, DefaultRecordBatchBuilder

from raftlog._core.traceparent import MAX_TRACES, TRACEPARENT, parse_traceparent
from raftlog.errors import BatchTooExpansive, CorruptRecordError, InvalidRecord, UnsupportedCompression
from raftlog.format import (
    DEFAULT_LIMITS,
    HEADERS_TYPE,
    Attributes,
    BatchHeader,
    Buffer,
    Codec,
    Columns,
    InflateLimits,
    decode_batch,
    encode_batch,
    iter_headers,
)
from raftlog.format.control import placed_markers
from raftlog.format.small_batch import FEW, SHORT_BYTES, encode_few

MAGIC: Final = 2
HEADER_BYTES: Final = 61
LENGTH_END: Final = 12
CHECKED_FROM: Final = 21
CODEC_MASK: Final = 0b111

_HEADER = struct.Struct(">qiibIhiqqqhii")
_FRONT = struct.Struct(">qiibI")
_CHECKED = struct.Struct(">hiqqqhii")
_PRODUCER = struct.Struct(">qh")
_PRODUCER_AT: Final = 43
assert _HEADER.size == HEADER_BYTES
assert _FRONT.size == CHECKED_FROM

_LOG_APPEND_TIME: Final = int(Attributes.LOG_APPEND_TIME)
_TRANSACTIONAL: Final = int(Attributes.TRANSACTIONAL)
_CONTROL: Final = int(Attributes.CONTROL)
_PIECE_BYTES: Final = 64 << 10
_NAMES: Final = {Codec.GZIP: "gzip", Codec.LZ4: "lz4", Codec.ZSTD: "zstd"}
_NO_PRODUCER: Final = (-1, -1, -1)
_NO_LIMIT: Final = (1 << 31) - 1

# Snappy as the Java client frames it: this header, then blocks, each with its length in front.
_XERIAL: Final = b"\x82SNAPPY\x00"
_XERIAL_HEADER: Final = _XERIAL + struct.pack(">ii", 1, 1)
_BLOCK = struct.Struct(">i")
# An LZ4 frame of independent blocks of up to 4 MiB, without checksums: the Java client reads no linked blocks, which
# pyarrow's own frames have.
_LZ4_HEADER: Final = bytes.fromhex("04224d18607073")
_LZ4_BLOCK: Final = 4 << 20
_LZ4_SIZE = struct.Struct("<I")
_LZ4_STORED: Final = 1 << 31

_MARKER_KEY = struct.Struct(">hh")
_MARKER_VALUE = struct.Struct(">hi")

_timestamp = operator.attrgetter("timestamp")
_offset = operator.attrgetter("offset")
_key = operator.attrgetter("key")
_value = operator.attrgetter("value")
_headers = operator.attrgetter("headers")


# From a Kafka producer


def from_kafka(
    records: Buffer,
    limits: InflateLimits = DEFAULT_LIMITS,
    transaction_epoch: int | None = None,
    traceparents: list[str] | None = None,
) -> bytes:
    """Return, in format 1, the one batch that a Kafka producer sent for a partition.

    Everything that Kafka's format alone can say is checked here; the leader then checks the result as any other batch.
    `transaction_epoch` replaces the producer's. `traceparents` receives the first span of each sampled trace that the
    records name, at most MAX_TRACES.

    Raises:
        CorruptRecordError: cut short, a wrong checksum, or records that do not decode.
        InvalidRecord: another magic, no or several batches, a control batch, offsets with gaps, or a header's name that
            is not UTF-8.
        BatchTooExpansive, UnsupportedCompression: the records inflate beyond `limits`; the codec does not exist.
    """
    size = len(records)
    if size > CHECKED_FROM and records[16] != MAGIC:
        raise InvalidRecord(f"record batch of magic {records[16]}: only magic {MAGIC} is supported, as in Kafka 4")
    if size < HEADER_BYTES:
        raise CorruptRecordError(f"a record batch has at least {HEADER_BYTES} bytes, {size} are there")
    (
        _, batch_length, _, _, crc32c, attributes, last_offset_delta, _, _,
        producer_id, producer_epoch, base_sequence, record_count,
    ) = _HEADER.unpack_from(records)  # fmt: skip
    if batch_length + LENGTH_END > size or batch_length + LENGTH_END < HEADER_BYTES:
        raise CorruptRecordError(f"the batch claims {batch_length + LENGTH_END} bytes, {size} are there")
    if batch_length + LENGTH_END < size:
        raise InvalidRecord("a produce request holds exactly one batch for each partition")
    actual = google_crc32c.value(pa.py_buffer(records).slice(CHECKED_FROM))
    if actual != crc32c:
        raise CorruptRecordError(f"checksum mismatch: the batch says {crc32c:#010x}, its bytes give {actual:#010x}")
    if attributes & _CONTROL:
        raise InvalidRecord("a producer may not send control batches")
    if record_count <= 0 or last_offset_delta != record_count - 1:
        raise InvalidRecord(f"record_count {record_count} does not fit last_offset_delta {last_offset_delta}")
    codec = _codec(attributes)
    if codec is Codec.NONE:
        whole = bytes(records)
    else:
        plain = bytearray(records[:HEADER_BYTES])
        struct.pack_into(">h", plain, CHECKED_FROM, attributes & ~CODEC_MASK)
        whole = bytes(plain) + _inflate(records[HEADER_BYTES:], codec, limits)
    rows = _rows(whole, record_count)
    if traceparents is not None:
        traceparents += _spans_in(rows)
    return _encode(
        rows,
        codec,
        attributes & _TRANSACTIONAL,
        # without an id the other two mean nothing, and aiokafka sends 0 as the sequence
        _NO_PRODUCER
        if producer_id == _NO_PRODUCER[0]
        else (producer_id, producer_epoch if transaction_epoch is None else transaction_epoch, base_sequence),
    )


def _spans_in(rows: list[Any]) -> list[str]:
    found: dict[int, str] = {}
    for headers in filter(None, map(_headers, rows)):
        for name, content in headers:
            if name == TRACEPARENT and (parent := parse_traceparent(content)) is not None and parent.sampled:
                found.setdefault(parent.trace_id, str(parent))
        if len(found) >= MAX_TRACES:
            break
    return list(found.values())[:MAX_TRACES]


def says_transactional(records: Buffer) -> bool:
    """Whether a batch has the transactional attribute, without any other check."""
    return len(records) >= HEADER_BYTES and bool(records[CHECKED_FROM + 1] & _TRANSACTIONAL)


def producer_in(records: Buffer) -> tuple[int, int]:
    """Return the producer id and epoch of a batch, without any check; (-1, -1) where it is cut short."""
    if len(records) < HEADER_BYTES:
        return _NO_PRODUCER[:2]
    producer_id, producer_epoch = _PRODUCER.unpack_from(records, _PRODUCER_AT)
    return producer_id, producer_epoch


def _codec(attributes: int) -> Codec:
    number = attributes & CODEC_MASK
    if number > max(Codec):
        raise UnsupportedCompression(f"codec {number} does not exist")
    return Codec(number)


def _rows(batch: bytes, record_count: int) -> list[Any]:
    """Return the records of an uncompressed batch."""
    if record_count * _LEAST_RECORD_BYTES > len(batch) - HEADER_BYTES:
        raise CorruptRecordError(f"{record_count} records do not fit into {len(batch) - HEADER_BYTES} bytes")
    try:
        rows = list(DefaultRecordBatch(batch))
    except UnicodeDecodeError as error:
        raise InvalidRecord(f"the name of a header is not UTF-8: {error}") from None
    except (CorruptRecordException, ValueError, OverflowError, MemoryError, TypeError) as error:
        raise CorruptRecordError(f"the records do not decode: {error}") from None
    base = int.from_bytes(batch[:8], "big", signed=True)
    if len(rows) != record_count or list(map(_offset, rows)) != list(range(base, base + record_count)):
        raise InvalidRecord("the offsets of the records do not count up by one from the batch's base offset")
    return rows


_LEAST_RECORD_BYTES: Final = 7
"""Length, attributes, timestamp delta, offset delta, key length, value length, number of headers."""


def _encode(rows: list[Any], codec: Codec, attributes: int, producer: tuple[int, int, int]) -> bytes:
    producer_id, producer_epoch, base_sequence = producer
    timestamps = list(map(_timestamp, rows))
    keys, values, headers = list(map(_key, rows)), list(map(_value, rows)), list(map(_headers, rows))
    first = timestamps[0]
    no_key = keys.count(None)
    has_headers = any(headers)
    one_time = timestamps.count(first) == len(rows)
    if (
        len(rows) <= FEW and codec is Codec.NONE and one_time and not has_headers
        and no_key in (0, len(rows)) and None not in values
        and sum(map(len, values)) + (0 if no_key else sum(map(len, keys))) < SHORT_BYTES
    ):  # fmt: skip
        return encode_few(
            None if no_key else keys,
            values,
            first,
            attributes=attributes,
            producer_id=producer_id,
            producer_epoch=producer_epoch,
            base_sequence=base_sequence,
        )
    try:
        columns = Columns(
            value=pa.array(values, pa.binary()),
            key=None if no_key == len(rows) else pa.array(keys, pa.binary()),
            timestamp_ms=None if one_time else pa.array(timestamps, pa.int64()),
            headers=pa.array([each or None for each in headers], HEADERS_TYPE) if has_headers else None,
        )
    except (pa.ArrowException, OverflowError) as error:
        raise InvalidRecord(f"the records do not fit into columns: {error}") from None
    return encode_batch(
        columns,
        first,
        codec=codec,
        attributes=attributes,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        base_sequence=base_sequence,
    )


def _inflate(packed: Buffer, codec: Codec, limits: InflateLimits) -> bytes:
    if codec is Codec.SNAPPY:
        return _inflate_snappy(packed, limits)
    pieces: list[bytes] = []
    inflated, ask = 0, max(_PIECE_BYTES, 4 * len(packed))
    try:
        stream = pa.CompressedInputStream(pa.BufferReader(pa.py_buffer(packed)), _NAMES[codec])
        while piece := stream.read(ask):  # which allocates what it is asked for
            pieces.append(piece)
            inflated += len(piece)
            _check_size(inflated, len(packed), limits)
            ask = inflated
    except (OSError, pa.ArrowException, ValueError) as error:
        raise CorruptRecordError(f"the {codec.name.lower()} records do not inflate: {error}") from None
    return b"".join(pieces)


def _check_size(inflated: int, packed: int, limits: InflateLimits) -> None:
    refusal = limits.refusal(inflated, packed)
    if refusal is not None:
        raise BatchTooExpansive(refusal)


def _inflate_snappy(packed: Buffer, limits: InflateLimits) -> bytes:
    view = memoryview(packed)
    blocks = [view]
    if bytes(view[: len(_XERIAL)]) == _XERIAL:
        blocks, at = [], len(_XERIAL_HEADER)
        while at < len(view):
            if at + _BLOCK.size > len(view):
                raise CorruptRecordError("the snappy records do not inflate: a block is cut short")
            (length,) = _BLOCK.unpack_from(view, at)
            at += _BLOCK.size
            if not 0 < length <= len(view) - at:
                raise CorruptRecordError("the snappy records do not inflate: a block is cut short")
            blocks.append(view[at : at + length])
            at += length
    sizes = list(map(_snappy_size, blocks))
    _check_size(sum(sizes), len(packed), limits)
    try:
        return b"".join(
            bytes(pa.decompress(pa.py_buffer(block), size, codec="snappy"))
            for block, size in zip(blocks, sizes, strict=True)
            if size
        )
    except (OSError, pa.ArrowException, ValueError) as error:
        raise CorruptRecordError(f"the snappy records do not inflate: {error}") from None


def _snappy_size(block: memoryview) -> int:
    """Return the inflated size in a block's preamble, a varint of at most 32 bits."""
    size = 0
    for position, byte in enumerate(bytes(block[:5])):
        size |= (byte & 0x7F) << (7 * position)
        if byte < 0x80:
            return size
    raise CorruptRecordError("the snappy records do not inflate: a block has no size in front")


# To a Kafka consumer


def to_kafka(batches: Buffer, *, takes_zstd: bool = True, most_bytes: int | None = None) -> list[bytes]:
    """Return whole batches of a log in Kafka's format, in their order.

    A batch keeps its codec, except that a consumer without zstd gets such batches uncompressed. With `most_bytes` the
    batches end with the first one that reaches it.

    Raises:
        CorruptRecordError: a batch of the log does not decode.
    """
    found: list[bytes] = []
    size = 0
    for position, header in iter_headers(batches):
        if most_bytes is not None and found and size >= most_bytes:
            break
        if header.is_control:
            some = _markers(batches, position, header)
        else:
            some = [_records(batches, position, header, takes_zstd=takes_zstd)]
        found += some
        size += sum(map(len, some))
    return found


_OF_THE_LOG: Final = InflateLimits(max_bytes=1 << 30)
"""The most that `max.inflate.bytes` can be: the batch was checked as it was written, maybe under another value."""


def _records(batches: Buffer, position: int, header: BatchHeader, *, takes_zstd: bool) -> bytes:
    columns = decode_batch(batches, position, check_checksum=False, trusted=True, limits=_OF_THE_LOG).columns
    names, rows = columns.schema.names, columns.num_rows
    append_time = bool(header.attributes & _LOG_APPEND_TIME)
    # The builder writes only differences, and takes a first timestamp of -1 (none) for one that is still to come.
    since_first: Any = repeat(0, rows)
    first = header.base_timestamp_ms
    if "timestamp_ms" in names and not append_time and rows:
        timestamps = columns.column(names.index("timestamp_ms")).to_numpy()
        first = int(timestamps[0])
        since_first = (timestamps - first).tolist()
    body = b""
    if rows:
        sparse = "offset_delta" in names
        deltas: Any = columns.column(names.index("offset_delta")).to_numpy().tolist() if sparse else range(rows)
        keys = _cells(columns.column(names.index("key"))) if "key" in names else repeat(None, rows)
        values = _cells(columns.column(names.index("value")))
        headers: Any = repeat([], rows)
        if "headers" in names:
            headers = [each or [] for each in columns.column(names.index("headers")).to_pylist()]
        builder = DefaultRecordBatchBuilder(MAGIC, 0, 0, -1, -1, -1, _NO_LIMIT)
        for appended in map(builder.append, deltas, since_first, keys, values, headers):
            assert appended is not None, "a batch has room for what was one batch"
        body = bytes(memoryview(builder.build())[HEADER_BYTES:])
    codec = header.codec
    if not rows or (codec is Codec.ZSTD and not takes_zstd):
        codec = Codec.NONE
    return _build(
        header,
        header.base_offset,
        (header.attributes & (_LOG_APPEND_TIME | _TRANSACTIONAL)) | codec,
        header.last_offset_delta,
        first,
        header.max_timestamp_ms,
        (header.producer_id, header.producer_epoch, header.base_sequence),
        rows,
        _compress(body, codec),
    )


def _build(
    header: BatchHeader,
    base_offset: int,
    attributes: int,
    last_offset_delta: int,
    first_ms: int,
    max_ms: int,
    producer: tuple[int, int, int],
    rows: int,
    body: bytes,
) -> bytes:
    checked = _CHECKED.pack(attributes, last_offset_delta, first_ms, max_ms, *producer, rows)
    crc = google_crc32c.extend(google_crc32c.value(checked), body)
    length = HEADER_BYTES - LENGTH_END + len(body)
    return b"".join((_FRONT.pack(base_offset, length, header.leader_epoch, MAGIC, crc), checked, body))


def _cells(column: Any) -> list[bytes | None]:
    """Return the cells of a binary column as bytes; slices of one `bytes` are faster than Arrow's scalars."""
    rows = len(column)
    _, offsets_buffer, data_buffer = column.buffers()
    offsets = np.frombuffer(offsets_buffer, np.int32, rows + 1, column.offset * 4).tolist()
    data = b"" if data_buffer is None else data_buffer.slice(0, offsets[-1]).to_pybytes()
    cells: list[bytes | None] = [data[begin:end] for begin, end in pairwise(offsets)]
    if column.null_count:
        for row in np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False)).tolist():
            cells[row] = None
    return cells


def _markers(batches: Buffer, position: int, header: BatchHeader) -> list[bytes]:
    """Return a control batch for each marker; an empty batch keeps the offsets whose markers compaction removed."""
    end = memoryview(batches)[: position + header.size]
    found = []
    for offset, marker in placed_markers(end, position, check_checksum=False):
        builder = DefaultRecordBatchBuilder(MAGIC, 0, 0, -1, -1, -1, _NO_LIMIT)
        key = _MARKER_KEY.pack(0, 1 if marker.commit else 0)
        value = _MARKER_VALUE.pack(0, marker.coordinator_epoch)
        builder.append(0, header.base_timestamp_ms, key, value, [])
        found.append(
            _build(
                header,
                offset,
                _CONTROL | _TRANSACTIONAL,
                0,
                header.base_timestamp_ms,
                header.base_timestamp_ms,
                (marker.producer_id, marker.producer_epoch, -1),
                1,
                bytes(memoryview(builder.build())[HEADER_BYTES:]),
            )
        )
    if not found:
        times = (header.base_timestamp_ms, header.max_timestamp_ms)
        found.append(_build(header, header.base_offset, 0, header.last_offset_delta, *times, _NO_PRODUCER, 0, b""))
    return found


def _compress(body: bytes, codec: Codec) -> bytes:
    match codec:
        case Codec.NONE:
            return body
        case Codec.SNAPPY:
            block = pa.compress(body, codec="snappy", asbytes=True)
            return b"".join((_XERIAL_HEADER, _BLOCK.pack(len(block)), block))
        case Codec.LZ4:
            return _compress_lz4(body)
        case _:
            return bytes(pa.compress(body, codec=_NAMES[codec], asbytes=True))


def _compress_lz4(body: bytes) -> bytes:
    pieces = [_LZ4_HEADER]
    for begin in range(0, len(body), _LZ4_BLOCK):
        block = body[begin : begin + _LZ4_BLOCK]
        packed = pa.compress(block, codec="lz4_raw", asbytes=True)
        if len(packed) < len(block):
            pieces += (_LZ4_SIZE.pack(len(packed)), packed)
        else:
            pieces += (_LZ4_SIZE.pack(len(block) | _LZ4_STORED), block)
    return b"".join((*pieces, _LZ4_SIZE.pack(0)))
