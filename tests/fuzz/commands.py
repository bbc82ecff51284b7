"""Commands to the metadata, and the records of coordinators: every replica makes the same of them, or refuses alike."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache
from typing import Final

from google.protobuf.message import DecodeError, Message

from broker.coordinator.core import decode, encode
from broker.coordinator.groups.assignors import BUILT_IN
from broker.coordinator.groups.commands import GroupConfig
from broker.coordinator.groups.coordinator import GroupCoordinator
from broker.coordinator.transactions.state import HardState
from raftlog.errors import RaftlogError
from raftlog.v1 import group_records_pb2 as group_records
from raftlog.v1 import transaction_records_pb2 as transaction_records
from raftlog.v1.records_pb2 import MetadataCommand
from raftmeta.quorum.service import check_command
from raftmeta.raft.consensus import RaftOptions
from raftmeta.state import Applied, MetadataState
from tests.fuzz.batches import checked_again, with_fields_changed
from tests.fuzz.choices import Choices, mutate
from tests.fuzz.messages import Known, encoded, message_of
from tests.fuzz.oracle import refusals, require
from tests.support.group_driver import Topics, topic_id
from tests.support.metadata import claim, create_topic, register, unfence, uuid_of

Replay = Callable[[bytes, bytes | None], None]

_KNOWN: Final = Known(
    fields={
        "broker_id": (1, 2, 3, 9, -1), "controller_epoch": (1,), "broker_epoch": (3, 5, 7, 4),
        "leader_epoch": (0, 1), "partition_epoch": (0, 1), "partition": (0, 1, -1), "replication_factor": (1, 2, -1),
        "partitions": (1, 2, 0, -1), "topic": ("a", "b"), "name": ("a", "b", "c", "raftlog.version"),
        "client_id": (b"", uuid_of(77)), "sequence": (1, 2, 3), "key": ("retention.ms", "cleanup.policy"),
        "configs": ("retention.ms",), "resource_name": ("a", "1", ""), "replicas": (1, 2, 3),
    },
    texts=("a", "b", "", "127.0.0.1", "retention.ms", "5"),
    blobs=(uuid_of(1), uuid_of(2), uuid_of(1001), b""),
    numbers=(0, 1, 2, 3, -1),
)  # fmt: skip


def _ready() -> MetadataState:
    state = MetadataState()
    state.begin_term(1, 1)
    first = [claim(), register(1), unfence(1, 3), register(2, 2), unfence(2, 5), register(3, 3), unfence(3, 7)]
    for command in [*first, create_topic("a", 1, 2, 2), create_topic("b", 2, 1, 3)]:
        state.apply(state.last_applied + 1, 1, command.SerializeToString())
    return state


@cache
def _start() -> bytes:
    state = _ready()
    return state.encode(state.capture())


def _states() -> list[MetadataState]:
    """Return two replicas: by the commands, and from a snapshot; kept answers and all."""
    live, restored = _ready(), MetadataState()
    restored.restore(_start(), live.last_applied, 1)
    return [live, restored]


def metadata_target(data: bytes) -> None:
    """Metadata commands out of a log: two replicas agree on them to the last byte, and neither breaks."""
    choices = Choices(data)
    states = _states()
    for _ in range(1 + choices.below(4)):
        command = message_of(MetadataCommand, choices, _KNOWN)
        if choices.byte() % 8 != 7:
            command.controller_epoch = 1
        content = encoded(command, choices)
        if len(content) > RaftOptions().max_command_bytes:
            return
        with refusals(DecodeError):
            check_command(MetadataCommand.FromString(content))
        outcomes: list[Applied | str] = []
        for state in states:
            try:
                outcomes.append(state.apply(state.last_applied + 1, 1, content))
            except RaftlogError as error:
                outcomes.append(f"{type(error).__name__}: {error}")
        if any(isinstance(outcome, str) and "its digest" in outcome for outcome in outcomes):
            return  # by the leader's word one of them is wrong; it is the one that has a digest to compare
        _check_alike(outcomes)
        if isinstance(outcomes[0], str):
            return  # the node has stopped
    written = {state.encode(state.capture()) for state in states}
    require(len(written) == 1, "the same commands gave different images on two replicas")
    MetadataState().restore(written.pop(), states[0].last_applied, 1)


def _check_alike(outcomes: list[Applied | str]) -> None:
    one, other = outcomes
    if isinstance(one, str) or isinstance(other, str):
        require(one == other, f"the same command gave {one} on one replica and {other} on another")
        return
    require(
        type(one.outcome) is type(other.outcome),
        f"the same command gave {one.outcome!r} on one replica and {other.outcome!r} on another",
    )
    require((one.change is None) == (other.change is None), "the same command changed only one of two replicas")


_GROUPS: Final = Known(
    fields={"group_id": ("g",), "member_id": ("m",), "partition": (0, 1), "topic": ("t",), "target_of": ("m",)},
    texts=("g", "m", "t", ""),
    blobs=(topic_id("t"), b""),
)
_TRANSACTIONS: Final = Known(
    fields={"transactional_id": ("x",), "sink_id": ("s",), "producer_id": (1, 2), "producer_epoch": (0, 1, 32_767)},
    texts=("x", "s", "g", ""),
    blobs=(topic_id("t"), b""),
)
_GROUP_VALUES: Final = (
    group_records.GroupValue, group_records.MemberValue, group_records.TargetValue, group_records.AssignmentValue,
    group_records.OffsetValue, group_records.ProducerFenceValue,
)  # fmt: skip
_TRANSACTION_VALUES: Final = (
    transaction_records.TransactionValue, transaction_records.SinkValue, transaction_records.StageValue,
)  # fmt: skip


def group_target(data: bytes) -> None:
    """Records of __consumer_offsets, read back at the start of a term."""
    _load(Choices(data), group_records.GroupRecordKey, _GROUP_VALUES, _GROUPS, _group_replay())


def transaction_target(data: bytes) -> None:
    """Records of __transaction_state, read back at the start of a term."""
    state = HardState()
    _load(Choices(data), transaction_records.TransactionRecordKey, _TRANSACTION_VALUES, _TRANSACTIONS, state.replay)
    for owner in state.open:
        require(owner is not None, "an open transaction has no owner")


def _group_replay() -> Replay:
    return GroupCoordinator(GroupConfig(), Topics({"t": 2}), {name: BUILT_IN[name] for name in BUILT_IN}).replay


def _load(
    choices: Choices, key_type: type[Message], value_types: Sequence[type[Message]], known: Known, replay: Replay
) -> None:
    records: list[tuple[bytes, bytes | None]] = []
    for _ in range(1 + choices.below(6)):
        key = encoded(message_of(key_type, choices, known), choices)
        value = encoded(message_of(choices.pick(value_types), choices, known), choices)
        records.append((key, None if choices.one_in(5) else value))
    batch, _ = encode(records, 1_000)
    if choices.one_in(4):
        batch = checked_again(with_fields_changed(mutate(batch, choices), choices))
    logging.disable(logging.CRITICAL)
    try:
        with refusals():
            for _, read_key, read_value in decode(batch):
                replay(read_key, read_value)
    finally:
        logging.disable(logging.NOTSET)
