"""A node that restarts may have another address under its name, as a pod of Kubernetes has."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import aio

import raftmeta.quorum.config
import replication.shell.fetchers
from raftlog._client import connections as client_connections
from raftlog._client.connections import Connections
from raftlog._client.options import AdminOptions
from raftlog._client.security import ChannelTls, dial
from raftlog.testing import CertificateAuthority
from tests.support.name_server import name_server

SOON_S = 15.0
"""Far above what it takes, half a second, and far below gRPC's default, 30 s."""


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> tuple[ChannelTls, grpc.ServerCredentials]:
    authority = CertificateAuthority(tmp_path_factory.mktemp("ca"))
    pem = AdminOptions.make(authority.client_config(), {}).pem
    assert pem is not None
    certificate = Path(authority.issue("node", hosts=["node.test"])).read_bytes()
    return ChannelTls(pem), grpc.ssl_server_credentials([(certificate, certificate)])


@asynccontextmanager
async def node(host: str, port: int, credentials: grpc.ServerCredentials | None = None) -> AsyncIterator[None]:
    """A server that answers every call with its address."""

    async def answer(request: bytes, context: object) -> bytes:
        return host.encode()

    server = aio.server(options=[("grpc.so_reuseport", 0)])
    handlers: dict[str, Any] = {"Where": grpc.unary_unary_rpc_method_handler(answer)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("node", handlers),))
    if credentials is None:
        server.add_insecure_port(f"{host}:{port}")
    else:
        server.add_secure_port(f"{host}:{port}", credentials)
    await server.start()
    try:
        yield
    finally:
        await server.stop(0)


async def where(open_channel: Callable[[], aio.Channel]) -> str:
    """Ask until there is an answer."""
    async with asyncio.timeout(60):
        while True:
            call: Any = open_channel().unary_unary("/node/Where")
            try:
                return bytes(await call(b"", timeout=5)).decode()
            except aio.AioRpcError:
                await asyncio.sleep(0.05)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.mark.parametrize("kind", ["client", "client with TLS", "quorum", "replication"])
async def test_a_node_is_found_at_its_new_address(
    kind: str, secured: tuple[ChannelTls, grpc.ServerCredentials]
) -> None:
    tls, credentials = secured if kind == "client with TLS" else (None, None)
    port = free_port()
    with name_server() as names:
        target = names.target(port)
        connections = Connections(tls)
        options = {
            "quorum": raftmeta.quorum.config.CHANNEL_OPTIONS,
            "replication": replication.shell.fetchers.CHANNEL_OPTIONS,
        }
        channel = dial(target, options[kind], None) if kind in options else connections.channel(target)
        try:
            async with node("127.0.0.2", port, credentials):
                names.address = "127.0.0.2"
                assert await where(lambda: channel) == "127.0.0.2"
            names.address = "127.0.0.3"
            async with node("127.0.0.3", port, credentials):
                begun = time.monotonic()
                assert await where(lambda: channel) == "127.0.0.3"
                assert time.monotonic() - begun < SOON_S
        finally:
            await channel.close()
            await connections.close()


async def test_a_channel_that_has_lost_its_connection_does_not_try_the_old_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A pod's old address may not even refuse: connecting to it takes seconds."""
    monkeypatch.setattr(client_connections, "REPLACED_AFTER_S", 0.0)
    port, idle = free_port(), grpc.ChannelConnectivity.IDLE
    with name_server() as names:
        target, connections = names.target(port), Connections()
        names.address = "127.0.0.2"
        async with node("127.0.0.2", port):
            assert await where(lambda: connections.channel(target)) == "127.0.0.2"
            channel = connections.channel(target)
        async with asyncio.timeout(30):
            while (state := channel.get_state()) is not idle:
                await channel.wait_for_state_change(state)
        await asyncio.sleep(1)  # gRPC has asked for the name, which had the old address then
        names.address = "127.0.0.3"
        with socket.create_server(("127.0.0.2", port)):
            async with node("127.0.0.3", port):
                call: Any = connections.channel(target).unary_unary("/node/Where")
                assert bytes(await call(b"", timeout=5)) == b"127.0.0.3"
        await connections.close()


async def test_a_channel_that_cannot_connect_is_replaced_and_asks_for_the_name_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    port = free_port()
    with name_server() as names:
        target, connections = names.target(port), Connections()
        monkeypatch.setattr(client_connections, "REPLACED_AFTER_S", 3600.0)
        first = connections.channel(target)
        call: Any = first.unary_unary("/node/Where")
        with pytest.raises(aio.AioRpcError):
            await call(b"", timeout=30)
        assert connections.channel(target) is first, "a channel that is too young must not be replaced"
        monkeypatch.setattr(client_connections, "REPLACED_AFTER_S", 0.0)
        names.address = "127.0.0.2"
        async with node("127.0.0.2", port):
            second = connections.channel(target)
            assert second is not first
            assert await where(lambda: second) == "127.0.0.2"
            assert connections.channel(target) is second, "a connected channel must not be replaced"
            assert await where(lambda: first) == "127.0.0.2", "calls over the former channel must be able to go on"
        await connections.close()
        with pytest.raises(aio.UsageError):
            await call(b"")
