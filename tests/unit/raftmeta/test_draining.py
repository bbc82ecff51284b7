"""Cordoned and drained brokers: what they get, what they lead, and how long that lasts."""

from __future__ import annotations

import pytest

from raftlog.errors import (
    BrokerIdNotRegistered,
    InvalidReplicaAssignment,
    InvalidReplicationFactor,
    InvalidRequestError,
    PreferredLeaderNotAvailable,
    UnsupportedVersion,
)
from raftlog.v1.records_pb2 import ElectLeadersCommand, MetadataCommand
from raftmeta.decide import decide
from raftmeta.elections import not_preferred
from raftmeta.features import METADATA_VERSION, SUPPORTED
from raftmeta.image import NO_LEADER, MetadataImage
from raftmeta.quorum.controller_plan import Unsettled, imbalanced
from raftmeta.replay import image_from_records
from tests.support.metadata import (
    accept,
    alter_broker,
    alter_partition,
    begin_shutdown,
    broker_epoch,
    claim,
    cluster,
    create_partitions,
    create_topic,
    down,
    elect,
    image_after,
    offline_replicas,
    partition_of,
    reassign,
    refs,
    refusal,
    register,
    settled,
    unfence,
    unregister,
    up,
    update_feature,
)

FIRST = refs((1, 0))
PREFERRED, UNCLEAN = ElectLeadersCommand.PREFERRED, ElectLeadersCommand.UNCLEAN


def three(**configs: str) -> MetadataImage:
    """Three brokers, one partition on all of them, broker 1 leads."""
    named = {key.replace("_", "."): value for key, value in configs.items()}
    return cluster(3, create_topic("a", 1, 1, 3, named))


def altered(
    image: MetadataImage, broker_id: int, *, cordoned: bool | None = None, drained: bool | None = None
) -> MetadataImage:
    """Return the image after that, once everything is settled and every revoked leader has let go."""
    image = settled(accept(image, alter_broker(broker_id, cordoned, drained))[0])
    return settled(accept(image, elect(FIRST, handed_over=True))[0])


def leader(image: MetadataImage) -> int:
    return partition_of(image).leader


def restarted(image: MetadataImage, broker_id: int) -> MetadataImage:
    """Return the image after a broker was stopped cleanly and has come back as another process."""
    image = down(image, broker_id)
    previous = broker_epoch(image, broker_id)
    image, _ = accept(image, register(broker_id, incarnation=image.offset + 10, previous_epoch=previous))
    return up(image, broker_id)


# The flags


def test_the_command_changes_the_broker_and_nothing_else() -> None:
    image = three()
    for asked, after in (({"drained": True}, (False, True)), ({"cordoned": True}, (True, False))):
        command = alter_broker(1, **asked)
        assert [record.WhichOneof("record") for record in decide(image, command).records] == ["broker"]
        broker = accept(image, command)[0].brokers[1]
        assert (broker.cordoned, broker.drained) == after


def test_each_flag_is_taken_back_by_itself() -> None:
    image = altered(altered(three(), 2, cordoned=True), 2, drained=True)
    image = altered(image, 2, drained=False)
    assert (image.brokers[2].cordoned, image.brokers[2].drained) == (True, False)
    image = altered(image, 2, cordoned=False)
    assert image.brokers[2] == three().brokers[2]
    assert decide(image, alter_broker(2, False, False)).records == (), "nothing to do any more"


def test_what_cannot_be_asked_for() -> None:
    image = altered(three(), 2, drained=True)
    assert isinstance(refusal(image, alter_broker(9, True)), BrokerIdNotRegistered)
    assert "the cluster has 1, 2, 3" in str(refusal(image, alter_broker(9, True)))
    for command, why in (
        (alter_broker(1), "say whether"),
        (alter_broker(2, cordoned=False), "raftlog broker undrain 2"),
        (alter_broker(2, drained=False, until_restart=True), "until a restart"),
        (alter_broker(2, cordoned=True, until_restart=True), "until a restart"),
    ):
        error = refusal(image, command)
        assert isinstance(error, InvalidRequestError)
        assert why in str(error)
    assert accept(image, alter_broker(2, cordoned=False, drained=False))


def test_the_flags_outlive_processes_and_snapshots() -> None:
    image = altered(altered(three(), 2, cordoned=True), 3, drained=True)
    for broker_id in (2, 3):
        image = restarted(image, broker_id)
    assert image.brokers[2].cordoned
    assert image.brokers[3].drained
    assert image_from_records(image.to_records(), image.offset) == image
    image, _ = accept(image, register(3, incarnation=2, port=9999, directory=7))
    assert image.brokers[3].drained, "also where it comes back with an empty disk, on another machine"


