"""Limits on connections and streams: the core, the watch over gRPC's connections, and streams beyond a limit."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import random
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc import aio

from broker.clock import SystemClock
from broker.config.config import BrokerConfig
from broker.net import connections
from broker.net.connections import (
    NO_LIMIT,
    ConnectionLimits,
    ConnectionWatch,
    Newcomer,
    Newcomers,
    SynFilter,
    UnusedConnections,
    limits_of,
)
from broker.net.listeners import EitherFront, server_options
from raftlog.errors import InvalidConfig
from raftmeta.image import MetadataImage
from raftmeta.quotas import CONNECTION_CREATION_RATE, DEFAULT, QuotaEntity

CONFIG = {"node.id": 1, "log.dirs": "/nowhere", "listeners": "127.0.0.1:0"}
WAIT_S = 60.0


def config(**values: Any) -> BrokerConfig:
    return BrokerConfig.from_values({**CONFIG, **{key.replace("_", "."): value for key, value in values.items()}})


# The core


def test_connections_are_counted_in_all_and_by_address() -> None:
    limits = ConnectionLimits(most=5, per_ip=2, overrides={"::ffff:10.0.0.9": 4})
    assert [limits.open("10.0.0.1", 0) for _ in range(3)] == ["", "", "max.connections.per.ip"]
    assert [limits.open("10.0.0.9", 0) for _ in range(4)] == ["", "", "", "max.connections"]
    limits.close("10.0.0.1")
    assert limits.open("10.0.0.9", 0) == ""
    assert limits.total == 5
    assert limits.refused == {"max.connections.per.ip": 1, "max.connections": 1}


def test_an_address_opens_connections_at_its_rate() -> None:
    limits = ConnectionLimits(most=1_000, per_ip=1_000, rate=lambda host: 2.0 if host == "10.0.0.1" else None)
    assert [limits.open("10.0.0.1", 0) for _ in range(3)] == ["", "", "connection_creation_rate"]
    assert all(limits.open("10.0.0.2", 0) == "" for _ in range(100))
    opened = sum(limits.open("10.0.0.1", now_ms) == "" for now_ms in range(0, 100_000, 10))
    assert opened == pytest.approx(200, rel=0.01), "refused attempts must not count, so that 2 of a second are accepted"


def test_the_rate_is_that_of_the_quota_or_else_of_the_config() -> None:
    quotas = {
        QuotaEntity(ip=DEFAULT): {CONNECTION_CREATION_RATE: 3.0},
        QuotaEntity(ip="10.0.0.1"): {CONNECTION_CREATION_RATE: 1.0},
    }

    def at_once(host: str, image: MetadataImage, **values: Any) -> int:
        limits = limits_of(config(quota_window_num=1, **values), lambda: image)
        return sum(limits.open(host, 0) == "" for _ in range(50))

    assert at_once("10.0.0.1", MetadataImage(quotas=quotas)) == 1
    assert at_once("10.0.0.2", MetadataImage(quotas=quotas)) == 3
    assert at_once("10.0.0.2", MetadataImage()) == 50
    assert at_once("10.0.0.2", MetadataImage(), max_connection_creation_rate=7) == 7


def test_a_refusal_is_logged_once_a_minute_for_each_address(caplog: pytest.LogCaptureFixture) -> None:
    limits = ConnectionLimits(most=1_000, per_ip=1)
    with caplog.at_level(logging.WARNING):
        for now_ms in (0, 1, 60_000, 60_002, 119_000):
            limits.open("10.0.0.1", now_ms)
            limits.open("10.0.0.2", now_ms)
    assert [vars(record)["host"] for record in caplog.records] == ["10.0.0.1", "10.0.0.2"] * 2


@pytest.mark.parametrize("override", ["10.0.0.1", "host:5", "10.0.0.1:many", "10.0.0.1:-1"])
def test_an_override_that_is_none_is_refused(override: str) -> None:
    with pytest.raises(InvalidConfig, match=r"max\.connections\.per\.ip\.overrides"):
        config(max_connections_per_ip_overrides=override)


def test_overrides_of_both_families() -> None:
    limits = limits_of(config(max_connections_per_ip_overrides="10.0.0.1:1,[fd00::1]:2"), MetadataImage)
    assert [limits.open("10.0.0.1", 0) == "" for _ in range(2)] == [True, False]
    assert [limits.open("fd00::1", 0) == "" for _ in range(3)] == [True, True, False]


# Connections that come to nothing


def test_a_network_is_held_back_beyond_its_burst_and_each_second_a_little_less() -> None:
    unused = UnusedConnections(2.0)
    for _ in range(20):
        unused.opened("10.0.0.1", 0)
    assert unused.dropped(0) == {}, "ten seconds' worth may come at once"
    for _ in range(5):
        unused.opened("10.0.0.1", 0)
        unused.opened("10.0.0.2", 0)
    assert unused.dropped(0) == {"10.0.0.1": 0.5}
    for _ in range(1_000):
        unused.opened("10.0.0.1", 0)
    assert unused.dropped(5_000) == {"10.0.0.1": 1.0}
    assert unused.dropped(7_500) == {"10.0.0.1": 0.5}, "whatever it has opened, all is dropped for five seconds at most"
    assert unused.dropped(10_000) == {}


def test_connections_on_which_a_user_logs_in_are_not_held_back() -> None:
    unused = UnusedConnections(5.0)
    for number in range(10_000):
        unused.opened("10.0.0.1", number)
        if number >= 40:
            unused.used("10.0.0.1", number)
        assert unused.dropped(number) == {}
    unused.used("10.0.0.2", 0)
    assert unused.dropped(0) == {}


@pytest.mark.parametrize("attempts_per_s", [20, 200, 2_000])
def test_as_many_unused_connections_get_through_as_the_rate_allows(attempts_per_s: int) -> None:
    unused, chance, let_in = UnusedConnections(5.0), random.Random(1), 0
    for look in range(1_600):
        share = unused.dropped(look * 100.0).get("10.0.0.1", 0.0)
        for _ in range(attempts_per_s // 10):
            if chance.random() >= share:
                unused.opened("10.0.0.1", look * 100.0)
                let_in += look >= 600  # the burst is over by then
    assert 450 <= let_in <= 550, "five a second, for a hundred seconds"


def test_the_networks_that_open_most_are_held_back_and_a_filter_has_room_for_them() -> None:
    unused = UnusedConnections(1.0)
    networks = [f"10.0.{number >> 8}.{number & 255}" for number in range(1_000)]
    for number, network in enumerate(networks):
        for _ in range(11 if number < 900 else 15):
            unused.opened(network, 0)
    dropped = unused.dropped(0)
    assert len(dropped) == connections.MAX_HELD_NETWORKS
    assert {network for network, share in dropped.items() if share == 1.0} == set(networks[900:])


LINUX_ONLY = pytest.mark.skipif(sys.platform != "linux", reason="the filter is one of Linux' kernel")


@LINUX_ONLY
@pytest.mark.parametrize(
    ("family", "address", "client", "networks"),
    [
        (socket.AF_INET, "127.0.0.1", "127.0.0.2", ["10.0.0.1", "127.0.0.2", "fd00::/64"]),
        (socket.AF_INET6, "::ffff:127.0.0.1", "::ffff:127.0.0.2", ["fd00::/64", "127.0.0.2", "::/64"]),
        (socket.AF_INET6, "::1", "::1", ["0.0.0.1", "fd00::/64", "::/64"]),
    ],
    ids=["IPv4", "IPv4 at an IPv6 socket", "IPv6"],
)
def test_the_kernel_drops_attempts_of_some_networks(
    family: socket.AddressFamily, address: str, client: str, networks: list[str]
) -> None:
    """Connections that exist go on, also those that were accepted while the filter was there."""
    with contextlib.ExitStack() as stack:

        def attempt(source: str) -> socket.socket | None:
            made = stack.enter_context(contextlib.closing(socket.socket(family)))
            try:
                made.bind((source, 0))
                made.settimeout(0.3)
                made.connect((address, listening.getsockname()[1]))
            except TimeoutError:
                return None
            return made

        try:
            listening = stack.enter_context(
                socket.create_server((address, 0), family=family, dualstack_ipv6=family == socket.AF_INET6)
            )
        except OSError as error:
            pytest.skip(f"no socket at {address}: {error}")
        listeners = [(listening.fileno(), os.fstat(listening.fileno()).st_ino)]
        filter_ = SynFilter()
        made = [attempt(client)]
        filter_.drop(listeners, {networks[-1]: 1e-9})
        made.append(attempt(client))
        filter_.drop(listeners, dict.fromkeys(networks, 1.0))
        assert attempt(client) is None
        if client != address:
            made.append(attempt(address))
        many = {f"10.{number}.0.1": 0.5 for number in range(64)} | {f"fd00:{number}::/64": 0.5 for number in range(64)}
        assert len(many) == connections.MAX_HELD_NETWORKS
        filter_.drop(listeners, many)
        made.append(attempt(client))
        for each in made:
            assert each is not None
            accepted, _ = listening.accept()
            with accepted:
                each.sendall(b"here")
                assert accepted.recv(4) == b"here"
        filter_.drop(listeners, {})
        assert attempt(client)


@LINUX_ONLY
def test_a_kernel_that_takes_no_filter_is_asked_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The shares change with each look, ten times a second, for as long as a flood lasts."""
    asked = []

    def refuse(own: socket.socket, dropped: dict[str, float]) -> None:
        asked.append(dropped)
        raise OSError(errno.ENOMEM, "too large a filter")

    monkeypatch.setattr(SynFilter, "_attach", staticmethod(refuse))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listeners = [(listening.fileno(), os.fstat(listening.fileno()).st_ino)]
        filter_ = SynFilter()
        for share in (0.1, 0.2, 0.3):
            filter_.drop(listeners, {"10.0.0.1": share})
    assert asked == [{"10.0.0.1": 0.1}]
    assert [record.getMessage() for record in caplog.records] == [
        "the kernel does not hold floods of connections back: too large a filter"
    ]


