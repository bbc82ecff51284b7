"""How a unary call asks a coordinator's shard, and waits for the one answer; for the services of coordinators."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from itertools import islice
from typing import Any, Final, Protocol, TypeVar

from google.protobuf.message import Message
from grpc import aio

from broker.coordinator.shard import Shard
from raftlog.errors import InternalError, RaftlogError, RequestTimedOut
from raftlog.v1 import common_pb2

MARGIN_S: Final = 0.2
"""How long before the caller's deadline the answer leaves at the latest: it shall hear why there is none."""
MIN_WAIT_S: Final = 0.01
AT_A_TIME: Final = 100

Context = aio.ServicerContext[Any, Any]


class Answer(Protocol):
    """Every response of a call: it has an error to fill in."""

    @property
    def error(self) -> common_pb2.Error:
        """What went wrong, if anything did."""
        ...


CommandT = TypeVar("CommandT")
TopicsT = TypeVar("TopicsT")


class Call:
    """A frame's recipient that is answered once."""

    is_stream = False

    def __init__(self) -> None:
        self.answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()

    def deliver(self, message: Message | RaftlogError | None) -> None:
        """Take the answer."""
        if self.answer.done():
            return
        if isinstance(message, RaftlogError):
            self.answer.set_exception(message)
        elif message is None:
            self.answer.set_exception(InternalError("a call was answered with nothing"))
        else:
            self.answer.set_result(message)

    def expire(self, why: str) -> None:
        """Answer that time is over."""
        self.deliver(RequestTimedOut(why))


async def ask(shard: Shard[CommandT, TopicsT], command: Callable[[Call], CommandT], wait_s: float) -> Any:
    """Return a shard's answer to a command.

    Raises:
        RequestTimedOut: there is none yet; what was asked for may be done all the same.
        RaftlogError: it is a refusal.
    """
    call = Call()
    shard.submit(command(call), call)
    if call.answer.done():
        return call.answer.result()
    late = (
        f"{shard.partition.topic_partition}: not answered within {wait_s * 1000:.0f} ms; what was asked for "
        "may yet be done"
    )
    timer = asyncio.get_running_loop().call_later(wait_s, call.expire, late)
    try:
        return await call.answer
    finally:  # answered, out of time, or the caller is gone
        timer.cancel()
        shard.detach(call)


def longest_wait_s(context: Context, timeout_ms: int) -> float:
    """Return how long an answer may take: `timeout_ms`, or less where the caller waits for less."""
    remaining_s = context.time_remaining()
    longest_s = timeout_ms / 1_000
    return longest_s if remaining_s is None else max(MIN_WAIT_S, min(longest_s, remaining_s - MARGIN_S))


async def all_of(work: Iterable[Awaitable[Any]]) -> list[Any]:
    """Wait for all of it, some at a time."""
    results: list[Any] = []
    waiting = iter(work)
    while some := list(islice(waiting, AT_A_TIME)):
        results += await asyncio.gather(*some)
    return results
