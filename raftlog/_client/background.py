"""The event loop thread behind the synchronous classes: one for each process, made when it is first needed.

Nothing here touches gRPC before a client object is made, so that a process may fork before (PySpark forks its
workers); a child that was forked after is told so instead of hanging.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import os
import threading
import weakref
from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar

from raftlog.errors import InvalidRequestError

logger = logging.getLogger(__name__)

T = TypeVar("T")


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
        self.loop.run_forever()

    def run(self, work: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """Run a coroutine there and return its result; an interrupt or the timeout (s) cancels it.

        Raises:
            TimeoutError: after `timeout` seconds.
            InvalidRequestError: called from the loop's own thread, where waiting would be for ever.
        """
        if threading.current_thread() is self._thread:
            work.close()
            raise InvalidRequestError(
                "this call blocks and was made inside a delivery callback; hand the work to a thread of your own"
            )
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result(timeout)
        except (KeyboardInterrupt, concurrent.futures.TimeoutError):
            future.cancel()
            raise


class Abandoned(Protocol):
    """A client object of the parent, in a child that was forked from it."""

    def _abandon(self) -> None:
        """Let go of everything without touching it, and refuse every call from now on."""


_lock = threading.Lock()
_current: LoopThread | None = None
_grpc_ran_before_fork = False
_clients: weakref.WeakSet[Abandoned] = weakref.WeakSet()


def abandon_after_fork(client: Abandoned) -> None:
    """Have `client` told, in every child that is forked from now on, that it belongs to the parent."""
    _clients.add(client)


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
        if _current is None:
            _current = LoopThread()
        return _current


def _after_fork_in_child() -> None:
    global _lock, _current, _grpc_ran_before_fork
    _lock = threading.Lock()  # the parent's may have been held
    _grpc_ran_before_fork = _grpc_ran_before_fork or _current is not None
    _current = None
    for client in list(_clients):
        client._abandon()
    _clients.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
