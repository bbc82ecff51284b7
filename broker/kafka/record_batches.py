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

A batch of a few KB may have millions of records. So each conversion has a cost, which is known before it begins: the
inflated bytes, and RECORD_COST for each record. Records are converted SLICE_RECORDS at a time, and never all of a batch
by one call of C, which would keep the interpreter from other threads. A batch of the log that is larger than a piece
(PIECE_RECORDS, PIECE_BYTES) becomes several batches of Kafka's, which together have its offsets.

A batch of transaction markers, which in format 1 may end the transactions of many producers, becomes one control batch
for each marker, as Kafka's clients expect.
"""

from __future__ import annotations

import operator
import struct
from collections import deque
from collections.abc import Iterator
from itertools import chain, islice, pairwise, repeat
from typing import Any, Final

import google_crc32c
import numpy as np
import pyarrow as pa
from aiokafka.errors import CorruptRecordException
from aiokafka.record.default_records import DefaultRecordBatch, DefaultRecordBatchBuilder

from broker.kafka.codec import varint
from broker.quotas.heavy_work import TooCostly
from raftlog._core.traceparent import MAX_TRACES, TRACEPARENT, parse_traceparent
from raftlog.errors import (
    BatchTooExpansive,
    CorruptRecordError,
    InvalidRecord,
    MessageTooLarge,
    UnsupportedCompression,
)
from raftlog.format import (
    DEFAULT_LIMITS,
    HEADERS_TYPE,
    MAX_RECORDS,
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
from raftlog.format.compression import claimed_inflated_size
from raftlog.format.control import placed_markers
from raftlog.format.small_batch import FEW, SHORT_BYTES, encode_few
from raftlog.format.wire import read_varint

MAGIC: Final = 2
HEADER_BYTES: Final = 61
LENGTH_END: Final = 12
CHECKED_FROM: Final = 21
CODEC_MASK: Final = 0b111

_HEADER = struct.Struct(">qiibIhiqqqhii")
_FRONT = struct.Struct(">qiibI")
_CHECKED = struct.Struct(">hiqqqhii")
_PRODUCER = struct.Struct(">qhi")
_PRODUCER_AT: Final = 43
assert _HEADER.size == HEADER_BYTES
assert _FRONT.size == CHECKED_FROM

_LOG_APPEND_TIME: Final = int(Attributes.LOG_APPEND_TIME)
_TRANSACTIONAL: Final = int(Attributes.TRANSACTIONAL)
_CONTROL: Final = int(Attributes.CONTROL)
_INFLATE_BYTES: Final = 64 << 10
_NAMES: Final = {Codec.GZIP: "gzip", Codec.LZ4: "lz4", Codec.ZSTD: "zstd"}
_NO_PRODUCER: Final = (-1, -1, -1)
_NO_LIMIT: Final = (1 << 31) - 1

MAX_HEADERS: Final = 50_000
"""Of a record that a producer sends."""
RECORD_COST: Final = 64
"""What a record costs besides its bytes: converting it takes about as long as converting so many bytes."""
LOOP_COST: Final = 128 << 10
"""Conversions of at most this cost run on the event loop, in one to three milliseconds. It has a turn after so much."""
STEP_COST: Final = 8 << 20
"""What a thread converts in one step, between two of which the event loop may take over."""
SLICE_RECORDS: Final = 1_000
"""Read by one call, which takes about a millisecond."""
_SLICE_BYTES: Final = 1 << 20
_SLICE_HEADERS: Final = 2_000
PIECE_RECORDS: Final = 50_000
PIECE_BYTES: Final = 16 << 20
"""Of a batch for a consumer, before it is compressed; a larger record still goes whole."""
_GZIP_LEVEL: Final = 5
"""Arrow's level, 9, takes up to a hundred times as long for repetitive records, and saves one or two hundredths."""

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


def record_count_in(records: Buffer) -> int:
    """Return how many records a batch says it has, without any check; 0 where it is cut short or the number wrong."""
    if len(records) < HEADER_BYTES:
        return 0
    return max(0, int.from_bytes(records[HEADER_BYTES - 4 : HEADER_BYTES], "big", signed=True))


