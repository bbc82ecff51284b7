"""What the loop of a stream waits for: somebody rings, or a time has come."""

from __future__ import annotations

import asyncio
import time


def now_ms() -> float:
    """Return the time that sessions are given: monotonic, in milliseconds."""
    return time.monotonic() * 1000


class Alarm:
    """An event with at most one timer, which is kept while it is early enough: no timer for each message."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ms = 0.0

    def ring(self) -> None:
        """Let whoever waits, or waits next, go on."""
        self._event.set()

    def clear(self) -> None:
        """Forget earlier rings; comes before looking for work, so that none is missed."""
        self._event.clear()

    async def wait(self, deadline_ms: float | None) -> None:
        """Return after `ring`, at `deadline_ms`, or now and then before it."""
        if deadline_ms is not None and (self._timer is None or deadline_ms < self._timer_ms):
            self.close()
            self._timer_ms = deadline_ms
            delay_s = max(0.0, (deadline_ms - now_ms()) / 1000)
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._fire)
        await self._event.wait()

    def _fire(self) -> None:
        self._timer = None
        self._event.set()

    def close(self) -> None:
        """Give the timer up."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
