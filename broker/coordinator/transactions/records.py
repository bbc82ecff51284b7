"""Records of __transaction_state (raftlog/v1/transaction_records.proto): written and read.

Keys are serialized deterministically, since compaction compares their bytes. Names of users are kept once (`intern`):
thousands of ids have the same.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

from google.protobuf.message import DecodeError

from broker.coordinator.core import Record
from broker.coordinator.groups.records import check_topic_id, checked_partition, record, topic_partitions
from broker.coordinator.groups.topics import TopicPartition
from broker.coordinator.transactions.transaction import (
    MAX_EPOCH,
    NONE,
    Fence,
    Former,
    SinkHead,
    Stage,
    State,
    Transaction,
)
from raftlog.errors import CorruptRecordError
from raftlog.v1 import group_pb2, transaction_pb2
from raftlog.v1.transaction_records_pb2 import (
    FencedAttempts,
    FormerProducer,
    SinkValue,
    StageKey,
    StageValue,
    TransactionRecordKey,
    TransactionValue,
)


def wire_state(state: State) -> transaction_pb2.TransactionState.ValueType:
    """Return a state as messages have it."""
    return transaction_pb2.TransactionState.ValueType(state.value)


def partition_messages(partitions: Iterable[TopicPartition]) -> list[group_pb2.TopicPartitions]:
    """Return partitions as messages, by topic id; names are the frame's."""
    return topic_partitions(partitions, {})


def read_partitions(topics: Iterable[group_pb2.TopicPartitions]) -> frozenset[TopicPartition]:
    """Return the partitions of messages.

    Raises:
        ValueError: a topic id has not 16 bytes, or a partition is negative.
    """
    found: set[TopicPartition] = set()
    for topic in topics:
        check_topic_id(topic.topic_id)
        found.update(checked_partition(topic.topic_id, number) for number in topic.partitions)
    return frozenset(found)


# Written


def transaction_record(transactional_id: str, transaction: Transaction | None) -> Record:
    """What is known of a transactional id."""
    key = TransactionRecordKey(transactional_id=transactional_id)
    if transaction is None:
        return record(key, None)
    former = transaction.former
    return record(
        key,
        TransactionValue(
            producer_id=transaction.producer_id,
            producer_epoch=transaction.producer_epoch,
            state=wire_state(transaction.state),
            timeout_ms=transaction.timeout_ms,
            started_ms=transaction.started_ms,
            updated_ms=transaction.updated_ms,
            partitions=partition_messages(transaction.partitions),
            group_ids=sorted(transaction.group_ids),
            client_epoch=transaction.client_epoch,
            timed_out=transaction.timed_out,
            former=None if former is None else FormerProducer(producer_id=former[0], producer_epoch=former[1]),
            session_epoch_plus_1=transaction.session_epoch + 1,
            user=transaction.user,
        ),
    )


def sink_record(sink_id: str, head: SinkHead | None) -> Record:
    """The sink's last batch: the decision on all its stages up to that one."""
    key = TransactionRecordKey(sink_id=sink_id)
    if head is None:
        return record(key, None)
    return record(
        key,
        SinkValue(
            last_batch_id=head.last_batch_id,
            target=head.target,
            updated_ms=head.updated_ms,
            committing=sorted(head.committing),
            expire_after_ms=head.expire_after_ms,
            fenced=[FencedAttempts(batch_id=fence.batch_id, attempts=fence.attempts) for fence in head.fences],
            user=head.user,
        ),
    )


def stage_record(sink_id: str, producer_id: int, stage: Stage | None) -> Record:
    """One stage."""
    key = TransactionRecordKey(stage=StageKey(sink_id=sink_id, producer_id=producer_id))
    if stage is None:
        return record(key, None)
    return record(
        key,
        StageValue(
            batch_id=stage.batch_id,
            producer_epoch=stage.producer_epoch,
            started_ms=stage.started_ms,
            timeout_ms=stage.timeout_ms,
            attempt=stage.attempt,
            partitions=partition_messages(stage.partitions),
            aborting=stage.aborting,
        ),
    )


# Read


