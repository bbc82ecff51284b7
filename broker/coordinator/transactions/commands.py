"""The commands to a coordinator of transactions, and its configuration.

`to` is a token of the frame, one for each call; the core gives it back in `Send`, once. A command is answered with the
message named, or with a RaftlogError as the error of all; the frame makes that the response's `error`.

What the coordinator of transactions is configured with; Kafka's keys where Kafka has them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from broker.coordinator.core import Decision, Notice, Now, Send
from broker.coordinator.groups.topics import TopicPartition
from raftlog.errors import RaftlogError
from raftlog.v1 import transaction_pb2
from raftmeta.producer_ids import ProducerIdKey


@dataclass(frozen=True, slots=True)
class TransactionConfig:
    """`max_timeout_ms`: transaction.max.timeout.ms. `id_expiration_ms`: transactional.id.expiration.ms.

    `sink_expiration_ms`: how long a sink's last batch is remembered after it, at least.
    """

    max_timeout_ms: int = 900_000
    id_expiration_ms: int = 7 * 24 * 60 * 60 * 1000
    sink_expiration_ms: int = 365 * 24 * 60 * 60 * 1000
    expiration_check_interval_ms: int = 60 * 60 * 1000
    """Interval of the check for ids and sinks that were idle too long."""
    answer_within_ms: int = 1000
    """After this time EndTransaction is answered even if markers are still missing."""
    complete_after_ms: int = 5
    """How long the record that all markers are written may wait for others, so that they share an append."""

    def __post_init__(self) -> None:
        assert self.max_timeout_ms > 0
        assert self.id_expiration_ms > 0
        assert self.sink_expiration_ms > 0
        assert self.expiration_check_interval_ms > 0
        assert 0 <= self.complete_after_ms < self.answer_within_ms


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
    """The command needs a new producer id; submit it again with one. Never crosses the wire."""


# Producers with a transactional id


@dataclass(frozen=True, slots=True)
class InitProducer:
    """Answered with InitProducerIdResponse, or with NeedsProducerId where `new_producer_id` is None and one is needed.

    The request has a transactional id: one without is no coordinator's business. `key`: a producer id that is not bound
    to the transactional id is replaced; None: ids are not bound yet. `user`: for which a new id counts; "": for none.
    """

    to: object
    request: transaction_pb2.InitProducerIdRequest
    new_producer_id: int | None = None
    key: ProducerIdKey | None = None
    user: str = ""


@dataclass(frozen=True, slots=True)
class AddTo:
    """Answered with AddToTransactionResponse.

    The frame has checked that it knows the topics, here and in stages: one that it does not know later was deleted.
    `user`: for which groups count if the transactional id has no user; "": for none.
    """

    to: object
    request: transaction_pb2.AddToTransactionRequest
    user: str = ""


@dataclass(frozen=True, slots=True)
class End:
    """Answered with EndTransactionResponse when all markers are written, or `answer_within_ms` later."""

    to: object
    request: transaction_pb2.EndTransactionRequest


@dataclass(frozen=True, slots=True)
class Verify:
    """Answered with VerifyTransactionResponse: what is named is going to have this transaction's marker (KIP-890)."""

    to: object
    request: transaction_pb2.VerifyTransactionRequest


# Sinks and their stages


@dataclass(frozen=True, slots=True)
class InitStage:
    """Answered with InitStageResponse (an error of BATCH_ALREADY_COMMITTED inside), or with NeedsProducerId.

    `user`, of this and of other commands about sinks: for which a new sink counts; "": for none.
    """

    to: object
    request: transaction_pb2.InitStageRequest
    new_producer_id: int | None = None
    user: str = ""


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
    user: str = ""


@dataclass(frozen=True, slots=True)
class CommitBatch:
    """Answered with CommitBatchResponse when all markers are written, or `answer_within_ms` later."""

    to: object
    request: transaction_pb2.CommitBatchRequest
    user: str = ""


@dataclass(frozen=True, slots=True)
class LastBatch:
    """Answered with LastBatchResponse."""

    to: object
    request: transaction_pb2.LastBatchRequest


# Tools


@dataclass(frozen=True, slots=True)
class List:
    """Answered with ListTransactionsResponse: the ids of this shard, in order; the frame sets `loading`."""

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
    """Sent to the token that the coordinator was made with: a decision is committed, and its markers must be written.

    The receiver sends them to every partition and group, again and again, until each has its marker or was deleted with
    its topic. Then the same object comes back in `MarkersWritten`; at once if there are no targets. Each coordinator
    that has loaded the decision sends this once. The frame adds the coordinator's epoch: its leader epoch.

    Owner: `transactional_id`, or else `sink_id`. `producer_epoch` is the epoch of the markers. `user`: the one
    that made the owner; markers under way are limited for each user. "": the owner was made without a login.
    """

    transactional_id: str
    sink_id: str
    producer_id: int
    producer_epoch: int
    commit: bool
    partitions: frozenset[TopicPartition]
    group_ids: frozenset[str] = frozenset()
    user: str = ""


@dataclass(frozen=True, slots=True)
class MarkersWritten:
    """Every partition and group has the markers, or was deleted. No answer; may come repeatedly, and late."""

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