@LINUX_ONLY
async def test_silent_connections_beyond_the_rate_do_not_reach_the_listener() -> None:
    limits = ConnectionLimits(most=1_000, per_ip=1_000)
    with contextlib.ExitStack() as stack:
        async with watched(limits, 60_000.0, unused_rate=2.0) as (watch, clock, port):

            def opened(number: int, source: str = "127.0.0.2") -> list[socket.socket]:
                return [stack.enter_context(contextlib.closing(connect(port, source))) for _ in range(number)]

            def refused() -> bool:
                try:
                    socket.create_connection(("127.0.0.1", port), 0.3, ("127.0.0.2", 0)).close()
                except TimeoutError:
                    return True
                return False

            honest = opened(30)
            await look(watch, limits, 1, 30)
            for each in honest:
                watch.logged_in(peer_of(each))
            await watch.look()
            silent = opened(31)
            await look(watch, limits, 2, 61)
            assert limits.refused == {"max.unused.connection.rate": 2}, (
                "it was held back for a moment before the logins"
            )
            assert refused()
            assert opened(1, "127.0.0.3")
            assert all(map(is_open, honest + silent))
            clock.at_ms = 10_000.0
            await watch.look()
            assert opened(1)


@LINUX_ONLY
async def test_connections_that_had_to_be_ended_without_a_login_count_more_than_silent_ones() -> None:
    """Each brought hundreds of refused calls. Those on which a user had logged in do not count."""
    limits = ConnectionLimits(most=1_000, per_ip=1_000)
    with contextlib.ExitStack() as stack:
        async with watched(limits, 60_000.0, unused_rate=2.0) as (watch, _, port):
            made = [stack.enter_context(contextlib.closing(connect(port, "127.0.0.2"))) for _ in range(6)]
            await look(watch, limits, 0, 6)
            for honest in made[:3]:
                watch.logged_in(peer_of(honest))
            await watch.look()
            for each in made[:4]:
                watch.end(peer_of(each), "max.refused.call.rate")
            await watch.look()
            assert "max.unused.connection.rate" not in limits.refused
            for each in made[4:]:
                watch.end(peer_of(each), "max.refused.call.rate")
            await watch.look()
            assert limits.refused["max.unused.connection.rate"] == 1
            with pytest.raises(TimeoutError):
                socket.create_connection(("127.0.0.1", port), 0.3, ("127.0.0.2", 0)).close()


