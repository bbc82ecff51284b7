"""How late the event loop is: the promise is never more than 10 ms of blocking, and this is what would show it.

What is measured is the time between when a timer was due and when it ran. On a machine whose cores are all busy that
contains waiting for a core, too, so it is an upper bound of what the loop itself held up.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from broker.clock import Clock
from broker.observability.counters import Histogram

logger = logging.getLogger(__name__)

INTERVAL_MS: Final = 100
"""Often enough for a figure, and rare enough that an idle node sleeps."""
WARN_MS: Final = 250
"""Above this a line is logged at once; shorter ones are only counted."""
BUCKETS_MS: Final = (1, 2, 5, 10, 20, 50, 100)
"""Upper ends, inclusive; one more bucket holds what is above."""


class LoopLagMonitor:
    """Sleeps in a loop and counts by how much it woke too late; `on_turn` is called each time."""

    def __init__(self, clock: Clock, on_turn: Callable[[], None] = lambda: None) -> None:
        self._clock = clock
        self._on_turn = on_turn
        self._task: asyncio.Task[None] | None = None
        self.largest_ms = 0.0
        self.seconds = Histogram(tuple(ms / 1_000 for ms in BUCKETS_MS))

    @property
    def counts(self) -> list[int]:
        """How many measurements fell into each of BUCKETS_MS, and above."""
        return self.seconds.counts

    def start(self) -> None:
        """Start measuring on the running loop."""
        self._task = asyncio.create_task(self._measure(), name="loop-lag")

    def share_above(self, bucket_ms: int) -> float:
        """Return the share of measurements above one of BUCKETS_MS, 0 to 1."""
        above = sum(self.counts[BUCKETS_MS.index(bucket_ms) + 1 :])
        return above / max(1, sum(self.counts))

    def note(self, lag_ms: float) -> None:
        """Count one measurement."""
        self.largest_ms = max(self.largest_ms, lag_ms)
        self.seconds.observe(lag_ms / 1_000)
        if lag_ms >= WARN_MS:
            logger.warning(
                "the event loop was late by %.0f ms",
                lag_ms,
                extra={"event": "event_loop_late", "late_ms": round(lag_ms)},
            )

    async def _measure(self) -> None:
        while True:
            before = self._clock.monotonic_ms()
            await asyncio.sleep(INTERVAL_MS / 1000)
            self.note(max(0.0, self._clock.monotonic_ms() - before - INTERVAL_MS))
            self._on_turn()

    async def stop(self, *, report: bool = True) -> None:
        """Stop measuring, and log what was seen; without `report` there is nothing worth telling."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if report:
            logger.info(
                "event loop lag",
                extra={"largest_ms": round(self.largest_ms, 1), "share_above_10_ms": round(self.share_above(10), 5)},
            )
