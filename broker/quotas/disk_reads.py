"""Reads of clients that may wait for disks, in threads beside the event loop, and each user's share of the threads.

A read that misses the page cache waits for the disk, and so may a look-up by time. At most PLACES such reads of clients
run at a time, and users share these places (`Room`, docs/adr/0057): one user alone gets half of them, and a user
without a running read gets the next free place, however many reads of others wait. Followers and coordinators read in
the same threads and need no place, so READ_THREADS - PLACES threads are always left for them.
"""

from __future__ import annotations

import asyncio
from asyncio import Future
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, Final, TypeVar

from broker.quotas.room import Room

PLACES: Final = 8
READ_THREADS: Final = PLACES + 2

T = TypeVar("T")


class DiskReads:
    """The reads of one broker's clients. On the event loop only."""

    def __init__(self, executor: Executor, places: int = PLACES) -> None:
        """`executor` has READ_THREADS threads."""
        self._executor = executor
        self._places = Room(places)

    async def read(self, name: str, function: Callable[..., T], *arguments: Any) -> T:
        """Run a function in a thread, once the user `name` gets a place; return its result."""
        place = await self._places.take(name, 1)

        def ended(running: Future[T]) -> None:
            place.give()
            if not running.cancelled():
                running.exception()  # retrieved, so that asyncio logs nothing when the client is gone

        try:
            running = asyncio.get_running_loop().run_in_executor(self._executor, function, *arguments)
        except BaseException:
            place.give()
            raise
        running.add_done_callback(ended)
        # A running thread cannot be cancelled, so the read keeps its place until it ends.
        return await asyncio.shield(running)
