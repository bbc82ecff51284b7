"""Record batches between Kafka's format and format 1: other implementations write and read them."""

from __future__ import annotations

import random
import struct
from types import SimpleNamespace
from typing import Any, cast

import google_crc32c
import pyarrow as pa
import pytest
from aiokafka.record.default_records import DefaultRecordBatchBuilder
from hypothesis import given
from hypothesis import strategies as st
from kafka.record.memory_records import MemoryRecords

from broker.kafka import record_batches as module
from broker.kafka.produce import _converted
from broker.kafka.record_batches import (
    MAX_HEADERS,
    RECORD_COST,
    SLICE_RECORDS,
    ToKafka,
    from_kafka,
    says_transactional,
)
from broker.quotas.heavy_work import TooCostly
from raftlog._core.traceparent import MAX_TRACES
from raftlog.errors import (
    BatchTooExpansive,
    CorruptRecordError,
    InvalidRecord,
    MessageTooLarge,
    RaftlogError,
    UnsupportedCompression,
)
from raftlog.format import (
    MAX_RECORDS,
    Attributes,
    Codec,
    Columns,
    InflateLimits,
    decode_batch,
    encode_batch,
    parse_header,
    validate_produced,
    with_append_time,
)
from raftlog.format.control import Marker, encode_control
from tests.support.kafka_batches import to_kafka

Row = tuple[int, bytes | None, bytes | None, list[tuple[str, bytes | None]]]

CELLS = st.none() | st.binary(max_size=40)
ROWS = st.lists(
    st.tuples(st.integers(0, 1 << 41), CELLS, CELLS, st.lists(st.tuples(st.text(max_size=5), CELLS), max_size=3)),
    min_size=1,
    max_size=80,
)


def kafka_batch(
    rows: list[Row], producer: tuple[int, int, int] = (-1, -1, -1), *, transactional: bool = False
) -> bytes:
    builder = DefaultRecordBatchBuilder(2, 0, int(transactional), *producer, 1 << 30)
    for number, (timestamp, key, value, headers) in enumerate(rows):
        builder.append(number, timestamp, key, value, headers)
    return bytes(builder.build())


def patched(batch: bytes, position: int, form: str, value: int) -> bytes:
    """Return the batch with one field of its header changed, and a checksum that fits."""
    changed = bytearray(batch)
    struct.pack_into(form, changed, position, value)
    struct.pack_into(">I", changed, 17, google_crc32c.value(bytes(changed[21:])))
    return bytes(changed)


def recompressed(batch: bytes, codec: Codec) -> bytes:
    """Return the batch as a producer with that codec sends it."""
    return b"".join(to_kafka(stamped(from_kafka(batch), codec)))


def stamped(batch: bytes, codec: Codec) -> bytes:
    """Return a batch of format 1 again, with another codec."""
    decoded = decode_batch(batch)
    columns = {name: decoded.columns.column(number) for number, name in enumerate(decoded.columns.schema.names)}
    header = decoded.header
    return encode_batch(
        Columns(**columns),
        header.base_timestamp_ms,
        codec=codec,
        producer_id=header.producer_id,
        producer_epoch=header.producer_epoch,
        base_sequence=header.base_sequence,
        attributes=header.attributes & Attributes.TRANSACTIONAL,
    )


def rows_by_kafka_python(batches: bytes) -> list[Row]:
    """Return what another client, written in Python alone, reads."""
    records = MemoryRecords(batches)
    found: list[Row] = []
    while records.has_next():
        batch = records.next_batch()
        assert batch.validate_crc()
        found += [(each.timestamp, each.key, each.value, list(each.headers)) for each in batch]
    return found


@given(ROWS, st.sampled_from([(-1, -1, -1), (7, 1, 5)]))
def test_records_come_back_as_they_were(rows: list[Row], producer: tuple[int, int, int]) -> None:
    sent = kafka_batch(rows, producer)
    batch = from_kafka(sent)
    header = validate_produced(batch)
    assert (header.producer_id, header.producer_epoch, header.base_sequence) == producer
    assert header.record_count == len(rows)
    (returned,) = to_kafka(batch)
    assert returned[61:] == sent[61:]
    assert rows_by_kafka_python(returned) == rows


