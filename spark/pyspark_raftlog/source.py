"""The source: `spark.readStream.format("raftlog")` and `spark.read.format("raftlog")`.

The driver plans ranges of offsets (`Planner`), and tasks read them as Arrow batches (`read_range`). A range has the
same rows whenever it is read, so a batch that Spark repeats has the same rows too: with an exactly-once sink, the query
is exactly once.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)

from pyspark_raftlog.columns import BatchMaker
from pyspark_raftlog.ranges import Offsets, Range, limited, split
from pyspark_raftlog.read_options import EARLIEST, LATEST, OFFSETS, TIME, Bound, SourceOptions
from raftlog.types import TopicPartition

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from raftlog._core.cluster import TopicView
    from raftlog._core.positions import Rows
    from raftlog._range_reader import RangeReader


logger = logging.getLogger(__name__)

_LATEST: Final = -1
_EARLIEST: Final = -2
"""The values that the client's look-ups take for the ends of a partition."""
_AGAIN_S: Final = 0.2
_TRIES: Final = 5


class DataLoss(RuntimeError):
    """Records that the query should read are gone."""


class _Again:
    """Tries with pauses: at least one, and further ones while the pauses of `_TRIES` are not over."""

    def __init__(self) -> None:
        self._until_s = 0.0

    def pause(self) -> bool:
        """Pause before the next try; return False if there is none."""
        now_s = time.monotonic()
        if self._until_s and now_s >= self._until_s:
            return False
        self._until_s = self._until_s or now_s + (_TRIES - 1) * _AGAIN_S
        time.sleep(_AGAIN_S)
        return True


