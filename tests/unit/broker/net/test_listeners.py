"""Ports: a port that cannot be opened, and a port that takes TLS and plaintext."""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NoReturn

import grpc
import pytest
from grpc import aio

from broker.net.connections import ConnectionLimits
from broker.net.listeners import LOOPBACK, EitherFront, Listener, why_not
from raftlog.testing import CertificateAuthority


def no_such_name(*_: object, **__: object) -> NoReturn:
    """As the resolver says, without a server to ask."""
    raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")


def test_the_reason_is_the_operating_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert why_not("127.0.0.1", taken.getsockname()[1]) == "address already in use"
    assert why_not("192.0.2.1", 0) == "cannot assign requested address"
    assert "gRPC refused the port" in why_not("127.0.0.1", 0)
    monkeypatch.setattr(socket, "getaddrinfo", no_such_name)
    assert why_not("nobody.invalid", 9092) == "name or service not known"


def test_connections_that_a_close_ends_are_no_errors() -> None:
    """The broker's log would have a traceback for each: asyncio reports what the task of a connection ends with."""
    reported: list[dict[str, Any]] = []

    async def scenario() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))

        async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while piece := await reader.read(100):
                writer.write(piece)
            writer.close()

        front = EitherFront(LOOPBACK, 0)
        behind = await asyncio.start_server(echo, LOOPBACK, 0)
        front.plaintext_port = behind.sockets[0].getsockname()[1]
        await front.open()
        ends = [await asyncio.open_connection(LOOPBACK, front.port) for _ in range(2)]
        (silent, _), (speaking, out) = ends
        out.write(b"PRI")
        assert await speaking.readexactly(3) == b"PRI"
        assert len(front._connections) == 2
        await front.close()
        assert [await speaking.read(), await silent.read()] == [b"", b""]
        for _, writer in ends:
            writer.close()
        behind.close()
        await behind.wait_closed()

    asyncio.run(asyncio.wait_for(scenario(), 60))
    assert reported == []


@asynccontextmanager
async def _front_of_echoes() -> AsyncIterator[EitherFront]:
    """A front for clients whose ports behind it echo."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while piece := await reader.read(100):
            writer.write(piece)
        writer.close()

    front = EitherFront(LOOPBACK, 0, ConnectionLimits(most=1_000, per_ip=1_000))
    servers = [await asyncio.start_server(echo, LOOPBACK, 0) for _ in range(2)]
    front.plaintext_port, front.tls_port = (each.sockets[0].getsockname()[1] for each in servers)
    await front.open()
    try:
        async with asyncio.timeout(60):
            yield front
    finally:
        await front.close()
        for each in servers:
            each.close()


async def _connected(front: EitherFront, said: bytes) -> socket.socket:
    """Return a client's connection that the port behind has answered."""
    loop, client = asyncio.get_running_loop(), socket.socket()
    client.setblocking(False)
    await loop.sock_connect(client, (LOOPBACK, front.port))
    await loop.sock_sendall(client, said)
    assert await loop.sock_recv(client, 100) == said
    return client


def _half_close(client: socket.socket) -> None:
    client.shutdown(socket.SHUT_WR)


def _reset(client: socket.socket) -> None:
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


@pytest.mark.parametrize("ends", [socket.socket.close, _half_close, _reset])
async def test_a_front_knows_that_a_connection_is_there_until_its_client_ends_it(
    ends: Callable[[socket.socket], None],
) -> None:
    """Before the front itself has noticed: it notices late while the port behind takes no more."""
    async with _front_of_echoes() as front:
        client, other = await _connected(front, b"PRI"), await _connected(front, b"PRI")
        peer, others = (f"ipv4:{LOOPBACK}:{port}" for port in front._opened)
        assert front.is_connected(peer)
        assert front.is_connected(others)
        assert not front.is_connected(f"ipv4:{LOOPBACK}:{front.port}"), "no client of the front has this port"
        ends(client)
        until_s = time.monotonic() + 10
        while front.is_connected(peer) and time.monotonic() < until_s:
            time.sleep(0.001)  # noqa: ASYNC251 # so that the front does not run; the kernel passes on the client's end
        assert not front.is_connected(peer)
        assert front.is_connected(others)
        front.end(others, "a limit")
        assert not front.is_connected(others)
        for each in (client, other):
            each.close()


