"""Replicas whose broker has no working log for them: they neither lead nor count, until they have caught up."""

from __future__ import annotations

import pytest

from raftlog.errors import (
    BrokerIdNotRegistered,
    EligibleLeadersNotAvailable,
    PreferredLeaderNotAvailable,
    StaleBrokerEpoch,
)
from raftlog.v1.records_pb2 import ElectLeadersCommand, MetadataCommand, OfflineReplicasCommand
from raftmeta.decide import decide
from raftmeta.elections import unsettled
from raftmeta.image import NO_LEADER, MetadataImage
from raftmeta.replay import image_from_records
from tests.support.metadata import (
    EPOCH,
    accept,
    alter,
    alter_partition,
    broker_epoch,
    cluster,
    create_topic,
    down,
    elect,
    fence,
    offline_replicas,
    partition_of,
    reassign,
    refs,
    refusal,
    register,
    revoke,
    settled,
    unfence,
    up,
)

FIRST = refs((1, 0))


def three(**configs: str) -> MetadataImage:
    """Three brokers, one partition on all of them, broker 1 leads."""
    named = {key.replace("_", "."): value for key, value in configs.items()}
    return cluster(3, create_topic("a", 1, 1, 3, named))


def lost(image: MetadataImage, *broker_ids: int) -> MetadataImage:
    """Return the image after these brokers have said, one by one, that the log of the partition is gone."""
    for broker_id in broker_ids:
        image, _ = accept(image, offline_replicas(image, broker_id))
    return image


def test_a_leader_that_reports_itself_is_replaced_in_the_same_entry() -> None:
    """It has stopped serving before it said so: nobody has to wait for it to let go."""
    image = lost(three(), 1)
    partition = partition_of(image)
    assert (partition.leader, partition.isr, partition.leader_epoch, partition.partition_epoch) == (2, (2, 3), 1, 1)
    assert partition.revoked_leader is None
    assert partition.offline_replicas == ((1, broker_epoch(image, 1)),)
    assert image.is_offline(partition, 1)
    assert not image.is_offline(partition, 2)
    assert list(unsettled(image)) == []


def test_a_follower_leaves_the_isr_and_the_leader_stays_in_its_epoch() -> None:
    partition = partition_of(lost(three(), 3))
    assert (partition.leader, partition.isr, partition.leader_epoch, partition.partition_epoch) == (1, (1, 2), 0, 1)


def test_a_replica_outside_the_isr_is_marked_so_that_what_the_leader_saw_before_counts_no_more() -> None:
    image = up(accept(three(), register(3, incarnation=9))[0], 3)
    late = alter_partition(image, [1, 2, 3])
    image = lost(image, 3)
    assert "not in 1; refresh metadata" not in str(refusal(image, late))
    assert "partition epoch 2, not 1" in str(refusal(image, late))


def test_a_revoked_leader_that_reports_itself_is_not_waited_for() -> None:
    image, _ = accept(three(), revoke(FIRST))
    partition = partition_of(lost(image, 1))
    assert (partition.leader, partition.revoked_leader, partition.revoked_at_offset) == (2, None, 0)


def test_the_same_report_twice_changes_nothing() -> None:
    image = lost(three(), 1)
    again, result = accept(image, offline_replicas(image, 1))
    assert again is image
    assert result.offset == image.offset


def test_the_only_one_in_sync_stays_and_cannot_lead_while_its_log_is_gone() -> None:
    image = lost(down(down(three(), 3), 2), 1)
    partition = partition_of(image)
    assert (partition.leader, partition.isr) == (NO_LEADER, (1,))
    image = settled(image)
    assert partition_of(image).leader == NO_LEADER
    waiting, _ = accept(image, elect(FIRST))
    assert waiting is image


def test_the_next_process_of_the_only_one_in_sync_leads_if_it_has_the_log_again() -> None:
    image = lost(down(down(three(), 3), 2), 1)
    image, _ = accept(image, register(1, incarnation=9, previous_epoch=broker_epoch(image, 1)))
    assert not image.is_offline(partition_of(image), 1), "the mark was of the process before"
    image = up(image, 1)
    partition = partition_of(image)
    assert (partition.leader, partition.isr, partition.offline_replicas) == (1, (1,), ())


def test_a_process_can_report_before_it_is_let_in() -> None:
    image = down(down(three(), 3), 2)
    image, _ = accept(image, register(1, incarnation=9, previous_epoch=broker_epoch(image, 1)))
    image = up(lost(image, 1), 1)
    partition = partition_of(image)
    assert (partition.leader, partition.isr) == (NO_LEADER, (1,))


def test_the_only_one_in_sync_gives_way_to_an_eligible_one() -> None:
    """KIP-966: who left an ISR that was too small to commit has every committed record."""
    image = down(down(three(min_insync_replicas="2"), 3), 2)
    assert partition_of(image).eligible_leader_replicas == (2,)
    image = lost(image, 1)
    partition = partition_of(image)
    assert (partition.leader, partition.isr, partition.eligible_leader_replicas) == (NO_LEADER, (2,), ())
    image, _ = accept(image, register(2, incarnation=9, previous_epoch=broker_epoch(image, 2)))
    assert partition_of(up(image, 2)).leader == 2


def test_a_lost_log_ends_eligibility() -> None:
    image = three(min_insync_replicas="2")
    image, _ = accept(image, alter_partition(image, [1]))
    assert partition_of(image).eligible_leader_replicas == (2, 3)
    image = lost(image, 2)
    assert partition_of(image).eligible_leader_replicas == (3,)
    image = lost(image, 1)
    partition = partition_of(image)
    assert (partition.leader, partition.isr, partition.eligible_leader_replicas) == (3, (3,), ())


