"""Asks the coordinator of a transaction whether a group's offsets belong to it, before the group keeps them (KIP-890).

Offsets of a transaction are pending until its marker comes. A group that was never added to it, or an id that nobody
coordinates, would have none for ever, and with them no stable offset.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final

from grpc import aio

from broker.clock import Clock
from broker.services.calls import MARGIN_S, MIN_WAIT_S, ask
from broker.services.markers import SERVICE, VERIFY
from broker.transaction_coordinators import TransactionCoordinators
from broker.transactions.commands import Verify
from raftlog._client.connections import Connections, from_grpc
from raftlog._client.tls import ChannelTls
from raftlog.errors import (
    BrokerUnavailable,
    CoordinatorLoadInProgress,
    InvalidProducerEpoch,
    InvalidProducerIdMapping,
    InvalidRequestError,
    InvalidTxnState,
    RaftlogError,
    TransactionAbortable,
    from_wire,
)
from raftlog.v1 import group_pb2, transaction_pb2

MAX_REMEMBERED: Final = 10_000
REMEMBERED_MS: Final = 5 * 60_000
"""How long what was found out counts. It is true for longer: once the group is in the transaction its marker comes, and
after it what is late is refused by the group, for as long as that remembers the marker (producer.id.expiration.ms)."""
CALL_S: Final = 2.0

_FINAL: Final = (
    InvalidProducerEpoch,
    InvalidProducerIdMapping,
    InvalidRequestError,
    InvalidTxnState,
    TransactionAbortable,
)
_Key = tuple[str, str, int, int]


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
        try:
            response = await self._ask(asked, wait_s)
            if response.error.code:
                raise from_wire(response.error)
        except _FINAL:
            raise
        except RaftlogError as error:  # not as it is: the caller would take it for one of the group's coordinator
            raise CoordinatorLoadInProgress(
                f"whether the transaction of {request.transactional_id!r} is open is not known at the moment, try "
                f"again: {error}"
            ) from None
        self._verified[key] = now_ms + REMEMBERED_MS
        self._verified.move_to_end(key)
        while len(self._verified) > MAX_REMEMBERED:
            self._verified.popitem(last=False)

    async def _ask(
        self, request: transaction_pb2.VerifyTransactionRequest, wait_s: float
    ) -> transaction_pb2.VerifyTransactionResponse:
        broker = self._coordinators.find(request.transactional_id).broker
        if broker.broker_id == self._node_id:
            return await self.verify_here(request, wait_s)
        call: Any = self._channel(broker.broker_id).unary_unary(
            f"/{SERVICE}/{VERIFY}",
            request_serializer=transaction_pb2.VerifyTransactionRequest.SerializeToString,
            response_deserializer=transaction_pb2.VerifyTransactionResponse.FromString,
        )
        try:
            response: transaction_pb2.VerifyTransactionResponse = await call(
                request, timeout=max(MIN_WAIT_S, min(CALL_S, wait_s - MARGIN_S))
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
        shard = self._coordinators.shard_of(request.transactional_id)[1]
        answer = await ask(shard, lambda call: Verify(call, request), wait_s)
        assert isinstance(answer, transaction_pb2.VerifyTransactionResponse), "what the command says"
        return answer

    async def close(self) -> None:
        """End the connections."""
        await self._connections.close()
