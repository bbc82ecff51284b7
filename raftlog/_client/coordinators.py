"""Look-up and calls of the broker that coordinates a group, a transactional id or a sink."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, NamedTuple, Protocol

import grpc

from raftlog._client.connections import Connections, from_grpc
from raftlog._client.metadata import MetadataCache
from raftlog._core.backoff import Pauses
from raftlog._core.cluster import join_address
from raftlog.errors import (
    BrokerUnavailable,
    CoordinatorNotAvailable,
    NotCoordinator,
    RaftlogError,
    RequestTimedOut,
    RetriableError,
    ShuttingDown,
    from_wire,
)
from raftlog.v1 import group_pb2, group_pb2_grpc, transaction_pb2, transaction_pb2_grpc

_HEDGE_S: Final = 0.2
"""After this long without an answer the next broker is asked as well."""
_ROUND_S: Final = 3.0
"""How long one look-up over all brokers may take."""
_PATIENCE_S: Final = 0.5
"""How long a coordinator may take to answer before a look-up checks that it still coordinates; the check repeats."""
_ENOUGH_REFUSALS: Final = 3
"""A look-up ends after this many brokers agree that there is no coordinator."""
_LOST: Final = (NotCoordinator, CoordinatorNotAvailable, BrokerUnavailable, RequestTimedOut, ShuttingDown)
"""Errors after which a group may have another coordinator."""


class Coordinator(NamedTuple):
    """The broker that coordinates an id, and the partition of the internal topic that holds its state."""

    node_id: int
    address: str
    partition: int


class CoordinatedService(NamedTuple):
    """A coordinated service: its stub, and the request of its `FindCoordinator`, both with the same response."""

    stub: Callable[[grpc.aio.Channel], Any]
    look_up: Callable[[str], Any]


GROUPS: Final = CoordinatedService(
    lambda channel: group_pb2_grpc.GroupStub(channel),
    lambda group_id: group_pb2.FindCoordinatorRequest(group_id=group_id),
)
TRANSACTIONS: Final = CoordinatedService(
    lambda channel: transaction_pb2_grpc.TransactionStub(channel),  # type: ignore[no-untyped-call,unused-ignore] # generated
    lambda id_: transaction_pb2.FindTransactionCoordinatorRequest(id=id_),
)
"""The service of transactional ids and sink ids."""


class CoordinatorOptions(Protocol):
    """The options that a look-up needs."""

    @property
    def request_timeout_ms(self) -> float: ...
    @property
    def pauses(self) -> Pauses: ...


class Coordinators:
    """The known coordinators of groups, or of transactional ids and sinks. Lives on one event loop.

    After `NotCoordinator` or `CoordinatorNotAvailable`, or without an answer, the caller calls `forget`, and then
    `find` again. `call` forgets by itself.
    """

    def __init__(
        self,
        metadata: MetadataCache,
        connections: Connections,
        options: CoordinatorOptions,
        service: CoordinatedService = GROUPS,
        counted: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """`counted` returns the context manager that counts a request."""
        self._counted = counted
        self._service = service
        self._metadata = metadata
        self._connections = connections
        self._options = options
        self._known: dict[str, Coordinator] = {}
        self._flights: dict[str, asyncio.Task[Coordinator]] = {}
        self._stub: tuple[grpc.aio.Channel, Any] | None = None
        """The last channel and its stub: a new stub costs as much as a call."""

    def known(self, group_id: str) -> Coordinator | None:
        """Return the remembered coordinator, or None."""
        return self._known.get(group_id)

    def learn(self, group_id: str, coordinator: Coordinator) -> None:
        """Remember the broker that has answered for the group."""
        self._known[group_id] = coordinator

    def forget(self, group_id: str, former: Coordinator | None = None) -> None:
        """Forget the coordinator; with `former`, only if that one is remembered."""
        if former is None or self._known.get(group_id) == former:
            self._known.pop(group_id, None)

    async def find(self, group_id: str, timeout_s: float) -> Coordinator:
        """Return the coordinator; if it is not known, look it up, repeatedly within `timeout_s`.

        Raises:
            InvalidGroupId: the group id is invalid.
            CoordinatorNotAvailable: there is no coordinator; the message says why.
            BrokerUnavailable: no broker answers.
        """
        loop = asyncio.get_running_loop()
        started = loop.time()
        failures = 0
        while True:
            try:
                return await self.find_once(group_id)
            except RetriableError as error:
                failures += 1
                waited_s = loop.time() - started
                pause_s = self._options.pauses.after_ms(error, failures) / 1000
                if waited_s + pause_s >= timeout_s or self._metadata.is_hopeless(error, waited_s):
                    raise
                await asyncio.sleep(pause_s)

    async def find_once(self, group_id: str) -> Coordinator:
        """Return the coordinator; if it is not known, look it up once, asking each broker at most once.

        Concurrent calls for one id share a look-up.

        Raises:
            InvalidGroupId, CoordinatorNotAvailable, BrokerUnavailable: as `find`.
        """
        found = self._known.get(group_id)
        return found if found is not None else await self._look_up(group_id)

    async def _look_up(self, group_id: str) -> Coordinator:
        flight = self._flights.get(group_id)
        if flight is None:
            flight = self._flights[group_id] = asyncio.get_running_loop().create_task(self._ask(group_id))
            flight.add_done_callback(lambda done: self._landed(group_id, done))
        return await asyncio.shield(flight)

    def _landed(self, group_id: str, flight: asyncio.Task[Coordinator]) -> None:
        self._flights.pop(group_id, None)
        if not flight.cancelled() and flight.exception() is None:
            self._known[group_id] = flight.result()

    async def _ask(self, group_id: str) -> Coordinator:
        """Ask one broker after the other, and the next one while one is silent; the first answer counts."""
        loop = asyncio.get_running_loop()
        addresses = self._addresses()
        left = list(addresses)
        until = loop.time() + _ROUND_S
        asking: list[asyncio.Task[Coordinator]] = []
        done: list[asyncio.Task[Coordinator]] = []
        reasons: list[str] = []
        refusals: list[RaftlogError] = []
        try:
            while (left or asking) and len(refusals) < _ENOUGH_REFUSALS and loop.time() < until:
                if left:
                    asking.append(loop.create_task(self._ask_one(left.pop(0), group_id)))
                patience_s = _HEDGE_S if left else until - loop.time()
                await asyncio.wait(asking, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
                done, asking = [task for task in asking if task.done()], [task for task in asking if not task.done()]
                for task in done:
                    try:
                        return task.result()
                    except (BrokerUnavailable, RequestTimedOut) as error:
                        reasons.append(str(error))
                    except RetriableError as error:
                        refusals.append(error)
        finally:
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, *done, return_exceptions=True)  # retrieves the exceptions of all
        if refusals:
            raise refusals[0]
        raise await self._connections.unavailable(addresses, reasons or [f"no answer within {_ROUND_S:g} s"])

    def _addresses(self) -> list[str]:
        known = [broker.address for broker in self._metadata.view.brokers.values() if not broker.fenced]
        bootstrap = list(self._metadata.bootstrap)
        for some in (known, bootstrap):  # so that one isolated broker is not always the first
            random.shuffle(some)
        return list(dict.fromkeys([*known, *bootstrap]))

    async def _ask_one(self, address: str, group_id: str) -> Coordinator:
        stub = self._service.stub(self._connections.channel(address))
        try:
            with self._counted():
                response: group_pb2.FindCoordinatorResponse = await stub.FindCoordinator(
                    self._service.look_up(group_id), timeout=min(_ROUND_S, self._options.request_timeout_ms / 1000)
                )
        except grpc.RpcError as error:
            raise from_grpc(error, address) from None
        if response.HasField("error") and response.error.code:
            raise from_wire(response.error)
        return Coordinator(response.node_id, join_address(response.host, response.port), response.partition)

    async def call(self, group_id: str, method: str, request: Any, timeout_s: float) -> Any:
        """Call a unary method of the service on the coordinator, once; look the coordinator up if needed.

        The call fails early if the coordinator is slow and brokers name another one. The caller checks the errors of
        single results in the response, and calls `forget` if it finds `NotCoordinator` there.

        Raises:
            RaftlogError: the `error` of the response, or why there is none. After errors that may mean another
                coordinator, this one is forgotten, so a retry looks it up again.
        """
        coordinator = await self.find_once(group_id)
        stub = self._stub_of(coordinator.address)
        try:
            with self._counted():
                async with asyncio.timeout(timeout_s):
                    response = await self._while_it_is(group_id, coordinator, getattr(stub, method)(request))
        except TimeoutError:
            self.forget(group_id, coordinator)
            raise RequestTimedOut(f"{coordinator.address} did not answer in time") from None
        except grpc.RpcError as error:
            self.forget(group_id, coordinator)
            raise from_grpc(error, coordinator.address) from None
        failed = getattr(response, "error", None)
        if failed is not None and failed.code:
            refusal = from_wire(failed)
            if isinstance(refusal, _LOST):
                self.forget(group_id, coordinator)
            raise refusal
        return response

    def _stub_of(self, address: str) -> Any:
        channel = self._connections.channel(address)
        if self._stub is None or self._stub[0] is not channel:
            self._stub = channel, self._service.stub(channel)
        return self._stub[1]

    async def _while_it_is(self, group_id: str, coordinator: Coordinator, call: Any) -> Any:
        """Wait for an answer, while look-ups name no other coordinator.

        Raises:
            BrokerUnavailable: another broker coordinates; it is remembered.
        """
        answer = asyncio.ensure_future(call)
        look_up: asyncio.Task[Coordinator] | None = None
        try:
            while not (await asyncio.wait([answer], timeout=_PATIENCE_S))[0]:
                look_up = asyncio.get_running_loop().create_task(self._look_up(group_id))
                await asyncio.wait([answer, look_up], return_when=asyncio.FIRST_COMPLETED)
                if answer.done():
                    break
                if look_up.exception() is None and look_up.result().node_id != coordinator.node_id:
                    raise BrokerUnavailable(f"{coordinator.address} does not answer, and no longer coordinates")
            return answer.result()
        finally:
            answer.cancel()
            if look_up is not None:
                look_up.cancel()
                await asyncio.gather(look_up, return_exceptions=True)

    async def close(self) -> None:
        """Cancel all look-ups."""
        flights = list(self._flights.values())
        for flight in flights:
            flight.cancel()
        await asyncio.gather(*flights, return_exceptions=True)
