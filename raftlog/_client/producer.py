"""The producer's engine: from open batches to acknowledgements.

From the bottom up:
- `ProducerIds` asks the cluster for the producer id of an idempotent producer;
- `TransactionCalls` calls the coordinator of a transactional id or of a sink, with retries and a deadline;
- `PartitionGate` tells the engine which partitions it may write to: of `Transactions` here, and of stages;
- `ProduceCall` is one call to a broker, which several producers may share (docs/adr/0040);
- `ProduceStream` is the part of one producer in it: its requests to one broker, and their answers;
- `Transactions` runs the transactions of one producer;
- `ProducerEngine` batches records within `buffer.memory`, routes batches to leaders and settles their answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import random
import threading
import weakref
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

import grpc

from raftlog._client.connections import Connections, client_id_metadata, connections, from_grpc, shared_connections
from raftlog._client.coordinators import TRANSACTIONS, CoordinatorOptions, Coordinators
from raftlog._client.groups import Entry, commit_errors, in_pieces, passes, to_commit
from raftlog._client.metadata import UNKNOWN_TOPIC_GRACE_S, MetadataCache, monotonic_ms
from raftlog._client.options import ProducerOptions
from raftlog._core.accumulator import (
    BATCH_BYTES,
    Accumulator,
    AccumulatorConfig,
    Batch,
    Numbering,
    Partitioner,
    PartitionQueue,
    TopicQueues,
)
from raftlog._core.backoff import Pauses
from raftlog._core.metrics import Metrics, ProducerMetrics
from raftlog._core.rows import Piece
from raftlog._core.transaction_state import Numbers, TransactionPhase, TransactionState
from raftlog._delivery import Alarm, Deadline, wait_async
from raftlog.errors import (
    AuthorizationError,
    BrokerUnavailable,
    BufferExhausted,
    ChainBroken,
    ClosedError,
    ConcurrentTransactions,
    DeliveryTimeout,
    DuplicateSequence,
    FencedError,
    FencedMemberEpoch,
    InternalError,
    InvalidProducerEpoch,
    InvalidRequestError,
    InvalidTxnState,
    LeaderNotAvailable,
    MessageTooLarge,
    NotLeader,
    RaftlogError,
    RequestTimedOut,
    RetriableError,
    SequenceError,
    StaleMemberEpoch,
    TransactionAbortable,
    UnknownProducerId,
    UnknownTopicId,
    UnknownTopicOrPartition,
    UnsupportedVersion,
    from_wire,
)
from raftlog.format import Attributes
from raftlog.format.wire import MANY_REQUESTS, MAX_PRODUCERS, Produce, ProducePart, encode_produce
from raftlog.types import GroupMetadata, Header, OffsetAndMetadata, TopicPartition
from raftlog.v1 import common_pb2, group_pb2, log_pb2, transaction_pb2, transaction_pb2_grpc

logger = logging.getLogger(__name__)

_HEDGE_S: Final = 0.2
"""After this long without an answer the next broker is asked as well."""
_ADDRESS_TIMEOUT_S: Final = 3.0
"""How long one broker may take."""


class ProducerId(NamedTuple):
    """A producer id and the epoch it starts with."""

    producer_id: int
    producer_epoch: int


class ProducerIds:
    """The producer id of one producer: requested in the background, and again after it is retired.

    Transitions:
        none   -> asking   `want`
        asking -> here     a broker has answered; calls `on_here`
        asking -> none     the cluster refuses for good; calls `on_refused` with the reason
        here   -> none     `retire`: the next queue that needs an id gets another one
    """

    def __init__(
        self,
        connections: Connections,
        metadata: MetadataCache,
        pauses: Pauses,
        *,
        on_here: Callable[[], None],
        on_refused: Callable[[RaftlogError], None],
    ) -> None:
        self.current: ProducerId | None = None
        self.last_error: RaftlogError | None = None
        """Why there is none yet."""
        self._connections = connections
        self._metadata = metadata
        self._pauses = pauses
        self._on_here = on_here
        self._on_refused = on_refused
        self._asking: asyncio.Task[None] | None = None

    def want(self) -> None:
        """Request an id, unless one is there or on its way."""
        if self.current is None and self._asking is None:
            self._asking = asyncio.get_running_loop().create_task(self._ask())

    def retire(self, producer_id: int) -> None:
        """Give this id to no further queue."""
        if self.current is not None and self.current.producer_id == producer_id:
            self.current = None

    async def close(self) -> None:
        """Ask no more."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)

    async def _ask(self) -> None:
        failures = 0
        error: RaftlogError
        try:
            while True:
                try:
                    self.current = await self._ask_all()
                except (AuthorizationError, UnsupportedVersion) as final:
                    self.last_error = final
                    break
                except RaftlogError as broke:
                    error = broke
                    logger.debug("no producer id yet: %s", error)
                except Exception as bug:  # a bug of ours must not leave batches waiting for an id
                    logger.exception("asking for a producer id failed")
                    error = from_grpc(bug, "the cluster")
                else:
                    self.last_error = None
                    break
                self.last_error = error
                failures += 1
                await asyncio.sleep(self._pauses.after_ms(error, failures) / 1000)
        finally:
            self._asking = None
        if self.current is not None:
            self._on_here()
        elif self.last_error is not None:
            self._on_refused(self.last_error)

    def _addresses(self) -> list[str]:
        """Return the addresses to ask, silent brokers last."""
        brokers = self._metadata.view.brokers
        silent = {brokers[each].address for each in brokers if self._metadata.silent_since(each) is not None}
        known = [broker.address for broker in brokers.values()]
        addresses = list(dict.fromkeys([*known, *self._metadata.bootstrap]))
        return sorted(addresses, key=lambda address: address in silent)

    async def _ask_all(self) -> ProducerId:
        """Ask one broker after the other until one gives an id.

        Raises:
            UnsupportedVersion: every broker is too old to give producer ids.
            RaftlogError: no broker gives one at the moment.
        """
        loop = asyncio.get_running_loop()
        addresses = self._addresses()
        asked: dict[asyncio.Task[ProducerId], str] = {}
        errors: list[RaftlogError] = []
        waiting = list(addresses)
        try:
            while asked or waiting:
                if waiting:
                    address = waiting.pop(0)
                    asked[loop.create_task(self._ask_one(address))] = address
                done, _ = await asyncio.wait(
                    asked, timeout=_HEDGE_S if waiting else None, return_when=asyncio.FIRST_COMPLETED
                )
                for task in done:
                    del asked[task]
                    try:
                        return task.result()
                    except RaftlogError as error:
                        errors.append(error)
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
        # Too old is final only if all brokers are: during a rolling update others answer.
        raise next((error for error in errors if not isinstance(error, UnsupportedVersion)), errors[0])

    async def _ask_one(self, address: str) -> ProducerId:
        stub = transaction_pb2_grpc.TransactionStub(self._connections.channel(address))  # type: ignore[no-untyped-call,unused-ignore] # generated
        try:
            response = await stub.InitProducerId(transaction_pb2.InitProducerIdRequest(), timeout=_ADDRESS_TIMEOUT_S)
        except (grpc.RpcError, asyncio.InvalidStateError) as error:
            raise from_grpc(error, address) from None
        if response.error.code:
            raise from_wire(response.error)
        return ProducerId(response.producer_id, response.producer_epoch)


_CONCURRENT_PAUSE_S: Final = 0.02
"""The pause while markers of the previous transaction are still being written, which takes milliseconds (Kafka's
ADD_PARTITIONS_RETRY)."""
_CONCURRENT_PAUSE_MAX_S: Final = 0.5
LEAST_S: Final = 0.05
"""Every call gets one attempt of at least this long, even past its deadline."""

TOPIC_UNKNOWN: Final = (UnknownTopicId, UnknownTopicOrPartition)
"""A coordinator's errors for a topic that it does not know yet, or knows to be deleted."""

Partitions = Iterable[tuple[bytes, int]]
"""Topic ids and partitions."""
Outdated = Callable[[], Awaitable[bool]]
"""Refreshes the metadata of a call's topics; returns whether the id of any topic has changed."""


def by_topic(partitions: Partitions) -> list[group_pb2.TopicPartitions]:
    """Return partitions for a request: by topic id, ascending, without duplicates."""
    found: dict[bytes, set[int]] = {}
    for topic_id, partition in partitions:
        found.setdefault(topic_id, set()).add(partition)
    return [group_pb2.TopicPartitions(topic_id=each, partitions=sorted(found[each])) for each in sorted(found)]


class TransactionCalls:
    """Calls to the coordinator of a transactional id or a sink, retried until their deadline.

    A retry goes to the current coordinator. All calls are idempotent: the coordinator recognizes repeated ones.
    """

    def __init__(self, metadata: MetadataCache, connections: Connections, options: CoordinatorOptions) -> None:
        self._options = options
        self.coordinators = Coordinators(metadata, connections, options, TRANSACTIONS)
        self.last_error: RaftlogError | None = None
        """Why the current call has not succeeded yet."""

    async def call(
        self, id_: str, method: str, request: Any, deadline: Deadline, outdated: Outdated | None = None
    ) -> Any:
        """Call a method of the Transaction service at the coordinator of a transactional id or sink id.

        `outdated` is called when the coordinator does not know a topic; if it returns true, the call fails at once.

        Raises:
            RequestTimedOut: no answer within the deadline; the coordinator may have acted, and a repeat is safe.
            UnknownTopicId, UnknownTopicOrPartition: the call is outdated, or the topic stays unknown for long.
            RaftlogError: the coordinator refuses for good.
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
        """Return numbers for the next transaction; fence earlier producers of the id and abort their open transaction.

        `had`: the numbers of this same producer, which continues (KIP-360); None: a new producer takes the id over.

        Raises:
            ProducerFenced, InvalidProducerIdMapping: with `had`: another producer has taken over since.
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
        """Add partitions and groups to the transaction, and begin it if it has not begun.

        Raises:
            TransactionAbortable: it has timed out. ProducerFenced, InvalidProducerIdMapping: another producer has
                taken over.
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
        """Commit or abort; return the numbers of the next transaction. A repeated call gets the same answer.

        Raises:
            TransactionAbortable, ProducerFenced, InvalidProducerIdMapping: as `add`.
            InvalidTxnState: the transaction was decided the other way.
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
        """Begin a stage with its first partitions; return its numbers.

        A lost answer leaves an unused stage behind until it times out.

        Raises:
            BatchAlreadyCommitted: the batch needs no more writes. SinkMismatch: the sink has another target.
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
            StageExpired: the stage has ended. RaftlogError: as `call`.
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
        """Abort stages, except those that have already ended.

        `fenced_attempts`: a prefix: also abort the stages of the batch whose attempt begins with it, and refuse such
        attempts from now on.

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
        """Commit the named stages of a batch, abort all others up to it. A repeated call gets the same answer.

        `expire_after_ms`: how long the coordinator remembers the sink; 0: the server's default.

        Raises:
            StageExpired: a named stage has ended; nothing was committed. SinkMismatch: the sink has another target.
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
        """Return the last committed batch of the sink, and its open stages.

        Raises:
            RaftlogError: as `call`.
        """
        request = transaction_pb2.LastBatchRequest(sink_id=sink_id)
        response: transaction_pb2.LastBatchResponse = await self.call(sink_id, "LastBatch", request, deadline)
        return response

    async def close(self) -> None:
        """Close the look-up of coordinators."""
        await self.coordinators.close()


class TransactionOwner(NamedTuple):
    """The owner of the transaction of a request's records: a transactional id, or a sink (for a stage)."""

    transactional_id: str = ""
    sink_id: str = ""


class PartitionGate(Protocol):
    """Decides which partitions the engine may write to: a transaction adds a partition before its first record.

    `may_send` also requests that the gate opens. The implementation calls `ProducerEngine.gate_opened` when more may be
    sent, or `ProducerEngine.fail_incomplete` when nothing will be.
    """

    @property
    def last_error(self) -> RaftlogError | None:
        """Why the gate stays closed, if known."""

    @property
    def owner(self) -> TransactionOwner:
        """The owner of the transaction, which every request names."""

    def may_send(self, topic_partition: TopicPartition, topic_id: bytes) -> bool:
        """Return whether records may go to the partition; if not, have the partition added.

        The engine calls it on the event loop and under its lock, when a batch is open and before every request. It must
        be quick and must not call the engine back. A topic that was created again has another id.
        """

    def check_may_send(self) -> None:
        """Refuse a record without an open transaction or stage; in any thread, under the engine's lock.

        Raises:
            RaftlogError: no transaction is open, or the open one can only be aborted.
        """

    def on_failure(self, topic_partition: TopicPartition, error: RaftlogError) -> None:
        """Records have failed for good, so their transaction or stage cannot be committed.

        Called for every batch, in any thread, under the engine's lock; it must not call the engine back.
        """

    def on_over(self, topic_partition: TopicPartition, error: RaftlogError) -> RaftlogError | None:
        """A partition refuses records because their transaction or stage has ended: return the error for them.

        None: the reason is not known yet, and the gate calls `ProducerEngine.fail_incomplete` later. Called as
        `on_failure`.
        """

    def on_not_sent(self, error: Exception) -> None:
        """`send` has refused a record before it was queued, with this error. Called as `on_failure`."""


