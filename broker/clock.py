"""Time as a port, so that whole brokers run on virtual time in simulation."""

from __future__ import annotations

import time

from raftmeta.quorum.config import Clock

__all__ = ["Clock", "SystemClock"]


class SystemClock:
    """The machine's clocks."""

    def now_ms(self) -> int:
        """Unix time in milliseconds."""
        return time.time_ns() // 1_000_000

    def monotonic_ms(self) -> float:
        """Milliseconds since the machine started, those that it slept included: a lease goes on running then."""
        return time.clock_gettime_ns(time.CLOCK_BOOTTIME) / 1e6
