"""Which rows compaction keeps, and what becomes of their batches, without a disk."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.log.compaction import CleanedBatch, Compactor, LastOffsets, SourceBatch, cut_front, read_batch
from broker.log.index import AbortedTransaction
from broker.log.recovery import Cleaned
from raftlog.errors import BatchTooExpansive, CorruptRecordError
from raftlog.format import (
    DEFAULT_LIMITS,
    HEADER_BYTES,
    HEADERS_TYPE,
    Attributes,
    Codec,
    Columns,
    InflateLimits,
    decode_batch,
    encode_batch,
    pack_stamp,
    parse_batch,
    parse_header,
    validate_produced,
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
    return [
        read_batch(memoryview(batch), parse_header(batch), lambda header: header.base_offset in pinned)
        for batch in batches
    ]


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
    """Return the batches of a log after compaction."""
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
    assert header.max_timestamp_ms == 1_001, "the empty batch must keep the newest timestamp, by which retention goes"
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
        read_batch(
            memoryview(batch),
            parse_header(batch),
            lambda header: header.base_offset in pinned,
            ranges,
            lambda *_: spent,
        )
        for batch in batches
    ]


@pytest.mark.parametrize("codec", [Codec.NONE, Codec.LZ4])
def test_a_committed_batch_is_kept_without_its_mark(codec: Codec) -> None:
    """So its marker may go later, and no reader of the log then finds a transaction without an end."""
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
        read_batch(
            memoryview(batch),
            parse_header(batch),
            lambda header: header.base_offset % 3 == 0,
            aborted,
            lambda *_: spent,
        )
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
    assert dict(reversed(epochs)) == starts, "each leader epoch must still begin at its offset"


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


KIB = 1 << 10
MIB = 1 << 20


def noise(size: int, seed: int = 1) -> bytes:
    """Bytes that no codec makes smaller."""
    return Random(seed).randbytes(size)


def stamped_all(batches: list[bytes]) -> list[bytes]:
    """Return batches that a producer may send as the leader writes them, one after the other."""
    made, offset = [], 0
    for batch in batches:
        header = validate_produced(batch)
        made.append(pack_stamp(offset, len(batch) - 12, 1) + batch[16:])
        offset += header.record_count
    return made


def sources_of(batches: list[bytes], pinned: tuple[int, ...] = ()) -> list[SourceBatch]:
    """Return them as the cleaner reads them; those at the offsets `pinned` are remembered."""
    return [
        read_batch(memoryview(batch), parse_header(batch), lambda header: header.base_offset in pinned)
        for batch in batches
    ]


def merged(found: list[SourceBatch], max_batch_bytes: int = MIB) -> list[CleanedBatch]:
    """Return the batches of a log after compaction."""
    last = LastOffsets()
    last.add(found)
    compactor = Compactor(last, max_batch_bytes=max_batch_bytes)
    return [*compactor.compact(found), *compactor.finish()]


def offsets(made: list[CleanedBatch], limits: InflateLimits = DEFAULT_LIMITS) -> list[int]:
    """Return the offsets of the rows, read as any reader does; nothing is between the batches."""
    found: list[int] = []
    expected = made[0].base_offset
    for batch in made:
        decoded = decode_batch(batch.data, limits=limits)
        assert decoded.header.base_offset == expected
        expected = decoded.header.next_offset
        found += [row[0] for row in rows_of(decoded)]
    return found


def test_rows_that_compress_well_can_still_be_read() -> None:
    """Batches that were each within the limits for expanding are not merged beyond them."""
    batches = stamped_all(
        [keyed_batch([(b"k%d" % n, b"x" * 104_000), (b"hot", b"y")], codec=Codec.ZSTD) for n in range(40)]
    )
    made = merged(sources_of(batches))
    assert offsets(made) == [*range(0, 80, 2), 79]


def test_rows_are_counted_by_their_own_bytes() -> None:
    """One large row and many small ones that are overwritten by the next batch: what stays is the large one."""
    small: list[Row] = [(b"s%d" % number, b"") for number in range(199)]
    batches = stamped_all([keyed_batch([(b"big%d" % n, noise(9_000, n)), *small]) for n in range(500)])
    made = merged(sources_of(batches))
    assert len(offsets(made)) == 500 + 199
    assert max(len(batch.data) for batch in made) <= MIB
    assert len(made) < 12


def test_headers_count_as_well() -> None:
    headers = pa.array([[("h", noise(9_000))], None], HEADERS_TYPE)
    batches = stamped_all(
        [
            encode_batch(Columns(pa.array([b"", b""]), pa.array([b"%d" % n, b"hot"]), None, headers), 1_000)
            for n in range(300)
        ]
    )
    made = merged(sources_of(batches))
    assert len(offsets(made)) == 301
    assert max(len(batch.data) for batch in made) <= MIB


def expansive_batch(values: list[bytes], producer: tuple[int, int, int] = (-1, -1, -1)) -> bytes:
    """Rows of which only the first one keeps the whole within the limits."""
    rows: list[Row] = [(b"noise", noise(100 * KIB)), *((b"k%d" % n, value) for n, value in enumerate(values))]
    return keyed_batch(rows, codec=Codec.ZSTD, producer=producer)


@pytest.mark.parametrize("pinned", [False, True])
def test_a_row_that_expands_too_far_alone_gets_another_codec(pinned: bool) -> None:
    batches = stamped_all([expansive_batch([bytes(40 * MIB)], (9, 3, 40)), keyed_batch([(b"noise", b"")])])
    made = merged(sources_of(batches, (0,) if pinned else ()))
    assert offsets(made) == [1, 2]
    header = parse_header(made[0].data)
    assert header.codec is Codec.LZ4
    assert header.size < MIB
    assert (header.producer_id, header.producer_epoch, header.base_sequence) == (9, 3, 40)
    assert (header.base_offset, header.last_offset_delta) == (0, 1)


def test_rows_that_expand_too_far_together_are_split() -> None:
    batches = stamped_all([expansive_batch([bytes(600 * KIB)] * 8), keyed_batch([(b"noise", b"")])])
    made = merged(sources_of(batches))
    assert offsets(made) == list(range(1, 10))
    assert all(parse_header(batch.data).codec is Codec.ZSTD for batch in made[:-1])


def test_without_a_codec_there_is_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = stamped_all(
        [keyed_batch([(b"a", b"x"), (b"b", bytes(20_000))], codec=Codec.GZIP), keyed_batch([(b"a", b"")])]
    )
    found = sources_of(batches)
    limits = InflateLimits(max_bytes=10_000)
    monkeypatch.setattr("broker.log.compaction.DEFAULT_LIMITS", limits)
    made = merged(found)
    assert offsets(made, limits) == [1, 2]
    assert parse_header(made[0].data).codec is Codec.NONE


def test_what_is_held_back_holds_on_to_nothing_that_was_read() -> None:
    batches = stamped_all(
        [
            keyed_batch([(b"gone", b"1")]),
            keyed_batch([(b"stays", b"2")]),
            keyed_batch([(b"gone", b"3"), (b"stays too", b"4")]),
            keyed_batch([(b"gone", b"5")]),
        ]
    )
    for codec in (Codec.NONE, Codec.LZ4):
        piece = bytearray(b"".join(batches))
        found, at = [], 0
        for batch in batches:
            view = memoryview(piece)[at : at + len(batch)]
            found.append(read_batch(view, parse_header(view), lambda header: False))
            at += len(batch)
            del view
        last = LastOffsets()
        last.add(found)
        compactor = Compactor(last)
        assert not list(compactor.compact(found)), codec
        del found
        piece.clear()  # BufferError: a view of it still exists
        assert offsets(list(compactor.finish())) == [1, 3, 4]


def test_a_batch_as_it_was_is_copied_when_it_is_held_back() -> None:
    for codec in (Codec.NONE, Codec.LZ4):
        (batch,) = stamped_all([keyed_batch([(b"a", b"1"), (b"b", b"2")], codec=codec)])
        piece = bytearray(batch)
        compactor = Compactor(LastOffsets())
        assert not list(compactor.compact([read_batch(memoryview(piece), parse_header(batch), lambda header: False)]))
        piece.clear()
        (made,) = compactor.finish()
        assert made.is_copy
        assert made.data == batch


def test_the_keys_hold_on_to_nothing_that_was_read() -> None:
    (batch,) = stamped_all([keyed_batch([(b"a", b"1"), (b"b", b"2")])])
    piece = bytearray(batch)
    last = LastOffsets()
    last.add([read_batch(memoryview(piece), parse_header(batch), lambda header: False)])
    piece.clear()
    assert len(last) == 2


def test_batches_that_are_merged_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that their headers have a bound, however few bytes their rows take."""
    monkeypatch.setattr("broker.log.compaction.MAX_PARTS", 3)
    batches = stamped_all([keyed_batch([(b"k%d" % number, b""), (b"hot", b"")]) for number in range(10)])
    made = merged(sources_of(batches))
    assert [(batch.base_offset, batch.next_offset) for batch in made] == [(0, 6), (6, 12), (12, 18), (18, 20)]


