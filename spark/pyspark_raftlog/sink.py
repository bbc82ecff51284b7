"""The sink, which Spark calls in its tasks and on its driver: `..._staged` is exactly once, `..._plain` at least once.

At least once: a task sends its rows and waits for every acknowledgement before it reports success. If Spark repeats a
task or batch that failed after sending rows, these rows are in the log twice. The producer's own retries are
idempotent, and acknowledged rows are never lost.

Exactly once: tasks stage their rows, and one decision of the driver commits the rows of a whole batch (docs/adr/0016).
Every attempt of a task stages with its own producer, hidden from read_committed consumers, and reports the token of its
stage to the driver. The driver's commit names the tokens of successful attempts, and the cluster remembers the number
of the batch. If Spark writes a committed batch again, it is recognized, whatever partitions and order its rows have.
Spark repeats only its last batch. A query that writes an earlier one runs on an old checkpoint, and may have planned
other rows for that number: it fails with `OldCheckpoint`.
"""

from __future__ import annotations

import hashlib
import logging
import os
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from pyspark_raftlog.options import SinkOptions
from pyspark_raftlog.schema import SinkSchema

if TYPE_CHECKING:
    from pyarrow import RecordBatch

    import raftlog
    from raftlog import StageToken
    from raftlog._staged_writer import Staging


_Key = TypeVar("_Key", bound=tuple[Any, ...])
"""The key of a kept client. It begins with a process id, so that a forked child does not use its parent's client."""
_Client = TypeVar("_Client")

_MAX_UNCHECKED_SENDS: Final = 32
"""The most sends of a task without a result; above it, the task waits for the oldest. The producer bounds memory."""

_producers: dict[tuple[int, SinkOptions], raftlog.Producer] = {}
"""Kept clients by process id, so that a forked child does not use its parent's. A Python worker of Spark runs many
tasks."""


def write_plain(options: SinkOptions, schema: SinkSchema, iterator: Iterator[RecordBatch]) -> int:
    """Send all rows of a task, wait until they are acknowledged, and return their number.

    Raises:
        RaftlogError: a record was refused or not acknowledged in time; Spark may retry the task.
    """
    producer = _producer(options)
    rows = 0
    unchecked: deque[Any] = deque()
    try:
        for batch in iterator:
            for topic, records in schema.split(batch):
                unchecked.append(producer.send_batch(topic, records))
                rows += records.num_rows
            while len(unchecked) > _MAX_UNCHECKED_SENDS:
                unchecked.popleft().result()
        producer.flush()
        while unchecked:
            unchecked.popleft().result()
    except BaseException:
        _discard_producer(options)
        raise
    return rows


def _producer(options: SinkOptions) -> raftlog.Producer:
    import raftlog

    return _kept(
        _producers,
        (os.getpid(), options),
        lambda: raftlog.Producer(options.bootstrap, config=dict(options.producer)),
        lambda unused: unused.close(0),  # no task is running, so it holds no records
    )


def _kept(
    clients: dict[_Key, _Client], key: _Key, make: Callable[[], _Client], close: Callable[[_Client], None]
) -> _Client:
    """Return the client of a key; make it when it is first needed, and then close the others of this process."""
    client = clients.get(key)
    if client is None:
        for other in list(clients):
            unused = clients.pop(other)
            if other[0] == key[0]:
                close(unused)
        client = clients[key] = make()
    return client


def _discard_producer(options: SinkOptions) -> None:
    """Close a producer that may hold records of a failed task; the next task gets a new one."""
    producer = _producers.pop((os.getpid(), options), None)
    if producer is not None:
        producer.close(0)


logger = logging.getLogger(__name__)

