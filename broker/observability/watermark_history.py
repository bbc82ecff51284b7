"""When a partition's high watermark was where: how long ago a group's committed offset was overtaken. Pure.

The high watermark is looked at now and then. Between two looks it is taken to have risen evenly, so a lag in seconds
is exact to the pause between two looks, and never less than it is by more than that. What is older than the first look
is not known; the time at which the record there was written may be added (`began`).
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Final, NamedTuple

MAX_MARKS: Final = 64
"""Of one partition. Beyond that every other one of the older half goes: what is long ago is known less exactly."""


class Mark(NamedTuple):
    """The high watermark was `offset` when it was looked at first and last, in monotonic ms."""

    offset: int
    first_ms: float
    last_ms: float


class WatermarkHistory:
    """Of one partition. Invariant: marks ascend by offset and by time, and are at most MAX_MARKS."""

    __slots__ = ("_marks",)

    def __init__(self) -> None:
        self._marks: list[Mark] = []

    def __len__(self) -> int:
        return len(self._marks)

    @property
    def known_from(self) -> int | None:
        """The least committed offset of which it is known since when there is more; None: of none."""
        return self._marks[0].offset if self._marks else None

    def seen(self, high_watermark: int, now_ms: float) -> None:
        """Take note of a look. A high watermark that went back (records were lost) drops what was above it."""
        marks = self._marks
        while marks and marks[-1].offset > high_watermark:
            marks.pop()
        if marks and marks[-1].offset == high_watermark:
            marks[-1] = marks[-1]._replace(last_ms=now_ms)
            return
        marks.append(Mark(high_watermark, now_ms, now_ms))
        self._thin()

    def began(self, offset: int, at_ms: float) -> None:
        """Take note that the record at `offset`, which is before all that is known, was written at that time."""
        if self._marks and offset < self._marks[0].offset:
            at_ms = min(at_ms, self._marks[0].first_ms)
            self._marks.insert(0, Mark(offset, at_ms, at_ms))
            self._thin()

    def forget_below(self, offset: int) -> None:
        """Nobody asks any more for committed offsets below this one."""
        keep_from = bisect_right(self._marks, offset, key=_offset) - 1
        if keep_from > 0:
            del self._marks[:keep_from]

    def lag_s(self, committed: int, now_ms: float) -> float | None:
        """Return how many seconds ago the high watermark passed a committed offset; 0: it has not; None: unknown."""
        marks = self._marks
        if not marks or committed < marks[0].offset:
            return None
        after = bisect_right(marks, committed, key=_offset)
        if after == len(marks):
            return 0.0
        low, high = marks[after - 1], marks[after]
        share = (committed - low.offset) / (high.offset - low.offset)
        overtaken_ms = low.last_ms + (high.first_ms - low.last_ms) * share
        return max(0.0, now_ms - overtaken_ms) / 1_000

    def _thin(self) -> None:
        if len(self._marks) > MAX_MARKS:
            half = len(self._marks) // 2
            self._marks = [*self._marks[:half:2], *self._marks[half:]]


def _offset(mark: Mark) -> int:
    return mark.offset