class Planner:
    """Asks the cluster for partitions and offsets. A source creates it when first needed, and never pickles it."""

    def __init__(self, options: SourceOptions) -> None:
        from raftlog._range_reader import RangeReader

        self.options = options
        self._pattern = re.compile(options.pattern) if options.pattern is not None else None
        self._reader: RangeReader = RangeReader(options.bootstrap, config=dict(options.consumer))

    def close(self) -> None:
        """Close the connections."""
        self._reader.close()

    def lose(self, what: str) -> None:
        """Report lost records: with an error, or, if `failOnDataLoss` is false, with a warning in the log.

        Raises:
            DataLoss: `failOnDataLoss` is true.
        """
        if self.options.fail_on_data_loss:
            raise DataLoss(
                f"{what}. Records that this query should read are lost; to continue without them set "
                'option("failOnDataLoss", "false")'
            )
        logger.warning("%s; continuing, as failOnDataLoss=false", what)

    # Partitions

    def partitions(self, *, fresh: bool = False, at_start: bool = False) -> dict[TopicPartition, str]:
        """Return the partitions that the query reads now, in order, with the ids (hex) of their topics.

        Raises:
            UnknownTopicOrPartition: with `at_start`, if a topic or partition in the query's options does not exist.
        """
        from raftlog.errors import UnknownTopicOrPartition

        options = self.options
        names = options.topics if options.topics is not None else sorted({name for name, _ in options.assigned or ()})
        views = self._reader.topics(names, self._pattern, fresh=fresh)
        if self._pattern is None and at_start:
            for name in names:
                if name not in views:
                    raise UnknownTopicOrPartition(
                        f"topic {name!r} does not exist; create it before the query starts, for example with "
                        f"`raftlog topic create {name}`, or correct the option"
                    )
        if options.assigned is None:
            return {
                TopicPartition(name, part.partition): view.topic_id.hex()
                for name, view in sorted(views.items())
                for part in view.partitions
            }
        return {part: view.topic_id.hex() for part, view in self._assigned(views, at_start)}

    def _assigned(self, views: Mapping[str, TopicView], at_start: bool) -> Iterable[tuple[TopicPartition, TopicView]]:
        from raftlog.errors import UnknownTopicOrPartition

        for name, partition in self.options.assigned or ():
            view = views.get(name)
            if view is not None and partition < len(view.partitions):
                yield TopicPartition(name, partition), view
            elif at_start:
                raise UnknownTopicOrPartition(
                    f"partition {name}-{partition} does not exist; numbers begin at 0; correct the option assign"
                )

    # Bounds

    def ends(self, *, fresh: bool = False) -> Offsets:
        """Return the end of each partition that the query reads: the offset after its last readable record."""
        return self._at(self.partitions(fresh=fresh), _LATEST)

    def _at(self, partitions: Mapping[TopicPartition, str], which: int) -> Offsets:
        """Return the earliest or latest offsets of partitions, together with the ids of exactly these topics."""
        while True:
            ids = {part.topic: topic_id for part, topic_id in partitions.items()}
            found = self._find_existing(dict.fromkeys(partitions, which))
            changed = {topic for topic, known in ids.items() if self._id_of(topic) != known}
            if not changed:
                return Offsets({part: found[part] for part in partitions}, ids)
            logger.info(
                "topics were deleted, or deleted and created again, during the look-up of their offsets: %s",
                ", ".join(sorted(changed)),
            )
            partitions = self.partitions(fresh=True)

    def _id_of(self, topic: str) -> str:
        topic_id = self._reader.topic_id(topic)
        return "" if topic_id is None else topic_id.hex()

    def _find(self, wanted: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
        """Return offsets; a partition without records from the time on is left out."""
        found = self._reader.find(wanted) if wanted else {}
        return {part: answer.offset for part, answer in found.items() if answer is not None}

    def _find_existing(self, wanted: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
        """As `_find`, but leave out partitions that were deleted since the client's last look at the cluster."""
        from raftlog.errors import UnknownTopicOrPartition

        try:
            return self._find(wanted)
        except UnknownTopicOrPartition:
            there = self.partitions(fresh=True)
            if wanted.keys() <= there.keys():
                raise
            return self._find({part: at for part, at in wanted.items() if part in there})

    def earliest(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """Return the first offsets of the partitions that exist."""
        wanted = list(partitions)
        there = self.partitions() if wanted else {}
        return self._find_existing(dict.fromkeys([part for part in wanted if part in there], _EARLIEST))

    def start(self) -> tuple[Offsets, bool]:
        """Return the start of the query, and whether a later call returns the same: not with `latest`.

        Raises:
            ValueError: offsets or times are missing for partitions, or given for other partitions; or a partition has
                no record at or after the time.
            DataLoss: an offset is not in the log.
        """
        return self._resolve(self.options.start)

    def end(self) -> Offsets:
        """Return the end of a batch query. Raises as `start`."""
        return self._resolve(self.options.end)[0]

    def _resolve(self, bound: Bound) -> tuple[Offsets, bool]:
        partitions = self.partitions(fresh=True, at_start=True)
        if bound.kind in (EARLIEST, LATEST):
            return self._at(partitions, _LATEST if bound.kind == LATEST else _EARLIEST), bound.kind == EARLIEST
        ids = {part.topic: topic_id for part, topic_id in partitions.items()}
        if bound.kind == TIME:
            positions, stays = self._by_time(bound, dict.fromkeys(partitions, bound.time_ms))
        else:
            numbers = _for_all(bound, partitions)
            positions, stays = (self._by_offset if bound.kind == OFFSETS else self._by_time)(bound, numbers)
        return Offsets(positions, ids), stays

    def _by_time(self, bound: Bound, times_ms: Mapping[TopicPartition, int]) -> tuple[dict[TopicPartition, int], bool]:
        found = self._find(times_ms)
        beyond = sorted(times_ms.keys() - found.keys())
        if beyond and not bound.or_latest:
            raise ValueError(
                f"{bound.option}: {beyond[0]} has no record from {times_ms[beyond[0]]} on; choose an earlier time, or "
                "set startingOffsetsByTimestampStrategy=latest to begin at its end"
            )
        return {**found, **self._find(dict.fromkeys(beyond, _LATEST))}, not beyond

    def _by_offset(self, bound: Bound, numbers: Mapping[TopicPartition, int]) -> tuple[dict[TopicPartition, int], bool]:
        first = self.earliest(numbers)
        last = self._find(dict.fromkeys(numbers, _LATEST))
        found: dict[TopicPartition, int] = {}
        for part, number in numbers.items():
            if number < 0:
                found[part] = last[part] if number == _LATEST else first[part]
                continue
            found[part] = min(max(number, first[part]), last[part])
            if found[part] != number:
                self.lose(f"{bound.option}: {part} has offsets from {first[part]} up to {last[part]}, not {number}")
        return found, _LATEST not in numbers.values()

    # Progress

    def carried_on(self, start: Offsets, now: Offsets) -> tuple[Offsets, Offsets]:
        """Return the next offset and the end of each existing partition; new partitions begin at their first record.

        Raises:
            DataLoss: partitions are gone, a topic was deleted and created again, or a log has become shorter, and
                `failOnDataLoss` is true.
        """
        now = self._with_all(start, now)
        made_again = _made_again(start, now)
        for topic in sorted(made_again):
            self.lose(f"topic {topic} was deleted and created again: its offsets now belong to other records")
        self._lose_gone(part for part in start.positions if part not in now.positions and part.topic not in made_again)
        going_on = {
            part: position
            for part, position in start.positions.items()
            if part in now.positions and part.topic not in made_again
        }
        now = self._not_shorter(going_on, now)
        new = self.first_offsets((part for part in now.positions if part not in going_on), made_again)
        positions = new | {part: min(position, now.positions[part]) for part, position in going_on.items()}
        ends = {part: max(now.positions[part], positions[part]) for part in positions}
        return Offsets(positions, now.topic_ids), Offsets(ends, now.topic_ids)

    def _with_all(self, start: Offsets, now: Offsets) -> Offsets:
        """Return `now`, asked for again while it lacks partitions of `start`: the broker that answered may lag."""
        again = _Again()
        while (start.positions.keys() - now.positions.keys() or _made_again(start, now)) and again.pause():
            now = self.ends(fresh=True)
        return now

    def _lose_gone(self, parts: Iterable[TopicPartition]) -> None:
        if gone := sorted(parts):
            self.lose(f"partitions are gone: {', '.join(map(str, gone))}")

    def first_offsets(self, new: Iterable[TopicPartition], made_again: Set[str]) -> dict[TopicPartition, int]:
        """Return the first offsets of new partitions. `made_again`: topics whose loss was reported already.

        Raises:
            DataLoss: one is gone or has lost its first records, and `failOnDataLoss` is true.
        """
        wanted = set(new)
        found = self.earliest(wanted)
        again = _Again()
        while found.keys() != wanted and again.pause():  # the broker that answered may lag
            self.partitions(fresh=True)
            found = self.earliest(wanted)
        self._lose_gone(wanted - found.keys())
        for part, first in sorted(found.items()):
            if first > 0 and part.topic not in made_again:
                self.lose(f"partition {part} is new and begins at {first}, not at 0")
        return found

    def _not_shorter(self, positions: Mapping[TopicPartition, int], now: Offsets) -> Offsets:
        for tries_left in reversed(range(_TRIES)):
            shorter = [part for part, position in positions.items() if now.positions[part] < position]
            if not shorter:
                return now
            if tries_left:  # a new leader may not yet know the end
                time.sleep(_AGAIN_S)
                again = self._find_existing(dict.fromkeys(shorter, _LATEST))
                now = Offsets({**now.positions, **again}, now.topic_ids)
        for part in sorted(shorter):
            self.lose(
                f"{part} ends at {now.positions[part]}, but was read up to {positions[part]}: its log was truncated"
            )
        return now


def _made_again(before: Offsets, now: Offsets) -> set[str]:
    """Return the topics that have another id now."""
    return {topic for topic, topic_id in before.topic_ids.items() if now.topic_ids.get(topic, topic_id) != topic_id}


def _of_topics(offsets: Offsets, now: Offsets) -> dict[TopicPartition, int]:
    """Return the offsets that belong to the topics of `now`, not to others that had their names."""
    other = _made_again(offsets, now)
    return {part: at for part, at in offsets.positions.items() if part.topic not in other}


def _for_all(bound: Bound, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
    """Return the numbers of an option, which must name exactly the partitions that are read.

    Raises:
        ValueError: the option names too few or too many partitions.
    """
    numbers = {TopicPartition(*part): number for part, number in bound.numbers}
    wanted = set(partitions)
    for problem, parts in (
        ("lacks", wanted - numbers.keys()),
        ("names partitions that are not read:", numbers.keys() - wanted),
    ):
        if parts:
            raise ValueError(
                f"{bound.option} {problem} {', '.join(map(str, sorted(parts)))}; it must name exactly the partitions "
                "that are read"
            )
    return numbers


_Key = tuple[int, str, tuple[tuple[str, str], ...]]

_idle: dict[_Key, RangeReader] = {}
"""The reader that no task uses at the moment, by process id, so that a forked child does not use its parent's. A Python
worker of Spark runs many tasks, and keeps the connections between them."""


def read_range(options: SourceOptions, schema: StructType, wanted: Range) -> Iterator[Any]:
    """Yield the rows of a range as `pyarrow.RecordBatch`es with the columns of `schema`.

    Raises:
        DataLoss: rows are gone, and `failOnDataLoss` is true.
        RaftlogError: the range cannot be read; Spark may retry the task.
    """
    from raftlog._range_reader import RangeReader

    key = (os.getpid(), options.bootstrap, options.consumer)
    reader = _idle.pop(key, None) or RangeReader(options.bootstrap, config=dict(options.consumer))
    try:
        yield from BatchMaker(schema).batches(_rows(reader, options, wanted))
    except BaseException:
        reader.close()  # its state is unknown: the next task gets a new one
        raise
    _keep(key, reader)


def _keep(key: _Key, reader: RangeReader) -> None:
    """Keep this reader for the next task, and close any other."""
    for other in list(_idle):
        found = _idle.pop(other)
        if other[0] == os.getpid():
            found.close()
    _idle[key] = reader


def _rows(reader: RangeReader, options: SourceOptions, wanted: Range) -> Iterator[Rows]:
    from raftlog.errors import OffsetOutOfRange, UnknownTopicId, UnknownTopicOrPartition

    part = wanted.topic_partition
    topic_id = bytes.fromhex(wanted.topic_id) if wanted.topic_id is not None else None
    position = wanted.start
    while position < wanted.end:
        try:
            for rows in reader.read(part, topic_id, position, wanted.end, options.read_timeout_s):
                yield rows
                position = rows.header.next_offset
            return
        except (OffsetOutOfRange, UnknownTopicId, UnknownTopicOrPartition) as error:
            what = f"{part}: some of the offsets {position} to {wanted.end - 1} are missing: {error}"
            if options.fail_on_data_loss:
                raise DataLoss(
                    f"{what}. They expired, or the topic was deleted; to continue without them set "
                    'option("failOnDataLoss", "false")'
                ) from error
            logger.warning("%s; continuing, as failOnDataLoss=false", what)
            if not isinstance(error, OffsetOutOfRange):
                return
            first = reader.beginning_offset(part)
            if first <= position:
                return  # the missing offsets are at the end
            position = first


class _Source:
    """The common part of batch and streaming source. Spark pickles it to tasks before it asks the cluster."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Yield the rows of one range as Arrow batches.

        Raises:
            RaftlogError: the range cannot be read; Spark may retry the task.
        """
        if isinstance(partition, Range):  # Spark creates a task even for a query without ranges
            yield from read_range(self._options, self._schema, partition)

    def _split(self, ranges: Sequence[Range]) -> list[Range]:
        return split(ranges, self._options.min_partitions, self._options.max_records)


class BatchSource(_Source, DataSourceReader):
    """The source of `spark.read.format("raftlog")`."""

    def partitions(self) -> list[InputPartition]:
        """Return the ranges of the existing partitions that the query reads.

        Raises:
            ValueError, DataLoss, RaftlogError: the ranges cannot be determined.
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

    Spark asks one object, in one process, for offsets and ranges from a query's start to its stop; the copies that it
    pickles to tasks only read.
    """

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        super().__init__(options, schema)
        self._made: Planner | None = None
        self._initial: dict[str, Any] | None = None
        self._initial_stays = True
        self._begun = False
        self._target: Offsets | None = None
        """The end of a query with the trigger AvailableNow."""
        self._seen: dict[str, Any] | None = None
        """The ends of the partitions at the last look-up."""
        self._last_batch_s = time.monotonic()

    @property
    def _planner(self) -> Planner:
        self._made = self._made or Planner(self._options)
        return self._made

    def initialOffset(self) -> dict[str, Any]:
        """Return the start of a new query.

        Raises:
            ValueError, DataLoss, RaftlogError: the start cannot be determined.
        """
        if self._initial is None:  # Spark asks twice, and expects the same answer
            start, self._initial_stays = self._planner.start()
            self._initial = start.to_json()
        return self._initial

    def getDefaultReadLimit(self) -> ReadLimit:
        """Return the limit of a trigger's size that the options set."""
        if self._options.max_offsets is not None:
            return ReadMaxRows(self._options.max_offsets)
        if self._options.min_offsets is not None:
            return ReadMinRows(self._options.min_offsets)
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:
        """Note the current ends of the partitions; the query reads nothing after them."""
        self._target = self._planner.ends(fresh=True)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Return the end of the next batch.

        A query that begins at `latest` has an empty batch first. Spark does not store the start of batch 0: if the
        query died in it, a restart would ask for `latest` again, and records in between would be lost. But Spark stores
        the end of an empty batch 0, where batch 1 begins.

        Raises:
            DataLoss, RaftlogError: records are lost, or the cluster does not answer.
        """
        if not self._begun and not self._initial_stays and start == self._initial:
            self._begun = True
            return start
        self._begun = True
        before = Offsets.from_json(start)
        begin, end = self._planner.carried_on(before, self._planner.ends())
        self._seen = end.to_json()
        if self._target is not None:
            begin, end = self._within_target(before, begin, end)
        positions = dict(end.positions)
        if not isinstance(limit, ReadAllAvailable):
            if self._is_too_little(begin, end):
                return start
            if isinstance(limit, ReadMaxRows):
                positions = limited(begin.positions, end.positions, limit.max_rows)
        if positions == begin.positions and begin == before:
            return start
        return Offsets(positions, end.topic_ids).to_json()

    def _within_target(self, before: Offsets, begin: Offsets, end: Offsets) -> tuple[Offsets, Offsets]:
        """Leave out records and partitions that were added since the query began.

        A partition of `before` that the target lacks stays where it is: without its place in the checkpoint a later
        query would read it from its first record.
        """
        assert self._target is not None
        last, kept = _of_topics(self._target, end), _of_topics(before, end)
        starts = {part: at for part, at in begin.positions.items() if part in last or part in kept}
        ends = {part: max(at, min(end.positions[part], last.get(part, at))) for part, at in starts.items()}
        return Offsets(starts, end.topic_ids), Offsets(ends, end.topic_ids)

    def _is_too_little(self, begin: Offsets, end: Offsets) -> bool:
        """Return whether the trigger still waits for `minOffsetsPerTrigger`, at most `maxTriggerDelay`."""
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
        """Return the ends of the partitions; the query's progress computes its lag from them."""
        return self._seen

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """Return the ranges of one batch.

        Raises:
            DataLoss: records of the batch are certainly gone, and `failOnDataLoss` is true.
        """
        first, last = Offsets.from_json(start), Offsets.from_json(end)
        planner = self._planner
        made_again = _made_again(first, last)
        new = [part for part in last.positions if part not in first.positions or part.topic in made_again]
        begin = {part: at for part, at in first.positions.items() if part.topic not in made_again}
        begin |= planner.first_offsets(new, made_again)  # asked again: records may have expired since `latestOffset`
        if start != self._initial or self._initial_stays:
            for part, at in sorted(begin.items()):
                if at > last.positions.get(part, at):
                    planner.lose(f"{part} should be read from {at} to {last.positions[part]}: its log was truncated")
        return [*self._split(_ranges(Offsets(begin, last.topic_ids), last))]

    def commit(self, end: dict[str, Any]) -> None:
        """Do nothing: the checkpoint has the offsets, and the log keeps its records."""

    def stop(self) -> None:
        """Close the connections."""
        if self._made is not None:
            self._made.close()


def _ranges(start: Offsets, end: Offsets) -> list[Range]:
    """Return the ranges between two sets of offsets, in order, without empty ones."""

    def between(part: TopicPartition) -> Range:
        return Range(*part, start.positions[part], end.positions[part], end.topic_ids.get(part.topic))

    both = sorted(part for part in end.positions if part in start.positions)
    return [between(part) for part in both if start.positions[part] < end.positions[part]]
