"""Until when things may stay open: one heap entry for each thing, however often its deadline moves on."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from itertools import count
from typing import Generic, TypeVar

KeyT = TypeVar("KeyT")


class Deadlines(Generic[KeyT]):
    """Deadlines in monotonic ms. A key that was forgotten, or moved on, leaves its entry until that comes up.

    Invariant: every key with a deadline has an entry that is not later.
    """

    def __init__(self) -> None:
        self._due: dict[KeyT, float] = {}
        self._armed: dict[KeyT, float] = {}
        self._heap: list[tuple[float, int, KeyT]] = []
        self._order = count()

    def set(self, key: KeyT, due_ms: float) -> None:
        """Be due then, and not before."""
        self._due[key] = due_ms
        armed_ms = self._armed.get(key)
        if armed_ms is None or due_ms < armed_ms:
            self._arm(key, due_ms)

    def forget(self, key: KeyT) -> None:
        """Never be due."""
        self._due.pop(key, None)
        # Where most entries stand for nothing any more, as after many things with ids of their own, they go:
        if len(self._heap) > 2 * len(self._due) + 1000:
            self._armed = dict(self._due)
            self._heap = [(due_ms, next(self._order), each) for each, due_ms in self._due.items()]
            heapify(self._heap)

    def _arm(self, key: KeyT, due_ms: float) -> None:
        self._armed[key] = due_ms
        heappush(self._heap, (due_ms, next(self._order), key))

    def next_ms(self) -> float | None:
        """Return when `take` has to be called next; there may be nothing then."""
        return self._heap[0][0] if self._heap else None

    def take(self, now_ms: float) -> KeyT | None:
        """Take a key that is due; None: none is."""
        while self._heap and self._heap[0][0] <= now_ms:
            armed_ms, _, key = heappop(self._heap)
            if self._armed.get(key) != armed_ms:
                continue
            del self._armed[key]
            due_ms = self._due.get(key)
            if due_ms is None:
                continue
            if due_ms > now_ms:
                self._arm(key, due_ms)
                continue
            del self._due[key]
            return key
        return None
