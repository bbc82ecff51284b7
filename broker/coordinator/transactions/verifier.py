"""What a client may do under a producer id: whose the id is, and which transaction is open (KIP-890, docs/adr/0026).

Offsets and records of a transaction are pending until its marker comes. A group, or a partition, that was never added
to the transaction would wait for the marker for ever. So its coordinator is asked first: by a group before it keeps
offsets (`TransactionVerifier.check`), by a leader before the first batch of a transaction (`ProducerChecks.verify`).

What `ProducerChecks` does with a batch, from metadata.version 5 on:

    batch            producer id                                    outcome
    any              none                                           accepted: it leaves nothing but its records
    plain            bound to the caller                            accepted
    plain            bound to another owner, or never given out     InvalidProducerIdMapping
    transactional    the request names no owner                     UnsupportedVersion
    transactional    the caller may not write as the named owner    TransactionalIdAuthorizationFailed
    transactional    bound to another owner, or never given out     InvalidProducerIdMapping
    transactional    its transaction is open in the partition, and  accepted
                     was verified there for the named owner
    transactional    its coordinator says that it is open           accepted
    transactional    its coordinator says that it is not            InvalidTxnState, InvalidProducerEpoch
    transactional    its coordinator does not answer                CoordinatorLoadInProgress

The tag in an id does not suffice for transactions: clients choose the names of their transactional ids and sinks, and
one of some millions of names has the tag of a given id.

An id from before the cluster had its secret is bound to no owner. Its plain batches are accepted as before, and each
stream has the coordinator asked about its transactions. InitProducerId replaces such an id.

A refusal leaves nothing in a log or a table of producers. It may leave: the number of a broken chain and a decision
about a name in the stream that was refused (bounded there), a line in the audit log, and counts in metrics.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from grpc import aio

from broker.clock import Clock
from broker.coordinator.groups.topics import TopicPartition
from broker.coordinator.transactions.commands import AddTo, Verify
from broker.coordinator.transactions.coordinators import TransactionCoordinators
from broker.coordinator.transactions.records import partition_messages
from broker.net.services.calls import CALL_MARGIN_S, MIN_WAIT_S, ask
from broker.net.services.markers import SERVICE, VERIFY
from broker.security.caller import Caller, Decisions
from raftlog._client.connections import Connections, from_grpc
from raftlog._client.security import ChannelTls
from raftlog.errors import (
    BrokerUnavailable,
    CoordinatorLoadInProgress,
    InvalidProducerEpoch,
    InvalidProducerIdMapping,
    InvalidRequestError,
    InvalidTxnState,
    LeaderNotAvailable,
    ProducerFenced,
    RaftlogError,
    TransactionAbortable,
    UnsupportedVersion,
    from_wire,
)
from raftlog.format import Buffer
from raftlog.format.header import producer_of, says_transactional
from raftlog.format.wire import MAX_PRODUCERS
from raftlog.v1 import group_pb2, log_pb2, transaction_pb2
from raftlog.v1.security_pb2 import Acl
from raftmeta.features import PRODUCER_OWNERS_LEVEL, metadata_version
from raftmeta.image import MetadataImage
from raftmeta.producer_ids import ProducerOwner

if TYPE_CHECKING:
    from broker.partition.partition import Partition

MAX_REMEMBERED: Final = 10_000
REMEMBERED_MS: Final = 5 * 60_000
"""How long what was found out counts. It is true for longer: once the group is in the transaction its marker comes, and
after it what is late is refused by the group, for as long as that remembers the marker (producer.id.expiration.ms)."""
MAX_OWN: Final = 10 * MAX_PRODUCERS
"""Plain producer ids that a stream remembers as the caller's own; beyond it, all of them are checked again."""
CALL_S: Final = 2.0
MAX_CLOSED: Final = 1_000
"""Of a partition's verified transactions, how many that are not open in its log are remembered."""

_FINAL: Final = (
    InvalidProducerEpoch,
    InvalidProducerIdMapping,
    InvalidRequestError,
    InvalidTxnState,
    TransactionAbortable,
)
_Key = tuple[str, str, int, int]


def _key(request: transaction_pb2.VerifyTransactionRequest) -> str:
    """Return the id by which the coordinator is found."""
    return request.transactional_id or request.sink_id


