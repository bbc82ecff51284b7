"""The Spark connector on `local[2]`, beside ceilings of PySpark, in one run on the same two cores.

    sink      cached Parquet files -> the sink, one file per trigger; rows per second of a trigger
    overhead  the same with files of a few rows, beside Spark's `noop` sink and a Python sink that only counts
    source    a topic -> `noop`, beside rows in memory -> `noop`

Rounds alternate and are compared in pairs. Times are from Spark (`durationMs.triggerExecution`), without a query's
first trigger, which starts Python workers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from bench.counting import Counting, Memory
from bench.report import Report
from raftlog import Admin, Producer
from raftlog.testing import Cluster
from tests.support.spark_session import make_session

ROUNDS: Final = 3
FILES: Final = 5
FILE_ROWS: Final = 1_000_000
VALUE_BYTES: Final = 100
SMALL_FILES: Final = 12
SMALL_ROWS: Final = 100
SOURCE_ROWS: Final = 12_000_000
SOURCE_TRIGGER_ROWS: Final = 3_000_000
SOURCE_PARTITIONS: Final = 2
SOURCE_BATCH_ROWS: Final = 10_000
SERVERS: Final = 3
WAIT_S: Final = 300
SCHEMA: Final = "key binary, value binary"

Sink = tuple[str, Mapping[str, str]]
"""Format and options."""


def run(report: Report) -> None:
    """Run three servers beside the JVM; topics have one replica, to measure the connector and not replication."""
    with tempfile.TemporaryDirectory() as directory, session(directory) as spark, _counting_server() as address:
        spark.dataSource.register(Counting)
        spark.dataSource.register(Memory)
        large, small = Path(directory, "large"), Path(directory, "small")
        write_files(large, FILES, FILE_ROWS)
        write_files(small, SMALL_FILES, SMALL_ROWS)
        with Cluster(nodes=SERVERS) as cluster:
            with Admin(cluster.bootstrap) as admin:
                for topic, partitions in (("sink", 2), ("source", SOURCE_PARTITIONS)):
                    admin.create_topic(topic, partitions=partitions, configs={"retention.bytes": str(1 << 29)})
            to = {"bootstrap.servers": cluster.bootstrap, "topic": "sink"}
            sinks: dict[str, Sink] = {
                "exactly-once": ("raftlog", to),
                "at-least-once": ("raftlog", {**to, "delivery": "at-least-once"}),
                "counting": ("counting", {"address": address}),
                "parquet": ("parquet", {}),
                "noop": ("noop", {}),
            }
            _sinks(spark, directory, large, sinks, report)
            _overhead(spark, directory, small, sinks, report)
            _source(spark, directory, cluster.bootstrap, report)


@contextmanager
def session(directory: str, **settings: str) -> Iterator[Any]:
    """Start Spark with these further settings, and stop it afterwards."""
    started = make_session(
        "local[2]",
        Path(directory),
        {
            "spark.log.level": "ERROR",
            "spark.driver.memory": "4g",
            "spark.sql.files.maxPartitionBytes": "512m",
            "spark.sql.streaming.numRecentProgressUpdates": "1000",
            **settings,
        },
    )
    try:
        yield started
    finally:
        started.stop()


@contextmanager
def _counting_server() -> Iterator[str]:
    server = subprocess.Popen(
        [sys.executable, "-m", "bench.counting"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert server.stdout is not None
    try:
        yield f"127.0.0.1:{int(server.stdout.readline())}"
    finally:
        server.communicate(timeout=30)


def write_files(directory: Path, files: int, rows: int) -> None:
    """Write Parquet files of `SCHEMA` with random values."""
    directory.mkdir()
    random = np.random.default_rng(1)
    for number in range(files):
        keys = np.arange(number * rows, (number + 1) * rows, dtype=">u8")
        table = pa.table(
            {
                "key": _binaries(keys.tobytes(), rows, 8),
                "value": _binaries(random.bytes(rows * VALUE_BYTES), rows, VALUE_BYTES),
            }
        )
        # Two row groups: two tasks, one for each core.
        pq.write_table(  # type: ignore[no-untyped-call,unused-ignore] # no annotations
            table,
            directory / f"{number:03d}.parquet",
            compression="NONE",
            use_dictionary=False,
            row_group_size=rows // 2,
        )


def _binaries(data: bytes, rows: int, size: int) -> pa.Array:
    ends = np.arange(0, (rows + 1) * size, size, dtype=np.int32)
    return pa.Array.from_buffers(pa.binary(), rows, [None, pa.py_buffer(ends), pa.py_buffer(data)])


def triggers(spark: Any, directory: str, files: Path, sink: Sink) -> list[tuple[int, int]]:
    """Return (rows, ms) of each trigger, except the first, of a query over the files with one file per trigger."""
    form, options = sink
    spark.conf.set("spark.sql.files.maxPartitionBytes", "64m" if files.name == "large" else "512m")
    checkpoint = tempfile.mkdtemp(dir=directory)
    writer = (
        spark.readStream.schema(SCHEMA)
        .option("maxFilesPerTrigger", 1)
        .parquet(str(files))
        .writeStream.format(form)
        .option("checkpointLocation", checkpoint)
    )
    if form == "parquet":
        writer = writer.option("path", tempfile.mkdtemp(dir=directory))
    for name, value in options.items():
        writer = writer.option(name, value)
    query = writer.trigger(availableNow=True).start()
    assert query.awaitTermination(WAIT_S), f"the query in the form {form} did not end within {WAIT_S} s"
    return timed(query)


def timed(query: Any) -> list[tuple[int, int]]:
    """Return (rows, ms) of each trigger with rows of a query that has ended, except the first."""
    if query.exception() is not None:
        raise query.exception()
    done = [progress for progress in query.recentProgress if progress["numInputRows"]]
    return [(progress["numInputRows"], progress["durationMs"]["triggerExecution"]) for progress in done[1:]]


def rate(done: list[tuple[int, int]]) -> float:
    """Return the rows per second of triggers."""
    return sum(rows for rows, _ in done) / sum(ms for _, ms in done) * 1000


def _sinks(spark: Any, directory: str, files: Path, sinks: Mapping[str, Sink], report: Report) -> None:
    rates: dict[str, list[float]] = {name: [] for name in sinks}
    for _ in range(ROUNDS):
        for name, sink in sinks.items():
            rates[name].append(rate(triggers(spark, directory, files, sink)))
    ours = rates["exactly-once"]

    def of(theirs: str) -> float:
        return median(our / their for our, their in zip(ours, rates[theirs], strict=True))

    shown = ", ".join(f"{name} {median(rate) / 1e6:.2f}" for name, rate in rates.items())
    report.add("spark", f"sink, rows of {VALUE_BYTES + 8} bytes", f"{shown} M rows/s")
    report.add(
        "spark", "sink exactly once, of the counting server", f"{of('counting'):.0%}", ">= 40 %", of("counting") >= 0.4
    )
    report.add("spark", "sink exactly once, of Spark's parquet sink", f"{of('parquet'):.0%}")
    cost = 1 - of("at-least-once")
    report.add("spark", "exactly once costs over at least once", f"{cost:.0%}", "< 15 %", cost < 0.15)


def _overhead(spark: Any, directory: str, files: Path, sinks: Mapping[str, Sink], report: Report) -> None:
    ms: dict[str, list[float]] = {"exactly-once": [], "noop": [], "counting": []}
    for _ in range(ROUNDS):
        for name, taken in ms.items():
            taken.append(median(ms for _, ms in triggers(spark, directory, files, sinks[name])))
    for theirs, what, most in (("noop", "Spark's noop", 80), ("counting", "a Python sink that only counts", 20)):
        more = median(our - their for our, their in zip(ms["exactly-once"], ms[theirs], strict=True))
        report.add(
            "spark",
            f"a trigger of {SMALL_ROWS} rows, beside {what}",
            f"{median(ms['exactly-once']):.0f} ms, {more:.0f} ms more",
            f"< {most} ms more",
            more < most,
        )


def _source(spark: Any, directory: str, bootstrap: str, report: Report) -> None:
    values = _binaries(os.urandom(SOURCE_BATCH_ROWS * VALUE_BYTES), SOURCE_BATCH_ROWS, VALUE_BYTES)
    batches = [
        pa.record_batch([values, pa.array(np.full(SOURCE_BATCH_ROWS, number, dtype=np.int32))], ["value", "partition"])
        for number in range(SOURCE_PARTITIONS)
    ]
    with Admin(bootstrap) as admin:
        admin.alter_configs(topic="source", set={"retention.bytes": -1})
    with Producer(bootstrap, batch_size=2 << 20) as producer:
        for number in range(SOURCE_ROWS // SOURCE_BATCH_ROWS):
            producer.send_batch("source", batches[number % SOURCE_PARTITIONS])
        producer.flush(120)
    shape = {
        "rows_per_trigger": SOURCE_TRIGGER_ROWS,
        "partitions": SOURCE_PARTITIONS,
        "batch_rows": SOURCE_BATCH_ROWS,
        "value_bytes": VALUE_BYTES,
    }
    ours, theirs = [], []
    for _ in range(ROUNDS):
        reader = spark.readStream.format("raftlog").option("bootstrap.servers", bootstrap).option("subscribe", "source")
        reader = reader.option("startingOffsets", "earliest").option("maxOffsetsPerTrigger", SOURCE_TRIGGER_ROWS)
        query = to_noop(reader, directory).trigger(availableNow=True).start()
        assert query.awaitTermination(WAIT_S), f"the query that reads the source did not end within {WAIT_S} s"
        ours.append(rate(timed(query)))
        reader = spark.readStream.format("memory_rows").option("shape", json.dumps(shape))
        query = to_noop(reader, directory).trigger(processingTime="0 seconds").start()
        until_s = time.monotonic() + WAIT_S
        while len(query.recentProgress) < SOURCE_ROWS // SOURCE_TRIGGER_ROWS and time.monotonic() < until_s:
            time.sleep(0.05)
        query.stop()
        theirs.append(rate(timed(query)))
    share = median(our / their for our, their in zip(ours, theirs, strict=True))
    report.add(
        "spark",
        f"source, values of {VALUE_BYTES} bytes",
        f"{median(ours) / 1e6:.2f} M rows/s, {share:.0%} of rows out of memory ({median(theirs) / 1e6:.2f} M rows/s)",
        ">= 40 %",
        share >= 0.4,
    )


def to_noop(reader: Any, directory: str) -> Any:
    """Return a writer of the reader's stream into Spark's `noop` sink."""
    return reader.load().writeStream.format("noop").option("checkpointLocation", tempfile.mkdtemp(dir=directory))
