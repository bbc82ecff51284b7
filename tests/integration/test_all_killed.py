"""kill -9 of all servers at once: those that come back hold every acknowledged record, and serve without the others."""

from __future__ import annotations

import time

import pytest

from raftlog import Admin, Consumer, Producer
from raftlog.testing import Cluster

PARTITIONS = 6
RECORDS = 300
SOON_S = 30
"""Sessions take 1.5 s; the rest is for a busy machine."""


def produce(cluster: Cluster, values: range) -> None:
    with Producer(cluster.bootstrap, acks="all") as producer:
        sent = [producer.send("t", b"%d" % value, partition=value % PARTITIONS) for value in values]
        for delivery in sent:
            delivery.result(SOON_S)


def values_of(cluster: Cluster, count: int) -> list[int]:
    seen: list[int] = []
    with Consumer(cluster.bootstrap, auto_offset_reset="earliest") as consumer:
        consumer.assign(consumer.partitions_for("t"))
        deadline = time.monotonic() + SOON_S
        while len(seen) < count:
            assert time.monotonic() < deadline, f"only {len(seen)} of {count} records were read within {SOON_S:g} s"
            seen += [int(record.value or b"") for record in consumer.poll(0.2)]
    return sorted(seen)


@pytest.mark.parametrize("away", [2])
def test_two_of_three_serve_every_partition_while_the_third_is_away(away: int) -> None:
    with Cluster(nodes=3) as cluster:
        with Admin(cluster.bootstrap) as admin:
            admin.create_topic("t", PARTITIONS, replication_factor=3, timeout=60)
        produce(cluster, range(RECORDS))
        for node_id in cluster.node_ids:
            cluster.kill(node_id)
        back = [node_id for node_id in cluster.node_ids if node_id != away]
        for node_id in back:
            cluster.start(node_id, wait=False)
        for node_id in back:
            cluster.wait_ready(node_id)
        produce(cluster, range(RECORDS, 2 * RECORDS))
        assert values_of(cluster, 2 * RECORDS) == list(range(2 * RECORDS))
