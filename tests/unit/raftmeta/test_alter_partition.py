"""AlterPartition against every stale input, and moving partitions."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from raftlog.errors import (
    BrokerIdNotRegistered,
    EligibleLeadersNotAvailable,
    FencedLeaderEpoch,
    IneligibleReplica,
    InvalidReplicaAssignment,
    InvalidRequestError,
    InvalidUpdateVersion,
    NoReassignmentInProgress,
    RaftlogError,
    StaleBrokerEpoch,
    UnknownTopicId,
    UnknownTopicOrPartition,
)
from raftlog.v1.records_pb2 import AlterPartitionCommand, MetadataCommand
from raftmeta.image import NO_LEADER, MetadataImage
from tests.support.metadata import (
    accept,
    alter_partition,
    begin_shutdown,
    broker_epoch,
    cluster,
    create_topic,
    down,
    elect,
    fence,
    partition_of,
    reassign,
    refs,
    refusal,
    register,
    revoke,
    up,
    uuid_of,
)

THREE = cluster(4, create_topic("a", 1, 1, 3))


def test_the_leader_shrinks_and_grows_the_isr() -> None:
    image, result = accept(THREE, alter_partition(THREE, [1, 3]))
    assert partition_of(image).isr == (1, 3)
    assert (partition_of(image).partition_epoch, partition_of(image).leader_epoch) == (1, 0)
    assert [(list(each.isr), each.partition_epoch) for each in result.partitions] == [([1, 3], 1)]
    image, _ = accept(image, alter_partition(image, [3, 2, 1]))
    assert partition_of(image).isr == (1, 2, 3)


def test_the_same_isr_changes_nothing_and_is_told() -> None:
    image, result = accept(THREE, alter_partition(THREE, [3, 1, 2]))
    assert image is THREE
    assert result.partitions[0].partition_epoch == 0


def set_(field: str, value: object) -> Callable[[AlterPartitionCommand], None]:
    return lambda command: setattr(command, field, value)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (set_("broker_epoch", 1), StaleBrokerEpoch),
        (set_("broker_id", 9), BrokerIdNotRegistered),
        (set_("topic_id", uuid_of(2)), UnknownTopicId),
        (set_("partition", 1), UnknownTopicOrPartition),
        (set_("partition", -1), UnknownTopicOrPartition),
        (set_("leader_epoch", 1), FencedLeaderEpoch),
        (set_("leader_epoch", -1), FencedLeaderEpoch),
        (set_("partition_epoch", 1), InvalidUpdateVersion),
        (lambda command: command.new_isr.pop(0), InvalidRequestError),
        (lambda command: command.ClearField("new_isr"), InvalidRequestError),
        (lambda command: command.new_isr.append(command.new_isr[0]), InvalidRequestError),
        (lambda command: command.new_isr.add(broker_id=4, broker_epoch=8), InvalidRequestError),
        (lambda command: setattr(command.new_isr[1], "broker_epoch", 3), IneligibleReplica),
        (lambda command: setattr(command.new_isr[0], "broker_epoch", 3), IneligibleReplica),
    ],
)
def test_what_does_not_fit_is_refused(
    change: Callable[[AlterPartitionCommand], object], error: type[RaftlogError]
) -> None:
    command = alter_partition(THREE, [1, 2])
    change(command.alter_partition)
    assert type(refusal(THREE, command)) is error


def test_only_the_leader_alters() -> None:
    command = alter_partition(THREE, [1, 2])
    command.alter_partition.broker_id = 2
    command.alter_partition.broker_epoch = broker_epoch(THREE, 2)
    assert "is led by 1, broker 2 cannot alter it" in str(refusal(THREE, command))


def test_a_fenced_leader_alters_nothing() -> None:
    """Its lease is over, and the partition is about to be settled."""
    image, _ = accept(THREE, fence(1, broker_epoch(THREE, 1)))
    assert isinstance(refusal(image, alter_partition(image, [1])), StaleBrokerEpoch)


def without_3() -> MetadataImage:
    return accept(THREE, alter_partition(THREE, [1, 2]))[0]


def test_a_fenced_replica_cannot_join() -> None:
    """KIP-841."""
    image = down(without_3(), 3)
    assert isinstance(refusal(image, alter_partition(image, [1, 2, 3])), IneligibleReplica)


def test_a_replica_that_is_shutting_down_cannot_join_but_may_stay() -> None:
    image, _ = accept(without_3(), begin_shutdown(3, broker_epoch(THREE, 3)))
    assert isinstance(refusal(image, alter_partition(image, [1, 2, 3])), IneligibleReplica)


def test_a_replica_that_restarted_since_the_leader_heard_of_it_cannot_join() -> None:
    """KIP-903: the process that caught up is gone, and the new one may lack what that one had."""
    image = without_3()
    late = alter_partition(image, [1, 2, 3])
    image = up(accept(image, register(3, incarnation=9))[0], 3)
    error = refusal(image, late)
    assert isinstance(error, IneligibleReplica)
    assert "it is another process" in str(error)
    assert accept(image, alter_partition(image, [1, 2, 3]))


def test_what_was_asked_before_a_leadership_was_revoked_is_refused() -> None:
    late = alter_partition(THREE, [1])
    image, _ = accept(THREE, revoke(refs((1, 0))))
    assert isinstance(refusal(image, late), FencedLeaderEpoch)
    image, _ = accept(image, elect(refs((1, 0)), handed_over=True))
    assert isinstance(refusal(image, late), FencedLeaderEpoch), "it leads again, in another epoch"


# Moving (KIP-455)


def moved(image: MetadataImage, replicas: list[int]) -> MetadataImage:
    return accept(image, reassign("a", 0, replicas))[0]


def test_a_move_adds_catches_up_and_then_removes() -> None:
    image = moved(THREE, [1, 4])
    partition = partition_of(image)
    assert (partition.replicas, partition.adding_replicas, partition.removing_replicas) == ((1, 4, 2, 3), (4,), (2, 3))
    assert partition.isr == (1, 2, 3)
    image, _ = accept(image, alter_partition(image, [1, 2, 3, 4]))
    partition = partition_of(image)
    assert (partition.replicas, partition.isr, partition.leader) == ((1, 4), (1, 4), 1)
    assert not partition.adding_replicas
    assert not partition.removing_replicas


def test_a_leader_that_is_moved_away_lets_go_first() -> None:
    image = moved(THREE, [4, 2])
    image, _ = accept(image, alter_partition(image, [1, 2, 3, 4]))
    partition = partition_of(image)
    assert (partition.replicas, partition.leader, partition.revoked_leader) == ((4, 2), NO_LEADER, 1)
    image, _ = accept(image, elect(refs((1, 0)), handed_over=True))
    assert partition_of(image).leader == 4


def test_fewer_replicas_need_nothing_to_be_added() -> None:
    partition = partition_of(moved(THREE, [1]))
    assert (partition.replicas, partition.isr, partition.partition_epoch) == ((1,), (1,), 1)


def test_the_preferred_order_can_be_changed_alone() -> None:
    partition = partition_of(moved(THREE, [3, 2, 1]))
    assert (partition.replicas, partition.leader) == ((3, 2, 1), 1)


def test_another_goal_starts_the_catching_up_again() -> None:
    image = moved(moved(THREE, [1, 4]), [4, 2])
    partition = partition_of(image)
    assert (partition.replicas, partition.adding_replicas, partition.removing_replicas) == ((4, 2, 1, 3), (4,), (1, 3))


def test_a_move_is_cancelled() -> None:
    image, _ = accept(moved(THREE, [4]), reassign("a", 0, []))
    partition = partition_of(image)
    assert (set(partition.replicas), partition.isr, partition.leader) == ({1, 2, 3}, (1, 2, 3), 1)
    assert isinstance(refusal(image, reassign("a", 0, [])), NoReassignmentInProgress)


def test_a_move_is_not_cancelled_when_only_new_replicas_are_in_sync() -> None:
    image = cluster(3, create_topic("a", 1, 1, 1))
    image = moved(image, [2, 3])
    image, _ = accept(image, alter_partition(image, [1, 2]))
    image = down(image, 1)
    assert partition_of(image).leader == 2
    assert isinstance(refusal(image, reassign("a", 0, [])), EligibleLeadersNotAvailable)


@pytest.mark.parametrize(
    ("command", "error"),
    [
        (reassign("a", 0, [1, 1]), InvalidReplicaAssignment),
        (reassign("a", 0, [1, 9]), InvalidReplicaAssignment),
        (reassign("a", 1, [1]), UnknownTopicOrPartition),
        (reassign("b", 0, [1]), UnknownTopicOrPartition),
    ],
)
def test_a_bad_goal_is_refused(command: MetadataCommand, error: type[RaftlogError]) -> None:
    assert isinstance(refusal(THREE, command), error)
