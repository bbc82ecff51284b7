"""The awaitable clients' counterparts of threads, locks and waits, under the same names as in `_client/background.py`.

`./dev aio` generates the awaitable clients from the synchronous ones; this module is written by hand.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from raftlog._client.options import shown_as
from raftlog._delivery import wait_async
from raftlog.errors import ClosedError

if TYPE_CHECKING:
    from raftlog._core.accumulator import Batch

E = TypeVar("E")


class Client(Generic[E]):
    """A client of the event loop that runs when it is first used; its engine is made then."""

    _kept: E | None = None
    _loop: asyncio.AbstractEventLoop | None = None
    """The event loop of the engine; None before there is one."""
    _closed = False
    _addresses: list[str]
    _options: Any

    def __repr__(self) -> str:
        state = "closed" if self._closed else "not used yet" if self._kept is None else "open"
        return shown_as(f"aio.{type(self).__name__}", self._addresses, self._options, state)

    def _start(self) -> None:
        """Make nothing yet: a constructor may run where there is no event loop."""

    def _make(self, loop: asyncio.AbstractEventLoop) -> E:
        """Return a new engine. Runs on the loop."""
        raise NotImplementedError

    @property
    def _made(self) -> E | None:
        """The engine, if there is one yet.

        Raises:
            ClosedError: its event loop has ended, and with it its connections; another loop runs.
        """
        engine: Any = self._kept
        is_lost = self._loop is not None and self._loop.is_closed() and not engine.closed
        if is_lost and asyncio._get_running_loop() is not None:
            raise ClosedError(
                f"this {type(self).__name__.lower()} belongs to the event loop in which it was first used, and which "
                "has ended; make and close one in each event loop, for example in each call of asyncio.run"
            )
        return self._kept

    @property
    def _engine(self) -> E:
        """The engine.

        Raises:
            ClosedError: as `_made`; or the client was closed before it was used.
        """
        made = self._made
        if made is None:
            if self._closed:
                raise ClosedError(f"the {type(self).__name__.lower()} is closed")
            loop = asyncio.get_running_loop()
            made = self._kept = self._make(loop)
            self._loop = loop
        return made


class Turn:
    """Lets one task in at a time; `async with` yields whether the task was outside before."""

    def __init__(self) -> None:
        self._free = asyncio.Lock()
        self._owner: asyncio.Task[Any] | None = None
        self._depth = 0

    async def __aenter__(self) -> bool:
        if self._owner is not asyncio.current_task():
            await self._free.acquire()
            self._owner = asyncio.current_task()
        self._depth += 1
        return self._depth == 1

    async def __aexit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = None
            self._free.release()


class Alarm:
    """An `asyncio.Event` whose `wait` takes a timeout."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self.set = self._event.set
        self.clear = self._event.clear

    async def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set, `timeout` seconds at most (None: without a limit); return whether it was set."""
        try:
            async with asyncio.timeout(timeout):
                return await self._event.wait()
        except TimeoutError:
            return False


def get_ident() -> int:
    """Return the same number for every caller: a loop has one thread."""
    return 0


async def told(result: object) -> None:
    """Wait for a listener's method, if it is a coroutine."""
    if inspect.isawaitable(result):
        await result


async def wait_all(batches: Iterable[Batch], timeout: float | None) -> None:
    """Wait until all batches are done.

    Raises:
        TimeoutError: after `timeout` seconds; the deliveries go on.
    """
    async with asyncio.timeout(timeout):
        for batch in batches:
            await wait_async(batch)