@pytest.mark.parametrize("codec", [Codec.GZIP, Codec.SNAPPY, Codec.LZ4, Codec.ZSTD])
@pytest.mark.parametrize("size", [10, 100_000])
def test_codecs_are_kept(codec: Codec, size: int) -> None:
    rows: list[Row] = [(1_000 + number, b"key", b"v" * size, []) for number in range(3)]
    packed = recompressed(kafka_batch(rows, (7, 1, 5)), codec)
    assert packed[22] & 7 == codec
    batch = from_kafka(packed)
    assert validate_produced(batch).codec is codec
    assert to_kafka(batch) == [packed]
    assert to_kafka(batch * 3, most_bytes=1) == [packed]
    assert to_kafka(batch * 3, most_bytes=len(packed) + 1) == [packed] * 2
    (plain,) = to_kafka(batch, takes_zstd=False)
    assert plain[22] & 7 == (Codec.NONE if codec is Codec.ZSTD else codec)
    if codec is Codec.GZIP:  # for the others kafka-python needs further packages
        assert rows_by_kafka_python(packed) == rows


def test_lz4_frames_have_independent_blocks() -> None:
    """Which the Java client insists on; a frame of several blocks, one of them not compressible."""
    noise = random.Random(1).randbytes(5 << 20)
    rows: list[Row] = [(1, None, bytes(5 << 20), []), (1, None, noise, [])]
    packed = recompressed(kafka_batch(rows), Codec.LZ4)
    assert packed[61:65] == b"\x04\x22\x4d\x18"
    assert packed[65] & 0x20, "the frame must have the flag of independent blocks"
    assert to_kafka(from_kafka(packed)) == [packed]


def test_raw_snappy_is_read_as_well() -> None:
    """The Java client frames its blocks, others send one block as it is."""
    sent = kafka_batch([(1, b"k", b"v" * 100, [])])
    raw = pa.compress(sent[61:], codec="snappy", asbytes=True)
    batch = patched(patched(sent[:61] + raw, 8, ">i", 49 + len(raw)), 21, ">h", Codec.SNAPPY)
    assert rows_by_kafka_python(b"".join(to_kafka(stamped(from_kafka(batch), Codec.NONE)))) == [
        (1, b"k", b"v" * 100, [])
    ]


def test_the_first_span_of_each_sampled_trace_is_found() -> None:
    def named(trace_id: int, span_id: int, flags: int = 1) -> list[tuple[str, bytes | None]]:
        return [("other", None), ("traceparent", b"00-%032x-%016x-%02x" % (trace_id, span_id, flags))]

    rows: list[Row] = [(0, None, b"v", headers) for headers in (named(1, 5, 0), named(2, 6), [], named(2, 7))]

    def found_in(rows: list[Row]) -> list[str]:
        found: list[str] = []
        assert from_kafka(kafka_batch(rows), traceparents=found) == from_kafka(kafka_batch(rows))
        return found

    rows += [(0, None, b"v", [("traceparent", b"nonsense"), ("traceparent", None)])]
    assert found_in(rows) == [f"00-{2:032x}-{6:016x}-01"]
    many: list[Row] = [(0, None, b"v", named(number, 1)) for number in range(1, 40)]
    assert len(found_in(many)) == MAX_TRACES
    assert found_in([(0, None, b"v", [])]) == []


def test_a_batch_of_columns_becomes_records() -> None:
    """What raftlog's own producers write: no timestamp column, nulls, and gaps that compaction left."""
    columns = Columns(
        value=pa.array([b"a", None], pa.binary()),
        key=pa.array([None, b"k"], pa.binary()),
        offset_delta=pa.array([1, 4], pa.uint32()),
    )
    batch = encode_batch(columns, 50, base_offset=10, leader_epoch=3, last_offset_delta=6)
    (returned,) = to_kafka(batch)
    assert struct.unpack_from(">qiib", returned) == (10, len(returned) - 12, 3, 2)
    found = list(MemoryRecords(returned).next_batch())
    assert [(each.offset, each.timestamp, each.key, each.value) for each in found] == [
        (11, 50, None, b"a"),
        (14, 50, b"k", None),
    ]
    assert struct.unpack_from(">i", returned, 23) == (6,), (
        "the batch must end at offset 6 behind its base, so that a reader goes on behind the gap"
    )


