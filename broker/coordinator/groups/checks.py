"""Checks of members' requests, before anything else is done with them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Final

from broker.coordinator.groups.assignors import Assignor
from broker.coordinator.groups.topics import TopicPartition
from raftlog.errors import (
    FencedInstanceId,
    FencedMemberEpoch,
    InvalidGroupId,
    InvalidRequestError,
    UnknownMemberId,
    UnsupportedAssignor,
)
from raftlog.v1 import group_pb2

MAX_ID: Final = 255
MAX_PARTITIONS: Final = 10_000
"""The most partitions in one request; clients split larger ones, so that none delays the others for long."""
MAX_PATTERN: Final = 1000
MAX_TOPICS: Final = 10_000
MAX_TOPIC_NAME: Final = 249
MAX_PRODUCER_EPOCH: Final = 32_766
"""That of a transaction; its marker's is one above."""
MAX_REBALANCE_TIMEOUT_MS: Final = 24 * 60 * 60 * 1000


def unknown_member(group_id: str, member_id: str) -> UnknownMemberId:
    """Return the refusal of a member that is none, or no longer."""
    return UnknownMemberId(f"the group {group_id!r} has no member {member_id!r}: join again")


def fenced_instance(instance_id: str) -> FencedInstanceId:
    """Return the refusal of a static member's former process (KIP-345)."""
    return FencedInstanceId(f"another process has joined with the instance id {instance_id!r}")


def check_group_id(group_id: str) -> None:
    """A group id has 1 to 255 characters.

    Raises:
        InvalidGroupId: this one has not.
    """
    if not 1 <= len(group_id) <= MAX_ID:
        raise InvalidGroupId(f"a group id has 1 to {MAX_ID} characters, this one has {len(group_id)}")


def check_join(request: group_pb2.JoinGroup, assignors: Mapping[str, Assignor]) -> None:
    """Check a join.

    Raises:
        InvalidGroupId, InvalidRequestError, UnsupportedAssignor: it can never be accepted.
    """
    check_group_id(request.group_id)
    if not request.member_id:
        raise InvalidRequestError("a member chooses its member id before it joins; this one has none")
    for what in ("member_id", "instance_id", "client_id", "rack"):
        length = len(getattr(request, what))
        if length > MAX_ID:
            raise InvalidRequestError(f"{what} has {length} characters, at most {MAX_ID}")
    if request.member_epoch < 0:
        raise InvalidRequestError(f"a member joins with an epoch of 0 or above, not {request.member_epoch}")
    if request.rebalance_timeout_ms > MAX_REBALANCE_TIMEOUT_MS:
        raise InvalidRequestError(f"rebalance_timeout_ms is {request.rebalance_timeout_ms}, at most 24 hours")
    check_subscription(request.subscription, assignors)


def check_subscription(subscription: group_pb2.Subscription, assignors: Mapping[str, Assignor]) -> None:
    """Check a subscription.

    Raises:
        InvalidRequestError, UnsupportedAssignor: it can never be accepted.
    """
    check_topic_count(subscription)
    wrong = [name for name in subscription.topics if not 1 <= len(name) <= MAX_TOPIC_NAME]
    if wrong:
        raise InvalidRequestError(f"a topic's name has 1 to {MAX_TOPIC_NAME} characters, not {len(wrong[0])}")
    if len(subscription.pattern) > MAX_PATTERN:
        raise InvalidRequestError(f"the pattern has {len(subscription.pattern)} characters, at most {MAX_PATTERN}")
    if subscription.assignor and subscription.assignor not in assignors:
        raise UnsupportedAssignor(
            f"the coordinator has no assignor {subscription.assignor[:MAX_ID]!r}; it has {', '.join(assignors)} "
            "(group.consumer.assignors)"
        )


def check_topic_count(subscription: group_pb2.Subscription) -> None:
    """Check the number of subscribed topics, before any work is done on them.

    Raises:
        InvalidRequestError: too many.
    """
    if len(subscription.topics) > MAX_TOPICS:
        raise InvalidRequestError(f"a member subscribes to {MAX_TOPICS} topics at most, not {len(subscription.topics)}")


def check_offsets(offsets: Collection[group_pb2.CommitOffset]) -> None:
    """Check the offsets of a commit, before any work is done on them.

    Raises:
        InvalidRequestError: too many partitions, or one twice.
    """
    _check_count(len(offsets), "commits")
    if len({(offset.topic_id or offset.topic, offset.partition) for offset in offsets}) < len(offsets):
        raise InvalidRequestError("the request commits two offsets of one partition; send one of each")


def check_transaction_offsets(request: group_pb2.CommitTransactionOffsetsRequest) -> None:
    """Check the offsets of a transaction's commit, before any work is done on them.

    Raises:
        InvalidRequestError: it names no transaction, or its offsets are refused by `check_offsets`.
    """
    length = len(request.transactional_id)
    if not 1 <= length <= MAX_ID:
        raise InvalidRequestError(f"a transactional id has 1 to {MAX_ID} characters, this one has {length}")
    if request.producer_id < 0 or not 0 <= request.producer_epoch <= MAX_PRODUCER_EPOCH:
        raise InvalidRequestError(
            "offsets of a transaction come with a producer id of 0 or above and an epoch of 0 to "
            f"{MAX_PRODUCER_EPOCH}, not {request.producer_id} and {request.producer_epoch}"
        )
    check_offsets(request.offsets)


def check_partitions(topics: Collection[group_pb2.TopicPartitions]) -> None:
    """Check the partitions of a request, before any work is done on them.

    Raises:
        InvalidRequestError: too many, or one twice.
    """
    _check_count(len(topics), "names")
    asked = sum(len(topic.partitions) for topic in topics)
    _check_count(asked, "names")
    if len({(topic.topic_id or topic.topic, number) for topic in topics for number in topic.partitions}) < asked:
        raise InvalidRequestError("the request names a partition twice")


def _check_count(count: int, what: str) -> None:
    if count > MAX_PARTITIONS:
        raise InvalidRequestError(
            f"the request {what} {count} partitions, one may have {MAX_PARTITIONS}: split it into several"
        )


def check_owned(topics: Collection[group_pb2.TopicPartitions], most: int) -> None:
    """Check that a member says to read no more partitions than it has; which ones is not looked at.

    Raises:
        FencedMemberEpoch: it does.
    """
    if len(topics) > most or sum(len(topic.partitions) for topic in topics) > most:
        raise FencedMemberEpoch(f"the member says that it reads more than its {most} partitions: join again")


def read_partitions(topics: Iterable[group_pb2.TopicPartitions]) -> frozenset[TopicPartition]:
    """Return the partitions of messages that name topics by id."""
    return frozenset((topic.topic_id, number) for topic in topics for number in topic.partitions)
