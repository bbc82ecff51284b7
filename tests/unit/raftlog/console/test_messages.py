"""Records as the console shows, filters and searches them."""

from __future__ import annotations

import json

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raftlog.console.messages import MOST_COLUMNS, JsonPath, Query, arrow_of, brief, parse_headers, shown, table_of
from raftlog.errors import InvalidRequestError
from raftlog.types import Record

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