@LINUX_ONLY
async def test_connections_beyond_another_limit_do_not_reach_the_listener_for_ever() -> None:
    limits = ConnectionLimits(most=1_000, per_ip=1)
    with contextlib.ExitStack() as stack:
        async with watched(limits, None, unused_rate=1.0) as (watch, _, port):
            for _ in range(17):
                stack.enter_context(contextlib.closing(connect(port, "127.0.0.2")))
            await look(watch, limits, 17, 1)
            assert limits.refused == {"max.connections.per.ip": 16, "max.unused.connection.rate": 1}
            with pytest.raises(TimeoutError):
                socket.create_connection(("127.0.0.1", port), 0.3, ("127.0.0.2", 0)).close()


# gRPC's connections


async def until(is_so: Any) -> None:
    async with asyncio.timeout(WAIT_S):
        while not is_so():  # noqa: ASYNC110 # what it waits for is no event of this process
            await asyncio.sleep(0.02)


def is_open(connection: socket.socket) -> bool:
    """Read the received bytes; return False at the end."""
    try:
        while connection.recv(65_536):
            pass
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def connect(port: int, source: str) -> socket.socket:
    """Connect from an address of its own, whose port the kernel chooses.

    That may be the number of the listener's port, at another address. The watch, which is in this process, would take
    such a client's end for a connection of the port.
    """
    connection = socket.socket()
    connection.bind((source, 0))
    if connection.getsockname()[1] == port:
        with connection:  # it keeps the number meanwhile
            return connect(port, source)
    connection.settimeout(WAIT_S)
    connection.connect(("127.0.0.1", port))
    connection.setblocking(False)
    return connection


