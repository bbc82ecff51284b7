"""Replicas whose broker has come back without its log directories: their disk was replaced, their log is empty."""

from __future__ import annotations

import pytest

from raftlog.errors import InvalidRequestError, PreferredLeaderNotAvailable
from raftlog.v1.records_pb2 import ElectLeadersCommand, MetadataCommand
from raftmeta.decide import decide
from raftmeta.elections import unsettled
from raftmeta.image import NO_LEADER, MetadataImage
from raftmeta.quorum.controller_plan import Unsettled
from raftmeta.replay import image_from_records
from tests.support.metadata import (
    accept,
    alter,
    alter_broker,
    alter_partition,
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
    unfence,
    unregister,
    up,
    update_feature,
    uuid_of,
)

FIRST = refs((1, 0))
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
    assert [ref.partition for ref in unsettled(image)] == [0], "out of sync it is marked as well"
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
    assert image.is_lost(partition, 1), "until it has caught up"


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
    assert [each.unclean_election for each in result.partitions] == [True], "although it is in the ISR"
    image = back(down(image, 1), 1, NEW_DISK)
    assert partition_of(image).leader == 1, "what it has is the partition's log now"


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
    assert partition_of(image).leader == NO_LEADER, "the log may be in the other one"
    image = back(image, 1, 5_000, old_disk(1), NEWER_DISK)
    assert partition_of(image).leader == 1


def test_directories_are_checked() -> None:
    image = cluster(1)
    command = register(1, incarnation=9, other_directories=[7])
    command.register_broker.other_directory_ids.append(b"short")
    assert "a directory id has 16 bytes, this one has 5" in str(refusal(image, command))
    command = register(1, incarnation=9, other_directories=range(257))
    assert "257 directories besides its first one, it may name 256" in str(refusal(image, command))


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


def test_a_move_forgets_the_marks_of_replicas_that_it_removes() -> None:
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
