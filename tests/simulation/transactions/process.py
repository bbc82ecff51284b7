"""A process of a client: a generator that yields operations, and continues with the result of each."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from tests.simulation.transactions.world import World

Resume: TypeAlias = Callable[[Any], None]
Operation: TypeAlias = Callable[[Resume], None]
"""Begins something, and calls back once; what comes after that is ignored."""
Steps: TypeAlias = Generator[Operation, Any, None]


class Process:
    """Runs until it ends, is killed, or is paused for a while."""

    def __init__(self, world: World, steps: Steps) -> None:
        self._world = world
        self._steps = steps
        self._paused_until_ms = 0.0
        self.alive = True
        world.at(0, lambda: self._go_on(None))

    def kill(self) -> None:
        """End it as kill -9 does; messages in flight still arrive."""
        self.alive = False

    def pause(self, for_ms: float) -> None:
        """Pause it."""
        self._paused_until_ms = self._world.now_ms + for_ms

    def _go_on(self, value: Any) -> None:
        if not self.alive:
            return
        left_ms = self._paused_until_ms - self._world.now_ms
        if left_ms > 0:
            self._world.at(left_ms, lambda: self._go_on(value))
            return
        try:
            operation = self._steps.send(value)
        except StopIteration:
            self.alive = False
            return
        waiting = True

        def resume(result: Any) -> None:
            nonlocal waiting
            if waiting:
                waiting = False
                self._go_on(result)

        operation(resume)
