"""Records as the console shows, filters and searches them."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from typing import Any, cast

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raftlog.console.messages import (
    LONGEST_PARSED,
    MOST_COLUMNS,
    MOST_FOUND_BYTES,
    MOST_NAMES,
    JsonPath,
    Query,
    arrow_of,
    brief,
    parse_headers,
    search,
    shown,
    table_of,
)
from raftlog.errors import InvalidRequestError
from raftlog.types import Record, TopicPartition

FLIGHT = {"carrier": "AA", "legs": [{"to": "JFK"}, {"to": "LAX"}], "delay": 5, "late": True, "a-b": 1}


def record(
    value: bytes | None = b"v", key: bytes | None = b"k", headers: list[tuple[str, bytes | None]] | None = None
) -> Record:
    return Record("orders", 0, 7, 1_700_000_000_000, key, value, tuple(headers or ()))


@pytest.mark.parametrize(
    ("path", "matches"),
    [
        ("$.carrier", True),
        ("carrier == AA", True),
        ("$.carrier == 'AA'", True),
        ("$.carrier == UA", False),
        ("$.legs[1].to == LAX", True),
        ("$.legs[2]", False),
        ("$['a-b'] == 1", True),
        ("$.delay == 5", True),
        ("$.late == true", True),
        ("$.carrier.x", False),
        ("$.nothing", False),
    ],
)
def test_json_paths(path: str, matches: bool) -> None:
    assert JsonPath.parse(path).matches(json.dumps(FLIGHT).encode()) is matches
    assert not JsonPath.parse(path).matches(b"no json")
    assert not JsonPath.parse(path).matches(None)


@pytest.mark.parametrize("path", ["$.a..b", "$.[", "a b", "$.a[x]"])
def test_malformed_json_paths_say_how_to_write_one(path: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"write for example \$\.flight"):
        JsonPath.parse(path)


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({}, True),
        ({"key": "k"}, True),
        ({"key": "q"}, False),
        ({"value": "carr"}, True),
        ({"value": "nope"}, False),
        ({"header": "trace"}, True),
        ({"header": "trace=1"}, True),
        ({"header": "trace=2"}, False),
        ({"header": "other"}, False),
        ({"path": "$.carrier == AA"}, True),
        ({"path": "$.carrier == AA", "key": "q"}, False),
    ],
)
def test_filters(fields: dict[str, str], wanted: bool) -> None:
    query = Query.parse(fields)
    assert query.wants(record(json.dumps(FLIGHT).encode(), headers=[("trace", b"1")])) is wanted
    assert query.filters is bool(fields)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"begin": "middle"}, "begin is one of"),
        ({"offset": "-1"}, "offset '-1': write a whole number"),
        ({"limit": "100000"}, "write a whole number up to 200"),
        ({"partition": "x"}, "partition 'x'"),
        ({"begin": "time", "time": "noon"}, "time 'noon'"),
    ],
)
def test_malformed_queries_say_what_is_wrong(fields: dict[str, str], words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        Query.parse(fields)


def test_a_time_is_in_utc_unless_it_says_otherwise() -> None:
    assert Query.parse({"begin": "time", "time": "1970-01-01T00:00:01"}).time_ms == 1000
    assert Query.parse({"begin": "time", "time": "1970-01-01T01:00:01+01:00"}).time_ms == 1000


@pytest.mark.parametrize(
    ("data", "form", "text", "kind"),
    [
        (None, "auto", "null", "null"),
        (b"", "auto", "", "text"),
        (b'{"a":1}', "auto", '{\n  "a": 1\n}', "json"),
        (b'{"a":', "auto", '{"a":', "text"),
        ("größe".encode(), "auto", "größe", "text"),
        (b"\xff\x00", "auto", "00000000  ff 00                                            ..", "hex"),
        (b"a\x00", "auto", "00000000  61 00                                            a.", "hex"),
        (b"\xff", "text", "\\xff", "text"),
        (b"ab", "hex", "00000000  61 62                                            ab", "hex"),
        (b'{"a":1}', "text", '{"a":1}', "text"),
    ],
)
def test_bytes_as_text(data: bytes | None, form: str, text: str, kind: str) -> None:
    found = shown(data, form)
    assert (found.text, found.form, found.cut) == (text, kind, False)


def test_deep_json_is_text() -> None:
    assert shown(b"[" * 100_000).form == "text"


@given(st.binary(max_size=600), st.sampled_from(["auto", "text", "json", "hex"]), st.integers(32, 200))
def test_any_bytes_can_be_shown(data: bytes, form: str, longest: int) -> None:
    found = shown(data, form, longest)
    assert len(found.text) <= longest * 6
    line = brief(data)
    assert "\n" not in line.text
    assert len(line.text) <= 120


def test_long_values_are_cut() -> None:
    assert shown(b"x" * 50, longest=32) == ("x" * 32, "text", True)
    assert brief("ü".encode() * 300) == ("ü" * 120, "text", True)
    assert brief(None).text == "null"


def test_headers_of_a_form() -> None:
    assert parse_headers("a=1\n\n b = x=y\n") == [("a", b"1"), ("b", b" x=y")]
    with pytest.raises(InvalidRequestError, match="write name=value"):
        parse_headers("a")


def test_json_objects_become_a_table_with_types() -> None:
    values = [b'{"id": 1, "name": "a", "at": {"x": 1}}', b"no json", b'{"id": 2, "more": 1}', b"[1]", b'{"more": "b"}']
    found = table_of([record(value) for value in values])
    assert [tuple(each) for each in found.columns] == [
        ("id", "int64"),
        ("name", "string"),
        ("at", "struct<x: int64>"),
        ("more", "mixed"),
    ]
    assert [cells for _, cells in found.rows] == [
        ["1", "a", '{"x": 1}', None],
        ["2", None, None, "1"],
        [None, None, None, "b"],
    ]
    assert (found.others, found.left_out) == (2, 0)


@given(st.lists(st.binary() | st.dictionaries(st.text(), st.integers() | st.text() | st.none() | st.floats())))
def test_a_table_is_made_of_anything(values: list[bytes | dict[str, object]]) -> None:
    found = table_of([record(each if isinstance(each, bytes) else json.dumps(each).encode()) for each in values])
    assert len(found.rows) + found.others == len(values)
    assert all(len(cells) == len(found.columns) <= MOST_COLUMNS for _, cells in found.rows)


def _stream(batches: list[pa.RecordBatch], codec: str | None = None) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batches[0].schema, options=pa.ipc.IpcWriteOptions(compression=codec)) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return bytes(sink.getvalue())


FLIGHTS = pa.record_batch({"carrier": ["AA", None], "at": pa.array([1, 2], pa.timestamp("ns")), "tags": [[1], []]})


def test_arrow_data_become_a_table_beside_json_objects() -> None:
    file = pa.BufferOutputStream()
    with pa.ipc.new_file(file, FLIGHTS.schema) as writer:
        writer.write_batch(FLIGHTS.slice(1))
    values = [_stream([FLIGHTS, FLIGHTS.slice(0, 1)]), bytes(file.getvalue()), b'{"carrier": "UA"}', b"text"]
    found = table_of([record(value) for value in values])
    assert [tuple(each) for each in found.columns] == [
        ("carrier", "string"),
        ("at", "timestamp[ns]"),
        ("tags", "list<item: int64>"),
    ]
    assert [cells[0] for _, cells in found.rows] == ["AA", "null", "AA", "null", "UA"]
    assert found.rows[1][1][2] == "[]"
    assert (found.others, found.more_rows) == (1, False)
    assert brief(values[0]).text == "Arrow: 3 columns, 3 rows"


def test_arrow_data_with_many_rows_are_cut() -> None:
    many = pa.record_batch({"n": range(5_000)})
    found = arrow_of(_stream([many, many]), 3)
    assert found is not None
    assert (found.rows, found.total) == ([{"n": 0}, {"n": 1}, {"n": 2}], 10_000)
    assert table_of([record(_stream([many]))] * 4).more_rows


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
def test_compressed_arrow_data_are_not_unpacked(codec: str) -> None:
    zeros = _stream([pa.record_batch({"n": pa.nulls(1_000_000, pa.int64()).fill_null(0)})], codec)
    assert len(zeros) < 200_000
    assert arrow_of(zeros) is None
    named = _stream([pa.record_batch({"n": pa.array(["a" * 1_000]).dictionary_encode()})], codec)
    assert arrow_of(named) is None


@given(st.data())
def test_damaged_arrow_data_are_shown_somehow(data: st.DataObject) -> None:
    whole = bytearray(_stream([FLIGHTS, FLIGHTS]))
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    value = bytes(whole[: data.draw(st.integers(0, len(whole)))])
    found = table_of([record(value)])
    assert bool(found.others) or found.columns or not found.rows
    brief(value)


# What the writer of a value can do to users of the console


def peak_bytes(work: Callable[[], object]) -> int:
    """Return how much memory the work needs at a time."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def _one(column: pa.Array) -> bytes:
    return _stream([pa.record_batch({"a": column})])


