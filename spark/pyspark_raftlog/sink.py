"""The sink: what Spark calls in its tasks and on its driver. `staged` is exactly once, `plain` at least once."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from pyspark_raftlog import plain, staged
from pyspark_raftlog.options import SinkOptions
from pyspark_raftlog.schema import SinkSchema
from pyspark_raftlog.staged import Batch, Staged

if TYPE_CHECKING:
    from pyarrow import RecordBatch


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TaskWritten(WriterCommitMessage):
    """What a task tells the driver: all its rows are acknowledged, staged or for everybody to read."""

    partition: int
    rows: int
    staged: Staged | None = None


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

        context = TaskContext.get()
        partition = context.partitionId() if context is not None else -1
        if not self._options.exactly_once:
            return TaskWritten(partition, plain.write(self._options, self._schema, iterator))
        found = staged.write(self._options, self._schema, self._batch(context), _attempt(context), iterator)
        return TaskWritten(partition, found.rows, found)

    def _batch(self, context: Any) -> Batch:
        """Return what the task's rows are committed as."""
        raise NotImplementedError

    def _commit(self, batch_id: int, messages: Sequence[WriterCommitMessage | None]) -> bool:
        """Commit, and return whether the batch was committed before."""
        written = _all_written(messages)
        if not self._options.exactly_once:
            return False
        return staged.commit(self._options, batch_id, [each.staged for each in written if each.staged is not None])

    def _abort(self, batch: Batch | int, messages: Sequence[WriterCommitMessage | None]) -> None:
        if self._options.exactly_once:
            found = [each.staged for each in messages if isinstance(each, TaskWritten) and each.staged is not None]
            staged.abort(self._options, batch, found)


def _attempt(context: Any) -> str:
    """Name a task's attempt for whoever looks at open stages."""
    if context is None:
        return ""
    return f"partition {context.partitionId()}, attempt {context.attemptNumber()}, task {context.taskAttemptId()}"


def _all_written(messages: Sequence[WriterCommitMessage | None]) -> list[TaskWritten]:
    """Return what every task has reported.

    Raises:
        RuntimeError: a task has not, so nobody knows what it wrote.
    """
    written = [message for message in messages if isinstance(message, TaskWritten)]
    missing = len(messages) - len(written)
    if missing:
        raise RuntimeError(
            f"{missing} of {len(messages)} tasks did not say what they wrote, as under the continuous trigger, which "
            "this sink does not support; use trigger(processingTime=...) or trigger(availableNow=True)"
        )
    return written


class BatchSink(_Sink, DataSourceArrowWriter):
    """The sink of `df.write.format("raftlog")`. Made once on the driver; tasks and commit have copies."""

    def __init__(self, options: SinkOptions, schema: SinkSchema) -> None:
        super().__init__(options, schema)
        self._as = staged.of_batch_write(options)

    def _batch(self, context: Any) -> Batch:
        return self._as

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Make all rows readable at once.

        Raises:
            RaftlogError: they are not, or nobody knows; the message says what to do.
        """
        if self._commit(self._as.batch_id, messages):
            logger.warning(
                "txn.app.id=%s has committed txn.version=%d or a higher one before: nothing was written. If this was "
                "no repetition (the batches of a new checkpoint, for instance, begin at 0 again), give it a txn.app.id "
                "of its own, or a higher version",
                self._options.app_id,
                self._as.batch_id,
            )

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Drop what was staged. At least once, what was acknowledged stays in the log."""
        self._abort(self._as, messages)


class StreamSink(_Sink, DataSourceStreamArrowWriter):
    """The sink of `df.writeStream.format("raftlog")`. Made anew for every batch, and once more for its commit."""

    def _batch(self, context: Any) -> Batch:
        return staged.of_stream(self._options, context)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        """Make all rows of a batch readable at once, unless they are already.

        Raises:
            RaftlogError: they are not, or nobody knows; the message says what to do.
        """
        self._commit(batchId, messages)

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        """Drop what was staged. At least once, what was acknowledged stays in the log; Spark repeats the batch."""
        self._abort(batchId, messages)
