"""The streaming query from Parquet files into a topic, in a separate process.

    python -m raftlog_demo.stream SOURCE CHECKPOINT BOOTSTRAP TOPIC DIRECTORY

It prints a line of JSON for every micro-batch that Spark has reported. After any kill, a restart continues from the
checkpoint.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf

_POLL_S = 0.05


def make_session(directory: Path) -> SparkSession:
    """Return a small local Spark, which writes all its files to `directory`."""
    os.environ["PYSPARK_PYTHON"] = sys.executable  # Spark finds data sources with this Python
    return _builder(directory).getOrCreate()


def _builder(directory: Path) -> SparkSession.Builder:
    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.memory": "1g",
        # A JVM of a minute: to optimise its code takes a quarter of the demo's computing time, and gains nothing.
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
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


def events_of(flights: DataFrame) -> DataFrame:
    """Return flights as events: the aeroplane as key, all columns as JSON value, the hour as timestamp."""
    return flights.select(
        sf.col("tailnum").alias("key"),
        sf.to_json(sf.struct("*")).alias("value"),
        sf.to_timestamp("time_hour").alias("timestamp"),
    )


def run(
    spark: SparkSession,
    source: Path,
    checkpoint: Path,
    bootstrap: str,
    topic: str,
    on_batch: Callable[[dict[str, Any]], None],
) -> None:
    """Stream the files in `source` that are not in the checkpoint into `topic`.

    `on_batch` is called with Spark's report of every micro-batch.

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
    told = -1

    def tell() -> None:
        nonlocal told
        for progress in query.recentProgress:
            if progress["batchId"] > told and progress["numInputRows"]:
                told = progress["batchId"]
                on_batch(dict(progress))

    try:
        while query.isActive:
            tell()
            time.sleep(_POLL_S)
        query.awaitTermination()
        tell()
    finally:
        query.stop()


def main(source: str, checkpoint: str, bootstrap: str, topic: str, directory: str) -> None:
    """Run the query to its end, and print a report of every micro-batch."""

    def print_batch(progress: dict[str, Any]) -> None:
        report = {
            "batch": progress["batchId"],
            "rows": progress["numInputRows"],
            "busy_ms": progress["durationMs"]["triggerExecution"],
        }
        print(json.dumps(report), flush=True)

    spark = make_session(Path(directory))
    try:
        run(spark, Path(source), Path(checkpoint), bootstrap, topic, print_batch)
    finally:
        spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