class Identity(Protocol):
    """The source of an engine's producer id."""

    current: ProducerId | None
    """None: batches wait for one."""
    last_error: RaftlogError | None
    """Why there is none yet."""

    def want(self) -> None:
        """Request an id if there is none."""

    def retire(self, producer_id: int) -> None:
        """Give this id to no further queue."""

    async def close(self) -> None:
        """Ask no more."""


class GivenProducerId:
    """A producer id that a coordinator gives to each transaction or stage.

    `ProducerEngine.renumber` sets it; before that, and after `renumber(None)`, batches wait.
    """

    def __init__(self, current: ProducerId | None = None) -> None:
        self.current = current
        self.last_error: RaftlogError | None = None

    def want(self) -> None:
        """Do nothing: the begin of the next transaction brings the id."""

    def retire(self, producer_id: int) -> None:
        """Do nothing: the end of the transaction brings the next id."""

    async def close(self) -> None:
        """Do nothing."""


LEADER_ERRORS: Final = frozenset(
    {
        common_pb2.NOT_LEADER_OR_FOLLOWER,
        common_pb2.FENCED_LEADER_EPOCH,
        common_pb2.UNKNOWN_LEADER_EPOCH,
        common_pb2.UNKNOWN_TOPIC_ID,
        common_pb2.UNKNOWN_TOPIC_OR_PARTITION,
        common_pb2.LEADER_NOT_AVAILABLE,
        common_pb2.STORAGE_ERROR,
        common_pb2.SHUTTING_DOWN,
    }
)
"""Errors after which another broker may lead."""
CERTAIN: Final = frozenset(
    {
        common_pb2.FENCED_LEADER_EPOCH,
        common_pb2.UNKNOWN_LEADER_EPOCH,
        common_pb2.UNKNOWN_TOPIC_ID,
        common_pb2.UNKNOWN_TOPIC_OR_PARTITION,
        common_pb2.LEADER_NOT_AVAILABLE,
        common_pb2.NOT_ENOUGH_REPLICAS,
        common_pb2.STORAGE_FULL,
        common_pb2.BROKER_OVERLOADED,
    }
)
"""Errors that prove that the broker has not appended the batch. All others, even NotLeader, may follow an append."""


SLICE_BYTES: Final = 1 << 20
"""`send_batch` cuts its rows into batches of about this size, or of `batch.size` where that is larger."""

Callbacks = list[Callable[[], None]]


def on_numbers_refused(
    engine: ProducerEngine,
    ids: Identity,
    batch: Batch,
    error: SequenceError | InvalidProducerEpoch,
    callbacks: Callbacks,
) -> None:
    """Settle a batch whose producer numbers the broker refuses (docs/adr/0012); under the lock.

    `DuplicateSequence`: the batch is in the log, at an offset that the broker no longer knows, or within a larger batch
    that was split for a retry. `OutOfOrderSequence`, `UnknownProducerId`: it is not in the log, and the queue is
    numbered again (KIP-360). `InvalidProducerEpoch`: another producer uses the producer id.
    """
    queue = batch.queue
    numbering = queue.numbering
    assert numbering is not None
    queue.note_failure(error)
    if isinstance(error, DuplicateSequence):
        queue.on_accepted(batch)
        engine.complete(batch, callbacks)
    elif isinstance(error, InvalidProducerEpoch):
        logger.warning("%s: another producer uses producer id %d: %s", queue, batch.number.producer_id, error)
        ids.retire(batch.number.producer_id)
        for doubtful in queue.on_fenced(batch):
            engine.complete(doubtful, callbacks, error=error)
    else:
        if queue.is_first_in_flight(batch):
            _tell_of_loss(numbering, batch, error)
        queue.on_denied(batch)


def on_transactional_numbers_refused(
    engine: ProducerEngine,
    batch: Batch,
    error: SequenceError | InvalidProducerEpoch | InvalidTxnState,
    callbacks: Callbacks,
) -> None:
    """Settle a refused batch of a transaction or stage, which keeps the coordinator's numbers; under the lock.

    `DuplicateSequence`: the batch is in the log. `InvalidProducerEpoch`, `InvalidTxnState`: a marker came before it, so
    its transaction has ended. Other errors: records before it are missing. For the first batch in flight this is final
    and the transaction can only be aborted; any other batch is sent again.
    """
    queue = batch.queue
    if batch.done:  # its transaction is over
        queue.on_refused(batch, resend=False, counts=False)
        return
    queue.note_failure(error)
    if isinstance(error, DuplicateSequence):
        queue.on_accepted(batch)
        engine.complete(batch, callbacks)
    elif not isinstance(error, SequenceError):
        queue.on_refused(batch, resend=False, counts=False)
        engine.over(batch, error, callbacks)
    elif queue.is_first_in_flight(batch):
        queue.on_refused(batch, resend=False, counts=False)
        engine.complete(batch, callbacks, error=error)
    else:
        queue.on_refused(batch, resend=True, counts=False)


def _tell_of_loss(numbering: Numbering, batch: Batch, error: SequenceError) -> None:
    """Log that acknowledged records are lost, or no longer known to the broker."""
    number = batch.number
    if not numbering.follows_acknowledged(number):
        logger.debug("%s: a batch before sequence %d has failed, so numbering restarts", batch.queue, number[2])
    elif isinstance(error, UnknownProducerId):
        logger.info(
            "%s: the broker does not know producer %d any more: it was idle for longer than producer.id.expiration.ms, "
            "or the topic was created again; it continues in a new epoch",
            batch.queue,
            number.producer_id,
        )
    else:
        logger.warning(
            "%s: acknowledged records before sequence %d of producer %d are not in the log any more (%s); this happens "
            "when a replica that was not in sync becomes leader (unclean.leader.election.enable), or when disks are "
            "lost; unacknowledged records are sent in a new epoch",
            batch.queue,
            number.base_sequence,
            number.producer_id,
            error,
        )


_LAST_WORDS_S: Final = 2.0
"""How long `close` waits for the broker to read requests that get no answer (acks=0)."""
_ANSWER_GRACE_MS: Final = 1000.0
"""The broker answers within `request.timeout.ms`; a stream that is silent for this much longer is dead."""


_WRITTEN_REQUESTS: Final = 256
"""How many of the last requests with acks=0 are remembered, to understand their refusals."""
_SILENCE_MS: Final = 500.0
"""After this long without an answer the stream asks whether the broker lives and still leads."""
_LAST_ANSWER_MS: Final = 100.0
"""How long a live former leader may take to answer its requests. It learns of the change as soon as other brokers do,
and without idempotence a retry of a batch that it has appended would be a duplicate."""


class _Flight:
    """One unanswered request. None stands for a batch whose answer no longer matters."""

    __slots__ = ("batches", "sent_ms", "topic_ids")

    def __init__(self, sent_ms: float) -> None:
        self.batches: list[Batch | None] = []
        self.topic_ids: list[bytes] = []
        """The id of the topic that each batch was sent to: when the answer comes, another topic may have its name."""
        self.sent_ms = sent_ms

    def add(self, batch: Batch, topic_id: bytes) -> None:
        """Add the next batch."""
        self.batches.append(batch)
        self.topic_ids.append(topic_id)

    def live(self) -> list[Batch]:
        """Return the batches that wait for the answer."""
        return [batch for batch in self.batches if batch is not None]


_MESSAGE_BYTES: Final = 48 << 10
"""Requests of several producers go into one message up to about this size."""
_BULK_BYTES: Final = 32 << 10
"""A producer that has this much to send at once moves to a call of its own."""
_UNANSWERED_MESSAGES: Final = 2
"""While so many messages of several producers have no answer, requests gather for the next message."""
_UNANSWERED_REQUESTS: Final = 4
"""The same for the requests in these messages."""
_GATHER_MS: Final = 20.0
"""How long requests gather at most: a partition that waits for its replicas must not hold up the others."""
_ACCEPTED_S: Final = 3.0
"""How long a broker may take to say whether it serves several producers on a call."""


class _Message(NamedTuple):
    """A message without any answer: its first and last correlation id, and when it was sent."""

    first_id: int
    last_id: int
    sent_ms: float


