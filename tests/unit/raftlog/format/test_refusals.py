"""Each way in which a produced batch can be wrong has its own error, and its checksum being right does not help it."""

from __future__ import annotations

import struct
import zlib
from typing import Any

import pyarrow as pa
import pytest

from raftlog.errors import (
    BatchTooExpansive,
    CorruptRecordError,
    InvalidRecord,
    MessageTooLarge,
    RaftlogError,
    UnsupportedCompression,
    UnsupportedVersion,
)
from raftlog.format import (
    HEADER_BYTES,
    MAX_RECORDS,
    Attributes,
    Codec,
    Columns,
    InflateLimits,
    decode_batch,
    encode_batch,
    validate_produced,
)
from raftlog.format.compression import compress
from raftlog.format.header import BatchHeader, build_batch, parse_header
from tests.support.batches import batch_of

GOOD = batch_of(b"first", b"second")


def rebuilt(batch: bytes = GOOD, body: bytes | None = None, **changes: Any) -> bytes:
    """Return the batch with header fields or body changed and a checksum that fits."""
    header: BatchHeader = parse_header(batch)._replace(**changes)
    return build_batch(header, batch[HEADER_BYTES:] if body is None else body)


def test_the_helper_itself_changes_nothing() -> None:
    assert rebuilt() == GOOD


@pytest.mark.parametrize(
    ("batch", "error", "words"),
    [
        (GOOD[:40], CorruptRecordError, "64 bytes"),
        (GOOD[:-1], CorruptRecordError, "cut short"),
        (GOOD[:-1] + bytes([GOOD[-1] ^ 1]), CorruptRecordError, "checksum mismatch"),
        (GOOD + b"x", CorruptRecordError, "follow the batch"),
        (GOOD + GOOD, CorruptRecordError, "exactly one batch"),
        (rebuilt(magic=2), UnsupportedVersion, "magic 2"),
        (rebuilt(magic=0), UnsupportedVersion, "magic 0"),
        (rebuilt(attributes=5), UnsupportedCompression, "codec 5"),
        (rebuilt(attributes=1 << 7), InvalidRecord, "not assigned"),
        (rebuilt(reserved=b"\0\0\1"), InvalidRecord, "reserved"),
        (rebuilt(record_count=3), InvalidRecord, "record_count 3"),
        (rebuilt(record_count=3, last_offset_delta=2), InvalidRecord, "the columns have 2 rows"),
        (rebuilt(record_count=0), InvalidRecord, "record_count is 0"),
        (rebuilt(last_offset_delta=7), InvalidRecord, "last_offset_delta 7"),
        (rebuilt(base_offset=4), InvalidRecord, "leader's to stamp"),
        (rebuilt(leader_epoch=4), InvalidRecord, "leader's to stamp"),
        (rebuilt(producer_id=4), InvalidRecord, "producer_id 4, producer_epoch -1 and base_sequence -1"),
        (rebuilt(producer_id=4, producer_epoch=0, base_sequence=-2), InvalidRecord, "base_sequence -2"),
        (rebuilt(producer_id=4, producer_epoch=-3, base_sequence=0), InvalidRecord, "producer_epoch -3"),
        (rebuilt(producer_id=-2, producer_epoch=0, base_sequence=0), InvalidRecord, "producer_id -2"),
        (rebuilt(producer_epoch=0), InvalidRecord, "producer_epoch 0"),
        (rebuilt(base_sequence=0), InvalidRecord, "base_sequence 0"),
        (rebuilt(max_timestamp_ms=2_000), InvalidRecord, "largest timestamp"),
        (rebuilt(max_timestamp_ms=999), InvalidRecord, "below base_timestamp_ms"),
        (rebuilt(attributes=int(Attributes.CONTROL)), InvalidRecord, "CONTROL"),
        (rebuilt(attributes=int(Attributes.LOG_APPEND_TIME)), InvalidRecord, "LOG_APPEND_TIME"),
        (rebuilt(attributes=int(Attributes.TRANSACTIONAL)), InvalidRecord, "transactional batch without a producer"),
        (
            rebuilt(
                attributes=int(Attributes.TRANSACTIONAL), producer_id=4, producer_epoch=(1 << 15) - 1, base_sequence=0
            ),
            InvalidRecord,
            "used up",
        ),
        (rebuilt(attributes=int(Attributes.TRANSACTIONAL | Attributes.CONTROL)), InvalidRecord, "CONTROL"),
        (rebuilt(attributes=int(Attributes.KEY)), CorruptRecordError, "field nodes"),
        (rebuilt(attributes=int(Codec.ZSTD)), BatchTooExpansive, "inflates to 4294967295"),
        (rebuilt(body=b""), CorruptRecordError, "Arrow"),
        (rebuilt(body=b"these are no columns, whatever they say"), CorruptRecordError, "Arrow"),
        (rebuilt(body=GOOD[HEADER_BYTES:] + bytes(8)), CorruptRecordError, "accounts for"),
        (rebuilt(body=GOOD[HEADER_BYTES:-8]), CorruptRecordError, "Arrow"),
    ],
)
def test_a_bad_batch_is_refused_with_its_reason(batch: bytes, error: type[RaftlogError], words: str) -> None:
    with pytest.raises(error, match=words):
        validate_produced(batch)
    validate_produced(GOOD)


