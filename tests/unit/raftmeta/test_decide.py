"""Decisions: what each command does, what it refuses, and that controllers cannot disagree."""

from __future__ import annotations

import pytest
from hypothesis import given

from raftlog.errors import (
    InvalidConfig,
    InvalidPartitions,
    InvalidReplicationFactor,
    InvalidRequestError,
    InvalidTopic,
    NotController,
    RaftlogError,
    TopicAlreadyExists,
    UnknownTopicId,
    UnknownTopicOrPartition,
)
from raftlog.v1.records_pb2 import ConfigResource, MetadataCommand
from raftmeta.decide import CommandResult, decide
from raftmeta.image import MetadataImage, PartitionImage, ResourceKey
from raftmeta.replay import image_from_records, replay_all
from tests.support.metadata import (
    accept,
    alter,
    claim,
    create_partitions,
    create_topic,
    delete_topic,
    histories,
    image_after,
    register,
    uuid_of,
)

ONE_BROKER = image_after(claim(), register())


def refusal(image: MetadataImage, command: MetadataCommand) -> RaftlogError:
    """Return the error of a command that must be refused, after checking that it has no records."""
    decision = decide(image, command)
    assert decision.records == ()
    assert isinstance(decision.outcome, RaftlogError)
    return decision.outcome


# Controller epochs


def test_a_command_of_a_deposed_controller_changes_nothing() -> None:
    image, _ = accept(ONE_BROKER, claim(epoch=2, controller_id=2))
    assert (image.controller_id, image.controller_epoch) == (2, 2)
    for command in (create_topic("a", 1), register(3), delete_topic("a"), create_partitions("a", 2), alter("a")):
        error = refusal(image, command)
        assert isinstance(error, NotController)
        assert "controller epoch 1 is not the cluster's, which is 2 of controller 2" in str(error)


def test_a_command_from_a_future_controller_is_refused_too() -> None:
    assert isinstance(refusal(ONE_BROKER, create_topic("a", 1, epoch=2)), NotController)


@pytest.mark.parametrize("epoch", [0, 1])
def test_an_epoch_is_claimed_once(epoch: int) -> None:
    assert isinstance(refusal(ONE_BROKER, claim(epoch=epoch, controller_id=2)), NotController)


def test_the_first_claim_names_the_cluster_and_later_ones_must_agree() -> None:
    assert isinstance(refusal(MetadataImage(), claim(cluster_id="")), InvalidRequestError)
    assert ONE_BROKER.cluster_id == "test"
    image, _ = accept(ONE_BROKER, claim(epoch=2, cluster_id=""))
    assert image.cluster_id == "test"
    assert isinstance(refusal(image, claim(epoch=3, cluster_id="other")), InvalidConfig)


def test_an_empty_command_is_refused() -> None:
    assert type(refusal(ONE_BROKER, MetadataCommand(controller_epoch=1))) is InvalidRequestError


# Brokers


def test_a_registration_gives_a_rising_broker_epoch() -> None:
    image, first = accept(ONE_BROKER, register(2))
    image, second = accept(image, register(2, incarnation=2))
    assert 0 < first.broker_epoch < second.broker_epoch
    assert image.brokers[2].broker_epoch == second.broker_epoch == image.offset


def test_a_repeated_registration_changes_nothing_and_gives_the_same_epoch() -> None:
    image, first = accept(ONE_BROKER, register(2))
    again, second = accept(image, register(2))
    assert again is image
    assert second == CommandResult(image.offset, broker_epoch=first.broker_epoch)


def test_a_new_address_of_the_same_incarnation_keeps_the_epochs() -> None:
    image = image_after(claim(), register(), create_topic("a", 1))
    moved, result = accept(image, register(port=9999))
    assert moved.brokers[1].port == 9999
    assert result.broker_epoch == image.brokers[1].broker_epoch
    assert moved.topics == image.topics


