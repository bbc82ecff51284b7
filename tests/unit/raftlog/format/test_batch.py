"""Encoding and decoding are inverses, and nothing that is not a batch passes for one."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given, settings

from raftlog.errors import InvalidRecord, RaftlogError
from raftlog.format import (
    HEADER_BYTES,
    HEADERS_TYPE,
    STAMP_BYTES,
    Attributes,
    Codec,
    Columns,
    decode_batch,
    encode_batch,
    iter_headers,
    pack_stamp,
    parse_batch,
    parse_header,
    validate_produced,
    with_append_time,
)
from tests.support.batches import batch_of, codecs, columns


def full_batch(codec: Codec = Codec.NONE) -> bytes:
    return encode_batch(
        Columns(
            value=pa.array([b"one", None, b"three"], pa.binary()),
            key=pa.array([b"k", b"", None], pa.binary()),
            timestamp_ms=pa.array([5, 7, 6], pa.int64()),
            headers=pa.array([[("trace", b"1"), ("empty", None)], [], None], HEADERS_TYPE),
        ),
        5,
        codec=codec,
    )


@given(columns(), codecs)
@settings(deadline=None)
def test_decoding_gives_back_what_was_encoded(drawn: tuple[Columns, int], codec: Codec) -> None:
    given_columns, base = drawn
    batch = encode_batch(given_columns, base, codec=codec)
    header = validate_produced(batch)
    decoded = decode_batch(batch)
    assert decoded.header == header
    assert header.size == len(batch)
    assert header.codec is codec
    got = decoded.columns
    assert got.column("value").to_pylist() == given_columns.value.to_pylist()
    for bit, name, array in (
        (Attributes.KEY, "key", given_columns.key),
        (Attributes.HEADERS, "headers", given_columns.headers),
    ):
        assert bool(header.attributes & bit) == (array is not None)
        if array is not None:
            assert got.column(name).to_pylist() == array.to_pylist()
    expected = [base] * len(given_columns.value)
    if given_columns.timestamp_ms is not None:
        expected = given_columns.timestamp_ms.to_pylist()
    if header.attributes & Attributes.TIMESTAMP:
        assert got.column("timestamp_ms").to_pylist() == expected
    else:
        assert expected == [header.base_timestamp_ms] * len(expected)
    assert header.max_timestamp_ms == max(expected)


@pytest.mark.parametrize("codec", list(Codec))
def test_every_single_byte_corruption_is_refused(codec: Codec) -> None:
    batch = full_batch(codec)
    validate_produced(batch)
    for position in range(len(batch)):
        for flip in (0x01, 0x80, 0xFF):
            damaged = bytearray(batch)
            damaged[position] ^= flip
            with pytest.raises(RaftlogError):
                validate_produced(bytes(damaged))


@pytest.mark.parametrize("codec", list(Codec))
def test_every_truncation_is_refused(codec: Codec) -> None:
    batch = full_batch(codec)
    for length in range(len(batch)):
        with pytest.raises(RaftlogError):
            validate_produced(batch[:length])


def test_the_body_of_an_uncompressed_batch_is_not_copied() -> None:
    batch = batch_of(b"x" * 10_000)
    memory = pa.py_buffer(batch)
    data = decode_batch(batch).columns.column("value").buffers()[2]
    assert memory.address <= data.address < memory.address + memory.size
    assert (data.address - memory.address - HEADER_BYTES) % 8 == 0


def test_a_timestamp_column_that_only_repeats_the_base_is_left_out() -> None:
    constant = encode_batch(Columns(pa.array([b"a", b"b"], pa.binary()), timestamp_ms=pa.array([9, 9], pa.int64())), 9)
    assert not parse_batch(constant).attributes & Attributes.TIMESTAMP
    assert constant == encode_batch(Columns(pa.array([b"a", b"b"], pa.binary())), 9)


def test_stamping_leaves_the_checksum_valid() -> None:
    batch = batch_of(b"a", b"b")
    header = parse_header(batch)
    stamped = pack_stamp(1_000, header.batch_length, 7) + batch[STAMP_BYTES:]
    again = parse_batch(stamped)
    assert (again.base_offset, again.last_offset, again.next_offset, again.leader_epoch) == (
        1_000,
        1_001,
        1_002,
        7,
    )


def test_log_append_time_replaces_the_timestamps_and_keeps_the_body() -> None:
    batch = full_batch()
    front = with_append_time(parse_header(batch), batch, 99)
    stamped = front + batch[HEADER_BYTES:]
    header = parse_batch(stamped)
    assert header.attributes & Attributes.LOG_APPEND_TIME
    assert (header.base_timestamp_ms, header.max_timestamp_ms) == (99, 99)
    assert decode_batch(stamped).columns.column("value").to_pylist() == [b"one", None, b"three"]


def test_sparse_offsets_survive_and_are_refused_from_producers() -> None:
    sparse = encode_batch(
        Columns(pa.array([b"a", b"b"], pa.binary()), offset_delta=pa.array([2, 9], pa.uint32())),
        1,
        base_offset=100,
        last_offset_delta=12,
    )
    decoded = decode_batch(sparse)
    assert decoded.header.next_offset == 113
    assert decoded.columns.column("offset_delta").to_pylist() == [2, 9]
    with pytest.raises(InvalidRecord):
        validate_produced(sparse)


def test_walking_stops_at_a_batch_that_is_cut_short() -> None:
    first, second = batch_of(b"a"), batch_of(b"b", b"c")
    walked = list(iter_headers(first + second))
    assert [(position, header.record_count) for position, header in walked] == [(0, 1), (len(first), 2)]
    assert len(list(iter_headers(first + second[:-1]))) == 1


def test_empty_and_uneven_columns_are_refused() -> None:
    with pytest.raises(InvalidRecord, match="at least one"):
        encode_batch(Columns(pa.array([], pa.binary())), 0)
    with pytest.raises(InvalidRecord, match="different lengths"):
        encode_batch(Columns(pa.array([b"a"], pa.binary()), key=pa.array([b"a", b"b"], pa.binary())), 0)
