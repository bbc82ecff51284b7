"""The coordinator of the transactional ids and sinks of one partition of __transaction_state. Pure.

decide, on_time ─▶ Decision(records, effects)     hard state stays
replay ─▶ Transaction, Sink                       hard state changes

A decision is a record. Every replayed decision is owed markers, also one of an earlier coordinator: `on_time` sends
them, MarkersWritten comes back, waiting callers are answered, and soon afterwards a record ends the transaction.

Deadlines have one heap entry for each transaction, even if the deadline is moved often.

The functions for requests (`init`, `add`, `end`, ...) have no state. Each takes the known transaction (None: unknown)
and returns an `Outcome`: the new state, and the answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import count, islice
from typing import Final, Generic, Protocol, TypeVar, assert_never

from google.protobuf.message import Message

from broker.coordinator.core import Decision, Now, Record, Send
from broker.coordinator.transactions import listing, records, staging
from broker.coordinator.transactions.checks import (
    MAX_GROUPS,
    MAX_PARTITIONS,
    check_count,
    check_id,
    check_timeout,
    count_of,
    read_groups,
    read_partitions,
)
from broker.coordinator.transactions.commands import (
    Abort,
    AbortStages,
    AddTo,
    AddToStage,
    Command,
    CommitBatch,
    Describe,
    End,
    InitProducer,
    InitStage,
    LastBatch,
    List,
    MarkersWritten,
    NeedsProducerId,
    PendingMarkers,
    TransactionConfig,
    Verify,
)
from broker.coordinator.transactions.listing import Rest
from broker.coordinator.transactions.state import HardState, Owner, ParkedAnswers, named_by
from broker.coordinator.transactions.transaction import MAX_EPOCH, NONE, STAGE_EPOCH, Former, Sink, State, Transaction
from broker.coordinator.user_bound import NO_AMOUNT_BOUND, NO_BOUND, AmountBound, Made, NamedGroups, UserBound
from raftlog.errors import (
    BatchAlreadyCommitted,
    ConcurrentTransactions,
    InvalidProducerEpoch,
    InvalidProducerIdMapping,
    InvalidRequestError,
    InvalidTxnState,
    ProducerFenced,
    RaftlogError,
    TransactionAbortable,
    TransactionalIdNotFound,
    to_wire,
)
from raftlog.v1 import transaction_pb2
from raftmeta.producer_ids import ProducerOwner

KeyT = TypeVar("KeyT")


class Deadlines(Generic[KeyT]):
    """Deadlines in monotonic ms. An entry of a dropped or moved deadline stays until its time comes.

    Invariant: every key with a deadline has an entry that is not later.
    """

    def __init__(self) -> None:
        self._due: dict[KeyT, float] = {}
        self._armed: dict[KeyT, float] = {}
        self._heap: list[tuple[float, int, KeyT]] = []
        self._order = count()

    def set(self, key: KeyT, due_ms: float) -> None:
        """Set a key's deadline."""
        self._due[key] = due_ms
        armed_ms = self._armed.get(key)
        if armed_ms is None or due_ms < armed_ms:
            self._arm(key, due_ms)

    def forget(self, key: KeyT) -> None:
        """Drop a key's deadline."""
        self._due.pop(key, None)
        # Where most entries stand for nothing any more, as after many things with ids of their own, they go:
        if len(self._heap) > 2 * len(self._due) + 1000:
            self._armed = dict(self._due)
            self._heap = [(due_ms, next(self._order), each) for each, due_ms in self._due.items()]
            heapify(self._heap)

    def _arm(self, key: KeyT, due_ms: float) -> None:
        self._armed[key] = due_ms
        heappush(self._heap, (due_ms, next(self._order), key))

    def next_ms(self) -> float | None:
        """Return when to call `take` next; it may return nothing then."""
        return self._heap[0][0] if self._heap else None

    def take(self, now_ms: float) -> KeyT | None:
        """Return a key whose deadline has passed, or None."""
        while self._heap and self._heap[0][0] <= now_ms:
            armed_ms, _, key = heappop(self._heap)
            if self._armed.get(key) != armed_ms:
                continue
            del self._armed[key]
            due_ms = self._due.get(key)
            if due_ms is None:
                continue
            if due_ms > now_ms:
                self._arm(key, due_ms)
                continue
            del self._due[key]
            return key
        return None