@asynccontextmanager
async def server(**values: Any) -> AsyncIterator[tuple[int, ConnectionLimits, aio.Channel]]:
    """A gRPC server under the limits, and an honest client that has called it already."""
    limits = limits_of(made := config(**values), MetadataImage)
    running = aio.server(options=server_options(made, limits.most))
    running.add_generic_rpc_handlers((handlers(),))
    port = running.add_insecure_port("127.0.0.1:0")
    await running.start()
    watch = asyncio.create_task(ConnectionWatch(port, limits, SystemClock()).run())
    channel = aio.insecure_channel(f"127.0.0.1:{port}")
    try:
        await ping(channel)
        yield port, limits, channel
    finally:
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
        await channel.close()
        await running.stop(0)


def handlers() -> grpc.GenericRpcHandler:
    async def echo(request: bytes, context: Any) -> bytes:
        return request

    async def stream(requests: Any, context: Any) -> None:
        async for request in requests:
            await context.write(request)

    return grpc.method_handlers_generic_handler(
        "test.Echo",
        {"Call": grpc.unary_unary_rpc_method_handler(echo), "Stream": grpc.stream_stream_rpc_method_handler(stream)},
    )


async def ping(channel: aio.Channel) -> None:
    call: Any = channel.unary_unary("/test.Echo/Call")
    assert await call(b"ping", timeout=WAIT_S) == b"ping"


def test_silent_connections_of_one_address_are_bounded_and_honest_clients_go_on() -> None:
    """Without the watch all 200 stay open."""

    async def work() -> None:
        async with server(max_connections_per_ip_overrides="127.0.0.2:20") as (port, limits, channel):
            hostile = [connect(port, "127.0.0.2") for _ in range(200)]
            try:
                await until(lambda: sum(map(is_open, hostile)) <= 20)
                assert limits.refused["max.connections.per.ip"] >= 100, (
                    "the limit must have closed 100 connections or more; gRPC may have given up the others"
                )
                await ping(channel)
                with contextlib.closing(connect(port, "127.0.0.3")) as other:
                    await until(lambda: limits.count("127.0.0.3"))
                    assert is_open(other)
            finally:
                for each in hostile:
                    each.close()
            await until(lambda: not limits.count("127.0.0.2"))
            await ping(channel)

    asyncio.run(work())


