"""Exactly once: tasks stage their rows, and one decision of the driver commits those of a whole batch (docs/adr/0016).

Every attempt of a task stages as a producer of its own, which readers of committed records do not see. What it tells
the driver is the stage's token; the driver's commit names the winners' tokens, and the cluster remembers which batch it
was. A batch that Spark writes again after that is recognised, whatever partitions and order its rows have by then.
"""

from __future__ import annotations

import hashlib
import logging
import os
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NoReturn

from pyspark_raftlog.options import SinkOptions
from pyspark_raftlog.schema import SinkSchema

if TYPE_CHECKING:
    from pyarrow import RecordBatch

    from raftlog import StageToken
    from raftlog._staged_writer import Staging

logger = logging.getLogger(__name__)

ANY_TOPIC: Final = "(column topic)"
"""The target of a query whose rows say where they go."""
_QUERY_ID, _BATCH_ID = "sql.streaming.queryId", "streaming.sql.batchId"
"""Spark's own names for what its tasks are a part of."""
_RUN_ID: Final = "spark.jobGroup.id"
"""What a stream calls its run here. A query that is started again is another run."""
_CONTINUOUS: Final = "__is_continuous_processing"
_MAX_ID_CHARACTERS: Final = 255
_ONE_OFF: Final = "spark-batch/"
"""How the sink of a batch write begins that the user has not named: it has one batch, and never another one."""
_ONE_OFF_MS: Final = 24 * 60 * 60 * 1000
"""How long the cluster remembers such a sink: longer than anybody tries to commit it."""
_ABORT_TIMEOUT_S: Final = 30.0
"""Dropping stages at once is a courtesy: what is not dropped goes with the next batch, or in time."""

_last_committed: dict[SinkOptions, Staged] = {}
"""What this process, the driver's, has committed last for a stream. A query that is stopped in the middle of a batch
aborts it without a word of its tasks; this says which sink they staged for."""
_stagings: dict[tuple[int, str, tuple[tuple[str, str], ...]], Staging] = {}
"""By process id, so that a forked child never uses its parent's, cluster and settings. There is one at a time: a Python
worker of Spark runs many tasks, one after the other."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Which batch of which sink a task writes for. Without `query_id` it is a batch write."""

    batch_id: int
    sink_id: str | None
    """None: made of the query and the cluster, which only a task knows."""
    query_id: str | None = None
    run_id: str = ""
    """Who writes the batch; another run may be writing the same one."""
    is_first: bool = False
    """Nothing can have been committed under this sink id."""


@dataclass(frozen=True, slots=True)
class Staged:
    """What a task has staged."""

    rows: int
    token: StageToken
    target: str
    run_id: str = ""


def of_stream(options: SinkOptions, context: Any) -> Batch:
    """Return which batch of a stream a task belongs to.

    Raises:
        RuntimeError: to none: it runs under a trigger that this sink does not support.
    """
    if context is None or context.getLocalProperty(_CONTINUOUS) == "true":
        refuse_continuous()
    query_id, batch_id = context.getLocalProperty(_QUERY_ID), context.getLocalProperty(_BATCH_ID)
    if not query_id or not batch_id:
        raise RuntimeError(
            f"Spark does not say which batch this task belongs to ({_QUERY_ID}={query_id}, {_BATCH_ID}={batch_id}), so "
            "nothing can be exactly once; write with writeStream and a checkpoint, or use delivery=at-least-once"
        )
    return Batch(int(batch_id), options.app_id, query_id, context.getLocalProperty(_RUN_ID) or "")


def of_batch_write(options: SinkOptions) -> Batch:
    """Return what a batch write is committed as: a sink of its own, unless the user has named one."""
    if options.app_id is not None:
        assert options.version is not None
        return Batch(options.version, options.app_id, run_id=str(uuid.uuid4()))
    run_id = str(uuid.uuid4())
    return Batch(0, f"{_ONE_OFF}{run_id}", run_id=run_id, is_first=True)