@dataclass(frozen=True, slots=True)
class Outcome:
    """`write`: the new state, None if it does not change. `waits`: the answer waits until all markers are written."""

    answer: Message | RaftlogError
    write: Transaction | None = None
    waits: bool = False


# InitProducerId


def init(
    known: Transaction | None,
    command: InitProducer,
    config: TransactionConfig,
    now_ms: int,
    bound: UserBound = NO_BOUND,
) -> Outcome:
    """Begin or continue a producer's session, with a new epoch and without an open transaction.

    Raises:
        InvalidRequestError, InvalidTransactionTimeout: the request is invalid.
        PolicyViolation: the id is unknown, and its user has made as many as it may.
        NeedsProducerId: the id is unknown, or has no epoch left, or its producer id is not bound to it.
        ConcurrentTransactions: the markers of the last transaction are still being written.
        ProducerFenced, InvalidProducerEpoch, InvalidProducerIdMapping: another producer has taken over.
    """
    request = command.request
    check_id("transactional id", request.transactional_id)
    check_timeout(request.transaction_timeout_ms, config.max_timeout_ms)
    goes_on = request.HasField("producer_id")
    if goes_on != request.HasField("producer_epoch"):
        raise InvalidRequestError("a producer that goes on gives its producer id and its epoch, not just one of them")
    if known is None:
        if goes_on:
            raise _unknown(request.transactional_id)
        bound.check(command.user)
        return _fresh(command, now_ms, command.user)
    if goes_on and known.former == (request.producer_id, request.producer_epoch):
        return Outcome(_begun(known))  # it was given a fresh producer id, and has not heard
    present_epoch = _epoch_of(known, request)
    if goes_on:
        _check_goes_on(known, request, present_epoch)
    if known.is_prepared:
        raise _concurrent(request.transactional_id, known)
    if known.state is State.ONGOING:
        aborting = known.decided(False, now_ms, owner_may_ask=goes_on, by_coordinator=True)
        return Outcome(_concurrent(request.transactional_id, aborting), aborting)
    # The epoch after that of a transaction which the coordinator has ended is not in use yet.
    is_ended = goes_on and present_epoch == known.client_epoch
    epoch = known.producer_epoch if is_ended else known.producer_epoch + 1
    owner = ProducerOwner.transactional(request.transactional_id)
    is_bound = command.key is None or command.key.owns(owner, known.producer_id)
    if epoch > MAX_EPOCH or not is_bound:
        return _fresh(command, now_ms, known.user)
    begun = replace(
        known,
        producer_epoch=epoch,
        state=State.EMPTY,
        timeout_ms=request.transaction_timeout_ms,
        updated_ms=now_ms,
        # It may ask again, and has the same answer:
        client_epoch=request.producer_epoch if goes_on else NONE,
        timed_out=goes_on,
        former=None,
        session_epoch=epoch,
    )
    return Outcome(_begun(begun), begun)


def _check_goes_on(known: Transaction, request: transaction_pb2.InitProducerIdRequest, epoch: int) -> None:
    if request.producer_id == known.producer_id and known.timed_out and _is_ended(known, epoch):
        return
    check_owner(known, request.transactional_id, request.producer_id, epoch)


def _fresh(command: InitProducer, now_ms: int, user: str) -> Outcome:
    if command.new_producer_id is None:
        raise NeedsProducerId(f"transactional id {command.request.transactional_id!r} needs a producer id")
    request = command.request
    begun = Transaction(
        producer_id=command.new_producer_id,
        producer_epoch=0,
        state=State.EMPTY,
        timeout_ms=request.transaction_timeout_ms,
        updated_ms=now_ms,
        former=Former(request.producer_id, request.producer_epoch) if request.HasField("producer_id") else None,
        session_epoch=0,
        user=user,
    )
    return Outcome(_begun(begun), begun)


def _begun(transaction: Transaction) -> Message:
    return transaction_pb2.InitProducerIdResponse(
        producer_id=transaction.producer_id, producer_epoch=transaction.producer_epoch
    )


# AddToTransaction