def lists_of(values: pa.Array, rows: int) -> pa.Array:
    """Each row is a list of all the values."""
    return pa.ListViewArray.from_arrays([0] * rows, [len(values)] * rows, values)


@pytest.mark.parametrize(
    ("column", "cell"),
    [
        (pa.ListArray.from_arrays(pa.array([0, 100_000_000], pa.int32()), pa.nulls(100_000_000)), "[null, null, "),
        (lists_of(pa.array([1] * 10_000), 200), "[1, 1, 1, "),
        (lists_of(lists_of(lists_of(pa.array([1] * 30), 30), 30), 200), "[[[1, 1, 1, "),
        (pa.array([[("k", 1)] * 10_000], pa.map_(pa.string(), pa.int64())), '[["k", 1], ["k", 1], '),
        (pa.DictionaryArray.from_arrays([0] * 200, pa.array(["x" * 100_000])), "xxx"),
        (pa.array(["\u20ac" * 100_000]).cast(pa.large_string()), "\u20ac\u20ac"),
    ],
)
def test_of_arrow_data_no_more_is_read_than_a_cell_shows(column: pa.Array, cell: str) -> None:
    """100 million nulls take 300 bytes, and took 5 GB as Python's objects."""
    value = _one(column)
    table_of([record(value)])  # imports
    assert peak_bytes(lambda: table_of([record(value)])) < 2_000_000
    found = table_of([record(value)])
    assert found.rows[0][1][0] is not None
    assert found.rows[0][1][0].startswith(cell)
    assert found.rows[0][1][0].endswith("…")
    assert len(found.rows[0][1][0]) == 80


