"""What the services share.

`answered` and `in_time`: a response leaves before the caller's deadline, so that the caller reads this broker's reason
instead of gRPC's DEADLINE_EXCEEDED. `ask`: a unary call to a coordinator's shard. `LookUpService`: the `ListOffsets` of
the inter-node listener; group coordinators compute lag from it.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from itertools import islice
from typing import Any, Final, NoReturn, Protocol, TypeAlias, TypeVar

import grpc
from google.protobuf.message import Message
from grpc import aio

from broker.coordinator.core import Reply
from broker.coordinator.shard import Shard
from broker.net.interceptors import host_of
from broker.quotas.manager import measured_here
from broker.security.caller import caller
from raftlog._client.connections import refuse
from raftlog.errors import InternalError, RaftlogError, RequestTimedOut, ShuttingDown, to_wire
from raftlog.v1 import common_pb2, log_pb2
from raftmeta.port import MetadataPort

logger = logging.getLogger(__name__)

T = TypeVar("T")
Context = aio.ServicerContext[Any, Any]

LEADERLESS_S: Final = 1.5
"""An election takes less; after this long the voters are down or out of reach. The caller may know another broker that
reaches them."""
LOOK_S: Final = 0.1
ANSWER_MARGIN_S: Final = 0.3
"""The response leaves at least this long before the caller's deadline."""
MARGIN_SHARE: Final = 0.2
"""The margin is at most this share of the time that the caller leaves."""


class Answer(Protocol):
    """A response with an error to fill in."""

    @property
    def error(self) -> common_pb2.Error: ...


class _AsksQuorum(Protocol):
    _metadata: MetadataPort


ServiceT = TypeVar("ServiceT", bound=_AsksQuorum)
RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT", bound=Answer)


def answered(
    response_type: type[ResponseT], *, asks_quorum: bool = True
) -> Callable[
    [Callable[[ServiceT, RequestT, Context, ResponseT], Awaitable[None]]],
    Callable[[ServiceT, RequestT, Context], Coroutine[Any, Any, ResponseT]],
]:
    """Decorate a method that fills in a new response; what it raises becomes the response's error.

    With `asks_quorum` it also answers `in_time`.
    """

    def decorate(
        method: Callable[[ServiceT, RequestT, Context, ResponseT], Awaitable[None]],
    ) -> Callable[[ServiceT, RequestT, Context], Coroutine[Any, Any, ResponseT]]:
        @functools.wraps(method)
        async def answer(service: ServiceT, request: RequestT, context: Context) -> ResponseT:
            response = response_type()
            work = method(service, request, context, response)
            if asks_quorum:
                work = in_time(work, context.time_remaining(), service._metadata.waiting_for)
            try:
                await work
            except RaftlogError as error:
                response.error.CopyFrom(to_wire(error))
            except Exception as error:  # a bug here must reach the client as an answer, not as a broken connection
                logger.exception("a request failed", extra={"method": method.__name__})
                response.error.CopyFrom(to_wire(error))
            return response

        return answer

    return decorate


async def end_stream(context: Context, status: grpc.StatusCode, error: RaftlogError) -> NoReturn:
    """End a call with a gRPC status that names the error."""
    await refuse(context, status, error)


def author_of(context: Context) -> tuple[str, str]:
    """Return the principal and the address of the caller, for the audit log."""
    who = caller.get()
    return who.principal, who.host or host_of(context.peer())


async def in_time(work: Awaitable[T], remaining_s: float | None, waiting_for: Callable[[], str]) -> T:
    """Return the result of `work`, or cancel it shortly before the deadline.

    Args:
        remaining_s: seconds until the caller's deadline; None if it has none.
        waiting_for: returns what the metadata quorum lacks to have a leader, "" if it has one.

    Raises:
        RequestTimedOut: the deadline is near, or the quorum has had no leader for LEADERLESS_S.
    """
    loop = asyncio.get_running_loop()
    until_s = float("inf")
    if remaining_s is not None:
        until_s = loop.time() + remaining_s - min(ANSWER_MARGIN_S, remaining_s * MARGIN_SHARE)
    leaderless_since_s: float | None = None
    task = asyncio.ensure_future(measured_here(work))
    try:
        while True:
            await asyncio.wait((task,), timeout=max(0.0, min(LOOK_S, until_s - loop.time())))
            if task.done():
                return task.result()
            missing = waiting_for()
            now_s = loop.time()
            if not missing:
                leaderless_since_s = None
            elif leaderless_since_s is None:
                leaderless_since_s = now_s
            if leaderless_since_s is not None and now_s - leaderless_since_s >= LEADERLESS_S:
                raise _no_leader(missing)
            if now_s >= until_s:
                if missing:
                    raise _no_leader(missing)
                raise RequestTimedOut("the metadata quorum did not answer in time; the change may still take effect")
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _no_leader(missing: str) -> RequestTimedOut:
    return RequestTimedOut(
        f"the metadata quorum has no leader, so nothing can be changed; waiting for {missing}; "
        "check that a majority of the controllers runs and can be reached"
    )


