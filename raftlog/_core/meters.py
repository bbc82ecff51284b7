"""Totals, and rates, averages and maxima of the last half minute, as Kafka's clients show them. Pure.

A meter has a slot for each of the last few stretches of time; what is older than all of them counts in the total only.
One thread writes at a time; others may read: a figure may lack what is being added at the moment.
"""

from __future__ import annotations

from typing import Final

SLOT_S: Final = 10.0
SLOTS: Final = 3
LEAST_S: Final = 1.0
"""What a rate is taken over at least, so that the first values of a new meter make no enormous one."""

assert SLOTS * SLOT_S == 30.0, "what the documentation says"

_Slot = tuple[int, int, float, float]
"""Number of the stretch, count, sum, largest."""


class Meter:
    """Values that come now and then. `now_s` is a clock that never goes back; all calls share one."""

    __slots__ = ("_born_s", "_slots", "count", "total")

    def __init__(self, now_s: float) -> None:
        self.count = 0
        self.total = 0.0
        """Sum of all values since the beginning."""
        self._born_s = now_s
        self._slots: list[_Slot] = [(-1, 0, 0.0, 0.0)] * SLOTS

    def add(self, value: float, now_s: float, count: int = 1) -> None:
        """Take a value, or the sum of `count` of them."""
        self.count += count
        self.total += value
        number = int(now_s // SLOT_S)
        at = number % SLOTS
        held, held_count, held_sum, largest = self._slots[at]
        if held == number:
            self._slots[at] = (number, held_count + count, held_sum + value, max(largest, value))
        else:
            self._slots[at] = (number, count, value, value)

    def rate(self, now_s: float) -> float:
        """Return the sum of what came lately for each second."""
        return sum(slot[2] for slot in self._live(now_s)) / self._span_s(now_s)

    def frequency(self, now_s: float) -> float:
        """Return how many values came lately for each second."""
        return sum(slot[1] for slot in self._live(now_s)) / self._span_s(now_s)

    def average(self, now_s: float) -> float:
        """Return the average of what came lately; 0 when nothing did."""
        live = self._live(now_s)
        count = sum(slot[1] for slot in live)
        return sum(slot[2] for slot in live) / count if count else 0.0

    def largest(self, now_s: float) -> float:
        """Return the largest of what came lately; 0 when nothing did."""
        return float(max((slot[3] for slot in self._live(now_s)), default=0.0))

    def _live(self, now_s: float) -> list[_Slot]:
        oldest = int(now_s // SLOT_S) - SLOTS + 1
        return [slot for slot in list(self._slots) if slot[0] >= oldest]

    def _span_s(self, now_s: float) -> float:
        since_s = (now_s // SLOT_S - SLOTS + 1) * SLOT_S
        return max(LEAST_S, now_s - max(since_s, self._born_s))
