"""Elections, one rule a test; replicas that are offline or lost neither lead nor count."""

from __future__ import annotations

import pytest

from raftlog.errors import (
    BrokerIdNotRegistered,
    ElectionNotNeeded,
    EligibleLeadersNotAvailable,
    InvalidRequestError,
    PreferredLeaderNotAvailable,
    StaleBrokerEpoch,
)
from raftlog.v1.records_pb2 import ConfigResource, ElectLeadersCommand, MetadataCommand, OfflineReplicasCommand
from raftmeta.decide import decide
from raftmeta.elections import leaves_it_to, not_preferred, unsettled
from raftmeta.features import SUPPORTED
from raftmeta.image import NO_LEADER, MetadataImage
from raftmeta.quorum.controller_plan import Unsettled
from raftmeta.replay import image_from_records
from tests.support.metadata import (
    EPOCH,
    accept,
    alter,
    alter_broker,
    alter_partition,
    begin_shutdown,
    broker_epoch,
    claim,
    cluster,
    create_topic,
    delete_topic,
    down,
    elect,
    fence,
    image_after,
    offline_replicas,
    partition_of,
    reassign,
    refs,
    refusal,
    register,
    revoke,
    settled,
    storage_full,
    unfence,
    unregister,
    up,
    update_feature,
    uuid_of,
)

FIRST = refs((1, 0))


def three(**configs: str) -> MetadataImage:
    """Three brokers, one partition on all of them, broker 1 leads."""
    named = {key.replace("_", "."): value for key, value in configs.items()}
    return cluster(3, create_topic("a", 1, 1, 3, named))


def returned(image: MetadataImage, broker_id: int, *, clean: bool) -> MetadataImage:
    """Return the image after a broker has come back as another process, and was let in."""
    previous = broker_epoch(image, broker_id) if clean else None
    image, _ = accept(image, register(broker_id, incarnation=image.offset + 10, previous_epoch=previous))
    return up(image, broker_id)


def test_a_fenced_leader_is_followed_by_the_first_replica_in_sync() -> None:
    image = down(three(), 1)
    partition = partition_of(image)
    assert (partition.leader, partition.isr) == (2, (2, 3))
    assert (partition.leader_epoch, partition.partition_epoch) == (1, 1)


def test_a_fenced_follower_leaves_and_the_leader_stays_in_its_epoch() -> None:
    partition = partition_of(down(three(), 3))
    assert (partition.leader, partition.isr, partition.leader_epoch, partition.partition_epoch) == (1, (1, 2), 0, 1)


def test_fencing_changes_no_partition_by_itself() -> None:
    """Thousands of partitions follow in pieces, so that no entry of the log grows with the cluster."""
    image = three()
    decision = decide(image, fence(1, broker_epoch(image, 1)))
    assert [record.WhichOneof("record") for record in decision.records] == ["broker"]


def test_the_last_one_in_sync_stays_and_leads_again_in_a_new_epoch() -> None:
    image = down(down(down(three(), 3), 2), 1)
    partition = partition_of(image)
    assert (partition.leader, partition.isr, partition.leader_epoch) == (NO_LEADER, (1,), 1)
    image = returned(image, 1, clean=True)
    partition = partition_of(image)
    assert (partition.leader, partition.isr, partition.leader_epoch) == (1, (1,), 2)


def test_a_fenced_last_known_leader_is_not_elected() -> None:
    """KAFKA-19522."""
    image = down(down(down(three(), 2), 3), 1)
    image, _ = accept(image, elect(FIRST))
    assert partition_of(image).leader == NO_LEADER


def test_members_that_all_go_at_once_stay_in_sync() -> None:
    """Nothing is committed without a leader, so any of them may lead when it is back first."""
    image = three()
    for broker_id in (1, 2, 3):
        image, _ = accept(image, fence(broker_id, broker_epoch(image, broker_id)))
    image = settled(image)
    assert (partition_of(image).leader, partition_of(image).isr) == (NO_LEADER, (1, 2, 3))
    image = returned(image, 3, clean=True)
    assert (partition_of(image).leader, partition_of(image).isr) == (3, (3,))


# KIP-966


def test_who_left_a_too_small_isr_is_eligible_and_leads_when_nobody_else_can() -> None:
    """KIP-966: losing all replicas in turn loses no committed record."""
    image = down(down(down(three(min_insync_replicas="2"), 3), 2), 1)
    partition = partition_of(image)
    assert (partition.leader, partition.isr, partition.eligible_leader_replicas) == (NO_LEADER, (1,), (2,))
    image = returned(image, 3, clean=True)
    assert partition_of(image).leader == NO_LEADER, (
        "broker 3 must not lead, as it left while two others went on committing"
    )
    image = returned(image, 2, clean=True)
    partition = partition_of(image)
    assert (partition.leader, partition.isr, partition.eligible_leader_replicas) == (2, (2,), (1,))


