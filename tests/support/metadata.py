"""Metadata commands for tests, and images after them. `metadata_histories` draws random ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice

from raftlog.errors import RaftlogError
from raftlog.v1 import records_pb2
from raftlog.v1.records_pb2 import ConfigResource, ElectLeadersCommand, MetadataCommand, PartitionRef
from raftmeta.decide import MAX_PARTITIONS_PER_COMMAND, CommandResult, decide
from raftmeta.elections import unsettled
from raftmeta.features import METADATA_VERSION, OWN_TOPIC_ID_LEVEL, newest_levels, supported_ranges
from raftmeta.image import MetadataImage, PartitionImage
from raftmeta.replay import replay_all

EPOCH = 1
EVERY_OFFSET = (1 << 63) - 1
"""At or above any metadata offset."""


def uuid_of(number: int) -> bytes:
    """Return an id that is the same in every run."""
    return number.to_bytes(16, "big")


def levels_with_ids_asked_for() -> list[records_pb2.FeatureRecord]:
    """Return the highest levels at which a topic has the id asked for, so that tests know it beforehand."""
    return [records_pb2.FeatureRecord(name=METADATA_VERSION, level=OWN_TOPIC_ID_LEVEL - 1)]


def claim(
    epoch: int = EPOCH,
    controller_id: int = 1,
    cluster_id: str = "test",
    *,
    newest: bool = False,
    levels: Sequence[records_pb2.FeatureRecord] = (),
) -> MetadataCommand:
    """Claim the controller's place; `newest`: a new cluster begins at the levels that this version founds one with."""
    return MetadataCommand(
        controller_epoch=epoch,
        claim_controller=records_pb2.ClaimControllerCommand(
            controller_id=controller_id, cluster_id=cluster_id, features=newest_levels() if newest else levels
        ),
    )


def register(
    broker_id: int = 1,
    incarnation: int = 1,
    port: int = 9092,
    rack: str = "",
    epoch: int = EPOCH,
    *,
    directory: int | None = None,
    other_directories: Sequence[int] = (),
    lock: int | None = None,
    previous_epoch: int | None = None,
    synced_epoch: int | None = None,
    unsynced_topics: Sequence[int] = (),
    features: Mapping[str, tuple[int, int]] | None = None,
) -> MetadataCommand:
    """Register a broker; unless told otherwise each keeps its directory and lock for ever, and never stops cleanly.

    `features`: what it says that it knows, by default what this version knows.
    """
    return MetadataCommand(
        controller_epoch=epoch,
        register_broker=records_pb2.RegisterBrokerCommand(
            broker_id=broker_id,
            incarnation_id=uuid_of(incarnation),
            host="127.0.0.1",
            port=port,
            rack=rack,
            directory_id=uuid_of(1000 + max(broker_id, 0) if directory is None else directory),
            other_directory_ids=map(uuid_of, other_directories),
            lock_identity=uuid_of(3000 + max(broker_id, 0) if lock is None else lock),
            previous_broker_epoch=previous_epoch,
            synced_broker_epoch=synced_epoch,
            unsynced_topic_ids=map(uuid_of, unsynced_topics),
            features=supported_ranges()
            if features is None
            else [
                records_pb2.FeatureRange(name=name, min_level=low, max_level=high)
                for name, (low, high) in features.items()
            ],
        ),
    )


def fence(broker_id: int, broker_epoch: int, epoch: int = EPOCH) -> MetadataCommand:
    """Fence a broker."""
    command = records_pb2.FenceBrokerCommand(broker_id=broker_id, broker_epoch=broker_epoch)
    return MetadataCommand(controller_epoch=epoch, fence_broker=command)


def unfence(broker_id: int, broker_epoch: int, epoch: int = EPOCH) -> MetadataCommand:
    """Let a broker take part."""
    command = records_pb2.UnfenceBrokerCommand(broker_id=broker_id, broker_epoch=broker_epoch)
    return MetadataCommand(controller_epoch=epoch, unfence_broker=command)


def begin_shutdown(broker_id: int, broker_epoch: int, epoch: int = EPOCH) -> MetadataCommand:
    """Mark a broker as about to stop."""
    command = records_pb2.BeginShutdownCommand(broker_id=broker_id, broker_epoch=broker_epoch)
    return MetadataCommand(controller_epoch=epoch, begin_shutdown=command)


def storage_full(broker_id: int, broker_epoch: int, full: bool = True, epoch: int = EPOCH) -> MetadataCommand:
    """Say as a broker whether its disk is full."""
    command = records_pb2.AlterBrokerCommand(broker_id=broker_id, broker_epoch=broker_epoch, storage_full=full)
    return MetadataCommand(controller_epoch=epoch, alter_broker=command)


