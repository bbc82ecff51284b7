"""The fixed header of a record batch, format 1.

All integers are little-endian. A batch is this header and then one body (`columns.py`, `compression.py`).

    position  size  field                    meaning
           0     8  base_offset          i64 offset of the first record; 0 until the leader stamps it
           8     4  batch_length         u32 bytes after this field
          12     4  leader_epoch         i32 epoch of the leader that appended the batch; -1 until stamped
          16     1  magic                u8  1
          17     4  crc32c               u32 CRC-32C of everything from `attributes` to the end
          21     2  attributes           u16 see below
          23     4  last_offset_delta    u32 offset of the last record minus base_offset
          27     4  record_count         u32 rows in the body
          31     8  base_timestamp_ms    i64 timestamp of every record without a timestamp column
          39     8  max_timestamp_ms     i64 largest timestamp in the batch
          47     8  producer_id          i64 -1: not idempotent
          55     2  producer_epoch       i16 -1: not idempotent
          57     4  base_sequence        i32 sequence of the first record; -1: not idempotent
          61     3  reserved             zero
          64        body

    attributes  bits 0-2  codec: 0 none, 1 gzip, 2 snappy, 3 lz4, 4 zstd
                bit 3     timestamp type: 0 create time, 1 log append time
                bit 4     transactional
                bit 5     control batch
                bit 6     sparse offsets: an offset_delta column follows (compaction)
                bit 8     key column present
                bit 9     timestamp column present
                bit 10    headers column present
                others    zero

The checksum does not cover `base_offset` and `leader_epoch`: the leader stamps them without touching the rest.
The three reserved bytes align the body to a multiple of 8, as Arrow buffers require (docs/adr/0002).
"""

from __future__ import annotations

import struct
from enum import IntFlag
from typing import Final, NamedTuple

import google_crc32c
import pyarrow as pa

from raftlog.errors import CorruptRecordError, InvalidRecord, UnsupportedCompression, UnsupportedVersion
from raftlog.types import Codec

MAGIC: Final = 1
HEADER_BYTES: Final = 64
LENGTH_START: Final = 8
LENGTH_END: Final = 12
"""The position after `batch_length`, which counts the bytes from here on."""
STAMP_BYTES: Final = 16
"""`base_offset`, `batch_length`, `leader_epoch`: the only bytes that a leader rewrites."""
CHECKSUM_START: Final = 21
PRODUCER_START: Final = 47
"""The position of `producer_id`; `producer_epoch` follows it."""
NO_PRODUCER_ID: Final = -1

_HEADER = struct.Struct("<qIiBIHIIqqqhi3s")
_STAMP = struct.Struct("<qIi")
_LENGTH = struct.Struct("<I")
_CHECKED = struct.Struct("<HIIqqqhi3s")
_PRODUCER = struct.Struct("<qh")
_RESERVED: Final = b"\0\0\0"

assert _HEADER.size == HEADER_BYTES
assert HEADER_BYTES % 8 == 0, "Arrow buffers in the body are aligned only if the body is"
assert _STAMP.size == STAMP_BYTES
assert CHECKSUM_START + _CHECKED.size == HEADER_BYTES


class Attributes(IntFlag):
    """The attribute bits from bit 3 on."""

    LOG_APPEND_TIME = 1 << 3
    TRANSACTIONAL = 1 << 4
    CONTROL = 1 << 5
    SPARSE_OFFSETS = 1 << 6
    KEY = 1 << 8
    TIMESTAMP = 1 << 9
    HEADERS = 1 << 10


CODEC_MASK: Final = 0b111
KNOWN_ATTRIBUTES: Final = CODEC_MASK | int(
    Attributes.LOG_APPEND_TIME
    | Attributes.TRANSACTIONAL
    | Attributes.CONTROL
    | Attributes.SPARSE_OFFSETS
    | Attributes.KEY
    | Attributes.TIMESTAMP
    | Attributes.HEADERS
)


