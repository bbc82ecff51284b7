"""Ends of streams that nobody wants: a leader that breaks them off at once, a follower that says nothing."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from itertools import pairwise
from typing import Any

import grpc
import pytest
from grpc import aio

from raftlog import wire
from raftlog.errors import BrokerUnavailable, RaftlogError
from raftlog.v1 import replication_pb2
from replication.shell import fetchers as fetchers_module
from replication.shell import service as service_module
from replication.shell.alarm import now_ms
from replication.shell.fetchers import LeaderLink, ReplicaFetchers
from replication.shell.service import METHOD, SERVICE, WELCOME
from tests.support.held_timeouts import hold_timeouts
from tests.support.replica_parts import CLUSTER, LEADER, ME, Followed, Led, MemoryLog
from tests.unit.replication.shell.test_streams import Leader, following, run, until


async def _no_time() -> None:
    """Take none."""


class Breaker:
    """A leader that welcomes its followers and breaks their streams off after a while."""

    def __init__(self) -> None:
        self.dials: list[float] = []
        self.lasts: Callable[[], Awaitable[None]] = _no_time
        self.port = 0
        self._server = aio.server()

    async def _replicate(self, request_iterator: object, context: aio.ServicerContext[Any, Any]) -> None:
        self.dials.append(asyncio.get_running_loop().time())
        await context.read()
        await context.send_initial_metadata((WELCOME,))
        await self.lasts()
        await context.abort(grpc.StatusCode.INTERNAL, "a bug that hits every stream")

    async def __aenter__(self) -> Breaker:
        handler = grpc.stream_stream_rpc_method_handler(
            self._replicate, replication_pb2.ReplicateRequest.FromString, wire.encode_replicate
        )
        handlers: dict[str, Any] = {METHOD: handler}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        async with asyncio.timeout(60):
            await self._server.stop(None)


def fetchers_of(port: int) -> ReplicaFetchers:
    return ReplicaFetchers(ME, CLUSTER, lambda broker_id: f"127.0.0.1:{port}")


def test_a_leader_that_welcomes_and_breaks_every_stream_is_dialled_with_growing_pauses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fetchers_module, "OF_USE_S", 60.0)  # however long breaking one off takes

    async def scenario() -> None:
        async with Breaker() as leader:
            fetchers = fetchers_of(leader.port)
            fetchers.follow(Followed(MemoryLog()), LEADER)
            await until(lambda: len(leader.dials) >= 9)
            await fetchers.close()
            pauses = [after - before for before, after in pairwise(leader.dials)]
            assert max(pauses[4:]) >= 0.14, "half of what it has grown to"
            assert leader.dials[8] - leader.dials[0] >= 0.45, "half of all pauses"

    run(scenario)


def test_a_stream_that_was_of_use_is_dialled_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetchers_module, "OF_USE_S", 0.2)
    monkeypatch.setattr(fetchers_module, "FIRST_RETRY_S", 600.0)
    monkeypatch.setattr(fetchers_module, "LAST_RETRY_S", 600.0)

    async def scenario() -> None:
        async with Breaker() as leader:
            fetchers = fetchers_of(leader.port)
            fetchers.follow(Followed(MemoryLog()), LEADER)
            link = fetchers._links[LEADER]
            leader.lasts = lambda: until(lambda: link._up and now_ms() - link._up_ms > 300)
            await until(lambda: len(leader.dials) >= 4)
            await fetchers.close()

    run(scenario)


def test_a_stream_that_never_says_hello_ends_and_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "MAX_STREAMS", 3)
    hellos = hold_timeouts(monkeypatch, service_module)

    async def scenario() -> None:
        led, followed = Led(MemoryLog([1])), Followed(MemoryLog())
        leader = Leader(led)
        await leader.start()
        async with aio.insecure_channel(leader.address) as channel:
            method: Any = channel.stream_stream(
                f"/{SERVICE}/{METHOD}",
                request_serializer=replication_pb2.ReplicateRequest.SerializeToString,
                response_deserializer=wire.decode_replicate,
            )
            calls = [method() for _ in range(3)]
            await until(lambda: len(leader.service) == 3)
            async with following(leader, followed) as fetchers:
                await until(lambda: "streams" in fetchers.troubles().get(LEADER, ""))
                hellos.expire()
                await until(lambda: led.high_watermark == 1)
                await until(lambda: len(leader.service) == 1)
                for call in calls:
                    assert await call.code() is grpc.StatusCode.UNAVAILABLE
                    assert "nothing was said" in await call.details()
        await leader.stop()

    run(scenario)


def test_a_stream_that_does_not_end_holds_up_no_close(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fetchers_module, "CLEAN_UP_S", 0.1)

    async def scenario() -> None:
        may_end = asyncio.Event()

        async def stubborn(link: LeaderLink) -> RaftlogError:
            with contextlib.suppress(asyncio.CancelledError):
                await may_end.wait()
            await may_end.wait()
            raise asyncio.CancelledError

        monkeypatch.setattr(LeaderLink, "_one_stream", stubborn)
        fetchers = fetchers_of(1)
        fetchers.follow(Followed(MemoryLog()), LEADER)
        await asyncio.sleep(0.01)
        async with asyncio.timeout(60):
            await fetchers.close()
        assert any("do not end" in message for message in caplog.messages)
        may_end.set()

    run(scenario)


def test_a_connection_that_does_not_close_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetchers_module, "CLEAN_UP_S", 0.05)

    async def scenario() -> None:
        may_end = asyncio.Event()
        dials = []

        def dial(address: str, options: object) -> StuckChannel:
            dials.append(address)
            return StuckChannel(may_end)

        monkeypatch.setattr(aio, "insecure_channel", dial)
        fetchers = fetchers_of(1)
        fetchers.follow(Followed(MemoryLog()), LEADER)
        await until(lambda: len(dials) >= 3)
        async with asyncio.timeout(60):
            await fetchers.close()
        may_end.set()

    run(scenario)


class StuckChannel:
    """A channel on which no call is possible, and which does not close."""

    def __init__(self, may_end: asyncio.Event) -> None:
        self._may_end = may_end

    def stream_stream(self, *method: object, **options: object) -> Any:
        raise BrokerUnavailable("no call is possible")

    async def close(self) -> None:
        await self._may_end.wait()