CALL_MARGIN_S: Final = 0.2
"""The response of a coordinator leaves at least this long before the caller's deadline."""
MIN_WAIT_S: Final = 0.01
AT_A_TIME: Final = 100

CommandT = TypeVar("CommandT")
TopicsT = TypeVar("TopicsT")


class Call:
    """A unary call: the recipient of one answer."""

    is_stream = False

    def __init__(self) -> None:
        self.answer: asyncio.Future[Message | Reply] = asyncio.get_running_loop().create_future()

    def deliver(self, message: Message | Reply | RaftlogError | None) -> None:
        """Take the answer."""
        if self.answer.done():
            return
        if isinstance(message, RaftlogError):
            self.answer.set_exception(message)
        elif message is None:
            self.answer.set_exception(InternalError("the coordinator answered without a message"))
        else:
            self.answer.set_result(message)

    def expire(self, why: str) -> None:
        """Answer that the time is up."""
        self.deliver(RequestTimedOut(why))


async def ask(shard: Shard[CommandT, TopicsT], command: Callable[[Call], CommandT], wait_s: float) -> Any:
    """Return a shard's answer to a command.

    Raises:
        RequestTimedOut: the shard has not answered within `wait_s`; the command may still take effect.
        RaftlogError: the shard refuses the command.
    """
    call = Call()
    shard.submit(command(call), call)
    if call.answer.done():
        return call.answer.result()
    late = f"{shard.partition.topic_partition}: no answer within {wait_s * 1000:.0f} ms; the request may still succeed"
    timer = asyncio.get_running_loop().call_later(wait_s, call.expire, late)
    try:
        return await call.answer
    finally:  # answered, timed out, or the caller is gone
        timer.cancel()
        shard.detach(call)


def longest_wait_s(context: Context, timeout_ms: int) -> float:
    """Return how long an answer may take: `timeout_ms`, or less if the caller's deadline is nearer."""
    remaining_s = context.time_remaining()
    longest_s = timeout_ms / 1_000
    return longest_s if remaining_s is None else max(MIN_WAIT_S, min(longest_s, remaining_s - CALL_MARGIN_S))


async def all_of(work: Iterable[Awaitable[Any]]) -> list[Any]:
    """Return the results in order; AT_A_TIME of them run at once."""
    results: list[Any] = []
    waiting = iter(work)
    while some := list(islice(waiting, AT_A_TIME)):
        results += await asyncio.gather(*some)
    return results


SERVICE: Final = "raftlog.v1.Log"
LIST_OFFSETS: Final = "ListOffsets"

ListOffsets: TypeAlias = Callable[[log_pb2.ListOffsetsRequest], Awaitable[log_pb2.ListOffsetsResponse]]


class LookUpService:
    """States: closed -> open (`open`: the broker is registered) -> closed (`close`: it stops)."""

    def __init__(self) -> None:
        self._list_offsets: ListOffsets | None = None

    def open(self, list_offsets: ListOffsets) -> None:
        """Answer from now on."""
        self._list_offsets = list_offsets

    def close(self) -> None:
        """Answer no more."""
        self._list_offsets = None

    def handlers(self) -> grpc.GenericRpcHandler:
        """Return the service's handler."""
        handler = grpc.unary_unary_rpc_method_handler(
            self.ListOffsets, log_pb2.ListOffsetsRequest.FromString, log_pb2.ListOffsetsResponse.SerializeToString
        )
        return grpc.method_handlers_generic_handler(SERVICE, {LIST_OFFSETS: handler})

    async def ListOffsets(self, request: log_pb2.ListOffsetsRequest, context: Context) -> log_pb2.ListOffsetsResponse:
        """Return offsets by timestamp, by name, or of the first record at or after an offset."""
        if self._list_offsets is not None:
            return await self._list_offsets(request)
        refusal = to_wire(ShuttingDown("the broker is starting or stopping"))
        return log_pb2.ListOffsetsResponse(
            results=[log_pb2.ListOffsetsResult(error=refusal) for _ in request.partitions]
        )