def test_nobody_is_eligible_once_the_isr_is_large_enough_again() -> None:
    image = down(down(three(min_insync_replicas="2"), 3), 2)
    assert partition_of(image).eligible_leader_replicas == (2,)
    image = returned(image, 3, clean=True)
    image, _ = accept(image, alter_partition(image, [1, 3]))
    partition = partition_of(image)
    assert (partition.isr, partition.eligible_leader_replicas) == ((1, 3), ())


def test_an_unclean_stop_ends_eligibility() -> None:
    """KAFKA-15586, KAFKA-18106: it may have lost what it had acknowledged."""
    image = down(down(down(three(min_insync_replicas="2"), 3), 2), 1)
    image = returned(image, 2, clean=False)
    partition = partition_of(image)
    assert (partition.leader, partition.isr, partition.eligible_leader_replicas) == (NO_LEADER, (1,), ())


def test_an_unclean_stop_ends_being_in_sync_where_others_are() -> None:
    """Fluss #662: the process was away too briefly to be fenced, and its tail may be gone."""
    image, _ = accept(three(), register(2, incarnation=9))
    image = up(image, 2)
    assert partition_of(image).isr == (1, 3)
    image, _ = accept(image, register(1, incarnation=9))
    image = up(image, 1)
    partition = partition_of(image)
    assert (partition.leader, partition.isr) == (3, (3,))


def test_the_last_in_sync_gives_way_to_an_eligible_one_after_an_unclean_stop() -> None:
    image = down(down(three(min_insync_replicas="2"), 3), 2)
    image, _ = accept(image, register(1, incarnation=9))
    image = up(image, 1)
    partition = partition_of(image)
    assert (partition.leader, partition.isr, partition.eligible_leader_replicas) == (NO_LEADER, (2,), ())


@pytest.mark.parametrize("resource", [("a", ConfigResource.TOPIC), ("", ConfigResource.BROKER)])
def test_a_lower_minimum_ends_eligibility_in_the_same_entry(
    resource: tuple[str, ConfigResource.Type.ValueType],
) -> None:
    """From then on the leader commits alone; that it was so must not be forgotten when the config goes up again."""
    image = cluster(3, create_topic("a", 1, 1, 3))
    name, type_ = resource
    image, _ = accept(image, alter(name, {"min.insync.replicas": "2"}, type_=type_))
    image = down(down(image, 3), 2)
    assert partition_of(image).eligible_leader_replicas == (2,)
    image, _ = accept(image, alter(name, {"min.insync.replicas": "1"}, type_=type_))
    assert partition_of(image).eligible_leader_replicas == ()
    image, _ = accept(image, alter(name, {"min.insync.replicas": "2"}, type_=type_))
    assert partition_of(settled(image)).eligible_leader_replicas == ()


def test_a_brokers_own_minimum_does_not_count() -> None:
    """KAFKA-16540: it would differ between the replicas of one partition."""
    image, _ = accept(three(), alter("1", {"min.insync.replicas": "2"}, type_=ConfigResource.BROKER))
    assert partition_of(down(down(image, 3), 2)).eligible_leader_replicas == ()


# Unclean elections


def test_without_leave_nobody_outside_is_elected() -> None:
    image = down(down(down(three(), 2), 3), 1)
    image = returned(image, 2, clean=True)
    assert partition_of(image).leader == NO_LEADER


@pytest.mark.parametrize("by_command", [True, False])
def test_an_unclean_election_starts_over_with_one_replica_and_says_so(by_command: bool) -> None:
    image = down(down(down(three(), 2), 3), 1)
    image = returned(image, 2, clean=True)
    if by_command:
        command = elect(FIRST, ElectLeadersCommand.UNCLEAN)
    else:
        image, _ = accept(image, alter("a", {"unclean.leader.election.enable": "true"}))
        command = elect(FIRST)
    image, result = accept(image, command)
    partition = partition_of(image)
    assert (partition.leader, partition.isr) == (2, (2,))
    assert [each.unclean_election for each in result.partitions] == [True]


def test_the_clusters_default_can_allow_it_too() -> None:
    image, _ = accept(three(), alter("", {"unclean.leader.election.enable": "true"}, type_=ConfigResource.BROKER))
    image = returned(down(down(down(image, 2), 3), 1), 2, clean=True)
    assert partition_of(image).leader == 2


# Handing over


def test_a_live_leader_is_never_replaced_but_revoked() -> None:
    image, _ = accept(three(), revoke(FIRST))
    partition = partition_of(image)
    assert (partition.leader, partition.leader_epoch, partition.isr) == (NO_LEADER, 1, (1, 2, 3))
    assert (partition.revoked_leader, partition.revoked_at_offset) == (1, image.offset)
    waiting, _ = accept(image, elect(FIRST))
    assert waiting is image, "no leader must be elected while the revoked one may still serve"
    image, _ = accept(image, elect(FIRST, handed_over=True))
    partition = partition_of(image)
    assert (partition.leader, partition.leader_epoch, partition.revoked_leader) == (1, 2, None)


