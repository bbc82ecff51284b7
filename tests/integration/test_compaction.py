"""Compacted topics in a real cluster: what consumers, followers and tools make of them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from raftlog import Admin, Consumer, Producer, TopicPartition
from raftlog.cli.records.log_dump import check_segment, read_records
from raftlog.errors import InvalidRecord
from raftlog.testing import Cluster
from tests.support.steady import PATIENT
from tests.support.up_to_date import heard_everywhere

TOPIC = TopicPartition("state", 0)
WAIT_S = 120.0
CONFIG = {
    "cleanup.policy": "compact",
    "segment.bytes": "8192",
    "min.cleanable.dirty.ratio": "0.01",
}


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster(
        nodes=3,
        config=PATIENT,
        min_segment_bytes=1024,
        log_cleaner_backoff_ms=200,
        log_segment_delete_delay_ms=0,
        log_retention_check_interval_ms=300,
    ) as made:
        yield made


def write(cluster: Cluster, rounds: range) -> dict[bytes, bytes]:
    """Overwrite ten keys; return their last values."""
    last = {}
    with Producer(cluster.bootstrap, linger_ms=0) as producer:
        for number in rounds:
            for key in range(10):
                last[b"k%d" % key] = b"%d-%d" % (number, key) * 10
                producer.send("state", last[b"k%d" % key], key=b"k%d" % key)
            producer.flush(WAIT_S)
    return last


def read_all(cluster: Cluster, end: int) -> list[tuple[int, bytes | None, bytes | None]]:
    """Return (offset, key, value) of all records."""
    found: list[tuple[int, bytes | None, bytes | None]] = []
    with Consumer(cluster.bootstrap) as consumer:
        consumer.assign([TOPIC])
        consumer.seek(TOPIC, 0)
        deadline = time.monotonic() + WAIT_S
        while consumer.position(TOPIC) < end:
            assert time.monotonic() < deadline, consumer.position(TOPIC)
            found += [(record.offset, record.key, record.value) for record in consumer.poll(1.0)]
    return found


def end_offset(cluster: Cluster) -> int:
    with Consumer(cluster.bootstrap) as consumer:
        return consumer.end_offsets([TOPIC])[TOPIC]


def segments(cluster: Cluster, node: int) -> list[Path]:
    return sorted(cluster.log_dir(node).glob("state-0/*.log"))


def records_on_disk(cluster: Cluster, node: int) -> int:
    """Count the records in the files of a node."""
    return sum(batch.header.record_count for path in segments(cluster, node) for batch in check_segment(path).batches)


def await_compacted(cluster: Cluster, nodes: range, below: int) -> None:
    """Wait until there are fewer than `below` records on each of these nodes."""
    deadline = time.monotonic() + WAIT_S
    counts: list[int] = []
    while True:
        with contextlib.suppress(FileNotFoundError):  # replaced between the listing and the reading
            counts = [records_on_disk(cluster, node) for node in nodes]
            if max(counts) < below:
                return
        assert time.monotonic() < deadline, counts
        time.sleep(0.2)


def test_consumers_followers_and_tools_read_what_is_left(cluster: Cluster) -> None:
    with Admin(cluster.bootstrap) as admin:
        admin.create_topic("state", 1, 3, configs=CONFIG)
    heard_everywhere(cluster)
    with Producer(cluster.bootstrap) as producer, pytest.raises(InvalidRecord, match="key"):
        producer.send("state", b"no key").result(WAIT_S)
    last = write(cluster, range(40))
    end = end_offset(cluster)
    await_compacted(cluster, range(1, 4), 300)
    found = read_all(cluster, end)
    assert len(found) < end
    assert {key: value for _, key, value in found} == last
    assert [row[0] for row in found] == sorted(row[0] for row in found)

    cluster.kill(3)
    last = write(cluster, range(40, 80))
    end = end_offset(cluster)
    await_compacted(cluster, range(1, 3), 300)
    cluster.start(3)  # its log ends within what the others have merged
    cluster.wait_for(lambda admin: 2 in admin.describe_topic("state").partitions[0].isr, what="2 is in sync")
    cluster.kill(1)
    last |= write(cluster, range(80, 90))
    assert {key: value for _, key, value in read_all(cluster, end_offset(cluster))} == last
    cluster.kill(2)  # it replaces files while it runs
    for path in segments(cluster, 2)[:-1]:
        report = check_segment(path)
        assert not report.problems
        for batch in report.batches:
            rows = read_records(path, batch.position)
            assert all(batch.header.base_offset <= row["offset"] < batch.header.next_offset for row in rows)
