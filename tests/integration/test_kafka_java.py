"""Java's clients, of Kafka 4.3, as members of a group: they need Java with its compiler, and Maven or Kafka's jars.

The jars are those of `./dev bench compare`: fetched once, into build/bench.
"""

from __future__ import annotations

from pathlib import Path

import confluent_kafka
import pytest

import raftlog
from raftlog.testing import Cluster
from tests.support.kafka_java import JavaProgram, jars_or_skip
from tests.support.patience import until
from tests.support.up_to_date import heard_everywhere

pytestmark = pytest.mark.long

PARTITIONS = 4
TOPIC = "moved"
TIMEOUT_S = 240.0


class JavaMember(JavaProgram):
    """One JVM with one consumer."""

    def __init__(self, jars: Path, cluster: Cluster, protocol: str) -> None:
        self.read: list[int] = []
        self.partitions = 0
        super().__init__(jars, "GroupMember", cluster.kafka_bootstrap, TOPIC, TOPIC, protocol, on_line=self._hear)

    def _hear(self, line: str) -> None:
        what, _, number = line.partition(" ")
        if what == "read":
            self.read.append(int(number))
        elif what == "has":
            self.partitions = int(number)


@pytest.fixture
def jars() -> Path:
    return jars_or_skip()


def test_javas_consumers_move_a_live_group_to_the_protocol_of_the_coordinator_and_back(jars: Path) -> None:
    """No record is lost, and none is given to two of them."""
    config = {"group.initial.rebalance.delay.ms": 100, "group.consumer.heartbeat.interval.ms": 500}
    members: list[JavaMember] = []
    gone: list[JavaMember] = []
    told = 0
    with Cluster(3, kafka=True, config=config) as cluster:
        with raftlog.Admin(cluster.bootstrap) as admin:
            admin.create_topic(TOPIC, partitions=PARTITIONS, replication_factor=3)
        heard_everywhere(cluster)
        producer = confluent_kafka.Producer({"bootstrap.servers": cluster.kafka_bootstrap, "log_level": 0})

        def go_on(kind: str) -> None:
            nonlocal told
            for number in range(told, told + 40):
                producer.produce(TOPIC, b"%d" % number, partition=number % PARTITIONS)
            assert producer.flush(TIMEOUT_S) == 0
            told += 40
            share = PARTITIONS // len(members)
            until(
                lambda: (
                    all(each.partitions == share for each in members)
                    and {number for each in (*members, *gone) for number in each.read} == {*range(told)}
                ),
                "the members share the partitions, and have read everything",
                within_s=TIMEOUT_S,
                pause_s=0.1,
            )
            with raftlog.Admin(cluster.bootstrap) as admin:
                assert admin.describe_group(TOPIC).type == kind

        def leaves(kind: str) -> None:
            member = members.pop(0)
            gone.append(member)
            member.end(TIMEOUT_S)
            go_on(kind)

        def joins(protocol: str, kind: str) -> None:
            members.append(JavaMember(jars, cluster, protocol))
            go_on(kind)

        try:
            joins("classic", "classic")
            joins("consumer", "consumer")
            leaves("consumer")
            joins("classic", "consumer")
            leaves("classic")
        finally:
            for member in members:
                member.kill()
    assert sorted(number for member in (*members, *gone) for number in member.read) == [*range(told)], (
        "the members together must read each record exactly once"
    )