def test_a_late_word_of_a_handover_does_not_speak_for_a_leader_that_was_revoked_since() -> None:
    image, _ = accept(three(), revoke(FIRST))
    planned_at = image.offset
    image, _ = accept(image, elect(FIRST, handed_over=True))
    image, _ = accept(image, revoke(FIRST))
    command = ElectLeadersCommand(partitions=FIRST, handed_over_as_of=planned_at)
    late, _ = accept(image, MetadataCommand(controller_epoch=EPOCH, elect_leaders=command))
    assert late is image, "no leader must be elected, as the one that was revoked since may still serve"


def test_a_revoked_leader_that_is_fenced_is_not_waited_for() -> None:
    image, _ = accept(three(), revoke(FIRST))
    assert partition_of(down(image, 1)).leader == 2


def test_a_revoked_leader_that_registers_anew_is_not_waited_for() -> None:
    image, _ = accept(three(), revoke(FIRST))
    image, _ = accept(image, register(1, incarnation=9, previous_epoch=broker_epoch(image, 1)))
    assert partition_of(settled(image)).leader == 2


def test_a_broker_that_shuts_down_lets_go_of_what_others_can_take() -> None:
    image = cluster(3, create_topic("a", 1, 1, 2), create_topic("b", 2, 1, 1))
    alone = partition_of(image, topic=2).leader
    image = settled(accept(image, begin_shutdown(1, broker_epoch(image, 1)))[0])
    partition = partition_of(image)
    assert (partition.leader, partition.revoked_leader, partition.isr) == (NO_LEADER, 1, (2,))
    image, _ = accept(image, elect(FIRST, handed_over=True))
    assert partition_of(image).leader == 2
    image = settled(accept(image, begin_shutdown(alone, broker_epoch(image, alone)))[0])
    assert partition_of(image, topic=2).leader == alone, (
        "the broker must keep the partition that no other replica can lead"
    )


def test_a_follower_that_catches_up_relieves_a_leader_that_is_shutting_down() -> None:
    image = returned(down(down(three(), 3), 2), 2, clean=True)
    image = settled(accept(image, begin_shutdown(1, broker_epoch(image, 1)))[0])
    assert partition_of(image).leader == 1
    image, _ = accept(image, alter_partition(image, [1, 2]))
    partition = partition_of(image)
    assert (partition.leader, partition.revoked_leader, partition.isr) == (NO_LEADER, 1, (2,))


def test_the_preferred_replica_takes_over_in_two_steps() -> None:
    image = returned(down(three(), 1), 1, clean=True)
    assert isinstance(refusal(image, elect(FIRST, ElectLeadersCommand.PREFERRED)), PreferredLeaderNotAvailable)
    image, _ = accept(image, alter_partition(image, [1, 2, 3]))
    image, _ = accept(image, elect(FIRST, ElectLeadersCommand.PREFERRED))
    assert (partition_of(image).leader, partition_of(image).revoked_leader) == (NO_LEADER, 2)
    image, _ = accept(image, elect(FIRST, handed_over=True))
    assert partition_of(image).leader == 1


def test_an_unclean_election_takes_who_has_a_log_before_who_is_only_being_added() -> None:
    image = cluster(3, create_topic("a", 1, 1, 2))
    image, _ = accept(down(down(image, 1), 2), reassign("a", 0, [3]))
    image = up(image, 1)
    assert partition_of(image).replicas[0] == 3
    assert partition_of(image).isr == (2,)
    image, _ = accept(image, elect(FIRST, ElectLeadersCommand.UNCLEAN))
    assert (partition_of(image).leader, partition_of(image).isr) == (1, (1,))


@pytest.mark.parametrize(
    ("type_", "error"),
    [(ElectLeadersCommand.PREFERRED, ElectionNotNeeded), (ElectLeadersCommand.UNCLEAN, ElectionNotNeeded)],
)
def test_an_election_that_is_not_needed_is_refused(
    type_: ElectLeadersCommand.Type.ValueType, error: type[Exception]
) -> None:
    assert isinstance(refusal(three(), elect(FIRST, type_)), error)


def test_an_unclean_election_needs_somebody_who_is_up() -> None:
    image = down(down(down(three(), 2), 3), 1)
    assert isinstance(refusal(image, elect(FIRST, ElectLeadersCommand.UNCLEAN)), EligibleLeadersNotAvailable)


def test_partitions_that_are_gone_are_passed_over() -> None:
    image = three()
    assert decide(image, elect(refs((7, 0), (1, 5), (1, -1)))).records == ()


