"""What the coordinator of transactions is asked, and what comes of it.

`to` is a token of the frame, one for each call; the core gives it back in `Send`, once. A command is answered with the
message named, or with a RaftlogError as the error of all; the frame makes that the response's `error`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from broker.coordinator.core import Decision, Notice, Now, Send
from broker.groups.topics import TopicPartition
from raftlog.errors import RaftlogError
from raftlog.v1 import transaction_pb2

__all__ = [
    "Abort",
    "AbortStages",
    "AddTo",
    "AddToStage",
    "Command",
    "CommitBatch",
    "Decision",
    "Describe",
    "End",
    "InitProducer",
    "InitStage",
    "LastBatch",
    "List",
    "MarkersWritten",
    "NeedsProducerId",
    "Now",
    "PendingMarkers",
    "Send",
    "Verify",
]


class NeedsProducerId(RaftlogError):
    """The command needs a producer id that nobody has had; submit it again with one. Never travels."""


# Producers with a transactional id


@dataclass(frozen=True, slots=True)
class InitProducer:
    """Answered with InitProducerIdResponse, or with NeedsProducerId where `new_producer_id` is None and one is needed.

    The request has a transactional id: one without is no coordinator's business.
    """

    to: object
    request: transaction_pb2.InitProducerIdRequest
    new_producer_id: int | None = None


@dataclass(frozen=True, slots=True)
class AddTo:
    """Answered with AddToTransactionResponse.

    The frame has checked that it knows the topics, here and in stages: one that it does not know later was deleted.
    """

    to: object
    request: transaction_pb2.AddToTransactionRequest


@dataclass(frozen=True, slots=True)
class End:
    """Answered with EndTransactionResponse when all markers are written, or `answer_within_ms` later."""

    to: object
    request: transaction_pb2.EndTransactionRequest


@dataclass(frozen=True, slots=True)
class Verify:
    """Answered with VerifyTransactionResponse: the group is going to have this transaction's marker (KIP-890)."""

    to: object
    request: transaction_pb2.VerifyTransactionRequest


# Sinks and their stages


@dataclass(frozen=True, slots=True)
class InitStage:
    """Answered with InitStageResponse (an error of BATCH_ALREADY_COMMITTED inside), or with NeedsProducerId."""

    to: object
    request: transaction_pb2.InitStageRequest
    new_producer_id: int | None = None


@dataclass(frozen=True, slots=True)
class AddToStage:
    """Answered with AddToStageResponse."""

    to: object
    request: transaction_pb2.AddToStageRequest


@dataclass(frozen=True, slots=True)
class AbortStages:
    """Answered with AbortStagesResponse as soon as that is decided."""

    to: object
    request: transaction_pb2.AbortStagesRequest


@dataclass(frozen=True, slots=True)
class CommitBatch:
    """Answered with CommitBatchResponse when all markers are written, or `answer_within_ms` later."""

    to: object
    request: transaction_pb2.CommitBatchRequest


@dataclass(frozen=True, slots=True)
class LastBatch:
    """Answered with LastBatchResponse."""

    to: object
    request: transaction_pb2.LastBatchRequest


# Tools


@dataclass(frozen=True, slots=True)
class List:
    """Answered with ListTransactionsResponse: what this shard has, by id; `loading` is the frame's."""

    to: object
    request: transaction_pb2.ListTransactionsRequest


@dataclass(frozen=True, slots=True)
class Describe:
    """Answered with TransactionDescription (its error inside).

    The frame adds coordinator_id, state_partition and the names of topics.
    """

    to: object
    transactional_id: str


@dataclass(frozen=True, slots=True)
class Abort:
    """Answered with AbortTransactionResponse when all markers are written, or `answer_within_ms` later."""

    to: object
    transactional_id: str


# Markers


@dataclass(frozen=True, slots=True)
class PendingMarkers(Notice):
    """Sent to the token that the coordinator was made with: a decision is committed, and has to be told.

    To every partition and group, as often as it takes, until each has it or is gone with its topic; then the same
    object comes back in `MarkersWritten`, at once where there is nobody to be told. Sent once by each coordinator that
    has loaded the decision. The frame adds the coordinator's epoch: its leader epoch.

    `transactional_id`, or else `sink_id`, says whose it is; `producer_epoch` is the one that the markers carry.
    """

    transactional_id: str
    sink_id: str
    producer_id: int
    producer_epoch: int
    commit: bool
    partitions: frozenset[TopicPartition]
    group_ids: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class MarkersWritten:
    """Every partition and group has the markers, or is gone. No answer; may come more than once, and late."""

    markers: PendingMarkers


Command: TypeAlias = (
    InitProducer
    | AddTo
    | End
    | Verify
    | InitStage
    | AddToStage
    | AbortStages
    | CommitBatch
    | LastBatch
    | List
    | Describe
    | Abort
    | MarkersWritten
)
