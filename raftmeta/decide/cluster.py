"""Decisions that concern the cluster as a whole: its controller, its features, its producer ids."""

from __future__ import annotations

from raftlog.config import MAX_INT64
from raftlog.errors import FeatureUpdateFailed, FencedController, InconsistentClusterId, InvalidRequestError
from raftlog.v1 import records_pb2
from raftlog.v1.records_pb2 import MetadataRecord
from raftmeta.decide.brokers import find_broker
from raftmeta.decide.outcome import MAX_NAME_SHOWN, Accepted, CommandResult
from raftmeta.features import BASELINE, supports
from raftmeta.image import MetadataImage, feature_record, producer_ids_record

PRODUCER_IDS_PER_BLOCK = 1000


def claim_controller(
    image: MetadataImage, command: records_pb2.ClaimControllerCommand, controller_epoch: int, offset: int
) -> Accepted:
    """Make a controller the active one, with an epoch above all before.

    The first claim names the cluster, and says at which levels its features begin.
    """
    if controller_epoch <= image.controller_epoch:
        raise FencedController(
            f"controller epoch {controller_epoch} cannot be claimed, "
            f"controller {image.controller_id} already has {image.controller_epoch}"
        )
    records = []
    if not image.cluster_id:
        if not command.cluster_id:
            raise InvalidRequestError("the first claim names the cluster: cluster_id is empty")
        records.append(MetadataRecord(cluster=records_pb2.ClusterRecord(cluster_id=command.cluster_id)))
        records += [
            feature_record(each.name, each.level)
            for each in command.features
            if each.level > BASELINE.get(each.name, 0)
        ]
    elif command.cluster_id not in ("", image.cluster_id):
        raise InconsistentClusterId(
            f"cluster.id={command.cluster_id!r}, but this metadata belongs to the cluster {image.cluster_id!r}; "
            "correct cluster.id or metadata.log.dir"
        )
    records.append(
        MetadataRecord(
            controller=records_pb2.ControllerRecord(
                controller_id=command.controller_id, controller_epoch=controller_epoch
            )
        )
    )
    return tuple(records), CommandResult(offset)


def update_feature(image: MetadataImage, command: records_pb2.UpdateFeatureCommand, offset: int) -> Accepted:
    """Finalize a feature at a higher level, once every registered broker knows that level (KIP-584)."""
    name = command.name[:MAX_NAME_SHOWN]
    level = image.features.get(command.name, BASELINE.get(command.name, 0))
    if command.level < level or command.level < 0:
        raise FeatureUpdateFailed(
            f"{name} is at level {level} and cannot be lowered to {command.level}: "
            "what was committed at that level may need it"
        )
    if command.level == level:
        return (), CommandResult(image.offset)
    if not image.brokers:
        raise FeatureUpdateFailed(f"no broker is registered, so nobody knows {name}; start the brokers first")
    for broker_id in sorted(image.brokers):
        if not supports(image.brokers[broker_id].features, command.name, command.level):
            raise FeatureUpdateFailed(
                f"broker {broker_id} does not know {name} at level {command.level}; "
                "run a newer version there first, or unregister it if it is gone for good"
            )
    if command.validate_only:
        return (), CommandResult(image.offset)
    return (feature_record(command.name, command.level),), CommandResult(offset)


def allocate_producer_ids(
    image: MetadataImage, command: records_pb2.AllocateProducerIdsCommand, offset: int
) -> Accepted:
    """Give a broker a block of producer ids that nobody else ever gets (KIP-730)."""
    find_broker(image, command.broker_id, command.broker_epoch)
    first = image.next_producer_id
    if first > MAX_INT64 - PRODUCER_IDS_PER_BLOCK:
        raise InvalidRequestError("all producer ids are used up")
    result = CommandResult(offset, first_producer_id=first, producer_ids=PRODUCER_IDS_PER_BLOCK)
    return (producer_ids_record(first + PRODUCER_IDS_PER_BLOCK),), result