class TransactionVerifier:
    """On the event loop. `address_of`: where a broker listens for other nodes; None while that is not known."""

    def __init__(
        self,
        node_id: int,
        coordinators: TransactionCoordinators,
        address_of: Callable[[int], str | None],
        clock: Clock,
        tls: ChannelTls | None = None,
    ) -> None:
        self._node_id = node_id
        self._coordinators = coordinators
        self._address_of = address_of
        self._clock = clock
        self._verified: OrderedDict[_Key, float] = OrderedDict()
        self._connections = Connections(tls)

    async def check(self, request: group_pb2.CommitTransactionOffsetsRequest, wait_s: float) -> None:
        """Refuse offsets of a transaction that is not open, or that the group was not added to.

        Raises:
            InvalidTxnState, InvalidProducerEpoch, InvalidProducerIdMapping, TransactionAbortable: they never count.
            CoordinatorLoadInProgress: the transaction's coordinator does not say at the moment.
        """
        key = (request.group_id, request.transactional_id, request.producer_id, request.producer_epoch)
        now_ms = self._clock.monotonic_ms()
        if now_ms < self._verified.get(key, now_ms):
            return
        asked = transaction_pb2.VerifyTransactionRequest(
            transactional_id=request.transactional_id,
            producer_id=request.producer_id,
            producer_epoch=request.producer_epoch,
            group_id=request.group_id,
        )
        await self.verify(asked, wait_s)
        self._remember(key)

    async def epoch_for_group(
        self, request: group_pb2.CommitTransactionOffsetsRequest, wait_s: float, *, add: bool, user: str
    ) -> int:
        """Return which epoch the transaction of a Kafka client's offsets has; `add` as in `ProducerChecks.epoch_of`.

        `user`: as in `AddTo`.

        Raises:
            PolicyViolation: transactions of the user have named too many groups.
            RaftlogError: as `check`.
        """
        epoch = await self.verify(
            transaction_pb2.VerifyTransactionRequest(
                transactional_id=request.transactional_id,
                producer_id=request.producer_id,
                producer_epoch=request.producer_epoch,
                group_id=request.group_id,
                keeps_epoch=not add,
                add=add,
                user=user if add else "",
            ),
            wait_s,
        )
        self._remember((request.group_id, request.transactional_id, request.producer_id, epoch))
        return epoch

    def _remember(self, key: _Key) -> None:
        self._verified[key] = self._clock.monotonic_ms() + REMEMBERED_MS
        self._verified.move_to_end(key)
        while len(self._verified) > MAX_REMEMBERED:
            self._verified.popitem(last=False)

    async def verify(self, request: transaction_pb2.VerifyTransactionRequest, wait_s: float) -> int:
        """Ask the coordinator, keep nothing of its answer, and return the epoch of the transaction.

        Raises:
            InvalidTxnState, InvalidProducerEpoch, InvalidProducerIdMapping, TransactionAbortable: as `check`.
            CoordinatorLoadInProgress: likewise.
        """
        try:
            response = await self._ask(request, wait_s)
            if response.error.code:
                raise from_wire(response.error)
            return response.producer_epoch
        except _FINAL:
            raise
        except RaftlogError as error:  # not as it is: the caller would take it for one of the group's coordinator
            raise CoordinatorLoadInProgress(
                f"whether the transaction of {_key(request)!r} is open is not known at the moment, try again: {error}"
            ) from None

    async def _ask(
        self, request: transaction_pb2.VerifyTransactionRequest, wait_s: float
    ) -> transaction_pb2.VerifyTransactionResponse:
        broker = self._coordinators.find(_key(request)).broker
        if broker.broker_id == self._node_id:
            return await self.verify_here(request, wait_s)
        call: Any = self._channel(broker.broker_id).unary_unary(
            f"/{SERVICE}/{VERIFY}",
            request_serializer=transaction_pb2.VerifyTransactionRequest.SerializeToString,
            response_deserializer=transaction_pb2.VerifyTransactionResponse.FromString,
        )
        try:
            response: transaction_pb2.VerifyTransactionResponse = await call(
                request, timeout=max(MIN_WAIT_S, min(CALL_S, wait_s - CALL_MARGIN_S))
            )
        except aio.AioRpcError as error:
            raise from_grpc(error, f"broker {broker.broker_id}") from None
        except asyncio.InvalidStateError:  # the channel was closed under the call
            raise BrokerUnavailable("the connection was closed") from None
        return response

    def _channel(self, broker_id: int) -> aio.Channel:
        address = self._address_of(broker_id)
        if address is None:
            raise CoordinatorLoadInProgress(f"it is not known where broker {broker_id} listens for other nodes")
        return self._connections.channel(address)

    async def verify_here(
        self, request: transaction_pb2.VerifyTransactionRequest, wait_s: float
    ) -> transaction_pb2.VerifyTransactionResponse:
        """Return what this broker's coordinator says.

        Raises:
            RaftlogError: it refuses, or does not coordinate the transaction.
        """
        shard = self._coordinators.shard_of(_key(request))[1]
        if request.add and request.transactional_id:
            added = transaction_pb2.AddToTransactionRequest(
                transactional_id=request.transactional_id,
                producer_id=request.producer_id,
                producer_epoch=request.producer_epoch,
                partitions=request.partitions,
                group_ids=[request.group_id] if request.group_id else [],
                keeps_epoch=request.keeps_epoch,
            )
            try:
                await ask(shard, lambda call: AddTo(call, added, request.user), wait_s)
            except ProducerFenced as error:  # as `coordinator.verify` says it
                raise InvalidProducerEpoch(str(error)) from None
        answer = await ask(shard, lambda call: Verify(call, request), wait_s)
        assert isinstance(answer, transaction_pb2.VerifyTransactionResponse), "what the command says"
        return answer

    async def close(self) -> None:
        """End the connections."""
        await self._connections.close()