def test_a_batch_without_records_keeps_its_offsets() -> None:
    empty = Columns(value=pa.array([], pa.binary()), offset_delta=pa.array([], pa.uint32()))
    (returned,) = to_kafka(encode_batch(empty, 5, base_offset=20, last_offset_delta=9))
    assert struct.unpack_from(">q", returned) == (20,)
    assert struct.unpack_from(">i", returned, 23) == (9,)
    assert struct.unpack_from(">i", returned, 57) == (0,)


def test_the_log_append_time_is_the_time_of_every_record() -> None:
    columns = Columns(value=pa.array([b"a", b"b"], pa.binary()), timestamp_ms=pa.array([1, 2], pa.int64()))
    batch = encode_batch(columns, 1)
    header = parse_header(batch)
    (returned,) = to_kafka(with_append_time(header, batch, 777) + batch[64:])
    records = MemoryRecords(returned).next_batch()
    assert records.timestamp_type == 1
    assert [each.timestamp for each in records] == [777, 777]


def test_each_marker_is_a_control_batch() -> None:
    markers = [Marker(7, 3, True, 11), Marker(8, 0, False, 12)]
    returned = to_kafka(encode_control(markers, 99, base_offset=40))
    assert [struct.unpack_from(">q", each) for each in returned] == [(40,), (41,)]
    assert [struct.unpack_from(">qh", each, 43) for each in returned] == [(7, 3), (8, 0)]
    for each, marker in zip(returned, markers, strict=True):
        control = MemoryRecords(each).next_batch()
        assert control.is_control_batch
        assert control.is_transactional
        (record,) = list(control)
        assert record.key == struct.pack(">hh", 0, int(marker.commit))
        assert record.value == struct.pack(">hi", 0, marker.coordinator_epoch)


def test_the_transactional_attribute_passes_through() -> None:
    sent = kafka_batch([(1, b"k", b"v", [])], (7, 1, 5), transactional=True)
    assert says_transactional(sent)
    batch = from_kafka(sent)
    assert validate_produced(batch).is_transactional
    assert to_kafka(batch) == [sent]
    assert not says_transactional(b"")


def test_a_sequence_without_a_producer_id_means_nothing() -> None:
    """aiokafka sends such batches when it is not idempotent, and Kafka takes them."""
    batch = from_kafka(kafka_batch([(1, b"k", b"v", [])], (-1, -1, 0)))
    assert validate_produced(batch).base_sequence == -1


ONE: list[Row] = [(1, b"k", b"v", [])]


@pytest.mark.parametrize(
    ("batch", "error", "words"),
    [
        (b"", CorruptRecordError, "at least 61 bytes"),
        (kafka_batch(ONE)[:-1], CorruptRecordError, "claims"),
        (kafka_batch(ONE) + b"x", InvalidRecord, "exactly one batch"),
        (kafka_batch(ONE) * 2, InvalidRecord, "exactly one batch"),
        (kafka_batch(ONE)[:16] + b"\x01" + kafka_batch(ONE)[17:], InvalidRecord, "magic 1"),
        (kafka_batch(ONE)[:-1] + b"x", CorruptRecordError, "checksum"),
        (patched(kafka_batch(ONE), 21, ">h", 0x20), InvalidRecord, "control"),
        (patched(kafka_batch(ONE), 21, ">h", 5), UnsupportedCompression, "codec 5"),
        (patched(kafka_batch(ONE), 21, ">h", 4), CorruptRecordError, "zstd"),
        (patched(kafka_batch(ONE), 21, ">h", 2), CorruptRecordError, "snappy"),
        (patched(kafka_batch(ONE), 57, ">i", 2), InvalidRecord, "record_count 2"),
        (patched(patched(kafka_batch(ONE), 57, ">i", 1 << 30), 23, ">i", (1 << 30) - 1), CorruptRecordError, "fit"),
        (patched(kafka_batch([(1, None, b"", []), (1, None, b"", [])]), 64, ">b", 4), InvalidRecord, "offsets"),
    ],
)
def test_what_is_no_batch_is_refused(batch: bytes, error: type[RaftlogError], words: str) -> None:
    with pytest.raises(error, match=words):
        from_kafka(batch)