def test_a_schema_message_is_not_a_record_batch() -> None:
    schema = pa.schema([("value", pa.binary())]).serialize().to_pybytes()
    with pytest.raises(CorruptRecordError):
        validate_produced(rebuilt(body=schema))


def test_a_bomb_is_refused_by_the_size_it_claims() -> None:
    body = compress(bytes(40 << 20), Codec.ZSTD)
    bomb = rebuilt(body=body, attributes=int(Codec.ZSTD))
    with pytest.raises(BatchTooExpansive, match=r"max\.inflate\.bytes"):
        validate_produced(bomb, limits=InflateLimits(max_bytes=32 << 20))
    with pytest.raises(BatchTooExpansive, match="to one"):
        validate_produced(bomb, limits=InflateLimits(max_bytes=64 << 20, max_ratio=100))


@pytest.mark.parametrize("codec", [Codec.GZIP, Codec.SNAPPY, Codec.LZ4, Codec.ZSTD])
@pytest.mark.parametrize("claimed", [-1, +1, +1000])
def test_a_body_that_lies_about_its_size_is_refused(codec: Codec, claimed: int) -> None:
    honest = compress(GOOD[HEADER_BYTES:], codec)
    (size,) = struct.unpack_from("<I", honest)
    body = struct.pack("<I", size + claimed) + honest[4:]
    with pytest.raises(CorruptRecordError, match="inflate"):
        validate_produced(rebuilt(body=body, attributes=int(codec)))
    validate_produced(rebuilt(body=honest, attributes=int(codec)))


def test_a_bomb_that_lies_inflates_no_further_than_it_claims() -> None:
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    packed = packer.compress(bytes(256 << 20)) + packer.flush()
    before = pa.total_allocated_bytes()
    with pytest.raises(CorruptRecordError, match="claims"):
        validate_produced(rebuilt(body=struct.pack("<I", 1000) + packed, attributes=int(Codec.GZIP)))
    assert pa.total_allocated_bytes() - before < 1 << 20


def test_arrows_own_compression_is_refused_before_it_inflates() -> None:
    values = pa.array([bytes(1 << 20)] * 8, pa.binary())
    batch = pa.record_batch([values], names=["value"])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_batch(batch)
    reader = pa.ipc.MessageReader.open_stream(sink.getvalue())
    reader.read_next_message()
    body = reader.read_next_message().serialize().to_pybytes()
    assert len(body) < batch.nbytes / 100
    with pytest.raises(CorruptRecordError, match="compressed by itself"):
        validate_produced(rebuilt(body=body, record_count=8, last_offset_delta=7))


def test_columns_that_arrow_finds_invalid_are_refused() -> None:
    batch = encode_batch(Columns(pa.array([b"abcd", b"efgh"], pa.binary())), 0)
    body = bytearray(batch[HEADER_BYTES:])
    offsets = struct.pack("<3i", 0, 4, 8)
    at = body.rindex(offsets)
    body[at : at + 12] = struct.pack("<3i", 0, 400, 8)
    with pytest.raises(CorruptRecordError, match="Arrow"):
        validate_produced(rebuilt(batch, body=bytes(body)))


def test_nulls_in_a_timestamp_column_are_refused() -> None:
    schema = pa.schema([("timestamp_ms", pa.int64()), ("value", pa.binary())])
    columns = pa.record_batch([pa.array([5, None], pa.int64()), pa.array([b"a", b"b"], pa.binary())], schema=schema)
    body = columns.serialize().to_pybytes()
    with pytest.raises(CorruptRecordError, match="nulls"):
        validate_produced(rebuilt(body=body, attributes=int(Attributes.TIMESTAMP), max_timestamp_ms=5))


def test_a_batch_has_a_million_records_at_most_and_larger_ones_in_logs_are_read() -> None:
    """4 KB may hold a million empty records, and a MB a hundred million."""
    full, larger = (
        encode_batch(Columns(pa.array([b""], pa.binary()).take(pa.array([0] * count))), 1, codec=Codec.GZIP)
        for count in (MAX_RECORDS, MAX_RECORDS + 1)
    )
    assert validate_produced(full).record_count == MAX_RECORDS
    with pytest.raises(MessageTooLarge, match=f"{MAX_RECORDS + 1} records, at most {MAX_RECORDS}"):
        validate_produced(larger)
    assert decode_batch(larger).columns.num_rows == MAX_RECORDS + 1


def test_too_many_records_are_refused_before_anything_is_inflated() -> None:
    with pytest.raises(MessageTooLarge):
        validate_produced(rebuilt(body=b"no body", record_count=1 << 30, last_offset_delta=(1 << 30) - 1))
