"""Metadata commands for tests: by hand, and drawn by Hypothesis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hypothesis import strategies as st

from raftlog.v1 import records_pb2
from raftlog.v1.records_pb2 import ConfigResource, MetadataCommand
from raftmeta.decide import CommandResult, decide
from raftmeta.image import MetadataImage
from raftmeta.replay import replay_all

EPOCH = 1


def uuid_of(number: int) -> bytes:
    """Return an id that is the same in every run."""
    return number.to_bytes(16, "big")


def claim(epoch: int = EPOCH, controller_id: int = 1, cluster_id: str = "test") -> MetadataCommand:
    """Claim the controller's place."""
    return MetadataCommand(
        controller_epoch=epoch,
        claim_controller=records_pb2.ClaimControllerCommand(controller_id=controller_id, cluster_id=cluster_id),
    )


def register(
    broker_id: int = 1, incarnation: int = 1, port: int = 9092, rack: str = "", epoch: int = EPOCH
) -> MetadataCommand:
    """Register a broker."""
    return MetadataCommand(
        controller_epoch=epoch,
        register_broker=records_pb2.RegisterBrokerCommand(
            broker_id=broker_id, incarnation_id=uuid_of(incarnation), host="127.0.0.1", port=port, rack=rack
        ),
    )


def create_topic(
    name: str,
    topic_id: int,
    partitions: int = 1,
    replication_factor: int = 1,
    configs: Mapping[str, str] | None = None,
    validate_only: bool = False,
    epoch: int = EPOCH,
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


def accept(image: MetadataImage, command: MetadataCommand) -> tuple[MetadataImage, CommandResult]:
    """Return the image after a command, and its result; a refusal is raised."""
    decision = decide(image, command)
    if not isinstance(decision.outcome, CommandResult):
        raise decision.outcome
    if decision.records:
        image = replay_all(image, decision.records, image.offset + 1)
    return image, decision.outcome


def image_after(*commands: MetadataCommand) -> MetadataImage:
    """Return the image after commands that must all be accepted."""
    image = MetadataImage()
    for command in commands:
        image, _ = accept(image, command)
    return image


_names = st.sampled_from(["a", "b", "a.b", "a_b", "__internal", "..", "", "x" * 250, "ü"])
_keys = st.sampled_from(["retention.ms", "retention_ms", "segment.bytes", "log.retention.ms", "nonsense"])
_values = st.sampled_from(["1000", "2000", "64KiB", "7d", "-1", "soon"])
_configs = st.dictionaries(_keys, _values, max_size=2)
_epochs = st.sampled_from([1, 1, 1, 1, 1, 2, 0])
_resources = st.sampled_from(["a", "b", "", "1", "2", "9"])

commands = st.one_of(
    st.builds(claim, st.sampled_from([1, 2]), st.just(1), st.sampled_from(["test", "", "other"])),
    st.builds(
        register,
        st.integers(-1, 4),
        st.integers(1, 3),
        st.sampled_from([9092, 9093, 0]),
        st.sampled_from(["", "r1", "r2"]),
        _epochs,
    ),
    st.builds(
        create_topic, _names, st.integers(1, 6), st.integers(-1, 4), st.integers(0, 4), _configs, st.booleans(), _epochs
    ),
    st.builds(delete_topic, _names, st.sampled_from([b"", uuid_of(1), uuid_of(2), b"short"]), _epochs),
    st.builds(create_partitions, _names, st.integers(-1, 8), _epochs),
    st.builds(
        alter,
        _resources,
        _configs,
        st.lists(_keys, max_size=2),
        st.sampled_from([ConfigResource.TOPIC, ConfigResource.BROKER]),
        st.booleans(),
        _epochs,
    ),
    st.just(MetadataCommand(controller_epoch=1)),
)
"""Commands, sensible and senseless."""

histories = st.lists(commands, max_size=25).map(lambda drawn: [claim(), register(1), register(2, rack="r1"), *drawn])
"""Commands that begin with a cluster of two brokers."""