def test_a_header_whose_name_is_no_text_is_refused() -> None:
    sent = bytearray(kafka_batch([(1, b"k", b"v", [("name", b"x")])]))
    at = bytes(sent).index(b"name")
    with pytest.raises(InvalidRecord, match="UTF-8"):
        from_kafka(patched(bytes(sent), at, ">B", 0xFF))


@pytest.mark.parametrize("codec", [Codec.GZIP, Codec.SNAPPY, Codec.LZ4, Codec.ZSTD])
def test_a_bomb_is_refused_before_it_bursts(codec: Codec) -> None:
    noise = random.Random(1).randbytes(2 << 20)
    packed = recompressed(kafka_batch([(1, None, noise, [])]), codec)
    with pytest.raises(BatchTooExpansive):
        from_kafka(packed, InflateLimits(max_bytes=1 << 20))


def test_a_traced_batch_may_inflate_as_far_as_its_topic_allows() -> None:
    span = f"00-{2:032x}-{6:016x}-01"
    plain = kafka_batch([(1, None, bytes(2 << 20), [("traceparent", span.encode())])])
    packed = pa.compress(plain[61:], codec="zstd", asbytes=True)
    sent = patched(patched(plain[:61] + packed, 8, ">i", 49 + len(packed)), 21, ">h", Codec.ZSTD)
    with pytest.raises(BatchTooExpansive):
        from_kafka(sent)
    partition = SimpleNamespace(inflate_limits=InflateLimits(max_ratio=1 << 30), traces=object(), check=parse_header)
    assert _converted(cast("Any", partition), sent, None)[2] == [span]
    partition.traces = None
    assert _converted(cast("Any", partition), sent, None)[2] == []


def test_a_first_record_without_a_timestamp_leaves_the_others_theirs() -> None:
    """A batch's first record may have timestamp -1, which means none, and later ones real timestamps."""
    columns = Columns(
        value=pa.array([b"a", b"b", b"c"], pa.binary()), timestamp_ms=pa.array([-1, 1_700_000_000_000, 5], pa.int64())
    )
    batch = encode_batch(columns, 0)
    (returned,) = to_kafka(batch)
    assert decode_batch(from_kafka(returned)).columns.column(0).to_pylist() == [-1, 1_700_000_000_000, 5]


@given(st.data())
def test_damaged_batches_are_refused_and_never_crash(data: Any) -> None:
    """With a checksum that fits, so that the records themselves have to be checked."""
    batch = bytearray(kafka_batch(data.draw(ROWS)))
    for _ in range(data.draw(st.integers(1, 3))):
        batch[data.draw(st.integers(21, len(batch) - 1))] = data.draw(st.integers(0, 255))
    try:
        taken = from_kafka(patched(bytes(batch), 8, ">i", len(batch) - 12))
    except RaftlogError:
        return
    (returned,) = to_kafka(taken)
    assert from_kafka(returned) == taken


def test_a_batch_of_the_log_is_read_though_it_inflates_beyond_the_default_limit() -> None:
    """It was written in a topic with a higher `max.inflate.bytes`."""
    value = random.Random(1).randbytes(1 << 20) * 65
    batch = encode_batch(Columns(pa.array([value], pa.binary())), 5, codec=Codec.ZSTD)
    (returned,) = to_kafka(batch)
    wide = InflateLimits(max_bytes=1 << 30)
    assert decode_batch(from_kafka(returned, wide), 0, limits=wide).columns.column("value")[0].as_py() == value


