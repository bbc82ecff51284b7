"""kill -9 of the broker while producers and a consumer are at work: nothing acknowledged is lost, nothing reordered."""

from __future__ import annotations

import threading
import time
from collections import defaultdict

import pytest

from raftlog import Admin, Consumer, Producer, RecordMetadata
from raftlog.testing import Cluster

KEYS = 7
ROUND = 200
PARTITIONS = 3


class Workload(threading.Thread):
    """Sends numbered records, key by number modulo KEYS, and notes what was acknowledged where."""

    def __init__(self, bootstrap: str) -> None:
        super().__init__()
        self._where = bootstrap
        self.stopping = threading.Event()
        self.acknowledged: dict[int, RecordMetadata] = {}
        self.failed: list[BaseException] = []

    def run(self) -> None:
        """Send until told to stop; every record has to be acknowledged in the end."""
        number = 0
        with Producer(self._where) as producer:
            while not self.stopping.is_set():
                sent = [
                    (n, producer.send("t", b"%d" % n, key=b"%d" % (n % KEYS))) for n in range(number, number + ROUND)
                ]
                number += ROUND
                for n, delivery in sent:
                    try:
                        self.acknowledged[n] = delivery.result(120)
                    except Exception as error:  # whatever it was, the test shows it
                        self.failed.append(error)
                        return


def read_all(bootstrap: str) -> dict[tuple[int, int], int]:
    """Return the number at every (partition, offset)."""
    seen: dict[tuple[int, int], int] = {}
    with Consumer(bootstrap, auto_offset_reset="earliest") as consumer:
        places = consumer.partitions_for("t")
        consumer.assign(places)
        ends = consumer.end_offsets(places)
        deadline = time.monotonic() + 90
        while any(consumer.position(place) < ends[place] for place in places):
            assert time.monotonic() < deadline, f"{len(seen)} records read, and the end is not reached: {ends}"
            for record in consumer.poll(0.2):
                assert record.value is not None
                seen[record.partition, record.offset] = int(record.value)
    return seen


def out_of_order(seen: dict[tuple[int, int], int]) -> int:
    """Count records of a key whose first appearance comes after that of a later one."""
    latest: dict[tuple[int, int], int] = defaultdict(lambda: -1)
    known: set[int] = set()
    wrong = 0
    for (partition, _), number in sorted(seen.items()):
        if number in known:
            continue
        known.add(number)
        wrong += number < latest[partition, number % KEYS]
        latest[partition, number % KEYS] = max(number, latest[partition, number % KEYS])
    return wrong


@pytest.mark.parametrize("kills", [3, pytest.param(30, marks=pytest.mark.long)])
def test_nothing_acknowledged_is_lost_or_reordered(kills: int) -> None:
    with Cluster(nodes=1) as cluster:
        with Admin(cluster.bootstrap) as admin:
            admin.create_topic("t", PARTITIONS, timeout=60)
        workload = Workload(cluster.bootstrap)
        workload.start()
        for _ in range(kills):
            before = len(workload.acknowledged)
            deadline = time.monotonic() + 90
            while len(workload.acknowledged) < before + ROUND and time.monotonic() < deadline:
                time.sleep(0.02)
            assert len(workload.acknowledged) > before, "the producer has not come back after a kill"
            cluster.kill(1)
            cluster.start(1)
        workload.stopping.set()
        workload.join(150)
        assert not workload.is_alive()
        assert not workload.failed
        seen = read_all(cluster.bootstrap)
        for number, metadata in workload.acknowledged.items():
            assert seen.get((metadata.partition, metadata.offset)) == number
        for partition in range(PARTITIONS):
            offsets = sorted(offset for p, offset in seen if p == partition)
            assert offsets == list(range(len(offsets))), "a gap"
        assert out_of_order(seen) == 0


def test_a_consumer_goes_on_where_it_was() -> None:
    with Cluster(nodes=1) as cluster:
        with Admin(cluster.bootstrap) as admin:
            admin.create_topic("t", 1, timeout=60)
        with (
            Producer(cluster.bootstrap) as producer,
            Consumer(cluster.bootstrap, auto_offset_reset="earliest") as consumer,
        ):
            consumer.subscribe(["t"])
            got: list[int] = []
            for round_ in range(3):
                for n in range(round_ * 100, round_ * 100 + 100):
                    producer.send("t", b"%d" % n)
                producer.flush(60)
                deadline = time.monotonic() + 90
                while len(set(got)) < (round_ + 1) * 100 and time.monotonic() < deadline:
                    got += [int(record.value or b"-1") for record in consumer.poll(0.2)]
                cluster.kill(1)
                cluster.start(1)
            assert sorted(set(got)) == list(range(300))
            assert got == sorted(got), "the position went back"