@pytest.mark.parametrize("command", [elect(FIRST * 501), revoke(FIRST * 501)])
def test_a_command_has_a_bounded_number_of_partitions(command: MetadataCommand) -> None:
    assert "501 partitions in one command, at most 500" in str(refusal(three(), command))


# Coming back


def test_a_broker_is_let_in_only_after_its_partitions_were_settled() -> None:
    """In the old leader epoch another process could write other records at the same offsets."""
    image, _ = accept(three(), register(1, incarnation=9, previous_epoch=2))
    error = refusal(image, unfence(1, broker_epoch(image, 1)))
    assert isinstance(error, InvalidRequestError)
    assert "still the leader of 1 partitions" in str(error)
    image, _ = accept(three(), register(2, incarnation=9))
    assert "still counts as in sync with others" in str(refusal(image, unfence(2, broker_epoch(image, 2))))


def lost(image: MetadataImage, *broker_ids: int) -> MetadataImage:
    """Return the image after these brokers have said, one by one, that the log of the partition is gone."""
    for broker_id in broker_ids:
        image, _ = accept(image, offline_replicas(image, broker_id))
    return image


def test_a_leader_that_reports_itself_is_replaced_in_the_same_entry() -> None:
    """It stopped serving before it said so: no election has to wait for it to let go."""
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
    assert not image.is_offline(partition_of(image), 1), (
        "the replica must count as online, as the mark was of the previous process"
    )
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
    """KIP-966: a replica that left an ISR that was too small to commit has every committed record."""
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
    assert partition_of(image).revoked_leader == 2, "the revocation must stand, as broker 2 can lead again"


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


NEW_DISK = 2_001
NEWER_DISK = 2_002
UNCLEAN = ElectLeadersCommand.UNCLEAN


def old_disk(broker_id: int) -> int:
    return 1000 + broker_id


def two(**configs: str) -> MetadataImage:
    """Two brokers, one partition on both of them, broker 1 leads."""
    named = {key.replace("_", "."): value for key, value in configs.items()}
    return cluster(2, create_topic("a", 1, 1, 2, named))


def registered(image: MetadataImage, broker_id: int, *directories: int, clean: bool = False) -> MetadataImage:
    """Return the image after another process of a broker has registered, with these log directories."""
    previous = broker_epoch(image, broker_id) if clean else None
    first, *others = directories or (old_disk(broker_id),)
    command = register(
        broker_id,
        incarnation=image.offset + 10,
        directory=first,
        other_directories=others,
        previous_epoch=previous,
        epoch=image.controller_epoch,
    )
    return accept(image, command)[0]


def back(image: MetadataImage, broker_id: int, *directories: int, clean: bool = False) -> MetadataImage:
    """Return the image after another process of a broker has registered and was let in."""
    return up(registered(image, broker_id, *directories, clean=clean), broker_id)


def alone_and_replaced(**configs: str) -> MetadataImage:
    """Broker 2 fell out of sync, broker 1 wrote on alone, and came back with an empty disk."""
    return back(down(down(two(**configs), 2), 1), 1, NEW_DISK)


def test_the_only_one_in_sync_does_not_lead_with_an_empty_disk() -> None:
    image = alone_and_replaced()
    partition = partition_of(image)
    assert (partition.leader, partition.isr, partition.eligible_leader_replicas) == (NO_LEADER, (1,), ())
    assert not image.brokers[1].fenced
    assert image.is_lost(partition, 1)
    assert not image.is_lost(partition, 2)
    assert list(unsettled(image)) == []


def test_it_does_not_lead_after_more_restarts_of_it_either() -> None:
    image = alone_and_replaced()
    for clean in (True, False, True):
        image = back(down(image, 1), 1, NEW_DISK, clean=clean)
        assert partition_of(image).leader == NO_LEADER
        assert image.is_lost(partition_of(image), 1)
    image = back(image, 1, NEWER_DISK)
    assert image.is_lost(partition_of(image), 1)


def test_it_does_not_lead_when_it_restarts_before_it_was_let_in() -> None:
    """The next process finds the directory as the one before left it; what it lacks it lacks still."""
    image = registered(down(down(two(), 2), 1), 1, NEW_DISK)
    image = back(image, 1, NEW_DISK, clean=True)
    assert (partition_of(image).leader, image.is_lost(partition_of(image), 1)) == (NO_LEADER, True)


def test_it_is_not_let_in_before_its_partitions_show_it() -> None:
    image = down(two(), 1)
    assert partition_of(image).isr == (2,)
    image = registered(image, 1, NEW_DISK)
    assert [ref.partition for ref in unsettled(image)] == [0], (
        "the partition must be listed, so that the lost replica out of sync is marked"
    )
    assert isinstance(refusal(image, unfence(1, broker_epoch(image, 1))), InvalidRequestError)
    image = up(image, 1)
    assert image.brokers[1].former_directory_ids == ()