class ProduceCall:
    """One `Log.Produce` call to a broker, and the producers that send on it, each with a `ProduceStream`.

    A message takes one request of each producer that has one, in turn, and every answer goes back to the producer that
    asked. Each producer keeps its own limits, order and sequence numbers. If the call breaks, it breaks for all of
    them: each sends its unanswered requests again on another call.

    While several producers send, requests gather as long as `_UNANSWERED_MESSAGES` or `_UNANSWERED_REQUESTS` have no
    answer, for `_GATHER_MS` at most. So a busy broker gets fewer messages with more in each, and an idle one gets each
    request at once.

    On a call that may be shared, only the first producer sends until the broker's initial metadata tells whether it
    serves several:

        unknown -> shared   it does: all may send
        unknown -> alone    it does not, or says nothing: an earlier version; the other producers leave
    """

    def __init__(self, channel: grpc.aio.Channel, address: str, client_id: str, *, shared: bool) -> None:
        self._address = address
        self._is_shared: bool | None = None if shared else False
        """None: the broker has not answered yet."""
        self._streams: dict[ProduceStream, int] = {}
        """The producers on the call, with their lanes: the broker keeps the order within each lane."""
        self._left_lanes: list[int] = []
        """The lanes of producers that have left; the next message names them to the broker."""
        self._lanes = itertools.count(1) if shared else itertools.repeat(0)
        self._ready: dict[ProduceStream, None] = {}
        """The streams that may have a request, the one that has waited longest first."""
        self._owners: dict[int, ProduceStream] = {}
        """By correlation id: the stream that waits for the answer."""
        self._last_id = 0
        self._unanswered: list[_Message] = []
        """Messages that were not full, and have no answer; the oldest first."""
        self._gather_timer: asyncio.TimerHandle | None = None
        self._wake = asyncio.Event()
        self._ended_by: RaftlogError | None = None
        self.throttled_until_ms = 0.0
        """Until when the client is over a quota: it sends nothing, and the broker reads none of its requests."""
        method = channel.stream_stream(
            "/raftlog.v1.Log/Produce",
            request_serializer=encode_produce,
            response_deserializer=log_pb2.ProduceResponse.FromString,
        )
        self._call: Any = method(metadata=(*client_id_metadata(client_id), *((MANY_REQUESTS,) if shared else ())))
        self._loop = asyncio.get_running_loop()
        self._task = self._loop.create_task(self._run())
        self._task.add_done_callback(self._over)

    @property
    def is_shared(self) -> bool:
        """Whether producers share the call, or may once the broker has answered."""
        return self._is_shared is not False

    @property
    def has_room(self) -> bool:
        """Whether another producer may join."""
        return self.is_shared and self._ended_by is None and len(self._streams) < MAX_PRODUCERS

    def join(self, stream: ProduceStream) -> None:
        """Send the requests of this producer too; `stream.ended` tells it of the end."""
        self._streams[stream] = next(self._lanes)
        self.ready(stream)

    def leave(self, stream: ProduceStream) -> None:
        """Send nothing more of this producer, and drop the answers that it waits for."""
        lane = self._streams.pop(stream, None)
        if lane is None:
            return
        self._left_lanes.append(lane)
        self._ready.pop(stream, None)
        for correlation_id in [each for each, owner in self._owners.items() if owner is stream]:
            del self._owners[correlation_id]
        if self._streams:
            self._wake.set()  # another producer may now be the first
        else:
            self.end(ClosedError("no producer sends on the call any more"))

    def ready(self, stream: ProduceStream) -> None:
        """Note that a producer may have a request, and wake the writer to ask it."""
        if stream in self._streams:
            self._ready[stream] = None
            self._wake.set()

    def end(self, error: RaftlogError) -> None:
        """End the call for all of its producers, with this error.

        This cancels the task as well: a write to a call that is cancelled before it has a connection never returns.
        """
        if self._ended_by is None:
            self._ended_by = error
            self._call.cancel()
            self._task.cancel()

    async def finish_writing(self) -> None:
        """Have the broker read everything that was written, and end the call."""
        await self._call.done_writing()
        await self._call.code()

    async def ended(self) -> None:
        """Return once a call without producers has ended."""
        if not self._streams:
            await asyncio.gather(self._task, return_exceptions=True)

    def _over(self, task: asyncio.Task[None]) -> None:
        error = self._ended_by or BrokerUnavailable(f"{self._address} closed the stream")
        for stream in list(self._streams):
            stream.ended(error)

    async def _run(self) -> None:
        reader = self._loop.create_task(self._read())
        reader.add_done_callback(lambda _: self._wake.set())
        tasks = [reader]
        if self._is_shared is None:
            tasks.append(self._loop.create_task(self._learn()))
        error: RaftlogError | None = None
        try:
            await self._write(reader)
            await reader  # raises the error that broke the call
        except (grpc.RpcError, asyncio.InvalidStateError, RaftlogError) as broke:
            error = from_grpc(broke, self._address)
        except asyncio.CancelledError:  # of this task, or of the call
            error = BrokerUnavailable(f"the call to {self._address} was cancelled")
        except Exception as bug:  # a bug of ours must not strand the batches
            logger.exception("the produce call to %s failed", self._address)
            error = from_grpc(bug, self._address)
        finally:
            self._ended_by = self._ended_by or error or BrokerUnavailable(f"{self._address} closed the stream")
            self._call.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _learn(self) -> None:
        """Find out whether the broker serves several producers on this call; the first one sends meanwhile."""
        shared = False
        with contextlib.suppress(TimeoutError, grpc.RpcError, asyncio.InvalidStateError):
            async with asyncio.timeout(_ACCEPTED_S):
                shared = MANY_REQUESTS in tuple(await self._call.initial_metadata() or ())
        if self._call.done():
            return  # it failed before the broker said anything: `_over` tells the producers why
        self._is_shared = shared
        if not shared:
            for stream in list(self._streams)[1:]:
                stream.send_alone()
        self._wake.set()

    async def _write(self, reader: asyncio.Task[None]) -> None:
        while not reader.done():
            message = None
            if self._may_write(monotonic_ms()):
                await self._let_others_in()
                message = self._next_message()
            if message is None:
                self._wake.clear()
                await self._wake.wait()
                continue
            try:
                await self._call.write(message)
            except asyncio.InvalidStateError:  # the call has ended, and the reader knows why
                await reader
                raise
            if message.head.acks == log_pb2.NO_ACK:
                stream = self._owners.pop(message.head.correlation_id, None)
                if stream is not None:
                    stream.written(message.head.correlation_id)

    def _may_write(self, now_ms: float) -> bool:
        if self.throttled_until_ms > now_ms:
            return False  # `_throttle` wakes the writer
        return bool(self._ready) and not self._gathers(now_ms)

    async def _let_others_in(self) -> None:
        """Wait as long as each turn of the event loop makes further producers ready.

        Threads become ready one after the other: each turn lets some of them have the interpreter's lock.
        """
        if len(self._streams) <= _UNANSWERED_MESSAGES:
            return
        before = -1
        while before < len(self._ready) < len(self._streams):
            before = len(self._ready)
            await asyncio.sleep(0)

    def _next_message(self) -> Produce | None:
        """Return the next message: one request, or one of each producer that has one; None if there is none."""
        candidates = list(self._ready)
        if self._is_shared is None:
            first = next(iter(self._streams), None)
            candidates = [first] if first is not None and first in self._ready else []
        requests: list[Produce] = []
        room_bytes = _MESSAGE_BYTES if self._is_shared else 0
        for stream in candidates:
            del self._ready[stream]
            request = stream.next_request(self._last_id + 1, self._streams[stream])
            if request is None:
                continue
            self._last_id += 1
            self._owners[self._last_id] = stream
            if stream.has_queues:
                self._ready[stream] = None  # to the back: the other producers come first
            requests.append(request)
            room_bytes -= sum(len(part.records) for part in request.parts)
            if room_bytes <= 0:
                break
        if not requests:
            return None
        if room_bytes > 0 and len(self._streams) > 1:
            self._unanswered.append(_Message(self._last_id - len(requests) + 1, self._last_id, monotonic_ms()))
        requests[0].head.left_lanes.extend(self._left_lanes)
        self._left_lanes.clear()
        return requests[0] if len(requests) == 1 else requests[0]._replace(more=requests[1:])

    def _gathers(self, now_ms: float) -> bool:
        """Whether requests wait for others, until a message is answered or `_GATHER_MS` have passed."""
        unanswered = self._unanswered
        while (
            len(unanswered) >= _UNANSWERED_MESSAGES
            or sum(message.last_id - message.first_id + 1 for message in unanswered) >= _UNANSWERED_REQUESTS
        ):
            left_ms = unanswered[0].sent_ms + _GATHER_MS - now_ms
            if left_ms > 0:
                if self._gather_timer is None:
                    self._gather_timer = self._loop.call_later(left_ms / 1_000, self._stop_gathering)
                return True
            del unanswered[0]
        return False

    def _stop_gathering(self) -> None:
        self._gather_timer = None
        self._wake.set()

    async def _read(self) -> None:
        while True:
            response = await self._call.read()
            if response is grpc.aio.EOF:
                code = await self._call.code()
                if code is not grpc.StatusCode.OK:
                    raise BrokerUnavailable(f"the stream ended: {code.name}: {await self._call.details()}")
                return
            self._take(response)
            for further in response.more:
                self._take(further)

    def _take(self, response: log_pb2.ProduceResponse) -> None:
        if response.throttle_time_ms > 0:
            self._throttle(response.throttle_time_ms)
        for index, message in enumerate(self._unanswered):
            if message.first_id <= response.correlation_id <= message.last_id:
                del self._unanswered[index]
                self._wake.set()  # others may have waited for this
                break
        stream = self._owners.pop(response.correlation_id, None)
        if stream is not None:
            stream.answered(response)
            if stream.has_queues:
                self.ready(stream)
        elif not any(each.refused_late(response) for each in self._streams) and not (
            self.is_shared and 0 < response.correlation_id <= self._last_id  # its producer has left
        ):
            raise BrokerUnavailable(f"the answer with correlation id {response.correlation_id} fits no request")

    def _throttle(self, throttle_time_ms: int) -> None:
        """Send nothing for this time (KIP-219); the broker would not read it."""
        self.throttled_until_ms = max(self.throttled_until_ms, monotonic_ms() + throttle_time_ms)
        self._loop.call_later(throttle_time_ms / 1_000 + 0.001, self._wake.set)


_shared_calls: weakref.WeakValueDictionary[tuple[object, ...], ProduceCall] = weakref.WeakValueDictionary()
"""By process, event loop, address, security, client id and request timeout. A call keeps its loop, and so its key."""


