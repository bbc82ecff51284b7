"""Fetched rows as the Arrow batches that Spark takes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql.types import BinaryType, IntegerType, LongType, StringType, StructType
from pyspark_raftlog import DefaultSource, columns, source
from pyspark_raftlog.columns import BatchMaker, check_schema, source_schema
from pyspark_raftlog.ranges import Range

from raftlog import _range_reader
from raftlog._core.positions import Rows
from raftlog.format import HEADERS_TYPE, Attributes, BatchHeader
from raftlog.types import TopicPartition

FULL = source_schema(include_headers=True)


def rows(first: int, count: int, *, at: int = 0, stamped: bool = False, sparse: bool = False, **given: Any) -> Rows:
    """Return rows of t-3 whose values are their offsets; `given` are further columns."""
    offsets = np.arange(first, first + 2 * count, 2) if sparse else None
    numbers = range(first, first + count) if offsets is None else offsets.tolist()
    found = {"value": pa.array([str(number).encode() for number in numbers], pa.binary()), **given}
    attributes = Attributes(0)
    if stamped:
        attributes |= Attributes.LOG_APPEND_TIME
    if "timestamp_ms" in given:
        attributes |= Attributes.TIMESTAMP
    last = numbers[-1] if count else first
    header = BatchHeader(
        base_offset=first,
        batch_length=0,
        leader_epoch=0,
        magic=1,
        crc32c=0,
        attributes=attributes,
        last_offset_delta=last - first,
        record_count=count,
        base_timestamp_ms=at,
        max_timestamp_ms=at,
        producer_id=-1,
        producer_epoch=-1,
        base_sequence=-1,
        reserved=b"",
    )
    return Rows(TopicPartition("t", 3), header, pa.record_batch(found), first, offsets)


def test_every_column_of_one_chunk() -> None:
    headers = pa.array([[("a", b"1"), ("a", None)], None, []], HEADERS_TYPE)
    key = pa.array([b"k", None, b""], pa.binary())
    times = pa.array([1, 2, 3], pa.int64())
    batch = BatchMaker(FULL).batch([rows(5, 3, key=key, headers=headers, timestamp_ms=times)])
    assert batch.column("key").to_pylist() == [b"k", None, b""]
    assert batch.column("value").to_pylist() == [b"5", b"6", b"7"]
    assert batch.column("topic").to_pylist() == ["t"] * 3
    assert batch.column("partition").to_pylist() == [3] * 3
    assert batch.column("offset").to_pylist() == [5, 6, 7]
    assert batch.column("timestamp").cast(pa.int64()).to_pylist() == [1000, 2000, 3000]
    assert batch.column("timestampType").to_pylist() == [0] * 3
    assert batch.column("headers").to_pylist() == [
        [{"key": "a", "value": b"1"}, {"key": "a", "value": None}],
        None,
        None,
    ]


def test_values_of_one_chunk_are_not_copied() -> None:
    chunk = rows(0, 100)
    batch = BatchMaker(FULL).batch([chunk])
    assert batch.column("value").buffers()[2].address == chunk.column("value").buffers()[2].address


def test_chunks_of_different_kinds_share_a_batch() -> None:
    chunks = [
        rows(0, 2, at=7),
        rows(2, 2, at=8, stamped=True, key=pa.array([b"x", b"y"])),
        rows(10, 2, at=9, sparse=True),
        rows(20, 2, timestamp_ms=pa.array([50, 60], pa.int64()), headers=pa.array([[("h", b"")], None], HEADERS_TYPE)),
    ]
    batch = BatchMaker(FULL).batch(chunks)
    assert batch.column("offset").to_pylist() == [0, 1, 2, 3, 10, 12, 20, 21]
    assert batch.column("value").to_pylist() == [b"0", b"1", b"2", b"3", b"10", b"12", b"20", b"21"]
    assert batch.column("key").to_pylist() == [None, None, b"x", b"y", None, None, None, None]
    assert batch.column("timestamp").cast(pa.int64()).to_pylist() == [ms * 1000 for ms in (7, 7, 8, 8, 9, 9, 50, 60)]
    assert batch.column("timestampType").to_pylist() == [0, 0, 1, 1, 0, 0, 0, 0]
    assert batch.column("headers").to_pylist() == [None] * 6 + [[{"key": "h", "value": b""}], None]


LAST_MS = ((1 << 63) - 1) // 1000
"""Of what Spark's microseconds can hold."""


def test_times_as_far_as_spark_has_them() -> None:
    times = pa.array([LAST_MS, -LAST_MS], pa.int64())
    batch = BatchMaker(FULL).batch([rows(0, 2, timestamp_ms=times), rows(2, 1, at=LAST_MS)])
    found = batch.column("timestamp").cast(pa.int64()).to_pylist()
    assert found == [LAST_MS * 1000, -LAST_MS * 1000, LAST_MS * 1000]