def add(
    known: Transaction | None,
    command: AddTo,
    now_ms: int,
    named: NamedGroups | None = None,
) -> Outcome:
    """Begin the transaction if it has not begun, and add to it. `named`: what transactions of each user have named.

    Raises:
        PolicyViolation: transactions of its user have named too many groups.
        InvalidRequestError, InvalidGroupId: the request is invalid.
        ConcurrentTransactions: the last transaction is not over yet.
        TransactionAbortable: the coordinator has aborted it by itself.
        ProducerFenced, InvalidProducerEpoch, InvalidProducerIdMapping: it belongs to another producer.
    """
    request = command.request
    partitions, group_ids = read_partitions(request.partitions), read_groups(request.group_ids)
    if not partitions and not group_ids:
        raise InvalidRequestError("the request adds neither partitions nor groups to the transaction")
    known = check_owner(known, request.transactional_id, request.producer_id, _epoch_of(known, request))
    if known.is_prepared:
        raise _concurrent(request.transactional_id, known)
    if known.producer_epoch > MAX_EPOCH:
        why = f"producer id {known.producer_id} has used its {MAX_EPOCH + 1} epochs: InitProducerId gives another one"
        # A client that keeps its epoch counts none itself, and asks for another id only after this error:
        raise InvalidProducerIdMapping(why) if request.keeps_epoch else InvalidProducerEpoch(why)
    answer = transaction_pb2.AddToTransactionResponse()
    if partitions <= known.partitions and group_ids <= known.group_ids:
        return Outcome(answer)
    added = known.added(partitions, group_ids, now_ms)
    check_count("partitions", len(added.partitions), MAX_PARTITIONS)
    check_count("groups", len(added.group_ids), MAX_GROUPS)
    if named is not None:
        named.add(known.user or command.user, known.producer_id, added.group_ids - known.group_ids, now_ms)
    return Outcome(answer, added)


# EndTransaction


def end(known: Transaction | None, request: transaction_pb2.EndTransactionRequest, now_ms: int) -> Outcome:
    """Decide the transaction, or repeat the earlier decision.

    Raises:
        InvalidTxnState: the other decision was made.
        ConcurrentTransactions: the last transaction is not over yet.
        TransactionAbortable: the coordinator has aborted it by itself, so it cannot be committed.
        ProducerFenced, InvalidProducerEpoch, InvalidProducerIdMapping: it belongs to another producer.
    """
    commit = request.commit
    epoch = _epoch_of(known, request)
    keeps_epoch = known is not None and request.keeps_epoch and request.producer_epoch == known.session_epoch
    if known is not None and keeps_epoch and epoch != request.producer_epoch and known.state is not State.ONGOING:
        epoch = epoch if known.client_epoch == NONE else known.client_epoch  # nothing is open: it repeats its request
    if known is not None and request.producer_id == known.producer_id and _is_ended(known, epoch):
        if commit and known.timed_out:
            raise _timed_out(request.transactional_id, known)
        if keeps_epoch and known.timed_out:  # its next transaction may begin: it knows of this one's end
            if known.is_prepared:
                raise _concurrent(request.transactional_id, known)
            return Outcome(_ended(known), replace(known, timed_out=False))
        if commit != known.commits:
            raise InvalidTxnState(
                f"the transaction of {request.transactional_id!r} in epoch {epoch} was "
                f"{'committed' if known.commits else 'aborted'} before; it cannot be "
                f"{'committed' if commit else 'aborted'} any more"
            )
        return Outcome(_ended(known), waits=known.is_prepared)
    known = check_owner(known, request.transactional_id, request.producer_id, epoch)
    if known.is_prepared:
        raise _concurrent(request.transactional_id, known)
    if known.state is State.ONGOING:
        decided = known.decided(commit, now_ms)
        return Outcome(_ended(decided), decided, waits=True)
    if known.producer_epoch > MAX_EPOCH:
        return Outcome(_ended(known))
    ended = known.ended_empty(commit, now_ms)
    return Outcome(_ended(ended), ended)


def _ended(transaction: Transaction) -> Message:
    return transaction_pb2.EndTransactionResponse(producer_epoch=transaction.producer_epoch)


# By others than the producer


