"""How late the event loop is, to check the promise that nothing blocks it for more than 10 ms.

The monitor measures the time between a timer's due time and its run. On a machine with busy cores this includes the
wait for a core, so the measurement is an upper bound of the blocking.

`report` passes an unexpected exception to the event loop's handler where raising it would stop other work.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from broker.clock import Clock
from broker.observability.counters import Histogram

logger = logging.getLogger(__name__)


def report(what: str, error: Exception) -> None:
    """Report a bug to the event loop, which logs it with its traceback; in a simulation the report ends the run."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        logger.error(what, exc_info=error)
    else:
        loop.call_exception_handler({"message": what, "exception": error})


INTERVAL_MS: Final = 100
"""Often enough for statistics, rare enough to leave an idle node asleep."""
WARN_MS: Final = 250
"""A longer lag is logged at once; a shorter one is only counted."""
BUCKETS_MS: Final = (1, 2, 5, 10, 20, 50, 100)
"""Inclusive upper bounds; one more bucket holds larger values."""


class LoopLagMonitor:
    """Sleeps in a loop and counts how late it wakes up; calls `on_turn` after each sleep."""

    def __init__(self, clock: Clock, on_turn: Callable[[], None] = lambda: None) -> None:
        self._clock = clock
        self._on_turn = on_turn
        self._task: asyncio.Task[None] | None = None
        self.largest_ms = 0.0
        self.seconds = Histogram(tuple(ms / 1_000 for ms in BUCKETS_MS))

    @property
    def counts(self) -> list[int]:
        """The number of measurements in each of BUCKETS_MS and above them."""
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
        """Stop measuring; with `report`, log a summary."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if report:
            logger.info(
                "event loop lag",
                extra={"largest_ms": round(self.largest_ms, 1), "share_above_10_ms": round(self.share_above(10), 5)},
            )
