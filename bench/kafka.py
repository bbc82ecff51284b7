"""The listener for Kafka clients beside the gRPC way, in the same run: three brokers and replicas, acks=all, fsync."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from statistics import median

import confluent_kafka

from bench.report import Report
from raftlog import Admin, Producer
from raftlog.testing import Cluster

ROUNDS = 3
RECORDS = {100: 200_000, 1_000: 100_000}
"""Records of a round, by their size in bytes."""
ONE_BY_ONE = 300
TOPIC = "bench"
PARTITIONS = 6
TIMEOUT_S = 120.0


def run(report: Report) -> None:
    """Measure records per second, and how long one record takes, with confluent-kafka and with raftlog's producer."""
    with Cluster(3, kafka=True, config={"log.retention.bytes": 1 << 30}) as cluster:
        with Admin(cluster.bootstrap) as admin:
            admin.create_topic(TOPIC, PARTITIONS, replication_factor=3)
        for size, count in RECORDS.items():
            value = os.urandom(size)
            _compare(
                report,
                f"{size} B, records/s",
                partial(_kafka_rate, cluster.kafka_bootstrap, value, count),
                partial(_grpc_rate, cluster.bootstrap, value, count),
            )
        value = os.urandom(1_000)
        _compare(
            report,
            "1 KB, one record at a time, ms (median)",
            partial(_kafka_ms, cluster.kafka_bootstrap, value),
            partial(_grpc_ms, cluster.bootstrap, value),
        )


def _compare(report: Report, name: str, kafka: Callable[[], float], grpc: Callable[[], float]) -> None:
    rounds = [(kafka(), grpc()) for _ in range(ROUNDS)]  # in turn, so that what disturbs one disturbs the other
    through_kafka, through_grpc = (median(each) for each in zip(*rounds, strict=True))
    report.add("kafka", f"{name}, confluent-kafka through the listener", f"{through_kafka:,.1f}")
    report.add("kafka", f"{name}, raftlog.Producer", f"{through_grpc:,.1f}")
    report.add("kafka", f"{name}, ratio", f"{median(ours / theirs for ours, theirs in rounds):.2f}")


def _kafka_producer(bootstrap: str) -> confluent_kafka.Producer:
    return confluent_kafka.Producer(
        {
            "bootstrap.servers": bootstrap,
            "enable.idempotence": True,
            "linger.ms": 5,
            "queue.buffering.max.messages": 1_000_000,
            "log_level": 0,
        }
    )


def _kafka_rate(bootstrap: str, value: bytes, count: int) -> float:
    producer = _kafka_producer(bootstrap)
    producer.produce(TOPIC, value)
    producer.flush(TIMEOUT_S)
    begun_s = time.perf_counter()
    for _ in range(count):
        while True:
            try:
                producer.produce(TOPIC, value)
                break
            except BufferError:
                producer.poll(0.01)
    left = producer.flush(TIMEOUT_S)
    assert left == 0, f"{left} records were not acknowledged"
    return count / (time.perf_counter() - begun_s)


def _grpc_rate(bootstrap: str, value: bytes, count: int) -> float:
    with Producer(bootstrap, linger_ms=5) as producer:
        producer.send(TOPIC, value).result(TIMEOUT_S)
        begun_s = time.perf_counter()
        for _ in range(count):
            producer.send(TOPIC, value)
        producer.flush(TIMEOUT_S)
        return count / (time.perf_counter() - begun_s)


def _kafka_ms(bootstrap: str, value: bytes) -> float:
    producer = confluent_kafka.Producer(
        {"bootstrap.servers": bootstrap, "enable.idempotence": True, "linger.ms": 0, "log_level": 0}
    )
    taken = []
    for _ in range(ONE_BY_ONE):
        begun_s = time.perf_counter()
        producer.produce(TOPIC, value, partition=0)
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