def test_a_restarted_leader_leads_with_a_new_leader_epoch() -> None:
    """What a process wrote and lost must not be taken for what the next one writes at the same offsets."""
    image = image_after(claim(), register(1), register(2), create_topic("a", 1, partitions=2))
    before = image.topics[uuid_of(1)].partitions
    assert [partition.leader for partition in before] == [1, 2]
    image, _ = accept(image, register(1, incarnation=2))
    after = image.topics[uuid_of(1)].partitions
    assert after[0] == PartitionImage(0, (1,), (1,), leader=1, leader_epoch=1, partition_epoch=1)
    assert after[1] == before[1]


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (register(broker_id=-1), "broker id -1 is negative"),
        (register(port=0), "'127.0.0.1':0 is no address"),
        (register(port=65536), "is no address"),
    ],
)
def test_a_bad_registration_is_refused(command: MetadataCommand, words: str) -> None:
    assert words in str(refusal(ONE_BROKER, command))


def test_a_registration_without_a_proper_incarnation_is_refused() -> None:
    command = register()
    command.register_broker.incarnation_id = b"short"
    assert "an incarnation id has 16 bytes, this one has 5" in str(refusal(ONE_BROKER, command))


# Topics


def test_a_topic_is_created_with_partitions_and_configs() -> None:
    image, result = accept(ONE_BROKER, create_topic("a", 1, partitions=3, configs={"retention_ms": "7d"}))
    topic = image.topic("a")
    assert topic is not None
    assert result == CommandResult(image.offset, topic_id=uuid_of(1))
    assert [partition.partition for partition in topic.partitions] == [0, 1, 2]
    assert topic.partitions[0] == PartitionImage(0, (1,), (1,), leader=1, leader_epoch=0, partition_epoch=0)
    assert image.topic_configs("a") == {"retention.ms": "604800000"}


@pytest.mark.parametrize("name", ["a", "A-z_0.9", "x" * 249, "__internal", "...", "-"])
def test_topic_names_that_kafka_allows(name: str) -> None:
    assert accept(ONE_BROKER, create_topic(name, 1))[0].topic(name) is not None


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("", "has 0 characters, it may have 1 to 249"),
        ("x" * 250, "has 250 characters"),
        (".", "cannot be named '.'"),
        ("..", "cannot be named '..'"),
        ("a b", "other than a-z A-Z 0-9 . _ -"),
        ("a/b", "other than a-z"),
        ("ü", "other than a-z"),
        ("a\n", "other than a-z"),
        ("٣", "other than a-z"),
    ],
)
def test_topic_names_that_kafka_refuses(name: str, words: str) -> None:
    error = refusal(ONE_BROKER, create_topic(name, 1))
    assert isinstance(error, InvalidTopic)
    assert words in str(error)


def test_names_that_would_be_the_same_in_metrics_collide() -> None:
    image = image_after(claim(), register(), create_topic("a.b", 1), create_topic("plain", 2))
    error = refusal(image, create_topic("a_b", 3))
    assert isinstance(error, InvalidTopic)
    assert "collides with the topic 'a.b'" in str(error)
    assert accept(image, create_topic("a-b", 3))


def test_a_topic_is_there_once() -> None:
    image = image_after(claim(), register(), create_topic("a", 1))
    assert isinstance(refusal(image, create_topic("a", 2)), TopicAlreadyExists)
    assert isinstance(refusal(image, create_topic("b", 1)), InvalidRequestError)


@pytest.mark.parametrize("partitions", [-1, 0, 10_001])
def test_the_number_of_partitions_is_bounded(partitions: int) -> None:
    assert isinstance(refusal(ONE_BROKER, create_topic("a", 1, partitions)), InvalidPartitions)


@pytest.mark.parametrize("replication_factor", [-1, 0, 2])
def test_the_replication_factor_is_bounded_by_the_brokers_that_are_up(replication_factor: int) -> None:
    error = refusal(ONE_BROKER, create_topic("a", 1, replication_factor=replication_factor))
    assert isinstance(error, InvalidReplicationFactor)
    assert f"replication factor {replication_factor}: there are 1 brokers that are up" in str(error)


