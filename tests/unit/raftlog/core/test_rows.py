"""Arrow rows in: every type that is taken, order by partition, cuts by size; Kafka's hash of keys."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raftlog._core.accumulator import TopicQueues, key_hash, murmur2, murmur2_column, record_bytes
from raftlog._core.arguments import as_batches
from raftlog._core.cluster import PartitionView, TopicView
from raftlog._core.rows import (
    Rows,
    by_partition,
    cut,
    header_entries,
    partitions_of,
    pieces_of,
    row_bytes,
    rows_from_batch,
    with_headers,
)
from raftlog.errors import InvalidPartitions, InvalidRequestError
from raftlog.format import HEADERS_TYPE, MAX_RECORDS
from raftlog.types import Header

QUEUES = TopicQueues(TopicView("t", b"i" * 16, tuple(PartitionView(part, 1, 0) for part in range(5))), None)


def rows(**columns: Any) -> Rows:
    return rows_from_batch(pa.RecordBatch.from_pydict(columns), 99)


@pytest.mark.parametrize(
    "kind",
    [pa.binary(), pa.utf8(), pa.large_binary(), pa.large_utf8(), pa.binary_view(), pa.string_view(), pa.binary(2)],
    ids=str,
)
def test_values_of_every_binary_and_text_type(kind: Any) -> None:
    values = ["ab", "cd", None] if pa.types.is_string(kind) or "string" in str(kind) else [b"ab", b"cd", None]
    found = rows(value=pa.array(values, kind)).value
    assert found.type == pa.binary()
    assert found.to_pylist() == [b"ab", b"cd", None]


def test_dictionary_and_null_columns() -> None:
    found = rows(value=pa.array(["a", "b", "a"]).dictionary_encode(), key=pa.nulls(3))
    assert found.value.to_pylist() == [b"a", b"b", b"a"]
    assert found.columns().key is None


_LIST = pa.list_(pa.struct([("key", pa.utf8()), ("value", pa.binary())]))


@pytest.mark.parametrize(
    "headers",
    [
        pa.array([[("k", b"v")], None, [("a", b"1"), ("b", None)]], HEADERS_TYPE),
        pa.array([[("k", "v")], None, [("a", "1"), ("b", None)]], pa.map_(pa.utf8(), pa.utf8())),
        pa.array(
            [[{"key": "k", "value": b"v"}], None, [{"key": "a", "value": b"1"}, {"key": "b", "value": None}]],
            pa.list_(pa.struct([("key", pa.utf8()), ("value", pa.binary())])),
        ),
    ],
    ids=["map", "map of text", "list"],
)
@pytest.mark.parametrize("skip", [0, 1])
def test_headers_as_map_or_list(headers: Any, skip: int) -> None:
    batch = pa.RecordBatch.from_pydict({"value": pa.array([b"1", b"2", b"3"]), "headers": headers}).slice(skip)
    found = rows_from_batch(batch, 1)
    expected = [[("k", b"v")], None, [("a", b"1"), ("b", None)]][skip:]
    assert found.headers.type == HEADERS_TYPE
    assert found.headers.to_pylist() == expected
    assert row_bytes(found).tolist() == [
        record_bytes(b"1", None, tuple(pairs or ())) - sum(3 * len(name) for name, _ in pairs or ())
        for pairs in expected
    ], "names of headers must count with their real size, not four bytes for each character"


@pytest.mark.parametrize("hidden", [0, 1, 2])
@pytest.mark.parametrize("skip", [0, 1])
def test_headers_that_a_null_row_hides_are_left_out(hidden: int, skip: int) -> None:
    """Arrow lets a null list lie over entries: a mask that was put on a column leaves them there."""
    entries = pa.array([{"key": name, "value": name.encode()} for name in "abcd"], _LIST.value_type)
    mask = pa.array([row == hidden for row in range(3)])
    headers = pa.ListArray.from_arrays(pa.array([0, 2, 3, 4], pa.int32()), entries, mask=mask)
    batch = pa.RecordBatch.from_pydict({"value": pa.array([b"v"] * 3), "headers": headers}).slice(skip)
    expected = [
        None if row == hidden else [(each, each.encode()) for each in ("ab", "c", "d")[row]] for row in range(3)
    ]
    assert rows_from_batch(batch, 1).headers.to_pylist() == expected[skip:]


@pytest.mark.parametrize("entry", [{"key": None, "value": b"1"}, None])
@pytest.mark.parametrize("skip", [0, 1])
def test_a_header_without_a_name_is_found(entry: Any, skip: int) -> None:
    named = [{"key": "k", "value": None}] * 2
    headers = pa.array([named, None, named, [*named, entry], named], _LIST)
    batch = pa.RecordBatch.from_pydict({"value": pa.array([b"v"] * 5), "headers": headers}).slice(skip)
    with pytest.raises(InvalidRequestError, match=f"a header in row {3 - skip} has null for its name"):
        rows_from_batch(batch, 1)


def test_timestamps_in_any_unit_and_null_is_now() -> None:
    micros = pa.array([1_500, None, 7_000_000], pa.timestamp("us", tz="UTC"))
    assert rows(value=pa.array([b"1", b"2", b"3"]), timestamp=micros).timestamp_ms.to_pylist() == [1, 99, 7000]
    assert rows(value=pa.array([b"1"]), timestamp=pa.array([5])).timestamp_ms.to_pylist() == [5]
    assert rows(value=pa.array([b"1"])).first_timestamp_ms() == 99


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"key": pa.array([b"k"])}, "no column 'value'"),
        ({"value": pa.array([1])}, "'value' has the type int64"),
        ({"value": pa.array([b"v"]), "color": pa.array([1])}, "color"),
        ({"value": pa.array([b"v"]), "partition": pa.array(["0"])}, "'partition' has the type"),
        ({"value": pa.array([b"v"]), "timestamp": pa.array(["now"])}, "'timestamp' has the type"),
        ({"value": pa.array([b"v"]), "headers": pa.array([1])}, "'headers' has the type"),
    ],
)
def test_columns_that_do_not_fit_are_named(columns: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        rows(**columns)


@given(st.lists(st.tuples(st.none() | st.binary(max_size=9), st.none() | st.integers(0, 4)), min_size=1, max_size=80))
def test_rows_go_where_single_records_go_in_their_order(items: list[tuple[bytes | None, int | None]]) -> None:
    values = [b"%d" % number for number in range(len(items))]
    given_rows = rows(
        value=pa.array(values),
        key=pa.array([key for key, _ in items], pa.binary()),
        partition=pa.array([partition for _, partition in items], pa.int32()),
    )
    expected: dict[int, list[bytes]] = {}
    for value, (key, partition) in zip(values, items, strict=True):
        if partition is None:
            partition = key_hash(key) % 5 if key is not None else -1
        expected.setdefault(partition, []).append(value)
    found: dict[int, list[bytes]] = {}
    for partition, part in by_partition(given_rows, partitions_of(given_rows, QUEUES)):
        assert partition not in found
        found[partition] = part.value.to_pylist()
    assert found == expected


def test_a_partition_that_is_not_there_is_named() -> None:
    with pytest.raises(InvalidPartitions, match="no partition 5"):
        partitions_of(rows(value=pa.array([b"", b""]), partition=pa.array([0, 5])), QUEUES)


def test_a_partitioner_of_ones_own_decides() -> None:
    queues = TopicQueues(
        TopicView("t", b"i" * 16, tuple(PartitionView(part, 1, 0) for part in range(5))),
        lambda topic, key, count: len(key or b"") % count,
    )
    chosen = partitions_of(rows(value=pa.array([b"", b""]), key=pa.array([b"abc", b"abcdef"])), queues)
    assert chosen is not None
    assert chosen.tolist() == [3, 1]
    assert queues.queue_for(b"abc", None).partition == 3


@given(st.lists(st.integers(1, 100), max_size=50), st.integers(1, 150))
def test_cuts_cover_all_rows_within_the_limit(sizes: list[int], limit: int) -> None:
    cuts = list(cut(np.array(sizes, np.int64), limit))
    assert [row for start, end in cuts for row in range(start, end)] == list(range(len(sizes)))
    for start, end in cuts:
        assert sum(sizes[start:end]) <= limit or end == start + 1
    for (start, end), (_, following) in pairwise(cuts):
        assert sum(sizes[start:end]) + sizes[end] > limit, "a cut was made before the limit was reached"
        assert following > end


def test_lists_take_one_of_each_or_one_for_all() -> None:
    (batch,) = as_batches([b"a", None], b"k", [0, 1], {"h": b"1"}, 7)
    assert batch.to_pydict() == {
        "value": [b"a", None],
        "key": [b"k", b"k"],
        "partition": [0, 1],
        "timestamp": [7, 7],
        "headers": [[("h", b"1")], [("h", b"1")]],
    }
    with pytest.raises(InvalidRequestError, match="2 values but 1 of key"):
        as_batches([b"a", b"b"], [b"k"], None, None, None)
    with pytest.raises(TypeError, match="values must all be of one kind"):
        as_batches([b"a", 5], None, None, None, None)
    with pytest.raises(InvalidRequestError, match="has its own columns"):
        as_batches(pa.table({"value": [b"a"]}), b"k", None, None, None)


_PAIRS = st.lists(st.tuples(st.sampled_from(["a", "b", "traceparent"]), st.none() | st.binary(max_size=3)), max_size=3)


@given(st.lists(st.none() | _PAIRS, min_size=1, max_size=8), st.integers(0, 7))
def test_more_headers_come_behind_a_rows_own_and_replace_those_of_their_names(
    own: list[list[tuple[str, bytes | None]] | None], skip: int
) -> None:
    skip %= len(own)
    columns = {"value": pa.array([b"v"] * len(own)), "headers": pa.array(own, HEADERS_TYPE)}
    more: tuple[Header, ...] = (("traceparent", b"now"), ("b", None))
    found = with_headers(rows_from_batch(pa.RecordBatch.from_pydict(columns).slice(skip), 1), more)
    assert found.headers.type == HEADERS_TYPE
    assert found.headers.to_pylist() == [
        [*(pair for pair in pairs or () if pair[0] == "a"), *more] for pairs in own[skip:]
    ]
    assert row_bytes(found).tolist() == [
        record_bytes(b"v", None, tuple(pairs)) - sum(3 * len(name) for name, _ in pairs)
        for pairs in found.headers.to_pylist()
    ]
    names, contents, row_of_entry = header_entries(found.headers)
    assert list(zip(names.to_pylist(), contents.to_pylist(), strict=True)) == [
        pair for pairs in found.headers.to_pylist() for pair in pairs
    ]
    assert row_of_entry.tolist() == [row for row, pairs in enumerate(found.headers.to_pylist()) for _ in pairs]


def test_rows_without_headers_get_more() -> None:
    found = with_headers(rows(value=pa.array([b"1", b"2"])), (("k", b"v"),))
    assert found.headers.to_pylist() == [[("k", b"v")]] * 2


KNOWN = {  # Apache Kafka, UtilsTest.testMurmur2
    b"21": -973932308,
    b"foobar": -790332482,
    b"a-little-bit-long-string": -985981536,
    b"a-little-bit-longer-string": -1486304829,
    b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
    b"abc": 479470107,
}


@pytest.mark.parametrize(("key", "expected"), KNOWN.items())
def test_known_values(key: bytes, expected: int) -> None:
    assert murmur2(key) == expected
    assert murmur2_column(pa.array([key])).tolist() == [expected]
    assert key_hash(key) == expected & 0x7FFFFFFF


@given(st.lists(st.binary(max_size=40), max_size=60))
def test_a_column_hashes_as_its_keys_do(keys: list[bytes]) -> None:
    assert murmur2_column(pa.array(keys, pa.binary())).tolist() == [murmur2(key) for key in keys]


@given(st.binary(min_size=1, max_size=30), st.integers(1, 50), st.integers(0, 40))
def test_keys_of_one_length_and_slices(key: bytes, rows: int, skip: int) -> None:
    keys = [bytes([row]) + key for row in range(rows)]
    column = pa.array(keys, pa.binary()).slice(skip)
    assert murmur2_column(column).tolist() == [murmur2(item) for item in keys[skip:]]


def test_one_very_long_key_among_short_ones() -> None:
    keys = [b"short%d" % number for number in range(100)]
    keys[41] = bytes(range(256)) * 400
    assert murmur2_column(pa.array(keys)).tolist() == [murmur2(key) for key in keys]


def test_nulls_hash_as_something_and_do_not_disturb_the_others() -> None:
    hashes = murmur2_column(pa.array([b"abc", None, b"21"]))
    assert (hashes[0], hashes[2]) == (KNOWN[b"abc"], KNOWN[b"21"])


def test_a_piece_has_no_more_records_than_brokers_accept() -> None:
    nothing = pa.array([b""], pa.binary()).take(pa.array(np.zeros(2 * MAX_RECORDS + 1, np.int64)))
    many = rows(value=nothing)
    pieces = list(pieces_of([(many, row_bytes(many))], QUEUES, 1 << 30))
    assert [len(piece.columns.value) for piece in pieces] == [MAX_RECORDS, MAX_RECORDS, 1]
