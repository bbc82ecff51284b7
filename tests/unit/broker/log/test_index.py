"""The bytes of the three indexes, and what is believed of damaged ones."""

from __future__ import annotations

from array import array

import google_crc32c
import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.log.index import (
    AbortedTransaction,
    TxnIndex,
    decode_offset_entries,
    decode_time_entries,
    drop_txn_file,
    encode_offset_entries,
    encode_time_entries,
)
from broker.log.segment import Boundary, SegmentIndex
from tests.support.memory_storage import MemoryStorage

STEM = "/s"


def crc(base_offset: int, entry: bytes) -> bytes:
    return int(google_crc32c.value(base_offset.to_bytes(8, "little") + entry)).to_bytes(4, "little")


def test_golden_offset_entry() -> None:
    entry = (7).to_bytes(4, "little") + (4096).to_bytes(4, "little")
    assert encode_offset_entries(1000, array("I", [7]), array("I", [4096])) == entry + crc(1000, entry)


def test_golden_time_entry() -> None:
    entry = (1_700_000_000_000).to_bytes(8, "little") + (7).to_bytes(4, "little")
    assert encode_time_entries(1000, array("I", [7]), array("q", [1_700_000_000_000])) == entry + crc(1000, entry)


def test_golden_txn_entry() -> None:
    storage = MemoryStorage()
    index = TxnIndex(5)
    index.append(AbortedTransaction(9, 10, 20, 21))
    index.end_stable_offset = 22
    index.store(storage, "/x", 23)
    entry = b"".join(value.to_bytes(8, "little") for value in (9, 10, 20, 21))
    closing = b"".join(value.to_bytes(8, "little", signed=True) for value in (-1, 5, 23, 22))
    assert storage.raw("/x.txnindex") == entry + crc(5, entry) + closing + crc(5, closing)


@given(st.integers(0, 2**40), st.lists(st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1)), max_size=9))
def test_vectorised_checksums_agree_with_the_plain_ones(base: int, pairs: list[tuple[int, int]]) -> None:
    data = encode_offset_entries(base, array("I", [a for a, _ in pairs]), array("I", [b for _, b in pairs]))
    for number, (a, b) in enumerate(pairs):
        entry = a.to_bytes(4, "little") + b.to_bytes(4, "little")
        assert data[12 * number : 12 * number + 12] == entry + crc(base, entry)
    assert decode_offset_entries(base, data)["position"].tolist() == [b for _, b in pairs]


@pytest.mark.parametrize("rows", [1, 99, 100, 101, 102, 300])
def test_many_rows_and_few_have_the_same_checksums(rows: int) -> None:
    data = encode_offset_entries(5, array("I", range(rows)), array("I", range(rows)))
    entries = [number.to_bytes(4, "little") * 2 for number in range(rows)]
    assert data == b"".join(entry + crc(5, entry) for entry in entries)
    assert len(decode_offset_entries(5, data)) == rows
    damaged = bytearray(data)
    damaged[-12] ^= 1
    assert len(decode_offset_entries(5, bytes(damaged))) == rows - 1


