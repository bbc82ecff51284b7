"""What deciding comes to: records and an answer, and how the answer travels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from raftlog.errors import RaftlogError, from_wire, to_wire
from raftlog.v1 import common_pb2
from raftlog.v1.common_pb2 import Error
from raftlog.v1.records_pb2 import AlterationOutcome, CommandOutcome, MetadataRecord, PartitionRecord

MAX_ERROR_CHARACTERS: Final = 500
"""Of an error's text that travels and rests; what it names may come from outside."""
MAX_ALTERATION_ERROR_CHARACTERS: Final = 200
"""The same for one of the many alterations in a command."""

MAX_NAME_SHOWN: Final = 249
"""Characters of a name from outside that an error repeats: those of the longest topic name."""


def shown(name: str) -> str:
    """Return a name as errors show it."""
    return repr(name[:MAX_NAME_SHOWN]) + ("…" if len(name) > MAX_NAME_SHOWN else "")


@dataclass(frozen=True, slots=True)
class CommandResult:
    """What the proposer learns. `offset`: the metadata offset at which the command is in effect.

    A command that had nothing to change (validate_only, a repeated registration) is in effect already.
    `producer_ids` is how many ids the proposer owns from `first_producer_id` on. `partitions` are those that the
    command changed or, for AlterPartition, the one that it asked about; each as it is now. `alterations` are the
    outcomes of the alterations of AlterPartitions, in the command's order.
    """

    offset: int
    topic_id: bytes = b""
    broker_epoch: int = -1
    first_producer_id: int = 0
    producer_ids: int = 0
    partitions: tuple[PartitionRecord, ...] = ()
    alterations: tuple[AlterationOutcome, ...] = ()


@dataclass(frozen=True, slots=True)
class Decision:
    """Records to commit, and the answer; a refusal has no records."""

    records: tuple[MetadataRecord, ...]
    outcome: CommandResult | RaftlogError


Accepted = tuple[tuple[MetadataRecord, ...], CommandResult]
"""What deciding on one kind of command returns; a refusal is raised."""


def outcome_to_wire(outcome: CommandResult | RaftlogError) -> CommandOutcome:
    """Return the outcome as it travels and rests."""
    if isinstance(outcome, RaftlogError):
        return CommandOutcome(error=bounded_error(outcome, MAX_ERROR_CHARACTERS))
    return CommandOutcome(
        offset=outcome.offset,
        topic_id=outcome.topic_id,
        broker_epoch=outcome.broker_epoch,
        first_producer_id=outcome.first_producer_id,
        producer_ids=outcome.producer_ids,
        partitions=outcome.partitions,
        alterations=outcome.alterations,
    )


def bounded_error(error: RaftlogError, max_characters: int) -> Error:
    """Return an error as it travels and rests, with a text of at most so many characters."""
    wire = to_wire(error)
    if len(wire.message) > max_characters:
        wire.message = wire.message[: max_characters - 1] + "…"
    return wire


def outcome_from_wire(wire: CommandOutcome) -> CommandResult | RaftlogError:
    """Return the outcome that travelled as `wire`."""
    if wire.error.code != common_pb2.NONE:
        return from_wire(wire.error)
    return CommandResult(
        offset=wire.offset,
        topic_id=wire.topic_id,
        broker_epoch=wire.broker_epoch,
        first_producer_id=wire.first_producer_id,
        producer_ids=wire.producer_ids,
        partitions=tuple(wire.partitions),
        alterations=tuple(wire.alterations),
    )