def test_maps_structs_and_other_arrow_values_are_cells_as_before() -> None:
    batch = pa.record_batch(
        {
            "map": pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int64())),
            "struct": pa.array([{"x": None, "y": [b"\x01"]}]),
            "dictionary": pa.array(["a"]).dictionary_encode(),
            "runs": pa.RunEndEncodedArray.from_arrays([1], ["r"]),
            "none": pa.nulls(1),
            "when": pa.array([1_000_000_000], pa.timestamp("ns")),
        }
    )
    ((_, cells),) = table_of([record(_stream([batch]))]).rows
    assert cells == ['[["k", 1]]', '{"x": null, "y": ["01"]}', "a", "r", "null", '"1970-01-01 00:00:01"']


def test_of_arrow_data_with_very_many_columns_few_are_read() -> None:
    value = _stream([pa.record_batch({f"c{number}": pa.nulls(200) for number in range(2_000)})])
    found = table_of([record(value)] * 20)
    assert (len(found.columns), len(found.rows)) == (MOST_COLUMNS, 500)
    assert found.left_out == MOST_NAMES - MOST_COLUMNS
    assert peak_bytes(lambda: table_of([record(value)] * 20)) < 20_000_000


def test_deep_json_is_not_indented_beyond_what_is_shown() -> None:
    """A record of 1 MB became 1 GB of spaces."""
    value = b"[" + b",".join([b"[" * 900 + b"]" * 900] * 100) + b"]"
    assert peak_bytes(lambda: shown(value)) < 20_000_000
    found = shown(value)
    assert (found.form, found.cut, len(found.text)) == ("json", True, 4_000)
    assert found.text.startswith("[\n  [\n    [\n")


