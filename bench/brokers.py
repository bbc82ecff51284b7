"""Clusters of several sizes on this machine: brokers and processes per host, and what many topics cost.

`brokers`: the same load on 3 and 5 hosts with one broker each, and on 3 hosts with 2 and 4 broker processes each. A
host is a rack, so the replicas of a partition are on three of them. All hosts share this machine, so more processes can
only help where it has idle cores; CPU time per record, of all brokers together, shows what a further process costs.

`topics`: three brokers with many topics: making them, a clean restart of a broker, the kill of one. Kafka beside it.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import statistics
import time
from collections.abc import Callable
from typing import Any, Final

from bench.compare import Missing, kafka_brokers
from bench.failover import Writer
from bench.report import Report
from bench.small import Measured, measure
from raftlog import Admin
from raftlog.testing import Cluster

SHAPES: Final = ((3, 1), (5, 1), (3, 2), (3, 4))
"""Hosts, and broker processes on each."""
REPLICAS: Final = 3
PARTITIONS: Final = 12
ROUNDS: Final = 3
LOADS: Final = (
    ("as fast as one producer can", "stream", 1, 30_000),
    ("32 producers, one in flight", "many-32", 32, 1_600),
)
TOPIC: Final = "bench"
TOPICS: Final = 1_000
PARTITIONS_EACH: Final = 5
KAFKA_AT_ONCE: Final = 50
"""Topics of one request to Kafka, which takes far longer for each by itself."""
MOST_S: Final = 180.0
"""How long to wait for anything."""


def run(report: Report) -> None:
    """Measure the shapes one after the other."""
    cores = os.cpu_count() or 1
    for hosts, processes in SHAPES:
        count = hosts * processes
        racks = {node: f"host-{(node - 1) % hosts + 1}" for node in range(1, count + 1)}
        with Cluster(nodes=count, controllers=3, racks=racks) as cluster:
            with Admin(cluster.bootstrap) as admin:
                admin.create_topic(TOPIC, PARTITIONS, REPLICAS)
                parts = admin.describe_topic(TOPIC).partitions
            assert all(len({racks[each] for each in part.replicas}) == REPLICAS for part in parts), (
                f"the replicas of a partition must be on {REPLICAS} hosts, one on each"
            )
            servers = {f"broker {node}": cluster.pid(node) for node in cluster.broker_ids}
            what = f"{hosts} hosts x {processes} process{'es' if processes > 1 else ''}, {cores} cores in all"
            for load, workload, producers, records in LOADS:
                arguments = ["bench.compare", workload, "raftlog", cluster.bootstrap, TOPIC, str(producers)]
                runs = [measure([*arguments, str(records)], servers) for _ in range(ROUNDS)]
                report.add("brokers", f"{what}, {load}", _shown(runs))


def _shown(runs: list[Measured]) -> str:
    rates = [each.per_s for each in runs]
    cpu = [sum(us for name, us in each.cpu_us.items() if name != "client") for each in runs]
    return (
        f"{statistics.median(rates):,.0f} records/s ({min(rates):,.0f}-{max(rates):,.0f}), "
        f"{statistics.median(cpu):.0f} us of CPU per record in all brokers ({min(cpu):.0f}-{max(cpu):.0f})"
    )


# Many topics


def run_topics(report: Report) -> None:
    """Make topics, restart a broker and kill one, with none and with many of them; then Kafka."""
    what = f"{TOPICS:,} topics, {TOPICS * PARTITIONS_EACH:,} partitions, RF={REPLICAS}"
    with Cluster(nodes=3) as cluster:
        with Admin(cluster.bootstrap) as admin:
            admin.create_topic("writes", 1, REPLICAS)
        _restart(report, cluster, "no other topics")
        begun_s = time.monotonic()
        with Admin(cluster.bootstrap) as admin:
            for number in range(TOPICS):
                admin.create_topic(f"topic{number:05}", PARTITIONS_EACH, REPLICAS, timeout=120)
        made_s = time.monotonic() - begun_s
        report.add(
            "topics", f"raftlog, {what}: made one by one", f"{made_s:.0f} s, {made_s / TOPICS * 1e3:.0f} ms each"
        )
        _restart(report, cluster, what)
    try:
        with kafka_brokers() as systems:
            _kafka(report, systems[0].address, dict(systems[0].servers), what)
    except Missing as missing:
        report.add("topics", "Kafka", f"left out: {missing}")


def _restart(report: Report, cluster: Cluster, what: str) -> None:
    node = cluster.leader("writes")
    begun_s = time.monotonic()
    cluster.stop(node)
    stopped_s = time.monotonic() - begun_s
    begun_s = time.monotonic()
    cluster.start(node)
    ready_s = time.monotonic() - begun_s
    _wait_in_sync(cluster)
    report.add(
        "topics",
        f"raftlog, {what}: a clean restart of a broker",
        f"stops in {stopped_s:.1f} s, is ready {ready_s:.1f} s after its start, all replicas are in sync after "
        f"{time.monotonic() - begun_s:.1f} s",
    )
    writer = Writer(cluster.bootstrap)
    try:
        time.sleep(2)
        node = cluster.leader("writes")
        killed_s = time.monotonic()
        cluster.kill(node)
        led_s = _until(lambda: _all_led(cluster, node), killed_s)
        gap_s = writer.longest_gap_s(killed_s)
    finally:
        writer.stop()
    begun_s = time.monotonic()
    cluster.start(node)
    _wait_in_sync(cluster)
    report.add(
        "topics",
        f"raftlog, {what}: a leader killed with kill -9",
        f"writes to one of its partitions pause for {gap_s:.2f} s, every partition has another leader after "
        f"{led_s:.1f} s; all replicas are in sync {time.monotonic() - begun_s:.1f} s after it is started again",
    )


def _wait_in_sync(cluster: Cluster) -> None:
    def in_sync(admin: Admin) -> bool:
        topics = admin.describe_topics()
        return all(len(part.isr) == REPLICAS for topic in topics for part in topic.partitions)

    cluster.wait_for(in_sync, timeout_s=MOST_S, what="all replicas in sync")


def _all_led(cluster: Cluster, dead: int) -> bool:
    with Admin(cluster.bootstrap) as admin:
        parts = [part for topic in admin.describe_topics() for part in topic.partitions]
    return all(part.leader not in (-1, dead) for part in parts)


def _until(done: Callable[[], bool], since_s: float) -> float:
    """Return the seconds from a moment until something is true."""
    while not done():
        assert time.monotonic() < since_s + MOST_S, f"not within {MOST_S:.0f} s"
        time.sleep(0.05)
    return time.monotonic() - since_s


def _kafka(report: Report, address: str, servers: dict[str, int], what: str) -> None:
    """Make the same topics in Kafka, kill a broker, and wait until every partition has another leader."""
    from confluent_kafka import KafkaException

    api: Any = importlib.import_module("confluent_kafka.admin")
    admin = api.AdminClient({"bootstrap.servers": address, "log_level": 0})
    begun_s = time.monotonic()
    for first in range(0, TOPICS, KAFKA_AT_ONCE):
        numbers = range(first, min(first + KAFKA_AT_ONCE, TOPICS))
        topics = [api.NewTopic(f"topic{number:05}", PARTITIONS_EACH, REPLICAS) for number in numbers]
        for made in admin.create_topics(topics, request_timeout=120).values():
            made.result(120)
    made_s = time.monotonic() - begun_s
    each_ms = made_s / TOPICS * 1e3
    report.add("topics", f"Kafka, {what}: made {KAFKA_AT_ONCE} at a time", f"{made_s:.0f} s, {each_ms:.0f} ms each")

    def led_by_others(dead: int) -> bool:
        with contextlib.suppress(KafkaException):
            topics = admin.list_topics(timeout=10).topics.values()
            return all(part.leader not in (-1, dead) for topic in topics for part in topic.partitions.values())
        return False

    _until(lambda: led_by_others(0), time.monotonic())
    killed_s = time.monotonic()
    os.kill(servers["node 3"], signal.SIGKILL)
    led_s = _until(lambda: led_by_others(3), killed_s)
    report.add(
        "topics",
        f"Kafka, {what}: a broker killed with kill -9",
        f"every partition has another leader after {led_s:.1f} s",
    )
