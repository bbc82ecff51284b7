"""A bit that flips on one disk: any reader finds it, no reader gets it, and an intact replica sends the batch again."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

import raftlog
from raftlog.errors import CorruptRecordError
from raftlog.testing import Cluster
from tests.support import patience
from tests.support.steady import STEADY

NODES = (1, 2, 3)
PLACE = raftlog.TopicPartition("t", 0)
VALUE_BYTES = 1_000
BATCH_RECORDS = 10
WAIT_S = 90.0


@pytest.fixture(scope="module")
def running() -> Iterator[Cluster]:
    with Cluster(nodes=3, config=STEADY, min_segment_bytes=1024, log_scrub_bytes_per_second=0) as made:
        yield made


@pytest.fixture
def cluster(running: Cluster) -> Iterator[Cluster]:
    """All nodes are up before and after, and the topic "t" is gone."""
    yield running
    for node in NODES:
        if not running.is_running(node):
            running.start(node)
    with raftlog.Admin(running.bootstrap) as admin:
        admin.delete_topic("t")


def create(cluster: Cluster, *replicas: int, **configs: object) -> None:
    """Create "t" with its replicas on these nodes, the first one leading."""
    with raftlog.Admin(cluster.bootstrap) as admin:
        admin.create_topic("t", replication_factor=len(replicas), configs=configs)
    move(cluster, *replicas)
    wait_for_isr(cluster, *replicas)


def move(cluster: Cluster, *replicas: int) -> None:
    """Have the partition on these nodes, the first one leading."""
    with raftlog.Admin(cluster.bootstrap) as admin:
        admin.alter_reassignments({PLACE: list(replicas)})
    cluster.wait_for(lambda admin: not admin.list_reassignments(), what="the reassignment to end")
    cluster.wait_for(lambda admin: elected(admin, replicas[0]), what=f"node {replicas[0]} to lead")


def elected(admin: raftlog.Admin, node: int) -> bool:
    if admin.describe_topic("t").partitions[0].leader != node:
        try:
            admin.elect_leaders("t")
        except raftlog.errors.RaftlogError:
            return False
    return admin.describe_topic("t").partitions[0].leader == node


def wait_for_isr(cluster: Cluster, *nodes: int) -> None:
    def is_so(admin: raftlog.Admin) -> bool:
        return set(admin.describe_topic("t").partitions[0].isr) == set(nodes)

    cluster.wait_for(is_so, what=f"the ISR to be {nodes}")


def produce(cluster: Cluster, batches: int, *, first: int = 0) -> list[bytes]:
    """Send numbered values in batches of ten and return them once all are acknowledged."""
    values = [
        b"%d " % number + b"x" * VALUE_BYTES
        for number in range(first * BATCH_RECORDS, (first + batches) * BATCH_RECORDS)
    ]
    with raftlog.Producer(cluster.bootstrap, linger_ms=60_000) as producer:
        for start in range(0, len(values), BATCH_RECORDS):
            deliveries = [producer.send("t", value, partition=0) for value in values[start : start + BATCH_RECORDS]]
            producer.flush()
            for delivery in deliveries:
                delivery.result(timeout=WAIT_S)
    return values


def read_all(cluster: Cluster, count: int, first: int = 0) -> list[bytes | None]:
    values: list[bytes | None] = []
    with raftlog.Consumer(cluster.bootstrap, auto_offset_reset="earliest") as consumer:
        consumer.assign([PLACE])
        consumer.seek(PLACE, first)
        while len(values) < count:
            polled = consumer.poll(timeout=WAIT_S)
            assert polled, (
                f"only {len(values)} of {count} records were read; the last poll waited {WAIT_S:g} s for nothing"
            )
            values += [record.value for record in polled]
    return values


def directory(cluster: Cluster, node: int) -> Path:
    return cluster.log_dir(node) / "t-0"


def log_bytes(cluster: Cluster, node: int) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(directory(cluster, node).glob("*.log")))


def flip(cluster: Cluster, node: int, share: float = 0.5, segment: int = 0) -> None:
    """Flip one bit of a segment's file."""
    path = sorted(directory(cluster, node).glob("*.log"))[segment]
    with path.open("r+b") as file:
        at = int(path.stat().st_size * share)
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 16]))


def strays(cluster: Cluster, node: int) -> int:
    return len(list(cluster.log_dir(node).glob("~stray-*")))


wait_until = partial(patience.until, within_s=WAIT_S, pause_s=0.05)


def wait_for_equal_logs(cluster: Cluster, *nodes: int) -> None:
    def equal() -> bool:
        try:
            return len({log_bytes(cluster, node) for node in nodes}) == 1
        except FileNotFoundError:  # put aside between the listing and the reading
            return False

    wait_until(equal, f"the logs of nodes {nodes} differ")


