"""The simulated gRPC behaves as the real one, as far as clients and services can observe."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import suppress
from typing import Any, cast

import grpc
import pytest
from grpc import aio

from tests.simulation.cluster.channel import SimChannel
from tests.simulation.cluster.schedule import ClusterSimulation
from tests.simulation.cluster.server import SimServer
from tests.simulation.dataplane.loop import SimLoop
from tests.simulation.process import Host, Process

SERVICE = "test.Echo"
LARGE = b"x" * 200_000
Outcome = list[object]


def _plain(data: bytes) -> bytes:
    return data


class _Echo:
    """What is served."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.abandoned = asyncio.Event()

    def handlers(self) -> grpc.GenericRpcHandler:
        unary = grpc.unary_unary_rpc_method_handler
        streams = grpc.stream_stream_rpc_method_handler
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "Once": unary(cast(Any, self.once), _plain, _plain),
                "Never": unary(cast(Any, self.never), _plain, _plain),
                "Refuse": unary(cast(Any, self.refuse), _plain, _plain),
                "Echo": streams(cast(Any, self.echo), _plain, _plain),
                "Ends": streams(cast(Any, self.ends), _plain, _plain),
                "Fails": streams(cast(Any, self.fails), _plain, _plain),
            },
        )

    async def once(self, request: bytes, context: Any) -> bytes:
        return request + b"!"

    async def never(self, request: bytes, context: Any) -> bytes:
        self.begun.set()
        try:
            await asyncio.sleep(100)
        except asyncio.CancelledError:
            self.abandoned.set()
            raise
        return request

    async def refuse(self, request: bytes, context: Any) -> bytes:
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too much")
        return request

    async def echo(self, requests: AsyncIterator[bytes], context: Any) -> None:
        async for request in requests:
            await context.write(request)

    async def ends(self, requests: AsyncIterator[bytes], context: Any) -> None:
        async for request in requests:
            await context.write(request)
            return

    async def fails(self, requests: AsyncIterator[bytes], context: Any) -> None:
        async for request in requests:
            await context.write(request)
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "no more")


async def _status(call: Awaitable[object]) -> object:
    """Return the outcome of a call: its result, its status, or its refusal."""
    try:
        return await call
    except aio.AioRpcError as error:
        return error.code(), error.details() if error.code() is not grpc.StatusCode.UNAVAILABLE else ""
    except asyncio.CancelledError:
        return "cancelled"
    except asyncio.InvalidStateError:
        return "invalid state"


async def _within(event: asyncio.Event) -> bool:
    """Whether it comes to that, in a time that is long enough on any machine."""
    with suppress(TimeoutError):
        async with asyncio.timeout(20.0):
            await event.wait()
    return event.is_set()


def _method(channel: Any, kind: str, name: str) -> Any:
    return getattr(channel, kind)(f"/{SERVICE}/{name}", request_serializer=_plain, response_deserializer=_plain)


async def unary(channel: Any, echo: _Echo) -> Outcome:
    answered = await _status(_method(channel, "unary_unary", "Once")(b"a"))
    refused = await _status(_method(channel, "unary_unary", "Refuse")(b"a"))
    unknown = await _status(_method(channel, "unary_unary", "Nothing")(b"a"))
    return [answered, refused, unknown]


async def deadline(channel: Any, echo: _Echo) -> Outcome:
    late: object = None
    while not echo.begun.is_set():  # the time of a call may be over before it gets there
        late = await _status(_method(channel, "unary_unary", "Never")(b"a", timeout=2.0))
    return [late, await _within(echo.abandoned)]


async def cancelled(channel: Any, echo: _Echo) -> Outcome:
    call = _method(channel, "unary_unary", "Never")(b"a")
    begun = await _within(echo.begun)
    outcome = [begun, call.cancel(), await _status(call), call.cancel()]
    return [*outcome, await _within(echo.abandoned)]


async def waiter_cancelled(channel: Any, echo: _Echo) -> Outcome:
    """A caller that stops waiting for a call ends it."""
    waiting = asyncio.ensure_future(_status(_method(channel, "unary_unary", "Never")(b"a")))
    begun = await _within(echo.begun)
    waiting.cancel()
    return [begun, await waiting, await _within(echo.abandoned)]