def test_a_broker_that_is_unregistered_and_comes_back_is_like_a_new_one() -> None:
    image = down(altered(cluster(2), 2, drained=True), 2)
    image, _ = accept(image, unregister(2))
    image, _ = accept(image, register(2, incarnation=2))
    assert not image.brokers[2].drained


def test_drained_until_restart_ends_with_the_process() -> None:
    image, _ = accept(three(), alter_broker(2, drained=True, until_restart=True))
    known = image.brokers[2]
    again = register(2, incarnation=1, rack="r")  # the same process, with something new to say
    image, _ = accept(image, again)
    assert (image.brokers[2].rack, image.brokers[2].drained) == ("r", True)
    assert down(image, 2).brokers[2].drained, "nobody hears of it, it may be the same process all the same"
    image = restarted(image, 2)
    assert image.brokers[2].broker_epoch > known.broker_epoch
    assert not image.brokers[2].drained
    assert not image.brokers[2].drained_until_restart


def test_who_is_drained_for_good_is_so_after_having_been_drained_until_restart() -> None:
    image, _ = accept(three(), alter_broker(2, drained=True, until_restart=True))
    image, _ = accept(image, alter_broker(2, drained=True))
    assert restarted(image, 2).brokers[2].drained


# Replicas


@pytest.mark.parametrize("flag", [{"cordoned": True}, {"drained": True}])
def test_new_replicas_go_elsewhere(flag: dict[str, bool]) -> None:
    image, _ = accept(three(), alter_broker(1, **flag))
    image, _ = accept(image, create_topic("b", 2, 4, 2))
    image, _ = accept(image, create_partitions("b", 6))
    assert all(1 not in partition_of(image, 2, number).replicas for number in range(6))
    error = refusal(image, create_topic("c", 3, 1, 3))
    assert isinstance(error, InvalidReplicationFactor)
    assert "of 3 registered brokers 2 are up and not cordoned or drained, so it can be from 1 to 2" in str(error)
    assert isinstance(refusal(image, create_partitions("a", 2)), InvalidReplicationFactor)


@pytest.mark.parametrize("flag", [{"cordoned": True}, {"drained": True}])
def test_nobody_places_new_replicas_there_by_hand_either(flag: dict[str, bool]) -> None:
    state, undo = ("cordoned", "uncordon") if "cordoned" in flag else ("drained", "undrain")
    image = cluster(4, create_topic("a", 1, 1, 2))  # on 1 and 2
    image, _ = accept(image, alter_broker(3, **flag))
    by_hand = create_topic("c", 3, 1, 2)
    by_hand.create_topic.assignments.add(replicas=[1, 3])
    for command in (by_hand, reassign("a", 0, [1, 3])):
        error = refusal(image, command)
        assert isinstance(error, InvalidReplicaAssignment)
        assert f"broker 3 is {state}" in str(error)
        assert f"raftlog broker {undo} 3" in str(error)


def test_moves_may_name_replicas_that_are_there() -> None:
    """Else nothing could be moved away from a cordoned broker step by step, nor a move be turned that is under way."""
    image = cluster(4, create_topic("a", 1, 1, 2))  # on 1 and 2
    image, _ = accept(image, reassign("a", 0, [1, 2, 3]))
    image, _ = accept(image, alter_broker(3, cordoned=True))
    image, _ = accept(image, alter_broker(2, cordoned=True))
    image, _ = accept(image, reassign("a", 0, [2, 3, 4]))
    assert partition_of(image).adding_replicas == (3, 4)
    assert accept(image, reassign("a", 0, []))[0].topics


# Leaderships


def test_what_a_drained_broker_leads_is_handed_over() -> None:
    """In two steps, as from every live leader (ADR 0008); it stays in sync."""
    image = settled(accept(three(), alter_broker(1, drained=True))[0])
    partition = partition_of(image)
    assert (partition.leader, partition.revoked_leader, partition.isr) == (NO_LEADER, 1, (1, 2, 3))
    image, _ = accept(image, elect(FIRST, handed_over=True))
    assert (leader(image), partition_of(image).isr) == (2, (1, 2, 3))
    assert settled(image) is image


def test_a_cordoned_broker_leads_on() -> None:
    assert leader(altered(three(), 1, cordoned=True)) == 1


def test_drained_brokers_are_elected_last_and_before_nobody() -> None:
    image = altered(three(), 2, drained=True)
    assert leader(down(image, 1)) == 3
    image = down(down(image, 1), 3)
    assert leader(image) == 2, "a drained leader is better than none"
    image = restarted(image, 3)
    image, _ = accept(image, alter_partition(image, [2, 3]))
    assert partition_of(image).revoked_leader == 2, "and gives way as soon as another is in sync"
    image, _ = accept(image, elect(FIRST, handed_over=True))
    assert leader(image) == 3


