"""Offsets as Spark stores them, and the ranges of offsets that a trigger or a batch query reads.

Offsets have the form of Kafka's source, `{"events": {"0": 23, "1": 42}}`, with an additional entry `"@topic_ids"`: the
id of each topic, so that a topic that was deleted and created again is not taken for the old one. Topic names have no
@.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.datasource import InputPartition

from raftlog.types import TopicPartition

if TYPE_CHECKING:
    from pyspark.sql.streaming.listener import StreamingQueryProgress

_TOPIC_IDS: Final = "@topic_ids"


@dataclass(frozen=True)
class Offsets:
    """A position in each partition, and the id (hex) of each topic if known."""

    positions: Mapping[TopicPartition, int]
    topic_ids: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the offsets for Spark's checkpoint, sorted by partition: equal offsets give equal text."""
        found: dict[str, Any] = {}
        for part in sorted(self.positions):
            found.setdefault(part.topic, {})[str(part.partition)] = self.positions[part]
        found[_TOPIC_IDS] = {topic: self.topic_ids[topic] for topic in found if topic in self.topic_ids}
        return found

    @staticmethod
    def from_json(found: Mapping[str, Any]) -> Offsets:
        """Return offsets from the result of `to_json`, or from Kafka's form, which has no ids.

        Raises:
            ValueError: it is neither.
        """
        try:
            topics = {topic: parts for topic, parts in found.items() if topic != _TOPIC_IDS}
            positions = {
                TopicPartition(topic, int(partition)): int(offset)
                for topic, parts in topics.items()
                for partition, offset in parts.items()
            }
            return Offsets(positions, {str(topic): str(name) for topic, name in found.get(_TOPIC_IDS, {}).items()})
        except (AttributeError, TypeError, ValueError):
            raise ValueError(
                f"these are not offsets of a raftlog source: {found}; the checkpoint belongs to another query, give "
                "this query its own checkpointLocation"
            ) from None


@dataclass(frozen=True)
class Range(InputPartition):
    """The offsets that one task reads, from `start` to before `end`."""

    topic: str
    partition: int
    start: int
    end: int
    topic_id: str | None = None

    @property
    def topic_partition(self) -> TopicPartition:
        """The partition of the topic."""
        return TopicPartition(self.topic, self.partition)

    @property
    def size(self) -> int:
        """The number of offsets, which may be higher than that of records."""
        return self.end - self.start

    def cut(self, parts: int) -> list[Range]:
        """Return the range cut into up to `parts` pieces of about the same size, none of them empty."""
        parts = max(1, min(parts, self.size))
        bounds = [self.start + self.size * index // parts for index in range(parts + 1)]
        return [Range(self.topic, self.partition, start, end, self.topic_id) for start, end in pairwise(bounds)]


def lag(progress: StreamingQueryProgress) -> dict[TopicPartition, int]:
    """Return how many offsets a query has left to read in each partition; see `pyspark_raftlog.lag`."""
    found: dict[TopicPartition, int] = {}
    for source in progress.sources:
        # Text in some versions of PySpark, its value in others; None or "null" without any.
        end, latest = (
            json.loads(each) if isinstance(each, str) else each for each in (source.endOffset, source.latestOffset)
        )
        if not isinstance(end, dict) or _TOPIC_IDS not in end or not isinstance(latest, dict):
            continue
        read, there = Offsets.from_json(end).positions, Offsets.from_json(latest).positions
        found |= {part: max(0, last - read.get(part, 0)) for part, last in there.items()}
    return found


def limited(
    start: Mapping[TopicPartition, int], end: Mapping[TopicPartition, int], max_rows: int
) -> dict[TopicPartition, int]:
    """Return the end offsets for reading about `max_rows` offsets in all, shared in proportion to partitions' lags.

    As in Kafka's source, every partition with a lag gets at least one offset, so the sum can be slightly higher.
    `start` has every partition of `end`.
    """
    sizes = {part: max(0, last - start[part]) for part, last in end.items()}
    total = sum(sizes.values())
    if total <= max_rows:
        return dict(end)
    # At least one: a query always makes progress.
    shares = {part: max(1, max_rows * size // total) for part, size in sizes.items() if size}
    return {part: min(last, start[part] + shares[part]) if sizes[part] else last for part, last in end.items()}


def split(ranges: Sequence[Range], min_partitions: int | None, max_records: int | None) -> list[Range]:
    """Return the ranges cut into pieces of at most `max_records` offsets, about `min_partitions` of them or more.

    Large ranges are cut, small ones stay whole (as Kafka's source does, SPARK-36576). Empty ranges are left out.
    """
    whole = [each for each in ranges if each.size > 0]
    if max_records is not None:
        whole = [part for each in whole for part in each.cut(-(-each.size // max_records))]
    if min_partitions is None or len(whole) >= min_partitions:
        return whole
    total = sum(each.size for each in whole)
    small = {each for each in whole if _share(each.size, total, min_partitions) == 1}
    large_total = sum(each.size for each in whole if each not in small)
    for_large = max(1, min_partitions - len(small))
    return [
        part for each in whole for part in each.cut(1 if each in small else _share(each.size, large_total, for_large))
    ]


def _share(size: int, total: int, partitions: int) -> int:
    """Return a range's share of `partitions`, rounded to the nearest number, at least 1."""
    return max(1, (2 * size * partitions + total) // (2 * total))
