"""Ports: taking them, in plaintext, with TLS or with both, and why one cannot be had, which gRPC keeps to itself."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from typing import Final

import grpc
from grpc import aio

from broker.config import BrokerConfig
from broker.node_tls import NodeTls
from broker.security_keys import WITH_TLS
from raftlog.errors import BrokerUnavailable

logger = logging.getLogger(__name__)

TLS_HANDSHAKE: Final = 0x16
"""The first byte of TLS; HTTP/2 in plaintext begins with a P."""
LOOPBACK: Final = "127.0.0.1"
PIECE_BYTES: Final = 256 << 10
FIRST_BYTE_S: Final = 10.0
"""Who connects and says nothing is let go after so long."""
BACKLOG: Final = 1_024
KEEPALIVE_MS: Final = 20_000
KEEPALIVE_TIMEOUT_MS: Final = 10_000


def why_not(host: str, port: int) -> str:
    """Return what the operating system says against listening there."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.create_server((str(address[0]), port), family=family):
            return "gRPC refused it, GRPC_VERBOSITY=DEBUG tells more"
    except OSError as error:
        if error.errno is not None and error.errno > 0:  # else it is of getaddrinfo
            return os.strerror(error.errno).lower()
        return (error.strerror or str(error)).lower()


class Listener:
    """A port of a gRPC server, taken when this is made; `open` once the server has started, `close` after its end.

    Without `credentials` it takes plaintext, with them TLS, and `both` if that is said as well.
    """

    def __init__(
        self, server: aio.Server, host: str, port: int, credentials: grpc.ServerCredentials | None, *, both: bool
    ) -> None:
        """Take the port; `port` 0: a free one.

        Raises:
            RuntimeError: it cannot be had; `why_not` says why.
        """
        self._front: EitherFront | None = None
        if credentials is None:
            self.port = server.add_insecure_port(_address(host, port))
        elif not both:
            self.port = server.add_secure_port(_address(host, port), credentials)
        else:
            front = self._front = EitherFront(host, port)
            front.plaintext_port = server.add_insecure_port(f"{LOOPBACK}:0")
            front.tls_port = server.add_secure_port(f"{LOOPBACK}:0", credentials)
            self.port = front.port

    async def open(self) -> None:
        """Let connections in."""
        if self._front is not None:
            await self._front.open()

    async def close(self) -> None:
        """Take no more, and end those that there are, where they are not the server's own."""
        if self._front is not None:
            await self._front.close()


def server_options(config: BrokerConfig) -> list[tuple[str, int]]:
    """Return gRPC's options of the server for clients."""
    limit = config.socket_request_max_bytes
    return [
        ("grpc.max_receive_message_length", limit),
        ("grpc.max_send_message_length", limit),
        ("grpc.max_concurrent_streams", config.max_streams),
        ("grpc.so_reuseport", 0),  # a second server on the same port fails instead of stealing connections
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),  # finds dead clients, which would hold a stream for ever
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.keepalive_permit_without_calls", 1),
    ]


def listen_for_clients(server: aio.Server, config: BrokerConfig, tls: NodeTls | None) -> Listener:
    """Return the listener for clients, whose port is taken.

    Raises:
        BrokerUnavailable: it cannot be had.
    """
    host, port = config.listener
    both = config.listener_security_migration
    credentials = None
    if tls is not None and (both or config.listener_security_protocol in WITH_TLS):
        credentials = tls.client_credentials()
    try:
        return Listener(server, host, port, credentials, both=both)
    except RuntimeError:
        raise BrokerUnavailable(
            f"cannot listen on {host}:{port}: {why_not(host, port)}; is another server using the port? "
            "Change `listeners`, or use port 0 for a free one"
        ) from None


class EitherFront:
    """Takes connections and passes their bytes on to one of two ports by the first one of them: TLS or not.

    For while TLS is turned on or off: it costs speed, and the ports behind it are on loopback, where they see everybody
    come from.
    """

    def __init__(self, host: str, port: int) -> None:
        """Take the port. Raises RuntimeError when it cannot be had."""
        try:
            family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            self._socket = socket.create_server((str(address[0]), port), family=family, backlog=BACKLOG)
        except OSError as error:
            raise RuntimeError(str(error)) from None
        self.port = int(self._socket.getsockname()[1])
        self.plaintext_port = 0
        self.tls_port = 0
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """Take connections."""
        self._server = await asyncio.start_server(self._serve, sock=self._socket, limit=PIECE_BYTES)

    async def close(self) -> None:
        """End all connections, and take no more."""
        if self._server is not None:
            self._server.close()
        self._socket.close()
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None, "asyncio serves in one"
        self._connections.add(task)
        try:
            async with asyncio.timeout(FIRST_BYTE_S):
                first = await reader.read(PIECE_BYTES)
            if first:
                await self._join(first, reader, writer)
        except (OSError, TimeoutError):
            pass  # one of both ends is gone
        except asyncio.CancelledError:
            pass  # `close` did it, which alone waits for this task; asyncio would log how it ends, with a traceback
        finally:
            self._connections.discard(task)
            writer.close()

    async def _join(self, first: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        port = self.tls_port if first[0] == TLS_HANDSHAKE else self.plaintext_port
        behind_reader, behind_writer = await asyncio.open_connection(LOOPBACK, port, limit=PIECE_BYTES)
        ways = []
        try:
            behind_writer.write(first)
            ways = [
                asyncio.create_task(_pass_on(reader, behind_writer)),
                asyncio.create_task(_pass_on(behind_reader, writer)),
            ]
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            behind_writer.close()


async def _pass_on(source: asyncio.StreamReader, to: asyncio.StreamWriter) -> None:
    while piece := await source.read(PIECE_BYTES):
        to.write(piece)
        await to.drain()


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
