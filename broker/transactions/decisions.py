"""What becomes of a transactional id when its producer, or somebody else, asks for something. Functions, no state.

Each takes what is known (None: nothing), and returns an `Outcome`: what is known then, and the answer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from google.protobuf.message import Message

from broker.transactions.checks import (
    MAX_GROUPS,
    MAX_PARTITIONS,
    check_count,
    check_id,
    check_timeout,
    read_groups,
    read_partitions,
)
from broker.transactions.commands import InitProducer, NeedsProducerId
from broker.transactions.config import TransactionConfig
from broker.transactions.transaction import MAX_EPOCH, NONE, Former, State, Transaction
from raftlog.errors import (
    ConcurrentTransactions,
    InvalidProducerEpoch,
    InvalidProducerIdMapping,
    InvalidRequestError,
    InvalidTxnState,
    ProducerFenced,
    RaftlogError,
    TransactionAbortable,
    TransactionalIdNotFound,
)
from raftlog.v1 import transaction_pb2


@dataclass(frozen=True, slots=True)
class Outcome:
    """`write`: what is known from now on; None: what was known. `waits`: answered when all markers are written."""

    answer: Message | RaftlogError
    write: Transaction | None = None
    waits: bool = False


# InitProducerId


def init(known: Transaction | None, command: InitProducer, config: TransactionConfig, now_ms: int) -> Outcome:
    """Begin a producer's session, or go on with it: with an epoch that nobody has had, and nothing open.

    Raises:
        InvalidRequestError, InvalidTransactionTimeout: it can never be.
        NeedsProducerId: there is no epoch left, or nothing known.
        ConcurrentTransactions: what was decided is being told still.
        ProducerFenced, InvalidProducerEpoch, InvalidProducerIdMapping: it cannot go on, somebody has taken over.
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
        return _fresh(command, now_ms)
    if goes_on and known.former == (request.producer_id, request.producer_epoch):
        return Outcome(_begun(known))  # it was given a fresh producer id, and has not heard
    if goes_on:
        _check_goes_on(known, request)
    if known.is_prepared:
        raise _concurrent(request.transactional_id, known)
    if known.state is State.ONGOING:
        aborting = known.decided(False, now_ms, owner_may_ask=goes_on, by_coordinator=True)
        return Outcome(_concurrent(request.transactional_id, aborting), aborting)
    # The epoch after that of a transaction which the coordinator has ended was given to nobody yet.
    is_ended = goes_on and request.producer_epoch == known.client_epoch
    epoch = known.producer_epoch if is_ended else known.producer_epoch + 1
    if epoch > MAX_EPOCH:
        return _fresh(command, now_ms)
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
    )
    return Outcome(_begun(begun), begun)


def _check_goes_on(known: Transaction, request: transaction_pb2.InitProducerIdRequest) -> None:
    if request.producer_id == known.producer_id and known.timed_out and _is_ended(known, request.producer_epoch):
        return
    check_owner(known, request.transactional_id, request.producer_id, request.producer_epoch)


def _fresh(command: InitProducer, now_ms: int) -> Outcome:
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
    )
    return Outcome(_begun(begun), begun)


def _begun(transaction: Transaction) -> Message:
    return transaction_pb2.InitProducerIdResponse(
        producer_id=transaction.producer_id, producer_epoch=transaction.producer_epoch
    )


# AddToTransaction


