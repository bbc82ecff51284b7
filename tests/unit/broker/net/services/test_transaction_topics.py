"""Partitions in requests about transactions: what could never get a marker is refused before anything is begun."""

from __future__ import annotations

import pytest

from broker.net.services.transactions import check_partitions, name_topics
from raftlog.errors import InvalidRequestError, InvalidTopic, RaftlogError, UnknownTopicId, UnknownTopicOrPartition
from raftlog.v1.group_pb2 import TopicPartitions
from raftmeta.image import MetadataImage, TopicImage
from tests.support.broker_parts import TOPIC_ID, image_with

OTHER_ID = bytes(16)


@pytest.fixture
def image() -> MetadataImage:
    """One topic, `t`, with one partition."""
    return image_with(1, offset=1)


def test_partitions_that_exist_are_let_through_and_named(image: MetadataImage) -> None:
    topics = [TopicPartitions(topic_id=TOPIC_ID, partitions=[0]), TopicPartitions(topic_id=OTHER_ID, partitions=[0])]
    check_partitions(image, topics[:1])
    name_topics(image, topics)
    assert [topic.topic for topic in topics] == ["t", ""]


@pytest.mark.parametrize(
    ("topic_id", "partition", "error", "says"),
    [
        (OTHER_ID, 0, UnknownTopicId, "not in this broker's metadata"),
        (TOPIC_ID, 1, UnknownTopicOrPartition, "no partition 1, it has 1"),
        (TOPIC_ID, -1, UnknownTopicOrPartition, "no partition -1"),
    ],
)
def test_others_are_refused(
    image: MetadataImage, topic_id: bytes, partition: int, error: type[RaftlogError], says: str
) -> None:
    with pytest.raises(error, match=says):
        check_partitions(image, [TopicPartitions(topic_id=topic_id, partitions=[partition])])


def test_topics_of_raftlogs_own_have_no_transactions() -> None:
    image = MetadataImage(topics={TOPIC_ID: TopicImage("__consumer_offsets", TOPIC_ID)})
    with pytest.raises(InvalidTopic, match="has no transactions"):
        check_partitions(image, [TopicPartitions(topic_id=TOPIC_ID, partitions=[0])])


def test_too_many_are_refused_before_any_is_looked_at(image: MetadataImage) -> None:
    with pytest.raises(InvalidRequestError, match="names 10001 partitions"):
        check_partitions(image, [TopicPartitions(topic_id=OTHER_ID, partitions=range(10_001))])
    with pytest.raises(InvalidRequestError):
        check_partitions(image, [TopicPartitions(topic_id=OTHER_ID)] * 10_001)
