"""The source's columns, which are those of Kafka's source, and how fetched rows become Arrow batches for Spark.

column         Spark type                                  meaning
key            binary                                      null: the record has none
value          binary                                      null: a tombstone
topic          string
partition      int
offset         bigint
timestamp      timestamp                                   milliseconds
timestampType  int                                         0: the producer's clock, 1: the broker's
headers        array<struct<key: string, value: binary>>   with includeHeaders=true; null: the record has none
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from pyspark_raftlog.values import did_you_mean

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from raftlog._core.positions import Rows

_HEADERS: Final = "headers"
_TYPES: Final = {
    "key": "binary",
    "value": "binary",
    "topic": "string",
    "partition": "int",
    "offset": "bigint",
    "timestamp": "timestamp",
    "timestamptype": "int",
    _HEADERS: "array<struct<key:string,value:binary>>",
}
"""The columns' types by lower-case name, as `simpleString` writes them."""

_BATCH_ROWS: Final = 10_000
_BATCH_BYTES: Final = 1 << 20
"""An Arrow batch goes to Spark once it has this many rows or bytes: each batch costs as much as copying 100 KB."""


_MAX_MS: Final = ((1 << 63) - 1) // 1000
"""The bounds of timestamps: the log has milliseconds of 64 bits, Spark microseconds of 64 bits."""


def source_schema(*, include_headers: bool) -> StructType:
    """Return the columns of a query without a schema."""
    from pyspark.sql import types as t  # may need Spark's session, so not at import

    header = t.StructType([t.StructField("key", t.StringType()), t.StructField("value", t.BinaryType())])
    fields = [
        t.StructField("key", t.BinaryType()),
        t.StructField("value", t.BinaryType()),
        t.StructField("topic", t.StringType()),
        t.StructField("partition", t.IntegerType()),
        t.StructField("offset", t.LongType()),
        t.StructField("timestamp", t.TimestampType()),
        t.StructField("timestampType", t.IntegerType()),
    ]
    return t.StructType([*fields, t.StructField(_HEADERS, t.ArrayType(header))] if include_headers else fields)


def check_schema(schema: StructType, *, include_headers: bool = False) -> None:
    """Check the columns of a query's schema: any of the source's, in any order.

    Raises:
        ValueError: a column is unknown or has another type, or includeHeaders=true comes without a column headers.
    """
    seen = set()
    for field in schema.fields:
        name = field.name.lower()
        if name not in _TYPES:
            names = source_schema(include_headers=True).names
            advice = did_you_mean(name, names, f"its columns are {', '.join(names)}.")
            raise ValueError(
                f"the raftlog source has no column {field.name}; {advice} Extract the fields of a value in the query, "
                "for example with from_json(cast(value as string), ...)"
            )
        if name in seen:
            raise ValueError(f"the schema has two columns {name}; drop one")
        seen.add(name)
        found = field.dataType.simpleString()
        if found != _TYPES[name]:
            raise ValueError(
                f"column {field.name} of the raftlog source has the type {_TYPES[name]}, not {found}; "
                "use that type in the schema, and cast it in the query"
            )

    if include_headers and _HEADERS not in seen:
        raise ValueError(
            f"includeHeaders=true, but .schema(...) has no column headers; add "
            f'"{_HEADERS} {_TYPES[_HEADERS]}", or leave the option out'
        )


class BatchMaker:
    """Makes Arrow batches with the columns of one query."""

    def __init__(self, schema: StructType) -> None:
        from pyspark.sql.pandas.types import to_arrow_schema

        self._schema = to_arrow_schema(schema, timezone="UTC")
        self._names = [field.name.lower() for field in schema.fields]

    def batches(self, chunks: Iterable[Rows]) -> Iterator[Any]:
        """Yield the rows as `pyarrow.RecordBatch`es; small chunks are combined.

        Values of a large chunk are not copied, those of small chunks once.
        """
        waiting: list[Rows] = []
        rows = size = 0
        for chunk in chunks:
            waiting.append(chunk)
            rows += len(chunk)
            size += chunk.columns.nbytes
            if rows >= _BATCH_ROWS or size >= _BATCH_BYTES:
                yield self.batch(waiting)
                waiting, rows, size = [], 0, 0
        if waiting:
            yield self.batch(waiting)

    def batch(self, chunks: list[Rows]) -> Any:
        """Return rows of one partition as one batch."""
        import pyarrow as pa

        assert chunks, "a batch has rows"
        arrays = [
            _COLUMN_MAKERS[name](chunks, field.type) for name, field in zip(self._names, self._schema, strict=True)
        ]
        if not arrays:  # count() of a query without columns
            return pa.RecordBatch.from_struct_array(pa.array([{}] * sum(map(len, chunks)), pa.struct([])))
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)


