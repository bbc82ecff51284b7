"""Loops over many things, in which the event loop does other work in between."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Final, TypeVar

AT_A_TIME: Final = 100
"""Things between two turns of the event loop: a decision about a permission, or an answer, takes up to 50 us."""
QUICK_AT_A_TIME: Final = 500
"""Likewise, where a thing takes a microsecond at most."""

T = TypeVar("T")


async def in_turns(
    things: Iterable[T], at_a_time: int = AT_A_TIME, weight: Callable[[T], int] = lambda _: 1
) -> AsyncIterator[T]:
    """Yield the things, and let the event loop do other work in between. `weight`: of a thing that is several."""
    done = 0
    for each in things:
        yield each
        done += weight(each)
        if done >= at_a_time:
            done = 0
            await asyncio.sleep(0)


class Budget:
    """Gives the event loop a turn whenever the work of one task since its last one has cost too much."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._spent = 0

    async def spend(self, cost: int) -> None:
        """Note that work was done."""
        self._spent += cost
        if self._spent >= self._most:
            self._spent = 0
            await asyncio.sleep(0)