def verify(known: Transaction | None, request: transaction_pb2.VerifyTransactionRequest) -> Outcome:
    """Check that a group and partitions will get this transaction's marker (KIP-890).

    Only then may the group keep pending offsets for it, and the partitions its records.

    Raises:
        InvalidTxnState: nothing is open in this epoch, or something named was not added.
        InvalidProducerEpoch: the transaction is over, or its epoch was never given out.
        TransactionAbortable: the coordinator has aborted it by itself.
        InvalidProducerIdMapping: the id has another producer id, or is unknown.
    """
    try:
        known = check_owner(known, request.transactional_id, request.producer_id, _epoch_of(known, request))
    except ProducerFenced as error:
        raise InvalidProducerEpoch(str(error)) from None
    is_open = known.state is State.ONGOING
    partitions = read_partitions(request.partitions)
    names_group = bool(request.group_id) or not partitions
    if not is_open or (names_group and request.group_id not in known.group_ids):
        raise InvalidTxnState(
            f"the group {request.group_id!r} was not added to a transaction of {request.transactional_id!r} in epoch "
            f"{request.producer_epoch} that is open: add it first, else nothing would ever decide about its offsets"
        )
    if not partitions <= known.partitions:
        raise InvalidTxnState(
            f"the partition was not added to the transaction of {request.transactional_id!r} in epoch "
            f"{request.producer_epoch}: add it first, else nothing would ever decide about its records"
        )
    return Outcome(transaction_pb2.VerifyTransactionResponse(producer_epoch=known.producer_epoch))


def verify_stage(sink: Sink, request: transaction_pb2.VerifyTransactionRequest) -> Message:
    """Check that partitions will get this stage's marker, as `verify` does.

    Raises:
        InvalidProducerEpoch: a stage has only one epoch.
        InvalidTxnState: the stage is not open, or a partition was not added.
    """
    if request.producer_epoch != STAGE_EPOCH:
        raise InvalidProducerEpoch(f"a stage has epoch {STAGE_EPOCH}, {request.producer_epoch} was never given out")
    stage = sink.open_stage(request.producer_id)
    if stage is None:
        raise InvalidTxnState(f"stage {request.producer_id} of the sink {sink.sink_id!r} is not open")
    if not read_partitions(request.partitions) <= stage.partitions:
        raise InvalidTxnState(
            f"the partition was not added to stage {request.producer_id} of the sink {sink.sink_id!r}: add it first"
        )
    return transaction_pb2.VerifyTransactionResponse(producer_epoch=STAGE_EPOCH)


def abort(known: Transaction | None, transactional_id: str, now_ms: int) -> Outcome:
    """Abort the open transaction, and fence its producer.

    Raises:
        TransactionalIdNotFound: the id is unknown.
        InvalidTxnState: no transaction is open, or it is decided already.
    """
    if known is None:
        raise TransactionalIdNotFound(f"no producer with the transactional id {transactional_id!r} is known")
    if known.is_prepared:
        raise InvalidTxnState(
            f"the transaction of {transactional_id!r} is {'committed' if known.commits else 'aborted'} already: its "
            "markers are on their way, which nothing can stop"
        )
    if known.state is not State.ONGOING:
        raise InvalidTxnState(f"{transactional_id!r} has no open transaction")
    aborting = known.decided(False, now_ms, owner_may_ask=False)
    return Outcome(transaction_pb2.AbortTransactionResponse(), aborting, waits=True)


def time_out(known: Transaction, now_ms: int) -> Transaction:
    """Abort a transaction that was open for too long; its producer may continue when it returns."""
    return known.decided(False, now_ms, by_coordinator=True)


# Fencing