ANY_TOPIC: Final = "(column topic)"
"""The target of a query whose rows have a topic column."""
_QUERY_ID, _BATCH_ID = "sql.streaming.queryId", "streaming.sql.batchId"
"""Spark's names for the query and the batch of a task."""
_RUN_ID: Final = "spark.jobGroup.id"
"""The property with the id of a stream's run. A restarted query is another run."""
_CONTINUOUS: Final = "__is_continuous_processing"
_COLUMN_PARTITION: Final = (
    "the number is from the query's column partition, which a source has and the sink follows, as Kafka's does; for "
    'partitions by the key write frame.drop("partition"), or else give the topic more partitions'
)
_MAX_ID_CHARACTERS: Final = 255
_ONE_OFF: Final = "spark-batch/"
"""The prefix of the sink id of a batch write without `txn.app.id`; such a sink has only one batch."""
_ONE_OFF_MS: Final = 24 * 60 * 60 * 1000
"""How long the cluster remembers such a sink: longer than its commit is retried."""
_ABORT_TIMEOUT_S: Final = 30.0
"""The time limit for aborting stages at once, which is optional: the next batch, or their timeout, ends the rest."""

_last_committed: dict[SinkOptions, dict[str, Staged]] = {}
"""The last commit of each sink by this process, which is the driver's, for streams with these options. If a query is
stopped within a batch, Spark aborts the batch without the reports of its tasks; `_stopped` then finds the sink that
they staged for."""
_MOST_COMMITTED: Final = 100
"""The most sinks in it for the same options, which queries with other checkpoints have: the oldest go."""
_stagings: dict[tuple[int, str, tuple[tuple[str, str], ...]], Staging] = {}
"""Kept clients by process id (so that a forked child does not use its parent's), cluster and settings. There is one at
a time, because a Python worker of Spark runs its tasks one after the other."""


class OldCheckpoint(RuntimeError):
    """A query writes a batch with a lower number than the last one that its sink has committed."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The batch and the sink of a task. Without `query_id` it is a batch write."""

    batch_id: int
    sink_id: str | None
    """None: the sink id is derived from the query and the cluster, which only a task knows."""
    query_id: str | None = None
    run_id: str = ""
    """The run that writes the batch; another run may write the same batch."""
    is_first: bool = False
    """Whether the sink id is new, so that the sink cannot have committed a batch."""


@dataclass(frozen=True, slots=True)
class Staged:
    """The stage of a task."""

    rows: int
    token: StageToken
    target: str
    run_id: str = ""


def of_stream(options: SinkOptions, context: Any) -> Batch:
    """Return the batch of a stream that a task belongs to.

    Raises:
        RuntimeError: the task runs under a trigger that this sink does not support.
    """
    if context is None or context.getLocalProperty(_CONTINUOUS) == "true":
        refuse_continuous()
    query_id, batch_id = context.getLocalProperty(_QUERY_ID), context.getLocalProperty(_BATCH_ID)
    if not query_id or not batch_id:
        raise RuntimeError(
            f"Spark does not tell the batch of this task ({_QUERY_ID}={query_id}, {_BATCH_ID}={batch_id}), so delivery "
            "cannot be exactly once; write with writeStream and a checkpoint, or use delivery=at-least-once"
        )
    return Batch(int(batch_id), options.app_id, query_id, context.getLocalProperty(_RUN_ID) or "")


def of_batch_write(options: SinkOptions) -> Batch:
    """Return the batch of a batch write: of the named sink, or else of a new one."""
    if options.app_id is not None:
        assert options.version is not None
        return Batch(options.version, options.app_id, run_id=str(uuid.uuid4()))
    run_id = str(uuid.uuid4())
    return Batch(0, f"{_ONE_OFF}{run_id}", run_id=run_id, is_first=True)


