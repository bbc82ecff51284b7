"""What all connections share, such as memory, and how much of it each user may hold.

    a user that holds nothing    gets what it asks for as soon as that much is free
    a user that holds some       gets more if it then holds no more than is left, and no user that holds nothing waits

So one user alone gets a half, two get a third each, three a quarter, and some is always left for the next one (dynamic
thresholds: Choudhury and Hahne, 1998; docs/adr/0048). What a request needs it takes at once and before it has any: a
request that holds something never waits for more, so slow clients do not block one another.

While requests wait, holders whose clients make no progress have to end: those that a client has moved fewer than
STEP_BYTES of within a time. A client that sends or takes little by little, or holds back the end, is one of them.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Final

STEP_BYTES: Final = 64 << 10
LOOK_S: Final = 1.0


class Hold:
    """What one request holds, until `give`."""

    __slots__ = ("_end", "_moved", "_progress", "_room", "_since_s", "_stall_s", "name", "size")

    def __init__(self, room: Room, name: str, size: int, now_s: float) -> None:
        self._room = room
        self.name = name
        self.size = size
        self._end: Callable[[], None] | None = None
        self._progress: Callable[[], int] = lambda: 0
        self._moved, self._since_s, self._stall_s = 0, now_s, 0.0
        """What the client had moved, and when; and how long it may take for STEP_BYTES more."""

    def watch(self, progress: Callable[[], int], end: Callable[[], None], stall_s: float) -> None:
        """From now on the client has to move STEP_BYTES in `stall_s` while others wait, else `end` is called.

        `progress`: returns how many bytes the client has moved, counted from anywhere.
        """
        self._progress, self._end, self._stall_s = progress, end, stall_s
        self._moved, self._since_s = progress(), self._room.now_s()

    def watch_no_more(self) -> None:
        """The client need not do anything for now."""
        self._end = None

    def resize(self, size: int) -> None:
        """Hold less than before, or more, where that is there already and cannot wait."""
        self._room.changed(self, size)

    def give(self) -> None:
        """Give it back."""
        self._room.changed(self, 0)

    def look(self, now_s: float) -> None:
        """End the request if its client has made no progress for too long."""
        if self._end is None:
            return
        moved = self._progress()
        if moved - self._moved >= STEP_BYTES:
            self._moved, self._since_s = moved, now_s
        elif now_s - self._since_s >= self._stall_s:
            end, self._end = self._end, None
            end()


class _Waiter:
    __slots__ = ("granted", "least", "most", "name")

    def __init__(self, name: str, least: int, most: int, granted: asyncio.Future[Hold]) -> None:
        self.name = name
        self.least = least
        self.most = most
        self.granted = granted


class Room:
    """A total that requests hold parts of."""

    def __init__(self, total: int) -> None:
        self._total = self._free = total
        self._held: Counter[str] = Counter()
        """By user."""
        self._holds: set[Hold] = set()
        self._waiting: list[_Waiter] = []
        """In the order in which they came."""
        self._timer: asyncio.TimerHandle | None = None

    @property
    def free(self) -> int:
        """How much is not held; negative, if more is held than the total (`Hold.resize`)."""
        return self._free

    @property
    def waiting(self) -> int:
        """How many requests wait."""
        return len(self._waiting)

    def held(self, name: str) -> int:
        """Return how much a user holds."""
        return self._held[name]

    async def take(self, name: str, size: int, least: int | None = None) -> Hold:
        """Wait until a user may hold `size` more, or any part of it that is not below `least`, and take it.

        A size beyond the total waits for all of it.
        """
        most = min(size, self._total)
        least = most if least is None else min(least, most)
        loop = asyncio.get_running_loop()
        waiter = _Waiter(name, least, most, loop.create_future())
        self._waiting.append(waiter)
        self._admit()
        try:
            return await waiter.granted
        except asyncio.CancelledError:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
                self._admit()  # it may have kept others waiting
            elif not waiter.granted.cancelled():
                waiter.granted.result().give()
            raise

    def changed(self, hold: Hold, size: int) -> None:
        """Note that a hold has another size; 0: it is over. For `Hold`."""
        if hold not in self._holds:
            return
        self._free += hold.size - size
        self._held[hold.name] += size - hold.size
        hold.size = size
        if not size:
            self._holds.discard(hold)
            if not self._held[hold.name]:
                del self._held[hold.name]
        self._admit()

    def now_s(self) -> float:
        """Return the time of the event loop."""
        return asyncio.get_running_loop().time()

    def _admit(self) -> None:
        """Grant what can be granted, to users that hold nothing first; each in the order in which they came."""
        kept: list[_Waiter] = []
        blocked: set[str] = set()
        for waiter in self._waiting:
            if not self._held[waiter.name] and not kept and waiter.least <= self._free:
                self._grant(waiter, self._free)
            elif not self._held[waiter.name]:
                kept.append(waiter)
        for waiter in self._waiting if not kept else ():
            if waiter.granted.done():
                continue
            most = (self._free - self._held[waiter.name]) // 2
            if waiter.name not in blocked and waiter.least <= most:
                self._grant(waiter, most)
            else:
                blocked.add(waiter.name)
        self._waiting = [each for each in self._waiting if not each.granted.done()]
        if self._waiting and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._look)

    def _grant(self, waiter: _Waiter, most: int) -> None:
        if waiter.granted.cancelled():
            return
        hold = Hold(self, waiter.name, min(waiter.most, most), self.now_s())
        self._holds.add(hold)
        self._free -= hold.size
        self._held[hold.name] += hold.size
        waiter.granted.set_result(hold)

    def _look(self) -> None:
        self._timer = None
        if not self._waiting:
            return
        now_s = self.now_s()
        for hold in list(self._holds):
            hold.look(now_s)
        if self._waiting and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._look)
