"""What the admin clients say of consumer groups: plain named tuples."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from raftlog.types import TopicPartition
from raftlog.v1 import group_pb2

STATES = tuple(
    name.lower()
    for name, number in group_pb2.GroupState.items()
    if number not in (group_pb2.GROUP_STATE_UNKNOWN, group_pb2.DEAD)
)
"""The states that a group can be in: empty, assigning, reconciling, stable."""


class GroupListing(NamedTuple):
    """One group. `state`: empty, assigning, reconciling, or stable. `members`: how many. `coordinator_id`: a broker."""

    group_id: str
    state: str
    members: int
    coordinator_id: int


class GroupMemberDescription(NamedTuple):
    """One member as its coordinator sees it.

    `assigned`: what it may read. `target`: what it is to have in the end. `pending_revocation`: what it was asked to
    let go and has not yet. `topics` and `pattern`: its subscription, `assignor` what it wishes for. `instance_id` is
    empty unless it is a static member. `last_heartbeat_ms`: how long ago it was heard of, -1: not yet by the present
    coordinator; `connected`: its stream is there.
    """

    member_id: str
    instance_id: str
    client_id: str
    host: str
    rack: str
    member_epoch: int
    topics: list[str]
    pattern: str
    assignor: str
    assigned: list[TopicPartition]
    target: list[TopicPartition]
    pending_revocation: list[TopicPartition]
    last_heartbeat_ms: int
    connected: bool


class GroupDescription(NamedTuple):
    """One group. `state`: empty, assigning, reconciling, or stable.

    `offsets_partition`: where in __consumer_offsets it is kept; the leader of that, `coordinator_id`, coordinates it.
    `empty_since_ms`: Unix time at which the last member left; 0: it has members, or never had any.
    """

    group_id: str
    state: str
    group_epoch: int
    assignment_epoch: int
    assignor: str
    coordinator_id: int
    offsets_partition: int
    empty_since_ms: int
    members: list[GroupMemberDescription]


class PartitionLag(NamedTuple):
    """How far a group is in one partition.

    `offset`: the committed one, of the next record to be read; None: nothing is committed. `lag`: how many offsets from
    there, or from the log's start, to its end. `lag_seconds`: the age of the first record that is not read; 0.0 when
    everything is. What is not known is None: nothing is committed, the leader does not answer, the topic is gone, or
    what is committed lies beyond the log's end; `error` says why. `member_id`: who reads it at the moment, empty:
    nobody.
    """

    offset: int | None
    log_start_offset: int | None
    log_end_offset: int | None
    lag: int | None
    lag_seconds: float | None
    metadata: str
    committed_at_ms: int | None
    member_id: str
    error: str | None


def state_name(state: group_pb2.GroupState.ValueType) -> str:
    """Return a state's name in lower case; `unknown` for one from a later version."""
    names: dict[int, str] = {number: name for name, number in group_pb2.GroupState.items()}
    return names.get(state, "unknown").removeprefix("GROUP_STATE_").lower()


def describe_group(group: group_pb2.GroupDescription) -> GroupDescription:
    """Return a group as users see it."""
    return GroupDescription(
        group.group_id,
        state_name(group.state),
        group.group_epoch,
        group.assignment_epoch,
        group.assignor,
        group.coordinator_id,
        group.offsets_partition,
        group.empty_since_ms,
        [_member(member) for member in group.members],
    )


def _member(member: group_pb2.GroupMember) -> GroupMemberDescription:
    return GroupMemberDescription(
        member.member_id,
        member.instance_id,
        member.client_id,
        member.host,
        member.rack,
        member.member_epoch,
        list(member.subscription.topics),
        member.subscription.pattern,
        member.subscription.assignor,
        partitions_of(member.assigned),
        partitions_of(member.target),
        partitions_of(member.pending_revocation),
        member.last_heartbeat_ms,
        member.connected,
    )


def partitions_of(topics: Iterable[group_pb2.TopicPartitions]) -> list[TopicPartition]:
    """Return partitions one by one, in order."""
    return sorted(TopicPartition(topic.topic, part) for topic in topics for part in topic.partitions)
