"""Which commands of a client are under way: some at a time, in order, numbered.

The state machine keeps the outcomes of so many sequences of a client, and refuses an older one as settled. A command
that waits long for its answer must not fall behind them, so the newest sequence stays within MAX_SPAN of the oldest
that is out.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

from raftlog.errors import BrokerOverloaded, RequestTimedOut, ShuttingDown
from raftmeta.client_sessions import MAX_OUTCOMES_PER_CLIENT

MAX_OUTSTANDING: Final = 1_000
"""Commands of one client that are under way or wait for their turn; more are refused."""
MAX_IN_FLIGHT: Final = 200
"""Commands of one client under way: so many are committed well within the time that an attempt may take."""
MAX_SPAN: Final = MAX_OUTCOMES_PER_CLIENT

assert MAX_IN_FLIGHT <= MAX_SPAN <= MAX_OUTCOMES_PER_CLIENT
assert MAX_IN_FLIGHT <= MAX_OUTSTANDING


class CommandWindow:
    """Hands out sequences. Invariant: `_out` is in rising order and spans less than MAX_SPAN."""

    def __init__(self) -> None:
        self._next = 0
        self._out: dict[int, None] = {}
        self._turns: deque[asyncio.Future[int]] = deque()

    @property
    def settled_below(self) -> int:
        """Every sequence below has been answered, or given up."""
        return next(iter(self._out), self._next)

    async def enter(self, timeout_s: float) -> int:
        """Return the sequence of a new command once it is its turn; `leave` with it in the end.

        Raises:
            BrokerOverloaded: MAX_OUTSTANDING commands are there already.
            RequestTimedOut: its turn did not come in time; it was not sent.
        """
        if not self._turns and self._has_room():
            return self._take()
        if len(self._out) + len(self._turns) >= MAX_OUTSTANDING:
            raise BrokerOverloaded(f"{MAX_OUTSTANDING} metadata commands of this node are under way; try again later")
        turn: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._turns.append(turn)
        try:
            async with asyncio.timeout(timeout_s):
                return await turn
        except TimeoutError:
            self._give_up(turn)
            raise RequestTimedOut(
                f"the command did not get its turn within {timeout_s:g} s: {len(self._out)} others of this node wait "
                "for their answers; it was not sent"
            ) from None
        except asyncio.CancelledError:
            self._give_up(turn)
            raise

    def leave(self, sequence: int) -> None:
        """Note that nobody waits for the answer to a command any more."""
        del self._out[sequence]
        self._give_turns()

    def close(self) -> None:
        """Send everybody away who waits for a turn."""
        turns, self._turns = self._turns, deque()
        for turn in turns:
            if not turn.done():
                turn.set_exception(ShuttingDown("this node is stopping"))

    def _has_room(self) -> bool:
        return len(self._out) < MAX_IN_FLIGHT and self._next - self.settled_below < MAX_SPAN

    def _take(self) -> int:
        sequence, self._next = self._next, self._next + 1
        self._out[sequence] = None
        return sequence

    def _give_turns(self) -> None:
        while self._turns and self._has_room():
            turn = self._turns.popleft()
            if not turn.done():
                turn.set_result(self._take())

    def _give_up(self, turn: asyncio.Future[int]) -> None:
        """Give a turn back that came in the same moment in which it was given up."""
        if turn.done() and not turn.cancelled() and turn.exception() is None:
            self.leave(turn.result())
        elif turn in self._turns:
            self._turns.remove(turn)
