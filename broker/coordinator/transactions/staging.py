"""The requests of batch writers, applied to a sink. Functions without state.

Each takes the sink's state and returns the records that change it, or raises the error to answer.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass, replace

from broker.coordinator.core import Record
from broker.coordinator.transactions.checks import (
    MAX_ATTEMPT,
    MAX_PARTITIONS,
    MAX_STAGES,
    MAX_TARGET,
    check_batch_id,
    check_count,
    check_id,
    check_length,
    check_named,
    check_timeout,
    read_partitions,
)
from broker.coordinator.transactions.commands import InitStage, NeedsProducerId, TransactionConfig
from broker.coordinator.transactions.records import sink_record, stage_record
from broker.coordinator.transactions.transaction import NONE, Fence, Sink, SinkHead, Stage
from broker.coordinator.user_bound import NO_BOUND, UserBound
from raftlog.errors import BatchAlreadyCommitted, BrokerOverloaded, InvalidRequestError, SinkMismatch, StageExpired
from raftlog.v1 import transaction_pb2


def init_stage(
    sink: Sink, command: InitStage, config: TransactionConfig, now_ms: int, bound: UserBound = NO_BOUND
) -> list[Record]:
    """Begin a stage: the producer id is its name.

    Raises:
        InvalidRequestError, InvalidTransactionTimeout: it can never be.
        SinkMismatch: the sink writes somewhere else.
        BatchAlreadyCommitted: there is nothing left to write.
        StageExpired: its driver has given the attempt up.
        BrokerOverloaded: the sink has as many stages as it may have.
        PolicyViolation: the sink is unknown, and its user has made as many as it may.
        NeedsProducerId: none was given.
    """
    request = command.request
    check_id("sink id", sink.sink_id)
    check_batch_id(request.batch_id)
    check_length("the target", request.target, MAX_TARGET)
    check_length("the attempt", request.attempt, MAX_ATTEMPT)
    check_timeout(request.timeout_ms, config.max_timeout_ms)
    partitions = read_partitions(request.partitions)
    _check_target(sink, request.target)
    if request.batch_id <= sink.last_batch_id:
        raise BatchAlreadyCommitted(
            f"sink {sink.sink_id!r} has committed batch {sink.last_batch_id}: nothing is left to write of batch "
            f"{request.batch_id}"
        )
    if sink.head is not None and any(fence.stops(request.batch_id, request.attempt) for fence in sink.head.fences):
        raise StageExpired(
            f"batch {request.batch_id} of the sink {sink.sink_id!r} was given up by its driver: nothing more is staged "
            f"for it by {request.attempt!r}"
        )
    if len(sink.stages) >= MAX_STAGES:
        raise BrokerOverloaded(
            f"sink {sink.sink_id!r} has {len(sink.stages)} stages that are open or about to go; try again later"
        )
    if sink.is_gone:
        bound.check(sink.user)
    if command.new_producer_id is None:
        raise NeedsProducerId(f"a stage of the sink {sink.sink_id!r} needs a producer id")
    assert command.new_producer_id not in sink.stages, "the producer id is new"
    stage = Stage(request.batch_id, now_ms, request.timeout_ms, request.attempt, partitions)
    records = [stage_record(sink.sink_id, command.new_producer_id, stage)]
    if sink.target is None:
        fences = sink.head.fences if sink.head is not None else ()
        head = SinkHead(NONE, request.target, now_ms, fences=fences, user=sink.user)
        records.insert(0, sink_record(sink.sink_id, head))
    return records


def add_to_stage(sink: Sink, request: transaction_pb2.AddToStageRequest) -> list[Record]:
    """Add partitions to a stage.

    Raises:
        InvalidRequestError: it can never be.
        StageExpired: it is decided, or gone.
    """
    check_id("sink id", sink.sink_id)
    partitions = read_partitions(request.partitions)
    stage = sink.open_stage(request.producer_id)
    if stage is None:
        raise StageExpired(f"stage {request.producer_id} of the sink {sink.sink_id!r} is not open any more")
    if partitions <= stage.partitions:
        return []
    added = stage.partitions | partitions
    check_count("partitions", len(added), MAX_PARTITIONS)
    return [stage_record(sink.sink_id, request.producer_id, replace(stage, partitions=added))]


def abort_stages(sink: Sink, producer_ids: Iterable[int]) -> list[Record]:
    """Abort what is open of these; everything else is left as it is."""
    return [
        stage_record(sink.sink_id, producer_id, replace(stage, aborting=True))
        for producer_id in dict.fromkeys(producer_ids)
        if (stage := sink.open_stage(producer_id)) is not None
    ]


def fence(sink: Sink, request: transaction_pb2.AbortStagesRequest, now_ms: int) -> list[Record]:
    """Return the record by which the attempts that a request fences begin no stage; none where the batch is over."""
    if not request.fenced_attempts or request.batch_id <= sink.last_batch_id:
        return []
    head = sink.head or SinkHead(NONE, "", now_ms, user=sink.user)
    if sink.last_batch_id == NONE:
        head = replace(head, updated_ms=now_ms)
    return [sink_record(sink.sink_id, head.fenced(Fence(request.batch_id, request.fenced_attempts)))]


@dataclass(frozen=True, slots=True)
class BatchOutcome:
    """The result of a CommitBatch. `waits_for`: stages whose markers must be written before the answer."""

    answer: transaction_pb2.CommitBatchResponse
    records: list[Record]
    waits_for: list[int]


def commit_batch(
    sink: Sink, request: transaction_pb2.CommitBatchRequest, is_written: Container[int], now_ms: int
) -> BatchOutcome:
    """Decide a batch by one record: the named stages are committed, all others up to the batch are aborted.

    `is_written`: stages that have all their markers.

    Raises:
        InvalidRequestError: the request is invalid.
        SinkMismatch: the sink has another target.
        StageExpired: a named stage is not open, or belongs to another batch; nothing changes.
    """
    check_id("sink id", sink.sink_id)
    check_batch_id(request.batch_id)
    check_length("the target", request.target, MAX_TARGET)
    check_named("stages", len(request.producer_ids), MAX_STAGES)
    winners = frozenset(request.producer_ids)
    if len(winners) < len(request.producer_ids):
        raise InvalidRequestError("the request names a stage twice")
    _check_target(sink, request.target)
    if request.batch_id <= sink.last_batch_id:
        return _committed_before(sink, request.batch_id, winners, is_written)
    for producer_id in request.producer_ids:
        stage = sink.open_stage(producer_id)
        if stage is None or stage.batch_id != request.batch_id:
            why = "is not open any more" if stage is None else f"is one of batch {stage.batch_id}"
            raise StageExpired(
                f"stage {producer_id} of the sink {sink.sink_id!r} {why}, so batch {request.batch_id} is not "
                "committed: write it again"
            )
    before = sink.head.committing if sink.head is not None else frozenset()
    # Stages whose markers are written stay named until a record removes them. Otherwise the next coordinator would
    # find an unnamed stage, and abort it.
    kept = {producer_id for producer_id in before if producer_id in sink.stages}
    fences = sink.head.fences if sink.head is not None else ()
    head = SinkHead(
        request.batch_id,
        request.target,
        now_ms,
        winners | kept,
        request.expire_after_ms,
        tuple(each for each in fences if each.batch_id > request.batch_id),
        sink.user,
    )
    return BatchOutcome(
        transaction_pb2.CommitBatchResponse(last_batch_id=request.batch_id),
        [sink_record(sink.sink_id, head)],
        _unwritten(sink, request.batch_id, is_written),
    )


def _committed_before(sink: Sink, batch_id: int, winners: frozenset[int], is_written: Container[int]) -> BatchOutcome:
    """The batch is over. Stages of it were aborted with it, unless it is this very commit that comes again."""
    head = sink.head
    assert head is not None, "else nothing is committed"
    is_retry = bool(winners) and winners <= head.committing and batch_id == head.last_batch_id
    answer = transaction_pb2.CommitBatchResponse(last_batch_id=head.last_batch_id, already_committed=not is_retry)
    return BatchOutcome(answer, [], _unwritten(sink, batch_id, is_written) if is_retry else [])


def _unwritten(sink: Sink, batch_id: int, is_written: Container[int]) -> list[int]:
    """Return the stages up to a batch that lack markers: while one does, records behind it are not read either."""
    return [
        producer_id
        for producer_id, stage in sink.stages.items()
        if stage.batch_id <= batch_id and producer_id not in is_written
    ]


def _check_target(sink: Sink, target: str) -> None:
    if sink.target is not None and target != sink.target:
        raise SinkMismatch(
            f"sink {sink.sink_id!r} writes to {sink.target!r}, not to {target!r}: two writers use the same sink id"
        )


def last_batch(sink: Sink) -> transaction_pb2.LastBatchResponse:
    """Return what a sink has committed; the caller adds its stages."""
    response = transaction_pb2.LastBatchResponse(last_batch_id=sink.last_batch_id)
    if sink.head is not None:
        response.target, response.updated_ms = sink.head.target, sink.head.updated_ms
    return response