@pytest.mark.parametrize("beyond", [LAST_MS + 1, -LAST_MS - 1, (1 << 63) - 1, -(1 << 63)])
def test_a_time_that_spark_does_not_have_is_named_not_wrapped(beyond: int) -> None:
    times = pa.array([5, 6, beyond, beyond], pa.int64())
    for chunk, offset in (
        (rows(100, 4, timestamp_ms=times), 102),
        (rows(100, 4, timestamp_ms=times, sparse=True), 104),
        (rows(100, 4, at=beyond), 100),
    ):
        with pytest.raises(ValueError) as caught:
            BatchMaker(FULL).batch([rows(0, 3), chunk])
        for words in (f"t-3: the record at offset {offset} has the timestamp {beyond} ms", '.schema("'):
            assert words in str(caught.value)
        without = StructType().add("value", BinaryType())
        assert BatchMaker(without).batch([chunk]).num_rows == 4, (
            "without the timestamp column the rows must be read, as the error message says"
        )


def test_a_time_that_spark_does_not_have_ends_the_task_whatever_may_be_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    class Reading:
        def __init__(self, bootstrap: str, config: object) -> None: ...

        def read(self, *wanted: object) -> list[Rows]:
            return [rows(5, 4, at=1 << 62)]

        def close(self) -> None: ...

    monkeypatch.setattr(_range_reader, "RangeReader", Reading)
    monkeypatch.setattr(source, "_idle", {})
    made = DefaultSource({"bootstrap.servers": "a:1", "subscribe": "t", "failOnDataLoss": "false"})
    with pytest.raises(ValueError, match="t-3: the record at offset 5 has the timestamp"):
        list(made.streamReader(made.schema()).read(Range("t", 3, 5, 9)))


def test_a_cut_chunk_has_the_columns_of_its_rows_only() -> None:
    headers = pa.array([[("a", b"1")], [("b", b"2")], None, [("c", b"3")]], HEADERS_TYPE)
    batch = BatchMaker(FULL).batch([rows(5, 4, headers=headers).tail(1)])
    assert batch.column("offset").to_pylist() == [6, 7, 8]
    assert [found and found[0]["key"] for found in batch.column("headers").to_pylist()] == ["b", None, "c"]


def test_a_query_gets_the_columns_that_it_says_in_its_order() -> None:
    schema = StructType().add("OFFSET", LongType()).add("value", BinaryType())
    check_schema(schema)
    batch = BatchMaker(schema).batch([rows(1, 2)])
    assert batch.to_pylist() == [{"OFFSET": 1, "value": b"1"}, {"OFFSET": 2, "value": b"2"}]


def test_small_chunks_are_put_together_and_large_ones_go_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns, "_BATCH_ROWS", 100)
    chunks = [rows(first, 30) for first in range(0, 300, 30)]
    found = list(BatchMaker(FULL).batches(chunks))
    assert [batch.num_rows for batch in found] == [120, 120, 60]
    assert [number for batch in found for number in batch.column("offset").to_pylist()] == [*range(300)]
    assert [batch.num_rows for batch in BatchMaker(FULL).batches([rows(0, 500), rows(500, 1)])] == [500, 1]
    assert list(BatchMaker(FULL).batches([])) == []


def test_chunks_of_many_bytes_are_not_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """2^31 bytes are the most that one binary column holds."""
    monkeypatch.setattr(columns, "_BATCH_BYTES", 1000)
    value = pa.array([b"x" * 999] * 2, pa.binary())
    chunks = [rows(0, 2, value=value), rows(2, 2, value=value)]
    assert [batch.num_rows for batch in BatchMaker(FULL).batches(chunks)] == [2, 2]


def test_the_columns_are_what_spark_expects() -> None:
    from pyspark.sql.pandas.types import to_arrow_schema

    batch = BatchMaker(FULL).batch([rows(0, 1)])
    assert batch.schema.equals(to_arrow_schema(FULL, timezone="UTC"))
    assert "headers" not in source_schema(include_headers=False).names


def test_headers_that_are_asked_for_have_a_column() -> None:
    made = DefaultSource({"bootstrap.servers": "a:1", "subscribe": "t", "includeHeaders": "true"})
    made.reader(made.schema())
    wanted = StructType().add("value", BinaryType())
    for reader in (made.reader, made.streamReader):
        with pytest.raises(ValueError, match=r"includeHeaders=true, but .* no column headers; .*leave the option out"):
            reader(wanted)


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        (StructType().add("value", StringType()), "column value of the raftlog source has the type binary, not string"),
        (StructType().add("offset", IntegerType()), "has the type bigint, not int"),
        (StructType().add("valeu", BinaryType()), "did you mean value?"),
        (StructType().add("id", LongType()), "its columns are key, value, topic"),
        (StructType().add("key", BinaryType()).add("KEY", BinaryType()), "two columns key"),
    ],
)
def test_other_columns_are_refused_in_words(schema: StructType, words: str) -> None:
    with pytest.raises(ValueError) as caught:
        check_schema(schema)
    assert words in str(caught.value)
