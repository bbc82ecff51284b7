"""What producing costs a broker, shared by its users: turns of the event loop, and checks in other threads.

A compressed batch takes as much memory as it inflates to, and a thread for as long. What is inflated at a time has a
bound, of which each user has a share (docs/adr/0048): a user whose batches are being checked gets no more than is left.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Final, TypeVar

import pyarrow as pa

from broker.quotas.room import Room
from broker.turns import SharedTurns

TURN_BYTES: Final = 8 << 20
"""What all streams append and check in one turn of the event loop: a few milliseconds."""
BATCH_COST_BYTES: Final = 32 << 10
"""To append a batch takes as long as so many bytes, beside its own."""
MAX_INFLATING_BYTES: Final = 128 << 20
"""What checks in other threads inflate at a time; a larger batch is checked alone."""
GIVE_BACK_BYTES: Final = 8 << 20
"""After checks of so many bytes their memory goes back to the system; Arrow's pool would keep it."""

T = TypeVar("T")


class ProduceWork:
    """Shares out the work of one broker. On the event loop only."""

    def __init__(self, executor: Executor, inflating_bytes: int = MAX_INFLATING_BYTES) -> None:
        """`executor`: runs the checks."""
        self._executor = executor
        self.turns = SharedTurns(TURN_BYTES)
        self.inflating = Room(inflating_bytes)

    async def check(self, name: str, size_bytes: int, check: Callable[[], T]) -> tuple[T, float]:
        """Return the result of `check` in another thread, and for how many ms it kept a processor busy.

        `size_bytes`: what the user's batches have, inflated. The check goes on after a cancellation, and takes its
        part of the room until its end.
        """
        hold = await self.inflating.take(name, size_bytes)
        try:
            checking = asyncio.get_running_loop().run_in_executor(self._executor, _timed, check, size_bytes)
        except BaseException:
            hold.give()
            raise
        checking.add_done_callback(lambda _: hold.give())
        return await asyncio.shield(checking)


def _timed(check: Callable[[], T], size_bytes: int) -> tuple[T, float]:
    begun_s = time.thread_time()
    result = check()
    if size_bytes >= GIVE_BACK_BYTES:
        pa.default_memory_pool().release_unused()
    return result, (time.thread_time() - begun_s) * 1_000
