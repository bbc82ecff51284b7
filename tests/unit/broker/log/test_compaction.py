"""Which rows stay and what becomes of their batches, without a disk."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.log.compaction import CleanedBatch, Compactor, LastOffsets, SourceBatch, cut_front, read_batch
from broker.log.txn_index import AbortedTransaction
from raftlog.errors import CorruptRecordError
from raftlog.format import (
    HEADER_BYTES,
    HEADERS_TYPE,
    Attributes,
    Codec,
    Columns,
    decode_batch,
    encode_batch,
    pack_stamp,
    parse_batch,
    parse_header,
    with_append_time,
)
from raftlog.format.aborted import AbortedRanges
from raftlog.format.control import Marker, encode_control
from raftlog.format.header import build_batch
from tests.support.keyed_log import Record, keyed_batch, rows_of
from tests.support.transactional_batches import TransactionalLog, key_of, transactional_logs

Row = tuple[bytes | None, bytes | None]


def stamped(batch: bytes, base_offset: int, epoch: int = 1) -> bytes:
    """Return a batch as its leader writes it."""
    return pack_stamp(base_offset, len(batch) - 12, epoch) + batch[16:]


def sources(*batches: bytes, pinned: tuple[int, ...] = ()) -> list[SourceBatch]:
    """Return the batches as the cleaner reads them; those at the offsets `pinned` are remembered."""
    return [read_batch(memoryview(batch), parse_header(batch), lambda _, base: base in pinned) for batch in batches]


def log_of(*batches: list[Row], epoch: int = 1, codec: Codec = Codec.NONE) -> list[bytes]:
    """Return stamped batches one after the other."""
    made, offset = [], 0
    for rows in batches:
        made.append(stamped(keyed_batch(rows, 1_000 + offset, codec=codec), offset, epoch))
        offset += len(rows)
    return made


def compacted(
    batches: list[SourceBatch], *, tombstones_below: int = 0, max_batch_bytes: int = 1 << 30
) -> list[CleanedBatch]:
    """Return what a log of these batches becomes."""
    last = LastOffsets()
    last.add(batches)
    compactor = Compactor(last, tombstones_below=tombstones_below, max_batch_bytes=max_batch_bytes)
    return [*compactor.compact(batches), *compactor.finish()]


def records(batches: list[CleanedBatch]) -> list[Record]:
    """Return the rows; each batch follows the one before and is what it says it is."""
    found: list[Record] = []
    expected = batches[0].base_offset if batches else 0
    for batch in batches:
        decoded = decode_batch(batch.data)
        header = decoded.header
        assert (header.base_offset, header.next_offset) == (batch.base_offset, batch.next_offset)
        assert header.base_offset == expected
        assert header.max_timestamp_ms == batch.max_timestamp_ms
        expected = header.next_offset
        rows = rows_of(decoded)
        assert all(header.base_offset <= row[0] < header.next_offset for row in rows)
        if rows:
            assert max(row[1] for row in rows) == header.max_timestamp_ms
        found += rows
    return found


def test_emptied_batches_vanish_into_a_neighbour() -> None:
    batches = log_of([(b"a", b"1")], [(b"a", b"2")], [(b"a", b"3")], [(b"b", b"4")])
    made = compacted(sources(*batches))
    assert records(made) == [(2, 1_002, b"a", b"3"), (3, 1_003, b"b", b"4")]
    assert [(batch.base_offset, batch.next_offset) for batch in made] == [(0, 4)]


def test_what_nothing_goes_from_is_copied_byte_for_byte() -> None:
    batches = log_of([(b"a", b"1"), (b"b", b"1")], [(b"c", b"2")])
    made = compacted(sources(*batches))
    assert [bytes(batch.data) for batch in made] == batches
    assert all(batch.is_copy for batch in made)


def test_a_log_of_which_nothing_is_left_keeps_its_range() -> None:
    batches = log_of([(None, b"1")], [(None, b"2"), (None, b"3")])
    (made,) = compacted(sources(*batches))
    header = decode_batch(made.data).header
    assert (header.base_offset, header.next_offset, header.record_count) == (0, 3, 0)
    assert header.max_timestamp_ms == 1_001, "retention goes by the newest record that was there"
    (again,) = compacted(sources(bytes(made.data)))
    assert again.is_copy


@pytest.mark.parametrize("other", ["epoch", "codec", "append time"])
def test_what_differs_in_kind_is_not_merged(other: str) -> None:
    first = keyed_batch([(b"a", b"1"), (b"b", b"1")])
    second = keyed_batch([(b"a", b"2"), (b"c", b"2")], codec=Codec.LZ4 if other == "codec" else Codec.NONE)
    if other == "append time":
        second = with_append_time(parse_header(second), second, 7_000) + second[64:]
    made = compacted(sources(stamped(first, 0), stamped(second, 2, 2 if other == "epoch" else 1)))
    assert len(made) == 2
    assert [row[0] for row in records(made)] == [1, 2, 3]
    assert parse_header(made[1].data).leader_epoch == (2 if other == "epoch" else 1)


def test_log_append_time_is_kept() -> None:
    batch = keyed_batch([(b"a", b"1"), (b"b", b"1")], [5, 6])
    batch = stamped(with_append_time(parse_header(batch), batch, 7_000) + batch[64:], 0)
    last = stamped(keyed_batch([(b"a", b"2")]), 2)
    made = compacted(sources(batch, last))
    assert records(made) == [(1, 7_000, b"b", b"1"), (2, 1_000, b"a", b"2")]
    assert parse_header(made[0].data).attributes & Attributes.LOG_APPEND_TIME


def test_pinned_batches_keep_their_numbers_and_are_not_merged() -> None:
    first = stamped(keyed_batch([(b"a", b"1"), (b"b", b"1")], producer=(9, 3, 40)), 0)
    second = stamped(keyed_batch([(b"a", b"2"), (b"b", b"2")], producer=(9, 3, 42)), 2)
    third = stamped(keyed_batch([(b"a", b"3"), (b"b", b"3")]), 4)
    made = compacted(sources(first, second, third, pinned=(2,)))
    assert [row[0] for row in records(made)] == [4, 5]
    header = parse_header(made[1].data)
    assert (header.producer_id, header.producer_epoch, header.base_sequence) == (9, 3, 42)
    assert (header.base_offset, header.last_offset_delta, header.record_count) == (2, 1, 0)


def transactional(rows: list[Row], base_offset: int, producer_id: int = 7, **fields: Codec) -> bytes:
    """Return a transactional batch as it lies in a log."""
    batch = keyed_batch(rows, 1_000 + base_offset, producer=(producer_id, 0, 0), **fields)
    header = parse_header(batch)
    marked = header._replace(attributes=header.attributes | Attributes.TRANSACTIONAL)
    return stamped(build_batch(marked, batch[HEADER_BYTES:]), base_offset)


def control(base_offset: int, *markers: Marker) -> bytes:
    """Return a control batch as it lies in a log."""
    return encode_control(markers, 1_000 + base_offset, base_offset=base_offset, leader_epoch=1)


def ended(
    *batches: bytes, aborted: tuple[AbortedTransaction, ...] = (), spent: bool = False, pinned: tuple[int, ...] = ()
) -> list[SourceBatch]:
    """Return the batches as the cleaner reads them; those of the transactions `aborted` are over."""
    ranges = AbortedRanges(aborted)
    return [
        read_batch(memoryview(batch), parse_header(batch), lambda _, base: base in pinned, ranges, lambda *_: spent)
        for batch in batches
    ]


@pytest.mark.parametrize("codec", [Codec.NONE, Codec.LZ4])
def test_a_committed_batch_is_kept_without_its_mark(codec: Codec) -> None:
    """So its marker may go later, and whoever reads the log then finds no transaction that nobody has ended."""
    batch = transactional([(b"a", b"1"), (b"b", b"1")], 0, codec=codec)
    marker = control(2, Marker(7, 1, True, 0, 0))
    last = stamped(keyed_batch([(b"c", b"2")]), 3)
    made = compacted(ended(batch, marker, last))
    assert [len(made_.data) for made_ in made] == [len(batch), len(marker), len(last)]
    assert [made_.is_copy for made_ in made] == [False, True, True]
    header, before = parse_batch(made[0].data), parse_header(batch)
    assert header._replace(crc32c=0) == before._replace(
        crc32c=0, attributes=before.attributes & ~Attributes.TRANSACTIONAL
    )
    assert bytes(made[0].data)[HEADER_BYTES:] == batch[HEADER_BYTES:]
    assert [bytes(made_.data) for made_ in made[1:]] == [marker, last]


def test_committed_rows_replace_and_are_replaced_as_any_other() -> None:
    batches = [
        stamped(keyed_batch([(b"a", b"1")]), 0),
        transactional([(b"a", b"2"), (b"b", b"1"), (b"c", b"1")], 1),
        control(4, Marker(7, 1, True, 0, 1)),
        stamped(keyed_batch([(b"b", b"2")]), 5),
    ]
    made = compacted(ended(*batches, spent=True))
    assert records(made) == [(1, 1_001, b"a", b"2"), (3, 1_001, b"c", b"1"), (5, 1_000, b"b", b"2")]
    assert len(made) == 1
    assert not parse_header(made[0].data).attributes & (Attributes.TRANSACTIONAL | Attributes.CONTROL)


def test_rows_of_an_aborted_transaction_go_and_replace_nothing() -> None:
    batches = [
        stamped(keyed_batch([(b"a", b"1")]), 0),
        transactional([(b"a", b"2"), (b"b", b"1")], 1),
        control(3, Marker(7, 1, False, 0, 1)),
        transactional([(b"c", b"1")], 4),  # the same producer's next one
        control(5, Marker(7, 2, True, 0, 4)),
    ]
    made = compacted(ended(*batches, aborted=(AbortedTransaction(7, 1, 3, 1),)))
    kept = [
        row for batch in made if not parse_header(batch.data).is_control for row in rows_of(decode_batch(batch.data))
    ]
    assert kept == [(0, 1_000, b"a", b"1"), (4, 1_004, b"c", b"1")]
    assert [bytes(batch.data) for batch in made if parse_header(batch.data).is_control] == [batches[2], batches[4]]
    assert not any(
        header.is_transactional and not header.is_control for header in (parse_header(batch.data) for batch in made)
    )


def test_what_is_remembered_of_an_aborted_producer_keeps_its_numbers() -> None:
    batch = transactional([(b"a", b"2"), (b"b", b"1")], 0)
    made = compacted(
        ended(batch, stamped(keyed_batch([(b"c", b"1")]), 2), aborted=(AbortedTransaction(7, 0, 2, 0),), pinned=(0,))
    )
    header = parse_header(made[0].data)
    assert (header.producer_id, header.producer_epoch, header.base_sequence, header.record_count) == (7, 0, 0, 0)
    assert (header.base_offset, header.next_offset) == (0, 2)


def test_a_control_batch_goes_as_a_whole_and_leaves_its_range() -> None:
    batches = [
        control(0, Marker(7, 1, True, 0, -1), Marker(8, 1, False, 0, -1)),
        stamped(keyed_batch([(b"a", b"1")]), 2),
    ]
    made = compacted(ended(*batches))
    assert [bytes(batch.data) for batch in made] == batches
    (made_,) = compacted(ended(*batches, spent=True))
    assert (made_.base_offset, made_.next_offset) == (0, 3)
    assert records([made_]) == [(2, 1_000, b"a", b"1")]


@given(transactional_logs(), st.booleans(), st.integers(1, 4))
def test_of_transactions_that_are_over_only_committed_rows_stay(
    log: TransactionalLog, spent: bool, together: int
) -> None:
    bound = log.last_stable_offset
    aborted = AbortedRanges(log.aborted)
    batches = [
        read_batch(memoryview(batch), parse_header(batch), lambda _, base: base % 3 == 0, aborted, lambda *_: spent)
        for base, batch in log.batches
        if base < bound
    ]
    last = LastOffsets()
    last.add(batches)
    compactor = Compactor(last)
    made: list[CleanedBatch] = []
    for start in range(0, len(batches), together):
        made += compactor.compact(batches[start : start + together])
    made += compactor.finish()
    headers = [parse_batch(batch.data) for batch in made]
    assert [header.base_offset for header in headers][1:] == [header.next_offset for header in headers][:-1]
    assert sum(header.last_offset_delta + 1 for header in headers) == (batches[-1].header.next_offset if batches else 0)
    assert spent <= (not any(header.is_control for header in headers))
    assert not any(header.is_transactional and not header.is_control for header in headers)
    found = [
        row
        for header, batch in zip(headers, made, strict=True)
        if not header.is_control
        for row in rows_of(decode_batch(batch.data))
    ]
    expected = {key_of(offset): offset for offset in log.committed if offset < bound}
    assert [(offset, key, value) for offset, _, key, value in found] == [
        (offset, key, b"%d" % offset) for key, offset in sorted(expected.items(), key=lambda item: item[1])
    ]


def test_headers_and_absent_columns_go_side_by_side() -> None:
    keys = pa.array([b"a", b"b"])
    headers = pa.array([[("h", b"1")], None], HEADERS_TYPE)
    first = stamped(encode_batch(Columns(pa.array([b"1", b"2"]), keys, None, headers), 10), 0)
    second = stamped(keyed_batch([(b"a", b"3"), (b"c", b"4")], [30, 20]), 2)
    (made,) = compacted(sources(first, second))
    decoded = decode_batch(made.data)
    assert decoded.columns.column("headers").to_pylist() == [None, None, None]
    assert records([made]) == [(1, 10, b"b", b"2"), (2, 30, b"a", b"3"), (3, 20, b"c", b"4")]


def test_a_batch_that_the_offsets_make_too_large_is_split() -> None:
    rows: list[Row] = [(b"%03d" % number, b"") for number in range(200)]
    batches = log_of(rows, [(b"000", b"again")])
    made = compacted(sources(*batches), max_batch_bytes=len(batches[0]) - 600)
    assert len(made) > 1
    assert [row[0] for row in records(made)] == list(range(1, 201))


def test_damage_is_not_given_a_new_checksum() -> None:
    (batch,) = log_of([(b"a", b"1")])
    damaged = bytearray(batch)
    damaged[-1] ^= 1
    with pytest.raises(CorruptRecordError):
        sources(bytes(damaged))


def test_the_front_of_a_merged_batch_can_be_cut() -> None:
    batches = log_of([(b"a", b"1"), (b"b", b"2")], [(b"a", b"3")], [(b"a", b"4"), (b"c", b"5")])
    (merged,) = compacted(sources(*batches))
    rows = records([merged])
    for offset in range(1, 5):
        cut = cut_front(bytes(merged.data), offset)
        header = parse_batch(cut)
        assert (header.base_offset, header.next_offset, header.leader_epoch) == (offset, 5, 1)
        assert rows_of(decode_batch(cut)) == [row for row in rows if row[0] >= offset]


batch_rows = st.lists(
    st.tuples(st.sampled_from([None, b"a", b"b", b"c"]), st.sampled_from([None, b"", b"value"])), min_size=1, max_size=4
)


@settings(deadline=None)
@given(
    logs=st.lists(st.tuples(batch_rows, st.sampled_from([Codec.NONE, Codec.ZSTD]), st.booleans()), max_size=12),
    horizon=st.integers(0, 30),
    piece=st.integers(1, 5),
    max_batch_bytes=st.sampled_from([300, 1 << 20]),
)
def test_any_log_keeps_the_last_of_each_key(
    logs: list[tuple[list[Row], Codec, bool]], horizon: int, piece: int, max_batch_bytes: int
) -> None:
    batches, offset, epoch = [], 0, 0
    for rows, codec, new_epoch in logs:
        epoch += new_epoch
        batches.append(stamped(keyed_batch(rows, 1_000 + offset, codec=codec), offset, epoch))
        offset += len(rows)
    found = sources(*batches)
    written = [row for batch in batches for row in rows_of(decode_batch(batch))]
    last = {row[2]: row[0] for row in written}
    expected = [
        row
        for row in written
        if row[2] is not None and last[row[2]] == row[0] and (row[3] is not None or row[0] >= horizon)
    ]
    offsets = LastOffsets()
    offsets.add(found)
    compactor = Compactor(offsets, tombstones_below=horizon, max_batch_bytes=max_batch_bytes)
    made: list[CleanedBatch] = []
    for start in range(0, len(found), piece):
        made += compactor.compact(found[start : start + piece])
    made += compactor.finish()
    assert records(made) == expected
    assert not made or (made[0].base_offset, made[-1].next_offset) == (0, offset)
    assert (compactor.rows_in, compactor.rows_out) == (len(written), len(expected))
    epochs = [(parse_header(b.data).leader_epoch, b.base_offset) for b in made]
    starts = {parse_header(b).leader_epoch: parse_header(b).base_offset for b in reversed(batches)}
    assert dict(reversed(epochs)) == starts, "epochs begin where they began"


def test_many_keys_are_sorted_out_in_between() -> None:
    last = LastOffsets()
    for base in range(0, 3_000, 100):
        rows: list[Row] = [(b"%05d" % ((base + number) % 1_700) * 200, b"") for number in range(100)]
        last.add(sources(stamped(keyed_batch(rows), base)))
    assert not last.is_full(1 << 30)
    assert len(last) == 1_700
    keys = pa.chunked_array([pa.array([b"%05d" % 5 * 200, b"%05d" % 1_650 * 200, b"no", None])])
    found = last.superseded(keys, np.array([5, 1_650, 0, 0]))
    assert found.tolist() == [True, False, False, False]