class ProduceStream:
    """The produce stream to one broker: sends the queues that it leads, in turn.

    A request takes as many ready batches as `max.request.size` allows, from all partitions: while the application keeps
    the interpreter lock busy, the event loop runs rarely, so each of its turns must do much.
    """

    def __init__(self, engine: ProducerEngine, node_id: int) -> None:
        self._engine = engine
        self._node_id = node_id
        self._queues: dict[PartitionQueue, None] = {}
        self._in_flight: dict[int, _Flight] = {}
        self._written: OrderedDict[int, list[tuple[PartitionQueue, bytes, int] | None]] = OrderedDict()
        """Requests with acks=0, oldest first; of each batch its queue, topic id, and leader epoch when sent."""
        self._unproven_since_ms: float | None = None
        """With acks=0: when the first request was written after the broker was last probed."""
        self._ready = asyncio.Event()
        self._call: ProduceCall | None = None
        self._left: asyncio.Future[RaftlogError | None] | None = None
        """While there is a call: the reason why this producer leaves it; None: to move to another call."""
        self._is_bulk = False
        """Whether this producer has much to send and therefore shares no call."""
        self._sends_alone = False
        """Whether the broker is known to serve only one producer on a call."""
        self._task = engine.spawn(self._run())
        self._failures = 0
        self._failing_since_ms: float | None = None
        self._leaving: dict[PartitionQueue, float] = {}
        """Queues with batches in flight here that another broker leads, and since when that is known."""

    @property
    def needs_ticks(self) -> bool:
        """Whether `check_silence` has to be called although no batch waits for an answer."""
        return self._unproven_since_ms is not None

    @property
    def has_queues(self) -> bool:
        """Whether it has a queue to send from."""
        return bool(self._queues)

    @property
    def requests_in_flight(self) -> int:
        """Requests that have no answer yet."""
        return len(self._in_flight)

    def add(self, queue: PartitionQueue) -> None:
        """Send from this queue, which the broker leads."""
        self._queues[queue] = None
        if self._call is not None:
            self._call.ready(self)
        else:
            self._ready.set()

    def check_leaders(self) -> None:
        """Give up queues that another broker leads now.

        An idempotent producer sends their batches in flight to the new leader at once, which recognizes duplicates.
        Without idempotence, a broker that is still alive gets `_LAST_ANSWER_MS` to send its answers.
        """
        engine = self._engine
        now_ms = engine.now_ms()
        with engine.lock:
            for queue in list(self._queues):
                leader = engine.metadata.view.leader(queue.topic, queue.partition)
                if leader is None or leader.broker_id != self._node_id:
                    del self._queues[queue]
                    engine.reroute(queue)
            before, self._leaving = self._leaving, {}
            for flight in self._in_flight.values():
                for batch in flight.live():
                    leader = engine.metadata.view.leader(batch.queue.topic, batch.queue.partition)
                    if leader is not None and leader.broker_id != self._node_id:
                        self._leaving[batch.queue] = before.get(batch.queue, now_ms)
        if self._queues and self._failing_since_ms is not None:
            engine.request_refresh(self._failing_since_ms)
        self._leave(now_ms)

    def _leave(self, now_ms: float) -> None:
        """Send batches that this broker no longer answers to their new leaders."""
        if not self._leaving:
            return
        engine = self._engine
        silent = engine.metadata.silent_since(self._node_id) is not None
        left = {
            queue: None
            for queue, since_ms in self._leaving.items()
            if silent or queue.numbering is not None or now_ms - since_ms >= _LAST_ANSWER_MS
        }
        if not left:
            return
        callbacks: Callbacks = []
        error = NotLeader(f"broker {self._node_id} has not answered, and no longer leads")
        with engine.lock:
            for flight in self._in_flight.values():
                for index, batch in enumerate(flight.batches):
                    if batch is not None and batch.queue in left:
                        flight.batches[index] = None
                        engine.send_again(batch, error, callbacks)
            for queue in left:
                del self._leaving[queue]
            engine.settle(left)
        engine.finish(callbacks)
        if not any(flight.live() for flight in self._in_flight.values()):
            self._break_off(error)  # no batch waits for the answers, which would hold later requests up

    def _break_off(self, error: RaftlogError) -> None:
        """Leave the call, and end it for other producers too unless only the leader has changed."""
        if self._left is not None and self._call is not None and not self._left.done():
            self._left.set_result(error)
            if not isinstance(error, NotLeader):
                self._call.end(error)

    def check_silence(self, now_ms: float) -> None:
        """Probe the broker when its oldest request is unanswered for long; after the request timeout, end the call.

        With acks=0 the broker answers nothing, and a paused broker takes requests as before. So it is probed repeatedly
        while there are such requests; newer metadata shows when another broker leads.
        """
        self._leave(now_ms)
        if self._unproven_since_ms is not None and now_ms - self._unproven_since_ms > _SILENCE_MS:
            self._engine.request_refresh(self._unproven_since_ms, probe=self._node_id)
            self._unproven_since_ms = None
        limit_ms = self._engine.options.request_timeout_ms + _ANSWER_GRACE_MS
        oldest = next(iter(self._in_flight.values()), None)
        if oldest is None or self._call is None:
            return
        unread_ms = max(oldest.sent_ms, self._call.throttled_until_ms)  # a broker that holds the stream is not silent
        if now_ms - unread_ms > limit_ms:
            limit = f"request.timeout.ms={self._engine.options.request_timeout_ms}"
            self._break_off(RequestTimedOut(f"broker {self._node_id} has not answered within {limit}"))
        elif now_ms - unread_ms > _SILENCE_MS:
            self._engine.request_refresh(oldest.sent_ms, probe=self._node_id)

    async def close(self) -> None:
        """Leave the call; requests with acks=0 that were written still arrive."""
        call = self._call
        if call is not None and self._engine.options.acks == log_pb2.NO_ACK:
            with contextlib.suppress(TimeoutError, grpc.RpcError, asyncio.InvalidStateError):
                async with asyncio.timeout(_LAST_WORDS_S):
                    await call.finish_writing()  # the broker ends the call once it has read everything
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        if call is not None:
            await call.ended()

    async def _run(self) -> None:
        engine = self._engine
        while True:
            await self._ready.wait()
            if not self._queues:
                self._ready.clear()
                continue
            error = await self._send()
            self._ready.set()  # queues may have come meanwhile
            if error is None:
                continue
            if isinstance(error, NotLeader):  # the client has left for another leader, so no backoff
                self._give_back(error)
                continue
            self._failures += 1
            self._sends_alone = False
            if self._failing_since_ms is None:
                self._failing_since_ms = engine.now_ms()
            logger.debug("produce stream to broker %d ended: %s", self._node_id, error)
            if isinstance(error, AuthorizationError):
                self._fail_all(error)
            self._give_back(error)
            engine.request_refresh(self._failing_since_ms)
            await asyncio.sleep(engine.options.pauses.after_ms(error, self._failures) / 1000)

    async def _send(self) -> RaftlogError | None:
        """Send on a call until it ends, or this producer leaves it; return the reason, None: another call follows."""
        engine = self._engine
        address = engine.metadata.address(self._node_id)
        if address is None:
            return BrokerUnavailable(f"broker {self._node_id} is no longer part of the cluster")
        self._written.clear()
        try:
            call = self._call = engine.produce_call(address, alone=self._is_bulk or self._sends_alone)
        except Exception as error:
            if not isinstance(error, RaftlogError):  # a bug of ours must not strand the batches
                logger.exception("produce stream to broker %d failed", self._node_id)
            return from_grpc(error, address)
        self._left = engine.loop.create_future()
        call.join(self)
        try:
            return await self._left
        finally:
            self._call = None
            call.leave(self)

    def ended(self, error: RaftlogError | None) -> None:
        """The call has ended; None: another one follows."""
        if self._left is not None and not self._left.done():
            self._left.set_result(error)

    def send_alone(self) -> None:
        """The broker does not serve several producers on a call: leave it for another one. Nothing was sent yet."""
        self._sends_alone = True
        self.ended(None)

    def _fail_all(self, error: RaftlogError) -> None:
        """The broker refuses this user: fail every batch for it, because no retry can succeed."""
        engine = self._engine
        callbacks: Callbacks = []
        with engine.lock:
            failed = [batch for flight in self._in_flight.values() for batch in flight.live()]
            for queue in dict.fromkeys([*(batch.queue for batch in failed), *self._queues]):
                failed += (*queue.refused, *queue.waiting)
            for batch in failed:
                engine.complete(batch, callbacks, error=error)
        engine.finish(callbacks)

    def _give_back(self, error: RaftlogError) -> None:
        """Return everything in flight to its queue, in order, and all queues to the engine."""
        engine = self._engine
        callbacks: Callbacks = []
        with engine.lock:
            touched: dict[PartitionQueue, None] = {}
            for flight in self._in_flight.values():
                for batch in flight.live():
                    engine.send_again(batch, error, callbacks)
                    touched[batch.queue] = None
            self._in_flight.clear()
            self._leaving.clear()
            for queue in self._queues:
                queue.note_failure(error)
            engine.settle(touched)
        engine.finish(callbacks)

    def next_request(self, correlation_id: int, lane: int) -> Produce | None:
        """Return the next request, which counts as in flight from now on; None if there is nothing to send."""
        if not self._queues or self._left is None or self._left.done() or self._call is None:
            return None
        engine = self._engine
        options = engine.options
        if len(self._in_flight) >= options.max_in_flight_requests_per_connection:
            return None
        if self._is_bulk and self._call.is_shared:
            if not self._in_flight:  # with requests in flight, two calls would race
                self.ended(None)
            return None
        flight = _Flight(engine.now_ms())
        parts: list[ProducePart] = []
        room_bytes = options.max_request_size
        with engine.lock:
            for queue in list(self._queues):
                if room_bytes <= 0:
                    break
                topic = engine.metadata.view.topics.get(queue.topic)
                view = topic.partitions[queue.partition] if topic and queue.partition < len(topic.partitions) else None
                del self._queues[queue]
                if topic is None or view is None or view.leader != self._node_id:
                    engine.reroute(queue)
                    continue
                if queue.not_before_ms > flight.sent_ms:
                    continue  # `_after_pause` routes it again
                if engine.gate is not None and not engine.may_send(queue):
                    continue  # the topic was created again meanwhile
                for batch in queue.take(
                    self._node_id, room_bytes, at_least_one=not parts, leader_epoch=view.leader_epoch
                ):
                    assert batch.encoded is not None
                    head = log_pb2.ProducePartition(
                        topic_id=topic.topic_id,
                        partition=queue.partition,
                        leader_epoch=view.leader_epoch,
                        chain=queue.chain,
                    )
                    if batch.traces:
                        head.traceparents.extend(batch.traces.values())
                    parts.append(ProducePart(head, batch.encoded))
                    flight.add(batch, topic.topic_id)
                    room_bytes -= len(batch.encoded)
                if queue.sendable and (not queue.in_flight or queue.node_id == self._node_id):
                    self._queues[queue] = None  # to the back: the other queues come first
            if not parts:
                return None
            self._in_flight[correlation_id] = flight
            engine.counters.sent(self._node_id, flight.live(), flight.sent_ms / 1_000)
        self._is_bulk = options.max_request_size - room_bytes >= _BULK_BYTES
        head_request = log_pb2.ProduceRequest(
            correlation_id=correlation_id,
            acks=options.acks,
            timeout_ms=int(options.request_timeout_ms),
            lane=lane,
        )
        if engine.gate is not None:
            head_request.transactional_id, head_request.sink_id = engine.gate.owner
        return Produce(head_request, parts)

    def written(self, correlation_id: int) -> None:
        """Complete the batches of a request with acks=0, which was written."""
        flight = self._in_flight.pop(correlation_id, None)
        if flight is None:
            return  # refused already
        engine = self._engine
        callbacks: Callbacks = []
        with engine.lock:
            batches = flight.live()
            for batch in batches:
                batch.queue.on_accepted(batch)
                engine.complete(batch, callbacks)
            self._written[correlation_id] = [
                None if batch is None else (batch.queue, topic_id, batch.queue.sent_epoch)
                for batch, topic_id in zip(flight.batches, flight.topic_ids, strict=True)
            ]
            while len(self._written) > _WRITTEN_REQUESTS:
                self._written.popitem(last=False)
            if self._unproven_since_ms is None:
                self._unproven_since_ms = engine.now_ms()
                engine.tick_soon()
            engine.settle(dict.fromkeys(batch.queue for batch in batches if batch.queue.recovering))
        engine.finish(callbacks)

    def refused_late(self, response: log_pb2.ProduceResponse) -> bool:
        """Handle the refusal of a request with acks=0: look for the partitions' leaders, which it may name.

        Their queues pause until the leader is found. Return False if the response belongs to no such request.
        """
        written = self._written.pop(response.correlation_id, None)
        if written is None or len(written) != len(response.results):
            return False
        engine = self._engine
        paused: dict[PartitionQueue, None] = {}
        with engine.lock:
            for sent, result in zip(written, response.results, strict=True):
                if sent is None or not result.HasField("error"):
                    continue
                queue, topic_id, epoch = sent
                if (queue.node_id, queue.sent_epoch) != (self._node_id, epoch) or queue.not_before_ms > engine.now_ms():
                    continue  # it has found another leader, or pauses already
                logger.warning(
                    "broker %d refuses %s with acks=0, so the records on their way to it are lost: %s",
                    self._node_id,
                    queue,
                    result.error.message,
                )
                if result.error.code in LEADER_ERRORS:
                    engine.metadata.learn(queue.topic, topic_id, queue.partition, result.error)
                queue.on_late_refusal(from_wire(result.error))
                paused[queue] = None
            engine.settle(paused)
        return True

    def answered(self, response: log_pb2.ProduceResponse) -> None:
        """Settle the batches of a request, whose answer has come.

        Raises:
            BrokerUnavailable: the number of results differs from the number of parts of the request.
        """
        engine = self._engine
        flight = self._in_flight.get(response.correlation_id)
        if flight is None or len(response.results) != len(flight.batches):
            raise BrokerUnavailable(f"the answer with correlation id {response.correlation_id} fits no request")
        del self._in_flight[response.correlation_id]
        self._failures, self._failing_since_ms = 0, None
        now_ms = engine.now_ms()
        engine.counters.answered(self._node_id, now_ms - flight.sent_ms, now_ms / 1_000)
        if response.throttle_time_ms > 0:
            engine.counters.throttled(response.throttle_time_ms, now_ms / 1_000)
        callbacks: Callbacks = []
        halves: list[Batch] = []
        touched: dict[PartitionQueue, None] = {}
        with engine.lock:
            for batch, topic_id, result in zip(flight.batches, flight.topic_ids, response.results, strict=True):
                if batch is None:
                    continue
                queue = batch.queue
                touched[queue] = None
                if result.HasField("error") and result.error.code:
                    halves += engine.refused(batch, topic_id, result.error, callbacks) or ()
                else:
                    queue.on_accepted(batch)
                    engine.complete(
                        batch, callbacks, base_offset=result.base_offset, append_time_ms=result.log_append_time_ms
                    )
            engine.settle(touched)
        if halves:
            engine.encode(halves)
        engine.finish(callbacks)