def check_owner(known: Transaction | None, transactional_id: str, producer_id: int, producer_epoch: int) -> Transaction:
    """Return the known transaction, if it belongs to this producer in this epoch.

    Raises:
        InvalidProducerIdMapping: the id has another producer id, or is unknown.
        TransactionAbortable: the coordinator has ended the transaction of this epoch, and no producer has taken over.
        ProducerFenced: a later epoch has begun, or a tool has aborted the transaction.
        InvalidProducerEpoch: the epoch was never given out.
    """
    if known is None:
        raise _unknown(transactional_id)
    if producer_id != known.producer_id:
        raise InvalidProducerIdMapping(
            f"transactional id {transactional_id!r} has the producer id {known.producer_id}, not {producer_id}: "
            "another producer has begun with it"
        )
    if producer_epoch == known.producer_epoch:
        return known
    if known.timed_out and _is_ended(known, producer_epoch):
        raise _timed_out(transactional_id, known)
    if producer_epoch == known.producer_epoch - 1 and known.aborted_by_tool:
        raise ProducerFenced(
            f"the transaction of {transactional_id!r} in epoch {producer_epoch} was aborted by an operator's tool "
            "(raftlog txn abort), which fences its producer"
        )
    if producer_epoch < known.producer_epoch:
        raise ProducerFenced(
            f"producer epoch {producer_epoch} of {transactional_id!r} is over, {known.producer_epoch} has begun: "
            "another producer uses this transactional id"
        )
    raise InvalidProducerEpoch(
        f"producer epoch {producer_epoch} of {transactional_id!r} was never given out; the last one is "
        f"{known.producer_epoch}"
    )


class _OfProducer(Protocol):
    """A request of a producer with a transactional id."""

    producer_id: int
    producer_epoch: int
    keeps_epoch: bool


def _epoch_of(known: Transaction | None, request: _OfProducer) -> int:
    """Return the epoch that a request means."""
    if known is None or not request.keeps_epoch or request.producer_id != known.producer_id:
        return request.producer_epoch
    return known.own_epoch(request.producer_epoch)


def _is_ended(known: Transaction, producer_epoch: int) -> bool:
    """Whether the transaction of this epoch has ended, and its producer may still ask for the outcome."""
    return producer_epoch == known.client_epoch != NONE


def _unknown(transactional_id: str) -> InvalidProducerIdMapping:
    return InvalidProducerIdMapping(
        f"nothing is known of the transactional id {transactional_id!r}: it was idle for "
        "transactional.id.expiration.ms, or never initialized; begin with InitProducerId, without a producer id"
    )


def _concurrent(transactional_id: str, known: Transaction) -> ConcurrentTransactions:
    return ConcurrentTransactions(
        f"the last transaction of {transactional_id!r} is {'committed' if known.commits else 'aborted'}, but not all "
        "of its partitions have heard; ask again in a moment"
    )


def _timed_out(transactional_id: str, known: Transaction) -> TransactionAbortable:
    return TransactionAbortable(
        f"the transaction of {transactional_id!r} timed out after {known.timeout_ms} ms; abort it and begin another "
        "(transaction.timeout.ms)"
    )


MAX_RECORDS: Final = 200
MAX_SENT: Final = 200
MAX_LOOKED_AT: Final = 2_000
"""The most entries that one call of `on_time` handles: a few milliseconds of work."""
MAX_NAMED_AT_ONCE: Final = 2_000
"""Partitions and groups of what such a call ends or sends, and of one more: each is encoded, kept and sent."""
AT_ONCE: Final = 0.0
"""A deadline in the past."""