class _Time(SystemClock):
    at_ms = 0.0

    def monotonic_ms(self) -> float:
        return self.at_ms


@asynccontextmanager
async def watched(
    limits: ConnectionLimits, login_ms: float | None, unused_rate: float = NO_LIMIT
) -> AsyncIterator[tuple[ConnectionWatch, _Time, int]]:
    """A listener that takes connections and reads nothing, and its watch, which looks when told to."""
    clock = _Time()
    taken: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0), backlog=1_000) as listening:
        port = listening.getsockname()[1]
        loop = asyncio.get_running_loop()
        loop.add_reader(listening, lambda: taken.append(listening.accept()[0]))
        watch = ConnectionWatch(port, limits, clock, login_ms, unused_rate)
        try:
            yield watch, clock, port
        finally:
            loop.remove_reader(listening)
            for each in taken:
                each.close()


async def look(watch: ConnectionWatch, limits: ConnectionLimits, refused: int, total: int) -> None:
    async with asyncio.timeout(WAIT_S):
        while (limits.refused.total(), limits.total) != (refused, total):
            await watch.look()


def peer_of(connection: socket.socket) -> str:
    return "ipv4:{}:{}".format(*connection.getsockname())


async def test_a_new_connection_takes_the_place_of_the_oldest_one_without_a_login() -> None:
    """So 100 silent connections keep no client of the same address out, and close none that has logged in."""
    limits = ConnectionLimits(most=1_000, per_ip=20)
    with contextlib.ExitStack() as stack:
        async with watched(limits, 60_000.0) as (watch, _, port):

            def opened(number: int) -> list[socket.socket]:
                return [stack.enter_context(contextlib.closing(connect(port, "127.0.0.2"))) for _ in range(number)]

            (first,) = opened(1)
            await look(watch, limits, 0, 1)
            watch.logged_in(peer_of(first))
            silent = opened(100)
            await look(watch, limits, 81, 20)
            (late,) = opened(1)
            await look(watch, limits, 82, 20)
            watch.logged_in(peer_of(late))
            silent += opened(50)
            await look(watch, limits, 132, 20)
            assert is_open(first)
            assert is_open(late)
            assert sum(map(is_open, silent)) == watch.strangers == 18


async def test_a_connection_that_another_thread_looks_at_counts_once() -> None:
    """It has a second descriptor for that time. Counted twice, its address would have one connection more for ever."""
    limits = ConnectionLimits(most=1_000, per_ip=20)
    async with watched(limits, 60_000.0) as (watch, _, port):
        with contextlib.closing(connect(port, "127.0.0.2")) as theirs:

            def theirs_here() -> list[int]:
                return [each.fd for each in watch._scan(frozenset())[0] if each.host == "127.0.0.2"]

            await until(theirs_here)
            second = os.dup(theirs_here()[0])
            try:
                await watch.look()
            finally:
                os.close(second)
            await look(watch, limits, 0, 1)
            assert is_open(theirs)


async def test_connections_without_a_login_are_at_most_half_of_all() -> None:
    """The address with most of them loses some."""
    limits = ConnectionLimits(most=40, per_ip=100)
    with contextlib.ExitStack() as stack:
        async with watched(limits, 60_000.0) as (watch, _, port):
            honest = stack.enter_context(contextlib.closing(connect(port, "127.0.0.3")))
            await look(watch, limits, 0, 1)
            silent = [stack.enter_context(contextlib.closing(connect(port, "127.0.0.2"))) for _ in range(39)]
            async with asyncio.timeout(WAIT_S):
                while sum(map(is_open, silent)) > 19:
                    await watch.look()
            assert watch.strangers == limits.total == 20
            assert limits.refused == {"max.connections": 20}
            assert is_open(honest)


