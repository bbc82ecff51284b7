"""How late the event loop is: the promise is never more than 10 ms of blocking, and this is what would show it."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from broker.clock import Clock

logger = logging.getLogger(__name__)

INTERVAL_MS: Final = 20
WARN_MS: Final = 250
"""Above this a line is logged; shorter ones are only kept in the figures."""


class LoopLagMonitor:
    """Sleeps in a loop and records by how much it woke too late."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._task: asyncio.Task[None] | None = None
        self.largest_ms = 0.0
        self.last_ms = 0.0

    def start(self) -> None:
        """Start measuring on the running loop."""
        self._task = asyncio.create_task(self._measure(), name="loop-lag")

    async def _measure(self) -> None:
        while True:
            before = self._clock.monotonic_ms()
            await asyncio.sleep(INTERVAL_MS / 1000)
            self.last_ms = max(0.0, self._clock.monotonic_ms() - before - INTERVAL_MS)
            self.largest_ms = max(self.largest_ms, self.last_ms)
            if self.last_ms >= WARN_MS:
                logger.warning("the event loop was late by %.0f ms", self.last_ms)

    async def stop(self) -> None:
        """Stop measuring."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
