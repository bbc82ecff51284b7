"""Batches of a few records, made without Arrow: byte for byte what Arrow makes of them."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raftlog.errors import InvalidRecord
from raftlog.format import (
    HEADER_BYTES,
    Attributes,
    Columns,
    decode_batch,
    encode_batch,
    parse_batch,
    parse_header,
    validate_produced,
)
from raftlog.format.header import build_batch
from raftlog.format.small_batch import FEW, SHORT_BYTES, encode_few, is_of_few

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
    """Whatever is changed in a body: it is either left to Arrow, or Arrow finds nothing wrong with it."""
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
    for columns in (
        Columns(pa.array([b"value", None], pa.binary())),
        Columns(pa.array([b"a", b"b"], pa.binary()), key=pa.array([None, b"key"], pa.binary())),
        Columns(pa.array([b"a", b"b"], pa.binary()), timestamp_ms=pa.array([5, 6], pa.int64())),
    ):
        batch = encode_batch(columns, 5)
        assert not is_of_few(batch, parse_batch(batch))
        assert validate_produced(batch).record_count == 2