async def test_the_only_connection_that_may_be_open_may_log_in() -> None:
    limits = ConnectionLimits(most=1, per_ip=1)
    with contextlib.ExitStack() as stack:
        async with watched(limits, 60_000.0) as (watch, _, port):
            honest = stack.enter_context(contextlib.closing(connect(port, "127.0.0.2")))
            async with asyncio.timeout(WAIT_S):
                while not (watch.strangers or limits.refused):
                    await watch.look()
            assert is_open(honest)


async def test_of_too_many_connections_without_a_login_the_right_ones_are_found_in_one_pass(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Python calls are counted: a search among all addresses for each of the 2 001 would take forty million."""
    limits = ConnectionLimits(most=40_000, per_ip=3_000)
    watch = ConnectionWatch(1, limits, _Time(), 60_000.0)
    singles = [f"10.{number >> 8}.{number & 255}.1" for number in range(20_000)]
    hosts = [*singles, *["10.0.0.2"] * 2_001]
    found = [connections._Found(-1, number, host, number) for number, host in enumerate(hosts)]
    monkeypatch.setattr(watch, "_scan", lambda known: (found, set(range(len(hosts)))))
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += 1
        if calls > 200 * len(hosts):
            raise AssertionError(f"the look made more than 200 calls for each of {len(hosts)} addresses")

    sys.setprofile(count)
    try:
        await watch.look()
    finally:
        sys.setprofile(None)
    assert limits.refused == {"max.connections": 2_001}
    assert limits.count("10.0.0.2") == 1, "the address with the most connections must lose 2,000"
    assert [host for host in singles if not limits.count(host)] == ["10.0.0.1"], (
        "after it, the oldest connection of the others must be closed"
    )
    told = [vars(record) for record in caplog.records if record.name == "broker.net.connections"]
    assert [(each["host"], each["limit"]) for each in told] == [
        ("10.0.0.2", "max.connections"),
        ("10.0.0.1", "max.connections"),
    ]


async def test_a_connection_has_to_log_in_in_time(caplog: pytest.LogCaptureFixture) -> None:
    limits = ConnectionLimits(most=1_000, per_ip=1_000)
    with contextlib.ExitStack() as stack:
        async with watched(limits, 5_000.0) as (watch, clock, port):
            honest, silent = (stack.enter_context(contextlib.closing(connect(port, "127.0.0.2"))) for _ in range(2))
            await look(watch, limits, 0, 2)
            watch.logged_in(peer_of(honest))
            clock.at_ms = 5_000.0
            await watch.look()
            assert is_open(silent)
            clock.at_ms = 5_001.0
            await watch.look()
            assert (is_open(honest), is_open(silent)) == (True, False)
            assert limits.refused == {"connection.login.timeout.ms": 1}
            assert [vars(record)["limit"] for record in caplog.records if record.name == "broker.net.connections"] == [
                "connection.login.timeout.ms"
            ]


async def test_a_login_is_not_forgotten_when_no_descriptor_is_left_to_look_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits = ConnectionLimits(most=1_000, per_ip=1_000)
    with contextlib.ExitStack() as stack:
        async with watched(limits, 5_000.0) as (watch, clock, port):
            honest = stack.enter_context(contextlib.closing(connect(port, "127.0.0.2")))
            watch.logged_in(peer_of(honest))
            with monkeypatch.context() as patched:
                patched.setattr(connections, "_DESCRIPTORS", "/nowhere")
                with pytest.raises(OSError, match="/nowhere"):
                    await watch.look()
            await look(watch, limits, 0, 1)
            clock.at_ms = 6_000.0
            await watch.look()
            assert is_open(honest)


async def test_a_look_that_had_to_wait_is_followed_by_the_next_one_as_soon_as_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a machine that is overrun looks take long without using a processor; just then connections have to be seen."""
    watch = ConnectionWatch(1, ConnectionLimits(most=10, per_ip=10), _Time())

    def wait(known: frozenset[int]) -> tuple[list[connections._Found], set[int]]:
        time.sleep(0.5)
        return [], set()

    monkeypatch.setattr(watch, "_scan", wait)
    # Some virtual machines count a sleep as milliseconds of processor time. So the test sets that clock itself.
    monkeypatch.setattr(time, "thread_time", lambda: 0.0)
    await watch.look()
    assert watch.pause_s == connections.LOOK_EVERY_S


async def test_a_connection_that_no_look_has_seen_is_looked_for_when_it_is_to_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The watch does not sleep out its pause, here of an hour."""
    monkeypatch.setattr(connections, "LOOK_EVERY_S", 3_600.0)
    limits = ConnectionLimits(most=10, per_ip=10)
    async with watched(limits, 60_000.0) as (watch, _, port):
        watching = asyncio.create_task(watch.run())
        await asyncio.sleep(0.1)  # so it sleeps, on most machines
        with contextlib.closing(connect(port, "127.0.0.2")) as theirs:
            async with asyncio.timeout(WAIT_S):
                while not limits.refused["a limit"]:
                    watch.end(peer_of(theirs), "a limit")  # again: it may not be accepted yet
                    await asyncio.sleep(0.02)
            assert not is_open(theirs)
            watch.end(peer_of(theirs), "a limit")
            assert limits.refused == {"a limit": 1}
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


def test_connections_in_all_are_bounded_and_those_that_are_open_go_on() -> None:
    async def work() -> None:
        async with server(max_connections=50) as (port, _, channel):
            hostile = [connect(port, f"127.0.0.{2 + number % 20}") for number in range(150)]
            try:
                await until(lambda: sum(map(is_open, hostile)) <= 49)
                await ping(channel)
            finally:
                for each in hostile:
                    each.close()
            async with aio.insecure_channel(f"127.0.0.1:{port}", [("grpc.use_local_subchannel_pool", 1)]) as late:
                await asyncio.wait_for(late.channel_ready(), WAIT_S)  # descriptors come back
                await ping(late)

    asyncio.run(work())


def test_an_address_that_opens_connections_too_fast_is_cut_off() -> None:
    async def work() -> None:
        async with server(max_connection_creation_rate=1, quota_window_num=1) as (port, limits, channel):
            hostile = [connect(port, "127.0.0.2") for _ in range(100)]
            try:
                await until(lambda: limits.refused["connection_creation_rate"] >= 50)
                await until(lambda: sum(map(is_open, hostile)) <= 50)
                await ping(channel)
            finally:
                for each in hostile:
                    each.close()

    asyncio.run(work())


def test_an_idle_connection_is_closed() -> None:
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))

    async def work() -> None:
        async with server(connections_max_idle_ms=1_000) as (port, _, channel):
            with contextlib.closing(connect(port, "127.0.0.2")) as idle:
                idle.setblocking(True)
                idle.sendall(preface)
                idle.setblocking(False)
                await until(lambda: not is_open(idle))
            await ping(channel)  # which connects again

    asyncio.run(work())


class _Doors:
    """Connections that their listener accepts itself; those that were ended, in order."""

    def __init__(self, limits: ConnectionLimits, **options: Any) -> None:
        self.newcomers = Newcomers(limits, SystemClock(), login_ms=60_000.0, **options)
        self.ended: list[str] = []

    def open(self, name: str, host: str) -> Newcomer | None:
        return self.newcomers.open(host, lambda: self.ended.append(name))


async def test_the_oldest_connection_without_a_login_gives_way_where_a_listener_accepts_them_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "GIVES_WAY_MS", 0.0)
    limits = ConnectionLimits(most=1_000, per_ip=3)
    doors = _Doors(limits)
    first = doors.open("first", "10.0.0.1")
    assert first is not None
    first.logged_in()
    for number in range(4):
        assert doors.open(f"silent {number}", "10.0.0.1") is not None
    assert doors.ended == ["silent 0", "silent 1"], (
        "the oldest connections that have not logged in must be closed, not the first, which has"
    )
    assert (limits.count("10.0.0.1"), len(doors.newcomers)) == (3, 2)
    first.close()
    first.close()
    assert limits.count("10.0.0.1") == 2
    full = _Doors(ConnectionLimits(most=1_000, per_ip=1))
    only = full.open("only", "10.0.0.1")
    assert only is not None
    only.logged_in()
    assert full.open("late", "10.0.0.1") is None
    assert full.ended == []


async def test_clients_that_came_first_finish_their_logins_when_very_many_connect_at_once() -> None:
    limits = ConnectionLimits(most=1_000, per_ip=3)
    doors = _Doors(limits, most=5, most_of_network=4)
    assert [doors.open(f"a {number}", "10.0.0.1") is not None for number in range(5)] == [True] * 3 + [False] * 2
    others = [doors.open(f"b {number}", f"10.0.0.{2 + number}") for number in range(4)]
    assert [each is not None for each in others] == [True] * 2 + [False] * 2, (
        "the limit over all addresses must refuse the third and the fourth"
    )
    ipv6 = _Doors(ConnectionLimits(most=1_000, per_ip=1_000), most_of_network=2)
    assert [ipv6.open(f"{number}", f"fd00::{number}") is not None for number in range(3)] == [True, True, False]
    assert doors.ended == ipv6.ended == []
    assert (limits.total, len(doors.newcomers)) == (5, 5), "refused connections must not count"
    assert others[0] is not None
    others[0].logged_in()
    assert doors.open("in its place", "10.0.0.9") is not None


async def test_connections_without_a_login_are_bounded_in_all_and_by_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "GIVES_WAY_MS", 0.0)
    limits = ConnectionLimits(most=1_000, per_ip=1_000)
    doors = _Doors(limits, most=5, most_of_network=3)
    for number in range(4):
        doors.open(f"ipv6 {number}", f"fd00::{number}")
    assert doors.ended == ["ipv6 0"], "addresses of one IPv6 network must count together"
    doors.open("honest", "10.0.0.1")
    doors.open("honest too", "10.0.0.2")
    doors.open("late", "10.0.0.3")
    assert doors.ended == ["ipv6 0", "ipv6 1"], "the oldest connection of the network with the most must be closed"
    assert limits.refused == {"max.connections.per.ip": 1, "max.connections": 1}
    assert (limits.total, len(doors.newcomers)) == (5, 5)


def test_the_front_of_a_migration_ends_connections_that_make_no_call_and_those_it_is_told_to() -> None:
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))

    async def work() -> None:
        async with server() as (port, _, _):
            limits = ConnectionLimits(most=1_000, per_ip=1_000)
            front = EitherFront("127.0.0.1", 0, limits, login_ms=500.0)
            front.plaintext_port = port
            await front.open()
            own = [("grpc.use_local_subchannel_pool", 1)]
            async with aio.insecure_channel(f"127.0.0.1:{front.port}", own) as honest:
                await ping(honest)
                (behind,) = front._opened
                front.logged_in(f"ipv4:127.0.0.1:{behind}")
                with contextlib.closing(connect(front.port, "127.0.0.2")) as silent:
                    silent.setblocking(True)
                    silent.sendall(preface)  # a handshake without a call
                    silent.setblocking(False)
                    await until(lambda: not is_open(silent))
                assert limits.refused == {"connection.login.timeout.ms": 1}
                assert list(front._opened) == [behind]
                await ping(honest)
                front.end(f"ipv4:127.0.0.1:{behind}", "a limit")
                await until(lambda: limits.total == 0)
                assert limits.refused["a limit"] == 1
                assert not front._opened
            await front.close()

    asyncio.run(work())


def test_the_front_of_a_migration_has_the_same_limits() -> None:
    async def work() -> None:
        async with server() as (port, _, _):
            limits = ConnectionLimits(most=1_000, per_ip=1_000, overrides={"127.0.0.2": 10})
            front = EitherFront("127.0.0.1", 0, limits)
            front.plaintext_port = port
            await front.open()
            hostile = [connect(front.port, "127.0.0.2") for _ in range(100)]
            try:
                await until(lambda: sum(map(is_open, hostile)) <= 10)
                assert limits.refused["max.connections.per.ip"] >= 50
                async with aio.insecure_channel(f"127.0.0.1:{front.port}") as honest:
                    await ping(honest)
            finally:
                for each in hostile:
                    each.close()
                await front.close()
            assert limits.total == 0

    asyncio.run(work())