# Plain integers for checks of every batch: arithmetic on enum members creates new members.
_SPARSE: Final = int(Attributes.SPARSE_OFFSETS)
_TIMESTAMP: Final = int(Attributes.TIMESTAMP)
_HIGHEST_CODEC: Final = max(Codec).value


class BatchHeader(NamedTuple):
    """The header's fields, in their order on the wire."""

    base_offset: int
    batch_length: int
    leader_epoch: int
    magic: int
    crc32c: int
    attributes: int
    last_offset_delta: int
    record_count: int
    base_timestamp_ms: int
    max_timestamp_ms: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    reserved: bytes

    @property
    def size(self) -> int:
        """Bytes of the whole batch, header included."""
        return LENGTH_END + self.batch_length

    @property
    def last_offset(self) -> int:
        """Offset of the last record."""
        return self.base_offset + self.last_offset_delta

    @property
    def next_offset(self) -> int:
        """The first offset after the batch."""
        return self.base_offset + self.last_offset_delta + 1

    @property
    def codec(self) -> Codec:
        """Codec of the body.

        Raises:
            UnsupportedCompression: the number is not assigned.
        """
        try:
            return Codec(self.attributes & CODEC_MASK)
        except ValueError:
            raise UnsupportedCompression(
                f"codec {self.attributes & CODEC_MASK} is not assigned; known are "
                + ", ".join(f"{codec.value} {codec.name.lower()}" for codec in Codec)
            ) from None

    @property
    def is_control(self) -> bool:
        """Whether the batch holds transaction markers instead of records."""
        return bool(self.attributes & Attributes.CONTROL)

    @property
    def is_transactional(self) -> bool:
        """Whether the batch belongs to a transaction."""
        return bool(self.attributes & Attributes.TRANSACTIONAL)


Buffer = bytes | bytearray | memoryview
"""Bytes of a batch; parsing never copies them."""


_TRANSACTIONAL: Final = int(Attributes.TRANSACTIONAL)  # operators of a flag are Python code


def says_transactional(data: Buffer) -> bool:
    """Whether the first batch has the transactional attribute, without any other check."""
    return len(data) > CHECKSUM_START and bool(data[CHECKSUM_START] & _TRANSACTIONAL)


def producer_of(data: Buffer) -> tuple[int, int]:
    """Return producer id and epoch of the first batch, without any other check; (-1, -1) for an incomplete header."""
    return _PRODUCER.unpack_from(data, PRODUCER_START) if len(data) >= HEADER_BYTES else (NO_PRODUCER_ID, -1)


def first_batches(data: Buffer, position: int, most: int) -> tuple[int, int]:
    """Return where the first `most` batches from `position` on end, and how many they are, without any check.

    What is no batch, or is cut short, counts as one that takes the rest.
    """
    end, count = len(data), 0
    while count < most and position < end:
        length = _LENGTH.unpack_from(data, position + LENGTH_START)[0] if position + LENGTH_END <= end else 0
        position = position + LENGTH_END + length if length >= HEADER_BYTES - LENGTH_END else end
        count += 1
    return min(position, end), count


def parse_header(data: Buffer, position: int = 0) -> BatchHeader:
    """Return the header at `position`, checked only for completeness.

    Raises:
        CorruptRecordError: fewer than 64 bytes are left.
    """
    if len(data) - position < HEADER_BYTES:
        raise CorruptRecordError(f"a batch header has {HEADER_BYTES} bytes, only {len(data) - position} are there")
    return BatchHeader._make(_HEADER.unpack_from(data, position))


