"""Reading from the replica in one's own rack (KIP-392): there by the leader's word, back at the first trouble."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from raftlog import Consumer, Producer, aio
from raftlog._client import metadata
from raftlog.errors import FencedLeaderEpoch, InvalidConfig, OffsetOutOfRange, RaftlogError, StorageError
from raftlog.format import Columns, encode_batch
from tests.support.fake_broker import FakeCluster

LEADER, NEAR = 1, 2
OPTIONS: dict[str, Any] = {"auto_offset_reset": "earliest", "client_rack": "b", "metadata_max_age_ms": 300_000}
"""The leader is not asked again, nor anything else that takes time."""
SOON_S = 60.0


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """No broker is taken for silent that is only slow; else its partitions are left."""
    monkeypatch.setattr(metadata, "HEDGE_S", 60.0)


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster(nodes=3, racks={1: "a", 2: "b", 3: "c"}) as cluster:
        cluster.create_topic("t")
        yield cluster


def batch(*values: bytes) -> bytes:
    return encode_batch(Columns(pa.array(values, pa.binary())), 1000)


def read(consumer: Consumer, count: int, timeout_s: float = SOON_S) -> list[bytes | None]:
    found: list[bytes | None] = []
    deadline = time.monotonic() + timeout_s
    while len(found) < count and time.monotonic() < deadline:
        found += [record.value for record in consumer.poll(0.05)]
    return found


def places(cluster: FakeCluster) -> list[tuple[int, bool]]:
    return [(node, part.from_follower) for node, part in cluster.subscribed]


def test_the_nearest_replica_is_read_from(cluster: FakeCluster) -> None:
    cluster.append("t", batch(b"a"))
    with Consumer(cluster.bootstrap, **OPTIONS) as consumer:
        consumer.subscribe("t")
        assert read(consumer, 1) == [b"a"]
        cluster.append("t", batch(b"b"))
        assert read(consumer, 1) == [b"b"]
    assert places(cluster) == [(LEADER, False), (NEAR, True)]


def test_without_a_rack_the_leader_is(cluster: FakeCluster) -> None:
    cluster.append("t", batch(b"a"))
    with Consumer(cluster.bootstrap, config={"auto.offset.reset": "earliest", "client.rack": ""}) as consumer:
        consumer.subscribe("t")
        assert read(consumer, 1) == [b"a"]
    assert places(cluster) == [(LEADER, False)]
    with pytest.raises(InvalidConfig, match="client"):
        Producer(cluster.bootstrap, client_rack="b")  # type: ignore[call-arg] # a consumer's


def test_awaitable_as_well(cluster: FakeCluster) -> None:
    cluster.append("t", batch(b"a"))

    async def first() -> bytes | None:
        async with aio.Consumer(cluster.bootstrap, **OPTIONS) as consumer:
            await consumer.subscribe("t")
            return (await consumer.poll(30))[0].value

    assert asyncio.run(first()) == b"a"
    assert places(cluster) == [(LEADER, False), (NEAR, True)]


@pytest.mark.parametrize(
    "error",
    [OffsetOutOfRange("not up to there"), FencedLeaderEpoch("over"), StorageError("disk"), RaftlogError("whatever")],
    ids=lambda error: type(error).__name__,
)
def test_whatever_a_follower_refuses_the_leader_decides(cluster: FakeCluster, error: RaftlogError) -> None:
    """KIP-392: out of range at a follower means nothing; to start over would skip records, or repeat them."""
    cluster.append("t", batch(b"a"))
    cluster.faults.refuse_followers = [error, error]
    with Consumer(cluster.bootstrap, **{**OPTIONS, "auto_offset_reset": "latest"}) as consumer:
        consumer.subscribe("t")
        cluster.append("t", batch(b"b"))
        assert read(consumer, 1) == [b"b"]
    assert places(cluster) == [(LEADER, False), (NEAR, True)] * 3


def test_a_dead_follower_is_left(cluster: FakeCluster) -> None:
    with Consumer(cluster.bootstrap, **OPTIONS) as consumer:
        consumer.subscribe("t")
        cluster.append("t", batch(b"a"))
        assert read(consumer, 1) == [b"a"]
        cluster.racks.pop(NEAR)  # the leader does not name it any more
        cluster.kill(NEAR)
        cluster.append("t", batch(b"b"))
        assert read(consumer, 1) == [b"b"]
    assert places(cluster)[-1] == (LEADER, False)


def test_a_frozen_follower_is_left(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "HEDGE_S", 0.2)
    with Consumer(cluster.bootstrap, **OPTIONS) as consumer:
        consumer.subscribe("t")
        cluster.append("t", batch(b"a"))
        assert read(consumer, 1) == [b"a"]
        cluster.racks.pop(NEAR)
        cluster.freeze(NEAR)
        cluster.append("t", batch(b"b"))
        assert read(consumer, 1) == [b"b"], "the consumer must go on without waiting for metadata.max.age.ms"
        cluster.thaw(NEAR)
    assert places(cluster)[-1] == (LEADER, False)


def test_the_leader_is_asked_again_from_time_to_time(cluster: FakeCluster) -> None:
    """metadata.max.age.ms, as KIP-392 says: the replicas that are near may be others by then."""
    with Consumer(cluster.bootstrap, **{**OPTIONS, "metadata_max_age_ms": 200}) as consumer:
        consumer.subscribe("t")
        cluster.append("t", batch(b"a"))
        assert read(consumer, 1) == [b"a"]
        cluster.racks = {1: "a", 3: "b"}
        deadline = time.monotonic() + 30
        while places(cluster)[-1] != (3, True) and time.monotonic() < deadline:
            assert consumer.poll(0.05) == []
        cluster.append("t", batch(b"b"))
        assert read(consumer, 1) == [b"b"]


def test_a_new_leader_is_asked_at_once(cluster: FakeCluster) -> None:
    with Consumer(cluster.bootstrap, **OPTIONS) as consumer:
        consumer.subscribe("t")
        cluster.append("t", batch(b"a"))
        assert read(consumer, 1) == [b"a"]
        before = len(cluster.subscribed)
        cluster.move_leader("t", 0, NEAR)
        cluster.append("t", batch(b"b"))
        assert read(consumer, 1) == [b"b"]
        assert places(cluster)[before:][-1] == (NEAR, False)
