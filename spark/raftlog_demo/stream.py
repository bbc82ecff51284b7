"""The Spark part: a streaming query from Parquet files into a topic."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf

OnRows = Callable[[int], None]
SPARK_LOG = "spark.log"
"""Where Spark's own messages go, in the demo's directory."""

_POLL_S = 0.1


def make_session(directory: Path) -> SparkSession:
    """Return a small Spark on this machine; whatever it writes goes to `directory`."""
    os.environ["PYSPARK_PYTHON"] = sys.executable  # data sources are looked up by this Python
    with _stderr_to(directory / SPARK_LOG):
        return _builder(directory).getOrCreate()


def _builder(directory: Path) -> SparkSession.Builder:
    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.memory": "1g",
        "spark.local.dir": str(directory / "spark"),
        "spark.sql.warehouse.dir": str(directory / "warehouse"),
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": "2",
        "spark.python.unix.domain.socket.enabled": "true",
    }
    builder = SparkSession.builder.master("local[2]").appName("raftlog-demo")
    for key, value in settings.items():
        builder = builder.config(key, value)
    return builder


@contextmanager
def _stderr_to(path: Path) -> Iterator[None]:
    """Let processes that are started meanwhile, the JVM above all, write their stderr to a file."""
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with path.open("ab") as file:
            os.dup2(file.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def events_of(flights: DataFrame) -> DataFrame:
    """Return flights as events: the aeroplane as key, all columns as JSON value, the hour as timestamp."""
    return flights.select(
        sf.col("tailnum").alias("key"),
        sf.to_json(sf.struct("*")).alias("value"),
        sf.to_timestamp("time_hour").alias("timestamp"),
    )


def run(
    spark: SparkSession, source: Path, checkpoint: Path, bootstrap: str, topic: str, on_rows: OnRows
) -> list[dict[str, Any]]:
    """Stream all files in `source` into `topic` and return Spark's report of every micro-batch.

    `on_rows` is called with the rows written so far.

    Raises:
        StreamingQueryException: the query failed.
    """
    schema = spark.read.parquet(str(source)).schema
    flights = spark.readStream.schema(schema).option("maxFilesPerTrigger", 3).parquet(str(source))
    query = (
        events_of(flights)
        .writeStream.format("raftlog")
        .option("bootstrap.servers", bootstrap)
        .option("topic", topic)
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    try:
        while query.isActive:
            on_rows(sum(progress["numInputRows"] for progress in query.recentProgress))
            time.sleep(_POLL_S)
        query.awaitTermination()
    finally:
        query.stop()
    reports = [dict(progress) for progress in query.recentProgress if progress["numInputRows"]]
    on_rows(sum(report["numInputRows"] for report in reports))
    return reports
