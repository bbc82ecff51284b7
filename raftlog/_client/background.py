"""The event loop thread behind the synchronous classes: one for each process, made on first use.

Nothing here uses gRPC before a client object exists, so a process may fork before that (PySpark forks its workers). In
a child that was forked later, calls raise an error instead of hanging.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Coroutine
from typing import Any, Final, Generic, Protocol, TypeVar, runtime_checkable

from raftlog._client.options import shown_as
from raftlog._delivery import Alarm, Deadline
from raftlog.errors import ClosedError, InvalidRequestError

logger = logging.getLogger(__name__)

T = TypeVar("T")

_LOOK_S: Final = 1.0
"""How often a waiting thread checks that the loop's thread is alive."""
_END_S: Final = 1.0
"""How long the end of a program waits for cancelled tasks of the loop."""
_ENDED: Final = (
    "the event loop thread of this client has ended, or belongs to the process that this one was forked from; "
    "make a new client"
)


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:  # not available on every platform
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


def _quiet(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Drop harmless errors of grpc.aio's poller, which all event loops of a process share: another loop has read the
    event first, or the loop of an answer is closed."""
    error = context.get("exception")
    if isinstance(error, (BlockingIOError, RuntimeError)) and "PollerCompletionQueue" in str(context.get("handle")):
        return
    loop.default_exception_handler(context)


class LoopThread:
    """An event loop in a daemon thread, which does not keep the interpreter from exiting."""

    def __init__(self) -> None:
        self.loop = _new_loop()
        self.loop.set_exception_handler(_quiet)
        self._thread = threading.Thread(target=self._run, name="raftlog-client", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        while True:
            try:
                self.loop.run_forever()
                return
            except (SystemExit, KeyboardInterrupt):  # raised by a callback; other clients need the loop
                logger.exception("a callback on the client's event loop tried to exit the program; the loop continues")

    def end(self) -> None:
        """Cancel all tasks and end the thread, or give up after a few seconds if the loop is blocked."""
        if self.alive and threading.current_thread() is not self._thread:
            self.loop.call_soon_threadsafe(lambda: self.loop.create_task(self._wind_up()))
            self._thread.join(2 * _END_S)

    async def _wind_up(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_END_S)
        self.loop.stop()

    @property
    def alive(self) -> bool:
        """Whether the loop's thread runs; false in a forked child."""
        return self._thread.is_alive()

    def run(self, work: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """Run a coroutine on the loop and return its result; an interrupt or the timeout (s) cancels it.

        Raises:
            TimeoutError: after `timeout` seconds.
            InvalidRequestError: called from the loop's own thread, where it would wait for ever.
            ClosedError: the loop's thread has ended, or another thread has closed the client.
        """
        if threading.current_thread() is self._thread:
            work.close()
            raise InvalidRequestError(
                "this call blocks and was made inside a delivery callback; make it in a thread of your own"
            )
        if not self.alive:
            work.close()
            raise ClosedError(_ENDED)
        call = _Call(work, self.loop)
        deadline = Deadline(timeout)
        try:
            self.loop.call_soon_threadsafe(call.begin)
            while True:
                left_s = deadline.left()
                if call.over.wait(_LOOK_S if left_s is None else min(_LOOK_S, left_s)):
                    break
                if not self.alive:
                    raise ClosedError(_ENDED)
                if left_s is not None and left_s <= _LOOK_S:
                    raise TimeoutError(f"no answer within {timeout:g} s" if timeout else "no answer yet")
        except BaseException:  # a signal handler may raise anything
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self.loop.call_soon_threadsafe(call.cancel)
            raise
        try:
            return call.result()
        except asyncio.CancelledError:
            raise ClosedError("the client was closed by another thread while this call waited") from None


class _Call(Generic[T]):
    """One coroutine that a thread runs on the loop.

    Not a `concurrent.futures.Future`: an interrupt of the thread could leave its lock held and block the loop.
    """

    def __init__(self, work: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop) -> None:
        self.over = Alarm()
        self._work = work
        self._loop = loop
        self._task: asyncio.Task[T] | None = None

    def begin(self) -> None:
        """Start the coroutine; on the loop."""
        self._task = self._loop.create_task(self._work)
        self._task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[T]) -> None:
        if not task.cancelled():
            task.exception()  # retrieved: the thread may not wait any more
        self.over.set()

    def cancel(self) -> None:
        """Cancel the coroutine; on the loop."""
        if self._task is None:
            self._work.close()
        else:
            self._task.cancel()

    def result(self) -> T:
        """Return the result or raise the exception of the ended coroutine."""
        assert self._task is not None
        return self._task.result()


class Engine(Protocol):
    """The engine behind a client object. It may outlive the object, because the loop holds its tasks."""

    closed: Any
    """False while the engine is open; otherwise true, or the error of later calls."""

    async def close(self) -> None:
        """Stop and close all connections."""


@runtime_checkable
class Draining(Protocol):
    """An engine that may have work to finish before it closes."""

    async def drain(self) -> None:
        """Finish the work, in bounded time."""

    def undelivered(self) -> int:
        """Return how many records are undelivered; in any thread."""


E = TypeVar("E", bound=Engine)


class Client(Generic[E]):
    """A client of the synchronous API: a handle on an engine that runs on the loop thread.

    `raftlog.aio._loop.Client` is its awaitable counterpart, which makes its engine on first use.
    """

    _thread: LoopThread
    _engine: E
    _addresses: list[str]
    _options: Any

    def __repr__(self) -> str:
        made = self.__dict__.get("_engine")
        state = "not connected" if made is None else "closed" if made.closed else "open"
        return shown_as(type(self).__name__.lstrip("_"), self._addresses, self._options, state)

    def _start(self) -> None:
        """Make the engine, as the last step of a constructor."""
        self._thread = loop_thread()

        async def make() -> E:
            return self._make(self._thread.loop)

        self._engine = self._thread.run(make())
        _clients.add(self)
        weakref.finalize(self, _let_go, self._thread, self._engine).atexit = False

    def _make(self, loop: asyncio.AbstractEventLoop) -> E:
        """Return a new engine; on the loop."""
        raise NotImplementedError

    @property
    def _made(self) -> E | None:
        """The engine, if there is one yet."""
        return self._engine

    def _abandon(self) -> None:
        """Give up the engine in a forked child, without touching its connections; refuse all later calls."""
        raise NotImplementedError


class Turn:
    """A reentrant lock; `with` yields whether the thread did not hold it before."""

    def __init__(self) -> None:
        self._free = threading.RLock()
        self._depth = 0

    def __enter__(self) -> bool:
        self._free.acquire()
        self._depth += 1
        return self._depth == 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        self._free.release()


def told(result: object) -> None:
    """Ignore the result of a listener's method; the awaitable counterpart awaits it."""


_lock = threading.Lock()
_current: LoopThread | None = None
_retiring: set[asyncio.Task[None]] = set()
_grpc_ran_before_fork = False
_clients: weakref.WeakSet[Client[Any]] = weakref.WeakSet()


def _let_go(thread: LoopThread, engine: Engine) -> None:
    """Close the engine of a collected client. It runs in any thread at any moment, so it takes no lock."""
    if not engine.closed and thread.alive:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            thread.loop.call_soon_threadsafe(_start_retiring, thread.loop, engine)


def _start_retiring(loop: asyncio.AbstractEventLoop, engine: Engine) -> None:
    task = loop.create_task(_retire(engine))
    _retiring.add(task)
    task.add_done_callback(_retiring.discard)


async def _retire(engine: Engine) -> None:
    try:
        if isinstance(engine, Draining):
            await engine.drain()  # deliveries may outlive their client
    finally:
        await engine.close()


def loop_thread() -> LoopThread:
    """Return this process' loop thread.

    Raises:
        InvalidRequestError: this process was forked from one that used gRPC, which would hang here.
    """
    global _current
    if _grpc_ran_before_fork:
        raise InvalidRequestError(
            "this process was forked from one that had a raftlog client, and gRPC does not survive a fork; "
            "make clients only after forking, or start processes with the method 'spawn'"
        )
    with _lock:
        if _current is None or not _current.alive:
            _current = LoopThread()
        return _current


def _before_the_interpreter_ends() -> None:
    """End the loop: uvloop crashes the process (SIGSEGV) if its loop still has work when the interpreter is gone."""
    for client in list(_clients):
        engine = client._engine
        if not engine.closed and isinstance(engine, Draining) and (count := engine.undelivered()):
            logger.warning(
                "the program ends with a producer whose records are not all acknowledged, %d may be lost; "
                "close or flush the producer first",
                count,
            )
    if _current is not None:
        _current.end()


atexit.register(_before_the_interpreter_ends)


def _after_fork_in_child() -> None:
    global _lock, _current, _grpc_ran_before_fork
    _lock = threading.Lock()  # the parent's may have been held
    _grpc_ran_before_fork = _grpc_ran_before_fork or _current is not None
    _current = None
    for client in list(_clients):
        client._abandon()
    _clients.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
