"""The listener for Kafka clients beside raftlog's own and beside Kafka, in one run: three brokers, acks=all, fsync.

Kafka itself needs Java, and Maven or its jars; what cannot be fetched is left out, and the report says so.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from statistics import median
from typing import Final

import confluent_kafka
import psutil

from bench.compare import NODES, PARTITIONS, Missing, kafka_brokers
from bench.report import Report
from raftlog import Admin, Producer
from raftlog.testing import Cluster

ROUNDS: Final = 5
"""Rounds that count, after one that warms up: a JVM compiles what is hot only after some thousand requests."""
RECORDS: Final = {100: 200_000, 1_000: 50_000}
"""Records of a round, by their size in bytes."""
ONE_BY_ONE: Final = 300
TOPIC: Final = "bench"
TIMEOUT_S: Final = 120.0
LISTENER: Final = "confluent-kafka through the listener"
OWN: Final = "raftlog.Producer"
FASTER_THAN_KAFKA: Final = 1.0
"""Of records per second, at least, with fsync in both."""
SLOWER_THAN_OWN: Final = 1.3
"""Of the time of one record, at most."""


def run(report: Report) -> None:
    """Measure records per second, and how long one record takes, of each of them by turns."""
    report.add("kafka", "load average before the run", f"{psutil.getloadavg()[0]:.1f}")
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(Cluster(NODES, kafka=True, config={"log.retention.bytes": 1 << 30}))
        with Admin(cluster.bootstrap) as admin:
            admin.create_topic(TOPIC, PARTITIONS, replication_factor=NODES)
        through = {LISTENER: (cluster.kafka_bootstrap, TOPIC)}
        synced = ""
        try:
            for system in stack.enter_context(kafka_brokers()):
                through[f"confluent-kafka to {system.label}"] = system.address, system.topic
                synced = synced or f"confluent-kafka to {system.label}"
        except Missing as reason:
            report.add("kafka", "left out", str(reason))
        for size, count in RECORDS.items():
            value = os.urandom(size)
            rates = {name: partial(_kafka_rate, *place, value, count) for name, place in through.items()}
            rates[OWN] = partial(_grpc_rate, cluster.bootstrap, value, count)
            found = _by_turns(report, f"{size} B, records/s", rates)
            if synced:
                ratio = median(ours / theirs for ours, theirs in zip(found[LISTENER], found[synced], strict=True))
                met = ratio >= FASTER_THAN_KAFKA
                name = f"{size} B, records/s, the listener's to Kafka's with fsync"
                report.add("kafka", name, f"{ratio:.2f}", f"at least {FASTER_THAN_KAFKA}", met)
        value = os.urandom(1_000)
        times = {name: partial(_kafka_ms, *place, value) for name, place in through.items()}
        times[OWN] = partial(_grpc_ms, cluster.bootstrap, value)
        found = _by_turns(report, "1 KB, one record at a time, median, ms", times)
        ratio = median(ours / own for ours, own in zip(found[LISTENER], found[OWN], strict=True))
        name = "1 KB, one record at a time, the listener's to raftlog.Producer's"
        report.add("kafka", name, f"{ratio:.2f}", f"at most {SLOWER_THAN_OWN}", ratio <= SLOWER_THAN_OWN)


def _by_turns(report: Report, name: str, measures: Mapping[str, Callable[[], float]]) -> dict[str, list[float]]:
    """Measure round by round, so that what disturbs one disturbs the others; return the figures of each."""
    found: dict[str, list[float]] = {who: [] for who in measures}
    for number in range(ROUNDS + 1):
        for who, measure in measures.items():
            figure = measure()
            if number:
                found[who].append(figure)
    for who, figures in found.items():
        spread = f"{median(figures):,.1f} ({min(figures):,.1f}-{max(figures):,.1f})"
        report.add("kafka", f"{name}, {who}", spread)
    return found


def _kafka_rate(bootstrap: str, topic: str, value: bytes, count: int) -> float:
    with _kafka_producer(bootstrap, linger_ms=5) as producer:
        producer.produce(topic, value)
        producer.flush(TIMEOUT_S)
        begun_s = time.perf_counter()
        for _ in range(count):
            while True:
                try:
                    producer.produce(topic, value)
                    break
                except BufferError:
                    producer.poll(0.01)
        producer.flush(TIMEOUT_S)
        return count / (time.perf_counter() - begun_s)


@contextlib.contextmanager
def _kafka_producer(bootstrap: str, linger_ms: int) -> Iterator[confluent_kafka.Producer]:
    """Yield an idempotent producer; all that it is given must be acknowledged in the end."""
    failed: list[object] = []
    producer = confluent_kafka.Producer(
        {
            "bootstrap.servers": bootstrap,
            "enable.idempotence": True,
            "linger.ms": linger_ms,
            "queue.buffering.max.messages": 1_000_000,
            "delivery.report.only.error": True,
            "on_delivery": lambda error, _: failed.append(error),
            "log_level": 0,
        }
    )
    yield producer
    assert producer.flush(0) == 0, "some records were not acknowledged"
    assert not failed, failed[0]


def _grpc_rate(bootstrap: str, value: bytes, count: int) -> float:
    with Producer(bootstrap, linger_ms=5) as producer:
        producer.send(TOPIC, value).result(TIMEOUT_S)
        begun_s = time.perf_counter()
        for _ in range(count):
            producer.send(TOPIC, value)
        producer.flush(TIMEOUT_S)
        return count / (time.perf_counter() - begun_s)


def _kafka_ms(bootstrap: str, topic: str, value: bytes) -> float:
    with _kafka_producer(bootstrap, linger_ms=0) as producer:
        taken = []
        for _ in range(ONE_BY_ONE):
            begun_s = time.perf_counter()
            producer.produce(topic, value, partition=0)
            producer.flush(TIMEOUT_S)
            taken.append(time.perf_counter() - begun_s)
    return median(taken) * 1_000


def _grpc_ms(bootstrap: str, value: bytes) -> float:
    with Producer(bootstrap, linger_ms=0) as producer:
        taken = []
        for _ in range(ONE_BY_ONE):
            begun_s = time.perf_counter()
            producer.send(TOPIC, value, partition=0).result(TIMEOUT_S)
            taken.append(time.perf_counter() - begun_s)
    return median(taken) * 1_000
