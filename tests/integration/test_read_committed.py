"""Consumers of committed records on real brokers: open transactions, aborted ones, compacted ones, dead leaders."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

import pytest

from raftlog import Admin, Consumer, Producer, TopicPartition
from raftlog.cli.segment_check import check_segment
from raftlog.testing import Cluster
from tests.support.steady import PATIENT, STEADY
from tests.support.up_to_date import up_to_date

PLACE = TopicPartition("state", 0)
COMPACTED = {"cleanup.policy": "compact", "segment.bytes": "8192", "min.cleanable.dirty.ratio": "0.01"}


@pytest.fixture
def single() -> Iterator[Cluster]:
    with Cluster(nodes=1, config=STEADY) as made:
        yield made


def read(cluster: Cluster, isolation_level: str = "read_committed") -> list[tuple[int, bytes | None]]:
    """Return (offset, value) of all that there is up to the end that such a reader has."""
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


def test_aborted_records_are_never_seen_and_open_ones_not_yet(single: Cluster) -> None:
    with Admin(single.bootstrap) as admin:
        admin.create_topic("state", 1, timeout=60)
    with Producer(single.bootstrap, transactional_id="one") as one, Producer(single.bootstrap) as plain:
        for number in range(6):
            one.begin_transaction()
            for part in range(3):
                one.send("state", b"%d-%d" % (number, part))
            one.flush(60)
            plain.send("state", b"plain %d" % number).result(60)
            if number % 2:
                one.abort_transaction()
            else:
                one.commit_transaction()
        committed = [
            value
            for n in range(6)
            for value in (*([b"%d-%d" % (n, p) for p in range(3)] * (n % 2 == 0)), b"plain %d" % n)
        ]
        await_nothing_open(single)
        assert values(read(single)) == committed
        assert len(read(single, "read_uncommitted")) == 24
        with Consumer(single.bootstrap) as consumer:
            consumer.assign([PLACE])
            consumer.seek(PLACE, 0)
            rows = 0
            while consumer.position(PLACE) < consumer.end_offsets([PLACE])[PLACE]:
                rows += consumer.poll_arrow(5.0).num_rows
            assert rows == len(committed)

        one.begin_transaction()
        one.send("state", b"open").result(60)
        plain.send("state", b"behind").result(60)
        assert values(read(single)) == committed
        assert values(read(single, "read_uncommitted"))[-2:] == [b"open", b"behind"]
        with Consumer(single.bootstrap) as waiting:
            waiting.assign([PLACE])
            waiting.seek_to_end(PLACE)
            assert waiting.poll(0.5) == []
            timer = threading.Timer(0.3, one.commit_transaction)
            timer.start()
            found: list[bytes | None] = []
            begun = time.monotonic()
            while len(found) < 2:
                assert time.monotonic() - begun < 60
                found += [record.value for record in waiting.poll(5.0)]
            assert found == [b"open", b"behind"]
            timer.join()


def await_nothing_open(cluster: Cluster) -> None:
    """Wait until readers of committed records may read everything."""
    with (
        Consumer(cluster.bootstrap) as committed,
        Consumer(cluster.bootstrap, isolation_level="read_uncommitted") as all_,
    ):
        deadline = time.monotonic() + 60
        while committed.end_offsets([PLACE]) != all_.end_offsets([PLACE]):
            assert time.monotonic() < deadline, "a transaction is open for ever"
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
