"""Elections, one rule a test; each names where the rule comes from."""

from __future__ import annotations

import pytest

from raftlog.errors import (
    ElectionNotNeeded,
    EligibleLeadersNotAvailable,
    InvalidRequestError,
    PreferredLeaderNotAvailable,
)
from raftlog.v1.records_pb2 import ConfigResource, ElectLeadersCommand, MetadataCommand
from raftmeta.decide import decide
from raftmeta.image import NO_LEADER, MetadataImage
from tests.support.metadata import (
    EPOCH,
    accept,
    alter,
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
    settled,
    unfence,
    up,
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
    assert partition_of(image).leader == NO_LEADER, "3 left while two others went on committing"
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
    """Fluss #662: the process was away so briefly that nobody fenced it, and its tail may be gone."""
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
    assert waiting is image, "it may still serve"
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
    assert late is image, "the one revoked since may still serve"


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
    assert partition_of(image, topic=2).leader == alone, "nobody else could lead it"


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
