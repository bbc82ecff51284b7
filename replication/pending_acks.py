"""Produces that wait for the high watermark: pure, first come first served by offset."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

Answer = Callable[[BaseException | None], None]
"""Called once, with None when the records are held as asked, else with the reason why they may not be."""


class PendingAcks:
    """Answers owed for appended records, in offset order.

    Transitions:
        wait(end_offset)     -> owed
        advance(offset)      -> answered with None, when end_offset <= offset
        fail(error)          -> answered with the error (leadership lost, log directory gone)

    Invariant: owed end offsets never decrease from front to back, because appends of a partition are ordered.
    """

    __slots__ = ("_owed",)

    def __init__(self) -> None:
        self._owed: deque[tuple[int, Answer]] = deque()

    def __len__(self) -> int:
        return len(self._owed)

    def wait(self, end_offset: int, answer: Answer) -> None:
        """Owe `answer` until everything below `end_offset` (exclusive) is held."""
        assert not self._owed or self._owed[-1][0] <= end_offset, "appends of a partition are ordered"
        self._owed.append((end_offset, answer))

    def advance(self, held_end_offset: int) -> None:
        """Answer everything that lies below `held_end_offset` (exclusive)."""
        owed = self._owed
        while owed and owed[0][0] <= held_end_offset:
            owed.popleft()[1](None)

    def fail(self, error: BaseException) -> None:
        """Answer everything with `error`."""
        while self._owed:
            self._owed.popleft()[1](error)