def test_validate_only_checks_everything_and_changes_nothing() -> None:
    image, result = accept(ONE_BROKER, create_topic("a", 1, validate_only=True))
    assert image is ONE_BROKER
    assert result.offset == image.offset
    for bad in (
        create_topic("a", 1, replication_factor=2, validate_only=True),
        create_topic("a", 1, configs={"retention.ms": "soon"}, validate_only=True),
    ):
        refusal(ONE_BROKER, bad)


def test_bad_configs_are_refused_with_the_key() -> None:
    error = refusal(ONE_BROKER, create_topic("a", 1, configs={"retention.mss": "1"}))
    assert isinstance(error, InvalidConfig)
    assert "unknown topic config 'retention.mss'; did you mean 'retention.ms'?" in str(error)
    assert "segment.bytes='1'" in str(refusal(ONE_BROKER, create_topic("a", 1, configs={"segment.bytes": "1"})))


def test_a_deleted_topic_takes_its_configs_with_it() -> None:
    """A topic that is made again under the same name is another one: another id, and nothing of the old configs."""
    image = image_after(
        claim(),
        register(),
        create_topic("a", 1, configs={"retention.ms": "1000"}),
        delete_topic("a"),
        create_topic("a", 2),
    )
    assert list(image.topics) == [uuid_of(2)]
    assert image.configs == {}


def test_a_topic_can_be_deleted_by_id() -> None:
    image = image_after(claim(), register(), create_topic("a", 1))
    assert accept(image, delete_topic(topic_id=uuid_of(1)))[0].topics == {}
    assert isinstance(refusal(image, delete_topic("a", topic_id=uuid_of(2))), UnknownTopicId)
    assert isinstance(refusal(image, delete_topic("b", topic_id=uuid_of(1))), InvalidRequestError)
    assert isinstance(refusal(image, delete_topic("b")), UnknownTopicOrPartition)


def test_partitions_only_become_more() -> None:
    image = image_after(claim(), register(1), register(2), create_topic("a", 1, 2, 2), create_partitions("a", 5))
    partitions = image.topics[uuid_of(1)].partitions
    assert [partition.partition for partition in partitions] == [0, 1, 2, 3, 4]
    assert all(sorted(partition.replicas) == [1, 2] for partition in partitions)
    for number in (4, 5, 10_001, 0, -1):
        assert isinstance(refusal(image, create_partitions("a", number)), InvalidPartitions)
    assert isinstance(refusal(image, create_partitions("b", 2)), UnknownTopicOrPartition)


# Configs


def test_configs_are_set_and_unset() -> None:
    image = image_after(
        claim(),
        register(),
        create_topic("a", 1, configs={"retention.ms": "1000", "segment.bytes": "1MiB"}),
        alter("a", {"retention.ms": "2s"}, unset=["segment_bytes", "flush.messages"]),
    )
    assert image.topic_configs("a") == {"retention.ms": "2000"}
    image, _ = accept(image, alter("a", unset=["retention.ms"]))
    assert image.configs == {}


def test_an_alteration_that_changes_nothing_has_no_records() -> None:
    image = image_after(claim(), register(), create_topic("a", 1, configs={"retention.ms": "1000"}))
    assert decide(image, alter("a", {"retention.ms": "1s"}, unset=["segment.bytes"])).records == ()
    assert decide(image, alter("a", {"retention.ms": "2s"}, validate_only=True)).records == ()


@pytest.mark.parametrize(
    ("command", "error"),
    [
        (alter("a", {"retention.ms": "soon"}), InvalidConfig),
        (alter("a", {"nonsense": "1"}), InvalidConfig),
        (alter("a", unset=["nonsense"]), InvalidConfig),
        (alter("a", {"retention.ms": "1"}, unset=["retention_ms"]), InvalidConfig),
        (alter("a", {"log.retention.ms": "1"}), InvalidConfig),
        (alter("b", {"retention.ms": "1"}), UnknownTopicOrPartition),
        (alter("9", {"log.retention.ms": "1"}, type_=ConfigResource.BROKER), InvalidRequestError),
        (alter("1", {"node.id": "7"}, type_=ConfigResource.BROKER), InvalidConfig),
    ],
)
def test_a_bad_alteration_is_refused(command: MetadataCommand, error: type[RaftlogError]) -> None:
    image = image_after(claim(), register(), create_topic("a", 1))
    assert isinstance(refusal(image, command), error)


