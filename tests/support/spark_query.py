"""A streaming query of Spark's by hand, without a JVM: the sink's classes are called as Spark calls them."""

from __future__ import annotations

import pickle
import threading
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql.types import StringType, StructType
from pyspark_raftlog import DefaultSource
from pyspark_raftlog.sink import TaskWritten

SCHEMA = StructType().add("value", StringType())
QUERY = "11111111-2222-3333-4444-555555555555"


class Context:
    """A task's context, as far as the sink looks at it."""

    current = threading.local()
    """What `pyspark.TaskContext.get` is to return in each thread (`get`)."""

    def __init__(self, partition: int, attempt: int, properties: dict[str, str]) -> None:
        self._partition, self._attempt, self._properties = partition, attempt, properties

    @classmethod
    def get(cls) -> Context | None:
        """Stand in for `pyspark.TaskContext.get`."""
        return getattr(cls.current, "context", None)

    @classmethod
    def enter(cls, context: Context | None) -> None:
        """Be in this task from now on, in this thread."""
        cls.current.context = context

    def partitionId(self) -> int:
        return self._partition

    def attemptNumber(self) -> int:
        return self._attempt

    def taskAttemptId(self) -> int:
        return 100 * self._partition + self._attempt

    def getLocalProperty(self, name: str) -> str | None:
        return self._properties.get(name)


class Query:
    """Every task and every commit has a writer of its own, and messages travel pickled, as with Spark.

    Needs `pyspark.TaskContext.get` patched with `Context.get`.
    """

    def __init__(self, bootstrap: str, query_id: str = QUERY, run_id: str = "r", **options: str) -> None:
        self.query_id = query_id
        self.run_id = run_id
        self.options = {"bootstrap.servers": bootstrap, "topic": "t", "linger.ms": "0", **options}

    def writer(self) -> Any:
        made = DefaultSource(self.options).streamWriter(SCHEMA, overwrite=False)
        return pickle.loads(pickle.dumps(made))  # noqa: S301 # as Spark sends it

    def task(
        self, batch_id: int, rows: Sequence[str] | Iterator[pa.RecordBatch], *, partition: int = 0, attempt: int = 0
    ) -> TaskWritten:
        properties = {
            "sql.streaming.queryId": self.query_id,
            "streaming.sql.batchId": str(batch_id),
            "spark.jobGroup.id": self.run_id,
        }
        batches = rows if isinstance(rows, Iterator) else iter([pa.record_batch({"value": list(rows)})])
        Context.enter(Context(partition, attempt, properties))
        try:
            found = self.writer().write(batches)
        finally:
            Context.enter(None)
        message = pickle.loads(pickle.dumps(found))  # noqa: S301 # as Spark sends it
        assert isinstance(message, TaskWritten)
        return message

    def restart(self) -> None:
        """Be another run of the query, as after everything that fails."""
        self.run_id = str(uuid.uuid4())

    def commit(self, batch_id: int, messages: Sequence[TaskWritten | None]) -> None:
        self.writer().commit(messages, batch_id)

    def abort(self, batch_id: int, messages: Sequence[TaskWritten | None]) -> None:
        self.writer().abort(messages, batch_id)
