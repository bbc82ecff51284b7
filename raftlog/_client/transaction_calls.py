"""Calls at the coordinator of a transactional id, or of a sink: found, retried, in bounded time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final

from raftlog._client.connections import Connections
from raftlog._client.coordinators import TRANSACTIONS, CoordinatorOptions, Coordinators
from raftlog._client.metadata import UNKNOWN_TOPIC_GRACE_S, MetadataCache
from raftlog._client.producer_ids import ProducerId
from raftlog._delivery import Deadline
from raftlog.errors import (
    ConcurrentTransactions,
    InternalError,
    RaftlogError,
    RequestTimedOut,
    RetriableError,
    UnknownTopicId,
    UnknownTopicOrPartition,
    UnsupportedVersion,
)
from raftlog.v1 import group_pb2, transaction_pb2

_CONCURRENT_PAUSE_S: Final = 0.02
"""Markers of the transaction before are on their way, which takes milliseconds (as Kafka's ADD_PARTITIONS_RETRY)."""
_CONCURRENT_PAUSE_MAX_S: Final = 0.5
LEAST_S: Final = 0.05
"""Every call is tried, however late."""

TOPIC_UNKNOWN: Final = (UnknownTopicId, UnknownTopicOrPartition)
"""What a coordinator says that has not heard of a topic yet, or has heard that it is deleted."""

Partitions = Iterable[tuple[bytes, int]]
"""Topic ids and partitions."""
Outdated = Callable[[], Awaitable[bool]]
"""Looks again at the topics of a call, and returns whether the ids of some are others by now."""


def by_topic(partitions: Partitions) -> list[group_pb2.TopicPartitions]:
    """Return partitions as they travel: by topic id, ascending, none twice."""
    found: dict[bytes, set[int]] = {}
    for topic_id, partition in partitions:
        found.setdefault(topic_id, set()).add(partition)
    return [group_pb2.TopicPartitions(topic_id=each, partitions=sorted(found[each])) for each in sorted(found)]


class TransactionCalls:
    """Every call is sent again, to whoever coordinates then, while the refusal may pass and the deadline has not.

    All of them may be repeated: the coordinator recognizes what it has done already.
    """

    def __init__(self, metadata: MetadataCache, connections: Connections, options: CoordinatorOptions) -> None:
        self._options = options
        self.coordinators = Coordinators(metadata, connections, options, TRANSACTIONS)
        self.last_error: RaftlogError | None = None
        """Why the call that is under way has not succeeded yet."""

    async def call(
        self, id_: str, method: str, request: Any, deadline: Deadline, outdated: Outdated | None = None
    ) -> Any:
        """Call a method of the Transaction service at the coordinator of a transactional id or sink id.

        `outdated` is asked when the coordinator does not know a topic: true gives the call up at once.

        Raises:
            RequestTimedOut: not within the deadline; what was asked for may have happened, and may be asked again.
            UnknownTopicId, UnknownTopicOrPartition: the call is outdated, or the coordinator says so for long.
            RaftlogError: refused for good.
        """
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        failures = 0
        error: RaftlogError | None = None
        while True:
            left_s = deadline.left()
            attempt_s = self._options.request_timeout_ms / 1000
            if left_s is not None:
                attempt_s = min(attempt_s, max(left_s, LEAST_S))
            try:
                async with asyncio.timeout(attempt_s):  # finding the coordinator counts, too
                    response = await self.coordinators.call(id_, method, request, attempt_s)
                self.last_error = None
                return response
            except (RetriableError, InternalError) as refused:
                error = refused
            except UnsupportedVersion as old:
                raise UnsupportedVersion(f"{old}; this server has no transactions, update it") from None
            except TimeoutError:
                error = error or RequestTimedOut(f"the coordinator of {id_!r} has not answered in time")
            denied = isinstance(error, TOPIC_UNKNOWN)
            if denied and (
                (outdated is not None and await outdated()) or loop.time() - began_s > UNKNOWN_TOPIC_GRACE_S
            ):
                raise error
            self.last_error = error
            failures += 1
            pause_s = self._pause_s(error, failures)
            left_s = deadline.left()
            if left_s is not None and left_s <= pause_s:
                raise RequestTimedOut(f"no answer to {method} of {id_!r} in time; the last error: {error}") from error
            await asyncio.sleep(pause_s)

    def _pause_s(self, error: RaftlogError, failures: int) -> float:
        if isinstance(error, ConcurrentTransactions):
            return min(_CONCURRENT_PAUSE_S * 2.0 ** max(0, min(failures - 10, 10)), _CONCURRENT_PAUSE_MAX_S)
        return self._options.pauses.after_ms(error, failures) / 1000

    # Transactions

    async def init_producer_id(
        self, transactional_id: str, transaction_timeout_ms: int, had: ProducerId | None, deadline: Deadline
    ) -> ProducerId:
        """Return numbers for the next transaction; whoever had the id before is fenced, what that left open is aborted.

        `had`: numbers of this same producer, who goes on (KIP-360); None: a new one takes the id over.

        Raises:
            ProducerFenced, InvalidProducerIdMapping: with `had`: somebody else has taken over since.
            InvalidTransactionTimeout: above the server's transaction.max.timeout.ms.
            RaftlogError: as `call`.
        """
        request = transaction_pb2.InitProducerIdRequest(
            transactional_id=transactional_id, transaction_timeout_ms=transaction_timeout_ms
        )
        if had is not None:
            request.producer_id, request.producer_epoch = had
        response = await self.call(transactional_id, "InitProducerId", request, deadline)
        return ProducerId(response.producer_id, response.producer_epoch)

    async def add(
        self,
        transactional_id: str,
        producer: ProducerId,
        deadline: Deadline,
        *,
        partitions: Partitions = (),
        group_ids: Iterable[str] = (),
        outdated: Outdated | None = None,
    ) -> None:
        """Begin the transaction if it has not begun, and add to it.

        Raises:
            TransactionAbortable: it has timed out. ProducerFenced, InvalidProducerIdMapping: somebody has taken over.
            RaftlogError: as `call`.
        """
        request = transaction_pb2.AddToTransactionRequest(
            transactional_id=transactional_id,
            producer_id=producer.producer_id,
            producer_epoch=producer.producer_epoch,
            partitions=by_topic(partitions),
            group_ids=sorted(group_ids),
        )
        await self.call(transactional_id, "AddToTransaction", request, deadline, outdated)

    async def end(self, transactional_id: str, producer: ProducerId, deadline: Deadline, *, commit: bool) -> ProducerId:
        """Decide, and return the numbers of the next transaction. Asked again, it answers the same.

        Raises:
            TransactionAbortable, ProducerFenced, InvalidProducerIdMapping: as `add`.
            InvalidTxnState: it was decided otherwise before.
            RaftlogError: as `call`.
        """
        request = transaction_pb2.EndTransactionRequest(
            transactional_id=transactional_id,
            producer_id=producer.producer_id,
            producer_epoch=producer.producer_epoch,
            commit=commit,
        )
        response = await self.call(transactional_id, "EndTransaction", request, deadline)
        return producer._replace(producer_epoch=response.producer_epoch)

    # Staged batches

    async def init_stage(
        self,
        sink_id: str,
        batch_id: int,
        deadline: Deadline,
        *,
        target: str,
        partitions: Partitions,
        timeout_ms: int,
        attempt: str = "",
        outdated: Outdated | None = None,
    ) -> ProducerId:
        """Begin a stage with the partitions that are written to first; return its numbers.

        An answer that was lost leaves a stage behind that nobody writes to, until it times out.

        Raises:
            BatchAlreadyCommitted: there is nothing left to write. SinkMismatch: the sink writes somewhere else.
            RaftlogError: as `call`.
        """
        request = transaction_pb2.InitStageRequest(
            sink_id=sink_id,
            batch_id=batch_id,
            target=target,
            partitions=by_topic(partitions),
            timeout_ms=timeout_ms,
            attempt=attempt,
        )
        response = await self.call(sink_id, "InitStage", request, deadline, outdated)
        return ProducerId(response.producer_id, response.producer_epoch)

    async def add_to_stage(
        self,
        sink_id: str,
        producer_id: int,
        partitions: Partitions,
        deadline: Deadline,
        outdated: Outdated | None = None,
    ) -> None:
        """Add partitions to a stage, before their first record.

        Raises:
            StageExpired: it is gone. RaftlogError: as `call`.
        """
        request = transaction_pb2.AddToStageRequest(
            sink_id=sink_id, producer_id=producer_id, partitions=by_topic(partitions)
        )
        await self.call(sink_id, "AddToStage", request, deadline, outdated)

    async def abort_stages(
        self,
        sink_id: str,
        producer_ids: Iterable[int],
        deadline: Deadline,
        *,
        fenced_attempts: str = "",
        batch_id: int = 0,
    ) -> None:
        """Abort stages; those that are gone already are passed over.

        `fenced_attempts`: also those of the batch whose attempts begin with this, and have none of them begin any more.

        Raises:
            RaftlogError: as `call`.
        """
        request = transaction_pb2.AbortStagesRequest(
            sink_id=sink_id, producer_ids=producer_ids, fenced_attempts=fenced_attempts, batch_id=batch_id
        )
        await self.call(sink_id, "AbortStages", request, deadline)

    async def commit_batch(
        self,
        sink_id: str,
        batch_id: int,
        producer_ids: Iterable[int],
        deadline: Deadline,
        *,
        target: str,
        expire_after_ms: int = 0,
    ) -> transaction_pb2.CommitBatchResponse:
        """Commit the winners of a batch, and abort all else up to it. Asked again, it answers the same.

        `expire_after_ms`: how long the sink is remembered, if not for as long as any.

        Raises:
            StageExpired: a winner is gone; nothing was committed. SinkMismatch: the sink writes somewhere else.
            RaftlogError: as `call`.
        """
        request = transaction_pb2.CommitBatchRequest(
            sink_id=sink_id,
            batch_id=batch_id,
            target=target,
            producer_ids=producer_ids,
            expire_after_ms=expire_after_ms,
        )
        response: transaction_pb2.CommitBatchResponse = await self.call(sink_id, "CommitBatch", request, deadline)
        return response

    async def last_batch(self, sink_id: str, deadline: Deadline) -> transaction_pb2.LastBatchResponse:
        """Return what the sink has committed last, and its open stages.

        Raises:
            RaftlogError: as `call`.
        """
        request = transaction_pb2.LastBatchRequest(sink_id=sink_id)
        response: transaction_pb2.LastBatchResponse = await self.call(sink_id, "LastBatch", request, deadline)
        return response

    async def close(self) -> None:
        """Look nothing up any more."""
        await self.coordinators.close()