def test_a_config_resource_of_an_unknown_type_is_refused() -> None:
    command = alter("a", {"retention.ms": "1"})
    command.alter_configs.resource.type = 7  # type: ignore[assignment] # what a newer client might send
    assert "config resource type 7 is not known here" in str(refusal(ONE_BROKER, command))


def test_dynamic_broker_configs_lie_beneath_the_topics_own() -> None:
    image = image_after(
        claim(),
        register(),
        create_topic("a", 1, configs={"segment.bytes": "2048"}),
        alter(
            "", {"log.retention.ms": "1", "log.segment.bytes": "1024", "log.roll.ms": "5"}, type_=ConfigResource.BROKER
        ),
        alter("1", {"log.retention.ms": "2"}, type_=ConfigResource.BROKER),
    )
    assert image.topic_configs("a") == {"segment.bytes": "2048"}
    assert image.topic_configs("a", broker_id=1) == {"segment.bytes": "2048", "retention.ms": "2", "segment.ms": "5"}
    assert image.topic_configs("a", broker_id=2) == {"segment.bytes": "2048", "retention.ms": "1", "segment.ms": "5"}


# Properties


def check_invariants(image: MetadataImage) -> None:
    assert {topic.name: topic_id for topic_id, topic in image.topics.items()} == image.topic_id_by_name
    for topic_id, topic in image.topics.items():
        assert topic.topic_id == topic_id
        assert [partition.partition for partition in topic.partitions] == list(range(len(topic.partitions)))
        assert topic.partitions
        for partition in topic.partitions:
            assert len(set(partition.replicas)) == len(partition.replicas) > 0
            assert partition.isr
            assert set(partition.isr) <= set(partition.replicas) <= image.brokers.keys()
            assert partition.leader in partition.isr
    assert all(image.configs.values()), "an empty mapping of configs stays behind"
    for resource in image.configs:
        assert resource.type == ConfigResource.BROKER or resource.name in image.topic_id_by_name
    assert len({broker.broker_epoch for broker in image.brokers.values()}) == len(image.brokers)


@given(histories)
def test_any_history_keeps_the_invariants_and_is_decided_the_same_everywhere(history: list[MetadataCommand]) -> None:
    image = MetadataImage()
    for command in history:
        restarted = image_from_records(image.to_records(), image.offset)
        decision, elsewhere = decide(image, command), decide(restarted, command)
        assert decision.records == elsewhere.records
        assert str(decision.outcome) == str(elsewhere.outcome)
        if isinstance(decision.outcome, RaftlogError):
            assert decision.records == ()
            assert decision.outcome.code is not None, "every refusal can travel"
            continue
        assert decision.outcome.offset == image.offset + bool(decision.records)
        if decision.records:
            previous = image
            image = replay_all(image, decision.records, image.offset + 1)
            check_invariants(image)
            check_epochs_only_rise(previous, image)


def check_epochs_only_rise(before: MetadataImage, after: MetadataImage) -> None:
    assert after.controller_epoch >= before.controller_epoch
    for topic_id in before.topics.keys() & after.topics.keys():
        for old, new in zip(before.topics[topic_id].partitions, after.topics[topic_id].partitions, strict=False):
            if new != old:
                assert new.partition_epoch > old.partition_epoch
            if new.leader != old.leader:
                assert new.leader_epoch > old.leader_epoch
    for broker_id, broker in before.brokers.items():
        assert after.brokers[broker_id].broker_epoch >= broker.broker_epoch


def test_resources_sort_by_type_then_name() -> None:
    broker, topic = ResourceKey(ConfigResource.BROKER, "1"), ResourceKey(ConfigResource.TOPIC, "z")
    assert sorted([broker, topic]) == [topic, broker]