def alter_broker(
    broker_id: int,
    cordoned: bool | None = None,
    drained: bool | None = None,
    until_restart: bool = False,
    epoch: int = EPOCH,
) -> MetadataCommand:
    """Cordon or drain a broker, or take that back."""
    command = records_pb2.AlterBrokerCommand(
        broker_id=broker_id, cordoned=cordoned, drained=drained, until_restart=until_restart
    )
    return MetadataCommand(controller_epoch=epoch, alter_broker=command)


def unregister(broker_id: int, epoch: int = EPOCH) -> MetadataCommand:
    """Forget a broker."""
    command = records_pb2.UnregisterBrokerCommand(broker_id=broker_id)
    return MetadataCommand(controller_epoch=epoch, unregister_broker=command)


def refs(*partitions: tuple[int, int]) -> list[PartitionRef]:
    """Return references from (number of the topic id, partition)."""
    return [PartitionRef(topic_id=uuid_of(topic), partition=partition) for topic, partition in partitions]


def elect(
    partitions: Sequence[PartitionRef],
    type_: ElectLeadersCommand.Type.ValueType = ElectLeadersCommand.SETTLE,
    handed_over: bool = False,
    epoch: int = EPOCH,
) -> MetadataCommand:
    """Settle partitions."""
    as_of = EVERY_OFFSET if handed_over else 0
    command = ElectLeadersCommand(partitions=partitions, type=type_, handed_over_as_of=as_of)
    return MetadataCommand(controller_epoch=epoch, elect_leaders=command)


def revoke(partitions: Sequence[PartitionRef], epoch: int = EPOCH) -> MetadataCommand:
    """Take leaderships from live leaders."""
    command = records_pb2.RevokeLeadersCommand(partitions=partitions)
    return MetadataCommand(controller_epoch=epoch, revoke_leaders=command)


def alter_partition(
    image: MetadataImage, new_isr: Sequence[int], topic: int = 1, partition: int = 0
) -> MetadataCommand:
    """Ask for an ISR, as the leader would that has seen `image`."""
    known = image.partition(uuid_of(topic), partition)
    assert known is not None
    leader = image.brokers.get(known.leader)
    return MetadataCommand(
        controller_epoch=image.controller_epoch,
        alter_partition=records_pb2.AlterPartitionCommand(
            broker_id=known.leader,
            broker_epoch=-1 if leader is None else leader.broker_epoch,
            topic_id=uuid_of(topic),
            partition=partition,
            leader_epoch=known.leader_epoch,
            partition_epoch=known.partition_epoch,
            new_isr=(
                records_pb2.IsrMember(broker_id=member, broker_epoch=broker_epoch(image, member)) for member in new_isr
            ),
        ),
    )


def alter_partitions(image: MetadataImage, *wanted: MetadataCommand, broker_id: int = 1) -> MetadataCommand:
    """Ask for the ISRs of several `alter_partition` in one command of `broker_id`."""
    asked = [each.alter_partition for each in wanted]
    return MetadataCommand(
        controller_epoch=image.controller_epoch,
        alter_partitions=records_pb2.AlterPartitionsCommand(
            broker_id=broker_id,
            broker_epoch=broker_epoch(image, broker_id),
            alterations=[
                records_pb2.PartitionAlteration(
                    topic_id=each.topic_id,
                    partition=each.partition,
                    leader_epoch=each.leader_epoch,
                    partition_epoch=each.partition_epoch,
                    new_isr=each.new_isr,
                )
                for each in asked
            ],
        ),
    )


def offline_replicas(
    image: MetadataImage, broker_id: int, partitions: Sequence[PartitionRef] | None = None
) -> MetadataCommand:
    """Report, as the broker would that has seen `image`, that it has no working log for partitions (1-0)."""
    return MetadataCommand(
        controller_epoch=image.controller_epoch,
        offline_replicas=records_pb2.OfflineReplicasCommand(
            broker_id=broker_id,
            broker_epoch=broker_epoch(image, broker_id),
            partitions=refs((1, 0)) if partitions is None else partitions,
        ),
    )


def reassign(topic: str, partition: int, replicas: Sequence[int], epoch: int = EPOCH) -> MetadataCommand:
    """Move a partition; no replicas: cancel."""
    command = records_pb2.AlterReassignmentsCommand(topic=topic, partition=partition, replicas=replicas)
    return MetadataCommand(controller_epoch=epoch, alter_reassignments=command)


def allocate_producer_ids(broker_id: int, broker_epoch: int, epoch: int = EPOCH) -> MetadataCommand:
    """Ask for a block of producer ids."""
    command = records_pb2.AllocateProducerIdsCommand(
        broker_id=broker_id, broker_epoch=broker_epoch, new_secret=bytes(range(32))
    )
    return MetadataCommand(controller_epoch=epoch, allocate_producer_ids=command)


