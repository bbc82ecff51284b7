"""A Spark driver in a process of its own, to be killed: streams files into a topic until all are there.

    python -m tests.support.spark_driver SOURCE CHECKPOINT BOOTSTRAP TOPIC SEED [FAULT]

Partitions, order and tasks' sizes differ with SEED, so that a batch that is replayed is another one each time. FAULT,
`point:batch:marker file`, kills the JVM with SIGKILL at that point of that batch, once: `in-write`, `after-write`,
`before-commit` or `after-commit` (the last: between the sink's commit and Spark's note of it).
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark_raftlog import DefaultSource

from tests.support.spark_session import SHORT_LIVED, make_session

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

FINISHED = "finished"
"""What is printed at the end, when everything was streamed."""
_FAULT = "fault"


class Fault:
    """Kills the JVM at one point, once."""

    def __init__(self, text: str) -> None:
        self.point, batch, self.marker = text.split(":", 2) if text else ("", "-1", "")
        self.batch_id = int(batch)

    def at(self, point: str, batch_id: int) -> None:
        """Come by a point; does not return if it is the one."""
        if point != self.point or batch_id != self.batch_id or not self.marker or Path(self.marker).exists():
            return
        Path(self.marker).touch()
        os.kill(_jvm_pid(), signal.SIGKILL)
        time.sleep(30)


def _jvm_pid() -> int:
    """Return the JVM that this Python worker works for: its daemon's parent."""
    stat = Path(f"/proc/{os.getppid()}/stat").read_text()
    return int(stat.rpartition(")")[2].split()[1])


class FaultySink(DataSourceStreamArrowWriter):
    """The sink, with a fault."""

    def __init__(self, inner: Any, fault: Fault) -> None:
        self._inner = inner
        self._fault = fault

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        """As the sink."""
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        batch_id = int(context.getLocalProperty("streaming.sql.batchId") or -1)

        def passed_on() -> Iterator[Any]:
            for batch in iterator:
                yield batch
                self._fault.at("in-write", batch_id)

        message: WriterCommitMessage = self._inner.write(passed_on())
        self._fault.at("after-write", batch_id)
        return message

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        """As the sink."""
        self._fault.at("before-commit", batchId)
        self._inner.commit(messages, batchId)
        self._fault.at("after-commit", batchId)

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        """As the sink."""
        self._inner.abort(messages, batchId)


class FaultySource(DataSource):
    """The data source `raftlog`, with a fault."""

    @classmethod
    def name(cls) -> str:
        """Return what stands in `format(...)`."""
        return "raftlog-faulty"

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:
        """As the data source `raftlog`."""
        options = {key: value for key, value in self.options.items() if key != _FAULT}
        return FaultySink(DefaultSource(options).streamWriter(schema, overwrite), Fault(self.options[_FAULT]))


def main(source: str, checkpoint: str, bootstrap: str, topic: str, seed: str, fault: str = "") -> None:
    """Stream until everything is there; exits with 3 when the query fails."""
    # The executable module is pickled by name for Python workers, which do not have it as __main__.
    from tests.support import spark_driver

    rng = random.Random(int(seed))
    partitions = rng.choice((1, 2, 3, 4))
    session = make_session(
        "local[2,2]",
        Path(checkpoint).parent,
        {
            **SHORT_LIVED,
            "spark.sql.shuffle.partitions": str(partitions),
            "spark.sql.files.maxPartitionBytes": str(rng.choice((4_000, 20_000, 100_000_000))),
        },
    )
    session.dataSource.register(spark_driver.FaultySource)
    query = (
        session.readStream.schema("value string")
        .option("maxFilesPerTrigger", 2)
        .parquet(source)
        .repartition(partitions)
        .writeStream.format("raftlog-faulty")
        .option(_FAULT, fault)
        .option("bootstrap.servers", bootstrap)
        .option("topic", topic)
        .option("linger.ms", "1")
        .option("checkpointLocation", checkpoint)
        .trigger(availableNow=True)
        .start()
    )
    try:
        query.awaitTermination()
    except Exception as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        os._exit(3)
    print(FINISHED, flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
