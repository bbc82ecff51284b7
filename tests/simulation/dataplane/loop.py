"""An event loop of one process in virtual time: just as much of one as futures, tasks and queues need.

Everything it runs is an event of the process like any other: none of it happens while the process is paused, and
nothing after its death.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from asyncio import AbstractEventLoop
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor, Future
from contextvars import Context, copy_context
from typing import Any, TypeVar, cast

from tests.simulation.process import Process

T = TypeVar("T")
HAND_OVER_S = 0.0003
"""How long it takes at most from one thread to another."""
SHORTEST_S = 1e-6
"""Timers take so long at least: what looks at the clock again and again gets on."""


class _Handle:
    """A callback that may be cancelled."""

    __slots__ = ("_context", "_when", "arguments", "callback", "is_cancelled")

    def __init__(
        self, callback: Callable[..., object], arguments: tuple[Any, ...], when: float, context: Context
    ) -> None:
        self.callback = callback
        self.arguments = arguments
        self.is_cancelled = False
        self._when = when
        self._context = context

    def cancel(self) -> None:
        self.is_cancelled = True

    def cancelled(self) -> bool:
        return self.is_cancelled

    def when(self) -> float:
        return self._when

    def run(self) -> None:
        if not self.is_cancelled:
            self._context.run(self.callback, *self.arguments)


class SimLoop:
    """The loop of a process; `asyncio.get_running_loop` finds it while the process runs.

    Not a subclass of `AbstractEventLoop`, most of which it does not have.
    """

    def __init__(self, process: Process, chance: random.Random) -> None:
        self._process = process
        self._random = chance
        self.errors: list[dict[str, Any]] = []
        """Errors that no task handled."""
        self._tasks: list[asyncio.Task[Any]] = []
        self.as_loop = cast(AbstractEventLoop, self)
        process.loop = self.as_loop

    @property
    def process(self) -> Process:
        """The process that owns the loop."""
        return self._process

    def time(self) -> float:
        return self._process.host.local_s()

    def call_soon(self, callback: Callable[..., object], *args: Any, context: Context | None = None) -> Any:
        return self._call_after(0.0, callback, args, context)

    def call_soon_threadsafe(self, callback: Callable[..., object], *args: Any, context: Context | None = None) -> Any:
        return self._call_after(self._random.uniform(0, HAND_OVER_S), callback, args, context)

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> Any:
        return self._call_after(max(SHORTEST_S, delay), callback, args, context)

    def call_at(self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None) -> Any:
        return self._call_after(max(SHORTEST_S, when - self.time()), callback, args, context)

    def _call_after(
        self, delay_s: float, callback: Callable[..., object], args: tuple[Any, ...], context: Context | None
    ) -> _Handle:
        handle = _Handle(callback, args, self.time() + delay_s, copy_context() if context is None else context)
        self._process.after(delay_s, handle.run)
        return handle

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self.as_loop)

    def create_task(
        self, coro: Coroutine[Any, Any, T], *, name: str | None = None, context: Context | None = None
    ) -> asyncio.Task[T]:
        task = asyncio.Task(coro, loop=self.as_loop, name=name, context=context)
        self._tasks.append(task)  # of a dead process too: what it would do at its end must never happen
        return task

    def dispose(self) -> None:
        """The process is dead, and the simulation over: close its tasks, and ignore their errors."""
        self._process.alive = False
        asyncio._set_running_loop(self.as_loop)
        try:
            for task in self._tasks:
                coroutine: Any = task.get_coro()
                frame = "cr_frame" if hasattr(coroutine, "cr_frame") else "gi_frame"  # of an awaitable in a task
                while not task.done() and getattr(coroutine, frame) is not None:
                    with contextlib.suppress(BaseException):  # it is told to end, and would rather wait
                        coroutine.close()
        finally:
            asyncio._set_running_loop(None)
        self._tasks.clear()

    def run_in_executor(self, executor: Executor | None, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        assert executor is not None
        done: Future[T] = executor.submit(func, *args)
        waiting: asyncio.Future[T] = self.create_future()

        def copy(finished: Future[T]) -> None:
            if waiting.cancelled():
                return
            error = finished.exception()
            if error is None:
                waiting.set_result(finished.result())
            else:
                waiting.set_exception(error)

        done.add_done_callback(copy)
        return waiting

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if self._process.alive:
            self.errors.append(context)