def test_the_only_one_in_sync_leads_on() -> None:
    image = down(down(three(), 2), 3)
    assert altered(image, 1, drained=True).topics == image.topics


def test_nothing_moves_between_drained_brokers() -> None:
    image = altered(altered(altered(three(), 3, drained=True), 2, drained=True), 1, drained=True)
    assert leader(image) == 1
    assert leader(down(image, 1)) == 2


def test_a_leader_without_successor_that_works_leads_on() -> None:
    image = three()
    for broker_id in (2, 3):
        image, _ = accept(image, offline_replicas(image, broker_id))
    assert leader(altered(image, 1, drained=True)) == 1


def test_a_drained_broker_that_shuts_down_gives_way_to_a_drained_one() -> None:
    image = altered(altered(altered(three(), 3, drained=True), 2, drained=True), 1, drained=True)
    image = settled(accept(image, begin_shutdown(1, broker_epoch(image, 1)))[0])
    assert partition_of(image).revoked_leader == 1


def test_an_eligible_replica_that_is_not_drained_comes_before_one_that_is() -> None:
    """KIP-966: both hold every committed record."""
    image = three(min_insync_replicas="3")
    for broker_id in (1, 2, 3):
        image = down(image, broker_id)
    assert (partition_of(image).isr, partition_of(image).eligible_leader_replicas) == ((3,), (1, 2))
    image, _ = accept(image, alter_broker(1, drained=True))
    for broker_id in (1, 2):
        image, _ = accept(image, register(broker_id, incarnation=9, previous_epoch=broker_epoch(image, broker_id)))
    image = settled(image)
    for broker_id in (1, 2):
        image, _ = accept(image, unfence(broker_id, broker_epoch(image, broker_id)))
    assert leader(settled(image)) == 2


def test_an_unclean_election_prefers_whoever_is_not_drained() -> None:
    image = down(down(down(three(), 3), 2), 1)
    image, _ = accept(image, alter_broker(2, drained=True))
    for broker_id in (2, 3):
        image = restarted(image, broker_id)
    assert leader(image) == NO_LEADER
    image, _ = accept(image, elect(FIRST, UNCLEAN))
    assert leader(image) == 3


def test_preferred_elections_pass_drained_brokers_over() -> None:
    image = altered(three(), 1, drained=True)
    assert leader(image) == 2
    error = refusal(image, elect(FIRST, PREFERRED))
    assert isinstance(error, PreferredLeaderNotAvailable)
    assert "drained" in str(error)
    assert list(not_preferred(image)) == []
    assert imbalanced(image, 0) == []
    image = altered(image, 1, drained=False)
    assert leader(image) == 2, "nothing comes back by itself, at once"
    assert imbalanced(image, 10) == [(FIRST[0].topic_id, 0)]
    image, _ = accept(image, elect(FIRST, PREFERRED))
    assert partition_of(image).revoked_leader == 2


def test_the_controller_looks_at_partitions_that_change_while_a_broker_is_drained() -> None:
    image = three()
    records = decide(image, create_topic("b", 2, 1, 3)).records
    noted = Unsettled(everything=False)
    noted.note(image, records)
    assert not noted
    noted.note(accept(image, alter_broker(3, drained=True))[0], records)
    assert noted.topic_ids == {FIRST[0].topic_id.replace(b"\x01", b"\x02")}


# Levels


def test_an_older_cluster_has_to_be_upgraded_first() -> None:
    """A controller of an older version would stop at a command that it does not know."""
    old = image_after(claim(), *(register(broker_id) for broker_id in (1, 2)))
    assert old.features == {}
    commands: list[MetadataCommand] = [alter_broker(1, drained=True), alter_broker(9, cordoned=True)]
    for command in commands:
        error = refusal(old, command)
        assert isinstance(error, UnsupportedVersion)
        assert "needs metadata.version=2, the cluster is at 1" in str(error)
        assert "raftlog cluster features upgrade" in str(error)
    image, _ = accept(old, update_feature(METADATA_VERSION, 2))
    assert accept(image, alter_broker(1, drained=True))[0].brokers[1].drained


def test_a_new_cluster_begins_at_the_highest_level() -> None:
    image = image_after(claim(newest=True))
    assert image.features == {METADATA_VERSION: SUPPORTED[METADATA_VERSION].max_level}
    older, _ = accept(image_after(claim()), claim(epoch=2, newest=True))
    assert older.features == {}, "the levels of one that is there rise when somebody says so"
    assert isinstance(refusal(image, register(1, features={})), UnsupportedVersion)
