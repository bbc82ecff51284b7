"""Partitions in requests about transactions: checked against the metadata, and named for people."""

from __future__ import annotations

from collections.abc import Collection, Iterable, MutableSequence

from broker.internal_topics import refuse_internal
from broker.security.caller import Caller
from broker.transactions.checks import MAX_PARTITIONS
from raftlog.errors import InvalidRequestError, UnknownTopicId, UnknownTopicOrPartition
from raftlog.v1.group_pb2 import TopicPartitions
from raftlog.v1.security_pb2 import Acl
from raftmeta.image import MetadataImage


def check_partitions(image: MetadataImage, topics: Collection[TopicPartitions]) -> None:
    """Refuse a transaction with partitions that nobody could write a marker to.

    Raises:
        InvalidTopic: of a topic that is raftlog's own.
        UnknownTopicId, UnknownTopicOrPartition: there are none, as far as this broker has heard.
        InvalidRequestError: too many.
    """
    count = sum(len(topic.partitions) for topic in topics)
    if max(count, len(topics)) > MAX_PARTITIONS:
        raise InvalidRequestError(f"the request names {count} partitions, a transaction may have {MAX_PARTITIONS}")
    for topic in topics:
        known = image.topics.get(topic.topic_id)
        if known is None:
            raise UnknownTopicId(
                f"topic id {topic.topic_id.hex()} is not known here: deleted, or not heard of yet; refresh metadata"
            )
        refuse_internal(known.name, "has no transactions")
        wrong = [number for number in topic.partitions if not 0 <= number < len(known.partitions)]
        if wrong:
            raise UnknownTopicOrPartition(
                f"topic {known.name!r} has no partition {wrong[0]}, it has {len(known.partitions)} as far as this "
                "broker has heard"
            )


def name_topics(image: MetadataImage, topics: Iterable[TopicPartitions]) -> None:
    """Fill in the names of the topics that there still are."""
    for topic in topics:
        known = image.topics.get(topic.topic_id)
        if known is not None:
            topic.topic = known.name


def leave_out_topics(topics: MutableSequence[TopicPartitions], who: Caller) -> None:
    """Take out the topics that a caller may not describe, and those that are gone: nobody could say."""
    if who.authorizer is not None:
        shown = [topic for topic in topics if topic.topic and who.may(Acl.DESCRIBE, Acl.TOPIC, topic.topic, log=False)]
        del topics[:]
        topics.extend(shown)