def refuse_continuous() -> NoReturn:
    """Refuse the continuous trigger, which does not write batches.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError(
        "this sink does not support the continuous trigger, whose tasks do not report their writes; use "
        "trigger(processingTime=...) or trigger(availableNow=True)"
    )


def write_staged(
    options: SinkOptions, schema: SinkSchema, batch: Batch, attempt: str, iterator: Iterator[RecordBatch]
) -> Staged:
    """Stage all rows of a task, and wait until they are acknowledged; stage nothing if the batch is already committed.

    Raises:
        OldCheckpoint: the sink has committed a later batch of the query.
        RaftlogError: a record was refused or not acknowledged in time; Spark may retry the task.
    """
    from raftlog.errors import BatchAlreadyCommitted, SinkMismatch

    staging = _staging(options)
    sink_id = batch.sink_id or _sink_id(batch, options, staging.cluster_id())
    target = _target(options, batch)
    writer = staging.writer(sink_id, target)
    try:
        last_batch = -1 if batch.is_first else writer.last_batch()
        if last_batch > batch.batch_id and batch.query_id is not None:
            raise OldCheckpoint(
                f"the sink {sink_id} has committed batch {last_batch}, and this query writes batch {batch.batch_id}: "
                "its checkpoint is old, for example restored from a copy, or another driver runs on the same one. This "
                "batch may have other rows than the committed one of its number, so the sink does not skip it. Restore "
                "the newest checkpoint. Or set txn.app.id to a new name: then all rows since this checkpoint are "
                "written, and those that are in the topic already appear twice"
            )
        if last_batch >= batch.batch_id:
            return Staged(0, writer.already_committed(batch.batch_id), target, batch.run_id)
        rows = 0
        with writer.stage(batch.batch_id, _attempt_of(batch.run_id, attempt)) as stage:
            try:
                for records in iterator:
                    for topic, part in schema.split(records):
                        stage.send_batch(topic, part)
                        rows += part.num_rows
            except BatchAlreadyCommitted:  # another driver has just committed it; the token says so
                rows = 0
            return Staged(rows, stage.finish(), target, batch.run_id)
    except SinkMismatch as error:
        raise SinkMismatch(f"{error}{_other_sink(options)}") from None


def commit_staged(options: SinkOptions, batch_id: int, staged: Sequence[Staged]) -> bool:
    """Commit the stages of a batch; return whether the batch was committed before.

    Raises:
        StageExpired: a stage has expired; nothing was committed.
        RaftlogError: no answer within `delivery.timeout.ms`; the outcome is unknown.
        RuntimeError: the tasks are of different batches, a bug in Spark.
    """
    from raftlog.errors import RetriableError, SinkMismatch, StageExpired

    named = {(each.token.sink_id, each.token.batch_id, each.target) for each in staged}
    if not named:
        return False  # without tasks there is nothing to commit
    (sink_id, staged_id, target), *others = named
    if others or staged_id != batch_id:
        raise RuntimeError(f"batch {batch_id} came with stages of {sorted(named)}; nothing was committed")
    if options.version is None:
        _note_committed(options, staged[0])
    is_one_off = options.app_id is None and sink_id.startswith(_ONE_OFF)
    writer = _staging(options).writer(sink_id, target, _ONE_OFF_MS if is_one_off else 0)
    try:
        return writer.commit(batch_id, [each.token for each in staged]).already_committed
    except SinkMismatch as error:
        raise SinkMismatch(f"{error}{_other_sink(options)}") from None
    except StageExpired as error:
        raise StageExpired(
            f"{error}. Nothing of batch {batch_id} was committed: restart the query from its checkpoint, and Spark "
            "writes the batch again. If writing takes longer than transaction.timeout.ms, raise it"
        ) from None
    except RetriableError as error:
        raise type(error)(
            f"{error}. Whether batch {batch_id} was committed is unknown: restart the query from its checkpoint; if "
            "the batch was committed, the cluster recognizes it, and nothing is written twice"
        ) from None


def abort_staged(options: SinkOptions, batch: Batch | int, staged: Sequence[Staged]) -> None:
    """Abort the stages of a batch, including those of tasks that did not report to the driver; give up after a short
    time.

    Open stages block read_committed consumers until the next commit or their timeout. The call also fences the run:
    Spark does not wait for tasks that it kills, and such a task could still begin a stage now and then die. After it,
    this run stages nothing more for the batch; a retry is another run. `batch` is only a number if only tasks know the
    sink. Then the reports of tasks name the sink; without a report it is the sink of the previous batch (`_stopped`),
    and if that is not known, nothing is aborted.
    """
    from raftlog.errors import RaftlogError

    known = {(each.token.sink_id, each.target, each.token.batch_id, each.run_id) for each in staged}
    if isinstance(batch, int):
        last = None if known else _stopped(options, batch)
        if last is not None:
            known.add((last.token.sink_id, last.target, batch, last.run_id))
    elif batch.sink_id is not None:
        known.add((batch.sink_id, _target(options, batch), batch.batch_id, batch.run_id))
    for sink_id, target, batch_id, run_id in known:
        try:
            _staging(options).writer(sink_id, target).abort_open(
                batch_id, _attempt_of(run_id), _ABORT_TIMEOUT_S, fence=bool(run_id)
            )
        except (RaftlogError, TimeoutError) as error:
            logger.warning("stages of sink %s stay open until their timeout: %s", sink_id, error)


def _note_committed(options: SinkOptions, staged: Staged) -> None:
    of_sinks = _last_committed.setdefault(options, {})
    of_sinks.pop(staged.token.sink_id, None)
    of_sinks[staged.token.sink_id] = staged
    if len(of_sinks) > _MOST_COMMITTED:
        del of_sinks[next(iter(of_sinks))]


def _stopped(options: SinkOptions, batch_id: int) -> Staged | None:
    """Return the last commit of the query that is stopped in a batch; None if it is not known which query that is.

    Several queries of a driver may have the same options. Then it is the only one that has committed the batch before:
    another one would lose its stages, and end when it comes to the batch.
    """
    earlier = [each for each in _last_committed.get(options, {}).values() if each.token.batch_id < batch_id]
    if len(_last_committed.get(options, {})) > 1:
        earlier = [each for each in earlier if each.token.batch_id == batch_id - 1]
    return earlier[0] if len(earlier) == 1 else None


def _attempt_of(run_id: str, attempt: str = "") -> str:
    """Return the name of an attempt in listings of open stages; it begins with the run."""
    return f"run {run_id}, {attempt}"


def _sink_id(batch: Batch, options: SinkOptions, cluster_id: str) -> str:
    """Return the sink id of a query, topic and cluster, which no other query has."""
    sink_id = f"spark/{batch.query_id}/{cluster_id}/{options.topic or '*'}"
    if len(sink_id) <= _MAX_ID_CHARACTERS:
        return sink_id
    return f"spark/{batch.query_id}/{hashlib.sha256(sink_id.encode()).hexdigest()}"


def _target(options: SinkOptions, batch: Batch) -> str:
    """Return the target that a sink id is bound to.

    It contains the query's id, so that the batches of a new checkpoint, which begin at 0 again, do not count as
    repetitions.
    """
    topic = options.topic or ANY_TOPIC
    return topic if batch.query_id is None else f"{topic} from query {batch.query_id}"


def _other_sink(options: SinkOptions) -> str:
    if options.app_id is None:
        return ""
    return (
        f". txn.app.id={options.app_id} is in use: every topic, and every checkpoint of a stream, needs its own, or "
        "new batches would count as repetitions; choose another one, or leave the option out"
    )


def _staging(options: SinkOptions) -> Staging:
    from raftlog._staged_writer import Staging

    return _kept(
        _stagings,
        (os.getpid(), options.bootstrap, options.producer),
        lambda: Staging(options.bootstrap, config=dict(options.producer)),
        lambda unused: unused.close(),
    )


@dataclass(frozen=True, slots=True)
class TaskWritten(WriterCommitMessage):
    """The report of a task to the driver: all its rows are acknowledged, either staged or readable."""

    partition: int
    rows: int
    staged: Staged | None = None


class _Sink:
    """The common part of batch and streaming sink. Spark pickles it to tasks, so it has only checked values."""

    def __init__(self, options: SinkOptions, schema: SinkSchema) -> None:
        self._options = options
        self._schema = schema

    def write(self, iterator: Iterator[RecordBatch]) -> WriterCommitMessage:
        """Send all rows of a task, and wait until they are acknowledged.

        Raises:
            RaftlogError: a record was refused or not acknowledged in time; Spark may retry the task.
        """
        from pyspark import TaskContext

        from raftlog.errors import InvalidPartitions

        context = TaskContext.get()
        partition = context.partitionId() if context is not None else -1
        try:
            if not self._options.exactly_once:
                return TaskWritten(partition, write_plain(self._options, self._schema, iterator))
            found = write_staged(self._options, self._schema, self._batch(context), _attempt(context), iterator)
        except InvalidPartitions as error:
            raise InvalidPartitions(f"{error}; {_COLUMN_PARTITION}") from None
        return TaskWritten(partition, found.rows, found)

    def _batch(self, context: Any) -> Batch:
        """Return the batch of the task's rows."""
        raise NotImplementedError

    def _commit(self, batch_id: int, messages: Sequence[WriterCommitMessage | None]) -> bool:
        """Commit the batch; return whether it was committed before."""
        written = _all_written(messages)
        if not self._options.exactly_once:
            return False
        return commit_staged(self._options, batch_id, [each.staged for each in written if each.staged is not None])

    def _abort(self, batch: Batch | int, messages: Sequence[WriterCommitMessage | None]) -> None:
        if self._options.exactly_once:
            found = [each.staged for each in messages if isinstance(each, TaskWritten) and each.staged is not None]
            abort_staged(self._options, batch, found)


