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
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from heapq import heapify, heappop, heappush
from itertools import count
from operator import attrgetter
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
    __slots__ = ("granted", "least", "most", "name", "number")

    def __init__(self, number: int, name: str, least: int, most: int, granted: asyncio.Future[Hold]) -> None:
        self.number = number
        self.name = name
        self.least = least
        self.most = most
        self.granted = granted


_number = attrgetter("number")


class Room:
    """A total that requests hold parts of."""

    def __init__(self, total: int) -> None:
        self._total = self._free = total
        self._held: Counter[str] = Counter()
        """By user."""
        self._holds: set[Hold] = set()
        self._waiting: dict[str, deque[_Waiter]] = {}
        """By user, in the order in which they came; no user without one. A look at the first of each is enough, so a
        user's thousandth connection costs the others nothing."""
        self._numbers = count()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def free(self) -> int:
        """How much is not held; negative, if more is held than the total (`Hold.resize`)."""
        return self._free

    @property
    def total(self) -> int:
        """How much there is."""
        return self._total

    @property
    def waiting(self) -> int:
        """How many requests wait."""
        return sum(map(len, self._waiting.values()))

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
        waiter = _Waiter(next(self._numbers), name, least, most, loop.create_future())
        self._waiting.setdefault(name, deque()).append(waiter)
        self._admit()
        try:
            return await waiter.granted
        except asyncio.CancelledError:
            if waiter.granted.cancelled():
                self._leave(waiter)
                self._admit()  # it may have kept others waiting
            else:
                waiter.granted.result().give()
            raise

    def _leave(self, waiter: _Waiter) -> None:
        """Take it from those that wait, if it is one of them still."""
        queue = self._waiting.get(waiter.name, deque())
        with suppress(ValueError):
            queue.remove(waiter)
            if not queue:
                del self._waiting[waiter.name]

    def put(self, name: str, size: int) -> Hold:
        """Hold what a user has already, whether or not there is so much."""
        hold = Hold(self, name, size, self.now_s())
        self._holds.add(hold)
        self._free -= size
        self._held[name] += size
        return hold

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
        first = sorted((queue[0] for queue in self._waiting.values()), key=_number)
        without = [waiter for waiter in first if not self._held[waiter.name]]
        for waiter in without:
            if waiter.least > self._free:
                break
            self._grant(waiter, self._free)
        else:
            self._admit_more()
        if self._waiting and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._look)

    def _admit_more(self) -> None:
        """Grant what can be granted to users that hold some already; a user's later requests do not overtake."""
        first = [(queue[0].number, name) for name, queue in self._waiting.items()]
        heapify(first)
        while first:
            _, name = heappop(first)
            waiter = self._waiting[name][0]
            most = (self._free - self._held[name]) // 2
            if waiter.least <= most:
                self._grant(waiter, most)
                if name in self._waiting:
                    heappush(first, (self._waiting[name][0].number, name))

    def _grant(self, waiter: _Waiter, most: int) -> None:
        self._leave(waiter)
        if waiter.granted.cancelled():
            return
        waiter.granted.set_result(self.put(waiter.name, min(waiter.most, most)))

    def _look(self) -> None:
        self._timer = None
        if not self._waiting:
            return
        now_s = self.now_s()
        for hold in list(self._holds):
            hold.look(now_s)
        if self._waiting and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._look)
