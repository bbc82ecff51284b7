"""The view of the cluster never goes back."""

from __future__ import annotations

from raftlog._core.backoff import Backoff
from raftlog._core.cluster import ClusterCache, join_address
from raftlog.errors import UnknownTopicOrPartition
from raftlog.types import TopicPartition
from raftlog.v1 import common_pb2, metadata_pb2


def answer(leader: int, epoch: int, topic_id: bytes = b"a" * 16) -> metadata_pb2.MetadataResponse:
    response = metadata_pb2.MetadataResponse(cluster_id="c", controller_id=1, controller_epoch=epoch)
    response.brokers.add(broker_id=1, host="h1", port=1)
    response.brokers.add(broker_id=2, host="h2", port=2)
    response.topics.add(name="t", topic_id=topic_id).partitions.add(
        partition=0, leader=leader, leader_epoch=epoch, replicas=[1, 2], isr=[1, 2]
    )
    return response


def test_an_older_leader_epoch_of_the_same_topic_is_ignored() -> None:
    """KIP-232: stale metadata rewinds consumers."""
    cache = ClusterCache()
    assert cache.merge(answer(2, 5), all_topics=False)
    assert not cache.merge(answer(1, 4), all_topics=False)
    leader = cache.leader("t", 0)
    assert leader is not None
    assert leader.broker_id == 2
    assert cache.merge(answer(1, 0, b"b" * 16), all_topics=False), "another topic of that name starts over"
    assert cache.topics["t"].partitions[0].leader == 1


def test_a_hint_counts_when_it_is_newer() -> None:
    cache = ClusterCache()
    cache.merge(answer(1, 5), all_topics=False)
    assert not cache.apply_hint("t", 0, common_pb2.LeaderHint(leader_id=2, leader_epoch=5))
    assert not cache.apply_hint("t", 7, common_pb2.LeaderHint(leader_id=2, leader_epoch=9))
    assert cache.apply_hint("t", 0, common_pb2.LeaderHint(leader_id=3, leader_epoch=6, host="h3", port=3))
    leader = cache.leader("t", 0)
    assert leader is not None
    assert leader.address == "h3:3"
    assert not cache.merge(answer(1, 5), all_topics=False) or cache.topics["t"].partitions[0].leader == 3


def test_topics_go_missing_and_come_back() -> None:
    cache = ClusterCache()
    cache.merge(answer(1, 1), all_topics=False)
    gone = metadata_pb2.MetadataResponse()
    gone.topics.add(name="t").error.code = common_pb2.UNKNOWN_TOPIC_OR_PARTITION
    assert cache.merge(gone, all_topics=False)
    assert isinstance(cache.missing["t"], UnknownTopicOrPartition)
    assert cache.partition(TopicPartition("t", 0)) is None
    assert cache.merge(answer(1, 1), all_topics=False)
    assert not cache.missing
    assert cache.merge(metadata_pb2.MetadataResponse(), all_topics=True)
    assert not cache.topics


def test_addresses_and_pauses() -> None:
    assert join_address("::1", 9) == "[::1]:9"
    backoff = Backoff(50, 1000, lambda: 0.5)
    assert [backoff.pause_ms(failures) for failures in (1, 2, 3, 9, 1000)] == [45, 90, 180, 900, 900]