class Turns:
    """Runs one call at a time, in order of arrival, until it is closed. `what`: their subject, for messages."""

    def __init__(self, what: object) -> None:
        self._what = what
        self._lock = asyncio.Lock()
        self._under_way: asyncio.Timeout | None = None
        self._closed = False

    @property
    def is_taken(self) -> bool:
        """Whether a call is under way."""
        return self._lock.locked()

    @contextlib.asynccontextmanager
    async def take(self, timeout_s: float | None) -> AsyncIterator[None]:
        """Wait up to `timeout_s` for the turn, and hold it for the block.

        Raises:
            RequestTimedOut: another call has not ended in time.
            ClosedError: closed before or within the block.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._lock.acquire()
        except TimeoutError:
            raise RequestTimedOut(f"another call on {self._what} has not ended in time") from None
        try:
            if self._closed:
                raise ClosedError("the producer is closed")
            async with asyncio.timeout(None) as self._under_way:
                yield
        except TimeoutError:
            if not self._closed:
                raise
            raise ClosedError(f"the producer was closed while a call on {self._what} was under way") from None
        finally:
            self._under_way = None
            self._lock.release()

    async def close(self) -> None:
        """End the current call and refuse all others."""
        self._closed = True
        if self._under_way is not None:
            self._under_way.reschedule(asyncio.get_running_loop().time())
        async with self._lock:
            pass


Places = dict[tuple[bytes, int], TopicPartition]
"""Partitions by topic id and number."""
Tell = Callable[[Places, Outdated], Awaitable[bool]]
"""Tells the coordinator to add partitions; raises as `TransactionCalls.call`. False: the transaction takes no more."""


class Openings:
    """The partitions that the coordinator of a transaction or stage knows of; the gate is open for these.

    While a call is under way, further partitions gather for the next one. `on_failure` gets final refusals, outside of
    the engine's lock.
    """

    def __init__(self, engine: ProducerEngine, tell: Tell, on_failure: Callable[[RaftlogError], None]) -> None:
        self._engine = engine
        self._tell = tell
        self._on_failure = on_failure
        self._open: set[tuple[bytes, int]] = set()
        self._wanted: Places = {}
        self._telling: asyncio.Task[None] | None = None

    def __contains__(self, place: tuple[bytes, int]) -> bool:
        return place in self._open

    def some(self) -> list[tuple[bytes, int]]:
        """Return one partition that the coordinator knows of, or none."""
        return list(self._open)[:1]

    def want(self, place: tuple[bytes, int], topic_partition: TopicPartition) -> None:
        """Tell the coordinator of a partition, together with others that gather meanwhile. On the event loop."""
        self._wanted.setdefault(place, topic_partition)
        if self._telling is None:
            self._telling = self._engine.spawn(self._run())

    async def _run(self) -> None:
        try:
            await asyncio.sleep(0)  # other partitions may follow in this turn of the loop
            while self._wanted:
                told = dict(self._wanted)

                async def outdated(told: Places = told) -> bool:
                    return await self._drop_outdated(told)

                try:
                    if not await self._tell(told, outdated):
                        return
                    self._open.update(told)
                    for place in told:
                        self._wanted.pop(place, None)
                except TOPIC_UNKNOWN:
                    if told.keys() <= self._wanted.keys():
                        raise  # otherwise ask again without the outdated ones
                self._engine.gate_opened()
        except RaftlogError as error:
            self._on_failure(error)
        except Exception as bug:  # a bug of ours must not leave batches waiting
            logger.exception("telling a coordinator of partitions failed")
            self._on_failure(InvalidRequestError(f"telling a coordinator of partitions failed: {bug!r}"))
        finally:
            self._telling = None

    async def _drop_outdated(self, told: Places) -> bool:
        """As `Outdated`: drop partitions whose topic was deleted or created again; `may_send` asks for the new id."""
        gone = await self._engine.outdated(told)
        for place in gone:
            self._wanted.pop(place, None)
        return bool(gone)

    async def stop(self) -> None:
        """Stop telling the coordinator; partitions that are still needed must be wanted again."""
        telling = self._telling
        if telling is not None:
            telling.cancel()
            await asyncio.gather(telling, return_exceptions=True)
            if self._telling is telling:  # cancelled before its first step, so its `finally` has not run
                self._telling = None
        self._wanted.clear()

    def clear(self) -> None:
        """Forget all partitions, for the next transaction."""
        self._open.clear()
        self._wanted.clear()


class TransactionOffsets:
    """Offsets of groups that are committed with a transaction, at the group's coordinator (KIP-98, KIP-447)."""

    def __init__(self, metadata: MetadataCache, connections: Connections, options: CoordinatorOptions) -> None:
        self._options = options
        self._coordinators = Coordinators(metadata, connections, options)

    async def commit(
        self,
        transactional_id: str,
        producer: ProducerId,
        offsets: Mapping[TopicPartition, OffsetAndMetadata],
        group: GroupMetadata,
        deadline: Deadline,
    ) -> None:
        """Hand offsets to the group, which keeps them pending until the transaction ends. Retries are idempotent.

        Raises:
            FencedError: the group has removed this member, or its epoch has changed since the caller got `group`.
            RequestTimedOut: the group has not accepted them within the deadline.
            RaftlogError: the group refuses for good.
        """
        for piece in in_pieces(to_commit((part, Entry(offset, b"")) for part, offset in offsets.items())):
            request = group_pb2.CommitTransactionOffsetsRequest(
                group_id=group.group_id,
                transactional_id=transactional_id,
                producer_id=producer.producer_id,
                producer_epoch=producer.producer_epoch,
                member_id=group.member_id,
                member_epoch=group.member_epoch,
                instance_id=group.group_instance_id,
                offsets=piece,
            )
            await self._commit(group.group_id, request, piece, deadline)

    async def _commit(
        self,
        group_id: str,
        request: group_pb2.CommitTransactionOffsetsRequest,
        piece: Sequence[group_pb2.CommitOffset],
        deadline: Deadline,
    ) -> None:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        failures = 0
        while True:
            left_s = deadline.left()
            attempt_s = self._options.request_timeout_ms / 1000
            if left_s is not None:
                attempt_s = min(attempt_s, max(left_s, LEAST_S))
            error: RaftlogError | None = None
            try:
                async with asyncio.timeout(attempt_s):
                    response = await self._coordinators.call(group_id, "CommitTransactionOffsets", request, attempt_s)
                error = next(filter(None, commit_errors(None, response.results, len(piece))), None)
            except TimeoutError:
                error = RequestTimedOut(f"the coordinator of group {group_id} has not answered in time")
            except RaftlogError as refused:
                error = refused
            if error is None:
                return
            # With a stale epoch the caller must read the group metadata and the records again.
            if isinstance(error, StaleMemberEpoch) or not passes(error, loop.time() - began_s):
                raise error
            failures += 1
            pause_s = self._options.pauses.after_ms(error, failures) / 1000
            left_s = deadline.left()
            if left_s is not None and left_s <= pause_s:
                raise RequestTimedOut(f"group {group_id} has not taken the offsets in time; last error: {error}")
            await asyncio.sleep(pause_s)

    async def close(self) -> None:
        """Close the look-up of coordinators."""
        await self._coordinators.close()


LAST_ABORT_S: Final = 5.0
"""How long a program that ends may take to abort; otherwise the coordinator aborts after the timeout."""
_OVER: Final = (InvalidProducerEpoch, InvalidTxnState)
"""A partition's errors after a transaction has ended; only the coordinator knows why it ended."""


class Transactions:
    """The transactions of one producer, and the gate of its engine.

    `raftlog._core.transaction_state` has the states and transitions. The first record for a partition makes the
    coordinator add it; its batches wait until then. After a final failure the transaction can only be aborted.

    Late requests do no harm: each transaction has its own epoch, so brokers and coordinators refuse requests of a
    transaction that has ended (KIP-890).
    """

    def __init__(self, engine: ProducerEngine) -> None:
        options = engine.options
        assert options.transactional_id
        self.state = TransactionState(options.transactional_id)
        self._engine = engine
        self._id = options.transactional_id
        self.owner = TransactionOwner(transactional_id=self._id)
        self._calls = TransactionCalls(engine.metadata, engine.connections, options)
        self._offsets = TransactionOffsets(engine.metadata, engine.connections, options)
        self._turns = Turns(self.state)
        """Runs one of init, commit, abort and offsets at a time."""
        self._partitions = Openings(engine, self._add, self._not_added)
        self._groups: set[str] = set()
        self._asked = False
        """Whether the coordinator may know of the transaction."""
        self._certain = True
        """Whether every call that adds to the transaction was answered."""
        self._sweeping = False
        """Whether `_sweep` is scheduled or asks why, to fail the incomplete batches of a failed transaction."""
        self._asking_why: asyncio.Task[None] | None = None
        self.aborts_on_close = False
        """Whether `close` may find a transaction open without a warning."""

    # The engine's gate

    @property
    def last_error(self) -> RaftlogError | None:
        """Why partitions are not added yet."""
        return self._calls.last_error

    def may_send(self, topic_partition: TopicPartition, topic_id: bytes) -> bool:
        """As `PartitionGate.may_send`."""
        place = (topic_id, topic_partition.partition)
        if place in self._partitions:
            return True
        if self.state.writable:
            self._partitions.want(place, topic_partition)
        return False

    def check_may_send(self) -> None:
        """As `PartitionGate.check_may_send`."""
        self.state.check_may_send()

    def on_failure(self, topic_partition: TopicPartition, error: RaftlogError) -> None:
        """As `PartitionGate.on_failure`."""
        self._fail(error)

    def on_over(self, topic_partition: TopicPartition, error: RaftlogError) -> RaftlogError | None:
        """As `PartitionGate.on_over`: records wait until the coordinator has told the reason."""
        self._fail(error)
        return None if self._sweeping else error

    def on_not_sent(self, error: Exception) -> None:
        """As `PartitionGate.on_not_sent`: the transaction, which misses the record, can only be aborted."""
        if self.state.phase is TransactionPhase.OPEN and not isinstance(error, InvalidTxnState):
            self._fail(error if isinstance(error, RaftlogError) else InvalidRequestError(str(error)))

    def _fail(self, error: RaftlogError) -> None:
        """Make the transaction one that can only be aborted; under the engine's lock."""
        if self.state.fail(error) and not self._sweeping:
            logger.info("%s has failed: %s", self.state, error)
            self._sweeping = True
            self._engine.loop.call_soon_threadsafe(self._sweep)

    def _sweep(self) -> None:
        state = self.state
        if state.phase is TransactionPhase.FAILED and isinstance(state.cause, _OVER):
            self._asking_why = self._engine.spawn(self._ask_why())
        else:
            self._fail_rest()

    async def _ask_why(self) -> None:
        try:
            await self._clarify(self._deadline(None))
        except RaftlogError:
            pass  # the next call of the application raises it
        finally:
            self._asking_why = None

    def _fail_rest(self) -> None:
        """Fail the incomplete batches: no consumer will ever read them."""
        with self._engine.lock:
            self._sweeping = False
            state = self.state
            if state.phase not in (TransactionPhase.FAILED, TransactionPhase.FATAL) or state.cause is None:
                return
            error = state.abortable() if state.phase is TransactionPhase.FAILED else state.cause
        self._engine.fail_incomplete(error)

    async def _add(self, places: Places, outdated: Outdated) -> bool:
        if not self.state.writable or self.state.numbers is None:
            return False
        self._asked = True
        try:
            numbers = ProducerId(*self.state.numbers)
            await self._calls.add(self._id, numbers, Deadline(None), partitions=places, outdated=outdated)
        except BaseException:
            self._certain = False
            raise
        return True

    def _not_added(self, error: RaftlogError) -> None:
        with self._engine.lock:
            self._fail(error)

    async def _stop_asking(self) -> None:
        await self._partitions.stop()
        if self._asking_why is not None:
            self._asking_why.cancel()
            await asyncio.gather(self._asking_why, return_exceptions=True)
            self._asking_why = None
        self._sweeping = False

    # What the application calls

    def _deadline(self, timeout: float | None) -> Deadline:
        return Deadline(self._engine.options.max_block_ms / 1000 if timeout is None else timeout)

    async def init(self, timeout: float | None) -> None:
        """Get numbers for the next transaction, if there are none yet.

        Raises:
            RequestTimedOut, ProducerFenced, RaftlogError: see `Producer.init_transactions`.
        """
        deadline = self._deadline(timeout)
        async with self._turns.take(deadline.left()):
            self._engine.check_open()
            self.state.check_usable()
            if self.state.phase is not TransactionPhase.NEW:
                return
            had = self.state.numbers
            try:
                given = await self._calls.init_producer_id(
                    self._id,
                    self._engine.options.transaction_timeout_ms,
                    ProducerId(*had) if had is not None else None,
                    deadline,
                )
            except RaftlogError as error:
                with self._engine.lock:
                    self.state.refused(error)
                self.state.check_usable()
                raise
            with self._engine.lock:
                self.state.initialized(Numbers(*given))

    def begin(self) -> bool:
        """Open a transaction; return False if `init` must come first. In any thread, under the engine's lock.

        Raises:
            InvalidTxnState: one is already open. FencedError: another producer has the transactional id.
        """
        self._engine.check_open()
        self.state.check_usable()
        if self.state.phase is TransactionPhase.NEW:
            return False
        numbers = self.state.begin()
        self._engine.renumber(ProducerId(*numbers))
        self._partitions.clear()
        self._groups.clear()
        self._asked, self._certain = False, True
        return True

    async def commit(self, timeout: float | None) -> None:
        """Flush, commit, and return when the records are visible.

        Raises:
            TransactionAbortable, InvalidTxnState, RequestTimedOut, ProducerFenced: see `Producer.commit_transaction`.
        """
        deadline = self._deadline(timeout)
        async with self._turns.take(deadline.left()):
            self._engine.check_open()
            await self._clarify(deadline)
            with self._engine.lock:
                self.state.flush()
            try:
                if self.state.phase is TransactionPhase.FLUSHING:
                    await self._flush(None if timeout is None else deadline)
                    await self._stop_asking()
                    await self._clarify(deadline)
            except BaseException:
                with self._engine.lock:
                    self.state.resume()
                raise
            with self._engine.lock:
                self.state.commit()
            await self._end(deadline, commit=True)

    async def _flush(self, deadline: Deadline | None) -> None:
        """Wait until every batch is acknowledged or has failed, `delivery.timeout.ms` at most."""
        engine = self._engine
        engine.close_batches()
        with engine.lock:
            waiting = list(engine.accumulator.incomplete)
        try:
            async with asyncio.timeout(None if deadline is None else deadline.left()):
                for batch in waiting:
                    await wait_async(batch)
        except TimeoutError:
            left = sum(not batch.done for batch in waiting)
            raise RequestTimedOut(
                f"{left} batches of {self.state} are not acknowledged in time, and it is not committed: call "
                "commit_transaction() again, or abort_transaction()"
            ) from None

    async def _clarify(self, deadline: Deadline) -> None:
        """Ask the coordinator why a partition says that the transaction is over: it has timed out, or another producer
        has the transactional id. Its incomplete batches fail in either case.

        Raises:
            ProducerFenced, RaftlogError: as `TransactionState.check_usable`.
        """
        state, known = self.state, self._partitions.some()
        if state.phase is not TransactionPhase.FAILED or not isinstance(state.cause, _OVER):
            return
        numbers = state.numbers
        assert numbers is not None
        try:
            if known:
                await self._calls.add(self._id, ProducerId(*numbers), deadline, partitions=known)
        except RaftlogError as error:
            with self._engine.lock:
                if state.phase is not TransactionPhase.FAILED or state.numbers != numbers:
                    return  # the application has aborted it meanwhile
                if isinstance(error, TransactionAbortable):
                    state.cause = error
                else:
                    state.refused(error)
        self._fail_rest()
        state.check_usable()

    async def abort(self, timeout: float | None) -> None:
        """Fail unacknowledged records and abort.

        Raises:
            InvalidTxnState, RequestTimedOut, ProducerFenced: see `Producer.abort_transaction`.
        """
        deadline = self._deadline(timeout)
        async with self._turns.take(deadline.left()):
            await self._abort(deadline)

    async def _abort(self, deadline: Deadline) -> None:
        self._engine.check_open()
        with self._engine.lock:
            self.state.abort()
        await self._stop_asking()
        self._engine.fail_incomplete(
            TransactionAbortable(f"{self.state} was aborted before the record was acknowledged")
        )
        await self._end(deadline, commit=False)

    async def give_up(self, timeout: float | None) -> bool:
        """Abort after an interrupted commit. Return False if the commit may already be decided.

        Raises:
            RequestTimedOut, RaftlogError: as `abort`.
        """
        deadline = self._deadline(timeout)
        async with self._turns.take(deadline.left()):
            phase = self.state.phase
            if self.state.writable or phase in (TransactionPhase.FAILED, TransactionPhase.ABORTING):
                await self._abort(deadline)
            return phase is not TransactionPhase.COMMITTING

    async def _end(self, deadline: Deadline, *, commit: bool) -> None:
        assert self.state.numbers is not None
        had = ProducerId(*self.state.numbers)
        if not self._asked:  # the coordinator does not know of it
            with self._engine.lock:
                self.state.ended(self.state.numbers)
            return
        try:
            next_one = await self._calls.end(self._id, had, deadline, commit=commit)
        except RequestTimedOut as late:
            what = "commit_transaction" if commit else "abort_transaction"
            raise RequestTimedOut(f"{late}; the outcome is not known: call {what}() again") from late
        except TransactionAbortable as over:
            with self._engine.lock:
                if not commit:  # it is aborted already
                    self.state.ended(self.state.numbers, known=False)
                    return
                self.state.refused(over)
            raise
        except RaftlogError as error:
            with self._engine.lock:
                self.state.refused(error)
            self.state.check_usable()
            raise
        with self._engine.lock:
            # If the epoch is the same again, a late call could still begin a transaction with it.
            known = self._certain or next_one != had
            self.state.ended(Numbers(*next_one), known=known)

    async def send_offsets(
        self, offsets: Mapping[TopicPartition, OffsetAndMetadata], group: GroupMetadata, timeout: float | None
    ) -> None:
        """Commit a group's offsets with the transaction.

        Raises:
            TransactionAbortable, InvalidTxnState, FencedError: see `Producer.send_offsets_to_transaction`.
        """
        deadline = self._deadline(timeout)
        async with self._turns.take(deadline.left()):
            with self._engine.lock:
                self._engine.check_may_send()
            if not offsets:
                return
            assert self.state.numbers is not None
            numbers = ProducerId(*self.state.numbers)
            try:
                if group.member_id and group.member_epoch < 0:
                    raise FencedMemberEpoch(
                        f"the consumer is not a member of {group.group_id} at the moment, and others may have its "
                        "partitions: abort, and poll again"
                    )
                if group.group_id not in self._groups:
                    self._asked = True
                    await self._calls.add(self._id, numbers, deadline, group_ids=[group.group_id])
                    self._groups.add(group.group_id)
                await self._offsets.commit(self._id, numbers, offsets, group, deadline)
            except asyncio.CancelledError:
                self._certain = False
                with self._engine.lock:
                    self._fail(RequestTimedOut(f"committing offsets with {self.state} was interrupted"))
                raise
            except RaftlogError as error:
                self._certain = False
                with self._engine.lock:
                    self._fail(error)
                self.state.check_usable()
                raise

    # End

    async def close(self, timeout: float | None = None) -> None:
        """Abort an open transaction within `timeout` or `LAST_ABORT_S`; else its coordinator does so later.

        A concurrent call of another thread or task gets the same time to finish, and then raises `ClosedError`.
        """
        deadline = Deadline(LAST_ABORT_S if timeout is None else min(timeout, LAST_ABORT_S))
        if self.state.writable or self.state.phase is TransactionPhase.FAILED:
            if self.state.writable and not self.aborts_on_close:
                logger.warning("%s was open when its producer was closed, and is aborted: commit it first", self.state)
            try:
                await self.abort(deadline.left())
            except RaftlogError as error:
                logger.info("%s stays open until transaction.timeout.ms has passed: %s", self.state, error)
        elif self._turns.is_taken:
            with contextlib.suppress(RequestTimedOut):
                async with self._turns.take(deadline.left()):
                    pass
        await self._turns.close()
        await self._stop_asking()
        await self._calls.close()
        await self._offsets.close()


