"""The executors' side of the source: reads the range of a task as Arrow batches."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pyspark_raftlog.columns import BatchMaker
from pyspark_raftlog.ranges import Range
from pyspark_raftlog.read_options import SourceOptions

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from raftlog._core.fetched import Rows
    from raftlog._range_reader import RangeReader

logger = logging.getLogger(__name__)

_Key = tuple[int, str, tuple[tuple[str, str], ...]]

_idle: dict[_Key, RangeReader] = {}
"""A reader that no task uses, by process id, so that a forked child never takes its parent's; a Python worker of Spark
runs many tasks, and keeps its connections from one to the next."""


def read_range(options: SourceOptions, schema: StructType, wanted: Range) -> Iterator[Any]:
    """Yield the rows of a range as `pyarrow.RecordBatch`es with the columns of `schema`.

    Raises:
        DataLoss: some are gone, and `failOnDataLoss` is true.
        RaftlogError: it cannot be read; Spark may try the task again.
    """
    from raftlog._range_reader import RangeReader

    key = (os.getpid(), options.bootstrap, options.consumer)
    reader = _idle.pop(key, None) or RangeReader(options.bootstrap, config=dict(options.consumer))
    try:
        yield from BatchMaker(schema).batches(_rows(reader, options, wanted))
    except BaseException:
        reader.close()  # whatever state it is in: the next task gets a new one
        raise
    _keep(key, reader)


def _keep(key: _Key, reader: RangeReader) -> None:
    """Keep this reader for the next task, and no other one."""
    for other in list(_idle):
        found = _idle.pop(other)
        if other[0] == os.getpid():
            found.close()
    _idle[key] = reader


def _rows(reader: RangeReader, options: SourceOptions, wanted: Range) -> Iterator[Rows]:
    from pyspark_raftlog.planner import DataLoss
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
            what = f"{part}: offsets {position} to {wanted.end - 1} are not all there: {error}"
            if options.fail_on_data_loss:
                raise DataLoss(
                    f"{what}. They expired, or the topic was deleted; to go on without them set "
                    'option("failOnDataLoss", "false")'
                ) from error
            logger.warning("%s; going on, since failOnDataLoss=false", what)
            if not isinstance(error, OffsetOutOfRange):
                return
            first = reader.beginning_offsets([part])[part]
            if first <= position:
                return  # what is missing is at the end
            position = first
