"""Where partitions begin, and that one which cannot be read holds up no other one."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import pyarrow as pa
import pytest

from raftlog import Consumer, TopicPartition
from raftlog._client import consumer as consumer_engine
from raftlog._client import metadata as inquiry
from raftlog._client.metadata import LATEST
from raftlog.cli.records.reading import try_offsets
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
from tests.support import patience
from tests.support.fake_broker import FakeCluster

HEALTHY = TopicPartition("t", 0)
BROKEN = TopicPartition("t", 1)
FAST: dict[str, Any] = {"retry_backoff_ms": 5, "retry_backoff_max_ms": 50}
LONG_MS = 120_000
SOON_S = 40.0
"""Far below `LONG_MS`, and far above what anything takes here."""


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broker that is slow to say what there is is not given up before it has."""
    monkeypatch.setattr(inquiry, "_ADDRESS_TIMEOUT_S", LONG_MS / 1000)


@pytest.fixture
def long_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """A consumer that waits for silent partitions does not finish in time."""
    monkeypatch.setattr(consumer_engine, "STRAGGLER_GRACE_S", LONG_MS / 1000)


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
    """Poll for a short time; return the records by partition, and the errors."""
    found: Counter[int] = Counter()
    raised = []
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and found.total() < count:
        try:
            found.update(record.partition for record in consumer.poll(0.02))
        except RaftlogError as error:
            raised.append(error)
    return found, raised


until = partial(patience.until, within_s=SOON_S, pause_s=0.01)


def read_beside(consumer: Consumer) -> list[RaftlogError]:
    """Read the five records of the one partition, while the other one is raised now and then; return that."""
    began = time.monotonic()
    found, raised = read(consumer, 1.0)
    while (len(raised) < 5 or found.total() < 5) and time.monotonic() - began < SOON_S:
        more, errors = read(consumer, 0.05)
        found.update(more)
        raised += errors
    assert found == {0: 5}
    assert len(raised) >= 5
    # At least 40 ms lie between two of them, once the backoff is at its longest.
    assert len(raised) <= 30 * (time.monotonic() - began)
    return raised


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
        assert read(consumer, 30, count=10)[0].total() == 10


@pytest.mark.usefixtures("long_grace")
@pytest.mark.parametrize("how", ["subscribe", "assign"])
def test_an_offline_partition_delays_the_others_no_longer_than_the_timeout(cluster: FakeCluster, how: str) -> None:
    cluster.faults.refuse_offsets[1] = StorageError("the log directory is offline")
    options = {"default_api_timeout_ms": 400, **FAST}
    with Consumer(cluster.bootstrap, auto_offset_reset="earliest", **options) as consumer:
        assert 0.3 < begin(consumer, how) < SOON_S
        assert read(consumer, 30, 5) == (Counter({0: 5}), [])
        with pytest.raises(InvalidRequestError, match="no position yet"):
            consumer.position(BROKEN)
        cluster.faults.refuse_offsets.clear()
        assert read(consumer, 30, 5) == (Counter({1: 5}), []), (
            "the start of the partition must be looked up again in the background"
        )


@pytest.mark.usefixtures("long_grace")
@pytest.mark.parametrize("how", ["subscribe", "assign"])
def test_a_damaged_partition_is_raised_now_and_then_and_the_others_flow(cluster: FakeCluster, how: str) -> None:
    cluster.faults.refuse_offsets[1] = CorruptRecordError("checksum mismatch at 300")
    options = {"default_api_timeout_ms": LONG_MS, **FAST}
    with Consumer(cluster.bootstrap, auto_offset_reset="earliest", **options) as consumer:
        assert begin(consumer, how) < SOON_S
        raised = read_beside(consumer)
        assert all(isinstance(error, CorruptRecordError) and "t-1" in str(error) for error in raised)
        cluster.faults.refuse_offsets.clear()
        assert read(consumer, 30, 5)[0] == {1: 5}


def test_damaged_records_are_raised_now_and_then_and_the_others_flow(cluster: FakeCluster) -> None:
    cluster.faults.corrupt_partitions.add(1)
    with Consumer(cluster.bootstrap, auto_offset_reset="earliest", **FAST) as consumer:
        consumer.subscribe("t")
        read_beside(consumer)
        cluster.faults.corrupt_partitions.clear()
        assert read(consumer, 30, 5)[0] == {1: 5}


