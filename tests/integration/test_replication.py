"""Three brokers with three replicas: nothing acknowledged is lost, and the replicas end up equal byte for byte."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import raftlog
from raftlog._client.keywords import Acks
from raftlog.errors import RaftlogError
from raftlog.testing import Cluster
from tests.support.patience import refusal
from tests.support.steady import PATIENT
from tests.support.up_to_date import heard_everywhere, up_to_date

NODES = (1, 2, 3)
PLACE = raftlog.TopicPartition("t", 0)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(nodes=3, config=PATIENT) as made:
        yield made


@pytest.fixture(autouse=True)
def topic(cluster: Cluster) -> Iterator[None]:
    """A topic "t" of one partition on all three, made anew for each test; all nodes are up before and after."""
    for node in NODES:
        if not cluster.is_running(node):
            cluster.start(node)
    with raftlog.Admin(cluster.bootstrap) as admin:
        admin.create_topic("t", replication_factor=3, configs={"min.insync.replicas": "2"}, timeout=60)
    heard_everywhere(cluster)  # no broker takes the topic for the earlier test's
    wait_for_isr(cluster, *NODES)
    yield
    for node in NODES:
        if not cluster.is_running(node):
            cluster.start(node)
    with raftlog.Admin(cluster.bootstrap) as admin:
        admin.delete_topic("t")


def isr(admin: raftlog.Admin) -> set[int]:
    return set(up_to_date(admin).describe_topic("t").partitions[0].isr)


def wait_for_isr(cluster: Cluster, *nodes: int) -> None:
    cluster.wait_for(lambda admin: isr(admin) == set(nodes), what=f"the ISR to be {nodes}")


def produce(cluster: Cluster, count: int, *, first: int = 0, value_bytes: int = 100, acks: Acks = "all") -> list[bytes]:
    """Send numbered values and return them once all are acknowledged."""
    values = [b"%d " % number + b"x" * value_bytes for number in range(first, first + count)]
    with raftlog.Producer(cluster.bootstrap, acks=acks) as producer:
        deliveries = [producer.send("t", value, partition=0) for value in values]
        for delivery in deliveries:
            delivery.result(timeout=60)
    return values


def read_all(cluster: Cluster, count: int) -> list[bytes | None]:
    values: list[bytes | None] = []
    with raftlog.Consumer(cluster.bootstrap, auto_offset_reset="earliest") as consumer:
        consumer.assign([PLACE])
        consumer.seek(PLACE, 0)
        while len(values) < count:
            polled = consumer.poll(timeout=60)
            assert polled, f"only {len(values)} of {count} records were read; the last poll waited 60 s for nothing"
            values += [record.value for record in polled]
    return values


def log_bytes(cluster: Cluster, node: int) -> bytes:
    directory: Path = cluster.log_dir(node) / "t-0"
    return b"".join(path.read_bytes() for path in sorted(directory.glob("*.log")))


def wait_for_equal_logs(cluster: Cluster) -> bytes:
    """Wait until all three have the same bytes, and return those."""
    until = time.monotonic() + 60
    while len(found := {log_bytes(cluster, node) for node in NODES}) > 1:
        assert time.monotonic() < until, (
            f"after 60 s the logs of the replicas still differ; their sizes are {[len(each) for each in found]} bytes"
        )
        time.sleep(0.05)
    return found.pop()


def test_what_was_acknowledged_outlives_its_leader_and_replicas_end_up_equal(cluster: Cluster) -> None:
    values = produce(cluster, 500)
    leader = cluster.leader("t")
    cluster.kill(leader)
    values += produce(cluster, 500, first=500)
    assert cluster.leader("t", other_than=leader) != leader
    assert read_all(cluster, 1000) == values
    cluster.start(leader)
    wait_for_isr(cluster, *NODES)
    values += produce(cluster, 100, first=1000)
    wait_for_equal_logs(cluster)
    assert read_all(cluster, 1100) == values


def test_each_in_turn_leads_and_dies(cluster: Cluster) -> None:
    values: list[bytes] = []
    for number in range(3):
        values += produce(cluster, 50, first=50 * number)
        wait_for_isr(cluster, *NODES)
        leader = cluster.leader("t")
        cluster.kill(leader)
        cluster.leader("t", other_than=leader)
        cluster.start(leader)
        wait_for_isr(cluster, *NODES)
    assert read_all(cluster, 150) == values
    wait_for_equal_logs(cluster)


def test_records_that_were_deleted_stay_deleted_when_the_leader_dies_at_once(cluster: Cluster) -> None:
    produce(cluster, 100)
    leader = cluster.leader("t", 0)
    with raftlog.Admin(cluster.bootstrap) as admin:
        assert admin.delete_records({PLACE: 60}) == {PLACE: 60}
    cluster.kill(leader)
    with raftlog.Consumer(cluster.bootstrap) as consumer:
        assert consumer.beginning_offsets([PLACE]) == {PLACE: 60}


def test_a_leader_that_stops_cleanly_hands_over_and_no_produce_fails(cluster: Cluster) -> None:
    leader = cluster.leader("t")
    with raftlog.Producer(cluster.bootstrap) as producer:
        deliveries = [producer.send("t", b"%d" % number, partition=0) for number in range(200)]
        cluster.stop(leader)
        deliveries += [producer.send("t", b"%d" % number, partition=0) for number in range(200, 400)]
        offsets = [delivery.result(timeout=60).offset for delivery in deliveries]
    assert offsets == sorted(set(offsets))
    # Without idempotence a batch whose answer was lost is in the log twice; what was acknowledged is
    # at its offset.
    values = read_all(cluster, offsets[-1] + 1)
    assert [int(values[offset] or b"") for offset in offsets] == list(range(400))


def test_a_paused_follower_leaves_the_isr_and_comes_back_caught_up(cluster: Cluster) -> None:
    leader = cluster.leader("t")
    follower = next(node for node in NODES if node != leader)
    produce(cluster, 10)
    cluster.pause(follower)
    try:
        values = produce(cluster, 10, first=10)
        wait_for_isr(cluster, *(node for node in NODES if node != follower))
    finally:
        cluster.resume(follower)
    wait_for_isr(cluster, *NODES)
    assert wait_for_equal_logs(cluster).count(values[-1]) == 1


def test_fewer_in_sync_than_asked_for_refuse_all_but_not_one(cluster: Cluster) -> None:
    with raftlog.Admin(cluster.bootstrap) as admin:
        admin.alter_configs("t", set={"min.insync.replicas": 3})
    produce(cluster, 5)
    leader = cluster.leader("t")
    follower = next(node for node in NODES if node != leader)
    cluster.kill(follower)
    wait_for_isr(cluster, *(node for node in NODES if node != follower))

    def send_one(limit_s: float) -> None:
        limit_ms = int(limit_s * 1000)
        with raftlog.Producer(
            cluster.bootstrap, delivery_timeout_ms=limit_ms, request_timeout_ms=limit_ms // 2
        ) as producer:
            producer.send("t", b"refused", partition=0).result(timeout=120)

    refusal(RaftlogError, "replicas are in sync", send_one, 2.0, 10.0, 60.0)
    produce(cluster, 5, first=5, acks="1")
    cluster.start(follower)
    wait_for_isr(cluster, *NODES)
    produce(cluster, 5, first=10)
    wait_for_equal_logs(cluster)


def test_a_follower_far_behind_catches_up_over_many_segments(cluster: Cluster) -> None:
    with raftlog.Admin(cluster.bootstrap) as admin:
        admin.alter_configs("t", set={"segment.bytes": 1 << 20})
    leader = cluster.leader("t")
    follower = next(node for node in NODES if node != leader)
    produce(cluster, 10)
    cluster.kill(follower)
    produce(cluster, 2_000, first=10, value_bytes=8_000)
    cluster.start(follower)
    wait_for_isr(cluster, *NODES)
    assert len(wait_for_equal_logs(cluster)) > 16_000_000


@pytest.mark.parametrize("damage", ["bit", "shortened", "gone"])
def test_a_damaged_replica_is_fetched_anew(cluster: Cluster, damage: str) -> None:
    values = produce(cluster, 200)
    follower = next(node for node in NODES if node != cluster.leader("t"))
    wait_for_equal_logs(cluster)
    cluster.stop(follower)  # so that everything lies below the recovery point
    directory = cluster.log_dir(follower) / "t-0"
    (segment,) = directory.glob("*.log")
    contents = bytearray(segment.read_bytes())
    match damage:
        case "bit":
            contents[len(contents) // 2] ^= 1
            for index in (*directory.glob("*.index"), *directory.glob("*.timeindex")):
                index.unlink()  # else a sealed prefix is taken on trust
            segment.write_bytes(contents)
        case "shortened":
            segment.write_bytes(contents[: len(contents) // 2])
        case _:
            for path in directory.iterdir():
                if path.name != "partition.metadata":
                    path.unlink()
    (cluster.log_dir(follower) / "clean-shutdown").unlink()
    cluster.start(follower)
    values += produce(cluster, 50, first=200)
    wait_for_isr(cluster, *NODES)
    wait_for_equal_logs(cluster)
    assert list(cluster.log_dir(follower).glob("~stray-*")), "the damaged log must be kept in a stray directory"
    wait_for_isr(cluster, *NODES)
    cluster.kill(next(node for node in NODES if node not in (follower, cluster.leader("t"))))
    assert read_all(cluster, 250) == values
