"""Truncations of one log, off the event loop and one after the other."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor

from raftlog.errors import InternalError, RaftlogError, StorageError

logger = logging.getLogger(__name__)

Cut = Callable[[], object]
CutDone = Callable[[RaftlogError | None], None]


class LogCuts:
    """States: idle -> cutting (`run`) -> idle, or cutting the next.

    Whoever wants the log's end to stay where it is (a leader does) waits for `idle` first; flushes need not wait, the
    log keeps them and truncations apart.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._queue: deque[tuple[Cut, CutDone]] = deque()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def busy(self) -> bool:
        """Whether a truncation is under way."""
        return not self._idle.is_set()

    async def idle(self) -> None:
        """Return once no truncation is under way."""
        await self._idle.wait()

    def run(self, cut: Cut, done: CutDone) -> None:
        """Run `cut` in a thread, after those before it, then call `done` on the loop, never before this returns."""
        self._queue.append((cut, done))
        if len(self._queue) == 1:
            self._idle.clear()
            self._begin()

    def _begin(self) -> None:
        loop = asyncio.get_running_loop()
        cut, _ = self._queue[0]

        def run() -> None:
            error: RaftlogError | None = None
            try:
                cut()
            except RaftlogError as refused:
                error = refused
            except BaseException as failure:  # a bug: whoever waits must hear of it
                logger.exception("a truncation failed")
                error = InternalError(f"a truncation failed: {type(failure).__name__}: {failure}")
            loop.call_soon_threadsafe(self._end, error)

        try:
            self._executor.submit(run)
        except RuntimeError as failure:  # shut down
            loop.call_soon(self._end, StorageError(f"a truncation cannot begin: {failure}"))

    def _end(self, error: RaftlogError | None) -> None:
        _, done = self._queue.popleft()
        if self._queue:
            self._begin()
        else:
            self._idle.set()
        done(error)
