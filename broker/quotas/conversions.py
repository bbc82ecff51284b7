"""Where record batches are converted, and what each user may convert at a time.

A conversion costs what `broker/kafka/record_batches.py` says, in bytes. Cheap ones run on the event loop, which has a
turn after each LOOP_COST. All others run in threads, in steps of about STEP_COST: the records of a step are read and
written by many calls of C, each of which takes a millisecond or so, and between two the event loop may take over.

Threads that convert take the interpreter from the event loop, and hold inflated batches. So conversions under way cost
TOTAL_COST at most, each LEAST_COST at least, of which each user has its share (`Room`). A larger one counts as a half.
None of them waits for a client while it holds its share, so others that hold memory may wait for one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar, cast

from broker.quotas.manager import charge_here
from broker.quotas.room import Room
from broker.security.caller import Caller
from broker.turns import Budget
from raftlog.errors import RaftlogError

LOOP_COST: Final = 128 << 10
"""Takes one to three milliseconds."""
STEP_COST: Final = 8 << 20
TOTAL_COST: Final = 128 << 20
THREADS: Final = 4
"""Conversions at a time; of one user alone a half of them."""
LEAST_COST: Final = TOTAL_COST // THREADS

T = TypeVar("T")


class TooCostly(Exception):
    """A conversion costs more than its caller allows."""


class Conversions:
    """Those of one broker."""

    def __init__(self) -> None:
        self.room = Room(TOTAL_COST)

    def turns(self) -> Budget:
        """Return what gives the event loop its turns among the cheap conversions of one request."""
        return Budget(LOOP_COST)

    @asynccontextmanager
    async def room_for(self, who: Caller, cost: int) -> AsyncIterator[None]:
        """Wait until the client may convert so much in threads, and let it until the end of the block."""
        hold = await self.room.take(who.share, min(max(cost, LEAST_COST), TOTAL_COST // 2))
        try:
            yield
        finally:
            hold.give()

    async def beside(self, convert: Callable[..., T], *arguments: Any) -> T:
        """Return the result of a function that runs beside the event loop. Its CPU time is charged to the request."""
        took_s = 0.0

        def measured() -> tuple[T, None] | tuple[None, Exception]:
            nonlocal took_s
            begun_s = time.thread_time()
            try:
                return convert(*arguments), None
            except (RaftlogError, TooCostly) as error:
                error.__traceback__ = error.__context__ = None  # else they keep the frames, and so the inflated batch
                return None, error
            finally:
                took_s = time.thread_time() - begun_s

        converting = asyncio.ensure_future(asyncio.to_thread(measured))
        try:
            result, error = await asyncio.shield(converting)
        except asyncio.CancelledError:
            await asyncio.wait([converting])  # no thread can be cancelled, and it has what this conversion holds
            raise
        finally:
            charge_here(took_s * 1_000)
        try:
            if error is not None:
                raise error
        finally:
            del error, converting  # else the error would keep this frame, and this frame the error
        return cast("T", result)
