"""Timeouts that are over when the test says so, and not by the clock."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


class HeldTimeouts:
    """Stands for `asyncio.timeout` in one module."""

    def __init__(self) -> None:
        self.under_way: dict[asyncio.Timeout, asyncio.Task[Any] | None] = {}
        """The owners of the timeouts, in the order in which they began."""
        self.last_begun_by: asyncio.Task[Any] | None = None

    @asynccontextmanager
    async def timeout(self, delay: float | None) -> AsyncIterator[asyncio.Timeout]:
        """Begin one."""
        async with asyncio.timeout(None) as made:
            if delay is not None:
                self.last_begun_by = self.under_way[made] = asyncio.current_task()
            try:
                yield made
            finally:
                self.under_way.pop(made, None)

    def expire(self, task: asyncio.Task[Any] | None = None) -> None:
        """Time is up for all that are under way, or for those of a task."""
        for each, whose in self.under_way.items():
            if task is None or whose is task:
                each.reschedule(asyncio.get_running_loop().time())


def hold_timeouts(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> HeldTimeouts:
    """Have the timeouts of a module held from now on."""
    held = HeldTimeouts()
    monkeypatch.setattr(module, "asyncio", SimpleNamespace(**{**vars(asyncio), "timeout": held.timeout}))
    return held
