"""What answers to unary calls hold, on a real gRPC server, whose callers take them or do not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc import aio

from broker.clock import SystemClock
from broker.net import answers as module
from broker.net.answers import LONG_BYTES, MAX_UNTAKEN_ANSWERS, SHORT_BYTES, TOTAL_BYTES, Answer, Answers
from broker.net.calls import MAX_STREAMS_PER_USER, CallLimits
from broker.net.interceptors import RewrittenHandlers, preceded
from broker.quotas import room
from broker.security.caller import Caller, caller
from broker.turns import AT_A_TIME, in_turns
from raftlog._client.connections import from_grpc
from raftlog.errors import BrokerOverloaded
from tests.support.frames import Frames

WAIT_S = 60.0
USER = "user"
"""The header with the caller's name."""
MB = 1_000_000


class _As(RewrittenHandlers):
    """Identifies callers by a header."""

    def rewrite(self, method: str, handler: Any) -> Any:
        async def identify(context: Any) -> None:
            name = dict(context.invocation_metadata()).get(USER, "mallory")
            caller.set(Caller(f"User:{name}", "10.0.0.1"))

        return preceded(handler, identify)


def held_bytes(answers: Answers) -> int:
    return answers._room.total - answers._room.free


class World:
    """A server whose calls are answered with as many bytes as they ask for; a long answer is made of many things."""

    def __init__(self, streams: int = 1_000) -> None:
        self.limits = CallLimits(
            streams, streams, SystemClock(), short_rate=1e6, unused_rate=1e6, call_rate=1e6, refused_rate=1e6
        )
        self.ended: list[str] = []
        self.limits.end_connection = lambda peer, limit: self.ended.append(limit)
        self.making = self.most_making = self.made = 0
        self.go_on = asyncio.Event()
        self.go_on.set()
        self.port = 0

    @property
    def held(self) -> int:
        return held_bytes(self.limits._answers)

    async def answer(self, request: bytes, context: Any) -> bytes:
        size = int(request)
        if size < MB:
            return bytes(size)
        async for number in in_turns(range(2 * AT_A_TIME)):
            if number == AT_A_TIME:  # it was found to be long
                self.making += 1
                self.most_making = max(self.most_making, self.making)
                await self.go_on.wait()
                self.making -= 1
        self.made += 1
        return bytes(size)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[World]:
        server = aio.server(interceptors=[_As(), self.limits], options=[("grpc.max_send_message_length", -1)])
        handler: Any = grpc.unary_unary_rpc_method_handler(self.answer)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.T", {"Answer": handler}),))
        self.port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            yield self
        finally:
            await server.stop(0)

    async def connection(self, window: int = 0) -> Frames:
        """Return a connection whose client takes so much of each answer."""
        return Frames(*await asyncio.open_connection("127.0.0.1", self.port), window=window)

    async def call(self, size: int, user: str = "alice") -> int:
        """Make a call of an ordinary client; return how long the answer was."""
        options = [("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
        async with aio.insecure_channel(f"127.0.0.1:{self.port}", options=options) as channel:
            ask: Any = channel.unary_unary("/t.T/Answer")
            return len(await ask(b"%d" % size, metadata=((USER, user),), timeout=WAIT_S))


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not is_so():  # noqa: ASYNC110 # what it waits for happens in gRPC
            await asyncio.sleep(0.01)


async def test_answers_that_nobody_takes_are_bounded_and_others_are_answered() -> None:
    async with World().serving() as world:
        client = await world.connection()
        for number in range(200):
            client.ask("/t.T/Answer", 1 + 2 * number, b"%d" % (2 * MB))
        await until(lambda: TOTAL_BYTES // 2 - LONG_BYTES < world.held <= TOTAL_BYTES // 2)
        for _ in range(3):
            await client.settle()
        assert world.held <= TOTAL_BYTES // 2
        assert [await world.call(size) for size in (10, 5 * MB)] == [10, 5 * MB]
        assert await world.call(10, user="mallory") == 10
        client.close()
        await until(lambda: world.held == 0)
        assert await world.call(5 * MB, user="mallory") == 5 * MB


async def test_an_answer_that_is_taken_holds_nothing_and_lets_the_next_be_made() -> None:
    async with World().serving() as world:
        client = await world.connection()
        reading = asyncio.ensure_future(_read_all(client))
        for number in range(60):
            client.ask("/t.T/Answer", 1 + 2 * number, b"%d" % (2 * MB))
        await until(lambda: TOTAL_BYTES // 2 - LONG_BYTES < world.held <= TOTAL_BYTES // 2)
        made = world.made
        assert made < 40
        for number in range(10):
            client.take(1 + 2 * number, 3 * MB)
        await until(lambda: world.made >= made + 9)
        reading.cancel()
        client.close()


async def _read_all(client: Frames) -> None:
    while True:
        await client.read()


async def test_a_user_makes_few_long_answers_at_a_time() -> None:
    """Each is in memory while it is made, and takes turns with the others."""
    async with World().serving() as world:
        world.go_on.clear()
        calls = [asyncio.ensure_future(world.call(MB)) for _ in range(50)]
        most = TOTAL_BYTES // 2 // LONG_BYTES
        await until(lambda: world.making == most)
        other = asyncio.ensure_future(world.call(MB, user="bob"))
        await until(lambda: world.making == most + 1)
        assert await world.call(10) == 10, "short ones are not in their way"
        world.go_on.set()
        assert set(await asyncio.gather(other, *calls)) == {MB}
        assert world.most_making <= most + 1
        await until(lambda: world.held == 0)


async def test_a_long_answer_made_at_once_counts_all_the_same() -> None:
    async with World().serving() as world:
        client = await world.connection()
        size = 10 * SHORT_BYTES
        assert size < MB
        for number in range(200):
            client.ask("/t.T/Answer", 1 + 2 * number, b"%d" % size)
        await until(lambda: world.limits.refused[MAX_UNTAKEN_ANSWERS] > 0)
        assert world.held < TOTAL_BYTES // 2 + 2 * size
        with pytest.raises(aio.AioRpcError) as refused:
            await world.call(10, user="mallory")
        error = from_grpc(refused.value, "localhost")
        assert isinstance(error, BrokerOverloaded)
        assert "User:mallory has 64 MiB" in str(error)
        assert "read some" in str(error)
        assert await world.call(10) == 10
        client.close()
        await until(lambda: world.held == 0)
        assert await world.call(10, user="mallory") == 10


async def test_calls_whose_answers_are_not_taken_count_as_open_streams() -> None:
    async with World(streams=10).serving() as world:
        client = await world.connection()
        for number in range(10):
            client.ask("/t.T/Answer", 1 + 2 * number, b"1000")
        await until(lambda: world.limits._open[MAX_STREAMS_PER_USER, "User:mallory"] == 10)
        await client.settle()
        with pytest.raises(aio.AioRpcError, match=r"max.streams.per.user=10 open streams and calls"):
            await world.call(10, user="mallory")
        client.close()
        await until(lambda: not world.limits._open[MAX_STREAMS_PER_USER, "User:mallory"])


async def test_while_others_wait_who_takes_nothing_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STALL_S", 0.2)
    monkeypatch.setattr(room, "LOOK_S", 0.05)
    async with World().serving() as world:
        client = await world.connection()
        client.ask("/t.T/Answer", 1, b"%d" % (TOTAL_BYTES - MB))
        await until(lambda: world.held == TOTAL_BYTES - MB)
        await asyncio.sleep(1)
        assert not world.ended, "a client must not be disconnected while no other call waits"
        waits = asyncio.ensure_future(world.call(MB))
        await until(lambda: world.ended == [MAX_UNTAKEN_ANSWERS])
        client.close()
        assert await waits == MB


async def test_one_that_gives_up_while_it_waits_holds_nothing() -> None:
    answers = Answers(total_bytes=LONG_BYTES)
    ends: list[Callable[[object], None]] = []

    class Context:
        def add_done_callback(self, callback: Callable[[object], None]) -> None:
            ends.append(callback)

    def begun(name: str) -> Answer:
        return answers.begin(Context(), name, lambda: None)

    await begun("a").wait()
    second = asyncio.ensure_future(begun("b").wait())
    await asyncio.sleep(0)
    ends[1](None)  # its caller is gone
    ends[0](None)
    await second
    assert held_bytes(answers) == 0
