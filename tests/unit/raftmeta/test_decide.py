"""Decisions: what each command does, what it refuses, and that controllers cannot disagree."""

from __future__ import annotations

import pytest

from raftlog.errors import (
    FencedController,
    InconsistentClusterId,
    InvalidConfig,
    InvalidPartitions,
    InvalidReplicationFactor,
    InvalidRequestError,
    InvalidTopic,
    RaftlogError,
    TopicAlreadyExists,
    UnknownTopicId,
    UnknownTopicOrPartition,
)
from raftlog.v1.records_pb2 import ConfigResource, MetadataCommand
from raftmeta.decide import CommandResult, decide
from raftmeta.image import MetadataImage, PartitionImage, ResourceKey
from raftmeta.replay import replay_all
from tests.support.metadata import (
    accept,
    alter,
    claim,
    create_partitions,
    create_topic,
    delete_topic,
    image_after,
    refusal,
    register,
    update_feature,
    uuid_of,
)

ONE_BROKER = image_after(claim(), register())


# Controller epochs


def test_a_command_of_a_deposed_controller_changes_nothing() -> None:
    image, _ = accept(ONE_BROKER, claim(epoch=2, controller_id=2))
    assert (image.controller_id, image.controller_epoch) == (2, 2)
    for command in (create_topic("a", 1), register(3), delete_topic("a"), create_partitions("a", 2), alter("a")):
        error = refusal(image, command)
        assert isinstance(error, FencedController)
        assert "controller epoch 1 is not the cluster's, which is 2 of controller 2" in str(error)


def test_a_command_from_a_future_controller_is_refused_too() -> None:
    assert isinstance(refusal(ONE_BROKER, create_topic("a", 1, epoch=2)), FencedController)


@pytest.mark.parametrize("epoch", [0, 1])
def test_an_epoch_is_claimed_once(epoch: int) -> None:
    assert isinstance(refusal(ONE_BROKER, claim(epoch=epoch, controller_id=2)), FencedController)


def test_the_first_claim_names_the_cluster_and_later_ones_must_agree() -> None:
    assert isinstance(refusal(MetadataImage(), claim(cluster_id="")), InvalidRequestError)
    assert ONE_BROKER.cluster_id == "test"
    image, _ = accept(ONE_BROKER, claim(epoch=2, cluster_id=""))
    assert image.cluster_id == "test"
    assert isinstance(refusal(image, claim(epoch=3, cluster_id="other")), InconsistentClusterId)


def test_an_empty_command_is_refused() -> None:
    assert type(refusal(ONE_BROKER, MetadataCommand(controller_epoch=1))) is InvalidRequestError


# Topics


def test_a_topic_is_created_with_partitions_and_configs() -> None:
    image, result = accept(ONE_BROKER, create_topic("a", 1, partitions=3, configs={"retention_ms": "7d"}))
    topic = image.topic("a")
    assert topic is not None
    assert result == CommandResult(image.offset, topic_id=uuid_of(1))
    assert [partition.partition for partition in topic.partitions] == [0, 1, 2]
    assert topic.partitions[0] == PartitionImage(0, (1,), (1,), leader=1, leader_epoch=0, partition_epoch=0)
    assert image.topic_configs("a") == {"retention.ms": "604800000"}


def test_a_topic_asked_for_again_with_the_same_id_is_there_and_with_another_id_refused() -> None:
    image, _ = accept(ONE_BROKER, create_topic("a", 1, partitions=3))
    again, result = accept(image, create_topic("a", 1, partitions=3))
    assert again is image
    assert result == CommandResult(image.offset, topic_id=uuid_of(1))
    with pytest.raises(TopicAlreadyExists):
        accept(image, create_topic("a", 2, partitions=3))


def test_a_topic_made_again_after_its_deletion_has_another_id() -> None:
    """A request that arrives late, or again, cannot bring back the id under which brokers have the first one's logs."""
    asked = create_topic("a", 1, partitions=3)
    image, first = accept(image_after(claim(newest=True), register()), asked)
    again, repeated = accept(image, asked)
    assert again is image
    assert repeated == CommandResult(image.offset, topic_id=first.topic_id)
    with pytest.raises(TopicAlreadyExists):
        accept(image, create_topic("a", 2, partitions=3))
    image, late = accept(accept(image, delete_topic("a"))[0], asked)
    assert list(image.topics) == [late.topic_id]
    assert late.topic_id != first.topic_id
    assert accept(image, asked)[1] == CommandResult(image.offset, topic_id=late.topic_id)


def test_the_id_of_a_topic_is_what_all_controllers_make_of_the_request_and_its_offset() -> None:
    image = image_after(claim(newest=True), register())
    _, result = accept(image, create_topic("a", 1), offset=1000)
    assert result.topic_id.hex() == "ce0a6540e3ec054c4843bb6960cc2a6e"
    asked = [accept(image, create_topic("a", number), offset)[1].topic_id for number in (1, 2) for offset in (500, 501)]
    assert len(set(asked)) == 4


def test_what_was_asked_for_is_kept_with_the_topic() -> None:
    image, _ = accept(image_after(claim(newest=True), register()), create_topic("a", 1, configs={"retention.ms": "1"}))
    image, _ = accept(image, create_partitions("a", 2))
    image, _ = accept(image, alter("a", {"retention.ms": "2"}))
    assert replay_all(MetadataImage(), image.to_records(), image.offset).topic("a") == image.topic("a")
    again, _ = accept(image, create_topic("a", 1))
    assert again is image


def test_below_level_3_a_topic_has_the_id_that_was_asked_for_and_keeps_it() -> None:
    older = image_after(claim(), register(), update_feature("metadata.version", 2))
    image, result = accept(older, create_topic("a", 1))
    assert result.topic_id == uuid_of(1)
    [record, *_] = decide(older, create_topic("a", 1)).records
    assert not record.topic.requested_id
    image, _ = accept(image, update_feature("metadata.version", 3))
    assert accept(image, create_topic("a", 1)) == (image, CommandResult(image.offset, topic_id=uuid_of(1)))


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
    assert f"replication factor {replication_factor}: of 1 registered brokers 1 is up, so it can be 1" in str(error)


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
    assert image.topics[uuid_of(2)].configs == {}
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


def test_resources_sort_by_type_then_name() -> None:
    broker, topic = ResourceKey(ConfigResource.BROKER, "1"), ResourceKey(ConfigResource.TOPIC, "z")
    assert sorted([broker, topic]) == [topic, broker]
