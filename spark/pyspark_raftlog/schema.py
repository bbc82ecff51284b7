"""The sink's columns, and how a query's Arrow batches become batches for the producer.

    column     Spark type                                  meaning
    value      binary or string                            required; null is a tombstone
    key        binary or string                            decides the partition
    headers    array<struct<key: string, value: binary>>
    topic      string                                      required without the option `topic`, which wins
    partition  int                                         null or absent: chosen by the key, or sticky
    timestamp  timestamp                                   null or absent: the time of sending

`offset` and `timestampType`, which a raftlog or Kafka source yields, are ignored.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark_raftlog.options import SinkOptions
from pyspark_raftlog.values import did_you_mean

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

_EXPECTED = {
    "value": ("binary", "string"),
    "key": ("binary", "string"),
    "headers": ("array<struct<key:string,value:binary>>",),
    "topic": ("string",),
    "partition": ("int",),
    "timestamp": ("timestamp",),
}
_ADVICE = {
    "value": "cast it to string or binary, or use to_json",
    "key": "cast it to string or binary",
    "headers": "build it with array(struct(lit(name).alias('key'), value.cast('binary').alias('value')))",
    "topic": "cast it to string",
    "partition": "cast it to int",
    "timestamp": "cast it to timestamp",
}
_PASSED_OVER = frozenset({"offset", "timestamptype"})


@dataclass(frozen=True, slots=True)
class SinkSchema:
    """The sink's columns that a query has, as (name for the producer, position in the query's batches)."""

    columns: tuple[tuple[str, int], ...]
    topic_position: int | None
    """Position of the topic column; None if the option sets the topic."""
    topic: str | None

    @staticmethod
    def check(schema: StructType, options: SinkOptions) -> SinkSchema:
        """Check a query's columns, and return their positions.

        Raises:
            ValueError: a column is missing, of another type, or unknown; the message says how to change the query.
        """
        if "value" not in (name.lower() for name in schema.names):
            raise ValueError(
                f"the query has no column value, only {', '.join(schema.names) or 'no columns'}; select the content of "
                'records, for example to_json(struct("*")).alias("value")'
            )
        positions: dict[str, int] = {}
        for position, field in enumerate(schema.fields):
            name = field.name.lower()
            if name in _PASSED_OVER:
                continue
            if name not in _EXPECTED:
                raise ValueError(_unknown(field.name))
            if name in positions:
                raise ValueError(f"the query has two columns {name}; drop or rename one")
            found = field.dataType.simpleString()
            if found not in _EXPECTED[name]:
                wanted = " or ".join(_EXPECTED[name])
                raise ValueError(f"column {field.name} has the type {found}, expected {wanted}; {_ADVICE[name]}")
            positions[name] = position
        topic_position = positions.pop("topic", None)
        if options.topic is not None:
            topic_position = None
        elif topic_position is None:
            raise ValueError('the topic is missing; add option("topic", ...) or a column topic')
        return SinkSchema(tuple(positions.items()), topic_position, options.topic)

    def split(self, batch: Any) -> Iterator[tuple[str, Any]]:
        """Yield (topic, RecordBatch for the producer) of an Arrow batch of the query; rows keep their order.

        Raises:
            ValueError: a row's topic is null.
        """
        import pyarrow as pa

        names = [name for name, _ in self.columns]
        arrays = [_plain(batch.column(position)) for _, position in self.columns]
        records = pa.RecordBatch.from_arrays(arrays, names=names)
        if self.topic_position is None:
            assert self.topic is not None
            yield self.topic, records
        else:
            yield from _by_topic(batch.column(self.topic_position), records)


def _plain(array: Any) -> Any:
    """Return strings as their UTF-8 bytes, and other arrays unchanged."""
    import pyarrow as pa

    if pa.types.is_string(array.type) or pa.types.is_large_string(array.type) or pa.types.is_large_binary(array.type):
        return array.cast(pa.binary())
    return array


def _by_topic(topics: Any, records: Any) -> Iterator[tuple[str, Any]]:
    import numpy as np
    import pyarrow.compute as pc

    if topics.null_count:
        raise ValueError(
            f"{topics.null_count} rows have null in column topic; filter them out, or set the option topic"
        )
    encoded = topics.dictionary_encode()
    names = encoded.dictionary.to_pylist()
    if len(names) > 1:
        order = pc.sort_indices(encoded.indices)  # stable: rows of one topic keep their order
        records = records.take(order)
    ends = np.cumsum(np.bincount(encoded.indices.to_numpy(zero_copy_only=False), minlength=len(names)))
    start = 0
    for name, end in zip(names, ends.tolist(), strict=True):
        yield name, records.slice(start, end - start)
        start = end


def _unknown(name: str) -> str:
    advice = did_you_mean(name, _EXPECTED, f"the sink's columns are {', '.join(_EXPECTED)}.")
    return f"the raftlog sink has no column {name}; {advice} Drop it, or put it into value, for example with to_json"
