"""The event loop thread behind the synchronous classes: one for each process, made when it is first needed.

Keyed by process id: a child that was forked gets a loop of its own, and nothing here touches gRPC before a client
object is made (PySpark forks its workers).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

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
    """Drop what grpc.aio says when two event loops of a process share its poller and the other was faster."""
    if isinstance(context.get("exception"), BlockingIOError):
        return
    loop.default_exception_handler(context)


class LoopThread:
    """An event loop that runs in a daemon thread, so that it never keeps an interpreter from exiting."""

    def __init__(self) -> None:
        self.pid = os.getpid()
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


_lock = threading.Lock()
_current: LoopThread | None = None


def loop_thread() -> LoopThread:
    """Return this process' loop thread."""
    global _current
    found = _current
    if found is not None and found.pid == os.getpid():
        return found
    with _lock:
        if _current is None or _current.pid != os.getpid():
            _current = LoopThread()
        return _current


def _after_fork_in_child() -> None:
    global _lock, _current
    _lock = threading.Lock()  # the parent's may have been held
    _current = None


os.register_at_fork(after_in_child=_after_fork_in_child)
