"""Calls that come one after the other, and that closing ends."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from raftlog.errors import ClosedError, RequestTimedOut


class Turns:
    """One call at a time, in the order in which they come. `what`: what they are about, for messages."""

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
        """Wait for the turn, so long at most, and have it for the block.

        Raises:
            RequestTimedOut: another call has not come to an end in time.
            ClosedError: closed before, or within the block.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._lock.acquire()
        except TimeoutError:
            raise RequestTimedOut(f"another call on {self._what} has not come to an end in time") from None
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
        """End the call that is under way, and let nobody have a turn any more."""
        self._closed = True
        if self._under_way is not None:
            self._under_way.reschedule(asyncio.get_running_loop().time())
        async with self._lock:
            pass
