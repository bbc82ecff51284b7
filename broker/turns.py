"""Loops over many things, in which the event loop does other work in between."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextvars import ContextVar
from typing import Final, TypeVar

AT_A_TIME: Final = 100
"""Things between two turns of the event loop: a decision about a permission, or an answer, takes up to 50 us."""
QUICK_AT_A_TIME: Final = 500
"""Likewise, where a thing takes a microsecond at most."""

before_more: ContextVar[Callable[[], Awaitable[None]] | None] = ContextVar("before_more", default=None)
"""What a call waits for once it has turned out to be about many things."""

T = TypeVar("T")


async def in_turns(
    things: Iterable[T], at_a_time: int = AT_A_TIME, weight: Callable[[T], int] = lambda _: 1
) -> AsyncIterator[T]:
    """Yield the things, and let the event loop do other work in between. `weight`: of a thing that is several."""
    done, wait = 0, before_more.get()
    for each in things:
        yield each
        done += weight(each)
        if done >= at_a_time:
            done = 0
            await asyncio.sleep(0)
            if wait is not None:
                await wait()
                wait = None
