"""One client that keeps a window of messages in flight on a stream, the same for ceiling and broker."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple


class Run(NamedTuple):
    """What one run of a stream gave."""

    messages: int
    bytes: int
    seconds: float
    latencies_ms: list[float]

    @property
    def mb_per_second(self) -> float:
        """Payload in 10^6 bytes a second."""
        return self.bytes / self.seconds / 1e6

    def percentile_ms(self, share: float) -> float:
        """Latency that `share` of the messages stayed below, in ms."""
        ordered = sorted(self.latencies_ms)
        return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


async def keep_in_flight(
    call: Any, make: Callable[[int], Any], check: Callable[[Any], None], *, count: int, size: int, window: int
) -> Run:
    """Send `count` messages of `size` payload bytes with `window` of them unanswered, and time them."""
    room = asyncio.Semaphore(window)
    sent: deque[float] = deque()
    latencies = []

    async def receive() -> None:
        for _ in range(count):
            check(await call.read())
            latencies.append((time.perf_counter() - sent.popleft()) * 1e3)
            room.release()

    start = time.perf_counter()
    receiver = asyncio.create_task(receive())
    for number in range(count):
        await room.acquire()
        sent.append(time.perf_counter())
        await call.write(make(number))
    await receiver
    seconds = time.perf_counter() - start
    await call.done_writing()
    return Run(count, count * size, seconds, latencies)