def from_kafka(
    records: Buffer,
    limits: InflateLimits = DEFAULT_LIMITS,
    transaction_epoch: int | None = None,
    traceparents: list[str] | None = None,
    most_cost: int | None = None,
) -> bytes:
    """Return, in format 1, the one batch that a Kafka producer sent for a partition.

    Everything that Kafka's format alone can say is checked here; the leader then checks the result as any other batch.
    `transaction_epoch` replaces the producer's. `traceparents` receives the first span of each sampled trace that the
    records name, at most MAX_TRACES.

    Raises:
        TooCostly: the conversion costs more than `most_cost`; it stopped there.
        MessageTooLarge: the batch has more than MAX_RECORDS records, or one of more than MAX_HEADERS headers.
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
    if most_cost is not None and size + RECORD_COST * record_count > most_cost:
        raise TooCostly
    actual = google_crc32c.value(pa.py_buffer(records).slice(CHECKED_FROM))
    if actual != crc32c:
        raise CorruptRecordError(f"checksum mismatch: the batch says {crc32c:#010x}, its bytes give {actual:#010x}")
    if attributes & _CONTROL:
        raise InvalidRecord("a producer may not send control batches")
    if record_count <= 0 or last_offset_delta != record_count - 1:
        raise InvalidRecord(f"record_count {record_count} does not fit last_offset_delta {last_offset_delta}")
    if record_count > MAX_RECORDS and (attributes & CODEC_MASK or record_count * _LEAST_RECORD_BYTES < size):
        raise MessageTooLarge(
            f"the batch has {record_count} records, at most {MAX_RECORDS} are accepted; send smaller batches"
        )
    codec = _codec(attributes)
    head, packed = records[:HEADER_BYTES], memoryview(records)[HEADER_BYTES:]
    most_bytes = limits.max_bytes if most_cost is None else most_cost - RECORD_COST * record_count
    whole: Buffer = bytes(records)
    if codec is not Codec.NONE:
        most_inflated = max(limits.ratio_floor_bytes, limits.max_ratio * len(packed))
        _check_count(record_count, min(limits.max_bytes, most_inflated))
        plain = bytearray(head)
        struct.pack_into(">h", plain, CHECKED_FROM, attributes & ~CODEC_MASK)
        whole = _inflate(plain, packed, codec, limits, most_bytes)
    slices = _slices(whole, record_count)
    del whole  # so that it is freed as soon as it is read
    return _encode(
        slices,
        record_count,
        codec,
        attributes & _TRANSACTIONAL,
        # without an id the other two mean nothing, and aiokafka sends 0 as the sequence
        _NO_PRODUCER
        if producer_id == _NO_PRODUCER[0]
        else (producer_id, producer_epoch if transaction_epoch is None else transaction_epoch, base_sequence),
        traceparents,
    )


class _Spans:
    """The first span of each sampled trace."""

    def __init__(self) -> None:
        self._found: dict[int, str] = {}

    @property
    def found(self) -> list[str]:
        """At most MAX_TRACES."""
        return list(self._found.values())[:MAX_TRACES]

    def find(self, headers_of_records: list[Any]) -> None:
        """Look for more in the headers of some records."""
        for headers in filter(None, headers_of_records):
            if len(self._found) >= MAX_TRACES:
                return
            for name, content in headers:
                if name == TRACEPARENT and (parent := parse_traceparent(content)) is not None and parent.sampled:
                    self._found.setdefault(parent.trace_id, str(parent))


def says_transactional(records: Buffer) -> bool:
    """Whether a batch has the transactional attribute, without any other check."""
    return len(records) >= HEADER_BYTES and bool(records[CHECKED_FROM + 1] & _TRANSACTIONAL)


def is_compressed(records: Buffer) -> bool:
    """Whether a batch has a codec, without any check."""
    return len(records) >= HEADER_BYTES and bool(records[CHECKED_FROM + 1] & CODEC_MASK)


def producer_in(records: Buffer) -> tuple[int, int, int]:
    """Return the producer id, epoch and base sequence of a batch, without any check; -1 each where it is cut short."""
    if len(records) < HEADER_BYTES:
        return _NO_PRODUCER
    producer_id, producer_epoch, base_sequence = _PRODUCER.unpack_from(records, _PRODUCER_AT)
    return producer_id, producer_epoch, base_sequence


def _codec(attributes: int) -> Codec:
    number = attributes & CODEC_MASK
    if number > max(Codec):
        raise UnsupportedCompression(f"codec {number} does not exist")
    return Codec(number)


def _check_count(record_count: int, size: int) -> None:
    if record_count * _LEAST_RECORD_BYTES > size:
        raise CorruptRecordError(f"{record_count} records do not fit into {size} bytes")


def _slices(batch: Buffer, record_count: int) -> Iterator[list[Any]]:
    """Yield the records of an uncompressed batch, some at a time."""
    size = len(batch) - HEADER_BYTES
    _check_count(record_count, size)
    _check_headers(batch, record_count)
    at_a_time = max(1, min(SLICE_RECORDS, record_count * _SLICE_BYTES // size))
    records = chain(DefaultRecordBatch(batch))  # which may be iterated once only
    begin = offset = int.from_bytes(batch[:8], "big", signed=True)
    while True:
        try:
            rows = list(islice(records, at_a_time))
        except UnicodeDecodeError as error:
            raise InvalidRecord(f"the name of a header is not UTF-8: {error}") from None
        except (CorruptRecordException, ValueError, OverflowError, MemoryError, TypeError) as error:
            raise CorruptRecordError(f"the records do not decode: {error}") from None
        if list(map(_offset, rows)) != list(range(offset, offset + len(rows))):
            break
        offset += len(rows)
        if rows:
            yield rows
        if len(rows) < at_a_time:
            break
    if offset != begin + record_count:
        raise InvalidRecord("the offsets of the records do not count up by one from the batch's base offset")


_LEAST_RECORD_BYTES: Final = 7
"""Length, attributes, timestamp delta, offset delta, key length, value length, number of headers."""
_WALK_BYTES: Final = 1 << 20
"""A record of fewer bytes is read within some ten milliseconds, whatever it has."""


def _check_headers(batch: Buffer, record_count: int) -> None:
    """Refuse a large record that says it has too many headers, before an object is made for each of them."""
    size, at = len(batch), HEADER_BYTES
    if size - HEADER_BYTES - record_count * _LEAST_RECORD_BYTES < _WALK_BYTES:
        return
    view = memoryview(batch)
    try:
        for _ in range(record_count):
            length, at = _varint(view, at)
            if length >= _WALK_BYTES:
                _, inside = _varint(view, at + 1)
                _, inside = _varint(view, inside)
                for _of_key_and_value in range(2):
                    cell, inside = _varint(view, inside)
                    inside += max(cell, 0)
                _check_header_count(_varint(view, inside)[0])
            if length < 0:
                return  # the decoder refuses it
            at += length
    except (IndexError, ValueError):
        return  # likewise


def _check_header_count(count: int) -> None:
    if count > MAX_HEADERS:
        raise MessageTooLarge(f"a record has {count} headers, at most {MAX_HEADERS} are accepted")


def _varint(view: memoryview, at: int) -> tuple[int, int]:
    """Return a number of a record, and where it ends. Raises as `read_varint`."""
    number, at = read_varint(view, at)
    return (number >> 1) ^ -(number & 1), at


def _encode(
    slices: Iterator[list[Any]],
    record_count: int,
    codec: Codec,
    attributes: int,
    producer: tuple[int, int, int],
    traceparents: list[str] | None,
) -> bytes:
    producer_id, producer_epoch, base_sequence = producer
    first, one_time, no_key, spans = 0, True, 0, _Spans()
    values: list[Any] = []
    keys: list[Any] = []
    timestamps: list[Any] = []
    headers: list[Any] = []
    for rows in slices:
        if not values:
            first = rows[0].timestamp
        some_timestamps = list(map(_timestamp, rows))
        some_keys, some_values, some_headers = list(map(_key, rows)), list(map(_value, rows)), list(map(_headers, rows))
        some_without = some_keys.count(None)
        has_headers = any(some_headers)
        no_key += some_without
        one_time = one_time and some_timestamps.count(first) == len(rows)
        if has_headers and traceparents is not None:
            spans.find(some_headers)
        if (
            record_count <= FEW and codec is Codec.NONE and one_time and not has_headers
            and len(rows) == record_count and no_key in (0, record_count) and None not in some_values
            and sum(map(len, some_values)) + (0 if no_key else sum(map(len, some_keys))) < SHORT_BYTES
        ):  # fmt: skip
            next(slices, None)  # which checks that nothing follows
            return encode_few(
                None if no_key else some_keys,
                some_values,
                first,
                attributes=attributes,
                producer_id=producer_id,
                producer_epoch=producer_epoch,
                base_sequence=base_sequence,
            )
        try:
            values.append(pa.array(some_values, pa.binary()))
            keys.append(
                pa.nulls(len(rows), pa.binary()) if some_without == len(rows) else pa.array(some_keys, pa.binary())
            )
            timestamps.append(pa.array(some_timestamps, pa.int64()))
            if has_headers:
                headers += _header_arrays(some_headers)
            else:
                headers.append(pa.nulls(len(rows), HEADERS_TYPE))
        except (pa.ArrowException, OverflowError) as error:
            raise InvalidRecord(f"the records do not fit into columns: {error}") from None
        del rows, some_timestamps, some_keys, some_values, some_headers
    if traceparents is not None:
        traceparents += spans.found
    try:
        columns = Columns(
            value=_joined(values),
            key=None if no_key == record_count else _joined(keys),
            timestamp_ms=None if one_time else _joined(timestamps),
            headers=None if all(each.null_count == len(each) for each in headers) else _joined(headers),
        )
    except (pa.ArrowException, OverflowError) as error:
        raise InvalidRecord(f"the records do not fit into columns: {error}") from None
    return encode_batch(
        columns,
        first,
        codec=codec,
        level=_GZIP_LEVEL if codec is Codec.GZIP else None,
        attributes=attributes,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        base_sequence=base_sequence,
    )


def _joined(arrays: list[Any]) -> Any:
    """Return the arrays as one, and forget them."""
    joined = arrays[0] if len(arrays) == 1 else pa.concat_arrays(arrays)
    arrays.clear()
    return joined


def _header_arrays(headers: list[Any]) -> list[Any]:
    """Return a column of headers, in parts that one call makes in a moment."""
    if sum(map(len, headers)) <= _SLICE_HEADERS:
        return [pa.array([each or None for each in headers], HEADERS_TYPE)]
    arrays: list[Any] = []
    begin = total = 0
    for row, each in enumerate(headers):
        _check_header_count(len(each))
        total += len(each)
        if total >= _SLICE_HEADERS:
            arrays.append(pa.array([each or None for each in headers[begin : row + 1]], HEADERS_TYPE))
            begin, total = row + 1, 0
    if begin < len(headers):
        arrays.append(pa.array([each or None for each in headers[begin:]], HEADERS_TYPE))
    return arrays


def _inflate(head: Buffer, packed: Buffer, codec: Codec, limits: InflateLimits, most_bytes: int) -> Buffer:
    """Return `head` and behind it the inflated records."""
    if codec is Codec.SNAPPY:
        return _inflate_snappy(head, packed, limits, most_bytes)
    inflated, ask = 0, min(max(_INFLATE_BYTES, min(4 * len(packed), _SLICE_BYTES)), max(most_bytes, 0) + 1)
    pieces = deque([head])
    try:
        stream = pa.CompressedInputStream(pa.BufferReader(pa.py_buffer(packed)), _NAMES[codec])
        while piece := stream.read(ask):  # which allocates what it is asked for
            inflated += len(piece)
            _check_size(inflated, len(packed), limits)
            if inflated > most_bytes:
                raise TooCostly
            pieces.append(piece)
            ask = min(inflated, _SLICE_BYTES)
    except (OSError, pa.ArrowException, ValueError) as error:
        raise CorruptRecordError(f"the {codec.name.lower()} records do not inflate: {error}") from None
    if inflated <= _SLICE_BYTES:
        return b"".join(pieces)
    whole = pa.allocate_buffer(sum(map(len, pieces)))
    writer = pa.FixedSizeBufferWriter(whole)  # which lets other threads run while it copies
    while pieces:
        writer.write(pieces.popleft())
    return memoryview(whole)


def _check_size(inflated: int, packed: int, limits: InflateLimits) -> None:
    refusal = limits.refusal(inflated, packed)
    if refusal is not None:
        raise BatchTooExpansive(refusal)


def _inflate_snappy(head: Buffer, packed: Buffer, limits: InflateLimits, most_bytes: int) -> bytes:
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
    if sum(sizes) > most_bytes:
        raise TooCostly
    try:
        blocks_inflated = (
            pa.decompress(pa.py_buffer(block), size, codec="snappy")
            for block, size in zip(blocks, sizes, strict=True)
            if size
        )
        return b"".join((head, *blocks_inflated))
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


class ToKafka:
    """Batches of a log on their way into Kafka's format, in their order and step by step.

    Attributes:
        size: bytes of what was converted.
        records: how many records that has.
        spent: what converting it has cost.
    """

    def __init__(
        self,
        batches: Buffer,
        *,
        takes_zstd: bool = True,
        most_bytes: int | None = None,
        most_records: int | None = None,
        from_offset: int = 0,
    ) -> None:
        """A batch keeps its codec, except that a consumer without zstd gets such batches uncompressed.

        With `most_bytes` or `most_records` the batches end with the first one that reaches it. Pieces of a large batch
        that end before `from_offset` are left out.

        Raises:
            CorruptRecordError: the first header is invalid.
        """
        self.size = self.records = self.spent = 0
        self._batches = batches
        self._takes_zstd = takes_zstd
        self._most_bytes = most_bytes
        self._most_records = most_records
        self._from_offset = from_offset
        self._headers = iter_headers(batches)
        self._next = next(self._headers, None)
        self._pieces: Iterator[tuple[int, int, bytes]] | None = None
        """Of a batch that is begun, with the records of each and their inflated bytes."""

    @property
    def is_done(self) -> bool:
        """Whether there are no more."""
        return self._next is None or (
            (self._most_bytes is not None and self.size >= max(self._most_bytes, 1))
            or (self._most_records is not None and self.records >= max(self._most_records, 1))
        )

    @property
    def is_within_batch(self) -> bool:
        """Whether a batch is inflated, of which a part is still to be converted."""
        return self._pieces is not None

    @property
    def cost(self) -> int:
        """What the next batch costs as a whole."""
        assert self._next is not None, "it is done"
        position, header = self._next
        return _inflated_size(self._batches, position, header) + RECORD_COST * header.record_count

    def step(self, most_cost: int | None = None) -> list[bytes]:
        """Convert one batch or a piece of one, and more up to `most_cost`.

        Raises:
            CorruptRecordError: a batch of the log does not decode.
        """
        found: list[bytes] = []
        end = None if most_cost is None else self.spent + most_cost
        while not self.is_done:
            assert self._next is not None, "it is not done"
            position, header = self._next
            if self._pieces is None:
                if found and end is not None and self.spent + self.cost > end:
                    break
                self._pieces = self._pieces_of(position, header)
            elif found and end is not None and self.spent >= end:
                break
            records, inflated, piece = next(self._pieces, (0, 0, b""))
            if not piece:
                self._pieces = None
                self._next = next(self._headers, None)
                continue
            found.append(piece)
            self.spent += inflated + RECORD_COST * records
            self.size += len(piece)
            self.records += records
        return found

    def _pieces_of(self, position: int, header: BatchHeader) -> Iterator[tuple[int, int, bytes]]:
        if header.is_control:
            return ((1, len(marker), marker) for marker in _markers(self._batches, position, header))
        return _pieces(self._batches, position, header, takes_zstd=self._takes_zstd, from_offset=self._from_offset)


def _inflated_size(batches: Buffer, position: int, header: BatchHeader) -> int:
    if header.codec is Codec.NONE:
        return header.size
    return max(header.size, claimed_inflated_size(memoryview(batches)[position:], header.codec))


_OF_THE_LOG: Final = InflateLimits(max_bytes=1 << 30)
"""The most that `max.inflate.bytes` can be: the batch was checked as it was written, maybe under another value."""


def _pieces(
    batches: Buffer, position: int, header: BatchHeader, *, takes_zstd: bool, from_offset: int
) -> Iterator[tuple[int, int, bytes]]:
    """Yield a batch as one, or as several that together have its offsets: records, their inflated bytes, the piece.

    A piece begins where the one before ends, so a client that reads it goes on with the next one, whatever records
    compaction has removed in between.
    """
    columns = decode_batch(batches, position, check_checksum=False, trusted=True, limits=_OF_THE_LOG).columns
    rows = columns.num_rows
    inflated = _inflated_size(batches, position, header)
    if rows <= PIECE_RECORDS and inflated <= PIECE_BYTES:
        yield rows, inflated, _records(header, 0, columns, is_whole=True, takes_zstd=takes_zstd)
        return
    deltas: Any = None  # each record's place is its number
    if "offset_delta" in columns.schema.names:
        deltas = columns.column(columns.schema.names.index("offset_delta")).to_numpy()
    bounds = _bounds(columns)
    for begin, end in pairwise(bounds):
        first_delta = 0 if begin == 0 else begin if deltas is None else int(deltas[begin])
        last_delta = header.last_offset_delta
        if end < rows:
            last_delta = (end if deltas is None else int(deltas[end])) - 1
        if len(bounds) > 2 and header.base_offset + last_delta < from_offset:
            continue
        of_piece = header._replace(
            base_offset=header.base_offset + first_delta,
            last_offset_delta=last_delta - first_delta,
            base_sequence=header.base_sequence
            if header.base_sequence < 0
            else (header.base_sequence + first_delta) & _MAX_SEQUENCE,
        )
        some = columns.slice(begin, end - begin)
        piece = _records(of_piece, first_delta, some, is_whole=len(bounds) == 2, takes_zstd=takes_zstd)
        yield end - begin, some.nbytes, piece


_MAX_SEQUENCE: Final = (1 << 31) - 1
"""Behind it the sequence numbers of a producer begin at 0 again."""


def _bounds(columns: Any) -> list[int]:
    """Return the numbers of the records at which pieces of a batch begin, and how many records there are."""
    rows = columns.num_rows
    if columns.nbytes <= PIECE_BYTES:
        return [*range(0, max(rows, 1), PIECE_RECORDS), rows]
    ends = np.zeros(rows + 1, np.int64)
    for column in columns.columns:
        ends += _starts(column)
    bounds = [0]
    while bounds[-1] < rows:
        begin = bounds[-1]
        fits = int(np.searchsorted(ends, ends[begin] + PIECE_BYTES, "right")) - 1
        bounds.append(min(max(fits, begin + 1), begin + PIECE_RECORDS, rows))
    return bounds


def _starts(column: Any) -> Any:
    """Return how many bytes a column has before each row, and in all."""
    if pa.types.is_binary(column.type) or pa.types.is_string(column.type):
        return _offsets(column).astype(np.int64)
    if pa.types.is_map(column.type):
        places = _offsets(column)
        return _starts(column.keys)[places] + _starts(column.items)[places]
    return np.zeros(len(column) + 1, np.int64)


def _offsets(column: Any) -> Any:
    return np.frombuffer(column.buffers()[1], np.int32, len(column) + 1, column.offset * 4)


def _records(header: BatchHeader, first_delta: int, columns: Any, *, is_whole: bool, takes_zstd: bool) -> bytes:
    """Return some records of a batch as a batch of Kafka's; `first_delta`: how far behind it the header's base is."""
    names, rows = columns.schema.names, columns.num_rows
    append_time = bool(header.attributes & _LOG_APPEND_TIME)
    # The builder writes only differences, and takes a first timestamp of -1 (none) for one that is still to come.
    since_first: Any = repeat(0, rows)
    first, last = header.base_timestamp_ms, header.max_timestamp_ms
    if "timestamp_ms" in names and not append_time and rows:
        timestamps = columns.column(names.index("timestamp_ms")).to_numpy()
        first = int(timestamps[0])
        if not is_whole:
            last = int(timestamps.max())
        since_first = (timestamps - first).tolist()
    body = b""
    if rows:
        deltas: Any = range(rows)
        if "offset_delta" in names:
            deltas = columns.column(names.index("offset_delta")).to_numpy()
            deltas = (deltas.astype(np.int64) - first_delta).tolist()
        keys = _cells(columns.column(names.index("key"))) if "key" in names else repeat(None, rows)
        values = _cells(columns.column(names.index("value")))
        headers: Any = repeat([], rows)
        column = columns.column(names.index("headers")) if "headers" in names else None
        if column is not None and int(np.diff(_offsets(column)).max()) > MAX_HEADERS:
            body = _written(deltas, since_first, keys, values, column)
        else:
            if column is not None:
                headers = _header_lists(column)
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
        last,
        (header.producer_id, header.producer_epoch, header.base_sequence),
        rows,
        _compress(body, codec),
    )


def _header_lists(column: Any) -> Iterator[list[tuple[str, bytes | None]]]:
    """Yield the headers of each record; one call of Arrow's reads those of some records."""
    places = _offsets(column)
    row, rows = 0, len(column)
    if int(places[-1]) - int(places[0]) <= _SLICE_HEADERS and rows <= SLICE_RECORDS:
        yield from [each or [] for each in column.to_pylist()]
        return
    while row < rows:
        end = int(np.searchsorted(places, int(places[row]) + _SLICE_HEADERS, "right")) - 1
        end = min(max(end, row + 1), row + SLICE_RECORDS, rows)
        yield from [each or [] for each in column.slice(row, end - row).to_pylist()]
        row = end


