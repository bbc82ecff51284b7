"""Encoding and decoding are inverses, with and without Arrow; nothing that is not a batch passes for one."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import patch

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
from raftlog.format import columns as columns_module
from raftlog.format.columns import binary_array, headers_array
from raftlog.format.header import build_batch
from raftlog.format.small_batch import FEW, SHORT_BYTES, encode_few, is_of_few
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


cells = st.one_of(st.binary(max_size=20), st.integers(0, 3_000).map(lambda size: b"v" * size))
rows = st.lists(st.tuples(cells, cells), min_size=1, max_size=FEW)


@given(rows, st.booleans(), st.integers(0, 1 << 50))
def test_they_are_the_same_bytes(records: list[tuple[bytes, bytes]], has_keys: bool, timestamp_ms: int) -> None:
    keys = [key for key, _ in records] if has_keys else None
    values = [value for _, value in records]
    columns = Columns(pa.array(values, pa.binary()), key=None if keys is None else pa.array(keys, pa.binary()))
    assert encode_few(keys, values, timestamp_ms) == encode_batch(columns, timestamp_ms)


def test_the_header_says_what_it_is_told() -> None:
    columns = Columns(pa.array([b"value"], pa.binary()))
    transactional = int(Attributes.TRANSACTIONAL)
    batch = encode_few(None, [b"value"], 5, attributes=transactional, producer_id=7, producer_epoch=8, base_sequence=9)
    assert validate_produced(batch).producer_id == 7
    assert batch == encode_batch(columns, 5, attributes=transactional, producer_id=7, producer_epoch=8, base_sequence=9)
    stamped = encode_few(None, [b"value"], 5, base_offset=1 << 40, leader_epoch=3)
    assert stamped == encode_batch(columns, 5, base_offset=1 << 40, leader_epoch=3)


def test_what_is_no_batch_is_refused() -> None:
    with pytest.raises(InvalidRecord, match="at least one"):
        encode_few(None, [], 0)
    with pytest.raises(InvalidRecord, match="different lengths: 1 and 2"):
        encode_few([b""], [b"", b""], 0)


@given(rows, st.booleans())
def test_what_was_made_so_is_known_by_its_bytes(records: list[tuple[bytes, bytes]], has_keys: bool) -> None:
    batch = encode_few([key for key, _ in records] if has_keys else None, [value for _, value in records], 7)
    header = parse_batch(batch)
    assert is_of_few(batch, header) == (len(batch) <= SHORT_BYTES)
    assert is_of_few(memoryview(batch + b"more"), header) == (len(batch) <= SHORT_BYTES)


@given(rows, st.booleans(), st.data())
def test_what_is_taken_for_it_decodes(records: list[tuple[bytes, bytes]], has_keys: bool, data: st.DataObject) -> None:
    """Any changed body is either left to Arrow, or Arrow accepts it."""
    few = records[:3]
    batch = bytearray(encode_few([key for key, _ in few] if has_keys else None, [value for _, value in few], 7))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(HEADER_BYTES, min(len(batch), 600) - 1))
        batch[at] = data.draw(st.sampled_from([0, 1, 2, 8, 0x7F, 0x80, 0xFF]))
    changed = build_batch(parse_header(bytes(batch)), bytes(batch[HEADER_BYTES:]))
    if is_of_few(changed, parse_header(changed)):
        assert decode_batch(changed).columns.num_rows == len(few)


@given(rows, st.integers(1, 1 << 20))
def test_a_batch_that_says_it_has_other_rows_is_left_to_arrow(records: list[tuple[bytes, bytes]], count: int) -> None:
    batch = encode_few(None, [value for _, value in records], 7)
    header = parse_header(batch)._replace(record_count=count)
    assert is_of_few(batch, header) == (count == len(records) and len(batch) <= SHORT_BYTES)


def test_nulls_and_other_columns_are_left_to_arrow() -> None:
    for given_columns in (
        Columns(pa.array([b"value", None], pa.binary())),
        Columns(pa.array([b"a", b"b"], pa.binary()), key=pa.array([None, b"key"], pa.binary())),
        Columns(pa.array([b"a", b"b"], pa.binary()), timestamp_ms=pa.array([5, 6], pa.int64())),
    ):
        batch = encode_batch(given_columns, 5)
        assert not is_of_few(batch, parse_batch(batch))
        assert validate_produced(batch).record_count == 2


@given(st.lists(st.none() | st.binary(max_size=9), max_size=40), st.booleans())
def test_binary_cells_are_the_same_array_as_by_pyarrow(cells: list[bytes | None], is_pandas_waiting: bool) -> None:
    modules = SimpleNamespace(modules={})
    with patch.multiple(columns_module, sys=modules, _has_pandas=lambda: is_pandas_waiting):
        found = binary_array(cells)
    found.validate(full=True)
    assert found.equals(pa.array(cells, pa.binary()))
    assert found.null_count == cells.count(None)


HEADER = st.tuples(st.text(max_size=5), st.none() | st.binary(max_size=5))


@given(st.lists(st.none() | st.lists(HEADER, max_size=3), max_size=20), st.booleans())
def test_headers_are_the_same_array_as_by_pyarrow(
    rows: list[list[tuple[str, bytes | None]] | None], is_pandas_waiting: bool
) -> None:
    modules = SimpleNamespace(modules={})
    with patch.multiple(columns_module, sys=modules, _has_pandas=lambda: is_pandas_waiting):
        found = headers_array(rows)
    found.validate(full=True)
    assert found.equals(pa.array(rows, HEADERS_TYPE))
    assert found.type == HEADERS_TYPE
