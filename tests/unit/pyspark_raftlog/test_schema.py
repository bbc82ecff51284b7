"""Columns of the sink: those that a query may have, and the split by topic."""

from __future__ import annotations

import os
import random
import subprocess
import sys

import pyarrow as pa
import pytest
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    DoubleType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
)
from pyspark_raftlog import DefaultSource
from pyspark_raftlog.options import SinkOptions
from pyspark_raftlog.schema import SinkSchema

WITH_TOPIC = SinkOptions("a:1", "t", ())
WITHOUT_TOPIC = SinkOptions("a:1", None, ())


HEADERS = "array<struct<key:string,value:binary>>"
_TYPES: dict[str, DataType] = {
    HEADERS: ArrayType(StructType([StructField("key", StringType()), StructField("value", BinaryType())])),
    "map<string,string>": MapType(StringType(), StringType()),
    "bigint": LongType(),
    "binary": BinaryType(),
    "double": DoubleType(),
    "int": IntegerType(),
    "string": StringType(),
}


def schema(**columns: str) -> StructType:
    built = StructType()
    for name, kind in columns.items():
        built.add(name, _TYPES[kind])
    return built


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"key": "string"}, ["no column value", 'to_json(struct("*"))']),
        ({"value": "int"}, ["value has the type int", "binary or string", "to_json"]),
        ({"value": "string", "key": "bigint"}, ["key has the type bigint", "cast it to string or binary"]),
        ({"value": "string", "partition": "bigint"}, ["partition has the type bigint", "cast it to int"]),
        ({"value": "string", "headers": "map<string,string>"}, ["headers has the type map<string,string>", HEADERS]),
        ({"value": "string", "timestamp": "bigint"}, ["timestamp has the type bigint", "cast it to timestamp"]),
        ({"value": "string", "valeu": "string"}, ["valeu", "did you mean value?", "to_json"]),
        ({"value": "string", "price": "double"}, ["price", "the sink's columns are value, key"]),
        ({"value": "string", "Value": "string"}, ["two columns value"]),
    ],
)
def test_what_cannot_be_is_refused_in_words(columns: dict[str, str], words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        SinkSchema.check(schema(**columns), WITH_TOPIC)
    assert [word for word in words if word not in str(caught.value)] == []


def test_without_topic_option_and_column_nothing_says_where_to_write() -> None:
    with pytest.raises(ValueError, match=r'option\("topic"'):
        SinkSchema.check(schema(value="string"), WITHOUT_TOPIC)


def test_a_log_is_not_overwritten() -> None:
    source = DefaultSource({"bootstrap.servers": "a:1", "topic": "t"})
    with pytest.raises(ValueError, match="append"):
        source.writer(schema(value="string"), overwrite=True)
    with pytest.raises(ValueError, match="append"):
        source.streamWriter(schema(value="string"), overwrite=True)


def test_the_topic_option_overrides_the_column_and_strings_become_bytes() -> None:
    checked = SinkSchema.check(schema(topic="string", offset="bigint", value="string", key="binary"), WITH_TOPIC)
    batch = pa.record_batch(
        {"topic": ["x", None], "offset": [1, 2], "value": ["ä", None], "key": pa.array([b"k", None], pa.binary())}
    )
    [(topic, records)] = checked.split(batch)
    assert topic == "t"
    assert records.to_pydict() == {"value": ["ä".encode(), None], "key": [b"k", None]}
    assert records.schema.field("value").type == pa.binary()


def test_rows_are_split_by_topic_and_keep_their_order() -> None:
    checked = SinkSchema.check(schema(value="binary", topic="string", headers=HEADERS), WITHOUT_TOPIC)
    chosen = random.Random(1).choices(["a", "b", "c"], weights=[1, 5, 50], k=2000)
    values = [str(number).encode() for number in range(2000)]
    headers = [[{"key": "n", "value": value}] for value in values]
    header_type = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    batch = pa.record_batch({"value": values, "topic": chosen, "headers": pa.array(headers, header_type)})
    seen = {topic: records.to_pydict() for topic, records in checked.split(batch)}
    assert sorted(seen) == ["a", "b", "c"]
    for topic, columns in seen.items():
        wanted = [value for value, name in zip(values, chosen, strict=True) if name == topic]
        assert columns["value"] == wanted
        assert [row[0]["value"] for row in columns["headers"]] == wanted


def test_a_null_topic_is_refused() -> None:
    checked = SinkSchema.check(schema(value="string", topic="string"), WITHOUT_TOPIC)
    with pytest.raises(ValueError, match="1 rows have null in column topic"):
        list(checked.split(pa.record_batch({"value": ["v", "w"], "topic": ["t", None]})))


def test_importing_the_connector_imports_nothing_heavy() -> None:
    """Spark imports it in processes that fork, and for queries that have nothing to do with raftlog."""
    program = (
        "import pyspark.sql.datasource, sys; before = set(sys.modules); import pyspark_raftlog; "
        "new = {name.split('.')[0] for name in set(sys.modules) - before}; "
        "print(sorted(new & {'grpc', 'raftlog', 'pyarrow', 'numpy', 'pandas', 'google'}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=_path())
    assert done.stdout.strip() == "[]"


def _path() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