_TICK_S: Final = 0.05
"""How often deadlines are checked."""
_first_partitions: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, int] = weakref.WeakKeyDictionary()
"""By event loop: the partition that records without a key begin with, in each topic. It is drawn at random.

The producers of a loop begin with the same one, so that those with the same rhythm share messages.
"""


class ProducerEngine:
    """Batches, routing and one stream for each broker. Runs on the event loop, except for methods that name threads.

    After a refusal: leader errors and broken streams send the batch again, in order and under a larger chain; a batch
    that is too large is split in halves; refused producer numbers are settled by `on_numbers_refused`; any other error
    fails the batch.

    With a `gate` the producer is transactional: a coordinator gives its numbers (`renumber`), the engine writes to a
    partition once the gate is open for it, and all records belong to the transaction or stage of those numbers.
    """

    def __init__(
        self,
        bootstrap: list[str],
        options: ProducerOptions,
        partitioner: Partitioner | None,
        loop: asyncio.AbstractEventLoop,
        *,
        gate: PartitionGate | None = None,
    ) -> None:
        self.options = options
        self.loop = loop
        self.lock = threading.Lock()
        self.closed: RaftlogError | None = None
        self._pid = os.getpid()
        self._loop_thread_id = threading.get_ident()
        self.counters = ProducerMetrics(options.delivery_timeout_ms, monotonic_ms() / 1_000)

        # Records and their memory
        self.topics: dict[str, TopicQueues] = {}
        self.lean: dict[str, Batch] = {}
        """By topic: the open batch for records with only a value, as long as it holds only such records."""
        self.accumulator = Accumulator(
            AccumulatorConfig(
                batch_size_bytes=options.batch_size,
                buffer_memory_bytes=options.buffer_memory,
                max_request_size_bytes=options.max_request_size,
                linger_ms=options.linger_ms,
                delivery_timeout_ms=options.delivery_timeout_ms,
            ),
            owner=self,
        )
        self._partitioner = partitioner
        self._first_partition = _first_partitions.setdefault(loop, random.getrandbits(16))
        self._wake_pending = False
        self._room_alarms: list[Alarm] = []
        """The alarms of threads that wait for memory."""
        self._room_futures: list[asyncio.Future[None]] = []
        """The futures of tasks that wait for memory."""

        # The cluster
        self._shares = gate is None and options.enable_idempotence
        """Whether this producer shares calls and connections with others of the process, see `produce_call`."""
        if self._shares:
            self.connections = shared_connections(loop, options.pem, options.sasl)
        else:
            self.connections = connections(options.pem, options.sasl)
        self._has_connections = True
        self.metadata = MetadataCache(
            self.connections,
            bootstrap,
            max_age_ms=options.metadata_max_age_ms,
            request_timeout_ms=options.request_timeout_ms,
            pauses=options.pauses,
        )
        self.metadata.on_change(self._on_metadata)
        self._streams: dict[int, ProduceStream] = {}
        self._unrouted: dict[PartitionQueue, float] = {}
        """Queues without a known leader, and since when (`monotonic_ms`)."""
        self._pausing: dict[PartitionQueue, asyncio.TimerHandle] = {}
        self._linger_timer: asyncio.TimerHandle | None = None
        self._tick_timer: asyncio.TimerHandle | None = None

        # Producer numbers and the gate
        self.ids: Identity | None = None
        """None: the producer is not idempotent."""
        self.given = GivenProducerId()
        """The `ids` of a producer with a gate."""
        self._without_id: dict[PartitionQueue, None] = {}
        """Queues that wait for a producer id."""
        self._gated: dict[PartitionQueue, None] = {}
        """Queues that wait for the gate."""
        self._numbered: list[PartitionQueue] = []
        """Queues that have taken the id in `given`."""
        self.transactions: Transactions | None = None
        if options.transactional_id:
            assert gate is None
            gate = self.transactions = Transactions(self)
        self.gate = gate
        self.attributes = int(Attributes.TRANSACTIONAL) if gate is not None else 0
        """The attribute bits of every batch."""
        if gate is not None:
            self.ids = self.given
        elif options.enable_idempotence:
            self.ids = ProducerIds(
                self.connections,
                self.metadata,
                options.pauses,
                on_here=self._on_producer_id,
                on_refused=self._on_no_producer_id,
            )

    # State that any thread may look at

    @staticmethod
    def now_ms() -> float:
        """Return the clock of all deadlines, in milliseconds."""
        return monotonic_ms()

    def on_loop(self) -> bool:
        """Whether the caller runs in the event loop's thread."""
        return threading.get_ident() == self._loop_thread_id

    def check_open(self) -> None:
        """Refuse if the producer is closed, or was made in another process.

        Raises:
            ClosedError: the message says which.
        """
        if self.closed is not None:
            raise type(self.closed)(str(self.closed))
        self.check_process()

    def check_process(self) -> None:
        """Refuse in a forked child, where no delivery ever ends.

        Raises:
            ClosedError: the producer was made in another process.
        """
        if self._pid != os.getpid():
            raise ClosedError(f"this producer was made in process {self._pid}; make one in each process")

    def abandon_after_fork(self) -> None:
        """Give up the engine in a forked child, without touching its connections."""
        self.lean.clear()
        self.lock = threading.Lock()  # a thread of the parent may hold the old one
        self.closed = ClosedError(f"this producer was made in process {self._pid}; make one in each process")

    def undelivered(self) -> int:
        """Return how many records are neither acknowledged nor failed."""
        with self.lock:
            return sum(batch.count or len(batch.values) for batch in self.accumulator.incomplete)

    def trouble_of(self, queue: PartitionQueue) -> RaftlogError | None:
        """Return why batches do not get through to a partition, if known."""
        if self.metadata.last_error is None:
            leaderless = self.metadata.view.without_leader(TopicPartition(queue.topic, queue.partition))
            if leaderless is not None:
                return LeaderNotAvailable(leaderless)
        if queue.lacks_id and self.ids is not None and self.ids.last_error is not None:
            return self.ids.last_error
        if self.gate is not None and queue in self._gated and self.gate.last_error is not None:
            return self.gate.last_error
        return queue.last_error or self.metadata.last_error

    def metrics(self) -> Metrics:
        """As `Producer.metrics`; from any thread."""
        streams = list(self._streams.copy().values())
        return self.counters.show(
            monotonic_ms() / 1_000,
            used_bytes=self.accumulator.used_bytes,
            buffer_bytes=self.options.buffer_memory,
            in_flight=sum(stream.requests_in_flight for stream in streams),
            connections=len(streams),
        )

    # Records become batches

    async def load_topic(self, topic: str, *, fresh: bool = False) -> TopicQueues:
        """Return the queues of a topic; ask the cluster for a topic that is not known yet, and in any case if `fresh`.

        Raises:
            UnknownTopicOrPartition, BrokerUnavailable: after `max.block.ms` at most.
        """
        if self.ids is not None:
            self.ids.want()
        view = await self.metadata.topic(topic, self.options.max_block_ms, fresh=fresh)
        with self.lock:
            self.check_open()
            queues = self.topics.get(topic)
            if queues is None:
                queues = self.topics[topic] = TopicQueues(
                    view,
                    self._partitioner,
                    idempotent=self.ids is not None,
                    first=self._first_partition,
                )
            return queues

    def place(
        self,
        queues: TopicQueues,
        value: bytes | None,
        key: bytes | None,
        partition: int | None,
        headers: tuple[Header, ...],
        timestamp_ms: int,
        size: int,
    ) -> tuple[Batch, int, Batch | None] | None:
        """Append a record; return its batch, its index, and the full batch before it or None, for `after_place`.

        Returns None if `buffer.memory` is full. The caller holds the lock.

        Raises:
            InvalidPartitions: the partition does not exist.
        """
        accumulator = self.accumulator
        queue = queues.queue_for(key, partition)
        full = None
        batch = accumulator.open_batch_for(queue, size)
        if batch is None:
            if not accumulator.has_room(size):
                return None
            full = queue.open
            if full is not None:
                accumulator.close(full)
                self._drop_lean((full,))
                queue = queues.queue_for(key, partition)
                batch = accumulator.open_batch_for(queue, size)
            if batch is None and queue.open is None:
                in_turn = key is None and partition is None and not queues.custom
                backlog = queues.sticky_backlog_bytes if in_turn else None
                batch = accumulator.open(queue, size, monotonic_ms(), sticky_backlog_bytes=backlog)
            elif batch is None:  # the batch of the next sticky partition is nearly full: stay with this one
                assert full is not None
                queue = full.queue
                backlog = queues.sticky_backlog_bytes
                batch = accumulator.open(queue, size, monotonic_ms(), sticky_backlog_bytes=backlog)
        index = batch.append(value, key, headers, timestamp_ms, size)
        if queue.partition == queues.sticky and not queues.custom:
            if batch.keys is None and batch.headers is None:
                self.lean[queue.topic] = batch
            else:
                self.lean.pop(queue.topic, None)
        return batch, index, full

    def place_columns(self, queues: TopicQueues, piece: Piece) -> list[Batch] | None:
        """Queue a piece of `send_batch`; return the closed batches, the new one last, for `encode`.

        Returns None if `buffer.memory` is full. The caller holds the lock.
        """
        if not self.accumulator.has_columns_room(piece.size_bytes):
            return None
        queue = queues.queues[piece.partition if piece.partition >= 0 else queues.sticky]
        before = queue.open
        batch = self.accumulator.add_columns(
            queue, piece.columns, piece.base_timestamp_ms, piece.size_bytes, monotonic_ms()
        )
        if before is not None:
            self._drop_lean((before,))
        if piece.partition < 0:
            queues.next_sticky()
        return [before, batch] if before is not None else [batch]

    def slice_limit_bytes(self) -> int:
        """Return the size limit of the pieces of `send_batch`."""
        options = self.options
        return min(max(options.batch_size, SLICE_BYTES), options.max_request_size, options.buffer_memory) - BATCH_BYTES

    def after_place(self, full: Batch | None) -> None:
        """Finish `place` without the lock: encode the closed batch and wake the loop."""
        if full is not None:
            self.encode((full,))
        else:
            self.wake()

    def encode(self, batches: Iterable[Batch]) -> None:
        """Encode closed batches and wake the loop. The closer calls it, without the lock."""
        options = self.options
        todo = list(batches)
        closed = list(todo)
        try:
            while todo:
                try:
                    if not todo[0].done:
                        todo[0].encode(options.codec, options.level, self.attributes)
                except RaftlogError as error:
                    self.fail([todo[0]], error)
                del todo[0]
        except BaseException:  # an interrupt in the caller's thread; the loop encodes the rest
            self.loop.call_soon_threadsafe(self.encode, todo)
            raise
        with self.lock:
            self.accumulator.ready.update((batch.queue, None) for batch in closed)
        self.wake()

    def close_batches(self, batches: Iterable[Batch] | None = None) -> None:
        """Close and encode these open batches (None: all), without further lingering."""
        with self.lock:
            if batches is None:
                closed = self.accumulator.close_all()
            else:
                closed = [batch for batch in batches if self.accumulator.close(batch)]
            self._drop_lean(closed)
        if closed:
            self.encode(closed)

    def _drop_lean(self, closed: Iterable[Batch]) -> None:
        """Forget closed batches as targets of new records, and move on to the next sticky partition."""
        for batch in closed:
            topic = batch.queue.topic
            if self.lean.get(topic) is batch:
                del self.lean[topic]
            queues = self.topics.get(topic)
            if queues is not None and batch.queue.partition == queues.sticky:
                queues.next_sticky()

    def wake(self) -> None:
        """Have the loop run `_pump` soon; from any thread."""
        if self._wake_pending:
            return
        self._wake_pending = True
        try:
            if self.on_loop():
                self.loop.call_soon(self._pump)
            else:
                self.loop.call_soon_threadsafe(self._pump)
        except RuntimeError:  # the loop is closed: the interpreter or asyncio.run has ended
            self._wake_pending = False

    # Waiting for memory

    def want_room(self, size: int, deadline: Deadline) -> Alarm:
        """Return an alarm that is set when memory is returned, for `wait_for_room`. The caller holds the lock.

        Raises:
            BufferExhausted: the deadline has passed, or this is the event loop's thread, which must not block.
        """
        self._time_for_room(size, deadline)
        if self.on_loop():
            raise self._no_room(size)
        self.accumulator.hurry()
        alarm = Alarm()
        self._room_alarms.append(alarm)
        return alarm

    def wait_for_room(self, given_back: Alarm, deadline: Deadline) -> None:
        """Block until memory is returned or the deadline has passed; not on the event loop, without the lock."""
        self.wake()
        began_s = monotonic_ms() / 1_000
        try:
            given_back.wait(deadline.left())
        finally:
            with self.lock, contextlib.suppress(ValueError):  # it was set
                self._room_alarms.remove(given_back)
            self._note_wait(began_s)

    async def room_given_back(self, size: int, deadline: Deadline) -> None:
        """Wait on the event loop until memory is returned.

        Raises:
            BufferExhausted: the deadline has passed.
        """
        left_s = self._time_for_room(size, deadline)
        with self.lock:
            self.accumulator.hurry()
        self.wake()
        future = self.loop.create_future()
        self._room_futures.append(future)
        began_s = monotonic_ms() / 1_000
        await asyncio.wait([future], timeout=left_s)
        self._note_wait(began_s)

    def _note_wait(self, began_s: float) -> None:
        now_s = monotonic_ms() / 1_000
        self.counters.waited(now_s - began_s, now_s)

    def _time_for_room(self, size: int, deadline: Deadline) -> float:
        left_s = deadline.left()
        assert left_s is not None
        if left_s <= 0:
            raise self._no_room(size)
        return left_s

    def _no_room(self, size: int) -> BufferExhausted:
        return BufferExhausted(
            f"no room for {size} bytes within max.block.ms={self.options.max_block_ms}: "
            f"{self.accumulator.used_bytes} of buffer.memory={self.options.buffer_memory} bytes wait for "
            "acknowledgement; send more slowly, raise buffer.memory, or find out why the broker is slow"
        )

    def _ring_for_room(self) -> None:
        """Wake the threads that wait for memory; under the lock."""
        while self._room_alarms:
            self._room_alarms.pop().set()

    def _release_room_futures(self) -> None:
        futures, self._room_futures = self._room_futures, []
        for future in futures:
            if not future.done():
                future.set_result(None)

    # The gate, and the producer numbers

    def may_send(self, queue: PartitionQueue) -> bool:
        """Whether the gate is open for a queue; if not, `gate_opened` routes it later. Under the lock."""
        if self._open_for(queue):
            return True
        self._gated[queue] = None
        return False

    def _open_for(self, queue: PartitionQueue) -> bool:
        topic = self.metadata.view.topics.get(queue.topic)
        if self.gate is None or topic is None:  # a deleted topic has no leader either
            return True
        return self.gate.may_send(TopicPartition(queue.topic, queue.partition), topic.topic_id)

    async def outdated(self, wanted: Mapping[tuple[bytes, int], TopicPartition]) -> list[tuple[bytes, int]]:
        """Refresh the metadata; return the partitions whose topic was deleted or created again under another id."""
        with contextlib.suppress(RaftlogError, TimeoutError):
            async with asyncio.timeout(self.options.request_timeout_ms / 1000):
                await self.metadata.refresh()
        topics = self.metadata.view.topics
        return [
            key for key, part in wanted.items() if (now := topics.get(part.topic)) is None or now.topic_id != key[0]
        ]

    def gate_opened(self) -> None:
        """The gate is open for more partitions: route the queues that waited for it. On the event loop."""
        with self.lock:
            waiting, self._gated = self._gated, {}
            for queue in waiting:
                self.reroute(queue)

    def renumber(self, producer_id: ProducerId | None) -> None:
        """Number all further batches with this id, from sequence 0 in every partition; None: let them wait.

        No sent batch may be incomplete. Under the lock; the caller then calls `gate_opened` if queues may wait.
        """
        assert not any(batch.sent for batch in self.accumulator.incomplete), "batches sent under other numbers are done"
        for queue in self._numbered:
            queue.drop_id()
        self._numbered.clear()
        self.given.current = producer_id

    def check_may_send(self) -> None:
        """Refuse a record that the producer may not send now; under the lock.

        Raises:
            RaftlogError: as `check_open` and `PartitionGate.check_may_send`.
        """
        self.check_open()
        if self.gate is not None:
            self.gate.check_may_send()

    def not_sent(self, error: Exception) -> None:
        """Tell the gate that `send` raises this error. In any thread, without the lock."""
        if self.gate is not None:
            with self.lock:
                self.gate.on_not_sent(error)

    # Routing to leaders

    def _on_metadata(self) -> None:
        with self.lock:
            for topic, queues in self.topics.items():
                view = self.metadata.view.topics.get(topic)
                if view is not None and view.partitions:
                    queues.update(view)
            for queue in list(self._pausing):
                if self._leads_anew(queue):
                    self._resume(queue)
                else:
                    self._look_for_leader(queue)
            waiting, self._unrouted = self._unrouted, {}
            for queue, since_ms in waiting.items():
                self._route(queue, since_ms)
        for stream in list(self._streams.values()):  # a copy: streams open others for the queues that they give up
            stream.check_leaders()

    def _pump(self) -> None:
        """Encode lingered batches, route ready queues, set the timers."""
        self._wake_pending = False
        with self.lock:
            lingered = self.accumulator.close_lingered(monotonic_ms())
            self._drop_lean(lingered)
        if lingered:
            self.encode(lingered)
        with self.lock:
            ready, self.accumulator.ready = self.accumulator.ready, {}
            for queue in ready:
                if queue.sendable:
                    self._route(queue)
            if self.gate is not None:  # ask for open batches too, so that the gate is open when they have lingered
                for batch in self.accumulator.open_batches():
                    self._open_for(batch.queue)
            linger_ms = self.accumulator.next_linger_ms()
        if linger_ms is not None and self._linger_timer is None:
            delay_s = max(0.0, (linger_ms - monotonic_ms()) / 1000)
            self._linger_timer = self.loop.call_later(delay_s, self._on_linger)
        if self._tick_timer is None and self.accumulator.incomplete:
            self._tick_timer = self.loop.call_later(_TICK_S, self._tick)

    def _on_linger(self) -> None:
        self._linger_timer = None
        self._pump()

    def _route(self, queue: PartitionQueue, since_ms: float | None = None) -> None:
        """Give the queue to its leader's stream; under the lock."""
        if self.gate is not None and not self.may_send(queue):
            return
        if queue.lacks_id and not self._give_id(queue):
            return
        leader = self.metadata.view.leader(queue.topic, queue.partition)
        if leader is None:
            self._unrouted[queue] = since_ms if since_ms is not None else monotonic_ms()
            self.request_refresh(self._unrouted[queue])
            return
        stream = self._streams.get(leader.broker_id)
        if stream is None:
            stream = self._streams[leader.broker_id] = ProduceStream(self, leader.broker_id)
        stream.add(queue)

    def produce_call(self, address: str, *, alone: bool) -> ProduceCall:
        """Return a call to the broker at an address: one that other producers may share, or a new one.

        Idempotent producers without transactions share calls: brokers recognise what they send again when the call
        breaks because of another producer.
        """
        options = self.options
        shares = self._shares and not alone
        who = (options.pem, options.sasl, options.client_id)
        key = (os.getpid(), id(self.loop), address, *who, options.request_timeout_ms)
        call = _shared_calls.get(key) if shares else None
        if call is None or not call.has_room:
            call = ProduceCall(self.connections.channel(address), address, options.client_id, shared=shares)
            if shares:
                _shared_calls[key] = call
        return call

    def reroute(self, queue: PartitionQueue) -> None:
        """Route a queue again, unless all its batches have failed: the gate must not add a partition without records.
        Under the lock."""
        if not all(batch.done for batch in queue.waiting):
            self._route(queue)

    def tick_soon(self) -> None:
        """Look at timeouts and silent brokers soon."""
        if self._tick_timer is None:
            self._tick_timer = self.loop.call_later(_TICK_S, self._tick)

    def request_refresh(self, missing_since_ms: float, probe: int | None = None) -> None:
        """Request newer metadata; the caller has waited for it since `missing_since_ms`."""
        waited_s = (monotonic_ms() - missing_since_ms) / 1000
        self.metadata.request_refresh(missing_since_s=self.loop.time() - waited_s, probe=probe)

    def _give_id(self, queue: PartitionQueue) -> bool:
        """Give the queue a producer id; if there is none yet, return False and route the queue later."""
        assert self.ids is not None
        if self.ids.current is None:
            self._without_id[queue] = None
            self.ids.want()
            return False
        queue.adopt(*self.ids.current)
        if self.gate is not None:
            self._numbered.append(queue)
        return True

    def _on_producer_id(self) -> None:
        with self.lock:
            waiting, self._without_id = self._without_id, {}
            for queue in waiting:
                self.reroute(queue)

    def _on_no_producer_id(self, error: RaftlogError) -> None:
        """No broker will give a producer id: fail the batches that wait for one."""
        if isinstance(error, UnsupportedVersion):
            error = UnsupportedVersion(f"{error}; this server has no producer ids: set enable.idempotence=false")
        with self.lock:
            waiting, self._without_id = self._without_id, {}
            failed = [batch for queue in waiting for batch in queue.take_out()]
            self._drop_lean(failed)
        self.fail(failed, error)

    # Refusals and retries

    def refused(
        self, batch: Batch, topic_id: bytes, wire_error: common_pb2.Error, callbacks: Callbacks
    ) -> tuple[Batch, Batch] | None:
        """Settle a batch that the broker refused; under the lock. Return its halves to encode, if it was split.

        `topic_id`: the topic that it was sent to.
        """
        queue = batch.queue
        error = from_wire(wire_error)
        if wire_error.code in LEADER_ERRORS:
            self.metadata.learn(queue.topic, topic_id, queue.partition, wire_error)
        if isinstance(error, ChainBroken):
            queue.on_refused(batch, resend=True, counts=False)
            return None
        if self.gate is not None and isinstance(error, (SequenceError, InvalidProducerEpoch, InvalidTxnState)):
            on_transactional_numbers_refused(self, batch, error, callbacks)
            return None
        if queue.numbering is not None and isinstance(error, (SequenceError, InvalidProducerEpoch)):
            assert self.ids is not None
            on_numbers_refused(self, self.ids, batch, error, callbacks)
            return None
        if isinstance(error, MessageTooLarge) and batch.count > 1 and not batch.done:
            return self._split(batch)
        if isinstance(error, (RetriableError, FencedError, InternalError)):
            self.send_again(batch, error, callbacks)
            return None
        queue.on_refused(batch, resend=False, counts=False)
        self.complete(batch, callbacks, error=error)
        return None

    def send_again(self, batch: Batch, error: RaftlogError, callbacks: Callbacks) -> None:
        """Send a refused or lost batch again, unless its retries are used up; under the lock."""
        batch.failures += 1
        batch.in_doubt |= error.code not in CERTAIN
        batch.queue.note_failure(error)
        again = batch.failures <= self.options.retries
        if again:
            self.counters.retried(batch, monotonic_ms() / 1_000)
        batch.queue.on_refused(batch, resend=again, counts=True)
        if not again:
            self.complete(batch, callbacks, error=error)

    def _split(self, batch: Batch) -> tuple[Batch, Batch]:
        left, right = self.accumulator.split(batch)
        self.counters.split(monotonic_ms() / 1_000)

        def joined() -> None:
            callbacks: Callbacks = []
            with self.lock:
                if left.done and right.done:
                    self.complete(batch, callbacks, base_offset=left.base_offset, error=left.error or right.error)
            self.finish(callbacks)

        left.callbacks, right.callbacks = [joined], [joined]
        return left, right

    def over(self, batch: Batch, error: RaftlogError, callbacks: Callbacks) -> None:
        """A partition says that the transaction or stage of a batch has ended; under the lock."""
        assert self.gate is not None
        reason = self.gate.on_over(TopicPartition(batch.queue.topic, batch.queue.partition), error)
        if reason is not None:
            self.complete(batch, callbacks, error=reason)

    def settle(self, queues: Iterable[PartitionQueue]) -> None:
        """Resume queues after answers, those with a counted refusal after a pause; under the lock."""
        for queue in queues:
            if queue.recovered():
                if queue.failures and not self._leads_anew(queue):
                    pause_ms = self.options.pauses.after_ms(queue.last_error, queue.failures)
                    now_ms = monotonic_ms()
                    queue.not_before_ms = now_ms + pause_ms
                    queue.refused_since_ms = queue.refused_since_ms or now_ms
                    self._pausing[queue] = self.loop.call_later(pause_ms / 1000, self._after_pause, queue)
                    self._look_for_leader(queue)
                    continue
                self._resume(queue)
            elif queue.waiting and not queue.in_flight:
                self.reroute(queue)
        if self.accumulator.crowded:
            self.wake()

    def _leads_anew(self, queue: PartitionQueue) -> bool:
        """Whether a leader of a later epoch than the refusing one is known: it needs no pause (KIP-951)."""
        view = self.metadata.view.partition(TopicPartition(queue.topic, queue.partition))
        return view is not None and view.leader >= 0 and view.leader_epoch > queue.sent_epoch

    def _look_for_leader(self, queue: PartitionQueue) -> None:
        """Request metadata if a queue pauses after a leader error; a new leader ends the pause."""
        if queue.refused_since_ms is not None and getattr(queue.last_error, "code", None) in LEADER_ERRORS:
            self.request_refresh(queue.refused_since_ms)

    def _resume(self, queue: PartitionQueue) -> None:
        pause = self._pausing.pop(queue, None)
        if pause is not None:
            pause.cancel()
        if self._leads_anew(queue):
            queue.forgive()
        self.reroute(queue)

    def _after_pause(self, queue: PartitionQueue) -> None:
        with self.lock:
            self._pausing.pop(queue, None)
            queue.not_before_ms = 0.0  # a timer may fire a little early
            self.reroute(queue)

    # Completion

    def complete(
        self,
        batch: Batch,
        callbacks: Callbacks,
        *,
        base_offset: int = -1,
        append_time_ms: int = -1,
        error: RaftlogError | None = None,
    ) -> None:
        """Complete a batch under the lock, and tell the gate of a failure.

        The caller runs `callbacks` with `finish` after it has released the lock.
        """
        if error is not None and self.gate is not None and not batch.done:
            self.gate.on_failure(TopicPartition(batch.queue.topic, batch.queue.partition), error)
        if self.accumulator.complete(batch, base_offset=base_offset, append_time_ms=append_time_ms, error=error):
            self.counters.done(batch, monotonic_ms() / 1_000)
            if batch.callbacks:
                callbacks += batch.callbacks
                batch.callbacks = None
            self._ring_for_room()
            if self._room_futures:
                callbacks.append(self._release_room_futures)

    @staticmethod
    def finish(callbacks: Callbacks) -> None:
        """Run all callbacks of completed batches, even if some raise.

        Raises:
            KeyboardInterrupt: raised by a callback in the main thread. On the event loop's thread it is only logged,
                because it would end every client of the process.
        """
        interrupt: KeyboardInterrupt | None = None
        for callback in callbacks:
            try:
                callback()
            except BaseException as error:  # a user's callback, SystemExit too: it must not harm other deliveries
                logger.exception("a delivery callback failed")
                if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
                    interrupt = error
        if interrupt is not None:
            raise interrupt

    def fail(self, batches: Iterable[Batch], error: RaftlogError) -> None:
        """Complete batches with an error."""
        callbacks: Callbacks = []
        with self.lock:
            for batch in batches:
                self.complete(batch, callbacks, error=error)
        self.finish(callbacks)

    def fail_incomplete(self, error: RaftlogError) -> None:
        """Fail all batches that are not acknowledged yet."""
        with self.lock:
            self._drop_lean(self.accumulator.close_all())
            left = list(self.accumulator.incomplete)
        self.fail(left, error)

    def _tick(self) -> None:
        """Check deadlines; runs only while batches are incomplete."""
        self._tick_timer = None
        callbacks: Callbacks = []
        now_ms = monotonic_ms()
        with self.lock:
            for batch in list(self.accumulator.expired(now_ms)):
                queue = batch.queue
                reason = self.trouble_of(queue)
                fate = (
                    "may or may not be in the log"
                    if batch.sent
                    else "are certainly not in the log, they were never sent"
                )
                error = DeliveryTimeout(
                    f"{queue}: no acknowledgement within delivery.timeout.ms={self.options.delivery_timeout_ms}; the "
                    f"records {fate}" + (f"; last error: {reason}" if reason else "")
                )
                if queue.open is batch:
                    self.accumulator.close(batch)
                    self._drop_lean((batch,))
                self.complete(batch, callbacks, error=error)
            for queue, since_ms in list(self._unrouted.items()):
                missing = self.metadata.view.missing.get(queue.topic)
                grace_ms = 0.0 if isinstance(missing, AuthorizationError) else UNKNOWN_TOPIC_GRACE_S * 1000
                if missing is not None and now_ms - since_ms > grace_ms:
                    del self._unrouted[queue]
                    self._drop_topic(queue.topic)
                    for batch in queue.take_out():
                        self.complete(batch, callbacks, error=missing)
                else:
                    self.request_refresh(since_ms)
            again = bool(self.accumulator.incomplete)
        self.finish(callbacks)
        for stream in list(self._streams.values()):  # a copy: streams open others for the queues that they give up
            stream.check_silence(now_ms)
        if self.accumulator.crowded:
            self._pump()
        if again or any(stream.needs_ticks for stream in self._streams.values()):
            self.tick_soon()

    def _drop_topic(self, topic: str) -> None:
        """Drop the queues of a topic that does not exist; under the lock.

        Should the topic exist after all, new queues must not reuse the numbers of the old ones: brokers would take
        their batches for duplicates.
        """
        queues = self.topics.pop(topic, None)
        self.lean.pop(topic, None)
        if queues is not None and self.ids is not None:
            for queue in queues.queues:
                if queue.numbering is not None and queue.numbering.has_id:
                    self.ids.retire(queue.numbering.upcoming.producer_id)

    # End

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task on the engine's event loop."""
        return self.loop.create_task(work)

    async def drain(self) -> None:
        """Send all batches and wait until each is acknowledged or has failed, `delivery.timeout.ms` at most.

        A transactional producer waits for nothing: `close` aborts its open transaction.
        """
        if self.transactions is None:
            self.close_batches()
            with self.lock:
                waiting = list(self.accumulator.incomplete)
            for batch in waiting:
                await wait_async(batch)

    async def close(self, timeout: float | None = None) -> None:
        """Stop; unacknowledged records fail with `ClosedError`, so flush first if needed.

        `timeout`: seconds to abort an open transaction, `LAST_ABORT_S` at most.
        """
        if self.transactions is not None:
            await self.transactions.close(timeout)
        self.closed = self.closed or ClosedError("the producer is closed")
        for timer in (self._linger_timer, self._tick_timer, *self._pausing.values()):
            if timer is not None:
                timer.cancel()
        await asyncio.gather(*(stream.close() for stream in self._streams.values()), return_exceptions=True)
        with self.lock:
            self.lean.clear()
            left = list(self.accumulator.incomplete)
        self.fail(left, ClosedError("the producer was closed before the record was acknowledged"))
        with self.lock:
            self._ring_for_room()
        if self.ids is not None:
            await self.ids.close()
        await self.metadata.close()
        if self._has_connections:
            self._has_connections = False
            await self.connections.close()
