"""The state of a transactional producer: the calls that it may make next, and the effect of errors on a transaction."""

from __future__ import annotations

from enum import Enum
from typing import Final, NamedTuple

from raftlog._core.accumulator import LAST_EPOCH
from raftlog.errors import (
    InvalidProducerEpoch,
    InvalidProducerIdMapping,
    InvalidTxnState,
    ProducerFenced,
    RaftlogError,
    TransactionAbortable,
)


class TransactionPhase(Enum):
    """States; the value completes the sentence "the transaction of ... is ..."."""

    NEW = "not begun: its producer has no numbers yet"
    READY = "not begun"
    OPEN = "open"
    FLUSHING = "being committed: its records are on their way"
    COMMITTING = "being committed, without an answer yet"
    ABORTING = "being aborted, without an answer yet"
    FAILED = "open, but can only be aborted"
    FATAL = "over for good"


class Numbers(NamedTuple):
    """Producer id and epoch of the open transaction, or of the next one."""

    producer_id: int
    producer_epoch: int

    @property
    def used_up(self) -> bool:
        """Whether no transaction can have this epoch, so that a new producer id is needed (KIP-890)."""
        return self.producer_epoch >= LAST_EPOCH


_TAKEN_OVER: Final = (ProducerFenced, InvalidProducerEpoch, InvalidProducerIdMapping)


