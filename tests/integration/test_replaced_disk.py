"""A broker that comes back with an empty disk: others' records outlive it, even where it was the only one in sync."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest

import raftlog
from raftlog.testing import Cluster
from raftlog.types import TopicPartition
from tests.support.command_line import run_here
from tests.support.steady import PATIENT
from tests.support.up_to_date import up_to_date

SETTLING_S = 2.0
"""Longer than the controller takes for an election."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Three controllers that are brokers too, and two brokers."""
    with Cluster(5, controllers=3, config=PATIENT) as made:
        yield made


def run(cluster: Cluster, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_here(*arguments, "--bootstrap", cluster.bootstrap)


def described(cluster: Cluster, topic: str) -> dict[str, Any]:
    ran = run(cluster, "topic", "describe", topic, "-o", "json")
    [found] = json.loads(ran.stdout)
    [part] = found["partitions"]
    return dict(part)


def produce(cluster: Cluster, topic: str, values: range) -> None:
    with raftlog.Producer(cluster.bootstrap) as producer:
        deliveries = [producer.send(topic, str(value).encode(), partition=0) for value in values]
        producer.flush()
        for delivery in deliveries:
            delivery.result()


def values_of(cluster: Cluster, topic: str, count: int) -> list[int]:
    with raftlog.Consumer(cluster.bootstrap, auto_offset_reset="earliest") as consumer:
        consumer.assign([TopicPartition(topic, 0)])
        found: list[int] = []
        deadline = time.monotonic() + 60
        while len(found) < count and time.monotonic() < deadline:
            found += [int(record.value or b"-1") for record in consumer.poll(0.5)]
    return found


def assert_settled(cluster: Cluster, topic: str, leader: int, isr: list[int], lost_replicas: list[int]) -> None:
    """See that the condition comes true, and stays true for longer than an election takes."""

    def is_so() -> bool:
        part = described(cluster, topic)
        return (part["leader"], part["isr"], part["lost_replicas"]) == (leader, isr, lost_replicas)

    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline, described(cluster, topic)
    time.sleep(SETTLING_S)
    assert is_so(), described(cluster, topic)


def wait_for_isr(cluster: Cluster, topic: str, *nodes: int) -> None:
    def is_so(admin: raftlog.Admin) -> bool:
        return set(up_to_date(admin).describe_topic(topic).partitions[0].isr) == set(nodes)

    cluster.wait_for(is_so, what=f"the ISR to be {nodes}")


def wait_for_no_loss(cluster: Cluster, topic: str) -> None:
    def is_so(admin: raftlog.Admin) -> bool:
        return up_to_date(admin).describe_topic(topic).partitions[0].lost_replicas == []

    cluster.wait_for(is_so, what=f"no replica of {topic} to be called lost")


def test_the_records_of_a_replica_out_of_sync_outlive_the_disk_of_the_only_one_in_sync(cluster: Cluster) -> None:
    made = run(cluster, "topic", "create", "t", "--replica-assignment", "4:5", "--config", "min.insync.replicas=1")
    assert made.returncode == 0, made.stderr
    wait_for_isr(cluster, "t", 4, 5)
    produce(cluster, "t", range(100))
    cluster.stop(5)
    wait_for_isr(cluster, "t", 4)
    produce(cluster, "t", range(100, 200))
    cluster.stop(4)
    shutil.rmtree(cluster.log_dir(4))

    cluster.start(4)
    assert_settled(cluster, "t", leader=-1, isr=[4], lost_replicas=[4])
    cluster.kill(4)
    cluster.start(4)
    controller = cluster.controller()
    cluster.kill(controller)
    cluster.controller(other_than=controller)
    cluster.start(controller)
    cluster.start(5)
    assert_settled(cluster, "t", leader=-1, isr=[4], lost_replicas=[4])
    assert "raftlog partition elect t --unclean" in described(cluster, "t")["unavailable"]
    assert "raftlog partition elect t --unclean" in run(cluster, "topic", "describe", "t").stderr

    elected = run(cluster, "partition", "elect", "t", "--unclean", "--yes")
    assert elected.returncode == 0, elected.stderr
    assert cluster.leader("t") == 5
    wait_for_isr(cluster, "t", 4, 5)
    wait_for_no_loss(cluster, "t")
    assert values_of(cluster, "t", 100) == list(range(100))
    produce(cluster, "t", range(500, 510))
    wait_for_isr(cluster, "t", 4, 5)
    cluster.stop(5)
    assert cluster.leader("t") == 4
    assert values_of(cluster, "t", 110) == [*range(100), *range(500, 510)]
    cluster.start(5)


def test_an_old_disk_that_is_put_back_is_as_good_as_before(cluster: Cluster) -> None:
    """An operator forgot to mount it, for example."""
    made = run(cluster, "topic", "create", "back", "--replica-assignment", "4")
    assert made.returncode == 0, made.stderr
    produce(cluster, "back", range(50))
    log_dir = cluster.log_dir(4)
    aside = log_dir.with_name("aside")
    cluster.stop(4)
    log_dir.rename(aside)
    cluster.start(4)
    assert_settled(cluster, "back", leader=-1, isr=[4], lost_replicas=[4])
    cluster.stop(4)
    shutil.rmtree(log_dir)
    aside.rename(log_dir)
    cluster.start(4)
    assert cluster.leader("back") == 4
    wait_for_no_loss(cluster, "back")
    assert values_of(cluster, "back", 50) == list(range(50))


def test_a_broker_that_moves_to_an_empty_disk_on_purpose_needs_no_command(cluster: Cluster) -> None:
    made = run(cluster, "topic", "create", "moved", "--replica-assignment", "4:5")
    assert made.returncode == 0, made.stderr
    wait_for_isr(cluster, "moved", 4, 5)
    produce(cluster, "moved", range(50))
    cluster.stop(4)
    shutil.rmtree(cluster.log_dir(4))
    cluster.start(4)
    wait_for_isr(cluster, "moved", 4, 5)
    wait_for_no_loss(cluster, "moved")
    assert values_of(cluster, "moved", 50) == list(range(50))