def check_header(header: BatchHeader) -> None:
    """Check that the fields of a header are valid and consistent.

    Raises:
        UnsupportedVersion: another magic.
        UnsupportedCompression: the codec number is not assigned.
        CorruptRecordError: the length is below that of the header.
        InvalidRecord: unassigned attributes or reserved bytes are set, or counts or timestamps contradict each other.
    """
    if header.magic != MAGIC:
        raise UnsupportedVersion(f"batch magic {header.magic} is not supported; this version reads magic {MAGIC}")
    if header.size < HEADER_BYTES:
        raise CorruptRecordError(f"batch_length {header.batch_length} is less than the header's own bytes")
    attributes = header.attributes
    if attributes & CODEC_MASK > _HIGHEST_CODEC:
        header.codec  # noqa: B018 # the property raises
    if attributes & ~KNOWN_ATTRIBUTES or header.reserved != _RESERVED:
        raise InvalidRecord(
            f"attributes {header.attributes:#06x} or reserved bytes {header.reserved.hex()} use bits not assigned"
        )
    sparse = attributes & _SPARSE
    if header.record_count == 0 and not sparse:
        raise InvalidRecord("record_count is 0: a batch holds at least one record")
    span = header.last_offset_delta + 1
    if header.record_count > span or (not sparse and header.record_count != span):
        raise InvalidRecord(
            f"record_count {header.record_count} does not fit last_offset_delta {header.last_offset_delta}"
        )
    if header.max_timestamp_ms < header.base_timestamp_ms and not attributes & _TIMESTAMP:
        raise InvalidRecord(
            f"max_timestamp_ms {header.max_timestamp_ms} is below base_timestamp_ms {header.base_timestamp_ms}"
        )


def checksum(batch: Buffer, position: int = 0, size: int | None = None) -> int:
    """Return the CRC-32C of the checked part of the batch that starts at `position`, without copying it."""
    end = len(batch) if size is None else position + size
    whole = pa.py_buffer(batch)
    return int(google_crc32c.value(whole.slice(position + CHECKSUM_START, end - position - CHECKSUM_START)))


def pack_header(header: BatchHeader) -> bytes:
    """Return the 64 bytes of the header."""
    return _HEADER.pack(*header)


def pack_checked(
    attributes: int,
    last_offset_delta: int,
    record_count: int,
    base_timestamp_ms: int,
    max_timestamp_ms: int,
    producer_id: int,
    producer_epoch: int,
    base_sequence: int,
) -> bytes:
    """Return the part of a header that the checksum covers."""
    return _CHECKED.pack(
        attributes,
        last_offset_delta,
        record_count,
        base_timestamp_ms,
        max_timestamp_ms,
        producer_id,
        producer_epoch,
        base_sequence,
        _RESERVED,
    )


def build_batch(header: BatchHeader, body: Buffer) -> bytes:
    """Return header and body as one batch, with computed `batch_length` and `crc32c`."""
    checked = _CHECKED.pack(*header[5:])
    crc = google_crc32c.extend(google_crc32c.value(checked), pa.py_buffer(body))
    front = struct.pack(
        "<qIiBI",
        header.base_offset,
        HEADER_BYTES - LENGTH_END + len(body),
        header.leader_epoch,
        header.magic,
        crc,
    )
    return b"".join((front, checked, body))


def pack_stamp(base_offset: int, batch_length: int, leader_epoch: int) -> bytes:
    """Return the first 16 bytes of a batch as the leader writes them."""
    return _STAMP.pack(base_offset, batch_length, leader_epoch)


def with_append_time(header: BatchHeader, batch: Buffer, now_ms: int) -> bytes:
    """Return the 64 header bytes of `batch`, stamped with the log append time.

    The body stays the same; its timestamp column no longer counts (Kafka: message.timestamp.type).
    """
    stamped = header._replace(
        attributes=header.attributes | Attributes.LOG_APPEND_TIME,
        base_timestamp_ms=now_ms,
        max_timestamp_ms=now_ms,
    )
    checked = _CHECKED.pack(*stamped[5:])
    body = pa.py_buffer(batch).slice(HEADER_BYTES, header.size - HEADER_BYTES)
    crc = google_crc32c.extend(google_crc32c.value(checked), body)
    return pack_header(stamped._replace(crc32c=crc))