class TransactionState:
    """One producer's transactions, one after the other.

    Transitions:
        NEW         -> READY       `initialized`: the coordinator has given numbers
        READY       -> OPEN        `begin`
        OPEN        -> FLUSHING    `flush`: the application commits; no further records are accepted
        FLUSHING    -> OPEN        `resume`: the flush took longer than the caller waits
        FLUSHING    -> COMMITTING  `commit`: every record is acknowledged, and the decision is sent
        COMMITTING  -> COMMITTING  the outcome is unknown: only another commit is allowed
        FLUSHING, COMMITTING -> READY (or NEW)  `ended`
        OPEN, FLUSHING -> FAILED   `fail`: a record, an offset or a partition was refused, or may be missing
        COMMITTING  -> FAILED      `refused`: the transaction has timed out at the coordinator
        OPEN, FLUSHING, FAILED, ABORTING -> ABORTING  `abort`
        ABORTING    -> READY (or NEW)  `ended`
        any         -> FATAL       `refused` or `taken_over`: another producer has the transactional id, or an operator
                                   has fenced this one

    NEW after `ended` means that the epochs of the producer id are used up, or that the coordinator's state is not
    certain. The next request for numbers carries the old `numbers`, which prove that it is the same producer.

    Invariants: `cause` is set in FAILED and FATAL, and in ABORTING only after FAILED; while OPEN `numbers` are those of
    the transaction.
    """

    __slots__ = ("cause", "numbers", "phase", "transactional_id")

    def __init__(self, transactional_id: str) -> None:
        self.transactional_id = transactional_id
        self.phase = TransactionPhase.NEW
        self.numbers: Numbers | None = None
        self.cause: RaftlogError | None = None
        """Why the transaction or the producer has failed."""

    def __str__(self) -> str:
        return f"the transaction of {self.transactional_id!r}"

    @property
    def writable(self) -> bool:
        """Whether records in flight may still become part of the transaction."""
        return self.phase in (TransactionPhase.OPEN, TransactionPhase.FLUSHING)

    def _move(self, phase: TransactionPhase) -> None:
        self.phase = phase
        self._check_invariants()

    def _check_invariants(self) -> None:
        assert self.phase not in (TransactionPhase.FAILED, TransactionPhase.FATAL) or self.cause is not None
        assert self.phase is TransactionPhase.NEW or self.phase is TransactionPhase.FATAL or self.numbers is not None
        assert not self.writable or (self.cause is None and self.numbers is not None and not self.numbers.used_up)

    # Checks

    def check_usable(self) -> None:
        """Refuse every call after the producer has lost its transactional id.

        Raises:
            FencedError, InvalidTxnState: the reason.
        """
        if self.phase is TransactionPhase.FATAL:
            assert self.cause is not None
            raise type(self.cause)(str(self.cause))

    def check_may_send(self) -> None:
        """Refuse records and offsets unless a transaction is open.

        Raises:
            InvalidTxnState: none is open. TransactionAbortable: it can only be aborted.
            FencedError: as `check_usable`.
        """
        if self.phase is TransactionPhase.OPEN:
            return
        self.check_usable()
        self._check_not_failed()
        if self.phase in (TransactionPhase.NEW, TransactionPhase.READY):
            raise InvalidTxnState(
                f"no transaction is open, and a producer with transactional.id={self.transactional_id!r} sends records "
                "only within one: call begin_transaction() first, or send within `with producer.transaction():`"
            )
        raise InvalidTxnState(f"{self} is {self.phase.value}, and takes no more records; begin another one")

    def _check_not_failed(self) -> None:
        if self.phase is TransactionPhase.FAILED:
            raise self.abortable()

    def abortable(self) -> TransactionAbortable:
        """Return the error of a failed transaction, with its cause."""
        cause = self.cause
        assert cause is not None
        error = TransactionAbortable(
            str(cause)
            if isinstance(cause, TransactionAbortable)
            else f"{self} can only be aborted: {cause}; call abort_transaction(), then repeat the work in another one"
        )
        error.__cause__ = cause
        return error

    # Transitions

    def initialized(self, numbers: Numbers) -> None:
        """The coordinator has given numbers for the next transaction."""
        assert self.phase is TransactionPhase.NEW
        assert not numbers.used_up
        self.numbers = numbers
        self._move(TransactionPhase.READY)

    def begin(self) -> Numbers:
        """Open a transaction and return its numbers.

        Raises:
            InvalidTxnState: the previous one has not ended. FencedError: as `check_usable`.
        """
        self.check_usable()
        if self.phase is not TransactionPhase.READY:
            assert self.phase is not TransactionPhase.NEW
            raise InvalidTxnState(f"{self} is {self.phase.value}; {self._way_out()}")
        assert self.numbers is not None
        self._move(TransactionPhase.OPEN)
        return self.numbers

    def _way_out(self) -> str:
        match self.phase:
            case TransactionPhase.COMMITTING:
                return "call commit_transaction() again to learn the outcome"
            case TransactionPhase.ABORTING | TransactionPhase.FAILED:
                return "call abort_transaction() first"
            case TransactionPhase.FLUSHING:
                return "wait until that has ended"
            case _:
                return "commit or abort it first"

    def flush(self) -> None:
        """Begin a commit: accept no further records. No change while COMMITTING, which repeats the decision.

        Raises:
            InvalidTxnState: no transaction is open, or it is being aborted.
            TransactionAbortable: it can only be aborted.
            FencedError: as `check_usable`.
        """
        self.check_usable()
        self._check_not_failed()
        if self.phase is TransactionPhase.OPEN:
            self._move(TransactionPhase.FLUSHING)
        elif self.phase is not TransactionPhase.COMMITTING:
            raise self._nothing("commit")

    def _nothing(self, what: str) -> InvalidTxnState:
        if self.phase in (TransactionPhase.NEW, TransactionPhase.READY):
            return InvalidTxnState(f"there is nothing to {what}: call begin_transaction() first")
        return InvalidTxnState(f"{self} is {self.phase.value}; {self._way_out()}")

    def resume(self) -> None:
        """The flush has not ended in time: the transaction is open again."""
        if self.phase is TransactionPhase.FLUSHING:
            self._move(TransactionPhase.OPEN)

    def commit(self) -> None:
        """Every record is acknowledged: the coordinator decides.

        Raises:
            TransactionAbortable: a record has failed meanwhile. FencedError: as `check_usable`.
        """
        self.check_usable()
        self._check_not_failed()
        assert self.phase in (TransactionPhase.FLUSHING, TransactionPhase.COMMITTING)
        self._move(TransactionPhase.COMMITTING)

    def abort(self) -> None:
        """Begin an abort.

        Raises:
            InvalidTxnState: no transaction is open, or it is being committed. FencedError: as `check_usable`.
        """
        self.check_usable()
        if not (self.writable or self.phase in (TransactionPhase.FAILED, TransactionPhase.ABORTING)):
            raise self._nothing("abort")
        self.cause = None
        self._move(TransactionPhase.ABORTING)

    def ended(self, numbers: Numbers, *, known: bool = True) -> None:
        """The transaction is committed or aborted; the next one has these numbers.

        `known` False: the coordinator's state is not certain, so the producer must get new numbers.
        """
        assert self.phase in (TransactionPhase.FLUSHING, TransactionPhase.COMMITTING, TransactionPhase.ABORTING)
        self.numbers = numbers
        self.cause = None
        self._move(TransactionPhase.NEW if numbers.used_up or not known else TransactionPhase.READY)

    def fail(self, error: RaftlogError) -> bool:
        """A part of the transaction has failed for good; return whether this is the first failure."""
        if not self.writable:
            return False
        self.cause = error
        if isinstance(error, (ProducerFenced, InvalidProducerIdMapping)):
            self.taken_over(error)
        else:
            self._move(TransactionPhase.FAILED)
        return True

    def refused(self, error: RaftlogError) -> None:
        """Apply the coordinator's refusal of a decision or of a request for numbers; ignore all other errors."""
        if isinstance(error, _TAKEN_OVER):
            self.taken_over(error)
        elif isinstance(error, TransactionAbortable) and self.phase is TransactionPhase.COMMITTING:
            self.cause = error
            self._move(TransactionPhase.FAILED)
        elif isinstance(error, InvalidTxnState):
            self.cause = InvalidTxnState(
                f"{self} has not ended as this producer decided: {error}; close the producer and make a new one"
            )
            self._move(TransactionPhase.FATAL)

    def taken_over(self, error: RaftlogError) -> None:
        """Another producer has the transactional id, or an operator has aborted the open transaction."""
        self.cause = ProducerFenced(
            f"transactional.id={self.transactional_id!r} no longer belongs to this producer, and its open transaction "
            f"is aborted: {error}; close this producer, and use an id in one producer at a time"
        )
        self._move(TransactionPhase.FATAL)
