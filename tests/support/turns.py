"""Counts how often the event loop was free while something was done."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator


class Turns:
    """`count`: how often another task had a turn."""

    def __init__(self) -> None:
        self.count = 0

    async def run(self) -> None:
        """Run all turns that are due."""
        while True:
            await asyncio.sleep(0)
            self.count += 1


@contextlib.asynccontextmanager
async def counted_turns() -> AsyncIterator[Turns]:
    """Count until the end of the block."""
    turns = Turns()
    task = asyncio.create_task(turns.run())
    await asyncio.sleep(0)
    try:
        yield turns
    finally:
        task.cancel()