@pytest.mark.parametrize("by_command", [True, False])
def test_an_unclean_election_passes_over_it(by_command: bool) -> None:
    image = lost(three(), 1, 2, 3)
    assert (partition_of(image).leader, partition_of(image).isr) == (NO_LEADER, (3,))
    if by_command:
        assert isinstance(refusal(image, elect(FIRST, ElectLeadersCommand.UNCLEAN)), EligibleLeadersNotAvailable)
    image, _ = accept(image, alter("a", {"unclean.leader.election.enable": "true"}))
    assert partition_of(settled(image)).leader == NO_LEADER
    image, _ = accept(image, register(2, incarnation=9, previous_epoch=broker_epoch(image, 2)))
    image, _ = accept(settled(image), unfence(2, broker_epoch(image, 2)))
    image, result = accept(image, elect(FIRST))
    assert partition_of(image).leader == 2
    assert [each.unclean_election for each in result.partitions] == [True]


def test_a_preferred_replica_without_a_log_is_not_preferred() -> None:
    image = lost(three(), 1)
    assert isinstance(refusal(image, elect(FIRST, ElectLeadersCommand.PREFERRED)), PreferredLeaderNotAvailable)


def test_a_leader_does_not_let_go_for_somebody_without_a_log() -> None:
    image = lost(cluster(2, create_topic("a", 1, 1, 2)), 2)
    waiting, _ = accept(image, revoke(FIRST))
    assert waiting is image


def test_it_is_over_once_the_replica_has_caught_up_from_the_leader() -> None:
    image = lost(three(), 1)
    image, _ = accept(image, alter_partition(image, [2, 3, 1]))
    partition = partition_of(image)
    assert (partition.isr, partition.offline_replicas, partition.leader) == ((1, 2, 3), (), 2)
    image, _ = accept(image, elect(FIRST, ElectLeadersCommand.PREFERRED))
    assert partition_of(image).revoked_leader == 2, "it can lead again"


def test_others_that_join_the_isr_leave_the_mark_alone() -> None:
    image = lost(down(three(), 3), 1)
    image = up(image, 3)
    image, _ = accept(image, alter_partition(image, [2, 3]))
    partition = partition_of(image)
    assert (partition.isr, partition.offline_replicas) == ((2, 3), ((1, broker_epoch(image, 1)),))


def test_a_move_forgets_the_marks_of_replicas_that_it_removes() -> None:
    image = lost(cluster(4, create_topic("a", 1, 1, 3)), 3)
    image, _ = accept(image, reassign("a", 0, [1, 4]))
    assert partition_of(image).offline_replicas
    image, _ = accept(image, alter_partition(image, [1, 2, 4]))
    partition = partition_of(image)
    assert (partition.replicas, partition.offline_replicas) == ((1, 4), ())


def test_only_the_present_process_may_report() -> None:
    image = three()
    stale = offline_replicas(image, 1)
    stale.offline_replicas.broker_epoch -= 1
    assert isinstance(refusal(image, stale), StaleBrokerEpoch)
    stale.offline_replicas.broker_id = 9
    assert isinstance(refusal(image, stale), BrokerIdNotRegistered)


def test_partitions_that_are_gone_or_held_by_others_are_passed_over() -> None:
    image = cluster(3, create_topic("a", 1, 1, 2))
    elsewhere = next(b for b in (1, 2, 3) if b not in partition_of(image).replicas)
    command = OfflineReplicasCommand(
        broker_id=elsewhere,
        broker_epoch=broker_epoch(image, elsewhere),
        partitions=refs((1, 0), (1, 7), (1, -1), (9, 0)),
    )
    assert decide(image, MetadataCommand(controller_epoch=EPOCH, offline_replicas=command)).records == ()


def test_a_report_has_a_bounded_number_of_partitions() -> None:
    image = three()
    assert "501 partitions in one command, at most 500" in str(refusal(image, offline_replicas(image, 1, FIRST * 501)))


def test_a_fenced_broker_whose_log_is_gone_makes_room_for_others() -> None:
    """Both were in sync when they were fenced; the one that has its log is waited for."""
    image = three()
    for broker_id in (1, 2, 3):
        image, _ = accept(image, fence(broker_id, broker_epoch(image, broker_id)))
    image = lost(settled(image), 1, 3)
    assert partition_of(image).isr == (2,)


def test_a_snapshot_keeps_the_marks() -> None:
    image = lost(three(), 1, 3)
    again = image_from_records(image.to_records(), image.offset)
    assert again == image
    assert partition_of(again).offline_replicas == ((1, broker_epoch(image, 1)), (3, broker_epoch(image, 3)))


def test_one_that_may_lack_its_tail_is_worth_more_than_one_without_a_log() -> None:
    """Both were in sync; one comes back from an unclean stop, the other one says that its log is gone."""
    image = cluster(2, create_topic("a", 1, 1, 2))
    for broker_id in (1, 2):
        image, _ = accept(image, fence(broker_id, broker_epoch(image, broker_id)))
    image, _ = accept(settled(image), register(1, incarnation=9))
    assert image.brokers[1].unclean
    image = lost(image, 2)
    assert partition_of(image).isr == (1,)
    assert partition_of(up(image, 1)).leader == 1
