"""The view of the cluster never goes back."""

from __future__ import annotations

from raftlog._core.backoff import Backoff, Pace
from raftlog._core.cluster import ClusterCache, join_address
from raftlog.errors import UnknownTopicOrPartition
from raftlog.types import TopicPartition
from raftlog.v1 import common_pb2, metadata_pb2


def answer(
    leader: int, epoch: int, topic_id: bytes = b"a" * 16, *, offset: int = 0, cluster_id: str = "c"
) -> metadata_pb2.MetadataResponse:
    response = metadata_pb2.MetadataResponse(
        cluster_id=cluster_id, controller_id=1, controller_epoch=epoch, metadata_offset=offset
    )
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
    assert cache.merge(answer(1, 0, b"b" * 16), all_topics=False), (
        "metadata of a topic with the same name and another id must count as a change"
    )
    assert cache.topics["t"].partitions[0].leader == 1


def test_a_hint_counts_when_it_is_newer() -> None:
    cache = ClusterCache()
    cache.merge(answer(1, 5), all_topics=False)
    topic_id = cache.topics["t"].topic_id
    assert not cache.apply_hint("t", topic_id, 0, common_pb2.LeaderHint(leader_id=2, leader_epoch=5))
    assert not cache.apply_hint("t", topic_id, 7, common_pb2.LeaderHint(leader_id=2, leader_epoch=9))
    assert not cache.apply_hint("t", b"b" * 16, 0, common_pb2.LeaderHint(leader_id=2, leader_epoch=9)), (
        "a hint about an earlier topic of the name must not count"
    )
    assert cache.apply_hint("t", topic_id, 0, common_pb2.LeaderHint(leader_id=3, leader_epoch=6, host="h3", port=3))
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


def test_a_broker_that_knows_less_takes_nothing_back() -> None:
    cache = ClusterCache()
    cache.merge(answer(2, 5, b"b" * 16, offset=10), all_topics=False)
    behind = answer(1, 9, offset=9)  # the topic of that name before this one, which was led for longer
    behind.brokers.pop()
    behind.topics.add(name="other", topic_id=b"o" * 16).partitions.add(partition=0, leader=1)
    behind.topics.add(name="unheard").error.code = common_pb2.UNKNOWN_TOPIC_OR_PARTITION
    assert cache.is_older(behind)
    assert cache.merge(behind, all_topics=True), "the answer must be merged, as it has a topic that is not known yet"
    assert cache.topics["t"].topic_id == b"b" * 16
    assert cache.topics["t"].partitions[0].leader == 2
    assert sorted(cache.brokers) == [1, 2]
    assert sorted(cache.topics) == ["other", "t"]
    assert not cache.missing
    assert cache.metadata_offset == 10
    denied = metadata_pb2.MetadataResponse(cluster_id="c", metadata_offset=9)
    denied.topics.add(name="t").error.code = common_pb2.UNKNOWN_TOPIC_OR_PARTITION
    assert not cache.merge(denied, all_topics=False)
    assert "t" in cache.topics


def test_another_cluster_begins_anew() -> None:
    cache = ClusterCache()
    cache.merge(answer(2, 5, offset=10), all_topics=False)
    assert cache.merge(answer(1, 0, b"b" * 16, offset=3, cluster_id="d"), all_topics=False)
    assert cache.topics["t"].partitions[0].leader == 1
    assert cache.metadata_offset == 3


def test_what_is_missing_is_looked_for_less_often_the_longer_it_is() -> None:
    pace = Pace(lambda: 0.0)
    assert [pace.pause_ms(missing_ms) for missing_ms in (0, 240, 1200, 6000, 60_000)] == [20, 20, 100, 500, 1000]
    missing_ms, looks = 0.0, 0
    while missing_ms < 2000:
        missing_ms += pace.pause_ms(missing_ms)
        looks += 1
    assert looks < 50, f"in two seconds without a leader a client asks {looks} times, too often"
    assert Pace(lambda: 0.999).pause_ms(1200) < 81


def test_addresses_and_pauses() -> None:
    assert join_address("::1", 9) == "[::1]:9"
    backoff = Backoff(50, 1000, lambda: 0.5)
    assert [backoff.pause_ms(failures) for failures in (1, 2, 3, 9, 1000)] == [45, 90, 180, 900, 900]


def test_a_partition_whose_log_went_with_a_disk_says_what_to_do() -> None:
    cache = ClusterCache()
    lost = answer(-1, 5)
    part = lost.topics[0].partitions[0]
    part.isr[:] = [1]
    cache.merge(lost, all_topics=False)
    plain = "t-0 has no leader (replicas 1, 2; in sync 1)"
    assert cache.without_leader(TopicPartition("t", 0)) == plain
    part.leader_epoch, part.lost_replicas[:] = 6, [1]
    cache.merge(lost, all_topics=False)
    sentence = cache.without_leader(TopicPartition("t", 0))
    assert sentence is not None
    assert sentence.startswith(f"{plain}: broker 1 alone had every record and came back without the log")
    assert "raftlog partition elect t --unclean, which has broker 2, if it is up, lead" in sentence
    part.leader_epoch, part.lost_replicas[:], part.isr[:] = 7, [1, 2], [1, 2]
    cache.merge(lost, all_topics=False)
    assert "brokers 1, 2 alone had" in str(cache.without_leader(TopicPartition("t", 0)))
    assert "which begins the partition empty" in str(cache.without_leader(TopicPartition("t", 0)))
    part.leader_epoch, part.leader = 8, 2
    cache.merge(lost, all_topics=False)
    assert cache.without_leader(TopicPartition("t", 0)) is None