def test_what_is_held_back_is_known() -> None:
    batches = stamped_all([keyed_batch([(b"gone", b""), (b"a", noise(5_000))]), keyed_batch([(b"gone", b"")])])
    found = sources_of(batches)
    last = LastOffsets()
    last.add(found)
    compactor = Compactor(last)
    assert compactor.pending_bytes == 0
    assert not list(compactor.compact(found))
    assert compactor.pending_bytes > 5_000
    list(compactor.finish())
    assert compactor.pending_bytes == 0


LIMITS = InflateLimits(max_bytes=6_000, max_ratio=8, ratio_floor_bytes=1_000)
"""As the real ones, but smaller."""
row_sizes = st.lists(
    st.tuples(st.sampled_from([b"a", b"b", b"c", b"d"]), st.sampled_from([0, 10, 400, 900, 3_000]), st.booleans()),
    min_size=1,
    max_size=5,
)


@pytest.fixture(name="small_limits", scope="module")
def _small_limits() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("broker.log.compaction.DEFAULT_LIMITS", LIMITS)
        patch.setattr("broker.log.compaction.MERGED_BYTES", LIMITS.ratio_floor_bytes * 15 // 16)
        yield


@settings(deadline=None)
@given(
    log=st.lists(st.tuples(row_sizes, st.sampled_from(list(Codec)), st.booleans()), min_size=1, max_size=10),
    max_batch_bytes=st.sampled_from([300, MIB]),
)
@pytest.mark.usefixtures("small_limits")
def test_whatever_is_read_within_the_limits_stays_within_them(
    log: list[tuple[list[tuple[bytes, int, bool]], Codec, bool]], max_batch_bytes: int
) -> None:
    batches, pinned, last, offset = [], [], {}, 0
    for rows, codec, is_pinned in log:
        values: list[Row] = [(key, noise(size) if is_noise else bytes(size)) for key, size, is_noise in rows]
        batch = keyed_batch(values, codec=codec, producer=(1, 0, offset))
        try:
            decode_batch(batch, limits=LIMITS)
        except BatchTooExpansive:
            batch = keyed_batch(values, producer=(1, 0, offset))
        batches.append(batch)
        if is_pinned:
            pinned.append(offset)
        for key, _ in values:
            last[key] = offset
            offset += 1
    made = merged(sources_of(stamped_all(batches), tuple(pinned)), max_batch_bytes)
    assert offsets(made, LIMITS) == sorted(last.values())
    bases = {batch.base_offset: parse_header(batch.data) for batch in made}
    assert all(bases[base].base_sequence == base for base in pinned)


DAY_MS = 86_400_000


def test_tombstones_go_where_a_log_is_cleaned_all_the_time() -> None:
    cleaned, cadence_ms = Cleaned(), 15_000
    late_ms = []
    for now_ms in range(0, 3 * DAY_MS, cadence_ms):
        below = cleaned.tombstones_below(now_ms, DAY_MS)
        if below:
            late_ms.append(now_ms - DAY_MS - (below - 1))
        cleaned = cleaned.reached(now_ms + 1, now_ms, DAY_MS)  # offsets as the clock
        assert len(cleaned.times) <= 35
    assert len(late_ms) > 2 * DAY_MS // cadence_ms - 2
    assert min(late_ms) >= 0
    assert max(late_ms) <= DAY_MS // 32 + 2 * cadence_ms


@given(
    gaps=st.lists(st.tuples(st.integers(0, 2_000), st.integers(0, 3)), min_size=1, max_size=200),
    retention_ms=st.sampled_from([0, 1, 20, 1_000, 20_000]),
)
def test_tombstones_go_when_it_is_time_and_never_before(gaps: list[tuple[int, int]], retention_ms: int) -> None:
    """At any cadence: late by a 32nd and the time between two cleanings, at most."""
    cleaned = Cleaned()
    clean_since: list[tuple[int, int]] = []
    now_ms = offset = longest_gap_ms = 0
    for gap_ms, records in gaps:
        now_ms += gap_ms
        offset += records
        longest_gap_ms = max(longest_gap_ms, gap_ms)
        below = cleaned.tombstones_below(now_ms, retention_ms)
        latest_ms = now_ms - retention_ms
        surely_ms = latest_ms - max(1, retention_ms // 32) - longest_gap_ms
        assert below <= max((end for end, at_ms in clean_since if at_ms <= latest_ms), default=0), (
            f"tombstones up to {below} may be removed before their time"
        )
        assert below >= max((end for end, at_ms in clean_since if at_ms <= surely_ms), default=0), (
            f"tombstones up to {below} only may be removed, though others are due for long"
        )
        cleaned = cleaned.reached(offset, now_ms, retention_ms)
        clean_since.append((offset, now_ms))
        assert cleaned.first_dirty_offset == offset
        assert cleaned.times[-1][0] == offset
        assert len(cleaned.times) <= 35
