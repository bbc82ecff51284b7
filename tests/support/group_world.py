"""A group of consumers in a fake cluster, for tests: the calls of their listeners, and the committed offsets."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from raftlog import Consumer, Producer, RebalanceListener, Record, TopicPartition
from tests.support.fake_broker import FakeCluster
from tests.support.fake_members import FakeMembers

ZERO, ONE, TWO, THREE = (TopicPartition("t", number) for number in range(4))


class Told(RebalanceListener):
    """Keeps what it was told."""

    def __init__(self) -> None:
        self.events: list[tuple[str, list[TopicPartition]]] = []

    def on_partitions_assigned(self, partitions: list[TopicPartition]) -> None:
        self.events.append(("assigned", partitions))

    def on_partitions_revoked(self, partitions: list[TopicPartition]) -> None:
        self.events.append(("revoked", partitions))

    def on_partitions_lost(self, partitions: list[TopicPartition]) -> None:
        self.events.append(("lost", partitions))


class World:
    """A cluster of two nodes with a topic of four partitions, and a group that node 1 coordinates."""

    def __init__(self, cluster: FakeCluster) -> None:
        self.cluster = cluster
        cluster.create_topic("t", 4)
        cluster.groups.add("g", 1)
        self.members = cluster.groups.members = FakeMembers(cluster, "g")
        self.open: list[Consumer] = []
        self.sent = 0

    def consumer(self, **options: Any) -> Consumer:
        options = {"auto_offset_reset": "earliest", "auto_commit_interval_ms": 60_000, **options}
        consumer = Consumer(self.cluster.bootstrap, "g", **options)
        self.open.append(consumer)
        return consumer

    def send(self, count: int, partition: int | None = None) -> None:
        with Producer(self.cluster.bootstrap) as producer:
            for number in range(count):
                where = number % 4 if partition is None else partition
                producer.send("t", b"%d" % self.sent, partition=where)
                self.sent += 1
            producer.flush(30)

    def committed(self, part: TopicPartition = ZERO) -> int | None:
        found = self.cluster.call(lambda: self.cluster.groups.groups["g"].offsets.get(part))
        return None if found is None else found.offset

    def do(self, function: Callable[[], object]) -> None:
        self.cluster.call(function)

    def member_id(self, consumer: Consumer) -> str:
        return consumer.group_metadata().member_id

    def close(self) -> None:
        for consumer in self.open:
            consumer.close()


def until(done: Callable[[], object], *consumers: Consumer, within_s: float = 30.0) -> list[Record]:
    """Poll until the condition holds; return the records."""
    deadline = time.monotonic() + within_s
    found: list[Record] = []
    while not done():
        assert time.monotonic() < deadline, (
            f"after {within_s:g} s of polling the condition does not hold; {len(found)} records were read"
        )
        for consumer in consumers:
            found += consumer.poll(0.02)
        if not consumers:
            time.sleep(0.01)
    return found
