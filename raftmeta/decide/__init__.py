"""Decisions on commands: pure, so that every controller decides alike.

A command carries everything that is not in the image: the proposer's clock, chosen ids, and the controller epoch in
which it was proposed. A decision changes nothing; `raftmeta.replay` applies its records.

brokers.py      controllers and brokers: registration, fencing, shutdown, draining, features, producer ids
topics.py       topics, their partitions and configs
leadership.py   ISRs, leaders, reassignments
security.py     users, ACLs, roles and quotas
outcome.py      what a decision returns
"""

from __future__ import annotations

from typing import assert_never

from raftlog.errors import FencedController, InvalidRequestError, RaftlogError
from raftlog.v1.records_pb2 import MetadataCommand
from raftmeta.decide.brokers import (
    PRODUCER_IDS_PER_BLOCK,
    allocate_producer_ids,
    alter_broker,
    begin_shutdown,
    claim_controller,
    fence_broker,
    register_broker,
    unfence_broker,
    unregister_broker,
    update_feature,
)
from raftmeta.decide.leadership import (
    MAX_ALTERATIONS_PER_COMMAND,
    MAX_PARTITIONS_PER_COMMAND,
    alter_partition,
    alter_partitions,
    alter_reassignments,
    elect_leaders,
    offline_replicas,
    revoke_leaders,
)
from raftmeta.decide.outcome import Accepted, CommandResult, Decision, outcome_from_wire, outcome_to_wire
from raftmeta.decide.security import alter_acls, alter_quotas, alter_roles, alter_users
from raftmeta.decide.topics import (
    FIRST_LEADER_EPOCH,
    MAX_PARTITIONS_PER_TOPIC,
    MAX_TOPIC_NAME_CHARACTERS,
    alter_configs,
    check_topic_name,
    create_partitions,
    create_topic,
    delete_topic,
)
from raftmeta.image import MetadataImage

__all__ = [
    "FIRST_LEADER_EPOCH",
    "MAX_ALTERATIONS_PER_COMMAND",
    "MAX_PARTITIONS_PER_COMMAND",
    "MAX_PARTITIONS_PER_TOPIC",
    "MAX_TOPIC_NAME_CHARACTERS",
    "PRODUCER_IDS_PER_BLOCK",
    "CommandResult",
    "Decision",
    "check_topic_name",
    "decide",
    "outcome_from_wire",
    "outcome_to_wire",
]


def decide(image: MetadataImage, command: MetadataCommand, offset: int | None = None) -> Decision:
    """Decide on a command that is committed at `offset`; never raises for what a command says.

    Without an offset it is the one after the image's.
    """
    if offset is None:
        offset = image.offset + 1
    assert offset > image.offset, f"metadata goes forward: {offset} after {image.offset}"
    try:
        records, result = _decide(image, command, offset)
    except RaftlogError as error:
        # Outcomes are kept for retries, and a traceback would keep the image of its time with them.
        return Decision((), error.with_traceback(None))
    return Decision(records, result)


def _decide(image: MetadataImage, command: MetadataCommand, offset: int) -> Accepted:
    kind = command.WhichOneof("command")
    if kind != "claim_controller" and command.controller_epoch != image.controller_epoch:
        raise FencedController(
            f"controller epoch {command.controller_epoch} is not the cluster's, which is {image.controller_epoch} "
            f"of controller {image.controller_id}; send the request to the active controller"
        )
    match kind:
        case "alter_partition":
            return alter_partition(image, command.alter_partition, offset)
        case "alter_partitions":
            return alter_partitions(image, command.alter_partitions, offset)
        case "offline_replicas":
            return offline_replicas(image, command.offline_replicas, offset)
        case "elect_leaders":
            return elect_leaders(image, command.elect_leaders, offset)
        case "revoke_leaders":
            return revoke_leaders(image, command.revoke_leaders, offset)
        case "alter_reassignments":
            return alter_reassignments(image, command.alter_reassignments, offset)
        case "register_broker":
            return register_broker(image, command.register_broker, offset)
        case "fence_broker":
            return fence_broker(image, command.fence_broker, offset)
        case "unfence_broker":
            return unfence_broker(image, command.unfence_broker, offset)
        case "begin_shutdown":
            return begin_shutdown(image, command.begin_shutdown, offset)
        case "unregister_broker":
            return unregister_broker(image, command.unregister_broker, offset)
        case "alter_broker":
            return alter_broker(image, command.alter_broker, offset)
        case "create_topic":
            return create_topic(image, command.create_topic, offset)
        case "delete_topic":
            return delete_topic(image, command.delete_topic, offset)
        case "create_partitions":
            return create_partitions(image, command.create_partitions, offset)
        case "alter_configs":
            return alter_configs(image, command.alter_configs, offset)
        case "allocate_producer_ids":
            return allocate_producer_ids(image, command.allocate_producer_ids, offset)
        case "alter_users":
            return alter_users(image, command.alter_users, offset)
        case "alter_acls":
            return alter_acls(image, command.alter_acls, offset)
        case "alter_quotas":
            return alter_quotas(image, command.alter_quotas, offset)
        case "alter_roles":
            return alter_roles(image, command.alter_roles, offset)
        case "claim_controller":
            return claim_controller(image, command.claim_controller, command.controller_epoch, offset)
        case "update_feature":
            return update_feature(image, command.update_feature, offset)
        case "state_digest":
            return (), CommandResult(image.offset)  # what it is for happens where it is applied
        case None:
            raise InvalidRequestError("the command is empty, or of a kind that this version does not know")
        case _:
            assert_never(kind)
