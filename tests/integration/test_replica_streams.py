"""Replication between processes where not every broker is a controller, over a network that can be cut."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import raftlog
from raftlog.testing import Cluster
from tests.support.steady import PATIENT
from tests.support.up_to_date import up_to_date

ONLY_BROKERS = [2, 3, 4]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(nodes=4, controllers=1, dedicated_controllers=True, can_be_partitioned=True, config=PATIENT) as made:
        with raftlog.Admin(made.bootstrap) as admin:
            admin.create_topic("copied", replication_factor=3, configs={"min.insync.replicas": "2"}, timeout=60)
        yield made


def isr(admin: raftlog.Admin) -> list[int]:
    return sorted(up_to_date(admin).describe_topic("copied").partitions[0].isr)


def send(cluster: Cluster, *values: bytes) -> list[int]:
    with raftlog.Producer(cluster.bootstrap) as producer:
        return [producer.send("copied", value).result(60).offset for value in values]


def test_brokers_that_are_no_controllers_copy_each_other(cluster: Cluster) -> None:
    assert send(cluster, b"a", b"b") == [0, 1]
    cluster.wait_for(lambda admin: isr(admin) == ONLY_BROKERS)


def test_a_follower_that_is_cut_off_leaves_the_isr_and_comes_back(cluster: Cluster) -> None:
    leader = cluster.leader("copied")
    cut_off = next(broker for broker in ONLY_BROKERS if broker != leader)
    cluster.partition([cut_off], [broker for broker in ONLY_BROKERS if broker != cut_off])
    (offset,) = send(cluster, b"meanwhile")
    cluster.wait_for(lambda admin: cut_off not in isr(admin), what="its leaving the ISR")
    assert send(cluster, b"more") == [offset + 1]
    cluster.heal()
    cluster.wait_for(lambda admin: isr(admin) == ONLY_BROKERS, what="its return")


def test_a_follower_that_was_killed_is_filled_again_and_can_lead(cluster: Cluster) -> None:
    before = send(cluster, b"before")[-1]
    cluster.wait_for(lambda admin: isr(admin) == ONLY_BROKERS, what="every replica in sync")
    leader = cluster.leader("copied")
    cluster.kill(leader)
    successor = cluster.leader("copied", other_than=leader)
    assert successor != leader
    assert send(cluster, b"after") == [before + 1]
    cluster.start(leader)
    cluster.wait_for(lambda admin: isr(admin) == ONLY_BROKERS, what="its return")
    with raftlog.Consumer(cluster.bootstrap, auto_offset_reset="earliest") as consumer:
        consumer.assign([raftlog.TopicPartition("copied", 0)])
        values: list[bytes | None] = []
        while len(values) < before + 2:
            values += [record.value for record in consumer.poll(10)]
    assert values[-2:] == [b"before", b"after"]