class TransactionCoordinator:
    """State of the transactions of one shard.

    `markers`: the token to which PendingMarkers are sent. `bound`: on the transactional ids and sinks of a user.
    `named`: the groups that transactions of each user have named, with the bound on them; None: any number.
    `owed_bound`: on what open transactions and stages of a user name.
    """

    def __init__(
        self,
        config: TransactionConfig,
        markers: object,
        bound: UserBound = NO_BOUND,
        named: NamedGroups | None = None,
        owed_bound: AmountBound = NO_AMOUNT_BOUND,
    ) -> None:
        self._config = config
        self._markers = markers
        self._bound = bound
        self._named = named
        self._owed_bound = owed_bound
        self._state = HardState()
        self._undone = self._state.undone
        # For as long as this coordinator lives:
        self._deadlines: Deadlines[Owner] = Deadlines()
        self._parked = ParkedAnswers()
        self._expiry_ms: float | None = None
        # What is still to be looked at, the next one last:
        self._expiring_ids: list[str] = []
        self._expiring_sinks: list[str] = []

    @property
    def transactions(self) -> Mapping[str, Transaction]:
        """By transactional id; not to be changed."""
        return self._state.transactions

    @property
    def sinks(self) -> Mapping[str, Sink]:
        """By sink id; not to be changed."""
        return self._state.sinks

    @property
    def made(self) -> Made:
        """How many transactional ids and sinks each user has made."""
        return self._state.made

    @property
    def owed(self) -> Mapping[str, int]:
        """How many markers each user's transactions and stages are owed, or will be; not to be changed."""
        return self._state.owed.counts

    # Records

    def replay(self, key: bytes, value: bytes | None) -> None:
        """Apply a record: the only way hard state changes.

        Raises:
            CorruptRecordError: it is none that this version reads; says why.
        """
        self._state.replay(key, value)

    def loaded(self, now: Now) -> None:
        """Begin after the replay of the log: open transactions keep the rest of their timeouts, by the wall clock."""
        for owner in self._state.open:
            started_ms, timeout_ms = self._state.times_of(owner)
            left_ms = min(max(0, started_ms + timeout_ms - now.wall_ms), timeout_ms)
            self._deadlines.set(owner, now.monotonic_ms + left_ms)
        self._expiry_ms = now.monotonic_ms + self._config.expiration_check_interval_ms

    # Commands

    def decide(self, command: Command | Rest, now: Now) -> Decision:
        """Answer a command. Hard state does not change before the records are replayed."""
        decision = Decision()
        if isinstance(command, MarkersWritten):
            decision.effects = self._written(command.markers, now)
            return decision
        to = command.command.to if isinstance(command, Rest) else command.to
        try:
            match command:
                case Rest():
                    self._go_on(command, decision)
                case Verify() if command.request.sink_id:
                    answer = verify_stage(self._sink(command.request.sink_id), command.request)
                    decision.effects.append(Send(to, answer))
                case InitProducer() | AddTo() | End() | Verify() | Abort() | Describe():
                    self._decide_transaction(command, now, decision)
                case InitStage() | AddToStage() | CommitBatch():
                    self._decide_sink(command, now, decision)
                case AbortStages() | LastBatch() | List():
                    rest = listing.begin(command, self._state, now.wall_ms)
                    fences = self._fences(command, now) if isinstance(command, AbortStages) else []
                    self._go_on(rest, decision)
                    decision.records += fences
                case _:
                    assert_never(command)
        except RaftlogError as error:
            assert not decision.records, "a refused command changes nothing"
            decision.effects = [Send(to, error)]
        return decision

    def at_once(self, command: Command, now: Now) -> None:
        """Return None: every command here waits for its turn."""
        return

    def _answer(self, to: object, answer: Message | RaftlogError, missing: list[Owner], now: Now) -> list[Send]:
        """Answer when the markers of `missing` are written; at once if there are none."""
        if not missing:
            return [Send(to, answer)]
        assert not isinstance(answer, RaftlogError)
        self._parked.park(to, answer, missing, now.monotonic_ms + self._config.answer_within_ms)
        return []

    # Transactional ids

    def _known(self, transactional_id: str, now: Now) -> Transaction | None:
        """Return the known transaction of an id, with written markers even if they are not recorded yet."""
        known = self._state.transactions.get(transactional_id)
        if known is not None and Owner(transactional_id) in self._undone.written:
            return known.completed(now.wall_ms)
        return known

    def _decide_transaction(
        self, command: InitProducer | AddTo | End | Verify | Abort | Describe, now: Now, decision: Decision
    ) -> None:
        if isinstance(command, Abort | Describe):
            transactional_id = command.transactional_id
        else:
            transactional_id = command.request.transactional_id
        known = self._known(transactional_id, now)
        match command:
            case InitProducer():
                outcome = init(known, command, self._config, now.wall_ms, self._bound)
            case AddTo():
                outcome = add(known, command, now.wall_ms, self._named)
            case End():
                outcome = end(known, command.request, now.wall_ms)
            case Verify():
                outcome = verify(known, command.request)
            case Abort():
                outcome = abort(known, transactional_id, now.wall_ms)
            case Describe():
                outcome = Outcome(listing.described(transactional_id, known))
            case _:
                assert_never(command)
        owner = Owner(transactional_id)
        if outcome.write is not None:
            self._owed_bound.check(outcome.write.user, named_by(outcome.write) - named_by(known))
            self._write(owner, outcome.write, decision)
            if outcome.write.state is State.ONGOING and (known is None or known.state is not State.ONGOING):
                self._deadlines.set(owner, now.monotonic_ms + outcome.write.timeout_ms)
        decision.effects += self._answer(command.to, outcome.answer, [owner] if outcome.waits else [], now)

    def _write(self, owner: Owner, transaction: Transaction, decision: Decision) -> None:
        decision.records.append(records.transaction_record(owner.transactional_id, transaction))
        if transaction.state is not State.ONGOING:
            self._deadlines.forget(owner)

    # Sinks

    def _sink(self, sink_id: str, asked_by: str = "") -> Sink:
        return self._state.sinks.get(sink_id) or Sink(sink_id, asked_by=asked_by)

    def _check_room(self, sink: Sink, written: Sequence[Record]) -> None:
        """Check that the user may make the sink, if it is unknown and records of it are to be written."""
        if sink.is_gone and written:
            self._bound.check(sink.user)

    def _fences(self, command: AbortStages, now: Now) -> list[Record]:
        sink = self._sink(command.request.sink_id, command.user)
        fences = staging.fence(sink, command.request, now.wall_ms)
        self._check_room(sink, fences)
        return fences

    def _decide_sink(self, command: InitStage | AddToStage | CommitBatch, now: Now, decision: Decision) -> None:
        sink = self._sink(command.request.sink_id, "" if isinstance(command, AddToStage) else command.user)
        match command:
            case InitStage():
                decision.effects.append(Send(command.to, self._init_stage(sink, command, now, decision)))
            case AddToStage():
                added = staging.add_to_stage(sink, command.request)
                if added:
                    self._owed_bound.check(sink.user, count_of(command.request.partitions))
                decision.records = added
                decision.effects.append(Send(command.to, transaction_pb2.AddToStageResponse()))
            case CommitBatch():
                written = {owner.producer_id for owner in self._undone.written if owner.sink_id == sink.sink_id}
                outcome = staging.commit_batch(sink, command.request, written, now.wall_ms)
                self._check_room(sink, outcome.records)
                decision.records = outcome.records
                missing = [Owner("", sink.sink_id, producer_id) for producer_id in outcome.waits_for]
                if outcome.records:
                    for owner in missing:
                        self._deadlines.forget(owner)
                decision.effects += self._answer(command.to, outcome.answer, missing, now)
            case _:
                assert_never(command)

    def _init_stage(
        self, sink: Sink, command: InitStage, now: Now, decision: Decision
    ) -> transaction_pb2.InitStageResponse:
        try:
            begun = staging.init_stage(sink, command, self._config, now.wall_ms, self._bound)
        except BatchAlreadyCommitted as error:
            return transaction_pb2.InitStageResponse(error=to_wire(error), last_batch_id=sink.last_batch_id)
        self._owed_bound.check(sink.user, count_of(command.request.partitions))
        decision.records = begun
        assert command.new_producer_id is not None, "else it would have been asked for"
        owner = Owner("", sink.sink_id, command.new_producer_id)
        self._deadlines.set(owner, now.monotonic_ms + command.request.timeout_ms)
        return transaction_pb2.InitStageResponse(
            producer_id=command.new_producer_id, producer_epoch=STAGE_EPOCH, last_batch_id=sink.last_batch_id
        )

    # Commands about much

    def _go_on(self, rest: Rest, decision: Decision) -> None:
        """Decide the next piece; answer after the last one."""
        command = rest.command
        match command:
            case AbortStages():
                sink = self._sink(command.request.sink_id)
                decision.records = staging.abort_stages(sink, rest.take())
            case LastBatch():
                listing.list_stages(rest, self._sink(command.request.sink_id), self._undone.written)
            case List():
                listing.list_some(rest, self._state)
            case _:
                assert_never(command)
        if rest.is_done:
            decision.effects.append(Send(command.to, rest.answer))
        else:
            decision.rest = rest

    # Markers

    def _written(self, markers: PendingMarkers, now: Now) -> list[Send]:
        """Note that markers are written, and answer the callers that waited for nothing else.

        The answers need no record and leave at once: the next coordinator would come to the same result.
        """
        if markers.transactional_id:
            owner = Owner(markers.transactional_id)
        else:
            owner = Owner("", markers.sink_id, markers.producer_id)
        pending = self._state.pending(owner)
        if owner in self._undone.written or pending is None:
            return []
        of = pending.producer_id, pending.producer_epoch, pending.commit
        if of != (markers.producer_id, markers.producer_epoch, markers.commit):
            return []
        self._undone.unsent.pop(owner, None)
        self._undone.written[owner] = now.monotonic_ms + self._config.complete_after_ms
        return self._parked.written(owner)

    # Time

    def next_deadline_ms(self) -> float | None:
        """Return when `on_time` has something to do, in monotonic ms; it may be over already. None: never."""
        if self._undone.unsent or self._expiring_ids or self._expiring_sinks:
            return AT_ONCE
        complete_ms = next(iter(self._undone.written.values()), None)
        deadlines = (self._deadlines.next_ms(), self._parked.next_ms(), complete_ms, self._expiry_ms)
        return min((deadline_ms for deadline_ms in deadlines if deadline_ms is not None), default=None)

    def on_time(self, now: Now) -> Decision:
        """Handle passed deadlines, perhaps not all: then `next_deadline_ms` is not later than `now`."""
        decision = Decision()
        decision.effects += self._parked.due(now.monotonic_ms)
        named = 0
        while len(decision.records) < MAX_RECORDS and named < MAX_NAMED_AT_ONCE:
            owner = self._deadlines.take(now.monotonic_ms)
            if owner is None:
                break
            named += self._state.named_by_owner(owner)
            self._time_out(owner, now, decision)
        self._complete(now, decision)
        named = 0
        for owner in list(islice(self._undone.unsent, MAX_SENT)):
            if named >= MAX_NAMED_AT_ONCE:
                break
            named += self._state.named_by_owner(owner)
            del self._undone.unsent[owner]
            pending = self._state.pending(owner)
            assert pending is not None, "what is decided has markers"
            decision.effects.append(Send(self._markers, pending))
        self._expire(now, decision)
        return decision

    def _time_out(self, owner: Owner, now: Now, decision: Decision) -> None:
        if owner not in self._state.open:
            return
        if owner.transactional_id:
            known = self._state.transactions[owner.transactional_id]
            self._write(owner, time_out(known, now.wall_ms), decision)
        else:
            decision.records += staging.abort_stages(self._state.sinks[owner.sink_id], [owner.producer_id])

    def _complete(self, now: Now, decision: Decision) -> None:
        """Record the transactions whose markers are all written."""
        for owner, due_ms in list(islice(self._undone.written.items(), MAX_RECORDS)):
            if due_ms > now.monotonic_ms:
                return
            if owner.transactional_id:
                known = self._state.transactions[owner.transactional_id]
                self._write(owner, known.completed(now.wall_ms), decision)
            else:
                decision.records.append(records.stage_record(owner.sink_id, owner.producer_id, None))

    def _expire(self, now: Now, decision: Decision) -> None:
        """Forget ids that were idle for too long, and sinks."""
        if self._expiry_ms is not None and self._expiry_ms <= now.monotonic_ms:
            self._expiry_ms = now.monotonic_ms + self._config.expiration_check_interval_ms
            self._expiring_ids, self._expiring_sinks = list(self._state.transactions), list(self._state.sinks)
        for _ in range(MAX_LOOKED_AT):
            if len(decision.records) >= MAX_RECORDS:
                return
            if self._expiring_ids:
                transactional_id = self._expiring_ids.pop()
                known = self._state.transactions.get(transactional_id)
                limit_ms = now.wall_ms - self._config.id_expiration_ms
                if known is not None and known.is_idle and known.updated_ms <= limit_ms:
                    decision.records.append(records.transaction_record(transactional_id, None))
            elif self._expiring_sinks:
                sink = self._state.sinks.get(self._expiring_sinks.pop())
                if sink is None or sink.head is None or sink.stages:
                    continue
                if sink.head.is_old(now.wall_ms, self._config.sink_expiration_ms):
                    decision.records.append(records.sink_record(sink.sink_id, None))
            else:
                return

    # Topics

    def on_topics(self, topics: object, now: Now) -> Decision:
        """Do nothing: MarkersWritten covers deleted topics."""
        return Decision()
