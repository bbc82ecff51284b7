"""What the registry works with: who fetches for it, and what a topic's configs say to its partitions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from broker.log.config import LogConfig
from raftmeta.image import MetadataImage, TopicImage
from raftmeta.topic_configs import THROTTLED_REPLICAS_OF_FOLLOWER, THROTTLED_REPLICAS_OF_LEADER
from replication.ports import FollowedPartition

MIN_INSYNC_REPLICAS = "min.insync.replicas"


class Fetchers(Protocol):
    """Who keeps the partitions that this broker follows in step with their leaders."""

    def follow(self, partition: FollowedPartition, leader_id: int) -> None:
        """Fetch from this leader; the same leader in the same `partition.leader_epoch` as before changes nothing."""
        ...

    def unfollow(self, topic_id: bytes, partition: int) -> None:
        """Fetch no more; what is not followed is passed over."""
        ...


class NoFetchers:
    """Until `serve`: a broker that fetches nothing."""

    def follow(self, partition: FollowedPartition, leader_id: int) -> None:
        """Do nothing."""

    def unfollow(self, topic_id: bytes, partition: int) -> None:
        """Do nothing."""


class TopicRules(NamedTuple):
    """What a topic's configs say to its partitions."""

    log: LogConfig
    min_insync_replicas: int
    throttled_leaders: str
    throttled_followers: str


def topic_rules(
    image: MetadataImage, topic: TopicImage, topic_defaults: Mapping[str, str], broker_id: int
) -> TopicRules:
    """Return the rules of a topic on one broker; `topic_defaults` come from its file.

    min.insync.replicas is what the controllers judge by, or more, whatever that file says (KAFKA-16540).

    Raises:
        InvalidConfig: a value that is not allowed.
    """
    configs = {**topic_defaults, **image.topic_configs(topic.name, broker_id)}
    return TopicRules(
        LogConfig.from_topic_configs(configs),
        max(image.min_insync_replicas(topic), int(configs.get(MIN_INSYNC_REPLICAS, "1"))),
        configs.get(THROTTLED_REPLICAS_OF_LEADER, ""),
        configs.get(THROTTLED_REPLICAS_OF_FOLLOWER, ""),
    )
