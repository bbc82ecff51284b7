"""Limits on calls: streams at a time, floods of streams and calls, and the users that are shut out for them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc import aio

from broker.clock import SystemClock
from broker.config.config import BrokerConfig
from broker.net.calls import (
    MAX_CALL_RATE,
    MAX_REFUSED_CALL_RATE,
    MAX_SHORT_STREAM_RATE,
    MAX_UNUSED_STREAM_RATE,
    MOST_DELAY_MS,
    SHUT_OUT_MS,
    UNUSED_AFTER_S,
    CallLimits,
    CallRates,
    ShutOuts,
    note_used_stream,
)
from broker.net.connections import ConnectionLimits, ConnectionWatch, limits_of
from broker.net.interceptors import CALL_BYTES, RequestBounds, RewrittenHandlers, preceded
from broker.quotas.manager import Charging, QuotaManager
from broker.security.caller import Caller, caller
from broker.security.client_listener import UNKNOWN_HOST
from broker.security.identify import FAILED_LOGIN, NO_LOGIN, OUT_OF_TURN, Refusal
from raftlog._client.connections import from_grpc
from raftlog.errors import BrokerOverloaded, ThrottlingQuotaExceeded
from raftmeta.image import MetadataImage
from raftmeta.quotas import REQUEST_PERCENTAGE, QuotaEntity

CONFIG = {"node.id": 1, "log.dirs": "/nowhere", "listeners": "127.0.0.1:0"}
WAIT_S = 60.0
OWN = [("grpc.use_local_subchannel_pool", 1)]
"""A connection of its own."""
USED = b"used"
"""A message after which the stream counts as used."""


# Who is shut out


def flood(shut_outs: ShutOuts, name: str, from_ms: float, kind: str = MAX_SHORT_STREAM_RATE) -> float:
    """Make 200 calls in 200 ms where 50 may come at once, and then 10 a second; return for how long that shuts out."""
    for number in range(200):
        shut_outs.count(name, kind, 10, from_ms + number)
    return shut_outs.until_ms(name) - from_ms


def test_a_user_with_too_many_short_streams_is_shut_out_for_longer_each_time() -> None:
    shut_outs = ShutOuts()
    for number in range(1_000):  # for ever, at the rate
        shut_outs.count("User:alice", MAX_SHORT_STREAM_RATE, 10, 100 * number)
    assert shut_outs.until_ms("User:alice") == 0
    assert flood(shut_outs, "User:mallory", 1e6) == pytest.approx(SHUT_OUT_MS, abs=200), (
        "calls must not be counted while the user is shut out"
    )
    assert flood(shut_outs, "User:mallory", 1e6 + SHUT_OUT_MS + 1_000) == pytest.approx(2 * SHUT_OUT_MS, abs=200)
    assert flood(shut_outs, "User:mallory", 1e6 + 4 * SHUT_OUT_MS) == pytest.approx(4 * SHUT_OUT_MS, abs=200)
    late = flood(shut_outs, "User:mallory", 1e6 + 100 * SHUT_OUT_MS)
    assert late == pytest.approx(SHUT_OUT_MS, abs=200), (
        "after a long time the user must be shut out as briefly as the first time"
    )
    assert shut_outs.until_ms("User:alice") == 0


def test_kinds_of_calls_have_rates_of_their_own() -> None:
    shut_outs = ShutOuts()
    for number in range(40):
        for kind in (MAX_SHORT_STREAM_RATE, MAX_REFUSED_CALL_RATE):
            shut_outs.count("User:alice", kind, 10, number)
    assert shut_outs.until_ms("User:alice") == 0, (
        "the user must not be shut out: it made 80 calls, but no 50 of one kind"
    )
    flood(shut_outs, "User:alice", 100, MAX_REFUSED_CALL_RATE)
    assert shut_outs.limit_of("User:alice") == MAX_REFUSED_CALL_RATE


def test_a_user_that_is_shut_out_stays_so_however_many_others_are_followed() -> None:
    shut_outs = ShutOuts(most=10)
    flood(shut_outs, "User:mallory", 0)
    for number in range(1_000):
        shut_outs.count(f"10.0.{number >> 8}.{number & 255}", MAX_SHORT_STREAM_RATE, 10, 1_000)
    assert shut_outs.until_ms("User:mallory") == pytest.approx(SHUT_OUT_MS, abs=200)


def test_no_more_than_a_bound_are_shut_out_and_none_of_them_for_another() -> None:
    shut_outs = ShutOuts(most=10)
    for number in range(20):
        flood(shut_outs, f"User:{number}", 0)
    assert [shut_outs.until_ms(f"User:{number}") > 0 for number in range(20)] == [True] * 10 + [False] * 10
    flood(shut_outs, "User:late", 10 * SHUT_OUT_MS)
    assert shut_outs.until_ms("User:late") > 0, "the new user must take the place of users whose time is long over"


def test_calls_beyond_a_rate_have_to_wait() -> None:
    rates = CallRates(10, most=2)
    assert [rates.delay_ms("User:mallory", 0) for _ in range(50)] == [0.0] * 50
    assert [rates.delay_ms("User:mallory", 0) for _ in range(3)] == [100.0, 200.0, 300.0], (
        "each call beyond the rate must wait for its own turn"
    )
    assert rates.delay_ms("User:mallory", 101) == 0.0, "a refused call must not count"
    assert max(rates.delay_ms("User:mallory", 101) for _ in range(1_000)) == MOST_DELAY_MS
    assert rates.delay_ms("User:alice", 101) == 0.0
    assert rates.delay_ms("User:bob", 101) == 0.0, "the oldest user must make room for a new one"


def test_a_long_request_counts_as_several_calls() -> None:
    rates = CallRates(10)
    assert rates.delay_ms("User:mallory", 0, calls=100) == 0.0
    assert rates.delay_ms("User:mallory", 0) > 5_000 - 1, "the next one must wait until the long one is paid off"


def test_requests_of_kafka_clients_have_the_same_rate_and_are_held_for_their_debt() -> None:
    limits = call_limits(call_rate=10)
    mallory = Caller("User:mallory", "10.0.0.1")
    assert [limits.served(mallory) for _ in range(49)] == [0.0] * 49
    delays = [limits.served(mallory) for _ in range(5)]
    assert delays == sorted(delays)
    assert delays[-1] > 300
    assert limits.refused[MAX_CALL_RATE] >= 4
    assert max(limits.served(mallory) for _ in range(1_000)) <= MOST_DELAY_MS, (
        f"no delay may exceed {MOST_DELAY_MS} ms, however many connections the user has"
    )
    assert limits.served(Caller("User:ANONYMOUS", "10.0.0.1")) == 0.0
    assert [limits.served(Caller("Node:1", "10.0.0.1")) for _ in range(100)] == [0.0] * 100


def test_kafka_clients_are_shut_out_by_user_or_without_logins_by_network() -> None:
    shut_outs, clock = ShutOuts(), SystemClock()
    limits = call_limits(shut_outs=shut_outs)
    for name in ("User:mallory", "10.0.0.2", "Node:1", UNKNOWN_HOST):
        for _ in range(100):
            shut_outs.count(name, MAX_REFUSED_CALL_RATE, 1.0, clock.monotonic_ms())
    assert "(max.refused.call.rate)" in str(limits.refusal_of(Caller("User:mallory", "10.0.0.1")))
    assert limits.refusal_of(Caller("User:ANONYMOUS", "10.0.0.2")) is not None
    for other in (
        Caller("User:alice", "10.0.0.2"),
        Caller("User:ANONYMOUS", "10.0.0.1"),
        Caller("User:ANONYMOUS", UNKNOWN_HOST),
        Caller("Node:1", "10.0.0.1"),
    ):
        assert limits.refusal_of(other) is None, f"{other} must not be shut out"


def test_messages_of_group_members_have_the_rate_by_themselves() -> None:
    limits = call_limits(call_rate=10)
    mallory, stranger = Caller("User:mallory", "10.0.0.1"), Caller()
    assert [limits.member_said(mallory, "10.0.0.1", 100) for _ in range(49)] == [0.0] * 49
    assert [limits.member_said(mallory, "10.0.0.1", 100) for _ in range(5)][-1] > 300
    assert limits.served(mallory) == 0.0, "streams of a member must not delay the same user's other calls"
    assert limits.member_said(Caller("User:alice", "10.0.0.1"), "10.0.0.1", 100) == 0.0
    assert [limits.member_said(stranger, "10.0.0.2", 100) for _ in range(54)][-1] > 300
    assert limits.member_said(stranger, "10.0.0.3", 100) == 0.0
    assert [limits.member_said(stranger, UNKNOWN_HOST, 100) for _ in range(60)] == [0.0] * 60
    assert limits.member_said(Caller("User:bob", "10.0.0.1"), "10.0.0.1", 60 * CALL_BYTES) > 300, "one long commit"


def test_calls_without_a_login_close_their_connections_beyond_a_rate_and_shut_nobody_else_out() -> None:
    """A call that is refused for want of a login costs as much as others, and anyone can make it."""
    limits = call_limits(refused_rate=10)
    ended: list[str] = []
    limits.end_connection = lambda peer, limit: ended.append(peer)
    for _ in range(200):
        limits.refused_stranger("ipv4:10.0.0.1:1", "10.0.0.1", OUT_OF_TURN)
    assert len(ended) > 100
    for _ in range(30):
        limits.refused_stranger("ipv4:10.0.0.2:1", "10.0.0.2", OUT_OF_TURN)
        limits.refused_stranger("ipv4:127.0.0.1:1", UNKNOWN_HOST, OUT_OF_TURN)
    assert set(ended) == {"ipv4:10.0.0.1:1"}
    assert limits.shut_out("10.0.0.1", "10.0.0.1") is None
    assert limits.shut_out("User:alice", "10.0.0.1") is None


@pytest.mark.parametrize(
    ("cost", "of_connection", "of_network"),
    [(OUT_OF_TURN, 21, 51), (NO_LOGIN, 21, 3), (FAILED_LOGIN, 5, 1)],
    ids=["out of turn", "without a login", "failed login"],
)
def test_what_costs_a_broker_more_counts_more(cost: Refusal, of_connection: int, of_network: int) -> None:
    """`of_connection` refusals of a connection are free, then its network may have `of_network`."""
    limits = call_limits(refused_rate=10)
    ended: list[int] = []
    for number in range(1, 201):
        limits.end_connection = lambda peer, limit, number=number: ended.append(number)  # type: ignore[misc]
        limits.refused_stranger("ipv4:10.0.0.1:1", "10.0.0.1", cost)
    assert ended[0] == of_connection + of_network + 1


def test_clients_of_a_network_with_a_flood_keep_their_connections_while_they_log_in_again() -> None:
    """After a restart of a broker all of them come with old tokens, and each is refused for every call that it has."""
    limits = call_limits(refused_rate=10)
    ended: list[str] = []
    limits.end_connection = lambda peer, limit: ended.append(peer)
    for number in range(2, 2_000):
        for _ in range(10):
            limits.refused_stranger(f"ipv4:10.0.0.1:{number}", "10.0.0.1", NO_LOGIN)
    assert not ended
    for _ in range(200):
        limits.refused_stranger("ipv4:10.0.0.1:1", "10.0.0.1", NO_LOGIN)
    for number in range(2, 2_000):
        limits.refused_stranger(f"ipv4:10.0.0.1:{number}", "10.0.0.1", NO_LOGIN)
    assert set(ended) == {"ipv4:10.0.0.1:1"}


# The interceptor


class _As(RewrittenHandlers):
    """Identifies every caller as the user that the metadata names."""

    def rewrite(self, method: str, handler: Any) -> Any:
        async def identify(context: Any) -> None:
            named = dict(context.invocation_metadata())
            caller.set(Caller(named["user"], named["host"]))

        return preceded(handler, identify)


def handlers() -> tuple[grpc.GenericRpcHandler, grpc.GenericRpcHandler]:
    async def echo(request: bytes, context: Any) -> bytes:
        return request

    async def stream(requests: Any, context: Any) -> None:
        async for request in requests:
            await context.write(request)

    async def fetch(requests: Any, context: Any) -> None:
        async for request in requests:
            if request == USED:
                note_used_stream()
            await context.write(request)

    async def over_quota(requests: Any, context: Any) -> None:
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "over its quota")

    return grpc.method_handlers_generic_handler(
        "test.Echo",
        {
            "Call": grpc.unary_unary_rpc_method_handler(echo),
            "Bounded": grpc.unary_unary_rpc_method_handler(echo, request_deserializer=bytes),
            "Stream": grpc.stream_stream_rpc_method_handler(stream),
            "OverQuota": grpc.stream_stream_rpc_method_handler(over_quota),
        },
    ), grpc.method_handlers_generic_handler("raftlog.v1.Log", {"Fetch": grpc.stream_stream_rpc_method_handler(fetch)})


def call_limits(
    most: int = 1_000,
    *,
    short_rate: float = 1e6,
    unused_rate: float = 1e6,
    call_rate: float = 1e6,
    refused_rate: float = 1e6,
    shut_outs: ShutOuts | None = None,
) -> CallLimits:
    return CallLimits(
        most,
        most,
        SystemClock(),
        short_rate=short_rate,
        unused_rate=unused_rate,
        call_rate=call_rate,
        refused_rate=refused_rate,
        shut_outs=shut_outs,
    )


@asynccontextmanager
async def serving(limits: CallLimits, *inner: aio.ServerInterceptor) -> AsyncIterator[int]:
    running = aio.server(interceptors=[_As(), limits, *inner])
    running.add_generic_rpc_handlers(handlers())
    port = running.add_insecure_port("127.0.0.1:0")
    await running.start()
    try:
        yield port
    finally:
        await running.stop(0)


@asynccontextmanager
async def watched(port: int, limits: CallLimits) -> AsyncIterator[ConnectionLimits]:
    """Lets the limits close connections."""
    connections = limits_of(BrokerConfig.from_values(CONFIG), MetadataImage)
    watch = ConnectionWatch(port, connections, SystemClock())
    limits.end_connection, limits.is_connected = watch.end, watch.is_connected
    watching = asyncio.create_task(watch.run())
    try:
        yield connections
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def until(is_so: Any) -> None:
    async with asyncio.timeout(WAIT_S):
        while not is_so():  # noqa: ASYNC110 # what it waits for is no event of this process
            await asyncio.sleep(0.02)


def metadata_of(who: str, where: str = "127.0.0.1") -> tuple[tuple[str, str], ...]:
    return ("user", who), ("host", where)


async def opened(channel: aio.Channel, who: str, where: str = "127.0.0.1") -> Any:
    """Open a stream, and wait until it is served."""
    method: Any = channel.stream_stream("/test.Echo/Stream")
    call = method(metadata=metadata_of(who, where))
    await call.write(b"x")
    assert await asyncio.wait_for(call.read(), WAIT_S) == b"x"
    return call


async def call_as(channel: aio.Channel, who: str) -> None:
    method: Any = channel.unary_unary("/test.Echo/Call")
    assert await method(b"x", metadata=metadata_of(who), timeout=WAIT_S) == b"x"


@pytest.mark.parametrize(
    ("user", "host", "limit"),
    [("User:mallory", "10.0.0.2", "max.streams.per.user"), ("User:ANONYMOUS", "10.0.0.2", "max.streams.per.ip")],
)
def test_streams_of_a_user_or_an_address_are_bounded(
    user: str, host: str, limit: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        limits = call_limits(10, short_rate=10)  # 50 at once; refusals are not among them
        async with serving(limits) as port, aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            method: Any = channel.stream_stream("/test.Echo/Stream")

            async def begun(who: str, where: str) -> Any:
                call = method(metadata=(("user", who), ("host", where)))
                with contextlib.suppress(aio.AioRpcError, asyncio.InvalidStateError):  # `read` tells
                    await call.write(b"x")
                return call

            hostile = [await begun(user, host) for _ in range(10)]
            # A write that begins after the refusal hides its code.
            hostile += [method(metadata=(("user", user), ("host", host))) for _ in range(90)]
            answers = await asyncio.gather(*(each.read() for each in hostile), return_exceptions=True)
            refusals = [answer for answer in answers if isinstance(answer, aio.AioRpcError)]
            assert answers.count(b"x") == 10
            assert limits.refused == {limit: 90}
            assert len(refusals) == 90
            for refusal in refusals:
                assert refusal.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                told = from_grpc(refusal, "broker")
                assert isinstance(told, BrokerOverloaded), "the client must get BrokerOverloaded, which it retries"
                assert limit in str(told)
            honest = await begun("User:alice", "10.0.0.3")
            assert await asyncio.wait_for(honest.read(), WAIT_S) == b"x"
            for each in (*hostile, honest):
                each.cancel()
            await until(lambda: limits.open == 0)
            again = await begun(user, host)
            assert await asyncio.wait_for(again.read(), WAIT_S) == b"x"
            again.cancel()

    with caplog.at_level(logging.WARNING, "broker.net.calls"):
        asyncio.run(work())
    told = [record for record in caplog.records if record.name == "broker.net.calls"]
    assert [vars(record)["limit"] for record in told] == [limit]


def test_the_connections_of_a_user_that_opens_and_ends_streams_too_fast_are_closed() -> None:
    """Others go on, also from the same address; and so do streams that stay open, however many."""

    async def work() -> None:
        limits = call_limits(short_rate=10)
        async with (
            serving(limits) as port,
            watched(port, limits) as connections,
            aio.insecure_channel(f"127.0.0.1:{port}", OWN) as theirs,
            aio.insecure_channel(f"127.0.0.1:{port}", OWN) as honest,
        ):
            kept = [await opened(honest, "User:alice") for _ in range(200)]
            refusals = []
            for _ in range(200):
                try:
                    (await opened(theirs, "User:mallory")).cancel()
                except aio.AioRpcError as refused:
                    refusals.append(refused)
            assert isinstance(told := from_grpc(refusals[0], "broker"), BrokerOverloaded), (
                "the client must get BrokerOverloaded before it is disconnected"
            )
            assert "opened and ended streams too fast" in str(told)
            await until(lambda: connections.refused[MAX_SHORT_STREAM_RATE])
            assert limits.refused[MAX_SHORT_STREAM_RATE] >= 1
            with pytest.raises(aio.AioRpcError):
                await call_as(theirs, "User:mallory")
            for call in kept:
                await call.write(b"y")
                assert await asyncio.wait_for(call.read(), WAIT_S) == b"y"
            (await opened(honest, "User:alice")).cancel()
            await call_as(honest, "User:alice")

    asyncio.run(work())


async def given_up(channel: aio.Channel, who: str, how_many: int, message: bytes) -> None:
    """Open streams of fetch one after the other, send a message and give each up."""
    method: Any = channel.stream_stream("/raftlog.v1.Log/Fetch")
    for _ in range(how_many):
        call = method(metadata=metadata_of(who))
        await call.write(message)
        assert await asyncio.wait_for(call.read(), WAIT_S) == message
        call.cancel()


@pytest.mark.skipif(not hasattr(socket, "TCP_INFO"), reason="whether a connection is there is known on Linux only")
def test_a_user_that_gives_up_streams_without_using_them_is_shut_out_sooner() -> None:
    async def work() -> None:
        shut_outs = ShutOuts()
        limits = call_limits(unused_rate=10, shut_outs=shut_outs)  # 50 at once, and 20 of each connection
        async with (
            serving(limits) as port,
            watched(port, limits) as connections,
            aio.insecure_channel(f"127.0.0.1:{port}", OWN) as theirs,
            aio.insecure_channel(f"127.0.0.1:{port}", OWN) as honest,
        ):
            stays = await opened(theirs, "User:mallory")
            await given_up(honest, "User:alice", 1, USED)
            await until(lambda: connections.total == 2)
            await given_up(honest, "User:alice", 300, USED)
            await given_up(honest, "User:alice", 60, b"not used")
            with contextlib.suppress(aio.AioRpcError):
                await given_up(theirs, "User:mallory", 200, b"not used")
            await until(lambda: shut_outs.until_ms("User:mallory") > 0)
            assert shut_outs.until_ms("User:alice") == 0
            assert shut_outs.limit_of("User:mallory") == MAX_UNUSED_STREAM_RATE
            refusal = limits.shut_out("User:mallory", "127.0.0.1")
            assert "given up streams without using them too fast (max.unused.stream.rate)" in str(refusal)
            stays.cancel()

    asyncio.run(work())


@pytest.mark.parametrize("ends", ["cut", "closed"])
def test_unused_streams_that_end_with_their_connection_are_not_given_up(ends: str) -> None:
    """A network breaks, or clients are stopped, which give up their streams before they close the connection."""

    async def work() -> None:
        shut_outs = ShutOuts()
        limits = call_limits(unused_rate=1, shut_outs=shut_outs)
        sides: list[asyncio.StreamWriter] = []

        async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(ConnectionError):
                while data := await reader.read(1 << 16):
                    writer.write(data)
            writer.close()

        async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            onwards, back = await asyncio.open_connection("127.0.0.1", port)
            sides.extend((writer, back))
            await asyncio.gather(forward(reader, back), forward(onwards, writer))

        async with serving(limits) as port, watched(port, limits) as connections:
            network = await asyncio.start_server(relay, "127.0.0.1")
            between = network.sockets[0].getsockname()[1]
            async with network, aio.insecure_channel(f"127.0.0.1:{between}", OWN) as channel:
                method: Any = channel.stream_stream("/raftlog.v1.Log/Fetch")
                for _ in range(90):
                    call = method(metadata=metadata_of("User:alice"))
                    await call.write(b"not used")
                    assert await asyncio.wait_for(call.read(), WAIT_S) == b"not used"
                await until(lambda: connections.total == 1)
                assert limits.open > 0
                if ends == "cut":
                    for each in sides:
                        each.transport.abort()
                else:
                    await channel.close()
                    del method, call  # which keep the connection
                await until(lambda: limits.open == 0)
                await asyncio.sleep(UNUSED_AFTER_S + 0.5)
        assert shut_outs.until_ms("User:alice") == 0

    asyncio.run(work())


def test_a_connection_that_was_seen_is_closed_with_the_first_refused_call() -> None:
    """No look is needed for it, so no further call of it arrives."""

    async def work() -> None:
        shut_outs = ShutOuts()
        limits = call_limits(10, short_rate=10, shut_outs=shut_outs)
        connections = ConnectionLimits(most=10, per_ip=10)
        async with serving(limits) as port, aio.insecure_channel(f"127.0.0.1:{port}", OWN) as theirs:
            watch = ConnectionWatch(port, connections, SystemClock())
            limits.end_connection = watch.end
            stays = await opened(theirs, "User:mallory")
            async with asyncio.timeout(WAIT_S):
                while not connections.total:
                    await watch.look()
            flood(shut_outs, "User:mallory", SystemClock().monotonic_ms())
            with pytest.raises(aio.AioRpcError) as refused:
                await call_as(theirs, "User:mallory")
            assert isinstance(from_grpc(refused.value, "broker"), BrokerOverloaded)
            with pytest.raises(aio.AioRpcError):  # with the connection, which ends once the client has its status
                await asyncio.wait_for(stays.read(), WAIT_S)
            assert connections.refused == {MAX_SHORT_STREAM_RATE: 1}

    asyncio.run(work())


def test_the_connection_of_a_call_that_was_gone_before_its_refusal_is_closed() -> None:
    """gRPC no longer names its peer then, and writes whatever is raised to the log, with a traceback."""

    class Gone:
        def __init__(self) -> None:
            self.is_over = False

        def peer(self) -> str:
            return "" if self.is_over else "ipv4:10.0.0.1:4321"

        async def abort(self, *_: object, **__: object) -> None:
            self.is_over = True
            raise aio.AbortError

    shut_outs = ShutOuts()
    limits = call_limits(short_rate=10, shut_outs=shut_outs)
    ended: list[str] = []
    limits.end_connection = lambda peer, limit: ended.append(peer)
    flood(shut_outs, "User:mallory", SystemClock().monotonic_ms())
    with pytest.raises(aio.AbortError):
        asyncio.run(limits.turn_out(Gone(), "User:mallory", "10.0.0.1"))
    assert ended == ["ipv4:10.0.0.1:4321"]


def test_streams_that_end_for_a_quota_are_not_short() -> None:
    async def work() -> None:
        shut_outs = ShutOuts()
        limits = call_limits(short_rate=10, shut_outs=shut_outs)
        async with serving(limits) as port, aio.insecure_channel(f"127.0.0.1:{port}", OWN) as channel:
            method: Any = channel.stream_stream("/test.Echo/OverQuota")
            for _ in range(200):
                call = method(metadata=metadata_of("User:alice"))
                assert await asyncio.wait_for(call.code(), WAIT_S) is grpc.StatusCode.RESOURCE_EXHAUSTED
            await until(lambda: limits.open == 0)
            assert shut_outs.until_ms("User:alice") == 0
            await call_as(channel, "User:alice")

    asyncio.run(work())


def test_refusals_of_many_clients_that_wait_in_between_shut_nobody_out() -> None:
    """Such as all clients of a user after a restart: each is refused now and then, and all together are very many."""

    class Peer:
        def __init__(self, number: int) -> None:
            self.number = number

        def peer(self) -> str:
            return f"ipv4:10.0.0.1:{self.number}"

    shut_outs = ShutOuts()
    limits = call_limits(refused_rate=10, shut_outs=shut_outs)
    caller.set(Caller("User:alice", "10.0.0.1"))
    for number in range(2_000):
        for _ in range(5):
            limits.count_refused(Peer(number))
    assert shut_outs.until_ms("User:alice") == 0
    for _ in range(500):
        limits.count_refused(Peer(0))
    assert shut_outs.until_ms("User:alice") > 0, "the user must be shut out if one connection calls without waiting"


def test_a_user_that_goes_on_with_refused_streams_is_shut_out(caplog: pytest.LogCaptureFixture) -> None:
    """Refusals one by one cost as much as streams. Beyond their rate the connection is closed."""

    async def work() -> None:
        limits = call_limits(1, refused_rate=10)
        async with (
            serving(limits) as port,
            watched(port, limits) as connections,
            aio.insecure_channel(f"127.0.0.1:{port}", OWN) as channel,
        ):
            await opened(channel, "User:mallory")
            method: Any = channel.stream_stream("/test.Echo/Stream")
            told = set()
            for _ in range(200):
                call = method(metadata=metadata_of("User:mallory", "10.0.0.9"))
                told.add(await asyncio.wait_for(call.code(), WAIT_S))
                if connections.refused:
                    break
            await until(lambda: connections.refused[MAX_REFUSED_CALL_RATE])
            assert grpc.StatusCode.RESOURCE_EXHAUSTED in told
            assert limits.refused["max.streams.per.user"] > 50

    with caplog.at_level(logging.WARNING, "broker.net.calls"):
        asyncio.run(work())
    told = [vars(record)["limit"] for record in caplog.records if record.name == "broker.net.calls"]
    assert told == ["max.streams.per.user", MAX_REFUSED_CALL_RATE], "the warning must be logged once a minute"


def test_calls_beyond_the_rate_are_refused_with_the_time_to_wait_and_then_shut_out() -> None:
    async def work() -> None:
        limits = call_limits(call_rate=10, refused_rate=10)
        async with (
            serving(limits) as port,
            watched(port, limits) as connections,
            aio.insecure_channel(f"127.0.0.1:{port}", OWN) as theirs,
            aio.insecure_channel(f"127.0.0.1:{port}", OWN) as honest,
        ):
            for _ in range(50):
                await call_as(theirs, "User:mallory")
            with pytest.raises(aio.AioRpcError) as refused:
                await asyncio.gather(*(call_as(theirs, "User:mallory") for _ in range(10)))
            told = from_grpc(refused.value, "broker")
            assert isinstance(told, ThrottlingQuotaExceeded)
            assert told.throttle_time_ms > 0
            assert not connections.refused
            await asyncio.gather(*(call_as(theirs, "User:mallory") for _ in range(300)), return_exceptions=True)
            await until(lambda: connections.refused[MAX_REFUSED_CALL_RATE])
            assert limits.refused[MAX_CALL_RATE] >= 51
            await call_as(honest, "User:alice")

    asyncio.run(work())


def test_a_long_request_is_paid_off_before_the_next_call() -> None:
    async def work() -> None:
        limits = call_limits(call_rate=10)
        async with serving(limits, RequestBounds()) as port, aio.insecure_channel(f"127.0.0.1:{port}", OWN) as channel:
            method: Any = channel.unary_unary("/test.Echo/Bounded")
            for size in (1, CALL_BYTES * 100):
                assert len(await method(bytes(size), metadata=metadata_of("User:mallory"), timeout=WAIT_S)) == size
            with pytest.raises(aio.AioRpcError) as refused:
                await method(b"x", metadata=metadata_of("User:mallory"), timeout=WAIT_S)
            told = from_grpc(refused.value, "broker")
            assert isinstance(told, ThrottlingQuotaExceeded)
            assert told.throttle_time_ms > 1_000

    asyncio.run(work())


def test_calls_that_a_quota_refuses_are_counted_among_the_refused_ones() -> None:
    """A client that waits as it is told is never shut out; one that goes on regardless is."""

    async def work() -> None:
        image = MetadataImage(quotas={QuotaEntity(user="mallory"): {REQUEST_PERCENTAGE: 1.0}})
        quotas = QuotaManager(lambda: image, SystemClock(), 1_000.0)
        quotas.worked(Caller("User:mallory"), 60_000.0)  # a debt of more than an hour
        limits = call_limits(refused_rate=10)
        async with (
            serving(limits, Charging(quotas, limits.count_refused)) as port,
            watched(port, limits) as connections,
            aio.insecure_channel(f"127.0.0.1:{port}", OWN) as channel,
        ):
            with pytest.raises(aio.AioRpcError) as refused:
                await call_as(channel, "User:mallory")
            assert isinstance(from_grpc(refused.value, "broker"), ThrottlingQuotaExceeded)
            await asyncio.gather(*(call_as(channel, "User:mallory") for _ in range(200)), return_exceptions=True)
            await until(lambda: connections.refused[MAX_REFUSED_CALL_RATE])

    asyncio.run(work())