@pytest.mark.parametrize("kind", ["sealed", "active"])
def test_a_consumer_finds_a_leaders_damage_and_gets_every_record(cluster: Cluster, kind: str) -> None:
    configs = {"segment.bytes": 64 << 10} if kind == "sealed" else {}
    create(cluster, 1, 2, 3, **configs, **{"min.insync.replicas": 2})
    values = produce(cluster, 20)
    wait_for_equal_logs(cluster, *NODES)
    assert (len(list(directory(cluster, 3).glob("*.log"))) > 1) == (kind == "sealed")
    cluster.stop(3)
    flip(cluster, 3)
    before = strays(cluster, 3)
    cluster.start(3)
    wait_for_isr(cluster, *NODES)
    move(cluster, 3, 1, 2)
    assert read_all(cluster, len(values)) == values
    assert cluster.leader("t", other_than=3) != 3
    values += produce(cluster, 5, first=20)
    wait_for_isr(cluster, *NODES)
    wait_for_equal_logs(cluster, *NODES)
    assert strays(cluster, 3) == before + 1, "the damaged log must be kept in one new stray directory"
    move(cluster, 3, 1, 2)
    assert read_all(cluster, len(values)) == values


def test_a_follower_that_catches_up_finds_its_leaders_damage(cluster: Cluster) -> None:
    create(cluster, 1, 2, 3, **{"min.insync.replicas": 2})
    values = produce(cluster, 5)
    cluster.stop(3)
    wait_for_isr(cluster, 1, 2)
    values += produce(cluster, 20, first=5)
    flip(cluster, 1, share=0.6)
    cluster.start(3)
    wait_for_isr(cluster, *NODES)
    wait_for_equal_logs(cluster, *NODES)
    assert read_all(cluster, len(values)) == values


def test_a_move_away_from_the_last_good_copy_waits_until_there_is_another(cluster: Cluster) -> None:
    create(cluster, 1, 2)
    values = produce(cluster, 20)
    wait_for_equal_logs(cluster, 1, 2)
    flip(cluster, 1)
    with raftlog.Admin(cluster.bootstrap) as admin:
        admin.alter_reassignments({PLACE: [1, 3]})
    wait_for_isr(cluster, 1, 3)
    cluster.wait_for(lambda admin: not admin.list_reassignments(), what="the reassignment to end")
    assert read_all(cluster, len(values)) == values
    wait_for_equal_logs(cluster, 1, 3)


def test_the_only_replica_serves_what_is_whole(cluster: Cluster) -> None:
    create(cluster, 2)
    values = produce(cluster, 20)
    flip(cluster, 2)
    with raftlog.Consumer(cluster.bootstrap) as consumer:
        consumer.assign([PLACE])
        consumer.seek(PLACE, 0)
        found: list[bytes | None] = []
        with pytest.raises(CorruptRecordError, match=r"t-0 at offset \d+"):
            while True:
                found += [record.value for record in consumer.poll(timeout=WAIT_S)]
        assert found == values[: len(found)]
        assert len(found) % BATCH_RECORDS == 0
        consumer.seek(PLACE, len(found) + BATCH_RECORDS)
        rest: list[bytes | None] = []
        while len(rest) < len(values) - len(found) - BATCH_RECORDS:
            rest += [record.value for record in consumer.poll(timeout=WAIT_S)]
        assert rest == values[len(found) + BATCH_RECORDS :]
    first, last = len(found), len(found) + BATCH_RECORDS - 1
    log, words = cluster.directory / "node-2" / "server.log", "no other replica can replace it"
    wait_until(lambda: words in log.read_text().rpartition("\n")[0], "the server has not said so")
    (line,) = (line for line in log.read_text().splitlines() if words in line)
    assert " ERROR " in line
    assert f"{directory(cluster, 2)}/{0:020d}.log position " in line
    assert f"offsets {first} to {last} of t-0 are damaged" in line
    assert produce(cluster, 1, first=20), "the partition must take writes in spite of the damage"


def test_a_followers_own_damage_is_found_in_the_background() -> None:
    with Cluster(nodes=3, config=STEADY, log_scrub_interval_ms=500) as cluster:
        create(cluster, 1, 2, 3)
        values = produce(cluster, 20)
        wait_for_equal_logs(cluster, *NODES)
        flip(cluster, 3)
        wait_until(lambda: strays(cluster, 3) == 1, "nobody has noticed")
        wait_for_isr(cluster, *NODES)
        wait_for_equal_logs(cluster, *NODES)
        assert cluster.leader("t") == 1, "broker 1, whose log was whole, must lead all the time"
        assert read_all(cluster, len(values)) == values
