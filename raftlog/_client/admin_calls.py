"""How the admin client asks: one request at a time, retried until its timeout, at whichever broker can answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Final, TypeVar

import grpc

from raftlog._client.connections import REFUSED_GRACE_S, NobodyListens, connections, from_grpc, nobody_answers
from raftlog._client.metadata import MetadataCache
from raftlog._client.options import AdminOptions
from raftlog._client.trace_metadata import call_metadata
from raftlog._core.client_figures import CallFigures, Figures, rate_and_total
from raftlog._core.cluster import TopicView
from raftlog.errors import (
    BrokerUnavailable,
    ClosedError,
    InvalidRequestError,
    RaftlogError,
    RequestTimedOut,
    RetriableError,
    ShuttingDown,
    UnknownTopicOrPartition,
    from_wire,
)
from raftlog.v1 import admin_pb2_grpc

T = TypeVar("T")
Service = Callable[[grpc.aio.Channel], Any]

_ADDRESS_TIMEOUT_S: Final = 5.0
_DEADLINE_MARGIN_S: Final = 0.1
_METADATA_MAX_AGE_MS: Final = 300_000
_FIRST_CONTACT_S: Final = 5.0
"""Addresses that have never answered are more likely wrong than late: no need to wait `default.api.timeout.ms`."""


def names_of(given: str | Iterable[str]) -> list[str]:
    """Return names, each once; a string is one name, not its letters."""
    return [given] if isinstance(given, str) else list(dict.fromkeys(given))


def admin_stub(channel: grpc.aio.Channel) -> Any:
    """Return the stub of the service that most calls go to."""
    return admin_pb2_grpc.AdminStub(channel)


class AdminCalls:
    """Calls any broker; the broker finds the controller.

    Whoever answers is asked again first, and nobody is believed who knows less than what this client has changed: every
    change says at which metadata offset it is in effect, and questions ask for no older metadata.
    """

    def __init__(self, bootstrap: list[str], options: AdminOptions) -> None:
        self._options = options
        self._connections = connections(options.pem, options.sasl)
        self._metadata = MetadataCache(
            self._connections,
            bootstrap,
            max_age_ms=_METADATA_MAX_AGE_MS,
            request_timeout_ms=options.request_timeout_ms,
            pauses=options.pauses,
        )
        self._metadata.refused_grace_s = REFUSED_GRACE_S
        self.closed = False
        self._answered = False
        self.figures = CallFigures(time.monotonic())
        self._last_address = ""

    def _limit_s(self, timeout: float | None) -> float:
        """Return how long a call may take that was given this timeout."""
        limit_s = self._options.default_api_timeout_ms / 1000 if timeout is None else timeout
        if timeout is None and not self._metadata.view.brokers and not self._answered:
            limit_s = min(limit_s, _FIRST_CONTACT_S)
        return limit_s

    async def _retried(
        self,
        attempt: Callable[[float], Awaitable[T]],
        timeout: float | None,
        at_once: tuple[type[RaftlogError], ...] = (),
    ) -> T:
        """Return what an attempt returns that succeeds; errors that may pass are retried, but for `at_once`."""
        if self.closed:
            raise ClosedError("the admin client is closed, or was made in another process")
        loop = asyncio.get_running_loop()
        limit_s = self._limit_s(timeout)
        started = loop.time()
        deadline = started + limit_s
        failures = 0
        last: RaftlogError = RequestTimedOut(f"no answer within {limit_s:g} s" if limit_s else "no answer yet")
        while True:
            try:
                async with asyncio.timeout_at(deadline + _DEADLINE_MARGIN_S):
                    result = await attempt(deadline)
                self._answered = True
                return result
            except TimeoutError:
                raise last from None
            except RetriableError as error:
                if isinstance(error, at_once) or self._is_hopeless(error, loop.time() - started):
                    raise
                last = error
                failures += 1
                pause_s = self._options.pauses.after_ms(error, failures) / 1000
                deadline = started + self._limit_s(timeout)  # later once somebody has answered, whatever that was
                final = isinstance(error, UnknownTopicOrPartition) and failures > 3
                if final or loop.time() + pause_s >= deadline:
                    raise
                await asyncio.sleep(pause_s)

    def _is_hopeless(self, error: RaftlogError, waited_s: float) -> bool:
        """Whether nobody listens at any address, and never has."""
        known = self._answered or self._metadata.view.brokers
        return isinstance(error, NobodyListens) and not known and waited_s >= REFUSED_GRACE_S

    async def _anyone(
        self,
        method: str,
        request: Any,
        timeout: float | None,
        *,
        done: type[RaftlogError] | None = None,
        at_once: tuple[type[RaftlogError], ...] = (),
        in_turn: bool = False,
        service: Service = admin_stub,
    ) -> Any:
        """Call a method of a service on the first broker that can answer; none may take beyond the deadline.

        `done`: what a broker says if the change is there already. After an attempt that was not answered in time that
        attempt may be why, and then it is no error. `at_once`: refusals that waiting does not help against.
        `in_turn`: no broker takes more than its share of the time, so that all of them are asked.
        """
        cause: RaftlogError | None = None  # what a broker said that was reached: it tells more than a time that is up
        timed_out = False

        async def attempt(deadline: float) -> Any:
            nonlocal cause, timed_out
            known = [broker.address for broker in self._metadata.view.brokers.values() if not broker.fenced]
            addresses = list(dict.fromkeys([*known, *self._metadata.bootstrap]))
            addresses.sort(key=lambda address: address != self._last_address)  # stable
            reasons = []
            loop = asyncio.get_running_loop()
            for number, address in enumerate(addresses):
                until = loop.time() + (deadline - loop.time()) / (len(addresses) - number) if in_turn else deadline
                try:
                    response = await self._response(address, method, request, until, service)
                except (BrokerUnavailable, RequestTimedOut, ShuttingDown) as error:
                    reasons.append(str(error))
                    timed_out = timed_out or isinstance(error, RequestTimedOut)
                    continue
                try:
                    self._check(response)
                except (BrokerUnavailable, RequestTimedOut, ShuttingDown) as error:  # another one may know better
                    cause = type(error)(f"{address}: {error}")
                    timed_out = timed_out or isinstance(error, RequestTimedOut)
                    continue
                except RaftlogError as error:
                    if not timed_out or done is None or not isinstance(error, done):
                        raise
                self._last_address = address
                return response
            raise cause or nobody_answers(addresses, reasons)

        return await self._retried(attempt, timeout, at_once)

    async def _call(self, address: str, method: str, request: Any, deadline: float) -> Any:
        response = await self._response(address, method, request, deadline)
        self._check(response)
        return response

    async def _response(
        self, address: str, method: str, request: Any, deadline: float, service: Service = admin_stub
    ) -> Any:
        """Return what a broker answers, whatever it says."""
        left_s = max(_DEADLINE_MARGIN_S, deadline - asyncio.get_running_loop().time())
        stub = service(self._connections.channel(address))
        try:
            with self._counted():
                response = await getattr(stub, method)(
                    request,
                    timeout=min(_ADDRESS_TIMEOUT_S, self._options.request_timeout_ms / 1000, left_s),
                    metadata=call_metadata(),
                )
            self._answered = True
            return response
        except grpc.RpcError as error:
            raise from_grpc(error, address) from None

    def _counted(self) -> AbstractContextManager[None]:
        """Return what a request to a broker is made within, whichever service it asks."""
        return self.figures.counted(time.monotonic)

    def metrics(self) -> Figures:
        """Return what `Admin.metrics` does; from any thread."""
        now_s = time.monotonic()
        errors = rate_and_total("request-error", self.figures.errors, now_s)
        return {"admin-client-metrics": {**self.figures.show(now_s), **errors}}

    def _check(self, response: Any) -> None:
        if response.HasField("error") and response.error.code:
            raise from_wire(response.error)
        changed_at = getattr(response, "metadata_offset", 0)
        self._metadata.min_offset = max(self._metadata.min_offset, changed_at)

    async def _on_broker(self, method: str, request: Any, broker: int | str | None, timeout: float | None) -> Any:
        """Call the broker itself where its own settings are asked for."""
        if not isinstance(broker, int):
            return await self._anyone(method, request, timeout)
        return await self._retried(lambda deadline: self._ask_broker(broker, method, request, deadline), timeout)

    async def _ask_broker(self, broker: int, method: str, request: Any, deadline: float) -> Any:
        await self._metadata.refresh()
        found = self._metadata.view.brokers.get(broker)
        if found is None:
            known = ", ".join(str(broker_id) for broker_id in sorted(self._metadata.view.brokers))
            raise InvalidRequestError(f"there is no broker {broker}; the cluster has {known}")
        return await self._call(found.address, method, request, deadline)

    async def _all_topics(self, internal: bool) -> list[TopicView]:
        self._metadata.all_topics = True
        try:
            await self._metadata.refresh()
        finally:
            self._metadata.all_topics = False
        known = self._metadata.view.topics.values()
        return sorted((view for view in known if internal or not view.internal), key=lambda view: view.name)

    async def close(self) -> None:
        """Close the connections."""
        self.closed = True
        await self._metadata.close()
        await self._connections.close()
