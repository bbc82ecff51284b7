"""asyncio in virtual time: its clock stops while there is anything to do, and then jumps to the next timer.

For what happens on the event loop alone. Threads, sockets and processes take time that this clock knows nothing of.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")


class _Selector(selectors.DefaultSelector):
    """Never waits where there is a timer: tells how long it would have."""

    def __init__(self, passed: Callable[[float], None]) -> None:
        super().__init__()
        self._passed = passed

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(None if timeout is None else 0)
        if timeout and not ready:
            self._passed(timeout)
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop whose time is that of its timers."""

    def __init__(self) -> None:
        self._now_s = 0.0
        super().__init__(_Selector(self.advance))

    def time(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Let time pass, as work that takes so long would."""
        self._now_s += seconds


class LoopClock:
    """The loop's time as a broker's clock."""

    def now_ms(self) -> int:
        """Unix time, of a loop that began in 2001."""
        return 1_000_000_000_000 + int(self.monotonic_ms())

    def monotonic_ms(self) -> float:
        """The loop's time."""
        return asyncio.get_running_loop().time() * 1_000


def work_for(seconds: float) -> None:
    """Hold the loop up for so long."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    loop.advance(seconds)


def run(work: Coroutine[Any, Any, _T]) -> _T:
    """As `asyncio.run`."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(work)
