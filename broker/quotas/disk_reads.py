"""Reads of clients that may wait for disks, in threads beside the event loop, and each user's share of the threads.

What is not in the page cache waits for the disk, and so may a look-up by time. All such reads of clients have PLACES
places at a time, of which each user has its share (`Room`, docs/adr/0057): one alone has a half, and a user that has
none gets the next one that is free, however many reads of others wait. Followers and coordinators read in the same
threads without a place: READ_THREADS - PLACES of these are always theirs.
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
        """`executor`: has READ_THREADS threads."""
        self._executor = executor
        self._places = Room(places)

    async def read(self, name: str, function: Callable[..., T], *arguments: Any) -> T:
        """Return the result of a function that runs in a thread, for the user of this name."""
        place = await self._places.take(name, 1)

        def ended(running: Future[T]) -> None:
            place.give()
            if not running.cancelled():
                running.exception()  # of a read whose client is gone: asyncio need not tell of it

        try:
            running = asyncio.get_running_loop().run_in_executor(self._executor, function, *arguments)
        except BaseException:
            place.give()
            raise
        running.add_done_callback(ended)
        # No thread can be cancelled: the place is free once the read is over.
        return await asyncio.shield(running)
