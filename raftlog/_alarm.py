"""What a thread waits for while a signal, such as Ctrl-C, may come at any moment."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from typing import Final

_LOOK_S: Final = 1.0
"""How long a wait may go on without this thread running Python, which is where it learns of signals."""


class Alarm:
    """A `threading.Event` that signals do no harm to.

    A signal that comes in the moment in which a wait begins does not end it: the interpreter has looked for signals
    before, and looks again once the wait is over; so an Event that is never set is waited for for ever, whatever key
    is pressed. And one that comes within the Event's own lines leaves its lock locked, for whoever sets it. Here a
    wait looks up once a second, and nothing is ever locked.
    """

    def __init__(self) -> None:
        self._is_set = False
        self._waiters: deque[threading.Lock] = deque()
        """Each is locked until it is its turn to be woken."""

    def set(self) -> None:
        """Wake all that wait, and let nobody wait from here on."""
        self._is_set = True
        while self._waiters:
            with contextlib.suppress(IndexError):  # somebody else has taken the last one
                self._waiters.popleft().release()

    def clear(self) -> None:
        """Let it be waited for again."""
        self._is_set = False

    def is_set(self) -> bool:
        """Whether it is."""
        return self._is_set

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set, `timeout` seconds at most (None: for ever); return whether it was."""
        until = None if timeout is None else time.monotonic() + timeout
        waiter = threading.Lock()
        waiter.acquire()
        self._waiters.append(waiter)
        try:
            woken = self._is_set
            while not woken:
                left_s = _LOOK_S if until is None else min(_LOOK_S, until - time.monotonic())
                if left_s <= 0:
                    return self._is_set
                woken = waiter.acquire(timeout=left_s)
            return True
        finally:
            with contextlib.suppress(ValueError):  # it was woken
                self._waiters.remove(waiter)
