"""The memory of answers to unary calls, from when they are made until their callers have taken them.

gRPC keeps an answer that the caller's window has no room for, for as long as the caller likes, and a short request can
have an answer of megabytes. So users share what long answers hold (`Room`):

    called ── more than AT_A_TIME things (`in_turns`) ──> has a part of LONG_BYTES, or waits for it
           ── serialized ──> holds as much as it is long ── taken, or the connection is over ──> holds nothing

An answer can also turn out to be long without having waited; then it holds its length too. If a user holds more than a
half in this way, its further calls are refused until it has read some answers. While other calls wait, a client that
reads nothing of its answer for STALL_S is disconnected.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

from broker.quotas.room import Hold, Room
from broker.turns import before_more
from raftlog.errors import BrokerOverloaded

MAX_UNTAKEN_ANSWERS: Final = "untaken answers"
"""The name of this limit, where refusals are counted and logged. It has no key."""
TOTAL_BYTES: Final = 128 << 20
LONG_BYTES: Final = 8 << 20
"""What an answer may need that is being made: the message of 10,000 topics takes 5 MiB, and half a MiB once it is
serialized."""
SHORT_BYTES: Final = 64 << 10
"""A shorter answer does not count."""
STALL_S: Final = 30.0


class Answers:
    """What the answers to all users hold."""

    def __init__(self, total_bytes: int = TOTAL_BYTES) -> None:
        self._room = Room(total_bytes)

    def refusal_of(self, name: str) -> BrokerOverloaded | None:
        """Return why a user is answered no further call for now; None if it is."""
        held = self._room.held(name)
        if held <= max(self._room.free, self._room.total // 2):  # no more than one that waits for its part may have
            return None
        return BrokerOverloaded(
            f"{name} has {held >> 20} MiB of answers that are being made or that it has not read; read some, and try "
            "again"
        )

    def begin(self, context: Any, name: str, end_connection: Callable[[], None]) -> Answer:
        """Begin the answer to the call that this task serves. `end_connection`: ends the caller's connection."""
        answer = Answer(self._room, name, end_connection)
        context.add_done_callback(answer.end)  # the task ends earlier: once gRPC has the answer
        before_more.set(answer.wait)
        return answer


class Answer:
    """The answer to one call."""

    def __init__(self, room: Room, name: str, end_connection: Callable[[], None]) -> None:
        self._room = room
        self._name = name
        self._end_connection = end_connection
        self._hold: Hold | None = None
        self._has_ended = False
        self._asking = asyncio.Lock()
        """Parts of an answer may be made at the same time."""

    async def wait(self) -> None:
        """Wait for the part that a long answer needs."""
        async with self._asking:
            if self._hold is None:
                self._keep(await self._room.take(self._name, LONG_BYTES))

    def made(self, size: int) -> None:
        """Hold what the answer is long, until the caller has taken it."""
        if self._hold is not None:
            self._hold.resize(size)
        elif size > SHORT_BYTES:
            self._keep(self._room.put(self._name, size))
        if self._hold is not None:
            self._hold.watch(lambda: 0, self._end_connection, STALL_S)

    def end(self, _: object = None) -> None:
        """The caller has taken it, or is gone."""
        self._has_ended = True
        if self._hold is not None:
            self._hold.give()

    def _keep(self, hold: Hold) -> None:
        self._hold = hold
        if self._has_ended:
            hold.give()