class ProducerChecks:
    """Checks the producer ids of one produce stream's batches; see the module.

    Bounded: `_verified` has an entry only for partitions on this broker of topics that the caller may write, `_own`
    MAX_OWN entries.
    """

    def __init__(self, who: Caller, image: Callable[[], MetadataImage], verifier: TransactionVerifier) -> None:
        self._image = image
        self._verifier = verifier
        self._ids = Decisions.of(who, Acl.WRITE, Acl.TRANSACTIONAL_ID)
        self._principal = ProducerOwner.principal(who.principal)
        self._own: set[int] = set()
        """Plain ids that were found to be the caller's; several producers may share the stream (docs/adr/0040)."""
        self._verified: dict[TopicPartition, tuple[int, int, ProducerOwner]] = {}
        """Transactions with an unbound id that their coordinators know to be open; the last one of each partition."""

    def check(self, head: log_pb2.ProduceRequest, batch: Buffer) -> None:
        """Check whose producer id a batch carries, and that the caller may use it. Asks no other broker.

        Raises:
            TransactionalIdAuthorizationFailed: the caller may not write as the owner that the request names.
            InvalidProducerIdMapping: the id belongs to another owner, or was never given out.
            UnsupportedVersion: the request names no owner of its transactional batches.
            LeaderNotAvailable: this broker's metadata is too old to tell.
        """
        producer_id, _ = producer_of(batch)
        self.check_id(head, producer_id, transactional=says_transactional(batch))

    def check_id(self, head: log_pb2.ProduceRequest, producer_id: int, *, transactional: bool) -> None:
        """Check a batch's producer id, as `check` does."""
        if transactional:
            self._check_transactional(head, producer_id)
        elif producer_id >= 0 and producer_id not in self._own and self._is_enforced:
            self._check_bound(self._principal, producer_id)
            if len(self._own) >= MAX_OWN:
                self._own.clear()
            self._own.add(producer_id)

    @property
    def _is_enforced(self) -> bool:
        return metadata_version(self._image()) >= PRODUCER_OWNERS_LEVEL

    def _check_transactional(self, head: log_pb2.ProduceRequest, producer_id: int) -> None:
        owner = _owner_of(head)
        if owner is None:
            if self._is_enforced:
                raise UnsupportedVersion(
                    "the request has a transactional batch and names neither its transactional id nor its sink, which "
                    f"metadata.version {PRODUCER_OWNERS_LEVEL} requires; use a newer client"
                )
            if self._ids is not None:
                self._ids.check_any()
            return
        if self._ids is not None:
            self._ids.check(owner.name)
        if producer_id >= 0 and self._is_enforced:
            self._check_bound(owner, producer_id)

    def _check_bound(self, owner: ProducerOwner, producer_id: int) -> None:
        image = self._image()
        key = image.producer_id_key
        if key is None:
            if producer_id >= image.next_producer_id:
                raise LeaderNotAvailable(
                    f"producer id {producer_id} is not known here: it was never given out, or this broker has not "
                    "heard of it yet; try again"
                )
        elif key.is_bound(producer_id) and not key.owns(owner, producer_id):
            raise InvalidProducerIdMapping(
                f"producer id {producer_id} was not given to {owner}: take one from InitProducerId, as the same user "
                "and for the same transactional id"
            )

    async def verify(self, head: log_pb2.ProduceRequest, batch: Buffer, partition: Partition) -> None:
        """Have the coordinator of a transactional batch, which passes `check`, asked about its transaction.

        Returns at once if the transaction is open in the partition, and was verified there for the same owner.

        Raises:
            InvalidTxnState, InvalidProducerEpoch: the transaction is not open, or the partition was not added to it.
            InvalidProducerIdMapping: the owner has another producer id by now.
            CoordinatorLoadInProgress: the coordinator does not say at the moment.
        """
        owner = _owner_of(head)
        if owner is None or not self._is_enforced:
            return
        producer_id, producer_epoch = producer_of(batch)
        place = partition.log.topic_id, partition.log.partition
        key = self._image().producer_id_key
        found = partition.log.producers.transactions.get(producer_id)
        is_bound = key is not None and key.is_bound(producer_id)
        if found is not None and found.epoch == producer_epoch:
            if is_bound and partition.verified_owners.get(producer_id) == (producer_epoch, owner):
                return
            if not is_bound and self._verified.get(place) == (producer_id, producer_epoch, owner):
                return
        try:
            await self._verifier.verify(
                transaction_pb2.VerifyTransactionRequest(
                    transactional_id=head.transactional_id,
                    sink_id=head.sink_id,
                    producer_id=producer_id,
                    producer_epoch=producer_epoch,
                    partitions=partition_messages([place]),
                ),
                CALL_S,
            )
        except TransactionAbortable as error:  # the partition's own answer, once it has the marker
            raise InvalidProducerEpoch(str(error)) from None
        if is_bound:
            _remember(partition, producer_id, producer_epoch, owner)
        else:
            self._verified[place] = producer_id, producer_epoch, owner

    async def epoch_of(
        self, transactional_id: str, producer_id: int, session_epoch: int, partition: Partition, *, add: bool
    ) -> int:
        """Have the coordinator asked which epoch a Kafka client's transaction has.

        `add`: the client is of transaction.version 2; its batch adds the partition, and has the epoch itself. Else the
        client keeps its epoch over all transactions (`Transaction.own_epoch`), and has added the partition.

        Raises:
            RaftlogError: as `verify`.
        """
        place = partition.log.topic_id, partition.log.partition
        try:
            return await self._verifier.verify(
                transaction_pb2.VerifyTransactionRequest(
                    transactional_id=transactional_id,
                    producer_id=producer_id,
                    producer_epoch=session_epoch,
                    partitions=partition_messages([place]),
                    keeps_epoch=not add,
                    add=add,
                ),
                CALL_S,
            )
        except TransactionAbortable as error:  # as in `verify`
            raise InvalidProducerEpoch(str(error)) from None


def _remember(partition: Partition, producer_id: int, producer_epoch: int, owner: ProducerOwner) -> None:
    verified, open_now = partition.verified_owners, partition.log.producers.transactions
    verified[producer_id] = producer_epoch, owner
    if len(verified) > len(open_now) + MAX_CLOSED:
        for closed in [each for each in verified if each not in open_now and each != producer_id]:
            del verified[closed]


def _owner_of(head: log_pb2.ProduceRequest) -> ProducerOwner | None:
    if head.transactional_id and head.sink_id:
        raise InvalidRequestError("the request names a transactional id and a sink; a transaction belongs to one owner")
    if head.transactional_id:
        return ProducerOwner.transactional(head.transactional_id)
    return ProducerOwner.sink(head.sink_id) if head.sink_id else None
