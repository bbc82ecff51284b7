"""Transactions of the synchronous producer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from raftlog._client.background import LoopThread
from raftlog._client.commit_arguments import checked
from raftlog._client.producer import ProducerEngine
from raftlog._client.transactions import LAST_ABORT_S, Transactions
from raftlog._core.transaction_state import TransactionPhase
from raftlog.errors import (
    InvalidRequestError,
    InvalidTxnState,
    ProducerFenced,
    RaftlogError,
    TransactionAbortable,
)
from raftlog.types import GroupMetadata, OffsetAndMetadata, TopicPartition

OffsetsArgument = Mapping[TopicPartition, int | OffsetAndMetadata]


def transactions_of(engine: ProducerEngine) -> Transactions:
    """Return the transactions of a producer that has some.

    Raises:
        InvalidTxnState: it has not.
    """
    if engine.transactions is None:
        raise InvalidTxnState(
            "this producer has no transactions: make it with transactional_id=..., a name that stays the same over "
            "restarts and that no other producer uses"
        )
    return engine.transactions


def group_of(given: GroupMetadata | str) -> GroupMetadata:
    """Return a group as `send_offsets_to_transaction` takes it.

    Raises:
        InvalidRequestError: it is none.
    """
    if isinstance(given, GroupMetadata):
        return given
    if isinstance(given, str) and given:
        return GroupMetadata(given, "", -1)
    raise InvalidRequestError(f"{given!r} is no group: hand over what consumer.group_metadata() returns")


def check_not_ended(transactions: Transactions) -> None:
    """At the end of a block: refuse to commit what was ended inside of it.

    Raises:
        InvalidTxnState: it was.
    """
    if transactions.state.phase in (TransactionPhase.NEW, TransactionPhase.READY):
        raise InvalidTxnState(
            f"{transactions.state} was ended inside of its `with producer.transaction():`, which commits at its end, "
            "and aborts when an exception leaves it: leave that to the block, or call begin_transaction() in its place"
        )


def abort_timeout(error: BaseException) -> float | None:
    """Return how long aborting may take that an exception is the reason of."""
    return None if isinstance(error, Exception) else LAST_ABORT_S


def give_up_timeout(error: BaseException) -> float | None:
    """Return how long aborting may take that a commit is the reason of which has not come to its end."""
    return None if isinstance(error, TransactionAbortable) else LAST_ABORT_S


def note_undecided(error: BaseException) -> None:
    """Say beside what has interrupted a commit that this may be decided, and how to learn of it."""
    error.add_note(
        "(the commit had been asked for, and what became of the transaction is not known: call commit_transaction() "
        "again to learn it, before anything else)"
    )


def note_failed_abort(error: BaseException, failed: RaftlogError) -> None:
    """Say beside the error that a transaction is aborted for that this has failed, too.

    Raises:
        ProducerFenced: that is why it could not be committed.
    """
    if isinstance(failed, InvalidTxnState):  # it has ended inside of the block
        return
    if isinstance(failed, ProducerFenced) and isinstance(error, TransactionAbortable):
        raise failed from error
    error.add_note(f"(aborting the transaction failed, too, and is left to its coordinator: {failed})")


class TransactionMethods:
    """The methods of a producer with `transactional_id`."""

    _engine: ProducerEngine
    _thread: LoopThread

    def init_transactions(self, timeout: float | None = None) -> None:
        """Take the transactional id over: fence the producer before, and wait until what it left open is aborted.

        The first `begin_transaction` does it by itself. Within `timeout` seconds, by default `max.block.ms`.

        Raises:
            InvalidTransactionTimeout: transaction.timeout.ms is above the server's transaction.max.timeout.ms.
            ProducerFenced: this one had the id, and another producer has taken it over since.
            RequestTimedOut: the coordinator has not answered in time; call it again.
            InvalidTxnState: a producer without transactions.
        """
        self._thread.run(transactions_of(self._engine).init(timeout))

    def begin_transaction(self) -> None:
        """Begin: what is sent from now on becomes visible, all of it, with `commit_transaction`, or never.

        >>> from raftlog import Producer
        >>> with Producer(cluster.bootstrap, transactional_id="transfers") as producer:
        ...     producer.begin_transaction()
        ...     paid = producer.send("accounts", b"-10", key=b"ada")
        ...     got = producer.send("accounts", b"+10", key=b"bob")
        ...     producer.commit_transaction()
        ...     paid.done() and got.done()
        True

        Raises:
            InvalidTxnState: one is open already, or the one before has not ended.
            ProducerFenced: another producer has the transactional id now, or an operator has aborted what this one had
                open; close it.
            RaftlogError: as `init_transactions`, when that was not done yet.
        """
        transactions = transactions_of(self._engine)
        while True:
            with self._engine.lock:
                if transactions.begin():
                    return
            self._thread.run(transactions.init(None))

    def commit_transaction(self, timeout: float | None = None) -> None:
        """Send what is left, and commit; when it returns, readers see all of it, and its offsets count.

        (Where a leader is away for longer than a second at that moment, as soon as there is one again.)

        `timeout` seconds at most. By default the records have `delivery.timeout.ms`, the decision `max.block.ms`.

        Raises:
            TransactionAbortable: a record, or an offset, has failed (also one that `send` has refused at once), or the
                transaction has timed out: nothing of it will be visible. `abort_transaction`, and then do it again in
                another one. The cause says more.
            RequestTimedOut: not in time. The outcome is not known: call it again, before anything else.
            ProducerFenced: as `begin_transaction`, and this transaction is aborted.
            InvalidTxnState: nothing is open.
        """
        transactions = transactions_of(self._engine)
        self._engine.close_batches()
        self._thread.run(transactions.commit(timeout))

    def abort_transaction(self, timeout: float | None = None) -> None:
        """Abort: nothing of it will be visible to readers of what is committed. What is not acknowledged fails.

        Within `timeout` seconds, by default `max.block.ms`.

        Raises:
            RequestTimedOut: the coordinator has not answered; call it again.
            ProducerFenced: as `begin_transaction`, so that it is aborted anyway.
            InvalidTxnState: nothing is open, or it is being committed.
        """
        self._thread.run(transactions_of(self._engine).abort(timeout))

    def send_offsets_to_transaction(
        self, offsets: OffsetsArgument, group: GroupMetadata | str, timeout: float | None = None
    ) -> None:
        """Commit a group's offsets with the transaction: those of the records that its results were made from.

        `offsets` are those of the next records to be read, `group` is `consumer.group_metadata()`, asked for after the
        records were polled. The consumer has enable_auto_commit=False. Within `timeout` seconds, by default
        `max.block.ms`.

        Raises:
            FencedError: the group has moved on, others have the partitions or will: abort, and poll again.
            TransactionAbortable, InvalidTxnState, ProducerFenced: as `send`.
            RaftlogError: refused, or not in time; the transaction can only be aborted.
        """
        transactions = transactions_of(self._engine)
        self._thread.run(transactions.send_offsets(checked(offsets), group_of(group), timeout))

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """A transaction that is committed at the end of the block, or aborted when an exception leaves it.

        What interrupts the commit itself aborts it too, unless the decision was sent already: then a note on the
        exception says so, and `commit_transaction` called again tells what became of it.

        >>> from raftlog import Producer
        >>> with Producer(cluster.bootstrap, transactional_id="transfers") as producer:
        ...     with producer.transaction():
        ...         for number in range(3):
        ...             sent = producer.send("accounts", b"%d" % number)

        Raises:
            TransactionAbortable: it could not be committed, and is aborted: do it again in another one.
            InvalidTxnState: it was committed or aborted inside of the block, which stands.
            RaftlogError: as `begin_transaction` and `commit_transaction`.
        """
        self.begin_transaction()
        try:
            yield
        except BaseException as error:
            self._abort_for(error)
            raise
        check_not_ended(transactions_of(self._engine))
        try:
            self.commit_transaction()
        except BaseException as error:
            self._give_up_for(error)
            raise

    def _give_up_for(self, error: BaseException) -> None:
        try:
            if not self._thread.run(transactions_of(self._engine).give_up(give_up_timeout(error))):
                note_undecided(error)
        except RaftlogError as failed:
            note_failed_abort(error, failed)

    def _abort_for(self, error: BaseException) -> None:
        try:
            self.abort_transaction(abort_timeout(error))
        except RaftlogError as failed:
            note_failed_abort(error, failed)