def test_long_values_are_not_parsed() -> None:
    value = b'{"a": [' + b",".join([b"[]"] * (LONGEST_PARSED // 3)) + b"]}"
    assert len(value) > LONGEST_PARSED
    assert not JsonPath.parse("$.a").matches(value)
    assert shown(value).form == "text"
    assert table_of([record(value)]).others == 1


def test_json_that_is_too_deep_for_a_path_or_a_table_matches_nothing() -> None:
    deep = b"[" * 100_000 + b"]" * 100_000
    assert not JsonPath.parse("$.a").matches(deep)
    assert table_of([record(deep)]).others == 1
    for depth in range(900, 1_000, 7):  # some can be read, and not be written
        table_of([record(b'{"a": ' + b"[" * depth + b"]" * depth + b"}")])


def test_objects_with_very_many_fields_are_cut() -> None:
    value = json.dumps({f"f{number}": number for number in range(50_000)}).encode()
    found = table_of([record(value)] * 10)
    assert (len(found.columns), found.left_out) == (MOST_COLUMNS, MOST_NAMES - MOST_COLUMNS)
    assert found.rows[0][1][:2] == ["0", "1"]


class Shelf:
    """Stands in for a consumer: the records of one partition, a few at a time."""

    def __init__(self, values: list[bytes]) -> None:
        self.part = TopicPartition("orders", 0)
        self.records = [Record("orders", 0, at, 1_000 + at, None, value, ()) for at, value in enumerate(values)]
        self.at = self.polled = 0

    def partitions_for(self, topic: str) -> list[TopicPartition]:
        return [self.part]

    def end_offsets(self, parts: object) -> dict[TopicPartition, int]:
        return {self.part: len(self.records)}

    def beginning_offsets(self, parts: object) -> dict[TopicPartition, int]:
        return {self.part: 0}

    def assign(self, parts: object) -> None: ...

    def pause(self, part: object) -> None: ...

    def seek(self, part: object, offset: int) -> None:
        self.at = offset

    def position(self, part: object) -> int:
        return self.at

    def poll(self, timeout: float) -> list[Record]:
        found = self.records[self.at : self.at + 3]
        self.at += len(found)
        return found


@pytest.mark.parametrize(
    ("begin", "sizes", "limit", "offsets", "cut"),
    [
        ("newest", [1] * 10, 4, [9, 8, 7, 6], False),
        ("oldest", [1] * 10, 4, [0, 1, 2, 3], False),
        ("newest", [MOST_FOUND_BYTES // 3] * 10, 50, [9, 8, 7], True),
        ("oldest", [MOST_FOUND_BYTES // 3] * 10, 50, [0, 1, 2], True),
        ("newest", [1, 1, 2 * MOST_FOUND_BYTES], 50, [2], True),
        ("oldest", [2 * MOST_FOUND_BYTES, 1], 1, [0], False),
    ],
)
def test_the_records_of_a_search_have_a_bound_together(
    begin: str, sizes: list[int], limit: int, offsets: list[int], cut: bool
) -> None:
    shelf = Shelf([bytes(size) for size in sizes])
    found = search(cast(Any, shelf), "orders", Query(begin=begin, limit=limit))
    assert [each.offset for each in found.records] == offsets
    assert found.cut is cut
