"""Where a partition is read: at its leader, or at the follower that this leader has named, for a while."""

from __future__ import annotations

import pytest

from raftlog._core.cluster import ClusterCache
from raftlog._core.positions import NearReplica, PartitionState
from raftlog._core.read_source import ReadSource, has_moved, leads_anew, read_source
from raftlog.types import TopicPartition
from raftlog.v1 import common_pb2, metadata_pb2

PLACE = TopicPartition("t", 0)
EPOCH = 5


def cluster(leader: int = 1, epoch: int = EPOCH, *, fenced: bool = False) -> ClusterCache:
    response = metadata_pb2.MetadataResponse(cluster_id="c")
    for broker_id in (1, 2, 3):
        response.brokers.add(broker_id=broker_id, host="h", port=broker_id, fenced=fenced and broker_id == 2)
    response.topics.add(name="t", topic_id=b"a" * 16).partitions.add(partition=0, leader=leader, leader_epoch=epoch)
    cache = ClusterCache()
    cache.merge(response, all_topics=False)
    return cache


def state(*, near: NearReplica | None = None, at: int | None = None, epoch: int = EPOCH) -> PartitionState:
    made = PartitionState(PLACE, b"a" * 16, "latest")
    made.position = 0
    made.near = near
    if at is not None:
        made.subscription_id, made.node_id, made.leader_epoch = 1, at, epoch
    return made


NEAR = NearReplica(2, EPOCH, until_ms=100.0)
AT_LEADER = ReadSource(1, EPOCH, from_follower=False)
AT_FOLLOWER = ReadSource(2, EPOCH, from_follower=True)


@pytest.mark.parametrize(
    ("near", "view", "now_ms", "source"),
    [
        (None, cluster(), 0.0, AT_LEADER),
        (None, cluster(leader=-1), 0.0, None),
        (NEAR, cluster(), 99.0, AT_FOLLOWER),
        (NEAR, cluster(), 100.0, AT_LEADER),
        (NEAR, cluster(leader=3, epoch=6), 0.0, ReadSource(3, 6, from_follower=False)),
        (NEAR, cluster(fenced=True), 0.0, AT_LEADER),
        (NearReplica(9, EPOCH, 100.0), cluster(), 0.0, AT_LEADER),
        (NEAR, cluster(leader=-1), 0.0, None),
    ],
)
def test_the_source(near: NearReplica | None, view: ClusterCache, now_ms: float, source: ReadSource | None) -> None:
    assert read_source(state(near=near), view, now_ms) == source


def test_a_leader_from_before_what_was_read_is_none() -> None:
    """A consumer at a follower reads on under the next leader; then the follower dies, before metadata tells of that
    leader. The former one would say that what was read is truncated."""
    reader = state(near=NEAR)
    reader.last_epoch = EPOCH + 1
    assert read_source(reader, cluster(), 0.0) is None
    assert read_source(reader, cluster(leader=3, epoch=EPOCH + 1), 0.0) == ReadSource(3, EPOCH + 1, False)
    reader.place(0)
    assert read_source(reader, cluster(), 200.0) == AT_LEADER, "after a seek nothing was read"


def test_who_is_subscribed_moves_with_the_leader() -> None:
    assert not has_moved(state(), AT_LEADER), "it is not subscribed"
    assert not has_moved(state(at=1), AT_LEADER)
    assert has_moved(state(at=3, epoch=4), AT_LEADER)


def test_who_has_heard_of_a_later_epoch_is_not_sent_back() -> None:
    """KIP-232."""
    assert not has_moved(state(at=3, epoch=6), AT_LEADER)


def test_who_reads_from_a_follower_goes_back_when_its_time_is_over() -> None:
    assert not has_moved(state(near=NEAR, at=2), AT_FOLLOWER)
    assert has_moved(state(near=NEAR, at=2), AT_LEADER)


def test_a_leader_that_was_not_asked_yet_is_asked_at_once() -> None:
    """KIP-951: what the one before refused says nothing about the next one."""
    assert leads_anew(state(at=3, epoch=4), AT_LEADER)
    assert not leads_anew(state(at=1), AT_LEADER)
    assert not leads_anew(state(), AT_LEADER), "nobody was asked"
    assert not leads_anew(state(at=1), None)
    hinted = cluster()
    assert hinted.apply_hint("t", 0, common_pb2.LeaderHint(leader_id=3, leader_epoch=6))
    assert leads_anew(state(at=1), read_source(state(), hinted, 0.0))
