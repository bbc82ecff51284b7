"""Ranges of offsets, read to their ends, against a real server."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from itertools import count

import pytest

import raftlog
from raftlog._range_reader import RangeReader
from raftlog.errors import OffsetOutOfRange, RequestTimedOut, UnknownTopicId, UnknownTopicOrPartition
from raftlog.testing import Cluster
from raftlog.types import TopicPartition
from tests.support.patience import refusal

_PATIENCE_S = 60.0
_names = count()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster() as cluster:
        yield cluster


@pytest.fixture
def part(cluster: Cluster) -> TopicPartition:
    """A partition with the numbers below 1000, in ten batches."""
    name = f"range.{next(_names)}"
    with raftlog.Admin(cluster.bootstrap) as admin:
        admin.create_topic(name, timeout=60)
    with raftlog.Producer(cluster.bootstrap, linger_ms=0) as producer:
        for first in range(0, 1000, 100):
            producer.send_batch(name, [str(number).encode() for number in range(first, first + 100)]).result(60)
    return TopicPartition(name, 0)


@pytest.fixture
def reader(cluster: Cluster) -> Iterator[RangeReader]:
    reader = RangeReader(cluster.bootstrap, auto_offset_reset="none")
    yield reader
    reader.close()


def values(reader: RangeReader, part: TopicPartition, start: int, end: int) -> list[int]:
    chunks = reader.read(part, None, start, end, _PATIENCE_S)
    return [int(value) for rows in chunks for value in rows.column("value").to_pylist()]


@pytest.mark.parametrize(("start", "end"), [(0, 1000), (250, 251), (99, 101), (0, 100), (5, 5), (700, 1000)])
def test_a_range_is_read_exactly(reader: RangeReader, part: TopicPartition, start: int, end: int) -> None:
    assert values(reader, part, start, end) == [*range(start, end)]
    assert reader.consumer.assignment() == []


def test_ranges_follow_one_another_and_may_be_left_early(reader: RangeReader, part: TopicPartition) -> None:
    rows = next(reader.read(part, None, 0, 1000, _PATIENCE_S))
    assert rows.first_offset == 0
    del rows
    assert values(reader, part, 300, 420) == [*range(300, 420)]
    assert values(reader, part, 0, 20) == [*range(20)]


def test_what_is_not_there_yet_is_waited_for_and_then_named(reader: RangeReader, part: TopicPartition) -> None:
    refusal(
        RequestTimedOut,
        r"no records came for [0-9.]+ s at offset 1000; the range ends at 1001",
        lambda patience_s: list(reader.read(part, None, 990, 1001, patience_s)),
        *(0.2, 5.0, 20.0),
    )
    assert reader.consumer.assignment() == []


def test_what_is_gone_is_an_error(reader: RangeReader, cluster: Cluster, part: TopicPartition) -> None:
    with raftlog.Admin(cluster.bootstrap) as admin:
        admin.delete_records({part: 500})
    with pytest.raises(OffsetOutOfRange, match=str(part)):
        values(reader, part, 499, 600)
    assert values(reader, part, 500, 600) == [*range(500, 600)]
    with pytest.raises(OffsetOutOfRange):
        values(reader, part, 2000, 2001)


def test_another_topic_of_the_name_is_not_read(reader: RangeReader, cluster: Cluster, part: TopicPartition) -> None:
    old = reader.topics([part.topic])[part.topic].topic_id
    with raftlog.Admin(cluster.bootstrap) as admin:
        admin.delete_topic(part.topic)
        admin.create_topic(part.topic)
    with pytest.raises(UnknownTopicId, match="deleted and created again"):
        list(reader.read(part, old, 0, 10, _PATIENCE_S))
    new = reader.topics([part.topic], fresh=True)[part.topic].topic_id
    assert new != old
    assert list(reader.read(part, new, 0, 0, _PATIENCE_S)) == []
    with pytest.raises(UnknownTopicOrPartition):
        values(reader, TopicPartition("range.nowhere", 0), 0, 1)


def test_topics_are_found_by_name_and_by_pattern(reader: RangeReader, part: TopicPartition) -> None:
    assert [*reader.topics([part.topic, "range.nowhere"])] == [part.topic]
    assert [*reader.topics(pattern=re.compile(re.escape(part.topic)))] == [part.topic]
    assert all(not name.startswith("__") for name in reader.topics(pattern=re.compile(".*")))


def test_a_range_that_ends_with_markers_is_at_its_end_when_they_are_passed(
    reader: RangeReader, cluster: Cluster, part: TopicPartition
) -> None:
    """A marker is an offset without a record: a reader that counts records would wait for ever."""
    with raftlog.Producer(cluster.bootstrap, transactional_id="markers") as producer:
        for commit in (True, False, True, False):
            producer.begin_transaction()
            producer.send(part.topic, b"1000" if commit else b"-1").result(60)
            (producer.commit_transaction if commit else producer.abort_transaction)()
    deadline_s = time.monotonic() + _PATIENCE_S
    while (end := reader.consumer.end_offsets([part])[part]) < 1008:  # markers may follow the answer
        assert time.monotonic() < deadline_s, end
        time.sleep(0.05)
    assert end == 1008
    assert values(reader, part, 998, end) == [998, 999, 1000, 1000]
    assert values(reader, part, 1002, 1004) == [], (
        "a range with only an aborted transaction and its marker must be empty"
    )
    assert values(reader, part, 1007, 1008) == []