def parse_key(key: bytes) -> TransactionRecordKey:
    """Return a record's key.

    Raises:
        CorruptRecordError: the bytes are no key, or of no kind that this version knows.
    """
    parsed = TransactionRecordKey()
    try:
        parsed.ParseFromString(key)
    except DecodeError as error:
        raise CorruptRecordError(f"a key of {len(key)} bytes is no key of a transaction's record: {error}") from error
    kind = parsed.WhichOneof("kind")
    if kind is None:
        raise CorruptRecordError(
            f"a key of {len(key)} bytes is of no kind that this version knows; was it written by a newer one?"
        )
    if not (parsed.transactional_id or parsed.sink_id or parsed.stage.sink_id):
        raise CorruptRecordError(f"a key of kind {kind} names nothing")
    return parsed


def parse_transaction(transactional_id: str, value: bytes) -> Transaction:
    """Return what is known of a transactional id.

    Raises:
        CorruptRecordError: the value is not one of a transaction.
    """
    try:
        parsed = TransactionValue.FromString(value)
        _check(parsed.producer_id >= 0, f"producer id {parsed.producer_id}")
        _check(0 <= parsed.producer_epoch <= MAX_EPOCH + 1, f"producer epoch {parsed.producer_epoch}")
        _check(NONE <= parsed.client_epoch <= MAX_EPOCH, f"client epoch {parsed.client_epoch}")
        _check(0 <= parsed.session_epoch_plus_1 <= MAX_EPOCH + 1, f"session epoch {parsed.session_epoch_plus_1 - 1}")
        transaction = Transaction(
            producer_id=parsed.producer_id,
            producer_epoch=parsed.producer_epoch,
            state=State(parsed.state),
            timeout_ms=parsed.timeout_ms,
            updated_ms=parsed.updated_ms,
            started_ms=parsed.started_ms,
            partitions=read_partitions(parsed.partitions),
            group_ids=frozenset(parsed.group_ids),
            client_epoch=parsed.client_epoch,
            timed_out=parsed.timed_out,
            former=Former(parsed.former.producer_id, parsed.former.producer_epoch)
            if parsed.HasField("former")
            else None,
            session_epoch=parsed.session_epoch_plus_1 - 1,
            user=sys.intern(parsed.user),
        )
        _check(not (transaction.is_idle and (transaction.partitions or transaction.group_ids)), "partitions of none")
    except (DecodeError, ValueError) as error:
        raise CorruptRecordError(f"transactional id {transactional_id!r}: {error}") from error
    return transaction


def parse_sink(sink_id: str, value: bytes) -> SinkHead:
    """Return a sink's last batch.

    Raises:
        CorruptRecordError: the value is not one of a sink.
    """
    try:
        parsed = SinkValue.FromString(value)
        _check(parsed.last_batch_id >= NONE, f"batch {parsed.last_batch_id}")
    except (DecodeError, ValueError) as error:
        raise CorruptRecordError(f"sink {sink_id!r}: {error}") from error
    committing = frozenset(parsed.committing)
    fences = tuple(Fence(each.batch_id, each.attempts) for each in parsed.fenced)
    return SinkHead(
        parsed.last_batch_id,
        parsed.target,
        parsed.updated_ms,
        committing,
        parsed.expire_after_ms,
        fences,
        sys.intern(parsed.user),
    )


def parse_stage(key: StageKey, value: bytes) -> Stage:
    """Return a stage.

    Raises:
        CorruptRecordError: the value is not one of a stage.
    """
    try:
        parsed = StageValue.FromString(value)
        _check(parsed.batch_id >= 0, f"batch {parsed.batch_id}")
        _check(0 <= parsed.producer_epoch <= MAX_EPOCH, f"producer epoch {parsed.producer_epoch}")
        return Stage(
            batch_id=parsed.batch_id,
            started_ms=parsed.started_ms,
            timeout_ms=parsed.timeout_ms,
            attempt=parsed.attempt,
            partitions=read_partitions(parsed.partitions),
            aborting=parsed.aborting,
            producer_epoch=parsed.producer_epoch,
        )
    except (DecodeError, ValueError) as error:
        raise CorruptRecordError(f"stage {key.producer_id} of the sink {key.sink_id!r}: {error}") from error


def _check(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(f"there is no {what}")