def update_feature(name: str, level: int, validate_only: bool = False, epoch: int = EPOCH) -> MetadataCommand:
    """Finalize a feature."""
    command = records_pb2.UpdateFeatureCommand(name=name, level=level, validate_only=validate_only)
    return MetadataCommand(controller_epoch=epoch, update_feature=command)


def create_topic(
    name: str,
    topic_id: int,
    partitions: int = 1,
    replication_factor: int = 1,
    configs: Mapping[str, str] | None = None,
    validate_only: bool = False,
    epoch: int = EPOCH,
    user: str = "",
) -> MetadataCommand:
    """Create a topic."""
    return MetadataCommand(
        controller_epoch=epoch,
        create_topic=records_pb2.CreateTopicCommand(
            name=name,
            topic_id=uuid_of(topic_id),
            partitions=partitions,
            replication_factor=replication_factor,
            configs=configs,
            validate_only=validate_only,
            user=user,
        ),
    )


def delete_topic(name: str = "", topic_id: bytes = b"", epoch: int = EPOCH) -> MetadataCommand:
    """Delete a topic."""
    return MetadataCommand(
        controller_epoch=epoch, delete_topic=records_pb2.DeleteTopicCommand(name=name, topic_id=topic_id)
    )


def create_partitions(topic: str, partitions: int, epoch: int = EPOCH) -> MetadataCommand:
    """Raise a topic's number of partitions."""
    return MetadataCommand(
        controller_epoch=epoch,
        create_partitions=records_pb2.CreatePartitionsCommand(topic=topic, partitions=partitions),
    )


def alter(
    name: str,
    set_: Mapping[str, str] | None = None,
    unset: Sequence[str] = (),
    type_: ConfigResource.Type.ValueType = ConfigResource.TOPIC,
    validate_only: bool = False,
    epoch: int = EPOCH,
) -> MetadataCommand:
    """Alter configs."""
    return MetadataCommand(
        controller_epoch=epoch,
        alter_configs=records_pb2.AlterConfigsCommand(
            resource=ConfigResource(type=type_, name=name), set=set_, unset=unset, validate_only=validate_only
        ),
    )


def accept(
    image: MetadataImage, command: MetadataCommand, offset: int | None = None
) -> tuple[MetadataImage, CommandResult]:
    """Return the image after a command, and its result; a refusal is raised."""
    offset = image.offset + 1 if offset is None else offset
    decision = decide(image, command, offset)
    if not isinstance(decision.outcome, CommandResult):
        raise decision.outcome
    if decision.records:
        image = replay_all(image, decision.records, offset)
    return image, decision.outcome


def refusal(image: MetadataImage, command: MetadataCommand) -> RaftlogError:
    """Return the error of a command that must be refused, after checking that it has no records."""
    decision = decide(image, command)
    assert decision.records == (), f"a refused command must write no records, but wrote {decision.records}"
    assert isinstance(decision.outcome, RaftlogError)
    return decision.outcome


def broker_epoch(image: MetadataImage, broker_id: int) -> int:
    """Return the epoch of a broker, -1 where it is not registered."""
    broker = image.brokers.get(broker_id)
    return -1 if broker is None else broker.broker_epoch


def settled(image: MetadataImage) -> MetadataImage:
    """Return the image after the controller has settled everything."""
    while partitions := list(islice(unsettled(image), MAX_PARTITIONS_PER_COMMAND)):
        image, _ = accept(image, elect(partitions, epoch=image.controller_epoch))
    return image


def up(image: MetadataImage, broker_id: int) -> MetadataImage:
    """Return the image after a registered broker was let in and everything settled, as the controller does it."""
    image = settled(image)
    command = unfence(broker_id, broker_epoch(image, broker_id), epoch=image.controller_epoch)
    return settled(accept(image, command)[0])


def down(image: MetadataImage, broker_id: int) -> MetadataImage:
    """Return the image after a broker was fenced and everything settled."""
    command = fence(broker_id, broker_epoch(image, broker_id), epoch=image.controller_epoch)
    return settled(accept(image, command)[0])


def image_after(*commands: MetadataCommand) -> MetadataImage:
    """Return the image after commands that must all be accepted; brokers that register are let in at once."""
    image = MetadataImage()
    for command in commands:
        image, _ = accept(image, command)
        if command.WhichOneof("command") == "register_broker":
            image = up(image, command.register_broker.broker_id)
    return image


def cluster(brokers: int = 3, *topics: MetadataCommand) -> MetadataImage:
    """Return a cluster of brokers 1, 2, ... with topics, at the last level where these have the ids asked for."""
    return image_after(
        claim(levels=levels_with_ids_asked_for()),
        *(register(broker_id) for broker_id in range(1, brokers + 1)),
        *topics,
    )


def partition_of(image: MetadataImage, topic: int = 1, partition: int = 0) -> PartitionImage:
    """Return a partition that is there, by the number of its topic id."""
    found = image.partition(uuid_of(topic), partition)
    assert found is not None
    return found