async def stream(channel: Any, echo: _Echo) -> Outcome:
    call = _method(channel, "stream_stream", "Echo")()
    outcome: Outcome = []
    for message in (b"a", LARGE, b"b"):
        await call.write(message)
        outcome.append(await call.read())
    await call.done_writing()
    outcome += [await call.read() is aio.EOF, await call.code(), await _status(call.write(b"c"))]
    return outcome


async def ended(channel: Any, echo: _Echo) -> Outcome:
    call = _method(channel, "stream_stream", "Ends")()
    await call.write(b"a")
    outcome = [await call.read(), await call.read() is aio.EOF, await call.code()]
    return [*outcome, await _status(call.write(b"b")), await _status(call.write(b"b"))]


async def failed(channel: Any, echo: _Echo) -> Outcome:
    call = _method(channel, "stream_stream", "Fails")()
    await call.write(b"a")
    outcome = [await call.read(), await _status(call.read()), await _status(call.read())]
    return [*outcome, await _status(call.write(b"b")), await call.code(), await call.details()]


async def stream_cancelled(channel: Any, echo: _Echo) -> Outcome:
    call = _method(channel, "stream_stream", "Echo")()
    await call.write(b"a")
    await call.read()
    reading = asyncio.ensure_future(_status(call.read()))
    await asyncio.sleep(0.05)
    call.cancel()
    return [await reading, await _status(call.read()), await _status(call.write(b"b"))]


async def held_back(channel: Any, echo: _Echo) -> Outcome:
    """A side that does not read is sent no more than it has room for, which holds the sender back."""
    call = _method(channel, "stream_stream", "Echo")()
    written = 0
    with suppress(TimeoutError):
        async with asyncio.timeout(0.5):
            while written < 200:
                await call.write(LARGE)
                written += 1
    return [written < 200]


async def nobody(channel: Any, echo: _Echo) -> Outcome:
    return [await _status(_method(channel, "unary_unary", "Once")(b"a", timeout=30.0))]


SCENES = (unary, deadline, cancelled, waiter_cancelled, stream, ended, failed, stream_cancelled, held_back)
Scene = Callable[[Any, _Echo], Awaitable[Outcome]]


async def _really(scene: Scene) -> Outcome:
    echo = _Echo()
    server = aio.server()
    server.add_generic_rpc_handlers((echo.handlers(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        outcome = await scene(channel, echo)
    await server.stop(None)
    return outcome


async def _with_nobody() -> Outcome:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        async with aio.insecure_channel(f"127.0.0.1:{free.getsockname()[1]}") as channel:
            return await nobody(channel, _Echo())


def _simulated(scene: Scene, *, listens: bool = True) -> Outcome:
    simulation = ClusterSimulation(1, 1)
    echo = _Echo()
    there, here = Process(Host(simulation, 101)), Process(Host(simulation, 102))
    SimLoop(there, simulation.random)
    loop = SimLoop(here, simulation.random)
    server = SimServer(there, simulation)
    server.add_generic_rpc_handlers((echo.handlers(),))
    server.add_insecure_port("there:1")
    if listens:
        server.start()
    outcome: list[asyncio.Task[Outcome]] = []

    async def play() -> Outcome:
        return await scene(SimChannel(here, simulation, "there:1"), echo)

    here.run(lambda: outcome.append(loop.create_task(play())))
    simulation.scheduler.run_until(60.0)
    return outcome[0].result()


@pytest.fixture(autouse=True)
def no_loop_is_left() -> Iterator[None]:
    yield
    asyncio._set_running_loop(None)


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: str(scene.__name__))
def test_it_does_what_grpc_does(scene: Scene) -> None:
    assert _simulated(scene) == asyncio.run(_really(scene))


def test_nobody_listens() -> None:
    really = asyncio.run(_with_nobody())
    assert _simulated(nobody, listens=False) == really == [(grpc.StatusCode.UNAVAILABLE, "")]