def _attempt(context: Any) -> str:
    """Return the name of a task's attempt for listings of open stages."""
    if context is None:
        return ""
    return f"partition {context.partitionId()}, attempt {context.attemptNumber()}, task {context.taskAttemptId()}"


def _all_written(messages: Sequence[WriterCommitMessage | None]) -> list[TaskWritten]:
    """Return the reports of all tasks.

    Raises:
        RuntimeError: a task has not reported, so its writes are unknown.
    """
    written = [message for message in messages if isinstance(message, TaskWritten)]
    missing = len(messages) - len(written)
    if missing:
        raise RuntimeError(
            f"{missing} of {len(messages)} tasks did not report their writes, as happens under the continuous trigger, "
            "which this sink does not support; use trigger(processingTime=...) or trigger(availableNow=True)"
        )
    return written


class BatchSink(_Sink, DataSourceArrowWriter):
    """The sink of `df.write.format("raftlog")`. Spark creates it once on the driver; tasks and commit use copies."""

    def __init__(self, options: SinkOptions, schema: SinkSchema) -> None:
        super().__init__(options, schema)
        self._as = of_batch_write(options)

    def _batch(self, context: Any) -> Batch:
        return self._as

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Make all rows readable at once.

        Raises:
            RaftlogError: the commit failed, or its outcome is unknown; the message says what to do.
        """
        if self._commit(self._as.batch_id, messages):
            logger.warning(
                "txn.app.id=%s has committed txn.version=%d or a higher one before: nothing was written. If this is "
                "not a repetition (for example, the batches of a new checkpoint begin at 0 again), use another "
                "txn.app.id, or a higher version",
                self._options.app_id,
                self._as.batch_id,
            )

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Abort the stages. With at-least-once delivery, acknowledged rows stay in the log."""
        self._abort(self._as, messages)


class StreamSink(_Sink, DataSourceStreamArrowWriter):
    """The sink of `df.writeStream.format("raftlog")`. Spark creates it for every batch, and again for its commit."""

    def _batch(self, context: Any) -> Batch:
        return of_stream(self._options, context)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        """Make all rows of a batch readable at once, unless the batch is already committed.

        Raises:
            RaftlogError: the commit failed, or its outcome is unknown; the message says what to do.
        """
        self._commit(batchId, messages)

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        """Abort the stages. With at-least-once delivery, acknowledged rows stay in the log, and Spark repeats the "
        "batch."""
        self._abort(batchId, messages)
