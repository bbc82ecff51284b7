"""The source: `spark.readStream.format("raftlog")` and `spark.read.format("raftlog")`.

The driver plans ranges of offsets, tasks read them. A range is the same whenever it is read, so a batch that Spark
repeats has the same rows: with a sink that is exactly once, so is the query.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)

from pyspark_raftlog.planner import Planner
from pyspark_raftlog.ranges import Offsets, Range, limited, split
from pyspark_raftlog.read_options import SourceOptions
from pyspark_raftlog.tasks import read_range
from raftlog.types import TopicPartition

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


class _Source:
    """What the batch and the streaming source share. Pickled to the tasks before anything is asked of the cluster."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Yield the rows of one range as Arrow batches.

        Raises:
            RaftlogError: it cannot be read; Spark may try the task again.
        """
        if isinstance(partition, Range):  # Spark makes a task of its own for a query that has none
            yield from read_range(self._options, self._schema, partition)

    def _split(self, ranges: Sequence[Range]) -> list[Range]:
        return split(ranges, self._options.min_partitions, self._options.max_records)


class BatchSource(_Source, DataSourceReader):
    """The source of `spark.read.format("raftlog")`."""

    def partitions(self) -> list[InputPartition]:
        """Return the ranges that the query reads, of partitions that are there now.

        Raises:
            ValueError, DataLoss, RaftlogError: they cannot be told.
        """
        planner = Planner(self._options)
        try:
            end = planner.end()
            start, _ = planner.start()
        finally:
            planner.close()
        return [*self._split(_ranges(start, end))]


class StreamSource(_Source, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The source of `spark.readStream.format("raftlog")`.

    Spark asks one object, in one process, for offsets and ranges, from a query's start to its stop; others, which are
    asked for nothing, are pickled to the tasks.
    """

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        super().__init__(options, schema)
        self._made: Planner | None = None
        self._initial: dict[str, Any] | None = None
        self._initial_stays = True
        self._begun = False
        self._target: Offsets | None = None
        """Where a query with the trigger AvailableNow ends."""
        self._seen: dict[str, Any] | None = None
        """The ends of the partitions when they were last asked for."""
        self._last_batch_s = time.monotonic()

    @property
    def _planner(self) -> Planner:
        self._made = self._made or Planner(self._options)
        return self._made

    def initialOffset(self) -> dict[str, Any]:
        """Return where a new query begins.

        Raises:
            ValueError, DataLoss, RaftlogError: it cannot be told.
        """
        if self._initial is None:  # Spark asks twice, and means the same
            start, self._initial_stays = self._planner.start()
            self._initial = start.to_json()
        return self._initial

    def getDefaultReadLimit(self) -> ReadLimit:
        """Return what the options say of the size of a trigger."""
        if self._options.max_offsets is not None:
            return ReadMaxRows(self._options.max_offsets)
        if self._options.min_offsets is not None:
            return ReadMinRows(self._options.min_offsets)
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:
        """Note where the partitions end now: nothing behind is read."""
        self._target = self._planner.ends(fresh=True)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Return how far the next batch reads.

        A query that begins at `latest` has an empty batch first. Spark does not write down where batch 0 begins: if it
        died in it, the new one would ask for `latest` again, and what came in between would be lost. An empty batch 0
        writes down its end, where batch 1 goes on.

        Raises:
            DataLoss, RaftlogError: the cluster is away, or records are.
        """
        if not self._begun and not self._initial_stays and start == self._initial:
            self._begun = True
            return start
        self._begun = True
        begin, end = self._planner.carried_on(Offsets.from_json(start), self._planner.ends())
        self._seen = end.to_json()
        if self._target is not None:
            begin, end = self._within_target(begin, end)
        positions = dict(end.positions)
        if not isinstance(limit, ReadAllAvailable):
            if self._is_too_little(begin, end):
                return start
            if isinstance(limit, ReadMaxRows):
                positions = limited(begin.positions, end.positions, limit.max_rows)
        if positions == begin.positions and begin == Offsets.from_json(start):
            return start
        return Offsets(positions, end.topic_ids).to_json()

    def _within_target(self, begin: Offsets, end: Offsets) -> tuple[Offsets, Offsets]:
        """Leave out what has come since the query began, whole partitions among it."""
        assert self._target is not None
        target = self._target
        old = {
            part
            for part in end.positions
            if part in target.positions and target.topic_ids.get(part.topic) == end.topic_ids.get(part.topic)
        }
        starts = {part: begin.positions[part] for part in end.positions if part in old}
        ends = {part: max(starts[part], min(end.positions[part], target.positions[part])) for part in starts}
        return Offsets(starts, end.topic_ids), Offsets(ends, end.topic_ids)

    def _is_too_little(self, begin: Offsets, end: Offsets) -> bool:
        """Whether a trigger waits for `minOffsetsPerTrigger`, which `maxTriggerDelay` ends."""
        least = self._options.min_offsets
        if least is None or self._target is not None:  # AvailableNow would never end
            return False
        now_s = time.monotonic()
        there = sum(end.positions[part] - begin.positions[part] for part in end.positions)
        if there < least and (now_s - self._last_batch_s) * 1000 < self._options.max_delay_ms:
            return True
        self._last_batch_s = now_s
        return False

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """Return the ends of the partitions, for the query's progress: what lies behind its end offset is the lag."""
        return self._seen

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """Return the ranges of one batch.

        Raises:
            DataLoss: records between are gone for certain, and `failOnDataLoss` is true.
        """
        first, last = Offsets.from_json(start), Offsets.from_json(end)
        planner = self._planner
        made_again = {
            topic for topic, topic_id in first.topic_ids.items() if last.topic_ids.get(topic, topic_id) != topic_id
        }
        new = [part for part in last.positions if part not in first.positions or part.topic in made_again]
        begin = {part: at for part, at in first.positions.items() if part.topic not in made_again}
        begin |= planner.earliest(new)
        if start != self._initial or self._initial_stays:
            for part, at in sorted(begin.items()):
                if at > last.positions.get(part, at):
                    planner.lose(f"{part} was to be read from {at} to {last.positions[part]}: its log was cut")
        return [*self._split(_ranges(Offsets(begin, last.topic_ids), last))]

    def commit(self, end: dict[str, Any]) -> None:
        """Do nothing: the checkpoint has the offsets, and the log keeps its records."""

    def stop(self) -> None:
        """Close the connections."""
        if self._made is not None:
            self._made.close()


def _ranges(start: Offsets, end: Offsets) -> list[Range]:
    """Return what lies between, in order; nothing where a start is not before its end."""

    def between(part: TopicPartition) -> Range:
        return Range(*part, start.positions[part], end.positions[part], end.topic_ids.get(part.topic))

    both = sorted(part for part in end.positions if part in start.positions)
    return [between(part) for part in both if start.positions[part] < end.positions[part]]
