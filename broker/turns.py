"""How work that takes long leaves the event loop to others in between.

in_turns     one loop over many things: a turn after so many
Budget       the work of one task: a turn after so much
SharedTurns  the work of all streams of a kind: so much in each turn, users one after another
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextvars import ContextVar
from typing import Final, TypeVar

AT_A_TIME: Final = 100
"""Things between two turns of the event loop: a decision about a permission, or an answer, takes up to 50 us."""
QUICK_AT_A_TIME: Final = 500
"""Likewise, where a thing takes a microsecond at most."""

before_more: ContextVar[Callable[[], Awaitable[None]] | None] = ContextVar("before_more", default=None)
"""What a call waits for once it has turned out to be about many things."""

T = TypeVar("T")


async def in_turns(
    things: Iterable[T], at_a_time: int = AT_A_TIME, weight: Callable[[T], int] = lambda _: 1
) -> AsyncIterator[T]:
    """Yield the things, and let the event loop do other work in between. `weight`: of a thing that is several."""
    done, wait = 0, before_more.get()
    for each in things:
        yield each
        done += weight(each)
        if done >= at_a_time:
            done = 0
            await asyncio.sleep(0)
            if wait is not None:
                await wait()
                wait = None


class SharedTurns:
    """A budget of work between two turns of the event loop, which all streams of a kind share.

    A stream takes what a piece of work costs before it does the work. Once the budget is used up, pieces wait for later
    turns: users one after another, each user's pieces in their order. So neither one long request nor many streams hold
    up what else the event loop has to do.

    Half of the budget is always there when a turn begins, and a piece costs one subtraction as long as no more is
    used: what comes in one turn and is not that much stays together. Streams that a wait has parted would stay so, and
    have smaller messages each.
    """

    def __init__(self, budget: int) -> None:
        """`budget`: what the pieces of a turn may cost together; the last of them may go beyond it."""
        self._budget = self._left = budget
        self._waiting: dict[str, deque[tuple[asyncio.Future[None], int]]] = {}
        """By user, the next one first; no user without pieces. While there are any, nothing of the budget is left."""
        self._is_running = False

    def take(self, cost: int) -> bool:
        """Take the cost of a piece from this turn. False: it has to `wait`."""
        if self._left <= 0:
            return False
        self._left -= cost
        if self._left < self._budget // 2 and not self._is_running:
            self._run()
        return True

    async def wait(self, name: str, cost: int) -> None:
        """Return in the turn in which the piece may begin; `name`: the user whose work it is."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(name, deque()).append((turn, cost))
        if not self._is_running:
            self._run()
        await turn

    def _run(self) -> None:
        self._is_running = True
        asyncio.get_running_loop().call_soon(self._next_turn)

    def _next_turn(self) -> None:
        self._left, self._is_running = self._budget, False
        while self._waiting and self._left > 0:
            name = next(iter(self._waiting))
            pieces = self._waiting.pop(name)
            turn, cost = pieces.popleft()
            if pieces:
                self._waiting[name] = pieces  # behind the other users
            if not turn.done():  # else its stream has ended
                self._left -= cost
                turn.set_result(None)
        if self._waiting:
            self._run()


class Budget:
    """Gives the event loop a turn whenever the work of one task since its last one has cost too much."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._spent = 0

    async def spend(self, cost: int) -> None:
        """Note that work was done."""
        self._spent += cost
        if self._spent >= self._most:
            self._spent = 0
            await asyncio.sleep(0)
