"""Records per second of the SDK in one process, with a real broker on the same two cores."""

from __future__ import annotations

import os
import time
from statistics import median

import pyarrow as pa

from bench.report import Report
from raftlog import Admin, Consumer, Producer, TopicPartition
from raftlog.testing import Cluster

ROUNDS = 3
RECORD_BYTES = 100
SEND = 1_000_000
SEND_BATCH = 8_000_000
POLL = 1_500_000
BATCH_ROWS = 100_000


def _rate(rates: list[float]) -> str:
    return f"{median(rates) / 1e6:.2f} M records/s (runs: {', '.join(f'{rate / 1e6:.2f}' for rate in rates)})"


def _judge(report: Report, name: str, rates: list[float], target: float) -> None:
    report.add("sdk", name, _rate(rates), f">= {target / 1e6:g} M records/s", median(rates) >= target)


def _send(bootstrap: str) -> float:
    value = os.urandom(RECORD_BYTES)
    with Producer(bootstrap) as producer:
        producer.send("send", value).result(10)
        start = time.perf_counter()
        for _ in range(SEND):
            producer.send("send", value)
        producer.flush(60)
        return SEND / (time.perf_counter() - start)


def _send_batch(bootstrap: str, topic: str, batch: pa.RecordBatch) -> float:
    with Producer(bootstrap) as producer:
        producer.send(topic, b"first").result(10)
        start = time.perf_counter()
        for _ in range(SEND_BATCH // batch.num_rows):
            producer.send_batch(topic, batch)
        producer.flush(60)
        return SEND_BATCH / (time.perf_counter() - start)


def _poll_arrow(bootstrap: str) -> float:
    with Consumer(bootstrap) as consumer:
        consumer.assign([TopicPartition("arrow", 0)])
        consumer.seek(TopicPartition("arrow", 0), 0)
        rows = 0
        start = time.perf_counter()
        while rows < SEND_BATCH:
            rows += consumer.poll_arrow(1.0).num_rows
        return rows / (time.perf_counter() - start)


def _poll(bootstrap: str) -> float:
    with Consumer(bootstrap) as consumer:
        consumer.assign([TopicPartition("arrow", 0)])
        consumer.seek(TopicPartition("arrow", 0), 0)
        rows = 0
        start = time.perf_counter()
        while rows < POLL:
            rows += len(consumer.poll(1.0))
        return rows / (time.perf_counter() - start)


def run(report: Report) -> None:
    """Measure send, send_batch, poll_arrow and poll with records of 100 bytes."""
    values = pa.array([os.urandom(RECORD_BYTES) for _ in range(BATCH_ROWS)], pa.binary())
    plain = pa.record_batch([values], names=["value"])
    keys = pa.array([b"%08d" % (row * 7919 % 10_000) for row in range(BATCH_ROWS)], pa.binary())
    keyed = pa.record_batch([values, keys], names=["value", "key"])
    with Cluster(nodes=1, config={"log.retention.bytes": 1 << 30}) as cluster:
        with Admin(cluster.bootstrap) as admin:
            admin.create_topic("send", 1)
            admin.create_topic("arrow", 1)
            admin.create_topic("keyed", 6)
        where = cluster.bootstrap
        _judge(report, "send", [_send(where) for _ in range(ROUNDS)], 400_000)
        _judge(report, "send_batch", [_send_batch(where, "arrow", plain) for _ in range(ROUNDS)], 3_000_000)
        rates = [_send_batch(where, "keyed", keyed) for _ in range(ROUNDS)]
        report.add("sdk", "send_batch, keyed over 6 partitions", _rate(rates))
        _judge(report, "poll_arrow", [_poll_arrow(where) for _ in range(ROUNDS)], 5_000_000)
        _judge(report, "poll", [_poll(where) for _ in range(ROUNDS)], 600_000)
