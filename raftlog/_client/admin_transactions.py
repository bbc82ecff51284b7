"""The admin client's part that deals with transactions and staged batches, as their coordinators know them."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Awaitable, Callable, Iterable
from itertools import islice
from typing import Any, Final, TypeVar

import grpc

from raftlog._client.admin_calls import names_of
from raftlog._client.admin_lag import LagAdmin
from raftlog._client.connections import from_grpc
from raftlog._client.coordinators import TRANSACTIONS, Coordinators
from raftlog._client.options import AdminOptions
from raftlog._client.trace_metadata import call_metadata
from raftlog._core.cluster import BrokerView
from raftlog._transaction_descriptions import (
    ONGOING,
    STATE_NUMBERS,
    SinkDescription,
    SinkListing,
    StageDescription,
    TransactionDescription,
    TransactionListing,
    describe_sink,
    describe_transaction,
    state_name,
)
from raftlog.errors import (
    CoordinatorNotAvailable,
    InvalidRequestError,
    NotCoordinator,
    RaftlogError,
    TransactionalIdNotFound,
    from_wire,
)
from raftlog.v1 import transaction_pb2

K = TypeVar("K")
V = TypeVar("V")

STATE_TOPIC: Final = "__transaction_state"
_ANSWER_TIMEOUT_S: Final = 5.0
_AT_A_TIME: Final = 32
_IDS_AT_A_TIME: Final = 5_000
"""That one request names."""


class TransactionAdmin(LagAdmin):
    """Transactions and sinks."""

    def __init__(self, bootstrap: list[str], options: AdminOptions) -> None:
        super().__init__(bootstrap, options)
        self._transaction_coordinators = Coordinators(
            self._metadata, self._connections, options, TRANSACTIONS, self._counted
        )

    # What there is

    async def list_transactions(
        self,
        states: Iterable[str] | None,
        producer_ids: Iterable[int] | None,
        running_longer_than_ms: int,
        missing: list[RaftlogError] | None,
        timeout: float | None,
    ) -> list[TransactionListing]:
        """Return transactional ids by id, then open stages by sink; why some may be missing goes to `missing`."""
        wanted = [_state(name) for name in names_of(states or ())]
        pieces: list[list[int]] = [[]]
        if producer_ids is not None:
            named = sorted(set(producer_ids))
            pieces = [named[at : at + _IDS_AT_A_TIME] for at in range(0, len(named), _IDS_AT_A_TIME)]
        found = {}
        reasons: list[RaftlogError] = []
        for piece in pieces:
            request = transaction_pb2.ListTransactionsRequest(
                states=wanted, producer_ids=piece, running_longer_than_ms=running_longer_than_ms
            )
            untold: list[RaftlogError] | None = None if missing is None else []
            for broker, answer in await self._of_all(request, untold, timeout):
                for each in answer.transactions:
                    key = (not each.transactional_id, each.transactional_id, each.sink_id, each.producer_id)
                    found[key] = TransactionListing(
                        each.transactional_id,
                        each.sink_id,
                        each.producer_id,
                        state_name(each.state),
                        each.started_ms,
                        broker,
                    )
            reasons += [each for each in untold or () if str(each) not in map(str, reasons)]
        if missing is not None:
            missing[:] = reasons
        return [found[key] for key in sorted(found)]

    async def list_sinks(self, missing: list[RaftlogError] | None, timeout: float | None) -> list[SinkListing]:
        """Return the sinks by id; why some may be missing goes to `missing`, without which it is an error."""
        request = transaction_pb2.ListTransactionsRequest()
        found = {
            each.sink_id: SinkListing(
                each.sink_id, each.target, each.last_batch_id, each.updated_ms, each.open_stages, broker
            )
            for broker, answer in await self._of_all(request, missing, timeout)
            for each in answer.sinks
        }
        return [found[sink_id] for sink_id in sorted(found)]

    async def _of_all(
        self,
        request: transaction_pb2.ListTransactionsRequest,
        missing: list[RaftlogError] | None,
        timeout: float | None,
    ) -> list[tuple[int, transaction_pb2.ListTransactionsResponse]]:
        """Return what each broker lists; why there may be more goes to `missing`, without which it is an error."""

        async def attempt(deadline: float) -> list[tuple[int, transaction_pb2.ListTransactionsResponse]]:
            self._metadata.wanted.add(STATE_TOPIC)
            await self._metadata.refresh()
            brokers = [each for each in self._metadata.view.brokers.values() if not each.fenced]
            answers = await asyncio.gather(
                *(self._listed_transactions(broker, request, deadline) for broker in brokers), return_exceptions=True
            )
            found: list[tuple[int, transaction_pb2.ListTransactionsResponse]] = []
            reasons: list[RaftlogError] = []
            for broker, answer in zip(brokers, answers, strict=True):
                if isinstance(answer, RaftlogError):
                    reasons.append(type(answer)(f"broker {broker.broker_id}: {answer}"))
                elif isinstance(answer, BaseException):
                    raise answer
                else:
                    reasons += [from_wire(error) for error in answer.loading]
                    found.append((broker.broker_id, answer))
            reasons += self._leaderless(STATE_TOPIC)
            if reasons and (missing is None or not found):
                raise reasons[0]
            if missing is not None:
                missing[:] = reasons
            return found

        return await self._retried(attempt, timeout)

    async def _listed_transactions(
        self, broker: BrokerView, request: transaction_pb2.ListTransactionsRequest, deadline: float
    ) -> transaction_pb2.ListTransactionsResponse:
        response: transaction_pb2.ListTransactionsResponse = await self.ask_transactions(
            broker.address, "ListTransactions", request, deadline
        )
        if response.error.code:
            raise from_wire(response.error)
        return response

    async def ask_transactions(self, address: str, method: str, request: Any, deadline: float) -> Any:
        """Call a method of the Transaction service on this very broker, once; errors it answers are the caller's."""
        left_s = max(0.1, deadline - asyncio.get_running_loop().time())
        stub = TRANSACTIONS.stub(self._connections.channel(address))
        try:
            with self._counted():
                return await getattr(stub, method)(
                    request,
                    timeout=min(_ANSWER_TIMEOUT_S, self._options.request_timeout_ms / 1000, left_s),
                    metadata=call_metadata(),
                )
        except grpc.RpcError as error:
            raise from_grpc(error, address) from None

    # One of them

    async def describe_transactions(
        self, transactional_ids: Iterable[str], timeout: float | None
    ) -> dict[str, TransactionDescription]:
        """Return what coordinators know of transactional ids, in the order given."""

        async def describe(transactional_id: str) -> TransactionDescription:
            request = transaction_pb2.DescribeTransactionsRequest(transactional_ids=[transactional_id])
            response = await self._at_coordinator(transactional_id, "DescribeTransactions", request, timeout)
            return describe_transaction(response.transactions[0])

        return await _each(names_of(transactional_ids), describe)

    async def abort_transaction(self, transactional_id: str, timeout: float | None) -> None:
        """Abort what is open."""
        request = transaction_pb2.AbortTransactionRequest(transactional_id=transactional_id)
        try:
            await self._at_coordinator(transactional_id, "AbortTransaction", request, timeout)
        except TransactionalIdNotFound:
            try:
                await self.describe_sink(transactional_id, timeout)
            except TransactionalIdNotFound:
                pass
            else:
                raise TransactionalIdNotFound(
                    f"there is no transactional id {transactional_id!r}, but a sink of staged batches of that name; "
                    f"end its open stages with: {abort_stages_command(transactional_id)}"
                ) from None
            raise

    async def describe_sink(self, sink_id: str, timeout: float | None) -> SinkDescription:
        """Return what a sink's coordinator knows of it."""
        request = transaction_pb2.LastBatchRequest(sink_id=sink_id)
        response: transaction_pb2.LastBatchResponse = await self._at_coordinator(sink_id, "LastBatch", request, timeout)
        if response.last_batch_id < 0 and not (response.target or response.stages):
            raise TransactionalIdNotFound(f"there is no sink {sink_id!r}")
        return describe_sink(sink_id, response)

    async def abort_stages(self, sink_id: str, batch_id: int | None, timeout: float | None) -> list[StageDescription]:
        """Abort the stages of a sink, or of one of its batches, that nobody has named; return those that were open."""
        is_open = [
            stage
            for stage in (await self.describe_sink(sink_id, timeout)).stages
            if stage.state == ONGOING and batch_id in (None, stage.batch_id)
        ]
        if is_open:
            request = transaction_pb2.AbortStagesRequest(
                sink_id=sink_id, producer_ids=[stage.producer_id for stage in is_open]
            )
            await self._at_coordinator(sink_id, "AbortStages", request, timeout)
        return is_open

    async def _at_coordinator(self, id_: str, method: str, request: Any, timeout: float | None) -> Any:
        """Call a method about one id; what the response says of that id alone is an error, too."""

        async def attempt(deadline: float) -> Any:
            left_s = max(0.1, deadline - asyncio.get_running_loop().time())
            limit_s = min(left_s, self._options.request_timeout_ms / 1000)
            response = await self._transaction_coordinators.call(id_, method, request, limit_s)
            for each in getattr(response, "transactions", ()):
                if each.error.code:
                    error = from_wire(each.error)
                    if isinstance(error, (NotCoordinator, CoordinatorNotAvailable)):
                        self._transaction_coordinators.forget(id_)
                    raise error
            return response

        return await self._retried(attempt, timeout)

    async def close(self) -> None:
        """Close the connections."""
        await self._transaction_coordinators.close()
        await super().close()


def abort_stages_command(sink_id: str, batch_id: int | None = None) -> str:
    """Return the command that ends the open stages of a sink, or of one of its batches."""
    return f"raftlog txn abort-stages {shlex.quote(sink_id)}" + ("" if batch_id is None else f" --batch {batch_id}")


def _state(name: str) -> transaction_pb2.TransactionState.ValueType:
    if name.lower() not in STATE_NUMBERS:
        raise InvalidRequestError(f"there is no state {name!r} of a transaction; there are {', '.join(STATE_NUMBERS)}")
    return STATE_NUMBERS[name.lower()]


async def _each(keys: Iterable[K], make: Callable[[K], Awaitable[V]]) -> dict[K, V]:
    """Return what becomes of each key, some at a time."""
    found: dict[K, V] = {}
    waiting = iter(keys)
    while some := list(islice(waiting, _AT_A_TIME)):
        found |= zip(some, await asyncio.gather(*map(make, some)), strict=True)
    return found
