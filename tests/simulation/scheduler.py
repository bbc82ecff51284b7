"""Virtual time: events in the order of their time, and of their making where times are equal."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import Any

Action = Callable[..., object]


class Scheduler:
    """Runs actions at virtual times. `random` is the only randomness of a simulation: a seed is a whole run."""

    def __init__(self, seed: int) -> None:
        self.now_s = 0.0
        self.events = 0
        self.random = random.Random(seed)
        self._queue: list[tuple[float, int, Action, tuple[Any, ...]]] = []
        self._made = 0

    def after(self, delay_s: float, action: Action, *arguments: object) -> None:
        """Run `action` once `delay_s` has passed."""
        assert delay_s >= 0
        self._made += 1
        heapq.heappush(self._queue, (self.now_s + delay_s, self._made, action, arguments))

    def run_until(self, end_s: float, after_each: Callable[[], None] | None = None) -> None:
        """Run every event up to `end_s`, and `after_each` behind each; the time is `end_s` then."""
        queue = self._queue
        while queue and queue[0][0] <= end_s:
            self.now_s, _, action, arguments = heapq.heappop(queue)
            self.events += 1
            action(*arguments)
            if after_each is not None:
                after_each()
        self.now_s = max(self.now_s, end_s)
