"""Rows as an Arrow table, without copying values: one chunk for each batch, constant columns from shared buffers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, Final

import numpy as np
import pyarrow as pa

from raftlog._core.fetched import Rows
from raftlog.format import HEADERS_TYPE

TIMESTAMP_TYPE: Final = pa.timestamp("ms", tz="UTC")
TABLE_SCHEMA: Final = pa.schema(
    [
        pa.field("topic", pa.dictionary(pa.int32(), pa.utf8()), nullable=False),
        pa.field("partition", pa.int32(), nullable=False),
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("timestamp", TIMESTAMP_TYPE, nullable=False),
        pa.field("key", pa.binary()),
        pa.field("value", pa.binary()),
        pa.field("headers", HEADERS_TYPE),
    ]
)
"""What `poll_arrow` returns."""

_TOPIC_TYPE: Final = TABLE_SCHEMA.field("topic").type


def _rounded(rows: int) -> int:
    """Round up to a power of two, so that few buffers serve all sizes."""
    return max(1024, 1 << (rows - 1).bit_length())


@lru_cache(maxsize=256)
def _constant_buffer(value: int, rows: int) -> Any:
    return pa.py_buffer(np.full(rows, value, np.int32))


@lru_cache(maxsize=32)
def _nulls(kind: Any, rows: int) -> Any:
    return pa.nulls(rows, kind)


def _constant(value: int, rows: int) -> Any:
    return pa.Array.from_buffers(pa.int32(), rows, [None, _constant_buffer(value, _rounded(rows))], 0)


def table(chunks: Iterable[Rows], topics: Sequence[str]) -> Any:
    """Return the rows as a `pyarrow.Table` of `TABLE_SCHEMA`.

    `topics` is the dictionary of the topic column; it names every topic that occurs.
    """
    dictionary = pa.array(topics, pa.utf8())
    index_of = {topic: index for index, topic in enumerate(topics)}
    batches = [_batch(rows, index_of[rows.topic_partition.topic], dictionary) for rows in chunks]
    return pa.Table.from_batches(batches, schema=TABLE_SCHEMA)


def _batch(rows: Rows, topic_index: int, dictionary: Any) -> Any:
    count = len(rows)
    at_ms = rows.timestamp_ms
    if rows.offsets is not None:
        offsets = rows.offsets
    else:
        offsets = np.arange(rows.first_offset, rows.first_offset + count, dtype=np.int64)
    if at_ms is None:
        timestamps = rows.column("timestamp_ms").view(TIMESTAMP_TYPE)
    else:
        timestamps = _int64_array(np.full(count, at_ms, np.int64), TIMESTAMP_TYPE)
    key, headers = rows.column("key"), rows.column("headers")
    return pa.RecordBatch.from_arrays(
        [
            pa.DictionaryArray.from_arrays(_constant(topic_index, count), dictionary, safe=False),
            _constant(rows.topic_partition.partition, count),
            _int64_array(offsets, pa.int64()),
            timestamps,
            key if key is not None else _nulls(pa.binary(), _rounded(count)).slice(0, count),
            rows.column("value"),
            headers if headers is not None else _nulls(HEADERS_TYPE, _rounded(count)).slice(0, count),
        ],
        schema=TABLE_SCHEMA,
    )


def _int64_array(numbers: Any, kind: Any) -> Any:
    return pa.Array.from_buffers(kind, len(numbers), [None, pa.py_buffer(numbers)], 0)
