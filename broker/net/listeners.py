"""The ports of a gRPC server: plaintext, TLS, or both on one port while a cluster migrates.

gRPC does not say why it cannot bind a port; `why_not` asks the operating system.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from asyncio.trsock import TransportSocket
from collections.abc import Collection
from typing import Final

import grpc
from grpc import aio

from broker.clock import Clock, SystemClock
from broker.config.checks import WITH_TLS
from broker.config.config import BrokerConfig
from broker.config.endpoints import SASL_SSL
from broker.net.connections import (
    NO_LIMIT,
    ConnectionLimits,
    ConnectionWatch,
    Newcomer,
    Newcomers,
    address_of,
    is_established,
    shut_down_peers,
)
from broker.net.tls import NodeTls
from raftlog._core.security.acls import canonical_host
from raftlog.errors import BrokerUnavailable

logger = logging.getLogger(__name__)

TLS_HANDSHAKE: Final = 0x16
"""The first byte of a TLS connection; a plaintext HTTP/2 connection begins with "P"."""
LOOPBACK: Final = "127.0.0.1"
PIECE_BYTES: Final = 256 << 10
FIRST_BYTE_S: Final = 10.0
"""How long a new connection may send nothing before it is closed."""
BACKLOG: Final = 1_024
HANDSHAKE_MS: Final = 10_000
"""A connection that has not finished TLS's and HTTP/2's handshakes by then is closed; gRPC's default is two minutes."""
WINDOW_BYTES: Final = 512 << 10
"""What a client may send of each call before the broker reads it; gRPC widens the window for a message that is read.

Probing, gRPC's default, lets the window of every call grow to 8 MiB, whether or not its data is read.
"""
KEEPALIVE_MS: Final = 20_000
KEEPALIVE_TIMEOUT_MS: Final = 10_000


