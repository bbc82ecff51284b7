"""The sink, at least once: every task sends its rows and waits for every acknowledgement before it reports success.

Spark repeats a task or a batch that fails after some of its rows were sent, and those are then in the log twice. What
was acknowledged is never lost.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from pyspark_raftlog.options import SinkOptions
from pyspark_raftlog.schema import SinkSchema

if TYPE_CHECKING:
    from pyarrow import RecordBatch

    import raftlog

_MAX_UNCHECKED_SENDS = 32
"""A task looks at the outcome of its oldest send when there are more than so many; the producer bounds the memory."""

_producers: dict[tuple[int, SinkOptions], raftlog.Producer] = {}
"""By process id, so that a forked child never uses its parent's; a Python worker of Spark runs many tasks."""


@dataclass(frozen=True, slots=True)
class TaskWritten(WriterCommitMessage):
    """What a task tells the driver: all its rows are acknowledged."""

    partition: int
    rows: int


class _Sink:
    """What the batch and the streaming sink share. Pickled to the tasks: holds checked values only."""

    def __init__(self, options: SinkOptions, schema: SinkSchema) -> None:
        self._options = options
        self._schema = schema

    def write(self, iterator: Iterator[RecordBatch]) -> WriterCommitMessage:
        """Send all rows of one task and wait until they are acknowledged.

        Raises:
            RaftlogError: a record was refused or not acknowledged in time; Spark may try the task again.
        """
        from pyspark import TaskContext

        producer = _producer(self._options)
        rows = 0
        unchecked: deque[Any] = deque()
        try:
            for batch in iterator:
                for topic, records in self._schema.split(batch):
                    unchecked.append(producer.send_batch(topic, records))
                    rows += records.num_rows
                while len(unchecked) > _MAX_UNCHECKED_SENDS:
                    unchecked.popleft().result()
            producer.flush()
            while unchecked:
                unchecked.popleft().result()
        except BaseException:
            _discard_producer(self._options)
            raise
        context = TaskContext.get()
        return TaskWritten(context.partitionId() if context else -1, rows)


def _producer(options: SinkOptions) -> raftlog.Producer:
    key = (os.getpid(), options)
    producer = _producers.get(key)
    if producer is None:
        import raftlog

        _producers.clear()
        producer = _producers[key] = raftlog.Producer(options.bootstrap, config=dict(options.producer))
    return producer


def _discard_producer(options: SinkOptions) -> None:
    """Forget a producer that may still hold records of a failed task; the next task gets a new one."""
    producer = _producers.pop((os.getpid(), options), None)
    if producer is not None:
        producer.close(0)


def _check_all_written(messages: Sequence[WriterCommitMessage | None]) -> None:
    missing = sum(message is None for message in messages)
    if missing:
        raise RuntimeError(
            f"{missing} of {len(messages)} tasks did not say what they wrote, as under the continuous trigger, which "
            "this sink does not support; use trigger(processingTime=...) or trigger(availableNow=True)"
        )


class BatchSink(_Sink, DataSourceArrowWriter):
    """The sink of `df.write.format("raftlog")`."""

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Check that every task has reported; the records are in the log already."""
        _check_all_written(messages)

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Do nothing: what was acknowledged stays in the log."""


class StreamSink(_Sink, DataSourceStreamArrowWriter):
    """The sink of `df.writeStream.format("raftlog")`."""

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        """Check that every task has reported; the records are in the log already."""
        _check_all_written(messages)

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        """Do nothing: what was acknowledged stays in the log; Spark repeats the batch."""
