"""Offsets as Spark keeps them, and what a trigger or a query reads of them.

Spark's form of offsets is Kafka's, `{"events": {"0": 23, "1": 42}}`, with one entry more, `"@topic_ids"`: the id of
each topic, so that a topic which is deleted and made again is not taken for the old one. No topic's name has an @.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

from pyspark.sql.datasource import InputPartition

from raftlog.types import TopicPartition

_TOPIC_IDS: Final = "@topic_ids"


@dataclass(frozen=True)
class Offsets:
    """A position in each partition, and the id (hex) of each topic as far as it is known."""

    positions: Mapping[TopicPartition, int]
    topic_ids: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return what Spark writes to the checkpoint: equal offsets give equal text, in the order of partitions."""
        found: dict[str, Any] = {}
        for part in sorted(self.positions):
            found.setdefault(part.topic, {})[str(part.partition)] = self.positions[part]
        found[_TOPIC_IDS] = {topic: self.topic_ids[topic] for topic in found if topic in self.topic_ids}
        return found

    @staticmethod
    def from_json(found: Mapping[str, Any]) -> Offsets:
        """Return the offsets of what `to_json` made, or of Kafka's form, which has no ids.

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
                f"these are no offsets of a raftlog source: {found}; the checkpoint is that of another query, "
                "give this one a checkpointLocation of its own"
            ) from None


@dataclass(frozen=True)
class Range(InputPartition):
    """What one task reads: offsets from `start` up to and without `end`."""

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
        """How many offsets there are, which may be more than records."""
        return self.end - self.start

    def cut(self, parts: int) -> list[Range]:
        """Return the range in `parts` of about the same size; none is empty."""
        parts = max(1, min(parts, self.size))
        bounds = [self.start + self.size * index // parts for index in range(parts + 1)]
        return [Range(self.topic, self.partition, start, end, self.topic_id) for start, end in pairwise(bounds)]


def limited(
    start: Mapping[TopicPartition, int], end: Mapping[TopicPartition, int], max_rows: int
) -> dict[TopicPartition, int]:
    """Return how far to read so that it is about `max_rows` offsets, shared out by how far each partition is behind.

    A partition that is hardly behind is not starved: it gets one offset at least, so that the sum can be a little more
    (as Kafka's source has it). `start` has every partition of `end`.
    """
    sizes = {part: max(0, last - start[part]) for part, last in end.items()}
    total = sum(sizes.values())
    if total <= max_rows:
        return dict(end)
    # At least one: a query that may read something always gets on.
    shares = {part: max(1, max_rows * size // total) for part, size in sizes.items() if size}
    return {part: min(last, start[part] + shares[part]) if sizes[part] else last for part, last in end.items()}


def split(ranges: Sequence[Range], min_partitions: int | None, max_records: int | None) -> list[Range]:
    """Return the ranges cut so that none is above `max_records` offsets and there are about `min_partitions` of them.

    Large ranges are cut, small ones stay whole (as Kafka's source does, SPARK-36576). Empty ones are left out.
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
    """Return how many of `partitions` a range of this size gets, halves rounded up."""
    return max(1, (2 * size * partitions + total) // (2 * total))
