"""The high watermark: records below it are committed. The function `high_watermark` is the whole rule.

A record is committed once every member of the *maximal ISR* holds it durably. It is then never lost while one of them
survives with its disk. The maximal ISR is the ISR that the controller has committed, and the replicas that the leader
has proposed to add: the controller may have agreed already, before the leader knows, and could elect such a replica.

The leader answers produces with acks=all up to the high watermark, consumers read up to it, and a replica has to hold
everything below it before it may join the ISR. `PendingAcks` are the produces that wait for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from heapq import heappop, heappush


def high_watermark(current: int, durable_by_member: Iterable[int | None], *, may_commit: bool) -> int:
    """Return the high watermark, given the durable end (exclusive) of each member of the maximal ISR.

    It is the least of these ends, but:

    - it never goes back: a consumer finds each record again that it has read, and a producer each record that was
      acknowledged. A new leader begins with the value that it heard as a follower. That may be behind, and catches up
      as the ISR confirms.
    - it does not move while a member has not confirmed (None) that its log is a prefix of this leader's: until then it
      is unknown what that replica holds.
    - it does not move while `may_commit` is false: the committed ISR is smaller than min.insync.replicas, or than the
      number of replicas if that is less. So the replicas that were in sync when the ISR became so small still hold
      everything committed, and stay eligible to lead (KIP-966).

    Invariant: the result is never below `current`, and above it only if every member holds everything below it.
    """
    if not may_commit:
        return current
    lowest: int | None = None
    for durable in durable_by_member:
        if durable is None:
            return current
        if lowest is None or durable < lowest:
            lowest = durable
    return current if lowest is None or lowest < current else lowest


Answer = Callable[[BaseException | None], None]
"""Called once: with None when the records are durable as asked, else with the reason why they may not be."""

_Owed = tuple[int, int, Answer]
"""(end offset, number in the order of asking, answer)"""


class PendingAcks:
    """Answers owed for appended records, given in offset order; for equal offsets in the order of asking.

    Transitions:
        wait(end_offset)        -> owed
        wait_again(end_offset)  -> owed, for a batch that was appended before
        advance(offset)         -> answered with None, when end_offset <= offset
        fail(error)             -> answered with the error (leadership lost, log directory gone)

    Invariant: the end offsets passed to `wait` never decrease. Those passed to `wait_again` may, so they are kept in a
    heap of their own, where each costs O(log n).
    """

    __slots__ = ("_again", "_asked", "_owed")

    def __init__(self) -> None:
        self._owed: deque[_Owed] = deque()
        self._again: list[_Owed] = []
        self._asked = 0

    def __len__(self) -> int:
        return len(self._owed) + len(self._again)

    def wait(self, end_offset: int, answer: Answer) -> None:
        """Owe `answer` until everything below `end_offset` (exclusive) is durable."""
        assert not self._owed or self._owed[-1][0] <= end_offset, "appends of a partition are ordered"
        self._asked += 1
        self._owed.append((end_offset, self._asked, answer))

    def wait_again(self, end_offset: int, answer: Answer) -> None:
        """As `wait`, for a batch that was appended before, and that the producer has sent again."""
        self._asked += 1
        heappush(self._again, (end_offset, self._asked, answer))

    def advance(self, durable_end_offset: int) -> None:
        """Answer everything that lies below `durable_end_offset` (exclusive)."""
        owed = self._owed
        while True:
            if self._again and (not owed or self._again[0] < owed[0]):  # no two have the same number
                if self._again[0][0] > durable_end_offset:
                    return
                heappop(self._again)[2](None)
            elif owed and owed[0][0] <= durable_end_offset:
                owed.popleft()[2](None)
            else:
                return

    def fail(self, error: BaseException) -> None:
        while self._owed:
            self._owed.popleft()[2](error)
        while self._again:
            heappop(self._again)[2](error)
