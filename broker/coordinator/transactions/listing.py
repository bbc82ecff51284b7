"""What tools are shown, a piece at a time: a list of thousands takes several turns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias, assert_never

from broker.coordinator.transactions import staging
from broker.coordinator.transactions.checks import MAX_NAMED, check_fence, check_id, check_named
from broker.coordinator.transactions.commands import AbortStages, LastBatch, List
from broker.coordinator.transactions.records import partition_messages, wire_state
from broker.coordinator.transactions.state import HardState, Owner
from broker.coordinator.transactions.transaction import NONE, Fence, Sink, Stage, State, Transaction
from raftlog.errors import TransactionalIdNotFound, to_wire
from raftlog.v1 import transaction_pb2

PIECE: Final = 300
"""Ids, sinks or stages that are looked at in one go: a millisecond or two."""


Shown: TypeAlias = Callable[[State, int, int], bool]
"""(state, producer id, started_ms) -> whether it was asked for."""


@dataclass(slots=True)
class Rest:
    """A command that is decided in pieces: the items left (from `at` on), and the answer so far.

    `about`: producer ids of stages; of a list, transactional ids, stages and sinks, the latter as owners.
    """

    command: List | LastBatch | AbortStages
    about: Sequence[Any] = ()
    at: int = 0
    answer: Any = None
    open_stages: Counter[str] = field(default_factory=Counter)
    """By sink, of those that were looked at."""
    shown: Shown = lambda state, producer_id, started_ms: True
    """Which of a list were asked for."""

    def take(self) -> Sequence[Any]:
        """Take the next piece."""
        piece = self.about[self.at : self.at + PIECE]
        self.at += len(piece)
        return piece

    @property
    def is_done(self) -> bool:
        """Whether nothing is left."""
        return self.at >= len(self.about)


def wanted(request: transaction_pb2.ListTransactionsRequest, now_ms: int) -> Shown:
    """Return which transactions a request asks for."""
    states, producer_ids = set(request.states), set(request.producer_ids)
    longer_ms = request.running_longer_than_ms

    def shown(state: State, producer_id: int, started_ms: int) -> bool:
        return (
            (not states or wire_state(state) in states)
            and (not producer_ids or producer_id in producer_ids)
            and (not longer_ms or (started_ms > 0 and now_ms - started_ms > longer_ms))
        )

    return shown


def begin(command: List | LastBatch | AbortStages, state: HardState, now_ms: int) -> Rest:
    """Look what a command is about.

    Raises:
        InvalidRequestError: it names no sink, or too many producers.
    """
    match command:
        case AbortStages():
            check_id("sink id", command.request.sink_id)
            check_fence(command.request)
            about = sorted({*command.request.producer_ids, *_given_up(command.request, state)})
            return Rest(command, about, answer=transaction_pb2.AbortStagesResponse())
        case LastBatch():
            check_id("sink id", command.request.sink_id)
            sink = state.sinks.get(command.request.sink_id) or Sink(command.request.sink_id)
            return Rest(command, sorted(sink.stages), answer=staging.last_batch(sink))
        case List():
            check_named("producer ids", len(command.request.producer_ids), MAX_NAMED)
            sinks = sorted(state.sinks)
            owners: list[str | Owner] = sorted(state.transactions)
            owners += [Owner("", sink_id, each) for sink_id in sinks for each in sorted(state.sinks[sink_id].stages)]
            if not command.request.states and not command.request.producer_ids:
                owners += [Owner("", sink_id) for sink_id in sinks]
            shown = wanted(command.request, now_ms)
            return Rest(command, owners, answer=transaction_pb2.ListTransactionsResponse(), shown=shown)
        case _:
            assert_never(command)


def _given_up(request: transaction_pb2.AbortStagesRequest, state: HardState) -> list[int]:
    """Return the stages whose attempts a request fences."""
    sink = state.sinks.get(request.sink_id)
    if sink is None or not request.fenced_attempts:
        return []
    fence = Fence(request.batch_id, request.fenced_attempts)
    return [each for each, stage in sink.stages.items() if fence.stops(stage.batch_id, stage.attempt)]


def list_stages(rest: Rest, sink: Sink, written: Container[Owner]) -> None:
    """Add the next piece of a sink's stages that still stand to the answer: open ones, and those that lack markers.

    `written`: owners whose markers are all written, though no record says so yet.
    """
    for producer_id in rest.take():
        stage = sink.stages.get(producer_id)
        if stage is not None and Owner("", sink.sink_id, producer_id) not in written:
            rest.answer.stages.append(described_stage(producer_id, stage, sink.state_of(producer_id, stage)))


def list_some(rest: Rest, state: HardState) -> None:
    """Add the next piece of what a shard has to the answer. What is gone meanwhile is left out."""
    shown = rest.shown
    for owner in rest.take():
        if isinstance(owner, str):
            known = state.transactions.get(owner)
            if known is not None and shown(known.state, known.producer_id, known.started_ms):
                rest.answer.transactions.append(listed_transaction(owner, known))
        elif owner.producer_id != NONE:
            found = state.stage_of(owner)
            if found is None:
                continue
            rest.open_stages[owner.sink_id] += found[1] is State.ONGOING
            if shown(found[1], owner.producer_id, found[0].started_ms):
                rest.answer.transactions.append(listed_stage(owner, *found))
        elif (sink := state.sinks.get(owner.sink_id)) is not None:
            rest.answer.sinks.append(listed_sink(sink, rest.open_stages[owner.sink_id]))


def listed_transaction(transactional_id: str, transaction: Transaction) -> transaction_pb2.ListedTransaction:
    """Return a transactional id's entry in a list."""
    return transaction_pb2.ListedTransaction(
        transactional_id=transactional_id,
        producer_id=transaction.producer_id,
        state=wire_state(transaction.state),
        started_ms=transaction.started_ms,
    )