def _bytes_column(name: str) -> Any:
    def make(chunks: list[Rows], kind: Any) -> Any:
        import pyarrow as pa

        parts = [chunk.column(name) for chunk in chunks]
        if all(part is None for part in parts):
            return pa.nulls(sum(map(len, chunks)), kind)
        found = [
            pa.nulls(len(chunk), kind) if part is None else part if part.type == kind else part.cast(kind)
            for chunk, part in zip(chunks, parts, strict=True)
        ]
        return found[0] if len(found) == 1 else pa.concat_arrays(found)

    return make


def _headers(chunks: list[Rows], kind: Any) -> Any:
    import pyarrow.compute as pc

    found = _bytes_column(_HEADERS)(chunks, kind)
    lengths = pc.list_value_length(found)
    return pc.if_else(pc.equal(lengths, 0), None, found) if pc.any(pc.equal(lengths, 0)).as_py() else found


def _offsets(chunks: list[Rows], kind: Any) -> Any:
    import numpy as np
    import pyarrow as pa

    parts = [
        np.arange(chunk.first_offset, chunk.first_offset + len(chunk), dtype=np.int64)
        if chunk.offsets is None
        else chunk.offsets
        for chunk in chunks
    ]
    return pa.array(np.concatenate(parts) if len(parts) > 1 else parts[0], kind)


def _timestamps(chunks: list[Rows], kind: Any) -> Any:
    import numpy as np
    import pyarrow as pa

    times_us = np.empty(sum(map(len, chunks)), np.int64)
    at = 0
    for chunk in chunks:
        one_ms = chunk.timestamp_ms
        part_ms = chunk.column("timestamp_ms").to_numpy() if one_ms is None else one_ms
        if len(chunk) and (np.max(part_ms) > _MAX_MS or np.min(part_ms) < -_MAX_MS):
            raise ValueError(_beyond_spark(chunk, np.broadcast_to(part_ms, len(chunk))))
        np.multiply(part_ms, 1000, out=times_us[at : at + len(chunk)])
        at += len(chunk)
    return pa.Array.from_buffers(kind, len(times_us), [None, pa.py_buffer(times_us)], 0)


def _beyond_spark(chunk: Rows, times_ms: Any) -> str:
    """Return the message that names the record with a time beyond Spark's range, and says how to read it anyway."""
    import numpy as np

    at = int(np.argmax((times_ms > _MAX_MS) | (times_ms < -_MAX_MS)))
    offset = chunk.first_offset + at if chunk.offsets is None else int(chunk.offsets[at])
    return (
        f"{chunk.topic_partition}: the record at offset {offset} has the timestamp {int(times_ms[at])} ms, which is "
        "beyond Spark's microseconds of 64 bits. To read such records leave the column timestamp out, with "
        '.schema("key binary, value binary, topic string, partition int, offset bigint") before load()'
    )


def _timestamp_types(chunks: list[Rows], kind: Any) -> Any:
    import numpy as np
    import pyarrow as pa

    from raftlog.format import Attributes

    stamped = [bool(chunk.header.attributes & Attributes.LOG_APPEND_TIME) for chunk in chunks]
    return pa.array(np.repeat(np.array(stamped, np.int32), [len(chunk) for chunk in chunks]), kind)


def _place_column(name: str) -> Any:
    def make(chunks: list[Rows], kind: Any) -> Any:
        rows = sum(map(len, chunks))
        return _constant(getattr(chunks[0].topic_partition, name), _rounded(rows), kind).slice(0, rows)

    return make


def _rounded(rows: int) -> int:
    """Round up to a power of two, so that a few cached arrays serve all sizes."""
    return max(1024, 1 << (rows - 1).bit_length())


@lru_cache(maxsize=32)
def _constant(value: str | int, rows: int, kind: Any) -> Any:
    import pyarrow as pa

    return pa.repeat(pa.scalar(value, kind), rows)


_COLUMN_MAKERS: Final = {
    "key": _bytes_column("key"),
    "value": _bytes_column("value"),
    "topic": _place_column("topic"),
    "partition": _place_column("partition"),
    "offset": _offsets,
    "timestamp": _timestamps,
    "timestamptype": _timestamp_types,
    _HEADERS: _headers,
}
