"""The event loop thread behind the synchronous classes: one for each process, made when it is first needed.

Nothing here touches gRPC before a client object is made, so that a process may fork before (PySpark forks its
workers); a child that was forked after is told so instead of hanging.
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

from raftlog._alarm import Alarm
from raftlog._delivery import Deadline
from raftlog.errors import ClosedError, InvalidRequestError

logger = logging.getLogger(__name__)

T = TypeVar("T")

_LOOK_S: Final = 1.0
"""How often a thread that waits for the loop looks whether the loop is still there."""
_END_S: Final = 1.0
"""How long the end of a program waits for what is cancelled on the loop."""
_ENDED: Final = (
    "the event loop thread of this client has ended, or belongs to the process that this one was forked from; "
    "make a new client"
)


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:  # not made for every platform
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


def _quiet(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Drop what grpc.aio says of its poller, which all event loops of a process share: that another loop was faster,
    or that an answer came for a loop which is closed by now."""
    error = context.get("exception")
    if isinstance(error, (BlockingIOError, RuntimeError)) and "PollerCompletionQueue" in str(context.get("handle")):
        return
    loop.default_exception_handler(context)


class LoopThread:
    """An event loop that runs in a daemon thread, so that it never keeps an interpreter from exiting."""

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
            except (SystemExit, KeyboardInterrupt):  # raised by a user's code; the other clients need the loop
                logger.exception("something on the client's event loop wanted to exit; the loop goes on")

    def end(self) -> None:
        """Cancel what is under way and end the thread; given up after a few seconds, if something blocks the loop."""
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
        """Whether the loop runs: not after it broke, nor in a child that was forked."""
        return self._thread.is_alive()

    def run(self, work: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """Run a coroutine there and return its result; an interrupt or the timeout (s) cancels it.

        Raises:
            TimeoutError: after `timeout` seconds.
            InvalidRequestError: called from the loop's own thread, where waiting would be for ever.
            ClosedError: the loop's thread has ended, before or meanwhile; nobody would ever answer. Or what the call
                waited for was cancelled, since another thread has closed the client.
        """
        if threading.current_thread() is self._thread:
            work.close()
            raise InvalidRequestError(
                "this call blocks and was made inside a delivery callback; hand the work to a thread of your own"
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
        except BaseException:  # whatever a signal's handler raises
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self.loop.call_soon_threadsafe(call.cancel)
            raise
        try:
            return call.result()
        except asyncio.CancelledError:
            raise ClosedError("the client was closed by another thread while this call waited") from None


class _Call(Generic[T]):
    """One coroutine that a thread has run on the loop. A `concurrent.futures.Future` has a lock that an interrupt of
    that thread could leave locked for ever, and with it the loop."""

    def __init__(self, work: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop) -> None:
        self.over = Alarm()
        self._work = work
        self._loop = loop
        self._task: asyncio.Task[T] | None = None

    def begin(self) -> None:
        """Start it; on the loop."""
        self._task = self._loop.create_task(self._work)
        self._task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[T]) -> None:
        if not task.cancelled():
            task.exception()  # asked for: perhaps nobody waits for it any more
        self.over.set()

    def cancel(self) -> None:
        """Nobody waits for it any more; on the loop."""
        if self._task is None:
            self._work.close()
        else:
            self._task.cancel()

    def result(self) -> T:
        """Return its result, or raise what it has raised; once it is over."""
        assert self._task is not None
        return self._task.result()


class Engine(Protocol):
    """What a client object is a handle of. It outlives the handle: its tasks are held by the loop."""

    closed: Any
    """Whether, or why, nothing works any more; false while it does."""

    async def close(self) -> None:
        """Stop, and give every connection back."""


@runtime_checkable
class Draining(Protocol):
    """An engine that has taken things on which it should still finish."""

    async def drain(self) -> None:
        """Finish them, in bounded time."""

    def undelivered(self) -> int:
        """Return how many there are, in any thread."""


class Client(Protocol):
    """A client object of the synchronous API."""

    _thread: LoopThread
    _engine: Any

    def _abandon(self) -> None:
        """In a child that was forked: let go of everything without touching it, and refuse every call from now on."""


_lock = threading.Lock()
_current: LoopThread | None = None
_retiring: set[asyncio.Task[None]] = set()
_grpc_ran_before_fork = False
_clients: weakref.WeakSet[Client] = weakref.WeakSet()


def abandon_after_fork(client: Client) -> None:
    """Have `client` told, in every child that is forked from now on, that it belongs to the parent.

    And have its engine closed when it is garbage that nobody has closed.
    """
    _clients.add(client)
    weakref.finalize(client, _let_go, client._thread, client._engine).atexit = False


def _let_go(thread: LoopThread, engine: Engine) -> None:
    """Close the engine of a client that is gone. Runs in any thread, at any moment, so it takes no lock."""
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
            await engine.drain()  # deliveries may be held that the client is not needed for
    finally:
        await engine.close()


def loop_thread() -> LoopThread:
    """Return this process' loop thread.

    Raises:
        InvalidRequestError: this process was forked from one in which gRPC ran already; it would hang here.
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
    """A loop of uvloop that has something to do once the interpreter is gone crashes the process (SIGSEGV)."""
    for client in list(_clients):
        engine = client._engine
        if not engine.closed and isinstance(engine, Draining) and (count := engine.undelivered()):
            logger.warning(
                "the program ends with a producer whose records are not all acknowledged, %d may be lost; "
                "close or flush it before",
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
