"""Three brokers, three replicas, acks=all, beside a ceiling of one leader and two followers in the same run."""

from __future__ import annotations

import asyncio
import time
from statistics import median

from grpc import aio

from bench import ceiling
from bench.produce import ROUNDS, UNSAFE, Shape, broker_run, ceiling_servers, compare
from bench.report import Report
from raftlog import Admin
from raftlog.testing import Cluster

BROKERS = 3
MANY_PARTITIONS = 2_000
FLAT = 0.8
"""The part of the batches a second that is to remain when the brokers have 2 000 partitions instead of one."""
SMALL_BATCHES = Shape("4 KiB batches", 1 << 12, 6_000, 64)


def address(cluster: Cluster, node_id: int) -> str:
    """Return where clients reach a broker."""
    return cluster.bootstrap.split(",")[cluster.broker_ids.index(node_id)]


def run(report: Report) -> None:
    """Throughput and latency with three replicas, and how they depend on the number of partitions."""
    started = time.perf_counter()
    with Cluster(nodes=BROKERS, config={"log.retention.bytes": 1 << 30}) as cluster:
        with Admin(cluster.bootstrap) as admin:
            admin.create_topic("unsafe", replication_factor=BROKERS, configs=UNSAFE)
            admin.create_topic("safe", replication_factor=BROKERS)
        for label, fsync, topic in (("no fsync", False, "unsafe"), ("with fsync", True, "safe")):
            with ceiling_servers(fsync=fsync, followers=BROKERS - 1) as top:
                leader = address(cluster, cluster.leader(topic))
                what = f"RF=3 acks=all {label}"
                asyncio.run(compare(report, "replicate", what, top=top, leader=leader, topic=topic, p50_ms=2.0))
        _compare_sizes(report, cluster)
    report.add("replicate", "took", f"{time.perf_counter() - started:.0f} s")


def _compare_sizes(report: Report, cluster: Cluster) -> None:
    """The same load on one partition, while the cluster has nothing else and while it has 2 000 partitions more."""
    leader = address(cluster, cluster.leader("safe"))
    few = asyncio.run(_batches_per_second(leader))
    with Admin(cluster.bootstrap) as admin:
        admin.create_topic("many", MANY_PARTITIONS, replication_factor=BROKERS, timeout=120)
    time.sleep(5)  # until all are followed and nothing is left to do
    many = asyncio.run(_batches_per_second(leader))
    report.add(
        "replicate",
        f"RF=3 with fsync, {SMALL_BATCHES.name}: 1 partition, and with {MANY_PARTITIONS:,} more",
        f"{few:,.0f} and {many:,.0f} batches/s, {many / few:.0%}",
        f">= {FLAT:.0%}",
        many / few >= FLAT,
    )


async def _batches_per_second(leader: str) -> float:
    async with aio.insecure_channel(leader, options=ceiling.UNLIMITED) as channel:
        runs = [await broker_run(channel, "safe", SMALL_BATCHES) for _ in range(ROUNDS)]
    return median(run.messages / run.seconds for run in runs)
