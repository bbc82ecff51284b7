"""The Spark connector beside Spark's own connector for Kafka, by turns in one session on `local[2]`.

    write     cached Parquet files -> a topic, one file per trigger: raftlog exactly once, Kafka at least once
    overhead  the same with files of a few rows, beside Spark's `noop` sink
    stream    a topic -> `noop`, a million rows per trigger
    batch     a topic -> `noop`, in one query

Both clusters have three nodes on the same two cores, topics with two partitions and three replicas, and their defaults:
raftlog acknowledges after an fsync, Kafka from the page cache. Triggers are timed by Spark, without a query's first
one; batch queries by the clock. It needs Java and Maven, which fetches Kafka's jars on the first run.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, Final

from bench.compare import CONNECTOR, KAFKA, Missing, kafka_brokers, spark_jars
from bench.report import Report
from bench.spark import (
    FILE_ROWS,
    FILES,
    SMALL_FILES,
    SMALL_ROWS,
    VALUE_BYTES,
    WAIT_S,
    rate,
    session,
    timed,
    to_noop,
    triggers,
    write_files,
)
from raftlog import Admin
from raftlog.testing import Cluster

ROUNDS: Final = 5
"""After one that warms up."""
NODES: Final = 3
PARTITIONS: Final = 2
TRIGGER_ROWS: Final = 1_000_000
WRITTEN, READ = "written", "read"
RAFTLOG, KAFKAS, NOOP = "raftlog", "kafka", "noop"
"""Spark's names of the formats."""
STREAM_READ: Final = 1.3
"""The target for reading a stream: so many times the rate of Kafka's connector."""

Figures = dict[str, list[float]]
"""By format, what was measured in each round."""


def run(report: Report) -> None:
    """Measure both, by turns, or say what is missing."""
    started_s = time.perf_counter()
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory())
        try:
            jars = ",".join(map(str, sorted(spark_jars().glob("*.jar"))))
            kafka = stack.enter_context(kafka_brokers())[0]
        except (Missing, ImportError) as reason:
            report.add("spark-kafka", "left out", str(reason))
            return
        cluster = stack.enter_context(Cluster(NODES))
        spark = stack.enter_context(session(directory, **{"spark.jars": jars}))
        _make_topics(cluster.bootstrap, kafka.address)
        large, small = Path(directory, "large"), Path(directory, "small")
        write_files(large, FILES, FILE_ROWS)
        write_files(small, SMALL_FILES, SMALL_ROWS)
        servers: dict[str, Mapping[str, str]] = {
            RAFTLOG: {"bootstrap.servers": cluster.bootstrap},
            KAFKAS: {"kafka.bootstrap.servers": kafka.address},
        }
        for form, options in servers.items():
            spark.read.parquet(str(large)).write.format(form).options(**options, topic=READ).mode("append").save()

        def write(form: str) -> float:
            return rate(triggers(spark, directory, large, (form, {**servers[form], "topic": WRITTEN})))

        def overhead(form: str) -> float:
            sink = (form, {**servers.get(form, {}), "topic": WRITTEN})
            return median(ms for _, ms in triggers(spark, directory, small, sink))

        def stream(form: str) -> float:
            options = {**servers[form], "subscribe": READ, "startingOffsets": "earliest"}
            reader = spark.readStream.format(form).options(**options, maxOffsetsPerTrigger=TRIGGER_ROWS)
            query = to_noop(reader, directory).trigger(availableNow=True).start()
            assert query.awaitTermination(WAIT_S), f"the query did not end within {WAIT_S} s"
            return rate(timed(query))

        def batch(form: str) -> float:
            begun_s = time.perf_counter()
            spark.read.format(form).options(**servers[form], subscribe=READ).load().write.format("noop").mode(
                "overwrite"
            ).save()
            return FILES * FILE_ROWS / (time.perf_counter() - begun_s)

        taken = _by_turns({"write": write, "stream": stream, "batch": batch}, (RAFTLOG, KAFKAS))
        taken |= _by_turns({"overhead": overhead}, (RAFTLOG, KAFKAS, NOOP))
    size = f"rows of {VALUE_BYTES + 8} bytes"
    _report_rates(report, f"a stream is written, {size}", taken["write"])
    _report_rates(report, f"a stream is read, {size}", taken["stream"], at_least=STREAM_READ)
    _report_rates(report, f"a topic is read at once, {size}", taken["batch"])
    ms = taken["overhead"]
    shown = ", ".join(f"{form} {median(of):.0f} ms" for form, of in ms.items())
    report.add("spark-kafka", f"a trigger of {SMALL_ROWS} rows", shown)
    took_s = time.perf_counter() - started_s
    report.add("spark-kafka", "took", f"{took_s:.0f} s; Kafka {KAFKA}, Spark's connector for it {CONNECTOR}")


def _make_topics(bootstrap: str, kafka: str) -> None:
    admin_api: Any = importlib.import_module("confluent_kafka.admin")
    theirs = admin_api.AdminClient({"bootstrap.servers": kafka, "log_level": 0})
    made = theirs.create_topics([admin_api.NewTopic(name, PARTITIONS, NODES) for name in (WRITTEN, READ)])
    for each in made.values():
        each.result(60)
    with Admin(bootstrap) as admin:
        for name in (WRITTEN, READ):
            admin.create_topic(name, PARTITIONS, NODES)


def _by_turns(works: Mapping[str, Callable[[str], float]], formats: tuple[str, ...]) -> dict[str, Figures]:
    """Do each work with each format once in every round; each round begins with another format."""
    taken: dict[str, Figures] = {name: {form: [] for form in formats} for name in works}
    for number in range(ROUNDS + 1):
        for name, work in works.items():
            for form in formats[number % len(formats) :] + formats[: number % len(formats)]:
                figure = work(form)
                if number:
                    taken[name][form].append(figure)
                print(f"round {number}: {name}, {form}: {figure:,.0f}", file=sys.stderr, flush=True)
    return taken


def _report_rates(report: Report, what: str, rates: Figures, at_least: float | None = None) -> None:
    ratio = median(ours / theirs for ours, theirs in zip(rates[RAFTLOG], rates[KAFKAS], strict=True))
    shown = ", ".join(
        f"{form} {median(of) / 1e6:.2f} ({min(of) / 1e6:.2f}-{max(of) / 1e6:.2f})" for form, of in rates.items()
    )
    report.add(
        "spark-kafka",
        what,
        f"{shown} M rows/s; {ratio:.2f} times",
        "" if at_least is None else f">= {at_least:g} times",
        None if at_least is None else ratio >= at_least,
    )
