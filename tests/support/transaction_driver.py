"""A transaction coordinator in memory: the frame's part played by hand, with a clock that a test moves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TypeVar

from google.protobuf.message import Message

from broker.coordinator.core import Notice, Reply
from broker.coordinator.groups.topics import TopicPartition
from broker.coordinator.transactions.commands import (
    Abort,
    AbortStages,
    AddTo,
    AddToStage,
    Command,
    CommitBatch,
    Decision,
    Describe,
    End,
    InitProducer,
    InitStage,
    LastBatch,
    List,
    MarkersWritten,
    NeedsProducerId,
    Now,
    PendingMarkers,
    TransactionConfig,
)
from broker.coordinator.transactions.coordinator import TransactionCoordinator
from broker.coordinator.transactions.listing import Rest
from broker.coordinator.transactions.records import partition_messages
from broker.coordinator.transactions.transaction import Sink, Transaction
from broker.coordinator.user_bound import MOST_OWED, NO_BOUND, NamedGroups, UserBound, owed_bound
from raftlog.errors import RaftlogError, from_wire
from raftlog.v1 import transaction_pb2

WALL_MS = 1_700_000_000_000
MessageT = TypeVar("MessageT", bound=Message)


def topic_id(name: str) -> bytes:
    """Return the id that a topic has in these tests."""
    return name.encode().ljust(16, b"_")


def parts(*numbers: int, topic: str = "t") -> list[TopicPartition]:
    """Return partitions of a topic."""
    return [(topic_id(topic), number) for number in numbers]


@dataclass(eq=False)
class Call:
    """A caller: the answer that it got, once."""

    got: list[Message | RaftlogError | None] = field(default_factory=list)

    def is_answered(self) -> bool:
        return bool(self.got)

    def answer(self, kind: type[MessageT]) -> MessageT:
        """The answer, a message."""
        (answer,) = self.got
        if isinstance(answer, RaftlogError):
            raise answer
        assert isinstance(answer, kind), answer
        return answer


def error_of(call: Call) -> RaftlogError:
    """Return the error that is the only answer."""
    (answer,) = call.got
    assert isinstance(answer, RaftlogError), answer
    return answer


class MarkerToken:
    """Where PendingMarkers go."""


@dataclass(frozen=True)
class Producer:
    """A producer's identity, as its coordinator told it."""

    transactional_id: str
    producer_id: int
    producer_epoch: int


def hard(core: TransactionCoordinator) -> tuple[dict[str, Transaction], dict[str, Sink]]:
    """Return all that has to outlive a coordinator."""
    return dict(core.transactions), dict(core.sinks)