def _written(deltas: Any, since_first: Any, keys: Any, values: Any, headers: Any) -> bytes:
    """Return records of which one has very many headers, as the builder writes them.

    The builder would read and write all headers of a record by one call, and needs an object for each of them.
    """
    body = bytearray()
    places = _offsets(headers).tolist()
    names, contents = headers.keys, headers.items
    for delta, since, key, value, (begin, end) in zip(
        deltas, since_first, keys, values, pairwise(places), strict=False
    ):  # some of them repeat without end
        record = bytearray(b"\0")
        record += _varint_of(since) + _varint_of(delta)
        for cell in (key, value):
            record += _NO_CELL if cell is None else _varint_of(len(cell)) + cell
        record += _varint_of(end - begin)
        for at in range(begin, end, _SLICE_HEADERS):
            count = min(_SLICE_HEADERS, end - at)
            for name, content in zip(
                names.slice(at, count).to_pylist(), contents.slice(at, count).to_pylist(), strict=True
            ):
                encoded = name.encode()
                record += _varint_of(len(encoded)) + encoded
                record += _NO_CELL if content is None else _varint_of(len(content)) + content
        body += _varint_of(len(record)) + record
    return bytes(body)


def _varint_of(number: int) -> bytes:
    """Return a number as a record has it: a varint, with the sign in its lowest bit."""
    return varint(number << 1 if number >= 0 else (-number << 1) - 1)


_NO_CELL: Final = _varint_of(-1)


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
    offsets = _offsets(column)
    begin, end = int(offsets[0]), int(offsets[-1])
    data_buffer = column.buffers()[2]
    data = b"" if data_buffer is None else data_buffer.slice(begin, end - begin).to_pybytes()
    places = (offsets - begin if begin else offsets).tolist()
    cells: list[bytes | None] = [data[begin:end] for begin, end in pairwise(places)]
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
        case Codec.GZIP:
            return bytes(pa.Codec("gzip", compression_level=_GZIP_LEVEL).compress(body, asbytes=True))
        case Codec.ZSTD:
            return bytes(pa.compress(body, codec="zstd", asbytes=True))


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
