"""How much work is done between two turns of the event loop, counted in calls of functions, not in time."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def calls_in_a_turn(work: Coroutine[Any, Any, T]) -> tuple[T, int]:
    """Return the work's result, and the most calls, of Python's and of C's functions, that it made in one turn."""
    calls = most = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    async def other_work() -> None:
        nonlocal calls, most
        while True:
            most, calls = max(most, calls), 0
            await asyncio.sleep(0)

    other = asyncio.create_task(other_work())
    before = sys.getprofile()
    sys.setprofile(count)
    try:
        result = await work
        await asyncio.sleep(0)
    finally:
        sys.setprofile(before)
        other.cancel()
    return result, most
