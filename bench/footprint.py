"""A broker's memory while 4 GB pass through, and the time from its start to the first acknowledged record."""

from __future__ import annotations

import os
import re
import threading
import time
from statistics import median

import psutil
import pyarrow as pa

from bench.report import Report
from raftlog import Admin, Consumer, Producer, TopicPartition
from raftlog.testing import Cluster

PASS_THROUGH_BYTES = 4 << 30
RSS_LIMIT = 300 * 10**6
START_LIMIT_S = 1.5
ROUNDS = 5


def _consume(bootstrap: str, rows: int) -> None:
    with Consumer(bootstrap) as consumer:
        consumer.assign([TopicPartition("big", 0)])
        consumer.seek(TopicPartition("big", 0), 0)
        while rows > 0:
            rows -= consumer.poll_arrow(1.0).num_rows


def _memory(report: Report) -> None:
    values = pa.array([os.urandom(1_000) for _ in range(10_000)], pa.binary())
    batch = pa.record_batch([values], names=["value"])
    rounds = PASS_THROUGH_BYTES // (10_000 * 1_000)
    marks = []
    with Cluster(nodes=1, config={"log.segment.bytes": 128 << 20, "log.retention.bytes": 2 << 30}) as cluster:
        with Admin(cluster.bootstrap) as admin:
            admin.create_topic("big", 1)
        process = psutil.Process(cluster.pid(1))
        consumer = threading.Thread(target=_consume, args=(cluster.bootstrap, rounds * batch.num_rows))
        consumer.start()
        with Producer(cluster.bootstrap) as producer:
            for number in range(rounds):
                producer.send_batch("big", batch)
                if number % 10 == 0:
                    marks.append(process.memory_info().rss)
            producer.flush(120)
        consumer.join()
        marks.append(process.memory_info().rss)
        cluster.stop(1)
        lag = re.search(r"largest_ms=([\d.]+) share_above_10_ms=([\d.]+)", cluster.log_tail(1))
        assert lag is not None, "the broker's log lacks the lag of the event loop, which it writes when it stops"
    quarter = len(marks) // 4
    growth = max(marks[-quarter:]) - max(marks[quarter : 2 * quarter])
    report.add(
        "memory",
        "broker RSS while 4 GB pass through",
        f"at most {max(marks) / 1e6:.0f} MB; last quarter against second: {growth / 1e6:+.0f} MB",
        f"< {RSS_LIMIT / 1e6:.0f} MB",
        max(marks) < RSS_LIMIT,
    )
    report.add(
        "loop",
        "broker's event loop while 4 GB pass through, all cores busy",
        f"late by more than 10 ms {float(lag[2]):.2%} of the time, at most {float(lag[1]):.0f} ms",
    )


def _start_to_first_record() -> float:
    start = time.perf_counter()
    with Cluster(nodes=1) as cluster:
        with Admin(cluster.bootstrap) as admin:
            admin.create_topic("first", 1)
        with Producer(cluster.bootstrap) as producer:
            producer.send("first", b"x").result(10)
        return time.perf_counter() - start


def run(report: Report) -> None:
    """Measure the memory, and the time to the first acknowledged record."""
    _start_to_first_record()
    times = [_start_to_first_record() for _ in range(ROUNDS)]
    report.add(
        "start",
        "process start to first acknowledged record",
        f"{median(times):.2f} s (runs: {', '.join(f'{seconds:.2f}' for seconds in times)})",
        f"< {START_LIMIT_S} s",
        median(times) < START_LIMIT_S,
    )
    _memory(report)
