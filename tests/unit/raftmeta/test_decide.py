"""Decisions: what each command does and refuses; brokers, AlterPartition, moves and draining."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from raftlog.errors import (
    BrokerIdNotRegistered,
    DuplicateBrokerRegistration,
    EligibleLeadersNotAvailable,
    FeatureUpdateFailed,
    FencedController,
    FencedLeaderEpoch,
    InconsistentClusterId,
    IneligibleReplica,
    InvalidConfig,
    InvalidPartitions,
    InvalidReplicaAssignment,
    InvalidReplicationFactor,
    InvalidRequestError,
    InvalidTopic,
    InvalidUpdateVersion,
    NoReassignmentInProgress,
    PreferredLeaderNotAvailable,
    RaftlogError,
    StaleBrokerEpoch,
    TopicAlreadyExists,
    UnknownTopicId,
    UnknownTopicOrPartition,
    UnsupportedVersion,
    from_wire,
)
from raftlog.v1.records_pb2 import (
    AlterPartitionCommand,
    AlterPartitionsCommand,
    ConfigResource,
    ElectLeadersCommand,
    FeatureRecord,
    MetadataCommand,
)
from raftmeta.decide import CommandResult, brokers, decide
from raftmeta.decide.brokers import MAX_UNSYNCED_TOPICS
from raftmeta.elections import not_preferred
from raftmeta.features import ALTER_PARTITIONS_LEVEL, METADATA_VERSION, SUPPORTED
from raftmeta.image import NO_LEADER, MetadataImage, PartitionImage, ResourceKey
from raftmeta.quorum.controller_plan import Unsettled, imbalanced
from raftmeta.replay import image_from_records, replay_all
from tests.support.metadata import (
    accept,
    allocate_producer_ids,
    alter,
    alter_broker,
    alter_partition,
    alter_partitions,
    begin_shutdown,
    broker_epoch,
    claim,
    cluster,
    create_partitions,
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


ONE_REGISTERED = cluster(1)
ONE_REGISTERED_NEWEST = image_after(claim(newest=True), register())


def test_a_registration_begins_fenced_with_its_offset_as_the_epoch() -> None:
    image, result = accept(ONE_REGISTERED, register(2), offset=20)
    assert image.brokers[2].fenced
    assert result.broker_epoch == image.brokers[2].broker_epoch == image.offset == 20
    image = up(image, 2)
    assert not image.brokers[2].fenced
    _, again = accept(down(image, 2), register(2, incarnation=2))
    assert again.broker_epoch > 20


def test_a_repeated_registration_changes_nothing_and_gives_the_same_epoch() -> None:
    image = cluster(2)
    again, result = accept(image, register(2))
    assert again is image
    assert result == CommandResult(image.offset, broker_epoch=broker_epoch(image, 2))


def test_a_new_address_of_the_same_process_keeps_its_state() -> None:
    image = cluster(1, create_topic("a", 1))
    moved, result = accept(image, register(port=9999))
    assert moved.brokers[1].port == 9999
    assert not moved.brokers[1].fenced
    assert result.broker_epoch == broker_epoch(image, 1)


def test_another_process_with_the_id_of_a_live_one_is_refused() -> None:
    error = refusal(ONE_REGISTERED, register(1, incarnation=2, lock=7))
    assert isinstance(error, DuplicateBrokerRegistration)
    assert "broker 1 is running already, at 127.0.0.1:9092" in str(error)
    assert accept(down(ONE_REGISTERED, 1), register(1, incarnation=2, lock=7))


@pytest.mark.parametrize("directory", [None, 7])
def test_a_process_with_the_same_lock_is_the_successor(directory: int | None) -> None:
    """The former owner of that lock is dead: no session has to end first."""
    image, _ = accept(ONE_REGISTERED, register(1, incarnation=2, directory=directory))
    assert image.brokers[1].fenced


def test_without_a_lock_there_is_no_proof() -> None:
    command = register(2)
    command.register_broker.lock_identity = b""
    image = up(accept(ONE_REGISTERED, command)[0], 2)
    command = MetadataCommand.FromString(command.SerializeToString())
    command.register_broker.incarnation_id = bytes(16)
    assert isinstance(refusal(image, command), DuplicateBrokerRegistration)


@pytest.mark.parametrize(
    ("previous_epoch", "directory", "unclean"), [(0, None, False), (-1, None, True), (None, None, True), (0, 7, True)]
)
def test_a_stop_is_clean_with_the_mark_of_the_last_epoch_on_the_same_disk(
    previous_epoch: int | None, directory: int | None, unclean: bool
) -> None:
    image = down(ONE_REGISTERED, 1)
    previous = None if previous_epoch is None else broker_epoch(image, 1) + previous_epoch
    image, _ = accept(image, register(1, incarnation=2, previous_epoch=previous, directory=directory))
    assert image.brokers[1].unclean == unclean


@pytest.mark.parametrize(
    ("synced_epoch", "directory", "unclean", "unsynced"),
    [(0, None, False, (7,)), (-1, None, True, ()), (None, None, True, ()), (0, 7, True, ())],
)
def test_what_was_fsynced_before_it_counted_outlives_an_unclean_stop(
    synced_epoch: int | None, directory: int | None, unclean: bool, unsynced: tuple[int, ...]
) -> None:
    """The mark must be of the last epoch and on the same disk, as that of a clean stop."""
    image = down(ONE_REGISTERED_NEWEST, 1)
    synced = None if synced_epoch is None else broker_epoch(image, 1) + synced_epoch
    command = register(1, incarnation=2, synced_epoch=synced, unsynced_topics=[7], directory=directory)
    image, _ = accept(image, command)
    assert image.brokers[1].unclean == unclean
    assert image.brokers[1].unsynced_topic_ids == tuple(map(uuid_of, unsynced))
    assert image.brokers[1].may_lack_records(uuid_of(7))
    assert image.brokers[1].may_lack_records(uuid_of(8)) == unclean
    assert image_from_records(image.to_records(), image.offset) == image
    assert not up(image, 1).brokers[1].may_lack_records(uuid_of(7))


def test_topics_that_may_lack_records_do_so_until_the_broker_was_let_in() -> None:
    image = down(ONE_REGISTERED_NEWEST, 1)
    epoch = broker_epoch(image, 1)
    image, _ = accept(image, register(1, incarnation=2, synced_epoch=epoch, unsynced_topics=[7]))
    epoch = broker_epoch(image, 1)
    image, _ = accept(image, register(1, incarnation=3, synced_epoch=epoch, unsynced_topics=[8], previous_epoch=epoch))
    assert image.brokers[1].unsynced_topic_ids == (uuid_of(7),), (
        "a clean stop must neither add nor restore topics that may lack records"
    )


def test_after_a_clean_stop_no_topic_lacks_records() -> None:
    image = down(ONE_REGISTERED_NEWEST, 1)
    epoch = broker_epoch(image, 1)
    image, _ = accept(image, register(1, incarnation=2, previous_epoch=epoch, synced_epoch=epoch, unsynced_topics=[7]))
    assert (image.brokers[1].unclean, image.brokers[1].unsynced_topic_ids) == (False, ())


def test_below_its_level_an_unclean_stop_counts_as_a_loss() -> None:
    """Older controllers would decide otherwise."""
    image = down(ONE_REGISTERED, 1)
    image, _ = accept(image, register(1, incarnation=2, synced_epoch=broker_epoch(image, 1)))
    assert image.brokers[1].unclean


def test_a_broker_names_a_bounded_number_of_topics() -> None:
    command = register(1, unsynced_topics=range(MAX_UNSYNCED_TOPICS + 1))
    assert "10001 topics with records that were not fsynced, it may name 10000" in str(refusal(ONE_BROKER, command))


def test_a_clean_stop_stays_clean_when_the_machine_is_booted_meanwhile() -> None:
    """The clean mark and the directory are the same, the lock is of another kernel."""
    image = down(ONE_REGISTERED, 1)
    image, _ = accept(image, register(1, incarnation=2, previous_epoch=broker_epoch(image, 1), lock=7))
    assert not image.brokers[1].unclean


def test_a_clean_stop_does_not_undo_an_unclean_one() -> None:
    """The process that came back uncleanly was never let in, and stopped cleanly."""
    image, _ = accept(ONE_REGISTERED, register(1, incarnation=2))
    image, _ = accept(image, register(1, incarnation=3, previous_epoch=broker_epoch(image, 1)))
    assert image.brokers[1].unclean
    assert not up(image, 1).brokers[1].unclean


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (register(broker_id=-1), "broker id -1 is negative"),
        (register(port=0), "'127.0.0.1':0 is no address"),
        (register(port=65536), "is no address"),
    ],
)
def test_a_bad_registration_is_refused(command: MetadataCommand, words: str) -> None:
    assert words in str(refusal(ONE_REGISTERED, command))


@pytest.mark.parametrize("field", ["incarnation_id", "directory_id", "lock_identity"])
def test_ids_have_sixteen_bytes(field: str) -> None:
    command = register()
    setattr(command.register_broker, field, b"short")
    assert "has 16 bytes, this one has 5" in str(refusal(ONE_REGISTERED, command))


@pytest.mark.parametrize("make", [fence, unfence, begin_shutdown, allocate_producer_ids])
def test_what_names_a_broker_names_its_present_epoch(make: object) -> None:
    assert callable(make)
    assert isinstance(refusal(ONE_REGISTERED, make(1, 1)), StaleBrokerEpoch)
    assert isinstance(refusal(ONE_REGISTERED, make(2, 1)), BrokerIdNotRegistered)


def test_states_are_entered_once() -> None:
    image = ONE_REGISTERED
    epoch = broker_epoch(image, 1)
    assert accept(image, unfence(1, epoch))[0] is image
    image, _ = accept(image, begin_shutdown(1, epoch))
    assert image.brokers[1].in_controlled_shutdown
    assert accept(image, begin_shutdown(1, epoch))[0] is image
    image, _ = accept(image, fence(1, epoch))
    assert accept(image, fence(1, epoch))[0] is image
    image, _ = accept(image, register(1, incarnation=2, previous_epoch=epoch))
    assert not image.brokers[1].in_controlled_shutdown


def test_a_broker_is_forgotten_when_it_is_down_and_holds_nothing() -> None:
    image = cluster(2, create_topic("a", 1, 1, 2))
    image, _ = accept(image, alter("2", {"log.retention.ms": "1"}, type_=ConfigResource.BROKER))
    assert "broker 2 is running" in str(refusal(image, unregister(2)))
    image = down(image, 2)
    assert "still holds replicas of 1 partitions" in str(refusal(image, unregister(2)))
    assert isinstance(refusal(image, unregister(7)), BrokerIdNotRegistered)
    idle, _ = accept(down(up(accept(image, register(3))[0], 3), 3), unregister(3))
    assert sorted(idle.brokers) == [1, 2]


def test_an_unregistered_broker_takes_its_configs_with_it() -> None:
    image = down(cluster(2), 2)
    image, _ = accept(image, alter("2", {"log.retention.ms": "1"}, type_=ConfigResource.BROKER))
    image, _ = accept(image, unregister(2))
    assert image.configs == {}


# Producer ids


def test_blocks_of_producer_ids_never_overlap() -> None:
    """KIP-730."""
    image = ONE_REGISTERED
    blocks = []
    for _ in range(3):
        image, result = accept(image, allocate_producer_ids(1, broker_epoch(image, 1)))
        blocks.append((result.first_producer_id, result.producer_ids))
    assert blocks == [(0, 1000), (1000, 1000), (2000, 1000)]
    assert image.next_producer_id == 3000


# Features


def with_features(*ranges: tuple[int, int]) -> MetadataImage:
    """Return a cluster whose brokers know these levels of the feature x."""
    return image_after(claim(), *(register(i, features={"x": each}) for i, each in enumerate(ranges, 1)))


def test_a_feature_is_finalized_once_every_broker_knows_it() -> None:
    """KIP-584."""
    image, _ = accept(with_features((1, 3), (1, 2)), update_feature("x", 2))
    assert image.features == {"x": 2}
    error = refusal(image, update_feature("x", 3))
    assert isinstance(error, FeatureUpdateFailed)
    assert "broker 2 does not know x at level 3" in str(error)
    assert "cannot be lowered" in str(refusal(image, update_feature("x", 1)))
    assert accept(image, update_feature("x", 2))[0] is image
    assert accept(with_features((1, 3)), update_feature("x", 2, validate_only=True))[0].features == {}


@pytest.mark.parametrize("command", [update_feature("y", 1), update_feature("metadata.version", 0)])
def test_unknown_and_lower_levels_are_refused(command: MetadataCommand) -> None:
    assert isinstance(refusal(ONE_REGISTERED, command), FeatureUpdateFailed)
    assert isinstance(refusal(image_after(claim()), update_feature("y", 1)), FeatureUpdateFailed)


def test_a_broker_that_does_not_know_a_finalized_level_cannot_register() -> None:
    image, _ = accept(with_features((1, 3)), update_feature("x", 2))
    for command in (register(2), register(2, features={"x": (1, 1)}), register(2, features={"x": (3, 9)})):
        assert isinstance(refusal(image, command), UnsupportedVersion)
    assert accept(image, register(2, features={"x": (2, 9)}))


def test_a_broker_that_does_not_say_knows_the_first_metadata_version() -> None:
    image = image_after(claim(), register(1))  # founded by the first version
    for known in ({}, {"metadata.version": (1, 4)}):
        assert accept(image, register(2, features=known))
    error: RaftlogError = refusal(image, register(2, features={"metadata.version": (2, 4)}))
    assert isinstance(error, UnsupportedVersion)
    assert isinstance(error, InvalidRequestError)


def test_what_a_broker_says_of_itself_has_limits() -> None:
    features = {"metadata.version": (1, 2)} | {f"f{n}": (1, 1) for n in range(63)}
    image, _ = accept(ONE_REGISTERED, register(2, rack="r" * 255, features=features))
    assert image.brokers[2].rack == "r" * 255
    too_long = [register(2, rack="r" * 256), register(2), register(2), register(2, features={"f" * 256: (1, 1)})]
    too_long[1].register_broker.host = "h" * 1_000_000
    too_long[2].register_broker.inter_node_host = "h" * 256
    for command in too_long:
        refused = refusal(ONE_REGISTERED, command)
        assert isinstance(refused, InvalidRequestError)
        assert "up to 255 characters" in str(refused)
        assert len(str(refused)) < 200
    refused = refusal(ONE_REGISTERED, register(2, features={f"f{n}": (1, 1) for n in range(65)}))
    assert "65 features" in str(refused)


def test_so_many_brokers_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(brokers, "MAX_BROKERS", 3)
    image = cluster(3)
    assert "3 brokers are registered" in str(refusal(image, register(4)))
    accept(image, register(3, incarnation=3, port=9093))


@pytest.mark.parametrize(
    "command",
    [
        delete_topic("\x01" * 1_000_000),
        create_partitions("\x01" * 1_000_000, 3),
        update_feature("\x01" * 1_000_000, 3),
        alter("\x01" * 1_000_000, {"retention.ms": "1"}),
        delete_topic(topic_id=bytes(1_000_000)),
    ],
    ids=lambda command: command.WhichOneof("command"),
)
def test_a_refusal_does_not_repeat_a_name_beyond_all_measure(command: MetadataCommand) -> None:
    assert len(str(refusal(ONE_REGISTERED, command))) < 1_500


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


MANY = replace(
    cluster(4, create_topic("a", 1, 4, 3), create_topic("b", 2, 1, 3)),
    features={METADATA_VERSION: ALTER_PARTITIONS_LEVEL},
)
"""Topic a has leaders 1 to 4 in turn. At a level at which changes travel in batches."""


def led_by(broker_id: int, image: MetadataImage = MANY) -> list[tuple[int, int]]:
    """Return (number of the topic id, partition) of what a broker leads."""
    return [
        (number, each.partition)
        for number in (1, 2)
        for each in image.topics[uuid_of(number)].partitions
        if each.leader == broker_id
    ]


def all_of(broker_id: int, image: MetadataImage = MANY) -> MetadataCommand:
    """Have every partition of a leader shrink to it and one other replica."""
    wanted = []
    for number, partition in led_by(broker_id, image):
        other = next(each for each in partition_of(image, number, partition).replicas if each != broker_id)
        wanted.append(alter_partition(image, [broker_id, other], number, partition))
    return alter_partitions(image, *wanted, broker_id=broker_id)


def test_the_leader_changes_many_isrs_at_once() -> None:
    """KIP-497: AlterPartition has many partitions."""
    (leader,) = {each for each in range(1, 5) if len(led_by(each)) == 2}
    image, result = accept(MANY, all_of(leader))
    for number, partition in led_by(leader):
        assert len(partition_of(image, number, partition).isr) == 2
        assert partition_of(image, number, partition).partition_epoch == 1
    assert [(each.HasField("error"), each.partition_epoch) for each in result.alterations] == [(False, 1)] * 2
    assert (result.offset, result.partitions) == (image.offset, ())


def test_a_refused_alteration_spoils_no_other() -> None:
    (leader,) = {each for each in range(1, 5) if len(led_by(each)) == 2}
    (first, second), theirs = led_by(leader), led_by(leader % 4 + 1)[0]
    command = all_of(leader)
    asked = command.alter_partitions.alterations
    stale = asked.add()
    stale.CopyFrom(asked[1])
    asked[1].partition_epoch = 5
    asked.add(topic_id=uuid_of(9))
    asked.add(topic_id=uuid_of(1), partition=99)
    foreign = asked.add(topic_id=uuid_of(theirs[0]), partition=theirs[1], new_isr=asked[0].new_isr)
    foreign.leader_epoch = partition_of(MANY, *theirs).leader_epoch
    image, result = accept(MANY, command)
    assert [type(from_wire(each.error)) if each.HasField("error") else None for each in result.alterations] == [
        None,
        InvalidUpdateVersion,
        InvalidRequestError,
        UnknownTopicId,
        UnknownTopicOrPartition,
        InvalidRequestError,
    ]
    assert [each.partition_epoch for each in result.alterations] == [1, 0, 0, -1, -1, 0]
    assert "named twice" in result.alterations[2].error.message
    assert "cannot alter it" in result.alterations[5].error.message
    assert len(partition_of(image, *first).isr) == 2
    assert partition_of(image, *second) == partition_of(MANY, *second)
    assert partition_of(image, *theirs) == partition_of(MANY, *theirs)


def test_a_partition_that_is_named_twice_changes_once() -> None:
    """The second one was made for the partition as it was before, like the first."""
    key = led_by(1)[0]
    wanted = alter_partition(MANY, [1, partition_of(MANY, *key).replicas[1]], *key)
    image, result = accept(MANY, alter_partitions(MANY, wanted, wanted))
    assert partition_of(image, *key).partition_epoch == 1
    assert [each.error.code for each in result.alterations] == [0, InvalidRequestError.code]


def test_alterations_that_change_nothing_write_nothing() -> None:
    key = led_by(1)[0]
    same = alter_partition(MANY, sorted(partition_of(MANY, *key).isr), *key)
    image, result = accept(MANY, alter_partitions(MANY, same))
    assert image is MANY
    assert (result.offset, result.alterations[0].HasField("error")) == (MANY.offset, False)
    late = alter_partition(MANY, [1], *key)
    late.alter_partition.leader_epoch = 5
    assert decide(MANY, alter_partitions(MANY, late)).records == ()


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda command: setattr(command, "broker_epoch", 1), StaleBrokerEpoch),
        (lambda command: setattr(command, "broker_id", 9), BrokerIdNotRegistered),
        (lambda command: command.alterations.extend([command.alterations[0]] * 100), InvalidRequestError),
    ],
)
def test_a_batch_of_a_stranger_or_without_measure_is_refused_as_a_whole(
    change: Callable[[AlterPartitionsCommand], object], error: type[RaftlogError]
) -> None:
    command = all_of(1)
    change(command.alter_partitions)
    assert type(refusal(MANY, command)) is error


def test_a_batch_of_a_fenced_leader_or_below_its_level_is_refused() -> None:
    image, _ = accept(MANY, fence(1, broker_epoch(MANY, 1)))
    assert isinstance(refusal(image, all_of(1)), StaleBrokerEpoch)
    older = replace(MANY, features={METADATA_VERSION: ALTER_PARTITIONS_LEVEL - 1})
    assert isinstance(refusal(older, all_of(1)), UnsupportedVersion)


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
    assert isinstance(refusal(image, late), FencedLeaderEpoch), (
        "the late change must be refused, as the broker leads again in another epoch"
    )


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
    assert decide(image, alter_broker(2, False, False)).records == (), "the repeated change must write no records"


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
    assert image.brokers[3].drained, "the drain must survive a restart, also with an empty disk on another machine"


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
    assert down(image, 2).brokers[2].drained, "the drain must stay, as the broker may be the same process"
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
    assert leader(image) == 2, "a drained broker must lead if no other can"
    image = restarted(image, 3)
    image, _ = accept(image, alter_partition(image, [2, 3]))
    assert partition_of(image).revoked_leader == 2, (
        "the drained leader must be revoked as soon as another replica is in sync"
    )
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
    assert leader(image) == 2, "the leadership must not come back at once"
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
    assert older.features == {}, "the levels of an existing cluster must not rise by themselves"
    assert isinstance(refusal(image, register(1, features={})), UnsupportedVersion)


@pytest.mark.parametrize(("level", "known"), [(3, ("", 0)), (4, ("kafka.example", 9192))])
def test_the_address_for_kafka_clients_is_kept_from_its_level_on(level: int, known: tuple[str, int]) -> None:
    """Controllers of a version that does not know it would otherwise disagree with the others."""
    image = image_after(claim(levels=[FeatureRecord(name=METADATA_VERSION, level=level)]))
    command = register(1, features={METADATA_VERSION: (1, 4)})
    command.register_broker.kafka_host, command.register_broker.kafka_port = "kafka.example", 9192
    image, _ = accept(image, command)
    assert (image.brokers[1].kafka_host, image.brokers[1].kafka_port) == known


@pytest.mark.parametrize(("host", "port"), [("kafka.example", 0), ("", 9192), ("kafka.example", 70_000)])
def test_half_an_address_for_kafka_clients_is_refused(host: str, port: int) -> None:
    command = register(1)
    command.register_broker.kafka_host, command.register_broker.kafka_port = host, port
    with pytest.raises(InvalidRequestError, match="no address for Kafka clients"):
        accept(image_after(claim()), command)
