"""What compaction makes of batches can be read by everyone, and costs little memory on the way."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.log.compaction import CleanedBatch, Compactor, LastOffsets, SourceBatch, read_batch
from raftlog.errors import BatchTooExpansive
from raftlog.format import (
    DEFAULT_LIMITS,
    HEADERS_TYPE,
    Codec,
    Columns,
    InflateLimits,
    decode_batch,
    encode_batch,
    pack_stamp,
    parse_header,
    validate_produced,
)
from tests.support.keyed_log import keyed_batch, rows_of

Row = tuple[bytes | None, bytes | None]
KIB = 1 << 10
MIB = 1 << 20


def noise(size: int, seed: int = 1) -> bytes:
    """Bytes that no codec makes smaller."""
    return Random(seed).randbytes(size)


def stamped(batches: list[bytes]) -> list[bytes]:
    """Return batches that a producer may send as the leader writes them, one after the other."""
    made, offset = [], 0
    for batch in batches:
        header = validate_produced(batch)
        made.append(pack_stamp(offset, len(batch) - 12, 1) + batch[16:])
        offset += header.record_count
    return made


def sources(batches: list[bytes], pinned: tuple[int, ...] = ()) -> list[SourceBatch]:
    """Return them as the cleaner reads them; those at the offsets `pinned` are remembered."""
    return [read_batch(memoryview(batch), parse_header(batch), lambda _, base: base in pinned) for batch in batches]


def compacted(found: list[SourceBatch], max_batch_bytes: int = MIB) -> list[CleanedBatch]:
    """Return what a log of these batches becomes."""
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
    batches = stamped(
        [keyed_batch([(b"k%d" % n, b"x" * 104_000), (b"hot", b"y")], codec=Codec.ZSTD) for n in range(40)]
    )
    made = compacted(sources(batches))
    assert offsets(made) == [*range(0, 80, 2), 79]


def test_rows_are_counted_by_their_own_bytes() -> None:
    """One large row and many small ones that are overwritten by the next batch: what stays is the large one."""
    small: list[Row] = [(b"s%d" % number, b"") for number in range(199)]
    batches = stamped([keyed_batch([(b"big%d" % n, noise(9_000, n)), *small]) for n in range(500)])
    made = compacted(sources(batches))
    assert len(offsets(made)) == 500 + 199
    assert max(len(batch.data) for batch in made) <= MIB
    assert len(made) < 12


def test_headers_count_as_well() -> None:
    headers = pa.array([[("h", noise(9_000))], None], HEADERS_TYPE)
    batches = stamped(
        [
            encode_batch(Columns(pa.array([b"", b""]), pa.array([b"%d" % n, b"hot"]), None, headers), 1_000)
            for n in range(300)
        ]
    )
    made = compacted(sources(batches))
    assert len(offsets(made)) == 301
    assert max(len(batch.data) for batch in made) <= MIB


def expansive_batch(values: list[bytes], producer: tuple[int, int, int] = (-1, -1, -1)) -> bytes:
    """Rows of which only the first one keeps the whole within the limits."""
    rows: list[Row] = [(b"noise", noise(100 * KIB)), *((b"k%d" % n, value) for n, value in enumerate(values))]
    return keyed_batch(rows, codec=Codec.ZSTD, producer=producer)


@pytest.mark.parametrize("pinned", [False, True])
def test_a_row_that_expands_too_far_alone_gets_another_codec(pinned: bool) -> None:
    batches = stamped([expansive_batch([bytes(40 * MIB)], (9, 3, 40)), keyed_batch([(b"noise", b"")])])
    made = compacted(sources(batches, (0,) if pinned else ()))
    assert offsets(made) == [1, 2]
    header = parse_header(made[0].data)
    assert header.codec is Codec.LZ4
    assert header.size < MIB
    assert (header.producer_id, header.producer_epoch, header.base_sequence) == (9, 3, 40)
    assert (header.base_offset, header.last_offset_delta) == (0, 1)


def test_rows_that_expand_too_far_together_are_split() -> None:
    batches = stamped([expansive_batch([bytes(600 * KIB)] * 8), keyed_batch([(b"noise", b"")])])
    made = compacted(sources(batches))
    assert offsets(made) == list(range(1, 10))
    assert all(parse_header(batch.data).codec is Codec.ZSTD for batch in made[:-1])


def test_without_a_codec_there_is_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = stamped(
        [keyed_batch([(b"a", b"x"), (b"b", bytes(20_000))], codec=Codec.GZIP), keyed_batch([(b"a", b"")])]
    )
    found = sources(batches)
    limits = InflateLimits(max_bytes=10_000)
    monkeypatch.setattr("broker.log.batch_parts.DEFAULT_LIMITS", limits)
    made = compacted(found)
    assert offsets(made, limits) == [1, 2]
    assert parse_header(made[0].data).codec is Codec.NONE


def test_what_is_held_back_holds_on_to_nothing_that_was_read() -> None:
    batches = stamped(
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
            found.append(read_batch(view, parse_header(view), lambda _, base: False))
            at += len(batch)
            del view
        last = LastOffsets()
        last.add(found)
        compactor = Compactor(last)
        assert not list(compactor.compact(found)), codec
        del found
        piece.clear()  # BufferError: somebody still looks at it
        assert offsets(list(compactor.finish())) == [1, 3, 4]


def test_a_batch_as_it_was_is_copied_when_it_is_held_back() -> None:
    for codec in (Codec.NONE, Codec.LZ4):
        (batch,) = stamped([keyed_batch([(b"a", b"1"), (b"b", b"2")], codec=codec)])
        piece = bytearray(batch)
        compactor = Compactor(LastOffsets())
        assert not list(compactor.compact([read_batch(memoryview(piece), parse_header(batch), lambda _, base: False)]))
        piece.clear()
        (made,) = compactor.finish()
        assert made.is_copy
        assert made.data == batch


def test_the_keys_hold_on_to_nothing_that_was_read() -> None:
    (batch,) = stamped([keyed_batch([(b"a", b"1"), (b"b", b"2")])])
    piece = bytearray(batch)
    last = LastOffsets()
    last.add([read_batch(memoryview(piece), parse_header(batch), lambda _, base: False)])
    piece.clear()
    assert len(last) == 2


def test_batches_that_are_merged_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that their headers have a bound, however few bytes their rows take."""
    monkeypatch.setattr("broker.log.compaction.MAX_PARTS", 3)
    batches = stamped([keyed_batch([(b"k%d" % number, b""), (b"hot", b"")]) for number in range(10)])
    made = compacted(sources(batches))
    assert [(batch.base_offset, batch.next_offset) for batch in made] == [(0, 6), (6, 12), (12, 18), (18, 20)]


def test_what_is_held_back_is_known() -> None:
    batches = stamped([keyed_batch([(b"gone", b""), (b"a", noise(5_000))]), keyed_batch([(b"gone", b"")])])
    found = sources(batches)
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
        patch.setattr("broker.log.batch_parts.DEFAULT_LIMITS", LIMITS)
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
    made = compacted(sources(stamped(batches), tuple(pinned)), max_batch_bytes)
    assert offsets(made, LIMITS) == sorted(last.values())
    bases = {batch.base_offset: parse_header(batch.data) for batch in made}
    assert all(bases[base].base_sequence == base for base in pinned)