def test_any_flipped_bit_ends_the_entries_before_it() -> None:
    data = encode_time_entries(3, array("I", [1, 2, 3]), array("q", [5, 6, 7]))
    for bit in range(len(data) * 8):
        spoiled = bytearray(data)
        spoiled[bit // 8] ^= 1 << bit % 8
        assert len(decode_time_entries(3, bytes(spoiled))) == bit // 8 // 16


def filled() -> SegmentIndex:
    index = SegmentIndex(100)
    for offset, position, timestamp in ((110, 50, 7), (120, 90, 7), (130, 200, 30)):
        index.append(offset, position, timestamp)
    return index


@pytest.mark.parametrize(
    ("offset", "boundary"), [(100, (100, 0)), (109, (100, 0)), (110, (110, 50)), (129, (120, 90)), (999, (130, 200))]
)
def test_floor(offset: int, boundary: tuple[int, int]) -> None:
    assert filled().floor(offset) == boundary


@pytest.mark.parametrize(
    ("position", "end_offset", "boundary"),
    [(49, 999, (100, 0)), (95, 999, (120, 90)), (999, 125, (120, 90)), (999, 999, (130, 200)), (60, 105, (100, 0))],
)
def test_floor_position(position: int, end_offset: int, boundary: tuple[int, int]) -> None:
    assert filled().floor_position(position, end_offset) == boundary


@pytest.mark.parametrize(("time_ms", "boundary"), [(7, (100, 0)), (8, (120, 90)), (30, (120, 90)), (31, (130, 200))])
def test_before_time(time_ms: int, boundary: tuple[int, int]) -> None:
    assert filled().before_time(time_ms) == boundary


def test_entries_survive_the_disk_in_pieces() -> None:
    storage, index = MemoryStorage(), SegmentIndex(100)
    for number, entry in enumerate(filled().entries):
        index.append(*entry)
        assert index.store(storage, STEM)
        assert not index.store(storage, STEM)
        assert len(SegmentIndex.load(storage, STEM, 100)) == number + 1
    assert SegmentIndex.load(storage, STEM, 100).entries == filled().entries


def test_truncated_entries_never_come_back() -> None:
    storage, index = MemoryStorage(), filled()
    index.store(storage, STEM)
    index.truncate(125)
    index.cut_files(storage, STEM)
    assert index.last == Boundary(120, 90)
    assert SegmentIndex.load(storage, STEM, 100).entries == filled().entries[:2]
    index.append(127, 150, 9)
    index.store(storage, STEM)
    assert SegmentIndex.load(storage, STEM, 100).last == Boundary(127, 150)


def test_files_that_disagree_are_good_as_far_as_they_agree() -> None:
    storage, index = MemoryStorage(), filled()
    index.store(storage, STEM)
    del storage.raw(STEM + ".timeindex")[40:]
    assert SegmentIndex.load(storage, STEM, 100).entries == filled().entries[:2]


def test_aborted_transactions_are_found_by_overlap() -> None:
    storage = MemoryStorage()
    index = TxnIndex(0)
    first, second = AbortedTransaction(1, 0, 10, 0), AbortedTransaction(2, 5, 20, 11)
    index.append(first)
    index.append(second)
    index.end_stable_offset = 25
    index.store(storage, STEM, 30)
    loaded = TxnIndex.load(storage, STEM, 0, 30)
    assert loaded is not None
    assert list(loaded.entries) == [first, second]
    assert loaded.lookup(0, 5) == [first]
    assert loaded.lookup(11, 30) == [second]
    assert loaded.lookup(0, 30) == [first, second]
    assert loaded.lookup(21, 30) == []
    assert loaded.settles(25)
    assert not loaded.settles(26)
    loaded.truncate(20)
    assert list(loaded.entries) == [first]
    assert not loaded.settles(1), "after the truncation the transaction must count as open again"
    loaded.store(storage, STEM, 19)
    reloaded = TxnIndex.load(storage, STEM, 0, 19)
    assert reloaded is not None
    assert reloaded.entries == (first,)
    assert TxnIndex.load(storage, "/missing", 0, 19) is None


def test_aborted_transactions_count_as_a_whole_and_for_the_segment_as_it_is() -> None:
    storage = MemoryStorage()
    index = TxnIndex(7, [AbortedTransaction(1, 8, 10, 11), AbortedTransaction(1, 12, 13, 14)])
    index.store(storage, STEM, 20)
    path = STEM + ".txnindex"
    assert TxnIndex.load(storage, STEM, 7, 21) is None, (
        "the index must not be loaded for a segment that has grown since"
    )
    assert TxnIndex.load(storage, STEM, 8, 20) is None, "the index must not be loaded for another segment"
    whole = bytes(storage.raw(path))
    for cut in range(len(whole)):
        storage.raw(path)[:] = whole[:cut]
        assert TxnIndex.load(storage, STEM, 7, 20) is None
    for position in range(len(whole)):
        storage.raw(path)[:] = whole
        storage.raw(path)[position] ^= 1
        assert TxnIndex.load(storage, STEM, 7, 20) is None
    storage.raw(path)[:] = whole
    drop_txn_file(storage, STEM)
    drop_txn_file(storage, STEM)
    assert not storage.exists(path)
