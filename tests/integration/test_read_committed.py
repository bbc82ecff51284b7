"""Consumers of committed records on real brokers: open transactions, aborted ones, compacted ones, dead leaders."""

from __future__ import annotations

import contextlib
import time

from raftlog import Admin, Consumer, Producer, TopicPartition
from raftlog._client.keywords import IsolationLevel
from raftlog.cli.records.log_dump import check_segment
from raftlog.testing import Cluster
from tests.support.steady import PATIENT
from tests.support.up_to_date import up_to_date

PLACE = TopicPartition("state", 0)
COMPACTED = {"cleanup.policy": "compact", "segment.bytes": "8192", "min.cleanable.dirty.ratio": "0.01"}


def read(cluster: Cluster, isolation_level: IsolationLevel = "read_committed") -> list[tuple[int, bytes | None]]:
    """Return (offset, value) of all records up to the end for readers of this isolation level."""
    found: list[tuple[int, bytes | None]] = []
    with Consumer(cluster.bootstrap, isolation_level=isolation_level) as consumer:
        consumer.assign([PLACE])
        consumer.seek(PLACE, 0)
        end = consumer.end_offsets([PLACE])[PLACE]
        deadline = time.monotonic() + 60
        while consumer.position(PLACE) < end:
            assert time.monotonic() < deadline, (consumer.position(PLACE), end)
            found += [(record.offset, record.value) for record in consumer.poll(1.0)]
    return found


def values(found: list[tuple[int, bytes | None]]) -> list[bytes | None]:
    return [value for _, value in found]


def await_nothing_open(cluster: Cluster) -> None:
    """Wait until readers of committed records may read everything."""
    with (
        Consumer(cluster.bootstrap) as committed,
        Consumer(cluster.bootstrap, isolation_level="read_uncommitted") as all_,
    ):
        deadline = time.monotonic() + 60
        while committed.end_offsets([PLACE]) != all_.end_offsets([PLACE]):
            assert time.monotonic() < deadline, "after 60 s a transaction is still open"
            time.sleep(0.1)


def await_sealed_compacted(cluster: Cluster, nodes: range, below: int) -> None:
    """Wait until there are fewer than `below` rows on each of these nodes."""
    deadline = time.monotonic() + 180
    counts: list[int] = []
    while True:
        with contextlib.suppress(FileNotFoundError):  # replaced between the listing and the reading
            counts = [
                sum(
                    batch.header.record_count
                    for path in cluster.log_dir(node).glob("state-0/*.log")
                    for batch in check_segment(path).batches
                )
                for node in nodes
            ]
            if max(counts) < below:
                return
        assert time.monotonic() < deadline, counts
        time.sleep(0.3)


def test_compacted_transactions_stay_decided_whoever_dies() -> None:
    with Cluster(
        nodes=3,
        config=PATIENT,
        min_segment_bytes=1024,
        log_cleaner_backoff_ms=200,
        log_segment_delete_delay_ms=0,
        log_retention_check_interval_ms=300,
    ) as cluster:
        with Admin(cluster.bootstrap) as admin:
            admin.create_topic("state", 1, 3, configs=COMPACTED | {"delete.retention.ms": "500"}, timeout=60)
        last: dict[bytes, bytes] = {}

        def write(rounds: range) -> None:
            with Producer(cluster.bootstrap, transactional_id="writer") as producer:
                for number in rounds:
                    commit = number % 3 != 0
                    producer.begin_transaction()
                    for key in range(10):
                        value = b"%d-%d" % (number, key) * 10
                        producer.send("state", value, key=b"k%d" % key)
                        if commit:
                            last[b"k%d" % key] = value
                    producer.flush(60)
                    if commit:
                        producer.commit_transaction()
                    else:
                        producer.abort_transaction()

        def check() -> None:
            found: dict[bytes, bytes] = {}
            with Consumer(cluster.bootstrap) as consumer:
                consumer.assign([PLACE])
                consumer.seek(PLACE, 0)
                end = consumer.end_offsets([PLACE])[PLACE]
                deadline = time.monotonic() + 60
                while consumer.position(PLACE) < end:
                    assert time.monotonic() < deadline
                    for record in consumer.poll(1.0):
                        assert record.key is not None
                        assert record.value is not None
                        found[record.key] = record.value
            assert found == last

        write(range(40))
        await_sealed_compacted(cluster, range(1, 4), 250)
        check()
        leader = cluster.leader("state")
        cluster.kill(leader)
        cluster.leader("state", other_than=leader)
        write(range(40, 70))
        check()
        cluster.start(leader)  # its log ends within what the others have compacted
        other = cluster.leader("state")
        cluster.wait_for(
            lambda admin: len(up_to_date(admin).describe_topic("state").partitions[0].isr) == 3, timeout_s=120
        )
        cluster.kill(other)
        cluster.leader("state", other_than=other)
        check()
        await_nothing_open(cluster)