def test_another_controller_and_a_snapshot_know_of_it() -> None:
    image = alone_and_replaced()
    assert image_from_records(image.to_records(), image.offset) == image
    image, _ = accept(image, claim(2, 2))
    assert settled(image) is image
    waiting = registered(down(down(two(), 2), 1), 1, NEW_DISK)
    restored = image_from_records(waiting.to_records(), waiting.offset)
    assert restored == waiting
    assert partition_of(up(restored, 1)).leader == NO_LEADER


@pytest.mark.parametrize("by_command", [True, False])
def test_an_unclean_election_prefers_who_still_has_a_log(by_command: bool) -> None:
    image = back(alone_and_replaced(), 2)
    assert (partition_of(image).leader, partition_of(image).isr) == (NO_LEADER, (1,))
    if by_command:
        image, result = accept(image, elect(FIRST, UNCLEAN))
    else:
        image, _ = accept(image, alter("a", {"unclean.leader.election.enable": "true"}))
        image, result = accept(image, elect(FIRST))
    partition = partition_of(image)
    assert (partition.leader, partition.isr, partition.eligible_leader_replicas) == (2, (2,), ())
    assert [each.unclean_election for each in result.partitions] == [True]
    assert image.is_lost(partition, 1), "the replica must count as lost until it has caught up"


def test_of_two_out_of_sync_the_one_with_a_log_is_preferred() -> None:
    image = cluster(3, create_topic("a", 1, 1, 3))
    image = down(down(image, 1), 2)
    assert partition_of(image).isr == (3,)
    image = down(back(image, 1, NEW_DISK), 3)
    image = back(image, 2)
    image, _ = accept(image, elect(FIRST, UNCLEAN))
    assert partition_of(image).leader == 2


def test_a_drained_one_with_a_log_is_preferred_to_one_without() -> None:
    image = back(alone_and_replaced(), 2)
    image, _ = accept(image, alter_broker(2, drained=True))
    image, _ = accept(image, elect(FIRST, UNCLEAN))
    assert partition_of(image).leader == 2


def test_the_empty_one_is_the_last_resort() -> None:
    image = alone_and_replaced()
    image, result = accept(image, elect(FIRST, UNCLEAN))
    partition = partition_of(image)
    assert (partition.leader, partition.isr, partition.lost_replicas) == (1, (1,), ())
    assert [each.unclean_election for each in result.partitions] == [True], (
        "the election must count as unclean, though the replica is in the ISR"
    )
    image = back(down(image, 1), 1, NEW_DISK)
    assert partition_of(image).leader == 1, "broker 1 must lead again, as its log is the partition's by now"


def test_one_replica_is_led_again_by_an_unclean_election_only() -> None:
    image = cluster(1, create_topic("a", 1, 1, 1))
    image = back(image, 1, NEW_DISK)
    assert partition_of(image).leader == NO_LEADER
    image, _ = accept(image, elect(FIRST, UNCLEAN))
    assert partition_of(image).leader == 1


def test_one_replica_of_a_topic_that_allows_it_is_led_on() -> None:
    image = cluster(1, create_topic("a", 1, 1, 1, {"unclean.leader.election.enable": "true"}))
    image = back(image, 1, NEW_DISK)
    assert (partition_of(image).leader, partition_of(image).lost_replicas) == (1, ())


def test_an_eligible_one_takes_over() -> None:
    """KIP-966: it left an ISR that was too small to commit, and has every committed record."""
    image = down(two(min_insync_replicas="2"), 2)
    assert partition_of(image).eligible_leader_replicas == (2,)
    image = back(down(image, 1), 1, NEW_DISK)
    partition = partition_of(image)
    assert (partition.leader, partition.isr) == (NO_LEADER, (2,))
    image = back(image, 2, clean=True)
    assert (partition_of(image).leader, partition_of(image).isr) == (2, (2,))


def test_one_with_an_empty_disk_is_not_eligible() -> None:
    image = down(two(min_insync_replicas="2"), 2)
    assert partition_of(image).eligible_leader_replicas == (2,)
    image = back(image, 2, NEW_DISK)
    assert (partition_of(image).leader, partition_of(image).eligible_leader_replicas) == (1, ())
    assert partition_of(down(image, 1)).leader == NO_LEADER


def test_a_disk_replaced_on_purpose_asks_for_no_command() -> None:
    """A broker that moves to another machine: others are in sync, it fetches everything and is in sync again."""
    image = back(down(two(), 1), 1, NEW_DISK)
    partition = partition_of(image)
    assert (partition.leader, partition.isr) == (2, (2,))
    image, _ = accept(image, alter_partition(image, [2, 1]))
    partition = partition_of(image)
    assert (partition.isr, partition.lost_replicas) == ((1, 2), ())
    assert partition_of(down(image, 2)).leader == 1