def refuse_continuous() -> NoReturn:
    """Refuse a trigger that does not write batches.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError(
        "the continuous trigger does not say what its tasks wrote, so this sink does not support it; use "
        "trigger(processingTime=...) or trigger(availableNow=True)"
    )


def write(
    options: SinkOptions, schema: SinkSchema, batch: Batch, attempt: str, iterator: Iterator[RecordBatch]
) -> Staged:
    """Stage all rows of one task and wait until they are acknowledged; nothing if the batch is committed already.

    Raises:
        RaftlogError: a record was refused or not acknowledged in time; Spark may try the task again.
    """
    from raftlog.errors import BatchAlreadyCommitted, SinkMismatch

    staging = _staging(options)
    sink_id = batch.sink_id or _sink_id(batch, options, staging.cluster_id())
    target = _target(options, batch)
    writer = staging.writer(sink_id, target)
    try:
        if not batch.is_first and writer.last_batch() >= batch.batch_id:
            return Staged(0, writer.already_committed(batch.batch_id), target, batch.run_id)
        rows = 0
        with writer.stage(batch.batch_id, _attempt_of(batch.run_id, attempt)) as stage:
            try:
                for records in iterator:
                    for topic, part in schema.split(records):
                        stage.send_batch(topic, part)
                        rows += part.num_rows
            except BatchAlreadyCommitted:  # by another driver, just now; the token says so
                rows = 0
            return Staged(rows, stage.finish(), target, batch.run_id)
    except SinkMismatch as error:
        raise SinkMismatch(f"{error}{_other_sink(options)}") from None


def commit(options: SinkOptions, batch_id: int, staged: Sequence[Staged]) -> bool:
    """Commit what the tasks of a batch have staged; return whether it was committed before.

    Raises:
        StageExpired: a stage is gone; nothing was committed.
        RaftlogError: no answer within `delivery.timeout.ms`; the outcome is not known.
        RuntimeError: tasks of different batches, a bug of Spark's.
    """
    from raftlog.errors import RetriableError, SinkMismatch, StageExpired

    named = {(each.token.sink_id, each.token.batch_id, each.target) for each in staged}
    if not named:
        return False  # without a task there is nothing to commit, and nothing to be taken for it later
    (sink_id, staged_id, target), *others = named
    if others or staged_id != batch_id:
        raise RuntimeError(f"batch {batch_id} came with what was staged for {sorted(named)}; nothing was committed")
    if options.version is None:
        _last_committed[options] = staged[0]
    is_one_off = options.app_id is None and sink_id.startswith(_ONE_OFF)
    writer = _staging(options).writer(sink_id, target, _ONE_OFF_MS if is_one_off else 0)
    try:
        return writer.commit(batch_id, [each.token for each in staged]).already_committed
    except SinkMismatch as error:
        raise SinkMismatch(f"{error}{_other_sink(options)}") from None
    except StageExpired as error:
        raise StageExpired(
            f"{error}. Nothing of batch {batch_id} was committed: start the query again from its checkpoint, and Spark "
            "writes the batch anew. If writing takes longer than transaction.timeout.ms, raise it"
        ) from None
    except RetriableError as error:
        raise type(error)(
            f"{error}. Whether batch {batch_id} was committed is not known: start the query again from its checkpoint; "
            "if it was, that is recognised, and nothing is written twice"
        ) from None


def abort(options: SinkOptions, batch: Batch | int, staged: Sequence[Staged]) -> None:
    """Drop what the tasks of a batch have staged, also what never told the driver, as far as that is quickly done.

    Stages that stay open keep readers from what was written behind them until the batch is committed, or until their
    timeout. So that none opens behind this either: Spark does not wait for tasks that it kills, and one that has rows
    but no stage yet would begin it now, and then die with it. This run stages nothing more for the batch; whoever tries
    again is another run. `batch` is only a number where only the tasks know the sink; if none of them has told, it is
    taken for that of the batch before, and left alone where there was none in this process.
    """
    from raftlog.errors import RaftlogError

    known = {(each.token.sink_id, each.target, each.token.batch_id, each.run_id) for each in staged}
    if isinstance(batch, int):
        last = _last_committed.get(options)
        if not known and last is not None and last.token.batch_id < batch:
            known.add((last.token.sink_id, last.target, batch, last.run_id))
    elif batch.sink_id is not None:
        known.add((batch.sink_id, _target(options, batch), batch.batch_id, batch.run_id))
    for sink_id, target, batch_id, run_id in known:
        try:
            _staging(options).writer(sink_id, target).abort_open(
                batch_id, _attempt_of(run_id), _ABORT_TIMEOUT_S, fence=bool(run_id)
            )
        except (RaftlogError, TimeoutError) as error:
            logger.warning("stages of sink %s are left to their timeout: %s", sink_id, error)


def _attempt_of(run_id: str, attempt: str = "") -> str:
    """Name an attempt for whoever looks at open stages, by its run first."""
    return f"run {run_id}, {attempt}"


def _sink_id(batch: Batch, options: SinkOptions, cluster_id: str) -> str:
    """Return the sink of a query: its records go to this topic of this cluster, and nobody else's batches count."""
    sink_id = f"spark/{batch.query_id}/{cluster_id}/{options.topic or '*'}"
    if len(sink_id) <= _MAX_ID_CHARACTERS:
        return sink_id
    return f"spark/{batch.query_id}/{hashlib.sha256(sink_id.encode()).hexdigest()}"


def _target(options: SinkOptions, batch: Batch) -> str:
    """Return what a sink id is bound to. With the query in it, a new checkpoint, whose batches begin at 0 again, is
    never taken for a repetition of the old one's."""
    topic = options.topic or ANY_TOPIC
    return topic if batch.query_id is None else f"{topic} from query {batch.query_id}"


def _other_sink(options: SinkOptions) -> str:
    if options.app_id is None:
        return ""
    return (
        f". txn.app.id={options.app_id} is taken: every topic, and every checkpoint of a stream, needs one of its own, "
        "or what they write would be taken for what is there already; choose another, or leave the option out"
    )


def _staging(options: SinkOptions) -> Staging:
    key = (os.getpid(), options.bootstrap, options.producer)
    staging = _stagings.get(key)
    if staging is None:
        from raftlog._staged_writer import Staging

        for other in list(_stagings):
            unused = _stagings.pop(other)
            if other[0] == os.getpid():
                unused.close()
        staging = _stagings[key] = Staging(options.bootstrap, config=dict(options.producer))
    return staging
