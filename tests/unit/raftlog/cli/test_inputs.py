"""What `raftlog produce` reads, and that `consume --output json` can be read again."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raftlog.cli.records.internal_records import json_record
from raftlog.cli.records.produce import Columns, Format, format_of, read
from raftlog.errors import InvalidRecord


def records(data: bytes, source: Format, columns: Columns | None = None) -> list[dict[str, Any]]:
    parts = list(read(io.BytesIO(data), source, columns or Columns()))
    return [row for part in parts for row in part.records.to_pylist()]


@pytest.mark.parametrize(
    ("path", "wanted", "expected"),
    [
        (None, Format.AUTO, Format.LINES),
        (Path("x.CSV"), Format.AUTO, Format.CSV),
        (Path("x.jsonl"), Format.AUTO, Format.JSON),
        (Path("x.parquet"), Format.AUTO, Format.PARQUET),
        (Path("x.log"), Format.AUTO, Format.LINES),
        (Path("x.csv"), Format.LINES, Format.LINES),
    ],
)
def test_the_format_follows_from_the_ending(path: Path | None, wanted: Format, expected: Format) -> None:
    assert format_of(path, wanted) is expected


@given(st.lists(st.binary(max_size=20).map(lambda data: data.replace(b"\n", b"")), min_size=1))
def test_every_line_is_a_value(lines: list[bytes]) -> None:
    data = b"\n".join(lines) + b"\n"
    assert [row["value"] for row in records(data, Format.LINES)] == lines


def test_a_line_longer_than_a_block_and_a_last_line_without_end_stay_whole() -> None:
    lines = [b"x" * 3_000_000, b"y", b"z" * 1_500_000]
    assert [row["value"] for row in records(b"\n".join(lines), Format.LINES)] == lines


def test_keys_are_split_at_the_first_separator() -> None:
    columns = Columns(key_separator="::")
    assert records(b"a::1::2\n::3\n", Format.LINES, columns) == [
        {"key": b"a", "value": b"1::2"},
        {"key": b"", "value": b"3"},
    ]
    with pytest.raises(InvalidRecord, match="line 2 has no '::'"):
        records(b"a::1\nb\n", Format.LINES, columns)


def test_json_lines() -> None:
    lines = [
        {"key": "k", "value": "v", "headers": {"a": "b", "c": None}, "partition": 2, "timestamp": 5},
        {"value": {"x": [1, None]}},
        {"value": None, "key_base64": "/w=="},
        {"headers": [["a", "1"], ["a", "2"]]},
    ]
    found = records("\n\n".join(map(json.dumps, lines)).encode(), Format.JSON)
    assert found[0] == {
        "key": b"k",
        "value": b"v",
        "headers": [{"key": "a", "value": b"b"}, {"key": "c", "value": None}],
        "partition": 2,
        "timestamp": 5,
    }
    assert json.loads(found[1]["value"]) == {"x": [1, None]}
    assert (found[2]["key"], found[2]["value"]) == (b"\xff", None)
    assert found[3]["headers"] == [{"key": "a", "value": b"1"}, {"key": "a", "value": b"2"}]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"value": "ok"}\nnope', "line 2 is not JSON"),
        ("[1]", "line 1 is not an object"),
        ('{"vlaue": 1}', "line 1 has unknown fields vlaue; use headers, key"),
        ('{"partition": "2"}', "line 1: partition is '2', expected a whole number"),
        ('{"headers": [1]}', "line 1: headers must be"),
        ('{"value_base64": "*"}', "line 1: value_base64 is not base64"),
    ],
)
def test_json_that_is_no_record_is_refused_with_its_line(line: str, words: str) -> None:
    with pytest.raises(InvalidRecord) as caught:
        records(line.encode(), Format.JSON)
    assert words in str(caught.value)


@given(
    st.lists(
        st.tuples(
            st.none() | st.binary(max_size=9),
            st.none() | st.binary(max_size=9),
            st.lists(st.tuples(st.text(max_size=3), st.none() | st.text(max_size=3).map(str.encode)), max_size=2),
            st.integers(0, 2**62),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_what_consume_prints_as_json_is_what_produce_reads(rows: list[Any]) -> None:
    lines = [
        json.dumps(
            json_record(key=key, value=value, headers=headers, timestamp_ms=time, offset=7, topic="t", partition=1)
        )
        for key, value, headers, time in rows
    ]
    found = records("\n".join(lines).encode(), Format.JSON)
    assert [(row["key"], row["value"], row["timestamp"], row["partition"]) for row in found] == [
        (key, value, time, 1) for key, value, _, time in rows
    ]
    assert [[(header["key"], header["value"]) for header in row["headers"] or []] for row in found] == [
        headers for _, _, headers, _ in rows
    ]


def test_rows_become_json_or_one_column_becomes_the_value() -> None:
    data = b"id,name\n1,ada\n2,\n"
    assert [json.loads(row["value"]) for row in records(data, Format.CSV)] == [
        {"id": "1", "name": "ada"},
        {"id": "2", "name": ""},
    ]
    assert records(data, Format.CSV, Columns(key="id", value="name")) == [
        {"key": b"1", "value": b"ada"},
        {"key": b"2", "value": b""},
    ]
    with pytest.raises(InvalidRecord, match="no column 'nmae'; the input has id, name"):
        records(data, Format.CSV, Columns(value="nmae"))


def test_parquet_and_what_is_none() -> None:
    sink = io.BytesIO()
    pa.parquet.write_table(pa.table({"k": [b"\xff", None], "v": [1.5, None]}), sink)
    assert records(sink.getvalue(), Format.PARQUET, Columns(key="k", value="v")) == [
        {"key": b"\xff", "value": b"1.5"},
        {"key": None, "value": None},
    ]
    with pytest.raises(InvalidRecord, match=r"not parquet.*--format"):
        records(b"no parquet", Format.PARQUET)


def test_every_csv_column_is_text_as_it_stands_in_the_file() -> None:
    rows = ["00501,1.50,true,2024-01-01,NULL", "-0,1e3,,nan,+7"]
    data = "\ufeffzip,price,flag,day,n\r\n".encode() + "\r\n".join(rows).encode()
    assert [list(json.loads(row["value"]).values()) for row in records(data, Format.CSV)] == [
        row.split(",") for row in rows
    ]
    assert records(data, Format.CSV, Columns(key="zip", value="price"))[0] == {"key": b"00501", "value": b"1.50"}


def test_a_late_word_among_numbers_and_a_quoted_line_end_are_ordinary_text() -> None:
    many = 300_000  # more than Arrow's first block, from which it would infer
    data = b'"a ""b"",\nc",d\n' + b"12345,1\n" * many + b'word,"two\nlines"\n'
    assert records(data, Format.CSV, Columns(key='a "b",\nc', value="d"))[-2:] == [
        {"key": b"12345", "value": b"1"},
        {"key": b"word", "value": b"two\nlines"},
    ]


def test_csv_from_a_pipe_is_read_whole() -> None:
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as pipe:
        with os.fdopen(writing, "wb") as end:
            end.write(b"a,b\n01,2\n")
        [part] = read(pipe, Format.CSV, Columns(value="a"))
    assert (part.records.to_pylist(), part.place(0)) == ([{"value": b"01"}], "row 1")


def test_a_csv_that_cannot_be_read_is_told_with_its_row() -> None:
    with pytest.raises(InvalidRecord, match=r"Row #3: Expected 2 columns, got 3"):
        records(b"a,b\n1,2\n1,2,3\n", Format.CSV)
    with pytest.raises(InvalidRecord, match=r"UTF8"):
        records(b"a,b\n\xff,2\n", Format.CSV)


def test_columns_of_the_same_name_are_named() -> None:
    with pytest.raises(InvalidRecord, match="columns 'a', 'b' more than once"):
        records(b"a,b,c,b,a\n1,2,3,4,5\n", Format.CSV, Columns(value="c"))


def test_bytes_in_a_json_row_are_base64_and_numbers_that_json_lacks_are_null() -> None:
    sink = io.BytesIO()
    table = pa.table(
        {
            "raw": [b"\x00\xff"],
            "nested": [{"inner": [b"\x01", None], "x": float("nan")}],
            "x": [float("inf")],
            "y": [1.5],
        }
    )
    pa.parquet.write_table(table, sink)
    [row] = records(sink.getvalue(), Format.PARQUET)
    assert json.loads(row["value"], parse_constant=pytest.fail) == {
        "raw": "AP8=",
        "nested": {"inner": ["AQ==", None], "x": None},
        "x": None,
        "y": 1.5,
    }


def test_times_with_nanoseconds_are_exact() -> None:
    """Python has no type for them, and PyArrow only with pandas, without which it refuses them."""
    sink = io.BytesIO()
    at = 1_700_000_000_000_000_000
    columns = {
        "at": pa.array([at + 123, at, at + 1_500_000_001, None, -1], pa.timestamp("ns")),
        "there": pa.array([at + 123, at, at + 1_500_000_001, None, -1], pa.timestamp("ns", "+09:00")),
        "of_day": pa.array([5_000_000_001, 5_000_000_000, 7_000, None, 1], pa.time64("ns")),
        "took": pa.array([5_000_000_001, 5_000_000_000, 90_000_000_000_000, None, 1_000_002], pa.duration("ns")),
    }
    pa.parquet.write_table(pa.table(columns), sink)
    rows = [json.loads(row["value"]) for row in records(sink.getvalue(), Format.PARQUET)]
    found = {name: [row[name] for row in rows] for name in columns}
    assert found == {
        "at": [
            "2023-11-14 22:13:20.000000123",
            "2023-11-14 22:13:20",
            "2023-11-14 22:13:21.500000001",
            None,
            "1969-12-31 23:59:59.999999999",
        ],
        "there": [
            "2023-11-15 07:13:20.000000123+09:00",
            "2023-11-15 07:13:20+09:00",
            "2023-11-15 07:13:21.500000001+09:00",
            None,
            "1970-01-01 08:59:59.999999999+09:00",
        ],
        "of_day": ["00:00:05.000000001", "00:00:05", "00:00:00.000007", None, "00:00:00.000000001"],
        "took": ["0:00:05.000000001", "0:00:05", "1 day, 1:00:00", None, "0:00:00.001000002"],
    }


def test_a_value_without_a_type_of_pythons_is_refused_with_its_column() -> None:
    sink = io.BytesIO()
    pa.parquet.write_table(pa.table({"at": pa.array([1 << 50], pa.timestamp("ms"))}), sink)
    with pytest.raises(InvalidRecord, match=r"column 'at' is timestamp\[ms\], and has a value that .*cast it"):
        records(sink.getvalue(), Format.PARQUET)


def test_every_kind_of_bytes_is_a_value_and_a_list_is_none() -> None:
    sink = io.BytesIO()
    raw = pa.array([b"\xff\xfe"])
    table = pa.table({"large": raw.cast(pa.large_binary()), "fixed": raw.cast(pa.binary(2)), "list": [[1]]})
    pa.parquet.write_table(table, sink)
    columns = Columns(key="large", value="fixed")
    assert records(sink.getvalue(), Format.PARQUET, columns) == [{"key": b"\xff\xfe", "value": b"\xff\xfe"}]
    with pytest.raises(InvalidRecord, match="column 'list' is list"):
        records(sink.getvalue(), Format.PARQUET, Columns(value="list"))


def test_what_was_good_before_a_bad_line_comes_first() -> None:
    found = []
    with pytest.raises(InvalidRecord, match="line 4 is not JSON"):
        for part in read(io.BytesIO(b'{"value": "a"}\n\n{"value": "b"}\nnope\n'), Format.JSON, Columns()):
            found += [part.place(index) for index in range(len(part.numbers))]
    assert found == ["line 1", "line 3"]
    pairs = []
    with pytest.raises(InvalidRecord, match="line 2 has no ':'"):
        for part in read(io.BytesIO(b"a:1\nb\n"), Format.LINES, Columns(key_separator=":")):
            pairs += part.records.to_pylist()
    assert pairs == [{"key": b"a", "value": b"1"}]