def test_the_same_holds_after_an_unclean_election() -> None:
    image = back(alone_and_replaced(), 2)
    image, _ = accept(image, elect(FIRST, UNCLEAN))
    image, _ = accept(image, alter_partition(image, [2, 1]))
    assert partition_of(image).lost_replicas == ()
    image = back(down(image, 2), 1, NEW_DISK)
    assert partition_of(image).leader == 1


def test_the_old_disk_put_back_is_as_good_as_before() -> None:
    """It was not mounted, say."""
    image = back(alone_and_replaced(), 1, old_disk(1))
    partition = partition_of(image)
    assert (partition.leader, partition.isr, partition.lost_replicas) == (1, (1,), ())


def test_the_old_disk_put_back_before_it_was_let_in_without_it() -> None:
    image = registered(down(down(two(), 2), 1), 1, NEW_DISK)
    image = back(settled(image), 1, old_disk(1))
    assert (partition_of(image).leader, partition_of(image).lost_replicas) == (1, ())


def test_the_old_disk_put_back_after_others_wrote_on_counts_for_nothing() -> None:
    """What it has is from before the new disk was in sync."""
    image = back(down(two(), 1), 1, NEW_DISK)
    image, _ = accept(image, alter_partition(image, [2, 1]))
    image = down(down(image, 2), 1)
    assert partition_of(image).isr == (1,)
    image = back(image, 1, old_disk(1))
    assert (partition_of(image).leader, image.is_lost(partition_of(image), 1)) == (NO_LEADER, True)
    image = back(image, 1, NEW_DISK)
    assert partition_of(image).leader == 1


def test_each_partition_knows_which_disk_its_log_was_on() -> None:
    """Partition 0 has not been led since the disk was replaced; partition 1 was in sync on the new one."""
    image = down(cluster(2, create_topic("a", 1, 2, 2)), 2)
    image = back(down(image, 1), 1, NEW_DISK)
    image, _ = accept(image, elect(refs((1, 1)), UNCLEAN))
    image = back(image, 1, old_disk(1))
    assert [partition_of(image, 1, number).leader for number in (0, 1)] == [1, NO_LEADER]
    image = back(image, 1, NEW_DISK)
    assert [partition_of(image, 1, number).leader for number in (0, 1)] == [NO_LEADER, 1]


def test_a_first_registration_is_nothing_special() -> None:
    image = cluster(1)
    assert image.brokers[1].former_directory_ids == ()
    image = up(accept(image, register(2, directory=NEW_DISK))[0], 2)
    assert image.brokers[2].former_directory_ids == ()


def test_a_broker_that_did_not_say_what_directory_it_had() -> None:
    image, _ = accept(cluster(0), _without_directory(1))
    image, _ = accept(up(image, 1), create_topic("a", 1, 1, 1))
    image = back(down(image, 1), 1, NEW_DISK)
    assert partition_of(image).leader == 1


def _without_directory(broker_id: int) -> MetadataCommand:
    command = register(broker_id)
    command.register_broker.directory_id = b""
    return command


# Several log directories


def test_with_one_of_its_directories_left_a_broker_has_some_of_its_logs() -> None:
    image = back(cluster(1, create_topic("a", 1, 1, 1)), 1, old_disk(1), 5_000)
    assert image.brokers[1].directory_ids == tuple(sorted(map(uuid_of, (old_disk(1), 5_000))))
    for directories in ((5_000, old_disk(1)), (5_000,), (NEW_DISK, 5_000), (6_000, NEW_DISK)):
        image = back(image, 1, *directories)
        assert partition_of(image).leader == 1, directories


def test_without_any_of_its_directories_it_has_none() -> None:
    image = back(cluster(1, create_topic("a", 1, 1, 1)), 1, old_disk(1), 5_000)
    image = back(image, 1, NEW_DISK, NEWER_DISK)
    assert partition_of(image).leader == NO_LEADER
    image = back(image, 1, old_disk(1), NEWER_DISK)
    assert partition_of(image).leader == NO_LEADER, (
        "broker 1 must not lead, as the log may be in the directory that is missing"
    )
    image = back(image, 1, 5_000, old_disk(1), NEWER_DISK)
    assert partition_of(image).leader == 1


def test_directories_are_checked() -> None:
    image = cluster(1)
    command = register(1, incarnation=9, other_directories=[7])
    command.register_broker.other_directory_ids.append(b"short")
    assert "a directory id has 16 bytes, this one has 5" in str(refusal(image, command))
    command = register(1, incarnation=9, other_directories=range(257))
    assert "257 directories besides its first one, it may name 256" in str(refusal(image, command))


# All brokers were killed at once


def all_killed(**configs: str) -> MetadataImage:
    """Three brokers, in sync, at the newest level; the controller takes all of them for live, and they are dead."""
    image, _ = accept(three(**configs), update_feature("metadata.version", SUPPORTED["metadata.version"].max_level))
    return image