# Batches of very many records


def compressed(plain: bytes, codec: Codec = Codec.GZIP) -> bytes:
    """Return an uncompressed batch of Kafka's as a producer with that codec sends it."""
    packed = pa.compress(plain[61:], codec=codec.name.lower(), asbytes=True)
    return patched(patched(plain[:61] + packed, 8, ">i", 49 + len(packed)), 21, ">h", codec)


def counting(batch: bytes, record_count: int) -> bytes:
    """Return a batch that says it has so many records."""
    return patched(patched(batch, 57, ">i", record_count), 23, ">i", record_count - 1)


def test_too_many_records_are_refused_before_any_is_inflated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three million empty records are 2 MB, and an object for each was made before they were counted."""
    packed = compressed(kafka_batch([(1, b"", b"", [])] * 10))
    monkeypatch.setattr(module, "_inflate", None)
    with pytest.raises(MessageTooLarge, match="1000001 records, at most 1000000 are accepted"):
        from_kafka(counting(packed, MAX_RECORDS + 1))
    with pytest.raises(CorruptRecordError, match="500000 records do not fit into 1048576 bytes"):
        from_kafka(counting(packed, 500_000))


@pytest.mark.parametrize("codec", [Codec.GZIP, Codec.SNAPPY, Codec.ZSTD])
def test_a_conversion_ends_at_its_bound(codec: Codec) -> None:
    sent = compressed(kafka_batch([(1, None, bytes(100_000), [])]), codec)
    assert len(sent) < 10_000
    with pytest.raises(TooCostly):
        from_kafka(sent, most_cost=100_000)
    assert from_kafka(sent, most_cost=110_000) == from_kafka(sent)
    many = compressed(kafka_batch([(1, None, b"", [])] * 1_000), codec)
    with pytest.raises(TooCostly):
        from_kafka(many, most_cost=1_000 * RECORD_COST)


def test_records_are_read_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """One call of C that reads them all keeps the interpreter from the event loop, in whichever thread it runs."""
    lengths: list[int] = []
    encode = module._encode

    def noted(slices: Any, *arguments: Any) -> bytes:
        def each() -> Any:
            for rows in slices:
                lengths.append(len(rows))
                yield rows

        return encode(each(), *arguments)

    monkeypatch.setattr(module, "_encode", noted)
    rows: list[Row] = [(1, None, b"", [])] * (2 * SLICE_RECORDS + 1)
    assert parse_header(from_kafka(kafka_batch(rows))).record_count == len(rows)
    assert lengths == [SLICE_RECORDS, SLICE_RECORDS, 1]
    lengths.clear()
    from_kafka(kafka_batch([(1, None, bytes(100_000), [])] * 25))
    assert max(lengths) <= 10, "a megabyte at a time"


@given(ROWS)
def test_a_batch_is_the_same_in_slices(rows: list[Row]) -> None:
    sent = kafka_batch(rows)
    whole = from_kafka(sent)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "SLICE_RECORDS", 3)
        patch.setattr(module, "_SLICE_HEADERS", 2)
        in_slices = from_kafka(sent)
        if len(rows) > 2:  # a batch of few records has another body
            assert in_slices == whole
        assert to_kafka(in_slices) == to_kafka(whole)


@given(ROWS, st.integers(1, 30), st.sampled_from([(-1, -1, -1), (7, 1, (1 << 31) - 5)]))
def test_a_large_batch_becomes_several(rows: list[Row], piece_bytes: int, producer: tuple[int, int, int]) -> None:
    batch = from_kafka(kafka_batch(rows, producer))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PIECE_RECORDS", 7)
        patch.setattr(module, "PIECE_BYTES", piece_bytes)
        pieces = to_kafka(batch)
    assert rows_by_kafka_python(b"".join(pieces)) == rows
    offset = 0
    for piece in pieces:
        base, last_delta, _, max_ms = struct.unpack_from(">q15xiqq", piece)
        (count,) = struct.unpack_from(">i", piece, 57)
        assert (base, count) == (offset, last_delta + 1)
        assert count <= 7
        assert max_ms == max(row[0] for row in rows[offset : offset + count])
        (sequence,) = struct.unpack_from(">i", piece, 53)
        assert sequence == (-1 if producer[0] < 0 else (producer[2] + offset) % (1 << 31))
        offset += count
    assert offset == len(rows)


def test_pieces_have_the_offsets_of_a_batch_with_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    deltas = [2, 3, 10, 11, 40]
    columns = Columns(
        value=pa.array([b"%d" % each for each in deltas], pa.binary()), offset_delta=pa.array(deltas, pa.uint32())
    )
    batch = encode_batch(columns, 50, base_offset=100, last_offset_delta=49)
    monkeypatch.setattr(module, "PIECE_RECORDS", 2)
    pieces = to_kafka(batch)
    ends = [(base, base + last) for base, last in (struct.unpack_from(">q15xi", each) for each in pieces)]
    assert ends == [(100, 109), (110, 139), (140, 149)], "each begins where the one before ends"
    found = [(each.offset, each.value) for piece in pieces for each in MemoryRecords(piece).next_batch()]
    assert found == [(100 + delta, b"%d" % delta) for delta in deltas]
    for offset, left_out in ((100, 0), (109, 0), (110, 1), (139, 1), (140, 2), (149, 2)):
        assert ToKafka(batch, from_offset=offset).step() == pieces[left_out:]


def test_pieces_are_converted_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE_RECORDS", 100)
    large = encode_batch(Columns(pa.array([b""] * 1_000, pa.binary())), 1, codec=Codec.GZIP)
    small = encode_batch(Columns(pa.array([b"v"] * 3, pa.binary())), 1)
    conversion = ToKafka(large + small)
    assert conversion.cost > 1_000 * RECORD_COST
    steps = []
    while not conversion.is_done:
        steps.append(len(conversion.step(250 * RECORD_COST)))
    assert steps == [3, 3, 3, 2]
    assert conversion.records == 1_003
    assert conversion.size == sum(map(len, to_kafka(large + small)))

    bounded = ToKafka(large + small, most_records=250)
    assert len(bounded.step()) == 3
    assert bounded.is_done


def test_a_record_of_too_many_headers_is_refused_before_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    headers: list[tuple[str, bytes | None]] = [("", None)] * (MAX_HEADERS + 1)
    with pytest.raises(MessageTooLarge, match="50001 headers, at most 50000"):
        from_kafka(kafka_batch([(1, b"k", b"v", headers)]))
    sent = kafka_batch([(1, b"k", b"v", []), (1, b"k" * 200, b"v", headers * 11), (1, b"k", b"v", [])])
    monkeypatch.setattr(module, "DefaultRecordBatch", None)
    with pytest.raises(MessageTooLarge, match="550011 headers"):
        from_kafka(sent)


@given(ROWS)
def test_records_of_very_many_headers_are_written_as_others(rows: list[Row]) -> None:
    batch = from_kafka(kafka_batch(rows))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MAX_HEADERS", -1)
        patch.setattr(module, "_SLICE_HEADERS", 2)
        slowly = to_kafka(batch)
    assert slowly == to_kafka(batch)
    assert rows_by_kafka_python(b"".join(slowly)) == rows


def test_gzip_is_not_asked_for_more_than_kafka_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrow's own level took 4 us for each of many equal records, and Kafka's default 0.1."""
    levels: list[int | None] = []
    codec = pa.Codec

    def noted(name: str, compression_level: int | None = None) -> Any:
        levels.append(compression_level)
        return codec(name, compression_level=compression_level)

    noted.supports_compression_level = codec.supports_compression_level  # type: ignore[attr-defined] # as Arrow's
    sent = compressed(kafka_batch([(1, None, b"v" * 100, [])] * 10))
    monkeypatch.setattr(pa, "Codec", noted)
    monkeypatch.setattr(pa, "compress", None)
    assert len(to_kafka(from_kafka(sent))) == 1
    assert levels
    assert all(level is not None and level <= 6 for level in levels)
