"""Commands that have something to put in order when they are asked to end."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Final

import typer

_ASKED_TO_END: Final = (signal.SIGTERM, signal.SIGHUP)


class AskedToEnd(KeyboardInterrupt):
    """SIGTERM or SIGHUP; like Ctrl-C. `exit_code`: what shells show for a command that ends by it."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number


@contextmanager
def orderly_end() -> Iterator[None]:
    """Have SIGTERM and SIGHUP end what happens meanwhile as Ctrl-C does: contexts are left. Once; what was sent again
    is let pass, so that it is left in order. What is ignored (nohup) stays so.

    Raises:
        typer.Exit: one came, and everything was left.
    """

    def end(number: int, frame: FrameType | None) -> None:
        for each in before:
            signal.signal(each, signal.SIG_IGN)
        raise AskedToEnd(number)

    before = {each: signal.getsignal(each) for each in _ASKED_TO_END}
    before = {each: handler for each, handler in before.items() if handler is not signal.SIG_IGN}
    for each in before:
        signal.signal(each, end)
    try:
        yield
    except AskedToEnd as asked:
        raise typer.Exit(asked.exit_code) from None
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


class StopFlag:
    """What a signal's handler sets, and a main thread waits for. Lasts as long as the process.

    A `threading.Event` will not do: its lock may be held by the very wait that the handler interrupts, for ever then.
    """

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._is_set = False

    def is_set(self) -> bool:
        """Whether it is."""
        return self._is_set

    def set(self) -> None:
        """Set it; takes no lock."""
        self._is_set = True
        with suppress(BlockingIOError):  # then there is something to read already
            os.write(self._writer, b"\0")

    def wait(self, timeout_s: float) -> bool:
        """Wait until it is set, or for so long; return whether it is."""
        if not self._is_set:
            select.select([self._reader], [], [], timeout_s)
        return self._is_set