def restarted(image: MetadataImage, broker_id: int, *unsynced_topics: int, synced: bool = True) -> MetadataImage:
    """Return the image after a broker has registered that was killed."""
    epoch = broker_epoch(image, broker_id)
    command = register(
        broker_id,
        incarnation=image.offset + 10,
        synced_epoch=epoch if synced else None,
        unsynced_topics=unsynced_topics,
    )
    return accept(image, command)[0]


def test_two_of_three_that_were_killed_lead_without_the_third() -> None:
    image = restarted(restarted(all_killed(), 1), 2)
    assert [leaves_it_to(image, ref, {3}) for ref in unsettled(image)] == [True], (
        "the partition must be left to the others while broker 3 has not been heard"
    )
    image = down(image, 3)
    assert partition_of(image).isr == (1, 2, 3)
    image = up(image, 1)
    assert (partition_of(image).leader, partition_of(image).isr) == (1, (1,))


def test_where_an_unclean_stop_may_lose_records_the_third_is_waited_for() -> None:
    """KIP-966: with flush.messages above 1 for this topic, or without the mark of the last process."""
    for image in (
        restarted(restarted(all_killed(), 1, 1), 2, 1),
        restarted(restarted(all_killed(), 1, synced=False), 2, synced=False),
    ):
        image = up(up(down(image, 3), 1), 2)
        assert (partition_of(image).leader, partition_of(image).isr) == (NO_LEADER, (3,))


def test_another_topic_s_records_are_no_reason_to_wait() -> None:
    image = up(up(down(restarted(restarted(all_killed(), 1, 2), 2, 2), 3), 1), 2)
    assert (partition_of(image).leader, partition_of(image).isr) == (1, (1,))


def test_a_broker_whose_topic_may_lack_records_is_not_let_in_before_its_partition_shows_it() -> None:
    image = restarted(down(all_killed(), 2), 1, 1)
    assert isinstance(refusal(image, unfence(1, broker_epoch(image, 1))), InvalidRequestError)
    image = settled(image)
    assert partition_of(image).isr == (3,)
    assert not accept(image, unfence(1, broker_epoch(image, 1)))[0].brokers[1].unsynced_topic_ids


def test_an_eligible_replica_stays_eligible_when_it_comes_back_with_all_that_was_fsynced() -> None:
    image = down(down(all_killed(min_insync_replicas="2"), 1), 2)
    assert (partition_of(image).isr, partition_of(image).eligible_leader_replicas) == ((3,), (2,))
    assert partition_of(up(down(restarted(image, 2), 3), 2)).leader == 2
    assert partition_of(up(down(restarted(image, 2, 1), 3), 2)).leader == NO_LEADER


def test_a_partition_waits_only_for_silent_brokers_that_would_have_it_for_themselves() -> None:
    image = restarted(all_killed(), 1)
    (ref,) = unsettled(image)
    assert [leaves_it_to(image, ref, silent) for silent in ({2, 3}, {2}, {3}, {1}, set())] == [True] + [False] * 4
    (gone,) = refs((9, 0))
    assert not leaves_it_to(image, gone, {2, 3})


# Full disks


def full_disk(image: MetadataImage, broker_id: int, full: bool = True) -> MetadataImage:
    """Return the image after a broker has said whether its disk is full, with all that follows."""
    image, _ = accept(image, storage_full(broker_id, broker_epoch(image, broker_id), full))
    return settled(image)


def test_a_leader_whose_disk_is_full_is_revoked_for_one_that_has_space() -> None:
    image = full_disk(all_killed(), 1)
    partition = partition_of(image)
    assert (partition.leader, partition.revoked_leader, partition.isr) == (NO_LEADER, 1, (1, 2, 3))
    image, _ = accept(image, elect(FIRST, handed_over=True))
    assert (partition_of(image).leader, partition_of(image).isr) == (2, (1, 2, 3))
    image = full_disk(image, 1, full=False)
    assert partition_of(image).leader == 2, "the leadership must come back with the next balancing only"
    assert [ref.partition for ref in not_preferred(image)] == [0]


def test_a_leader_keeps_what_only_full_disks_could_lead() -> None:
    image = full_disk(full_disk(full_disk(all_killed(), 2), 3), 1)
    assert partition_of(image).leader == 1
    assert partition_of(down(image, 1)).leader == 2, (
        "broker 2 must lead in spite of its full disk, so that reads are served"
    )


def test_a_full_disk_is_said_of_one_process() -> None:
    image = full_disk(all_killed(), 1)
    assert isinstance(refusal(image, storage_full(1, broker_epoch(image, 1) + 1)), StaleBrokerEpoch)
    assert image_from_records(image.to_records(), image.offset) == image
    assert not restarted(image, 1).brokers[1].storage_full