def add(known: Transaction | None, request: transaction_pb2.AddToTransactionRequest, now_ms: int) -> Outcome:
    """Begin the transaction if it has not begun, and add to it.

    Raises:
        InvalidRequestError, InvalidGroupId: it can never be.
        ConcurrentTransactions: the last one is not over yet.
        TransactionAbortable: the coordinator has aborted it by itself.
        ProducerFenced, InvalidProducerEpoch, InvalidProducerIdMapping: it is somebody else's.
    """
    partitions, group_ids = read_partitions(request.partitions), read_groups(request.group_ids)
    if not partitions and not group_ids:
        raise InvalidRequestError("the request adds neither partitions nor groups to the transaction")
    known = check_owner(known, request.transactional_id, request.producer_id, request.producer_epoch)
    if known.is_prepared:
        raise _concurrent(request.transactional_id, known)
    if known.producer_epoch > MAX_EPOCH:
        raise InvalidProducerEpoch(
            f"producer id {known.producer_id} has used its {MAX_EPOCH + 1} epochs: InitProducerId gives another one"
        )
    answer = transaction_pb2.AddToTransactionResponse()
    if partitions <= known.partitions and group_ids <= known.group_ids:
        return Outcome(answer)
    added = known.added(partitions, group_ids, now_ms)
    check_count("partitions", len(added.partitions), MAX_PARTITIONS)
    check_count("groups", len(added.group_ids), MAX_GROUPS)
    return Outcome(answer, added)


# EndTransaction


def end(known: Transaction | None, request: transaction_pb2.EndTransactionRequest, now_ms: int) -> Outcome:
    """Decide the transaction; or say again what was decided.

    Raises:
        InvalidTxnState: the other decision was made.
        ConcurrentTransactions: the last one is not over yet.
        TransactionAbortable: the coordinator has aborted it by itself, it cannot be committed.
        ProducerFenced, InvalidProducerEpoch, InvalidProducerIdMapping: it is somebody else's.
    """
    commit = request.commit
    if known is not None and request.producer_id == known.producer_id and _is_ended(known, request.producer_epoch):
        if commit and known.timed_out:
            raise _timed_out(request.transactional_id, known)
        if commit != known.commits:
            raise InvalidTxnState(
                f"the transaction of {request.transactional_id!r} in epoch {request.producer_epoch} was "
                f"{'committed' if known.commits else 'aborted'} before; it cannot be "
                f"{'committed' if commit else 'aborted'} any more"
            )
        return Outcome(_ended(known), waits=known.is_prepared)
    known = check_owner(known, request.transactional_id, request.producer_id, request.producer_epoch)
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
    """Say whether a group is going to have the marker of this transaction: then it may keep offsets for it (KIP-890).

    Raises:
        InvalidTxnState: nothing is open in this epoch, or the group was not added.
        InvalidProducerEpoch: the transaction is over, or its epoch was never given out.
        TransactionAbortable: the coordinator has aborted it by itself.
        InvalidProducerIdMapping: it is somebody else's, or unknown.
    """
    try:
        known = check_owner(known, request.transactional_id, request.producer_id, request.producer_epoch)
    except ProducerFenced as error:
        raise InvalidProducerEpoch(str(error)) from None
    if known.state is not State.ONGOING or request.group_id not in known.group_ids:
        raise InvalidTxnState(
            f"the group {request.group_id!r} was not added to a transaction of {request.transactional_id!r} in epoch "
            f"{request.producer_epoch} that is open: add it first, else nothing would ever decide about its offsets"
        )
    return Outcome(transaction_pb2.VerifyTransactionResponse())


def abort(known: Transaction | None, transactional_id: str, now_ms: int) -> Outcome:
    """Abort what is open, and fence who has opened it.

    Raises:
        TransactionalIdNotFound: nothing is known of it.
        InvalidTxnState: nothing is open, or it is decided.
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
    """Abort what was open for too long; its producer may go on when it is back."""
    return known.decided(False, now_ms, by_coordinator=True)


# Fencing


def check_owner(known: Transaction | None, transactional_id: str, producer_id: int, producer_epoch: int) -> Transaction:
    """Return what is known, if it is this producer's in this epoch.

    Raises:
        InvalidProducerIdMapping: the id has another producer id, or is unknown.
        TransactionAbortable: the coordinator has ended the transaction of this epoch, and nobody has taken over.
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


def _is_ended(known: Transaction, producer_epoch: int) -> bool:
    """Whether the transaction of this epoch is over, and its producer may ask what became of it."""
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
