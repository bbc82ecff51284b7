"""The synchronous admin client's part that deals with transactions, staged batches, and producers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from raftlog._client.admin import AdminEngine
from raftlog._transaction_descriptions import (
    MAX_TRANSACTION_TIMEOUT_MS,
    HangingTransaction,
    PartitionProducers,
    SinkDescription,
    SinkListing,
    StageDescription,
    TransactionDescription,
    TransactionListing,
)
from raftlog.errors import RaftlogError
from raftlog.types import TopicPartition

if TYPE_CHECKING:
    from raftlog._client.background import LoopThread


class TransactionAdmin:
    """Transactions: which are open, where, since when, and ending those that nobody ends (KIP-664)."""

    _engine: AdminEngine
    _thread: LoopThread

    def list_transactions(
        self,
        states: Iterable[str] | None = None,
        *,
        producer_ids: Iterable[int] | None = None,
        running_longer_than_ms: int = 0,
        missing: list[RaftlogError] | None = None,
        timeout: float | None = None,
    ) -> list[TransactionListing]:
        """Return the transactional ids that coordinators know, by id, and then stages that are open, by sink.

        Of these states only, where they are named: empty, ongoing, prepare_commit, prepare_abort, complete_commit,
        complete_abort; of these producer ids; open for longer than that. All brokers are asked for what they
        coordinate. That one of them cannot say is an error, but where `missing` is given: it gets, then, why there may
        be more.

        >>> from raftlog import Admin
        >>> with Admin(cluster.bootstrap) as admin:
        ...     admin.list_transactions(["ongoing"])
        []

        Raises:
            CoordinatorLoadInProgress, CoordinatorNotAvailable, BrokerUnavailable: some are not known, until `timeout`.
        """
        return self._thread.run(
            self._engine.list_transactions(states, producer_ids, running_longer_than_ms, missing, timeout)
        )

    def describe_transaction(self, transactional_id: str, *, timeout: float | None = None) -> TransactionDescription:
        """Return a transactional id's last transaction: its state, what it has written to, and who is still to be told.

        Raises:
            TransactionalIdNotFound: nobody has begun with this id, or it was idle for transactional.id.expiration.ms.
        """
        return self.describe_transactions([transactional_id], timeout=timeout)[transactional_id]

    def describe_transactions(
        self, transactional_ids: Iterable[str], *, timeout: float | None = None
    ) -> dict[str, TransactionDescription]:
        """Return several transactional ids, in the order given.

        Raises:
            TransactionalIdNotFound: there is none of that name; names one that is not there.
        """
        return self._thread.run(self._engine.describe_transactions(transactional_ids, timeout))

    def abort_transaction(self, transactional_id: str, *, timeout: float | None = None) -> None:
        """Abort the open transaction of an id, and fence its producer: that can write nothing more of it.

        What is decided already cannot be aborted. For one that no coordinator knows there is `abort_hanging`.

        Raises:
            TransactionalIdNotFound: there is no such id.
            InvalidTxnState: none is open, or it is decided.
        """
        self._thread.run(self._engine.abort_transaction(transactional_id, timeout))

    def list_sinks(
        self, *, missing: list[RaftlogError] | None = None, timeout: float | None = None
    ) -> list[SinkListing]:
        """Return the sinks of staged batches, by id: where they write, and which batch they have committed last.

        Raises:
            CoordinatorLoadInProgress, CoordinatorNotAvailable, BrokerUnavailable: as `list_transactions`.
        """
        return self._thread.run(self._engine.list_sinks(missing, timeout))

    def describe_sink(self, sink_id: str, *, timeout: float | None = None) -> SinkDescription:
        """Return a sink with its open stages.

        Raises:
            TransactionalIdNotFound: it has neither committed a batch, nor a stage that is open.
        """
        return self._thread.run(self._engine.describe_sink(sink_id, timeout))

    def abort_stages(
        self, sink_id: str, batch_id: int | None = None, *, timeout: float | None = None
    ) -> list[StageDescription]:
        """Abort the open stages of a sink, or of one of its batches, and return them.

        For what a writer has left behind that is gone: readers of what is committed do not get past it before its
        timeout. A writer that still lives fails with `StageExpired` when it commits, and writes the batch again. What
        a commit has named is not open, and stays.

        Raises:
            TransactionalIdNotFound: the sink has neither committed a batch, nor a stage that is open.
        """
        return self._thread.run(self._engine.abort_stages(sink_id, batch_id, timeout))

    def describe_producers(
        self, topic: str, partition: int | None = None, *, timeout: float | None = None
    ) -> dict[TopicPartition, PartitionProducers]:
        """Return the producers that a partition, or all of a topic's, know by their ids, and where they have
        transactions open; leaders say so.

        >>> with Admin(cluster.bootstrap) as admin:
        ...     topic = admin.create_topic("refunds")
        ...     [known.producers for known in admin.describe_producers("refunds").values()]
        [[]]

        Raises:
            UnknownTopicOrPartition: it is not there.
            LeaderNotAvailable, BrokerUnavailable: a leader does not say, until `timeout`.
        """
        return self._thread.run(self._engine.describe_producers(topic, partition, timeout))

    def find_hanging_transactions(
        self,
        topics: Iterable[str] | None = None,
        *,
        max_transaction_timeout_ms: int = MAX_TRANSACTION_TIMEOUT_MS,
        missing: list[RaftlogError] | None = None,
        timeout: float | None = None,
    ) -> list[HangingTransaction]:
        """Return transactions that are open in a partition for longer than `transaction.max.timeout.ms`, though no
        coordinator knows of them there: readers of what is committed wait behind them for ever.

        Of all topics, or of these. That a leader does not say is an error, but where `missing` is given: it gets the
        reasons, then. Coordinators all have to answer.

        >>> with Admin(cluster.bootstrap) as admin:
        ...     admin.find_hanging_transactions()
        []

        Raises:
            UnknownTopicOrPartition: one of the topics is not there.
            RaftlogError: as `describe_producers` and `list_transactions`.
        """
        return self._thread.run(
            self._engine.find_hanging_transactions(topics, max_transaction_timeout_ms, missing, timeout)
        )

    def abort_hanging(
        self, topic: str, partition: int, start_offset: int, *, force: bool = False, timeout: float | None = None
    ) -> HangingTransaction:
        """End a transaction in one partition by an abort marker, and return what was ended.

        It is named by the offset at which it begins there. One that a coordinator knows is refused, since that would
        abort a part of what may be committed elsewhere; with `force` coordinators are not asked.

        Raises:
            InvalidTxnState: none that begins there is open, or it is not hanging: see `abort_transaction`.
            RaftlogError: as `describe_producers` and `list_transactions`.
        """
        part = TopicPartition(topic, partition)
        return self._thread.run(self._engine.abort_hanging(part, start_offset, force, timeout))