def test_many_damaged_partitions_leave_every_second_poll_to_the_others(cluster: FakeCluster) -> None:
    cluster.add_partitions("t", 40)
    for partition in range(1, 40):
        cluster.faults.refuse_offsets[partition] = CorruptRecordError("checksum mismatch")
    options: dict[str, Any] = {"retry_backoff_ms": 1, "retry_backoff_max_ms": 1}
    with Consumer(cluster.bootstrap, auto_offset_reset="earliest", max_poll_records=1, **options) as consumer:
        consumer.subscribe("t")
        states = consumer._engine.positions.states
        until(lambda: bool(consumer._engine._inbox) and sum(state.error is not None for state in states.values()) > 5)
        polls: list[str] = []
        while polls.count("record") < 5 and len(polls) < 100:
            try:
                polls += ["record"] * len(consumer.poll(0))
            except CorruptRecordError:
                polls.append("error")
        assert polls.count("record") == 5
        assert len(polls) <= 11, "two errors in a row were raised while there were records"


def test_a_broker_that_does_not_answer_keeps_only_its_own_partitions(cluster: FakeCluster) -> None:
    cluster.faults.offsets_delay_s[2] = LONG_MS / 1000
    options = {"default_api_timeout_ms": 300, "request_timeout_ms": LONG_MS, **FAST}
    with Consumer(cluster.bootstrap, auto_offset_reset="earliest", **options) as consumer:
        assert begin(consumer, "subscribe") < SOON_S
        assert read(consumer, 30, 5)[0] == {0: 5}


def test_a_seek_ends_the_wait_for_a_start(cluster: FakeCluster) -> None:
    cluster.faults.refuse_offsets[1] = StorageError("the log directory is offline")
    with Consumer(cluster.bootstrap, auto_offset_reset="earliest", default_api_timeout_ms=100, **FAST) as consumer:
        consumer.subscribe("t")
        consumer.seek(BROKEN, 2)
        assert read(consumer, 30, 8)[0] == {0: 5, 1: 3}


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
        began = time.monotonic()
        consumer.poll(1.0)
        count = len(looks)
        # Eight partitions, each about 25 times a second, look before and after.
        assert count < 8 * 25 * 4 * (time.monotonic() - began)


@pytest.mark.parametrize("how", ["subscribe", "assign"])
def test_a_partition_without_a_leader_holds_the_others_up_for_a_moment_only(cluster: FakeCluster, how: str) -> None:
    cluster.topics["t"].partitions[1].leader = -1
    options = {"default_api_timeout_ms": LONG_MS, **FAST}
    with Consumer(cluster.bootstrap, auto_offset_reset="earliest", **options) as consumer:
        assert begin(consumer, how) < SOON_S, "the start must not wait for default.api.timeout.ms"
        assert read(consumer, 30, 5) == (Counter({0: 5}), [])
        cluster.topics["t"].partitions[1].leader = 2
        assert read(consumer, 30, 5) == (Counter({1: 5}), []), (
            "the start of the partition must be looked up again in the background"
        )


def test_offsets_come_of_those_that_answer_and_a_reason_of_the_others(cluster: FakeCluster) -> None:
    cluster.topics["t"].partitions[1].leader = -1
    with Consumer(cluster.bootstrap, **FAST) as consumer:
        found = try_offsets(consumer, [HEALTHY, BROKEN], LATEST, grace_s=0.1)
        assert found[HEALTHY] == 5
        assert isinstance(found[BROKEN], LeaderNotAvailable)
        cluster.topics["t"].partitions[1].leader = 2
        metadata = consumer._engine.metadata
        consumer._thread.loop.call_soon_threadsafe(metadata.request_refresh)
        until(lambda: metadata.leader(BROKEN) is not None)
        cluster.faults.offsets_delay_s[2] = LONG_MS / 1000
        assert isinstance(try_offsets(consumer, [HEALTHY, BROKEN], LATEST, grace_s=0.1)[BROKEN], RequestTimedOut)
        with pytest.raises(RequestTimedOut, match="t-1"):
            try_offsets(consumer, [BROKEN], LATEST, patience_s=0.1)
