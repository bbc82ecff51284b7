"""A reader of ranges while the cluster is away: it asks with pauses, and no longer than its limit."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from contextlib import closing

import pytest

from raftlog import Consumer, Producer
from raftlog._core.positions import Rows
from raftlog._range_reader import RangeReader
from raftlog.errors import AuthenticationFailed, BrokerUnavailable
from raftlog.types import TopicPartition
from tests.support.fake_broker import FakeCluster

NOBODY = "127.0.0.1:1"
PART = TopicPartition("t", 0)


def counted(reader: RangeReader, at_most: int | None = None) -> list[float]:
    """Return the list that gets the time of each question about the cluster; after `at_most` there is no other one."""
    metadata = reader._engine.metadata
    asked: list[float] = []
    ask = metadata._ask

    async def noted() -> None:
        asked.append(time.monotonic())
        if len(asked) == at_most:
            raise AuthenticationFailed("that is enough")
        await ask()

    metadata._ask = noted  # type: ignore[method-assign] # of this one
    return asked


def test_a_pattern_is_asked_for_with_pauses() -> None:
    """Without them it was a busy loop, for as long as the cluster was away."""
    with closing(RangeReader(NOBODY, auto_offset_reset="none", default_api_timeout_ms=60_000)) as reader:
        asked = counted(reader, at_most=8)
        with pytest.raises(AuthenticationFailed, match="that is enough"):
            reader.topics(pattern=re.compile("t.*"))
        assert asked[-1] - asked[0] > 0.8, "the tries must pause at least 40, 80 and 160 ms, and then four times 200 ms"


def test_a_pattern_is_asked_for_no_longer_than_the_timeout() -> None:
    with closing(RangeReader(NOBODY, auto_offset_reset="none", default_api_timeout_ms=500)) as reader:
        began = time.monotonic()
        with pytest.raises(BrokerUnavailable):
            reader.topics(pattern=re.compile("t.*"))
        assert 0.4 < time.monotonic() - began < 40


def test_fresh_topics_are_all_fresh_from_one_question() -> None:
    with FakeCluster() as cluster:
        cluster.create_topic("a")
        cluster.create_topic("b")
        with closing(RangeReader(cluster.bootstrap, auto_offset_reset="none")) as reader:
            reader.topics(["a", "b"])
            assert cluster.topics_asked == [["a", "b"]]
            cluster.add_partitions("a", 2)
            cluster.add_partitions("b", 3)
            found = reader.topics(["a", "b"], fresh=True)
            assert {name: len(view.partitions) for name, view in found.items()} == {"a": 2, "b": 3}
            assert cluster.topics_asked == [["a", "b"]] * 2
            partitions = [TopicPartition(name, 0) for name in ("a", "b")]
    with FakeCluster() as cluster:
        for part in partitions:
            cluster.create_topic(part.topic)
        with Consumer(cluster.bootstrap, group_id=None) as consumer:
            consumer.assign(partitions)
            assert cluster.topics_asked == [["a", "b"]]


def test_a_pattern_is_found_once_the_cluster_is_back() -> None:
    with FakeCluster() as cluster:
        cluster.create_topic("t1")
        cluster.create_topic("u")
        cluster.kill(1)
        with closing(RangeReader(cluster.bootstrap, auto_offset_reset="none", default_api_timeout_ms=60_000)) as reader:
            asked = counted(reader)
            cluster.restart(1)
            assert list(reader.topics(pattern=re.compile("t.*"))) == ["t1"]
            assert len(asked) < 40


def test_a_range_waits_for_the_cluster_no_longer_than_for_records() -> None:
    """The first task of a worker knows nothing of the cluster yet."""
    with closing(RangeReader(NOBODY, auto_offset_reset="none", default_api_timeout_ms=600_000)) as reader:
        began = time.monotonic()
        with pytest.raises(BrokerUnavailable):
            list(reader.read(PART, None, 0, 5, 0.7))
        assert 0.6 < time.monotonic() - began < 60


def test_a_reader_that_was_kept_reads_partitions_that_the_topic_has_got_since() -> None:
    """A worker of Spark keeps its reader from task to task, and the driver may know more partitions than it does."""
    with FakeCluster() as cluster, closing(RangeReader(cluster.bootstrap, auto_offset_reset="none")) as reader:
        cluster.create_topic("t")
        topic_id = cluster.topics["t"].topic_id
        send(cluster, 0, b"old")
        assert values(reader.read(PART, topic_id, 0, 1, 30.0)) == [b"old"]
        cluster.add_partitions("t", 2)
        send(cluster, 1, b"new")
        assert values(reader.read(TopicPartition("t", 1), topic_id, 0, 1, 30.0)) == [b"new"]


def send(cluster: FakeCluster, partition: int, value: bytes) -> None:
    with Producer(cluster.bootstrap) as producer:
        producer.send("t", value, partition=partition).result(30)


def values(chunks: Iterable[Rows]) -> list[bytes | None]:
    return [record.value for rows in chunks for record in rows.records()]