async def test_a_front_connects_to_both_ports_behind_it_from_different_ports(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A call shows only the port that its connection comes from. The kernel gives two connections the same one if they
    go to different ports; `end` for the one client closed the connection of the other then.
    """
    connect, shared, seen = asyncio.open_connection, 0, set()

    async def open_connection(host: str, port: int, *, limit: int) -> Any:
        nonlocal shared
        if port in seen:
            return await connect(host, port, limit=limit)
        seen.add(port)
        own = socket.socket()
        own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        own.bind((LOOPBACK, shared))
        shared = own.getsockname()[1]
        own.setblocking(False)
        await asyncio.get_running_loop().sock_connect(own, (host, port))
        return await connect(sock=own, limit=limit)

    monkeypatch.setattr(asyncio, "open_connection", open_connection)
    async with _front_of_echoes() as front:
        plaintext = await _connected(front, b"PRI")
        tls = await _connected(front, b"\x16")
        assert len(seen) == 2
        assert [front.is_connected(f"ipv4:{LOOPBACK}:{port}") for port in front._opened] == [True, True]
        front.end(f"ipv4:{LOOPBACK}:{shared}", "a limit")
        assert await asyncio.get_running_loop().sock_recv(plaintext, 100) == b""
        await asyncio.get_running_loop().sock_sendall(tls, b"more")
        assert await asyncio.get_running_loop().sock_recv(tls, 100) == b"more"
        for each in (plaintext, tls):
            each.close()


SIZE = 3 << 20


class _Echo(grpc.GenericRpcHandler):
    """Answers a request with itself, and says how it came."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        async def echo(request: bytes, context: Any) -> bytes:
            return bytes(context.auth_context()["transport_security_type"][0]) + request

        return grpc.unary_unary_rpc_method_handler(echo)


def _serving(directory: Path, scenario: Callable[[Listener, CertificateAuthority], Awaitable[None]]) -> None:
    authority = CertificateAuthority(directory)
    pem = authority.issue("server").read_bytes()

    async def run() -> None:
        server = aio.server(options=[("grpc.max_receive_message_length", -1)])
        server.add_generic_rpc_handlers((_Echo(),))
        credentials = grpc.ssl_server_credentials([(pem, pem)])
        listener = Listener(server, "127.0.0.1", 0, credentials, both=True)
        await server.start()
        await listener.open()
        try:
            await scenario(listener, authority)
        finally:
            await server.stop(0)
            await listener.close()

    asyncio.run(run())


async def _ask(listener: Listener, ca: bytes | None, request: bytes) -> bytes:
    address, options = f"127.0.0.1:{listener.port}", [("grpc.max_receive_message_length", -1)]
    channel = (
        aio.insecure_channel(address, options)
        if ca is None
        else aio.secure_channel(address, grpc.ssl_channel_credentials(ca), options)
    )
    async with channel:
        ask: Any = channel.unary_unary("/a/b")
        return bytes(await ask(request, timeout=60))


def test_both_are_served_at_one_port(tmp_path: Path) -> None:
    async def scenario(listener: Listener, authority: CertificateAuthority) -> None:
        payload = b"x" * SIZE  # more than fits into any buffer on the way
        ca = authority.ca_file.read_bytes()
        answers = await asyncio.gather(_ask(listener, None, payload), _ask(listener, ca, payload))
        assert list(answers) == [b"insecure" + payload, b"ssl" + payload]

    _serving(tmp_path, scenario)


def test_who_says_nothing_or_leaves_harms_nobody(tmp_path: Path) -> None:
    async def scenario(listener: Listener, authority: CertificateAuthority) -> None:
        silent = socket.create_connection(("127.0.0.1", listener.port))
        for said in (b"", b"\x16", b"GET / HTTP/1.1\r\n\r\n"):
            with socket.create_connection(("127.0.0.1", listener.port)) as rude:
                rude.sendall(said)
        assert await _ask(listener, None, b"") == b"insecure"
        silent.close()

    _serving(tmp_path, scenario)


def test_connections_end_with_the_listener(tmp_path: Path) -> None:
    async def scenario(listener: Listener, authority: CertificateAuthority) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0")
        assert await reader.read(1), "the listener must answer the connection"
        await listener.close()
        async with asyncio.timeout(60):
            while await reader.read(1 << 16):
                pass
        writer.close()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", listener.port)

    _serving(tmp_path, scenario)


def test_a_port_that_is_taken_is_said() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(RuntimeError, match="Address already in use"),
    ):
        EitherFront("127.0.0.1", taken.getsockname()[1])