def why_not(host: str, port: int) -> str:
    """Return why the operating system refuses to listen on `host` and `port`."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.create_server((str(address[0]), port), family=family):
            return "gRPC refused the port, set GRPC_VERBOSITY=DEBUG for its reason"
    except OSError as error:
        if error.errno is not None and error.errno > 0:  # getaddrinfo's errors are negative
            return os.strerror(error.errno).lower()
        return (error.strerror or str(error)).lower()


class Listener:
    """A port of a gRPC server: the constructor binds it; call `open` once the server has started, `close` after it.

    Plaintext without `credentials`, TLS with them; with `both`, it accepts TLS and plaintext.
    """

    def __init__(
        self,
        server: aio.Server,
        host: str,
        port: int,
        credentials: grpc.ServerCredentials | None,
        *,
        both: bool,
        limits: ConnectionLimits | None = None,
        clock: Clock | None = None,
        login_ms: float | None = None,
        unused_rate: float = NO_LIMIT,
    ) -> None:
        """Bind the port; 0 stands for any free port. `limits`: on its connections; None: none, as between nodes.

        `login_ms`, `unused_rate`: as `ConnectionWatch`.

        Raises:
            RuntimeError: the port cannot be bound; `why_not` returns the reason.
        """
        self._front: EitherFront | None = None
        if credentials is None:
            self.port = server.add_insecure_port(_address(host, port))
        elif not both:
            self.port = server.add_secure_port(_address(host, port), credentials)
        else:
            front = self._front = EitherFront(host, port, limits, clock, login_ms)
            front.plaintext_port = server.add_insecure_port(f"{LOOPBACK}:0")
            front.tls_port = server.add_secure_port(f"{LOOPBACK}:0", credentials)
            self.port = front.port
        self._watch: ConnectionWatch | None = None
        if limits is not None and self._front is None:
            self._watch = ConnectionWatch(self.port, limits, clock or SystemClock(), login_ms, unused_rate)
        self._watching: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Accept connections."""
        if self._front is not None:
            await self._front.open()
        if self._watch is not None:
            self._watching = asyncio.create_task(self._watch.run(), name="connections")

    def end_connection(self, peer: str, limit: str) -> None:
        """Close the connection of a gRPC peer soon, for a limit."""
        if self._watch is not None:
            self._watch.end(peer, limit)
        elif self._front is not None:
            self._front.end(peer, limit)

    async def end_connections(self, peers: Collection[str]) -> None:
        """Close the connections of gRPC peers, with all calls on them, within milliseconds.

        Raises:
            OSError: no descriptor is left to look for them.
        """
        port = self.port if self._front is None else self._front.tls_port  # the peers of plaintext show no certificate
        await asyncio.to_thread(shut_down_peers, port, peers)

    def is_connected(self, peer: str) -> bool:
        """Return whether the connection of a gRPC peer is certainly there."""
        if self._watch is not None:
            return self._watch.is_connected(peer)
        return self._front is not None and self._front.is_connected(peer)

    def logged_in(self, peer: str) -> None:
        """Note that a gRPC peer has made a call that was let in."""
        if self._watch is not None:
            self._watch.logged_in(peer)
        elif self._front is not None:
            self._front.logged_in(peer)

    async def close(self) -> None:
        """Stop accepting, and end the connections that gRPC's server does not own."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        if self._front is not None:
            await self._front.close()


def server_options(config: BrokerConfig, most_connections: int) -> list[tuple[str, int]]:
    """Return the gRPC options of the server for clients."""
    limit = config.socket_request_max_bytes
    return [
        ("grpc.max_receive_message_length", limit),
        ("grpc.max_send_message_length", limit),
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
        ("grpc.max_concurrent_streams", min(config.max_streams, config.max_streams_per_connection)),
        ("grpc.max_allowed_incoming_connections", most_connections),
        ("grpc.max_connection_idle_ms", config.connections_max_idle_ms),
        ("grpc.so_reuseport", 0),  # a second server on the same port fails instead of stealing connections
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),  # without it a dead client would keep its streams for ever
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.keepalive_permit_without_calls", 1),
    ]


def listen_for_clients(
    server: aio.Server, config: BrokerConfig, tls: NodeTls | None, limits: ConnectionLimits, clock: Clock
) -> Listener:
    """Return the listener for clients, with its port bound.

    Raises:
        BrokerUnavailable: the port cannot be bound.
    """
    host, port = config.listener
    both = config.listener_security_migration
    login_ms = None
    if both or config.listener_security_protocol == SASL_SSL:
        login_ms = config.connection_login_timeout_ms
    credentials = None
    if tls is not None and (both or config.listener_security_protocol in WITH_TLS):
        credentials = tls.client_credentials()
    try:
        return Listener(
            server,
            host,
            port,
            credentials,
            both=both,
            limits=limits,
            clock=clock,
            login_ms=login_ms,
            unused_rate=config.max_unused_connection_rate,
        )
    except RuntimeError:
        raise BrokerUnavailable(
            f"cannot listen on {host}:{port}: {why_not(host, port)}; is another server using the port? "
            "Change `listeners`, or use port 0 for a free one"
        ) from None


class EitherFront:
    """Forwards each connection to the TLS port or the plaintext port, chosen by the connection's first byte.

    Only for the time in which TLS is turned on or off: forwarding costs speed, and the ports behind it see every client
    at the loopback address. They know a client's connection by the port of the front's own one to them.
    """

    def __init__(
        self,
        host: str,
        port: int,
        limits: ConnectionLimits | None = None,
        clock: Clock | None = None,
        login_ms: float | None = None,
    ) -> None:
        """Bind the port; `limits`: on its connections. Raises RuntimeError if it cannot be bound.

        `login_ms`: how long a connection may take to its first call, which may be of User:ANONYMOUS; as `Newcomers`.
        """
        self._limits = limits
        self._newcomers = None
        if limits is not None:
            self._newcomers = Newcomers(limits, clock or SystemClock(), login_ms=login_ms)
        self._opened: dict[int, tuple[Newcomer, TransportSocket]] = {}
        """Clients' connections and their sockets, by the port of the front's connection behind it."""
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
        """Accept connections."""
        self._server = await asyncio.start_server(self._serve, sock=self._socket, limit=PIECE_BYTES)

    def logged_in(self, peer: str) -> None:
        """As `Listener.logged_in`; the peer is the front itself."""
        if (opened := self._opened.get(address_of(peer)[1])) is not None:
            opened[0].logged_in()

    def end(self, peer: str, limit: str) -> None:
        """As `Listener.end_connection`; the peer is the front itself."""
        opened = self._opened.pop(address_of(peer)[1], None)
        if opened is not None and self._limits is not None:
            self._limits.refused[limit] += 1
            opened[0].end()

    def is_connected(self, peer: str) -> bool:
        """As `Listener.is_connected`."""
        opened = self._opened.get(address_of(peer)[1])
        return opened is not None and is_established(opened[1])

    async def close(self) -> None:
        """Stop accepting, and end all connections."""
        if self._server is not None:
            self._server.close()
        self._socket.close()
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None, "asyncio serves each connection in a task"
        self._connections.add(task)
        peer = writer.get_extra_info("peername")
        host = canonical_host(str(peer[0])) if peer else ""
        opened = None if self._newcomers is None else self._newcomers.open(host, task.cancel)
        try:
            if self._newcomers is not None and opened is None:
                return
            async with asyncio.timeout(FIRST_BYTE_S):
                first = await reader.read(PIECE_BYTES)
            if first:
                await self._join(first, reader, writer, opened)
        except (OSError, TimeoutError):
            pass  # one of the two ends is gone
        except asyncio.CancelledError:
            pass  # by `close`, or since it has to go; asyncio would log the cancellation with a traceback
        finally:
            if opened is not None:
                opened.close()
            self._connections.discard(task)
            writer.close()

    async def _join(
        self, first: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, opened: Newcomer | None
    ) -> None:
        port = self.tls_port if first[0] == TLS_HANDSHAKE else self.plaintext_port
        behind_reader, behind_writer, own_port = await self._connect(port)
        if opened is not None:
            self._opened[own_port] = opened, writer.get_extra_info("socket")
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
            if (known := self._opened.get(own_port)) is not None and known[0] is opened:
                del self._opened[own_port]
            behind_writer.close()

    async def _connect(self, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, int]:
        """Connect to a port behind, and return the own port, which no other connection that counts has.

        The kernel may choose one that a connection to the other port has.
        """
        while True:
            reader, writer = await asyncio.open_connection(LOOPBACK, port, limit=PIECE_BYTES)
            own_port = int(writer.get_extra_info("sockname")[1])
            if own_port not in self._opened:
                return reader, writer, own_port
            writer.close()


async def _pass_on(source: asyncio.StreamReader, to: asyncio.StreamWriter) -> None:
    while piece := await source.read(PIECE_BYTES):
        to.write(piece)
        await to.drain()


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