class TransactionDriver:
    """Decides, appends and replays at once; markers are written when a test says so.

    `most_of_user`: transactional ids and sinks that a user may make; None: any number. `named`: the groups that
    transactions have named, with the bound on them. `most_owed`: what open transactions and stages of a user may name.
    """

    def __init__(
        self,
        config: TransactionConfig | None = None,
        most_of_user: int | None = None,
        named: NamedGroups | None = None,
        most_owed: int = MOST_OWED,
    ) -> None:
        self.config = config or TransactionConfig()
        self.refused: list[str] = []
        """The users that a bound has refused something."""
        self.bound = NO_BOUND
        if most_of_user is not None:
            self.bound = UserBound(
                "max.transactional.ids.per.user",
                "transactional ids and sinks",
                most_of_user,
                lambda user: self.core.made.counts.get(user, 0),
                self.refused.append,
            )
        self.now_ms = 1_000.0
        self.wall_ahead_ms = 0
        self.log: list[tuple[bytes, bytes | None]] = []
        self.token = MarkerToken()
        self.pending: list[PendingMarkers] = []
        self.producer_ids = count(4000)
        self.named = named
        self.owed_bound = owed_bound(lambda user: self.core.owed.get(user, 0), most_owed)
        self.core = self._new_core()
        self.core.loaded(self.now)

    def _new_core(self) -> TransactionCoordinator:
        return TransactionCoordinator(self.config, self.token, self.bound, self.named, self.owed_bound)

    @property
    def now(self) -> Now:
        return Now(self.now_ms, WALL_MS + int(self.now_ms) + self.wall_ahead_ms)

    def restart(self, log: Sequence[tuple[bytes, bytes | None]] | None = None) -> None:
        """Another coordinator has read the log."""
        self.log = list(self.log if log is None else log)
        self.pending.clear()
        self.core = self._new_core()
        for key, value in self.log:
            self.core.replay(key, value)
        self.core.loaded(self.now)
        self.settle()

    # Time

    def wait(self, for_ms: float) -> None:
        """Let time go by, and do what is due on the way."""
        until_ms = self.now_ms + for_ms
        while (due_ms := self.core.next_deadline_ms()) is not None and due_ms <= until_ms:
            self.now_ms = max(self.now_ms, due_ms)
            self._apply(self.core.on_time(self.now))
        self.now_ms = until_ms

    def settle(self) -> None:
        """Do what is due now."""
        self.wait(0)

    # Commands

    def submit(self, command: Command) -> Decision:
        """Have a command decided, all of it."""
        decision = self._apply(self.core.decide(command, self.now))
        while decision.rest is not None:
            assert isinstance(decision.rest, Rest)
            piece = self._apply(self.core.decide(decision.rest, self.now))
            decision = Decision(decision.records + piece.records, decision.effects + piece.effects, piece.rest)
        self.settle()
        return decision

    def _apply(self, decision: Decision) -> Decision:
        for key, value in decision.records:
            self.log.append((key, value))
            self.core.replay(key, value)
        for effect in decision.effects:
            if isinstance(effect.to, MarkerToken):
                assert isinstance(effect.message, PendingMarkers)
                self.pending.append(effect.message)
            else:
                assert isinstance(effect.to, Call)
                assert not isinstance(effect.message, Notice | Reply)
                assert not effect.to.got, f"a call was answered twice: first {effect.to.got}, then {effect.message}"
                effect.to.got.append(effect.message)
        return decision

    def write_markers(self, upto: int | None = None) -> None:
        """All that is pending is written, or the first so many."""
        written = self.pending[:upto]
        del self.pending[:upto]
        for markers in written:
            self.submit(MarkersWritten(markers))

    # Producers

    def init(
        self,
        transactional_id: str = "x",
        goes_on: Producer | None = None,
        timeout_ms: int = 60_000,
        user: str = "",
    ) -> Producer:
        """InitProducerId; with an id of its own where one is needed."""
        request = transaction_pb2.InitProducerIdRequest(
            transactional_id=transactional_id, transaction_timeout_ms=timeout_ms
        )
        if goes_on is not None:
            request.producer_id, request.producer_epoch = goes_on.producer_id, goes_on.producer_epoch
        try:
            answer = self._init(InitProducer(Call(), request, user=user))
        except NeedsProducerId:
            answer = self._init(InitProducer(Call(), request, next(self.producer_ids), user=user))
        return Producer(transactional_id, answer.producer_id, answer.producer_epoch)

    def _init(self, command: InitProducer) -> transaction_pb2.InitProducerIdResponse:
        self.submit(command)
        assert isinstance(command.to, Call)
        return command.to.answer(transaction_pb2.InitProducerIdResponse)

    def add(self, producer: Producer, *numbers: int, groups: Iterable[str] = (), user: str = "") -> None:
        """AddToTransaction; `user`: the caller's."""
        call = Call()
        request = transaction_pb2.AddToTransactionRequest(
            transactional_id=producer.transactional_id,
            producer_id=producer.producer_id,
            producer_epoch=producer.producer_epoch,
            partitions=partition_messages(parts(*numbers)),
            group_ids=groups,
        )
        self.submit(AddTo(call, request, user))
        call.answer(transaction_pb2.AddToTransactionResponse)

    def end(self, producer: Producer, commit: bool = True) -> Call:
        """EndTransaction; may wait."""
        call = Call()
        request = transaction_pb2.EndTransactionRequest(
            transactional_id=producer.transactional_id,
            producer_id=producer.producer_id,
            producer_epoch=producer.producer_epoch,
            commit=commit,
        )
        self.submit(End(call, request))
        return call

    def ended(self, producer: Producer, commit: bool = True) -> Producer:
        """EndTransaction, with its markers written; returns the producer's next identity."""
        call = self.end(producer, commit)
        self.write_markers()
        return self.next(producer, call)

    def next(self, producer: Producer, call: Call) -> Producer:
        """Return a producer's identity after `call` ended its transaction."""
        epoch = call.answer(transaction_pb2.EndTransactionResponse).producer_epoch
        return Producer(producer.transactional_id, producer.producer_id, epoch)

    def abort(self, transactional_id: str = "x") -> Call:
        """AbortTransaction."""
        call = Call()
        self.submit(Abort(call, transactional_id))
        return call

    def describe(self, transactional_id: str = "x") -> transaction_pb2.TransactionDescription:
        """DescribeTransactions, of one."""
        call = Call()
        self.submit(Describe(call, transactional_id))
        return call.answer(transaction_pb2.TransactionDescription)

    def list(self, request: transaction_pb2.ListTransactionsRequest) -> transaction_pb2.ListTransactionsResponse:
        """ListTransactions."""
        call = Call()
        self.submit(List(call, request))
        return call.answer(transaction_pb2.ListTransactionsResponse)

    # Sinks

    def init_stage(
        self,
        batch_id: int,
        *numbers: int,
        sink_id: str = "s",
        target: str = "t",
        attempt: str = "",
        timeout_ms: int = 60_000,
        user: str = "",
    ) -> int:
        """InitStage; returns the stage."""
        request = transaction_pb2.InitStageRequest(
            sink_id=sink_id,
            batch_id=batch_id,
            target=target,
            partitions=partition_messages(parts(*numbers)),
            timeout_ms=timeout_ms,
            attempt=attempt,
        )
        call = Call()
        self.submit(InitStage(call, request, next(self.producer_ids), user))
        answer = call.answer(transaction_pb2.InitStageResponse)
        if answer.HasField("error"):
            raise from_wire(answer.error)
        assert answer.producer_epoch == 0, f"a new stage must have producer epoch 0, but has {answer.producer_epoch}"
        return answer.producer_id

    def add_to_stage(self, producer_id: int, *numbers: int, sink_id: str = "s") -> None:
        """AddToStage."""
        call = Call()
        request = transaction_pb2.AddToStageRequest(
            sink_id=sink_id, producer_id=producer_id, partitions=partition_messages(parts(*numbers))
        )
        self.submit(AddToStage(call, request))
        call.answer(transaction_pb2.AddToStageResponse)

    def abort_stages(self, *producer_ids: int, sink_id: str = "s") -> None:
        """AbortStages."""
        call = Call()
        self.submit(AbortStages(call, transaction_pb2.AbortStagesRequest(sink_id=sink_id, producer_ids=producer_ids)))
        call.answer(transaction_pb2.AbortStagesResponse)

    def fence(self, batch_id: int, attempts: str, *producer_ids: int, sink_id: str = "s", user: str = "") -> None:
        """AbortStages, of attempts that are given up for good."""
        call = Call()
        request = transaction_pb2.AbortStagesRequest(
            sink_id=sink_id, producer_ids=producer_ids, fenced_attempts=attempts, batch_id=batch_id
        )
        self.submit(AbortStages(call, request, user))
        call.answer(transaction_pb2.AbortStagesResponse)

    def commit(self, batch_id: int, *producer_ids: int, sink_id: str = "s", target: str = "t", user: str = "") -> Call:
        """CommitBatch; may wait."""
        call = Call()
        request = transaction_pb2.CommitBatchRequest(
            sink_id=sink_id, batch_id=batch_id, target=target, producer_ids=producer_ids
        )
        self.submit(CommitBatch(call, request, user))
        return call

    def committed(self, batch_id: int, *producer_ids: int, sink_id: str = "s") -> transaction_pb2.CommitBatchResponse:
        """CommitBatch, with its markers written."""
        call = self.commit(batch_id, *producer_ids, sink_id=sink_id)
        self.write_markers()
        return call.answer(transaction_pb2.CommitBatchResponse)

    def last(self, sink_id: str = "s") -> transaction_pb2.LastBatchResponse:
        """LastBatch."""
        call = Call()
        self.submit(LastBatch(call, transaction_pb2.LastBatchRequest(sink_id=sink_id)))
        return call.answer(transaction_pb2.LastBatchResponse)
