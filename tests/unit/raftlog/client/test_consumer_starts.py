"""Where partitions begin, and that one which cannot be read holds up no other one."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from raftlog import Consumer, TopicPartition
from raftlog._client.offsets import LATEST
from raftlog._consumer_views import try_offsets
from raftlog.errors import (
    BrokerUnavailable,
    CorruptRecordError,
    InvalidRequestError,
    LeaderNotAvailable,
    RaftlogError,
    RequestTimedOut,
    StorageError,
)
from raftlog.format import Columns, encode_batch
from tests.support.fake_broker import FakeCluster

HEALTHY = TopicPartition("t", 0)
BROKEN = TopicPartition("t", 1)
FAST: dict[str, Any] = {"retry_backoff_ms": 5, "retry_backoff_max_ms": 50}


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    """Partition 0 at node 1, partition 1 at node 2, five records in each."""
    with FakeCluster(nodes=2) as cluster:
        cluster.create_topic("t", 2)
        for partition in (0, 1):
            cluster.append("t", encode_batch(Columns(pa.array([b"v"] * 5, pa.binary())), 1000), partition=partition)
        yield cluster


def begin(consumer: Consumer, how: str) -> float:
    """Subscribe or assign; return the seconds that took."""
    started = time.monotonic()
    if how == "subscribe":
        consumer.subscribe("t")
    else:
        consumer.assign([HEALTHY, BROKEN])
    return time.monotonic() - started


def read(consumer: Consumer, seconds: float, count: int = 1 << 30) -> tuple[Counter[int], list[RaftlogError]]:
    """Poll for a while; return the records by partition and what was raised."""
    found: Counter[int] = Counter()
    raised = []
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and found.total() < count:
        try:
            found.update(record.partition for record in consumer.poll(0.02))
        except RaftlogError as error:
            raised.append(error)
    return found, raised


def test_a_subscription_that_nobody_answers_is_none(cluster: FakeCluster) -> None:
    """It was raised, and then every poll came back empty for ever."""
    with Consumer(cluster.bootstrap, auto_offset_reset="earliest", default_api_timeout_ms=200, **FAST) as consumer:
        consumer.subscribe("t")
        cluster.faults.metadata_down = True
        with pytest.raises(BrokerUnavailable):
            consumer.subscribe("u")
        with pytest.raises(InvalidRequestError, match="subscribe"):
            consumer.poll(0.1)
        cluster.faults.metadata_down = False
        consumer.subscribe("t")
        assert read(consumer, 20, count=10)[0].total() == 10


@pytest.mark.parametrize("how", ["subscribe", "assign"])
def test_an_offline_partition_delays_the_others_no_longer_than_the_timeout(cluster: FakeCluster, how: str) -> None:
    cluster.faults.refuse_offsets[1] = StorageError("the log directory is offline")
    options = {"default_api_timeout_ms": 400, **FAST}
    with Consumer(cluster.bootstrap, auto_offset_reset="earliest", **options) as consumer:
        assert 0.3 < begin(consumer, how) < 2
        assert read(consumer, 10, 5) == (Counter({0: 5}), [])
        with pytest.raises(InvalidRequestError, match="no position yet"):
            consumer.position(BROKEN)
        cluster.faults.refuse_offsets.clear()
        assert read(consumer, 10, 5) == (Counter({1: 5}), []), "it was asked for again in the background"


@pytest.mark.parametrize("how", ["subscribe", "assign"])
def test_a_damaged_partition_is_raised_now_and_then_and_the_others_flow(cluster: FakeCluster, how: str) -> None:
    cluster.faults.refuse_offsets[1] = CorruptRecordError("checksum mismatch at 300")
    with Consumer(cluster.bootstrap, auto_offset_reset="earliest", **FAST) as consumer:
        assert begin(consumer, how) < 2
        found, raised = read(consumer, 1.0)
        assert found == {0: 5}
        assert all(isinstance(error, CorruptRecordError) and "t-1" in str(error) for error in raised)
        assert 5 <= len(raised) <= 30, "at least 40 ms lie between two of them, once the backoff is at its longest"
        cluster.faults.refuse_offsets.clear()
        assert read(consumer, 10, 5)[0] == {1: 5}


def test_damaged_records_are_raised_now_and_then_and_the_others_flow(cluster: FakeCluster) -> None:
    cluster.faults.corrupt_partitions.add(1)
    with Consumer(cluster.bootstrap, auto_offset_reset="earliest", **FAST) as consumer:
        consumer.subscribe("t")
        found, raised = read(consumer, 1.0)
        assert found == {0: 5}
        assert 5 <= len(raised) <= 30
        cluster.faults.corrupt_partitions.clear()
        assert read(consumer, 10, 5)[0] == {1: 5}


def test_many_damaged_partitions_leave_every_second_poll_to_the_others(cluster: FakeCluster) -> None:
    cluster.add_partitions("t", 40)
    for partition in range(1, 40):
        cluster.faults.refuse_offsets[partition] = CorruptRecordError("checksum mismatch")
    options: dict[str, Any] = {"retry_backoff_ms": 1, "retry_backoff_max_ms": 1}
    with Consumer(cluster.bootstrap, auto_offset_reset="earliest", max_poll_records=1, **options) as consumer:
        consumer.subscribe("t")
        time.sleep(0.3)
        polls: list[str] = []
        while polls.count("record") < 5 and len(polls) < 100:
            try:
                polls += ["record"] * len(consumer.poll(0))
            except CorruptRecordError:
                polls.append("error")
        assert polls.count("record") == 5
        assert len(polls) <= 11, "no error twice in a row while there are records"


def test_a_broker_that_does_not_answer_keeps_only_its_own_partitions(cluster: FakeCluster) -> None:
    cluster.faults.offsets_delay_s[2] = 60
    with Consumer(cluster.bootstrap, auto_offset_reset="earliest", default_api_timeout_ms=300, **FAST) as consumer:
        assert begin(consumer, "subscribe") < 2
        assert read(consumer, 10, 5)[0] == {0: 5}


def test_a_seek_ends_the_wait_for_a_start(cluster: FakeCluster) -> None:
    cluster.faults.refuse_offsets[1] = StorageError("the log directory is offline")
    with Consumer(cluster.bootstrap, auto_offset_reset="earliest", default_api_timeout_ms=100, **FAST) as consumer:
        consumer.subscribe("t")
        consumer.seek(BROKEN, 2)
        assert read(consumer, 10, 8)[0] == {0: 5, 1: 3}


def test_a_look_up_names_the_partition_that_cannot_answer(cluster: FakeCluster) -> None:
    cluster.faults.refuse_offsets[1] = StorageError("the log directory is offline")
    with Consumer(cluster.bootstrap, default_api_timeout_ms=200, **FAST) as consumer:
        assert consumer.end_offsets([HEALTHY]) == {HEALTHY: 5}
        with pytest.raises(StorageError, match="offline"):
            consumer.end_offsets([HEALTHY, BROKEN])


def test_retries_of_several_partitions_share_one_timer(cluster: FakeCluster) -> None:
    """A timer for each look at the partitions would breed others: ever more wake-ups for nothing."""
    cluster.add_partitions("t", 8)
    for partition in range(8):
        cluster.faults.refuse_offsets[partition] = StorageError("offline")
    with Consumer(cluster.bootstrap, auto_offset_reset="earliest", default_api_timeout_ms=100, **FAST) as consumer:
        consumer.subscribe("t")
        engine = consumer._engine
        looks = []
        look = engine._synced
        engine._synced = lambda: (looks.append(1), look())[-1]  # type: ignore[method-assign,func-returns-value] # a spy
        consumer.poll(1.0)
        assert len(looks) < 8 * 25 * 4, "eight partitions, each about 25 times, look before and after"


@pytest.mark.parametrize("how", ["subscribe", "assign"])
def test_a_partition_without_a_leader_holds_the_others_up_for_a_moment_only(cluster: FakeCluster, how: str) -> None:
    cluster.topics["t"].partitions[1].leader = -1
    with Consumer(cluster.bootstrap, auto_offset_reset="earliest", **FAST) as consumer:
        assert begin(consumer, how) < 4, "and not default.api.timeout.ms, which is a minute"
        assert read(consumer, 10, 5) == (Counter({0: 5}), [])
        cluster.topics["t"].partitions[1].leader = 2
        assert read(consumer, 10, 5) == (Counter({1: 5}), []), "it was asked for again in the background"


def test_offsets_come_of_those_that_answer_and_a_reason_of_the_others(cluster: FakeCluster) -> None:
    cluster.topics["t"].partitions[1].leader = -1
    with Consumer(cluster.bootstrap, **FAST) as consumer:
        found = try_offsets(consumer, [HEALTHY, BROKEN], LATEST, grace_s=0.1)
        assert found[HEALTHY] == 5
        assert isinstance(found[BROKEN], LeaderNotAvailable)
        cluster.topics["t"].partitions[1].leader = 2
        cluster.faults.offsets_delay_s[2] = 60
        assert isinstance(try_offsets(consumer, [HEALTHY, BROKEN], LATEST, grace_s=0.1)[BROKEN], RequestTimedOut)
        with pytest.raises(RequestTimedOut, match="t-1"):
            try_offsets(consumer, [BROKEN], LATEST, patience_s=0.1)
