"""What the admin clients say of transactions, staged batches and producers: plain named tuples."""

from __future__ import annotations

from typing import NamedTuple

from raftlog._group_descriptions import partitions_of
from raftlog.types import TopicPartition
from raftlog.v1 import transaction_pb2

_PREFIX = "transaction_"

STATE_NUMBERS = {
    name.lower().removeprefix(_PREFIX): number
    for name, number in transaction_pb2.TransactionState.items()
    if number != transaction_pb2.TRANSACTION_STATE_UNKNOWN
}
"""The states of a transaction: empty, ongoing, prepare_commit, prepare_abort, complete_commit, complete_abort."""

ONGOING = "ongoing"
OPEN_STATES = (ONGOING, "prepare_commit", "prepare_abort")
"""In these, partitions still have something to be told."""


MAX_TRANSACTION_TIMEOUT_MS = 15 * 60 * 1000
"""transaction.max.timeout.ms of servers that are not told otherwise: no transaction is meant to be open for longer."""


class TransactionListing(NamedTuple):
    """A transactional id, or with `sink_id` and an empty transactional id a stage of that sink.

    `state`: empty, ongoing, prepare_commit, prepare_abort, complete_commit or complete_abort. `started_ms`: Unix time,
    0: none is open. `coordinator_id`: a broker.
    """

    transactional_id: str
    sink_id: str
    producer_id: int
    state: str
    started_ms: int
    coordinator_id: int


class TransactionDescription(NamedTuple):
    """A transactional id and its last transaction.

    `producer_epoch`: that of the transaction, or of the next one once it is decided. `partitions` and `group_ids`:
    what it has written to, and whose offsets it is to commit. `pending`: once it is decided, who is still to be told.
    `state_partition`: where in __transaction_state it is kept; the leader of that, `coordinator_id`, coordinates it.
    `started_ms` 0: none is open.
    """

    transactional_id: str
    state: str
    producer_id: int
    producer_epoch: int
    timeout_ms: int
    started_ms: int
    updated_ms: int
    partitions: list[TopicPartition]
    group_ids: list[str]
    pending: list[TopicPartition]
    coordinator_id: int
    state_partition: int


class SinkListing(NamedTuple):
    """A sink of staged batches. `last_batch_id`: that it has committed last, -1: none; `updated_ms`: when."""

    sink_id: str
    target: str
    last_batch_id: int
    updated_ms: int
    open_stages: int
    coordinator_id: int


class StageDescription(NamedTuple):
    """A stage that stands: what one attempt of a writer has staged, under the name of its producer id.

    `state`: ongoing, or prepare_... while partitions are told. `attempt`: what the writer calls itself.
    """

    producer_id: int
    batch_id: int
    state: str
    started_ms: int
    timeout_ms: int
    attempt: str
    partitions: list[TopicPartition]


class SinkDescription(NamedTuple):
    """A sink of staged batches, and its stages that stand, by id. `last_batch_id`: -1: it has committed nothing."""

    sink_id: str
    target: str
    last_batch_id: int
    updated_ms: int
    stages: list[StageDescription]


class ProducerState(NamedTuple):
    """What a partition knows of a producer.

    `last_sequence`: of its last record in this epoch, -1: it has none. `transaction_start_offset`: where the
    transaction begins that it has open here, None: it has none; `transaction_started_ms`: when that was appended.
    """

    producer_id: int
    producer_epoch: int
    last_sequence: int
    last_append_ms: int
    transaction_start_offset: int | None
    transaction_started_ms: int | None


class PartitionProducers(NamedTuple):
    """The producers that a partition knows, by id. Committed readers get what is below `last_stable_offset`."""

    last_stable_offset: int
    high_watermark: int
    producers: list[ProducerState]


class HangingTransaction(NamedTuple):
    """A transaction that is open in a partition, and of which no coordinator knows: nothing will ever end it.

    `started_ms`: when its first record was appended there, at `start_offset`.
    """

    topic: str
    partition: int
    producer_id: int
    producer_epoch: int
    start_offset: int
    started_ms: int
    last_append_ms: int


def state_name(state: transaction_pb2.TransactionState.ValueType) -> str:
    """Return a state's name in lower case; `unknown` for one from a later version."""
    names: dict[int, str] = {number: name for name, number in transaction_pb2.TransactionState.items()}
    return names.get(state, "unknown").lower().removeprefix(_PREFIX).removeprefix("state_")


def describe_transaction(found: transaction_pb2.TransactionDescription) -> TransactionDescription:
    """Return a transaction as users see it."""
    return TransactionDescription(
        found.transactional_id,
        state_name(found.state),
        found.producer_id,
        found.producer_epoch,
        found.timeout_ms,
        found.started_ms,
        found.updated_ms,
        partitions_of(found.partitions),
        sorted(found.group_ids),
        partitions_of(found.pending),
        found.coordinator_id,
        found.state_partition,
    )


def describe_sink(sink_id: str, found: transaction_pb2.LastBatchResponse) -> SinkDescription:
    """Return a sink as users see it."""
    stages = [
        StageDescription(
            stage.producer_id,
            stage.batch_id,
            state_name(stage.state),
            stage.started_ms,
            stage.timeout_ms,
            stage.attempt,
            partitions_of(stage.partitions),
        )
        for stage in found.stages
    ]
    return SinkDescription(sink_id, found.target, found.last_batch_id, found.updated_ms, sorted(stages))


def describe_producers(found: transaction_pb2.PartitionProducers) -> PartitionProducers:
    """Return a partition's producers as users see them."""
    producers = [
        ProducerState(
            each.producer_id,
            each.producer_epoch,
            each.last_sequence,
            each.last_append_ms,
            each.transaction_start_offset if each.transaction_start_offset >= 0 else None,
            each.transaction_started_ms or None,
        )
        for each in found.producers
    ]
    return PartitionProducers(found.last_stable_offset, found.high_watermark, sorted(producers))