def test_a_full_disk_needs_its_level() -> None:
    image = three()
    error = refusal(image, storage_full(1, broker_epoch(image, 1)))
    assert "the report of a full disk needs metadata.version=4" in str(error)


# Before metadata.version 2


def test_at_level_1_nothing_is_written_that_old_controllers_do_not_know() -> None:
    image = image_after(claim(), *(register(broker_id) for broker_id in (1, 2)), create_topic("a", 1, 1, 2))
    image = down(down(image, 2), 1)
    command = register(1, incarnation=9, directory=NEW_DISK, other_directories=[5_000])
    [record] = decide(image, command).records
    assert not record.broker.other_directory_ids
    assert not record.broker.former_directory_ids
    image = up(accept(image, command)[0], 1)
    assert (partition_of(image).leader, partition_of(image).lost_replicas) == (1, ())


def test_from_the_upgrade_on_it_counts() -> None:
    image = image_after(claim(), register(1), create_topic("a", 1, 1, 1), update_feature("metadata.version", 2))
    assert partition_of(back(image, 1, NEW_DISK)).leader == NO_LEADER


# Beside everything else


def test_replicas_that_all_have_empty_disks_stay_and_wait() -> None:
    image = down(down(two(), 1), 2)
    image = back(back(image, 1, NEW_DISK), 2, NEWER_DISK)
    partition = partition_of(image)
    assert (partition.leader, partition.isr) == (NO_LEADER, (2,))
    assert [each for each, _ in partition.lost_replicas] == [1, 2]
    assert partition_of(back(image, 2, old_disk(2))).leader == 2


@pytest.mark.parametrize("returning", [1, 2])
def test_the_first_of_several_whose_disk_is_put_back_is_in_sync_alone(returning: int) -> None:
    image = two()
    for broker_id in (1, 2):
        image = accept(image, _fence(image, broker_id))[0]
    image = registered(registered(settled(image), 1, NEW_DISK), 2, NEWER_DISK)
    image = up(up(image, 1), 2)
    assert (partition_of(image).leader, partition_of(image).isr) == (NO_LEADER, (1, 2))
    image = back(image, returning, old_disk(returning))
    assert (partition_of(image).leader, partition_of(image).isr) == (returning, (returning,))


def test_one_that_may_lack_its_tail_is_worth_more_than_one_with_an_empty_disk() -> None:
    image = two()
    for broker_id in (1, 2):
        image = accept(image, _fence(image, broker_id))[0]
    image = settled(image)
    assert partition_of(image).isr == (1, 2)
    image = registered(registered(image, 2), 1, NEW_DISK)
    image = up(up(image, 1), 2)
    assert (partition_of(image).leader, partition_of(image).isr) == (2, (2,))


def _fence(image: MetadataImage, broker_id: int) -> MetadataCommand:
    return fence(broker_id, broker_epoch(image, broker_id))


def test_an_empty_disk_that_does_not_work_either_is_not_elected_at_all() -> None:
    image = alone_and_replaced()
    image, _ = accept(image, offline_replicas(image, 1))
    assert "none of the replicas [1, 2] is up" in str(refusal(image, elect(FIRST, UNCLEAN)))


def test_a_leader_does_not_let_go_for_it() -> None:
    image = back(down(two(), 2), 2, NEW_DISK)
    waiting, _ = accept(image, revoke(FIRST))
    assert waiting is image


def test_refusals_say_what_happened_and_what_to_do() -> None:
    refused = refusal(alone_and_replaced(), elect(FIRST, ElectLeadersCommand.PREFERRED))
    assert isinstance(refused, PreferredLeaderNotAvailable)
    assert "disk" in str(refused)
    assert "raftlog partition elect a --unclean" in str(refused)


def test_a_partition_that_is_given_up_takes_the_mark_along() -> None:
    image, _ = accept(alone_and_replaced(), delete_topic("a"))
    image, _ = accept(image, create_topic("a", 2, 1, 1, epoch=image.controller_epoch))
    assert partition_of(image, 2).leader == 1
    image, _ = accept(down(image, 2), unregister(2))


def test_a_move_forgets_lost_replicas_that_it_removes() -> None:
    image = back(down(cluster(3, create_topic("a", 1, 1, 2)), 2), 2, NEW_DISK)
    assert partition_of(image).lost_replicas
    image, _ = accept(image, reassign("a", 0, [1, 3]))
    image, _ = accept(image, alter_partition(image, [1, 3]))
    assert (partition_of(image).replicas, partition_of(image).lost_replicas) == ((1, 3), ())


def test_the_controller_looks_again_where_a_mark_changes() -> None:
    image = back(down(two(), 2), 2, NEW_DISK)
    looking = Unsettled(everything=False)
    [record] = [each for each in image.to_records() if each.HasField("partition")]
    looking.note(image, [record])
    assert looking.topic_ids == {uuid_of(1)}
