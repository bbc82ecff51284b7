"""Heavy work on what clients send and read, in threads beside the event loop, and each user's share of it.

    checks        compressed batches of raftlog's own producers (`broker/partition/produce_session.py`)
    conversions   batches of Kafka clients, in both directions (`broker/kafka/produce.py`, `broker/kafka/fetch.py`)

Both hold what they inflate. So all heavy work of a broker costs TOTAL_COST at a time, in inflated bytes, of which each
user has its share (`Room`, docs/adr/0048), whichever listener it uses.

A conversion also takes the interpreter from the event loop, which a check lets go of. So there are MAX_CONVERSIONS at a
time. A conversion has its thread before it waits for memory, so none keeps memory from others in vain. None of this
work waits for a client, so a request that holds other memory may wait for it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final, Protocol, TypeVar, cast

import pyarrow as pa

from broker.quotas.manager import charge_here
from broker.quotas.room import Room
from raftlog.errors import RaftlogError

TOTAL_COST: Final = 128 << 20
MAX_CONVERSIONS: Final = 4
"""At a time; of one user alone a half of them."""
THREADS: Final = MAX_CONVERSIONS + 2
"""So that checks never wait for conversions to end."""
GIVE_BACK_COST: Final = 8 << 20
"""After work of this cost its memory goes back to the system; Arrow's pool would keep it."""

T = TypeVar("T")


class TooCostly(Exception):
    """The work costs more than its caller allows."""


class Run(Protocol):
    """Runs one step of a conversion in a thread."""

    def __call__(self, function: Callable[..., T], /, *arguments: Any) -> Awaitable[T]:
        """Return the result of the function. Its CPU time is charged to the request."""
        ...


class HeavyWork:
    """The heavy work of one broker. On the event loop only."""

    def __init__(self, executor: Executor, total_cost: int = TOTAL_COST) -> None:
        """`executor`: has THREADS threads."""
        self._executor = executor
        self.room = Room(total_cost)
        self._conversions = Room(MAX_CONVERSIONS)

    async def check(self, name: str, cost: int, function: Callable[..., T], *arguments: Any) -> T:
        """Return the result of a function that checks so many bytes of batches, inflated, for the user of this name.

        It runs in a thread; its CPU time is charged to the request (`charged_to`). What costs more than the total is
        checked alone.
        """
        hold = await self.room.take(name, cost)
        try:
            return await _beside(self._executor, cost, function, *arguments)
        finally:
            hold.give()

    @asynccontextmanager
    async def conversion(self, name: str, cost: int) -> AsyncIterator[Run]:
        """Wait until the user may convert so much, and let it until the end of the block, with what this yields.

        What costs more than a half of the total counts as a half.
        """
        place = await self._conversions.take(name, 1)
        try:
            hold = await self.room.take(name, min(cost, self.room.total // 2))
            try:
                yield partial(_beside, self._executor, cost)
            finally:
                hold.give()
        finally:
            place.give()


async def beside(function: Callable[..., T], *arguments: Any) -> T:
    """Return the result of a function that runs in a thread of asyncio's. Its CPU time is charged to the request.

    For work that inflates nothing. After a cancellation it goes on, and this returns at its end.
    """
    return await _beside(None, 0, function, *arguments)


async def _beside(executor: Executor | None, cost: int, function: Callable[..., T], *arguments: Any) -> T:
    loop = asyncio.get_running_loop()
    running = loop.run_in_executor(executor, partial(_timed, cost, function, *arguments))
    cancelled: asyncio.CancelledError | None = None
    while not running.done():
        try:
            await asyncio.wait([running])
        except asyncio.CancelledError as error:  # no thread can be cancelled, and it holds what it has inflated
            cancelled = error
    result, failure, took_ms = running.result()
    charge_here(took_ms)
    try:
        if cancelled is not None:
            raise cancelled
        if failure is not None:
            raise failure
    finally:
        del cancelled, failure, running  # else an error would keep this frame, and this frame the error
    return cast("T", result)


def _timed(
    cost: int, function: Callable[..., T], *arguments: Any
) -> tuple[T | None, RaftlogError | TooCostly | None, float]:
    """Return the result or the error, and the CPU time in ms. In any thread."""
    begun_s = time.thread_time()
    result, failure = None, None
    try:
        result = function(*arguments)
    except (RaftlogError, TooCostly) as error:
        failure = forgetful(error)
    if cost >= GIVE_BACK_COST:
        pa.default_memory_pool().release_unused()
    return result, failure, (time.thread_time() - begun_s) * 1_000


ErrorT = TypeVar("ErrorT", bound=Exception)


def forgetful(error: ErrorT) -> ErrorT:
    """Have an error keep nothing of where it was raised: the frames there hold inflated batches."""
    error.__traceback__ = error.__context__ = None
    return error