def listed_stage(owner: Owner, stage: Stage, state: State) -> transaction_pb2.ListedTransaction:
    """Return a stage's entry in a list."""
    return transaction_pb2.ListedTransaction(
        sink_id=owner.sink_id, producer_id=owner.producer_id, state=wire_state(state), started_ms=stage.started_ms
    )


def listed_sink(sink: Sink, open_stages: int) -> transaction_pb2.ListedSink:
    """Return a sink's entry in a list."""
    listed = transaction_pb2.ListedSink(sink_id=sink.sink_id, last_batch_id=sink.last_batch_id, open_stages=open_stages)
    if sink.head is not None:
        listed.target, listed.updated_ms = sink.head.target, sink.head.updated_ms
    return listed


def described_stage(producer_id: int, stage: Stage, state: State) -> transaction_pb2.StageDescription:
    """Return all that is known of a stage."""
    return transaction_pb2.StageDescription(
        producer_id=producer_id,
        batch_id=stage.batch_id,
        state=wire_state(state),
        started_ms=stage.started_ms,
        timeout_ms=stage.timeout_ms,
        attempt=stage.attempt,
        partitions=partition_messages(stage.partitions),
    )


def described(transactional_id: str, transaction: Transaction | None) -> transaction_pb2.TransactionDescription:
    """Return all that is known of a transactional id; an error inside where that is nothing."""
    if transaction is None:
        error = TransactionalIdNotFound(f"no producer with the transactional id {transactional_id!r} is known")
        return transaction_pb2.TransactionDescription(
            error=to_wire(error), transactional_id=transactional_id, producer_id=NONE, producer_epoch=NONE
        )
    partitions = partition_messages(transaction.partitions)
    return transaction_pb2.TransactionDescription(
        transactional_id=transactional_id,
        producer_id=transaction.producer_id,
        producer_epoch=transaction.producer_epoch,
        state=wire_state(transaction.state),
        timeout_ms=transaction.timeout_ms,
        started_ms=transaction.started_ms,
        updated_ms=transaction.updated_ms,
        partitions=partitions,
        group_ids=sorted(transaction.group_ids),
        pending=partitions if transaction.is_prepared else [],
    )
