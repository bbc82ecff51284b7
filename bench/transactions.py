"""Transactions: the latency of a commit, transactions per second, and the cost of reading committed records."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from statistics import median, quantiles
from typing import Final

import pyarrow as pa

from bench.report import Report
from raftlog import Admin, Consumer, Producer, TopicPartition, aio
from raftlog._client.keywords import IsolationLevel
from raftlog.testing import Cluster

ALONE: Final = 300
"""The number of transactions, one at a time, for the latency of a commit."""
PRODUCERS: Final = 50
CROWD_S: Final = 8.0
PARTITIONS: Final = 6
TOPIC: Final = "payments"
READ_TOPIC: Final = "read"
ROWS: Final = 4_000_000
BATCH_ROWS: Final = 50_000
TRANSACTION_BATCHES: Final = 8
ROUNDS: Final = 5
_VALUE: Final = os.urandom(100)


def run(report: Report) -> None:
    """Measure with one server, then with three servers and replicas; with fsync before every acknowledgement."""
    for nodes in (1, 3):
        with Cluster(nodes=nodes) as cluster:
            with Admin(cluster.bootstrap) as admin:
                admin.create_topic(TOPIC, partitions=PARTITIONS, replication_factor=nodes)
            _alone(cluster.bootstrap, nodes, report)
            asyncio.run(_crowd(cluster.bootstrap, nodes, report))
            if nodes == 1:
                _reading(cluster.bootstrap, report)


def _alone(bootstrap: str, nodes: int, report: Report) -> None:
    """Measure `commit_transaction` of one producer with one record per transaction."""
    commits_ms = []
    with Producer(bootstrap, transactional_id="alone") as producer:
        for number in range(ALONE + 20):
            producer.begin_transaction()
            producer.send(TOPIC, _VALUE, partition=number % PARTITIONS)
            producer.flush(30)
            begun_s = time.perf_counter()
            producer.commit_transaction()
            if number >= 20:
                commits_ms.append((time.perf_counter() - begun_s) * 1000)
    p50, p99 = median(commits_ms), quantiles(commits_ms, n=100)[-1]
    target = nodes == 1
    report.add(
        "txn",
        f"RF={nodes} with fsync: commit of one record",
        f"p50 {p50:.1f} ms, p99 {p99:.1f} ms",
        "p50 < 10 ms" if target else "",
        p50 < 10 if target else None,
    )


async def _crowd(bootstrap: str, nodes: int, report: Report) -> None:
    """Measure many producers in one process, each with one transaction of one record at a time."""
    until_s = 0.0

    async def one(number: int, ready: asyncio.Barrier) -> int:
        count = 0
        async with aio.Producer(bootstrap, transactional_id=f"crowd-{number}") as producer:
            async with producer.transaction():  # finds its coordinator, and gets its producer id
                await producer.send(TOPIC, _VALUE, partition=number % PARTITIONS)
            await ready.wait()
            while time.perf_counter() < until_s:
                async with producer.transaction():
                    await producer.send(TOPIC, _VALUE, partition=(number + count) % PARTITIONS)
                count += 1
        return count

    ready = asyncio.Barrier(PRODUCERS + 1)
    tasks = [asyncio.create_task(one(number, ready)) for number in range(PRODUCERS)]
    until_s = time.perf_counter() + 3_600
    async with asyncio.timeout(120):
        await ready.wait()
    until_s = time.perf_counter() + CROWD_S
    rate = sum(await asyncio.gather(*tasks)) / CROWD_S
    target = nodes == 1
    report.add(
        "txn",
        f"RF={nodes} with fsync: {PRODUCERS} producers, a record each",
        f"{rate:.0f} transactions/s",
        ">= 500" if target else "",
        rate >= 500 if target else None,
    )


def _reading(bootstrap: str, report: Report) -> None:
    """Read a log of transactions, one in ten of them aborted, at both isolation levels."""
    with Admin(bootstrap) as admin:
        admin.create_topic(READ_TOPIC)
    values = pa.array([_VALUE] * BATCH_ROWS, pa.binary())
    batch = pa.record_batch([values], names=["value"])
    with Producer(bootstrap, transactional_id="writer") as producer:
        for number in range(ROWS // BATCH_ROWS // TRANSACTION_BATCHES):
            producer.begin_transaction()
            for _ in range(TRANSACTION_BATCHES):
                producer.send_batch(READ_TOPIC, batch)
            if number % 10 == 9:
                producer.abort_transaction()
            else:
                producer.commit_transaction()
    committed, uncommitted = [], []
    for _ in range(ROUNDS):
        committed.append(_rows_per_s(bootstrap, "read_committed"))
        uncommitted.append(_rows_per_s(bootstrap, "read_uncommitted"))
    share = _paired(committed, uncommitted)
    report.add(
        "txn",
        "poll_arrow, read_committed",
        f"{share:.0%} of read_uncommitted, {median(committed) / 1e6:.1f} of {median(uncommitted) / 1e6:.1f} M rows/s",
        ">= 90 %",
        share >= 0.9,
    )


def _paired(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the median ratio of paired rounds, as the machine's speed varies over time."""
    return median(our / their for our, their in zip(ours, theirs, strict=True))


def _rows_per_s(bootstrap: str, isolation_level: IsolationLevel) -> float:
    """Return the offsets per second that the consumer passes, whether it returns their records or not."""
    place = TopicPartition(READ_TOPIC, 0)
    with Consumer(bootstrap, isolation_level=isolation_level) as consumer:
        consumer.assign([place])
        consumer.seek(place, 0)
        end = consumer.end_offsets([place])[place]
        consumer.poll_arrow(30.0)
        begun = consumer.position(place)
        begun_s = time.perf_counter()
        while consumer.position(place) < end:
            consumer.poll_arrow(5.0)
        return (end - begun) / (time.perf_counter() - begun_s)
