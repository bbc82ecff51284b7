"""Produces that wait for the high watermark: pure, first come first served by offset."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush

Answer = Callable[[BaseException | None], None]
"""Called once, with None when the records are held as asked, else with the reason why they may not be."""

_Owed = tuple[int, int, Answer]
"""(end offset, number in the order of asking, answer)"""


class PendingAcks:
    """Answers owed for appended records, in offset order; where several wait for the same, in the order of asking.

    Transitions:
        wait(end_offset)     -> owed
        wait_again(end_offset) -> owed, between those of other appends
        advance(offset)      -> answered with None, when end_offset <= offset
        fail(error)          -> answered with the error (leadership lost, log directory gone)

    Invariant: the end offsets of appends never decrease. Who asks again after an earlier one is kept in a heap beside
    them, so that as many as there may be cost little each.
    """

    __slots__ = ("_again", "_asked", "_owed")

    def __init__(self) -> None:
        self._owed: deque[_Owed] = deque()
        self._again: list[_Owed] = []
        self._asked = 0

    def __len__(self) -> int:
        return len(self._owed) + len(self._again)

    def wait(self, end_offset: int, answer: Answer) -> None:
        """Owe `answer` until everything below `end_offset` (exclusive) is held."""
        assert not self._owed or self._owed[-1][0] <= end_offset, "appends of a partition are ordered"
        self._asked += 1
        self._owed.append((end_offset, self._asked, answer))

    def wait_again(self, end_offset: int, answer: Answer) -> None:
        """As `wait`, for what was appended before: a producer that has not had its answer sends the batch again."""
        self._asked += 1
        heappush(self._again, (end_offset, self._asked, answer))

    def advance(self, held_end_offset: int) -> None:
        """Answer everything that lies below `held_end_offset` (exclusive)."""
        owed = self._owed
        while True:
            if self._again and (not owed or self._again[0] < owed[0]):  # no two have the same number
                if self._again[0][0] > held_end_offset:
                    return
                heappop(self._again)[2](None)
            elif owed and owed[0][0] <= held_end_offset:
                owed.popleft()[2](None)
            else:
                return

    def fail(self, error: BaseException) -> None:
        """Answer everything with `error`."""
        while self._owed:
            self._owed.popleft()[2](error)
        while self._again:
            heappop(self._again)[2](error)
