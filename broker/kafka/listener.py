"""Connections of Kafka clients: frames in, frames out, in order, within bounds.

    request     size i32, API key i16, version i16, correlation id i32, client id (nullable string), [tags], body
    response    size i32, correlation id i32, [tags], body

Responses leave in the order of the requests (Kafka's rule for one connection). Produces are pipelined: the next one is
appended while earlier ones wait for their replicas. Every other request waits until all earlier responses have left,
and nothing is read meanwhile, so a client that does not read its responses costs one of them.

Bounds, so that no client harms another:
- A frame without records has at most MAX_REQUEST_BYTES, a produce request at most socket.request.max.bytes. A frame
  that claims more closes the connection before a byte of it is read. A user that may write to no topic can send no
  produce request of more than MAX_REQUEST_BYTES either.
- A frame is read as it arrives; a claimed size allocates nothing. Large frames of all connections together claim at
  most MAX_LARGE_BYTES, and each user its share of that (`Room`); beyond it, connections wait before they read. While
  any wait, those whose frames hardly arrive are closed.
- A connection has FRAME_S for the rest of a frame that it has begun, RESPONSE_S to take a response, FIRST_S for its
  first request, and connections.max.idle.ms between two.
- Requests of more than ON_LOOP_ELEMENTS, and those whose responses may be long, together hold MAX_ELEMENTS_UNDER_WAY
  from before they are decoded until their responses have left, each user its share (`Room`). A question whose client
  goes meanwhile is given up.
- Fetches together read at most MAX_UNTAKEN_BYTES before their clients have taken the responses, each user its share. A
  fetch beyond that waits, for less than a client asks for too, and has no records if there is no room in time.
- The limits of `ConnectionLimits` (broker/net/connections.py).
- Where clients have to authenticate, few connections at a time have not done so yet, of one network and of all: the
  oldest gives way (`Newcomers`). They have connection.login.timeout.ms, a handful of small requests, and no other API
  than those of the authentication (`sasl.py`).

An API or a version that is not offered closes the connection, as in Kafka; ApiVersions of an unknown version is
answered in version 0 with UNSUPPORTED_VERSION, so that the client asks again.

Requests other than produces and fetches have max.call.rate; beyond it a connection is not read for a while.

A user that is shut out for a flood at gRPC's listener (`broker/net/calls.py`) can neither log in here nor ask for
anything new: its connection is closed once the responses that it is owed have left. Kafka's protocol has no error that
all APIs could answer with; clients connect again, with pauses.

A response whose `throttle_time_ms` is not 0 leaves at once; then nothing is read from the client for so long (KIP-219).
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import struct
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any, Final, TypeVar

from broker.clock import SystemClock
from broker.config.config import BrokerConfig
from broker.coordinator.transactions.verifier import ProducerChecks, TransactionVerifier
from broker.kafka import errors
from broker.kafka import messages as api
from broker.kafka.acls_and_users import SecurityApis
from broker.kafka.admin import AdminApis
from broker.kafka.apis import PERMISSIONS, Apis, Handler, Services, api_versions
from broker.kafka.codec import Fields, LargeMessage, Reader
from broker.kafka.fetch import Fetch
from broker.kafka.messages import REQUESTS, RESPONSES, api_name
from broker.kafka.produce import NO_ACK, Produce, Refused
from broker.kafka.sasl import MAX_BEFORE_BYTES, OPEN, Door, NotAdmitted, Session
from broker.kafka.transactions import TransactionApis
from broker.net.calls import CallLimits
from broker.net.connections import ConnectionLimits, Newcomer, Newcomers, limits_of
from broker.net.interceptors import Rarely
from broker.net.services.security import SecurityService
from broker.observability.counters import MTLS, Counters
from broker.quotas.disk_reads import DiskReads
from broker.quotas.heavy_work import HeavyWork, beside
from broker.quotas.manager import LOOK_AGAIN_MS, MAX_CLIENT_ID, Measured, Meter, QuotaManager, charged_to, whole_ms
from broker.quotas.room import Hold, Room
from broker.replicas.replica_manager import ReplicaManager
from broker.security.caller import Caller, caller
from broker.security.identify import MAX_STRANGERS_OF_NETWORK, Login
from broker.server.lease import Lease
from raftlog._core.security.acls import canonical_host
from raftlog.errors import BrokerUnavailable, InvalidRequestError
from raftlog.v1.security_pb2 import Acl
from raftmeta.image import MetadataImage
from raftmeta.quotas import CONSUMER_BYTE_RATE, PRODUCER_BYTE_RATE, REQUEST_PERCENTAGE

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_REQUEST_BYTES: Final = 1 << 20
MAX_LARGE_BYTES: Final = 256 << 20
LARGE_BYTES: Final = 64 << 10
PIECE_BYTES: Final = 64 << 10
CHUNK_BYTES: Final = 128 << 10
"""Of a response, given to the transport at a time: TLS's takes all that it is given, and then does not wait."""
ON_LOOP_ELEMENTS: Final = 1_000
"""What is read or written in a few milliseconds; larger requests and responses are in a thread, one at a time."""
MAX_ELEMENTS_UNDER_WAY: Final = 200_000
"""Of all requests that are being read and answered; a topic without partitions takes half a kilobyte in a response."""
LISTED_ELEMENTS: Final = 5_000
"""What the response of an API that lists things is taken for before it is there."""
MAX_UNANSWERED: Final = 64
"""Produces of one connection whose responses have not left."""
FIRST_S: Final = 30.0
IDLE_S: Final = 600.0
FRAME_S: Final = 30.0
RESPONSE_S: Final = 60.0
BACKLOG: Final = 1_024
ACCEPT_AGAIN_S: Final = 1.0
"""The pause after the operating system had no file descriptor left for a connection."""
HANDSHAKE_S: Final = 10.0
"""For TLS's handshake."""
SHUTDOWN_S: Final = 5.0
"""For TLS's closing message."""
STOP_S: Final = 0.5
"""How long connections may take to send the answers that they owe when the broker stops."""

_NEVER_HELD: Final = frozenset(
    {api.JOIN_GROUP, api.SYNC_GROUP, api.HEARTBEAT, api.LEAVE_GROUP, api.CONSUMER_GROUP_HEARTBEAT}
)
"""By request_percentage: members would miss their heartbeats. Their time is charged all the same."""
_GO_ON: Final = _NEVER_HELD | {api.PRODUCE, api.FETCH, api.OFFSET_COMMIT}
"""Served on connections that a user has when it is shut out: to clients of raftlog these are messages of streams that
are open, which go on (ADR 0043). The first request of a connection is none of these."""

MAX_UNTAKEN_BYTES: Final = 128 << 20
"""Of the log, in responses of all connections."""
LEAST_FETCH_BYTES: Final = 1 << 20
"""A fetch does not wait for more."""
FRAME_STALL_S: Final = 5.0
"""For a piece of a large frame while others wait; a lost packet is sent again within this time."""
RESPONSE_STALL_S: Final = 20.0
"""For a piece of a response while others wait; some clients take it only after they have processed the last one."""

_LISTS: Final = frozenset(
    {
        api.METADATA,
        api.OFFSET_FETCH,
        api.LIST_GROUPS,
        api.DESCRIBE_GROUPS,
        api.CONSUMER_GROUP_DESCRIBE,
        api.DESCRIBE_CONFIGS,
        api.DESCRIBE_LOG_DIRS,
        api.DESCRIBE_ACLS,
        api.DESCRIBE_CLIENT_QUOTAS,
        api.DESCRIBE_USER_SCRAM_CREDENTIALS,
        api.DESCRIBE_TOPIC_PARTITIONS,
        api.LIST_PARTITION_REASSIGNMENTS,
        api.LIST_TRANSACTIONS,
    }
)
"""Their responses may be long where the requests are short."""
_QUESTIONS: Final = _LISTS | {
    api.FETCH,
    api.LIST_OFFSETS,
    api.OFFSET_FOR_LEADER_EPOCH,
    api.FIND_COORDINATOR,
    api.DESCRIBE_CLUSTER,
    api.DESCRIBE_PRODUCERS,
    api.DESCRIBE_QUORUM,
    api.DESCRIBE_TRANSACTIONS,
}
"""They change nothing, so they are given up when the client has gone."""

_NO_CERTIFICATE: Final = frozenset({"CERTIFICATE_VERIFY_FAILED", "PEER_DID_NOT_RETURN_A_CERTIFICATE"})
"""OpenSSL's reasons for which a handshake fails because of the client's certificate; raised only if one is required."""

_SIZE = struct.Struct(">i")
_HEAD = struct.Struct(">hhi")
_FRONT = struct.Struct(">ii")
HEAD_BYTES: Final = _HEAD.size + 2
"""API key, version, correlation id, and the length of the client id."""


class _Closed(Exception):
    """The connection is to be closed; the text says why."""


class KafkaListener:
    """The port: `bind`, then `open`; `close` ends every connection."""

    def __init__(
        self,
        handlers: Mapping[int, Handler],
        produce: Produce,
        fetch: Fetch,
        lease: Lease,
        counters: Counters,
        *,
        max_frame_bytes: int,
        limits: ConnectionLimits,
        idle_s: float = IDLE_S,
        quotas: QuotaManager | None = None,
        calls: CallLimits | None = None,
        door: Door = OPEN,
    ) -> None:
        """`quotas`, `calls`: None limits no rate; a broker always has both."""
        self.handlers = handlers
        self.produce = produce
        self.fetch = fetch
        self.lease = lease
        self.counters = counters
        self.max_frame_bytes = max_frame_bytes
        self.room = Room(MAX_LARGE_BYTES)
        """Of large frames, in bytes."""
        self.port = 0
        self.limits = limits
        self.idle_s = idle_s
        self.quotas = quotas
        self.calls = calls
        self.door = door
        self.newcomers = Newcomers(
            limits,
            SystemClock(),
            login_ms=door.login_ms if door.is_guarded else None,
            most=door.max_strangers,
            most_of_network=MAX_STRANGERS_OF_NETWORK,
        )
        self._socket: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        """One for each connection, from its first moment."""
        self._connections: set[_Connection] = set()
        """Those behind their TLS handshake."""
        self.elements = Room(MAX_ELEMENTS_UNDER_WAY)
        self.untaken = Room(MAX_UNTAKEN_BYTES)
        """Of what fetches have read, in bytes."""
        self._converting = asyncio.Lock()
        self._logged = Rarely()
        offered = {*handlers, api.PRODUCE, api.FETCH, api.SASL_HANDSHAKE, api.SASL_AUTHENTICATE}
        assert offered == REQUESTS.keys(), "every API in the table has a handler, and no other"

    def bind(self, host: str, port: int) -> None:
        """Bind the port; 0 stands for any free port.

        Raises:
            BrokerUnavailable: the port cannot be bound.
        """
        try:
            family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            self._socket = socket.create_server((str(address[0]), port), family=family, backlog=BACKLOG)
        except OSError as error:
            raise BrokerUnavailable(
                f"cannot listen on {host}:{port} for Kafka clients: {(error.strerror or str(error)).lower()}; is "
                "another server using the port? Change `listeners`, or use port 0 for a free one"
            ) from None
        self.port = int(self._socket.getsockname()[1])

    async def open(self) -> None:
        """Accept connections."""
        assert self._socket is not None, "bind comes first"
        self._socket.setblocking(False)
        self._accepting = asyncio.create_task(self._accept(self._socket), name="kafka")

    async def close(self) -> None:
        """Stop accepting, and end all connections once they have sent the answers that they owe, or after STOP_S."""
        if self._accepting is not None:
            self._accepting.cancel()
            await asyncio.gather(self._accepting, return_exceptions=True)
        if self._socket is not None:
            self._socket.close()
        until_s = time.monotonic() + STOP_S
        for connection in list(self._connections):  # one after the other: all have the same time
            await connection.settled(until_s - time.monotonic())
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def connections(self) -> int:
        """How many connections are open."""
        return len(self._tasks)

    def tell(self, host: str, why: str) -> None:
        """Log why a connection was closed, once a minute for each address and reason."""
        if self._logged.may_log((host, why.partition(":")[0]), 1_000 * time.monotonic()):
            logger.warning(
                "a Kafka client was disconnected",
                extra={"event": "kafka_disconnected", "host": host, "reason": why},
            )

    def tell_of_user(self, name: str, host: str, why: str) -> None:
        """Log why a connection was closed, once a minute for each user and reason."""
        if self._logged.may_log(("user", name, why), 1_000 * time.monotonic()):
            logger.warning(
                "a Kafka client was disconnected",
                extra={"event": "kafka_disconnected", "host": host, "of": name, "reason": why},
            )

    async def beside(self, convert: Callable[..., T], *arguments: Any) -> T:
        """Read a large request, or write a large response, in a thread; one at a time. Its CPU time is charged."""
        async with self._converting:
            return await beside(convert, *arguments)

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, address = await loop.sock_accept(listening)
            except OSError as error:
                logger.error("no connection of a Kafka client can be accepted: %s", error.strerror or error)
                await asyncio.sleep(ACCEPT_AGAIN_S)
                continue
            task = asyncio.create_task(self._serve(accepted, canonical_host(str(address[0]))))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _serve(self, accepted: socket.socket, host: str) -> None:
        task = asyncio.current_task()
        assert task is not None, "each connection has a task"
        opened = self.newcomers.open(host, task.cancel)
        if opened is None:
            accepted.close()
            return
        self.counters.streams["kafka"] += 1
        writer: asyncio.StreamWriter | None = None
        connection: _Connection | None = None
        try:
            reader, writer = await self._opened(accepted)
            session = self.door.session(host, writer.get_extra_info("ssl_object"))
            connection = _Connection(self, reader, writer, session, opened)
            self._connections.add(connection)
            await connection.run()
        except (_Closed, NotAdmitted) as why:
            if str(why):
                self.tell(host, str(why))
        except ssl.SSLError as error:
            if error.reason in _NO_CERTIFICATE:
                self.door.counters.authentications[MTLS, "failure"] += 1
            self.tell(host, f"TLS: {error.reason or error}")
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            pass  # the client is gone, or too slow
        except asyncio.CancelledError:
            pass  # by `close`, or since it gives way to others; asyncio would log the cancellation with a traceback
        except Exception:  # a bug in one connection must not reach others
            logger.exception("a connection of a Kafka client failed")
        finally:
            if connection is not None:
                self._connections.discard(connection)
                connection.left()
            self.counters.streams["kafka"] -= 1
            opened.close()
            if writer is None:
                accepted.close()
            elif writer.transport.get_write_buffer_size():  # the client does not read
                writer.transport.abort()
            else:
                writer.close()

    async def _opened(self, accepted: socket.socket) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Return the ends of a connection, after TLS's handshake. Raises OSError."""
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=PIECE_BYTES, loop=loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        if self.door.contexts is None:
            transport, _ = await loop.connect_accepted_socket(lambda: protocol, accepted)
        else:
            context = await asyncio.to_thread(self.door.contexts.current)  # which may read files
            transport, _ = await loop.connect_accepted_socket(
                lambda: protocol,
                accepted,
                ssl=context,
                ssl_handshake_timeout=HANDSHAKE_S,
                ssl_shutdown_timeout=SHUTDOWN_S,
            )
        transport.set_write_buffer_limits(high=PIECE_BYTES)  # else 512 KiB with TLS
        return reader, asyncio.StreamWriter(transport, protocol, reader, loop)


def listen_for_kafka(
    config: BrokerConfig,
    replica_manager: ReplicaManager,
    services: Services,
    image: Callable[[], MetadataImage],
    disk_reads: DiskReads,
    heavy_work: HeavyWork,
    producers: Callable[[Caller], ProducerChecks],
    verifier: TransactionVerifier,
    security: SecurityService,
    door: Door,
    quotas: QuotaManager,
    calls: CallLimits,
) -> KafkaListener:
    """Return a broker's listener for Kafka clients, with its port bound.

    Raises:
        BrokerUnavailable: the port cannot be bound.
    """
    assert config.kafka_listener is not None, "`listeners` names the address"
    apis = Apis(services, config, image)
    listener = KafkaListener(
        {
            **apis.handlers,
            **TransactionApis(apis, services, verifier).handlers,
            **SecurityApis(apis, security, services.admin).handlers,
            **AdminApis(apis, services, config, image).handlers,
        },
        Produce(replica_manager, image, heavy_work, config.request_timeout_ms, producers),
        Fetch(replica_manager, image, disk_reads, heavy_work),
        replica_manager.lease,
        replica_manager.counters,
        max_frame_bytes=config.socket_request_max_bytes,
        limits=limits_of(config, image),
        idle_s=config.connections_max_idle_ms / 1_000,
        quotas=quotas,
        calls=calls,
        door=door,
    )
    listener.bind(*config.kafka_listener)
    return listener


class _Owed:
    """A produce whose response has not left."""

    __slots__ = ("begun_s", "correlation_id", "held_until_ms", "response", "version")

    def __init__(
        self,
        correlation_id: int,
        version: int,
        response: asyncio.Future[Fields],
        begun_s: float,
        held_until_ms: float,
    ) -> None:
        """`held_until_ms`: until then nothing is read from the client, by its quota; 0: it is not held."""
        self.correlation_id = correlation_id
        self.version = version
        self.response = response
        self.begun_s = begun_s
        self.held_until_ms = held_until_ms


class _Connection:
    """One connection: a reader that serves requests in turn, and a writer for the produces under way."""

    def __init__(
        self,
        listener: KafkaListener,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        session: Session,
        opened: Newcomer,
    ) -> None:
        """`opened` is told when the client has authenticated, or need not."""
        self._listener = listener
        self._reader = reader
        self._writer = writer
        self._session = session
        self._client = self._named = session.who
        """The caller, with the client id of its last request."""
        self._checks: ProducerChecks | None = None
        """Of the producer ids of `_named`; None until the first produce."""
        self._opened = opened
        self._muted_until_s, self._muted_by = 0.0, ""
        if session.certificate and (security := listener.door.security) is not None:
            security.connections.add(self)
        if session.is_admitted:
            opened.logged_in()
        else:
            session.on_admitted = self._on_admitted
        self._owed: deque[_Owed] = deque()
        self._news = asyncio.Event()
        self._left = asyncio.Event()
        self.busy = False
        """Whether a request is being read or served."""
        self._unpaid = Meter()
        """How long requests and responses took to convert, which is charged with the next request."""
        self._arrived = 0
        """Bytes of a large frame that have come."""
        self._written = 0
        """Bytes of responses that the transport has been given."""
        self._holds: list[Hold] = []
        """What the request that is being served holds."""
        self._is_question = False
        """Whether what is being done is of no use once the client has gone."""
        self._is_new = True
        """Whether the client has not sent a request yet."""

    @property
    def login(self) -> Login | None:
        """As `broker.security.client_listener.Connection`."""
        return self._session.login

    @property
    def certificate(self) -> bytes:
        """As `broker.security.client_listener.Connection`."""
        return self._session.certificate

    def end(self) -> None:
        """Close it: the password behind it has changed, or its certificate is revoked."""
        self._writer.transport.abort()

    def _on_admitted(self) -> None:
        caller.set(self._session.who)
        self._opened.logged_in()
        security = self._listener.door.security
        assert security is not None, "a password was checked"
        security.connections.add(self)

    def left(self) -> None:
        """Forget the client."""
        if (security := self._listener.door.security) is not None:
            security.connections.discard(self)

    async def settled(self, within_s: float) -> None:
        """Return once the client waits for no response, or when the time is up."""
        try:
            async with asyncio.timeout(max(0.0, within_s)):
                while self.busy or self._owed:
                    self._left.clear()
                    await self._left.wait()
        except TimeoutError:
            pass

    async def run(self) -> None:
        """Serve until the client goes, or breaks a rule."""
        caller.set(self._session.who)
        tasks = [asyncio.ensure_future(self._read()), asyncio.ensure_future(self._write_owed())]
        gone = asyncio.ensure_future(self._writer.wait_closed())
        gone.add_done_callback(lambda done: self._on_gone(done, tasks[0]))
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in (*tasks, gone):
                task.cancel()
            await asyncio.gather(*tasks, gone, return_exceptions=True)
            self._listener.counters.produces_unanswered -= len(self._owed)
            self._owed.clear()

    def _on_gone(self, gone: asyncio.Future[None], reading: asyncio.Future[None]) -> None:
        """Give up a question whose client has closed the connection, or has lost it."""
        if not gone.cancelled():
            gone.exception()  # else asyncio logs it
            if self._is_question:
                reading.cancel()

    def _give_way(self, why: str) -> None:
        self._listener.tell_of_user(self._client.share, self._client.host, why)
        self._writer.transport.abort()

    # Requests

    async def _read(self) -> None:
        wait_s = FIRST_S
        while True:
            await self._muted()
            async with asyncio.timeout(wait_s):
                start = await self._reader.read(1)
            if not start:
                await self._all_left(0)
                return
            wait_s = self._listener.idle_s
            try:
                async with asyncio.timeout(FRAME_S):
                    (size,) = _SIZE.unpack(start + await self._reader.readexactly(_SIZE.size - 1))
                    if self._session.takes_messages:
                        await self._take_message(size)
                        continue
                    head = await self._head(size)
                    key, version, correlation_id = _HEAD.unpack_from(head)
                    if self._is_new or key not in _GO_ON:
                        await self._check_shut_out()
                    self._is_new = False
                if key == api.PRODUCE:  # whose client is known by now, unless this is its first request
                    self._note_client(self._client.client_id)
                    if self._share_debt(PRODUCER_BYTE_RATE) > 0:
                        await self._muted()
                self.busy = True
                if size > LARGE_BYTES:
                    await self._hold_frame(size)
                pieces, left = [head], size - len(head)
                async with asyncio.timeout(FRAME_S):
                    while left:  # as it arrives
                        piece = await self._reader.read(min(left, PIECE_BYTES))
                        if not piece:
                            return
                        left -= len(piece)
                        self._arrived += len(piece)
                        pieces.append(piece)
                for hold in self._holds:  # from here on the broker is what takes time
                    hold.watch_no_more()
                frame = b"".join(pieces)
                pieces.clear()
                try:
                    await self._handle(key, version, correlation_id, frame)
                except InvalidRequestError as error:
                    raise _Closed(f"a request beyond a bound: {error}") from None
                del frame  # an idle connection keeps no payload
            finally:
                self.busy = False
                self._left.set()
                self._is_question = False
                for hold in self._holds:
                    hold.give()
                self._holds.clear()

    async def _head(self, size: int) -> bytes:
        if size < HEAD_BYTES:
            raise _Closed(f"a frame of impossible size: {size} bytes")
        head = await self._reader.readexactly(HEAD_BYTES)
        key, version, _ = _HEAD.unpack_from(head)
        request = REQUESTS.get(key)
        if request is None:
            raise _Closed(f"an API that is not offered: API key {key} version {version}")
        if not request.first <= version <= request.last and key != api.API_VERSIONS:
            raise _Closed(
                f"a version that is not offered: {api_name(key)} version {version}, offered are {request.first} to "
                f"{request.last}"
            )
        self._session.check_request(api_name(key), size, authenticates=key in api.AUTHENTICATING)
        limit = self._listener.max_frame_bytes if key == api.PRODUCE else MAX_REQUEST_BYTES
        if size > limit:
            raise _Closed(f"a frame that is too large: {size} bytes of {api_name(key)}, at most {limit} are accepted")
        if size > MAX_REQUEST_BYTES and not self._session.who.may_any(Acl.WRITE, Acl.TOPIC):
            raise _Closed(f"a large produce request of a user that may write to no topic: {size} bytes")
        return head

    async def _hold_frame(self, size: int) -> None:
        """Wait until there is room for a large frame, whose client then has to send it."""
        try:
            async with asyncio.timeout(FRAME_S):
                hold = await self._listener.room.take(self._client.share, size)
        except TimeoutError:
            self._listener.tell_of_user(self._client.share, self._client.host, "no room for a large request")
            raise
        self._holds.append(hold)
        self._arrived = 0
        hold.watch(
            lambda: self._arrived,
            lambda: self._give_way("a large request that hardly arrives, while others wait"),
            FRAME_STALL_S,
        )

    async def _check_shut_out(self) -> None:
        """Close the connection of a client that is shut out. Before a login it is not known, and nothing is said."""
        calls = self._listener.calls
        if calls is None or not self._session.is_admitted:
            return
        if (refusal := calls.refusal_of(self._session.who)) is not None:
            await self._all_left(0)
            raise _Closed(f"shut out: {refusal}")

    async def _take_message(self, size: int) -> None:
        """Take a message of SASL without a header, which follows a SaslHandshake of version 0."""
        if not 0 <= size <= MAX_BEFORE_BYTES:
            raise _Closed(f"a message of {size} bytes before authentication, at most {MAX_BEFORE_BYTES} are taken")
        answer = await self._session.take_message(await self._reader.readexactly(size))
        self._writer.write(_SIZE.pack(len(answer)) + answer)
        await self._writer.drain()

    async def _handle(self, key: int, version: int, correlation_id: int, frame: bytes) -> None:
        begun_s = time.monotonic()
        request = REQUESTS[key]
        if version > request.last or version < request.first:  # ApiVersions, else the head was refused
            await self._all_left(0)
            self._count_call(self._client)
            await self._respond(key, 0, correlation_id, api_versions(errors.UNSUPPORTED_VERSION), begun_s)
            return
        self._note_client(client_id_of(frame))
        self._is_question = key in _QUESTIONS
        try:
            at = body_at(frame, flexible=request.is_flexible(version))
            if key in _LISTS:
                await self._all_left(0)
                await self._hold_elements(max(LISTED_ELEMENTS, min(len(frame), request.max_elements)))
            begun_decoding_s = time.monotonic()
            try:
                body = request.decode(memoryview(frame), version, at, ON_LOOP_ELEMENTS)
            except LargeMessage:
                if key not in _LISTS:
                    await self._hold_elements(min(len(frame), request.max_elements))
                with charged_to(self._unpaid):
                    body = await self._listener.beside(request.decode, memoryview(frame), version, at)
                if key == api.FETCH:  # which keeps little of its request, and may wait long
                    self._holds.pop().give()
            else:
                self._unpaid.ms += (time.monotonic() - begun_decoding_s) * 1_000
        except InvalidRequestError as error:
            raise _Closed(f"a malformed request: {error}") from None
        body["client_id"] = client_id_of(frame)
        who = self._note_client(body["client_id"])
        if key == api.PRODUCE:
            await self._produce(body, len(frame), version, correlation_id, begun_s)
            return
        await self._all_left(0)
        if key == api.FETCH:
            if (owed_ms := self._share_debt(CONSUMER_BYTE_RATE)) > 0:
                response = {**self._listener.fetch.held(body, version, who), "throttle_time_ms": whole_ms(owed_ms)}
            else:
                response, delay_ms = await self._charged(
                    who, self._listener.fetch.serve(body, version, who, self._hold_records)
                )
                self._charge_fetch(response, delay_ms)
        elif key == api.SASL_HANDSHAKE:
            if self._session.is_admitted:  # else a connection may send few of them
                self._count_call(who)
            response = self._session.handshake(body, version)
        elif key == api.SASL_AUTHENTICATE:
            if self._session.is_admitted:
                self._count_call(who)
            response = await self._session.authenticate(body)
        else:
            if who.authorizer is not None and key not in PERMISSIONS:
                raise _Closed(f"{api_name(key)} has no permissions declared, so it is refused: a bug of the broker")
            response, delay_ms = await self._charged(who, self._listener.handlers[key](body, version, who))
            if key in _NEVER_HELD:
                delay_ms = 0.0
            self._mute(delay_ms, REQUEST_PERCENTAGE)
            delay_ms = max(delay_ms, self._count_call(who))
            if delay_ms > 0 and "throttle_time_ms" in response:
                response["throttle_time_ms"] = max(whole_ms(delay_ms), response["throttle_time_ms"])
        await self._respond(key, version, correlation_id, response, begun_s)
        if self._session.closing:
            raise _Closed(self._session.closing)

    async def _hold_elements(self, count: int) -> None:
        """Wait until so many elements of this request may be under way."""
        self._holds.append(await self._listener.elements.take(self._client.share, count))

    async def _hold_records(self, most: int, within_s: float) -> Hold | None:
        """Return room for at most `most` bytes of the log, for the response of this request; None: not in time."""
        self._holds = [each for each in self._holds if each.size]
        try:
            async with asyncio.timeout(within_s):
                hold = await self._listener.untaken.take(self._client.share, most, LEAST_FETCH_BYTES)
        except TimeoutError:
            return None
        self._holds.append(hold)
        return hold

    async def _produce(self, body: Fields, size_bytes: int, version: int, correlation_id: int, begun_s: float) -> None:
        try:
            begin = self._listener.produce.begin(body, version, self._client, self._producer_checks())
            response, for_time_ms = await self._charged(self._client, begin)
        except Refused as refused:
            raise _Closed(f"a produce with acks=0 was refused: {refused}") from None
        quotas, held_until_ms = self._listener.quotas, 0.0
        if quotas is not None:
            for_bytes_ms = quotas.produced(self._client, size_bytes)
            self._mute(for_bytes_ms, PRODUCER_BYTE_RATE)
            self._mute(for_time_ms, REQUEST_PERCENTAGE)
            if (delay_ms := max(for_bytes_ms, for_time_ms)) > 0:
                held_until_ms = quotas.now_ms() + delay_ms
        if body["acks"] == NO_ACK:
            return
        self._owed.append(_Owed(correlation_id, version, response, begun_s, held_until_ms))
        self._listener.counters.produces_unanswered += 1
        self._news.set()
        await self._all_left(MAX_UNANSWERED - 1)

    def _producer_checks(self) -> ProducerChecks | None:
        if self._checks is None:
            self._checks = self._listener.produce.checks_of(self._client)
        return self._checks

    def _share_debt(self, bytes_key: str) -> float:
        """Read nothing more while the client owes time for requests of other connections, which a new one does not end.

        Return for how many ms. `bytes_key`: the quota of what this request would transfer.
        """
        quotas = self._listener.quotas
        if quotas is None:
            return 0.0
        owed = {key: quotas.held_ms(self._client, key) for key in (bytes_key, REQUEST_PERCENTAGE)}
        for key, owed_ms in owed.items():
            self._mute(owed_ms, key)
        return max(owed.values())

    def _count_call(self, who: Caller) -> float:
        """Count a request against the rate of calls. Return for how many ms the connection is not read."""
        if self._listener.calls is None:
            return 0.0
        delay_ms = self._listener.calls.served(who)
        self._mute(delay_ms)
        return delay_ms

    async def _charged(self, who: Caller, work: Awaitable[T]) -> tuple[T, float]:
        """Await the work of a request, and charge the time that it takes, of the event loop and of conversions.

        Return its result, and for how many ms the client is to be held.
        """
        quotas = self._listener.quotas
        if quotas is None or not quotas.counts_time(who):
            return await work, 0.0
        measured = Measured(work)
        try:
            with charged_to(measured.meter):
                result = await measured
        finally:
            delay_ms = quotas.worked(who, measured.meter.ms + self._unpaid.ms)
            self._unpaid.ms = 0.0
        return result, delay_ms

    def _charge_fetch(self, response: Fields, for_time_ms: float) -> None:
        """Charge the records of a response, and note the delay in it: the longer one of bytes and time."""
        quotas = self._listener.quotas
        if quotas is None:
            return
        parts = (part for topic in response["responses"] for part in topic["partitions"] if part.get("records"))
        size_bytes = sum(len(batch) for part in parts for batch in part["records"])
        for_bytes_ms = quotas.fetched(self._client, size_bytes)
        self._mute(for_bytes_ms, CONSUMER_BYTE_RATE)
        self._mute(for_time_ms, REQUEST_PERCENTAGE)
        if (delay_ms := max(for_bytes_ms, for_time_ms)) > 0:
            response["throttle_time_ms"] = whole_ms(delay_ms)

    def _note_client(self, client_id: str) -> Caller:
        """Return the caller with the client id that the request names."""
        who, client_id = self._session.who, client_id[:MAX_CLIENT_ID]
        if self._client.client_id != client_id or self._named is not who:
            if self._named is not who:
                self._named, self._checks = who, None
            self._client = replace(who, client_id=client_id)
            caller.set(self._client)
        return self._client

    async def _all_left(self, but: int) -> None:
        """Wait until at most `but` produces owe a response."""
        while len(self._owed) > but:
            self._left.clear()
            await self._left.wait()

    # Responses

    async def _write_owed(self) -> None:
        while True:
            while self._owed:
                owed = self._owed[0]
                response = await owed.response
                await self._leased(response)
                if owed.held_until_ms and self._listener.quotas is not None:
                    response["throttle_time_ms"] = whole_ms(owed.held_until_ms - self._listener.quotas.now_ms())
                await self._respond(api.PRODUCE, owed.version, owed.correlation_id, response, owed.begun_s)
                self._owed.popleft()
                self._listener.counters.produces_unanswered -= 1
                self._left.set()
            self._news.clear()
            await self._news.wait()

    async def _leased(self, response: Fields) -> None:
        """Wait for a lease, unless nothing is acknowledged: what was decided under an earlier lease stays true."""
        lease = self._listener.lease
        renewed = asyncio.Event()
        try:
            while not lease.valid() and _acknowledges(response):
                lease.call_when_renewed(renewed.set)
                await renewed.wait()
                renewed.clear()
        finally:
            lease.stop_waiting(renewed.set)

    async def _respond(self, key: int, version: int, correlation_id: int, response: Fields, begun_s: float) -> None:
        message = RESPONSES[key]
        if is_large(response):
            with charged_to(self._unpaid):
                pieces = await self._listener.beside(message.encode, response, version)
        else:
            pieces = message.encode(response, version)
        if message.is_flexible(version) and key != api.API_VERSIONS:  # whose header a client reads before it knows
            pieces.insert(0, b"\0")
        size = sum(map(len, pieces)) + 4
        pieces.insert(0, _FRONT.pack(size, correlation_id))
        for hold in self._holds if key != api.PRODUCE else ():  # else they are the next request's
            hold.watch(
                lambda: self._written - self._writer.transport.get_write_buffer_size(),
                lambda: self._give_way("a response that the client does not take, while others wait"),
                RESPONSE_STALL_S,
            )
        until_s = asyncio.get_running_loop().time() + RESPONSE_S
        for chunk in chunks(pieces):
            self._writer.write(chunk)
            self._written += len(chunk)
            if self._writer.transport.get_write_buffer_size():  # else the socket has taken it
                async with asyncio.timeout_at(until_s):
                    await self._writer.drain()
        self._mute(response.get("throttle_time_ms", 0))
        self._count(key, response, begun_s)

    def _mute(self, delay_ms: float, quota: str = "") -> None:
        """Read nothing from the client for so long: it is told, and may not obey (KIP-219).

        `quota`: by which it is held; then a change of the quota shortens the time.
        """
        until_s = time.monotonic() + delay_ms / 1_000
        if delay_ms > 0 and until_s > self._muted_until_s:
            self._muted_until_s, self._muted_by = until_s, quota or self._muted_by

    async def _muted(self) -> None:
        """Return when the client may be read again, or has gone."""
        quotas = self._listener.quotas
        while (left_s := self._muted_until_s - time.monotonic()) > 0 and not self._reader.at_eof():
            if self._muted_by and quotas is not None:
                left_s = min(left_s, quotas.held_ms(self._client, self._muted_by) / 1_000)
                if left_s <= 0:
                    break
            await asyncio.sleep(min(left_s, LOOK_AGAIN_MS / 1_000))
        self._muted_until_s, self._muted_by = 0.0, ""

    def _count(self, key: int, response: Fields, begun_s: float) -> None:
        counted = self._listener.counters.request(f"Kafka.{api_name(key)}")
        counted.stages["total"].observe(time.monotonic() - begun_s)
        counted.outcomes["ERROR" if response.get("error_code") else "NONE"] += 1


def chunks(pieces: list[bytes]) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a response by CHUNK_BYTES."""
    small: list[memoryview] = []
    size = 0
    for piece in pieces:
        if size and size + len(piece) > CHUNK_BYTES:
            yield b"".join(small)
            small, size = [], 0
        view = memoryview(piece)
        while len(view) > CHUNK_BYTES:
            yield view[:CHUNK_BYTES]
            view = view[CHUNK_BYTES:]
        small.append(view)
        size += len(view)
    if size:
        yield b"".join(small)


def is_large(response: Fields) -> bool:
    """Whether a response has more than ON_LOOP_ELEMENTS; records do not count, which are written as they are."""
    return next(islice(_elements(response), ON_LOOP_ELEMENTS, None), None) is not None


def _elements(fields: Fields) -> Iterator[object]:
    for value in fields.values():
        if isinstance(value, list | tuple) and not (value and isinstance(value[0], bytes | memoryview)):
            for each in value:
                yield each
                if isinstance(each, dict):
                    yield from _elements(each)


def client_id_of(frame: bytes) -> str:
    """Return the client id in the header of a request whose header is complete; empty: it has none."""
    (length,) = struct.unpack_from(">h", frame, _HEAD.size)
    return frame[HEAD_BYTES : HEAD_BYTES + max(length, 0)].decode(errors="replace")


def body_at(frame: bytes, *, flexible: bool) -> int:
    """Return where the body of a request begins, after the client id and the header's tagged fields.

    Raises:
        InvalidRequestError: the header is cut short, or has too many tagged fields.
    """
    (length,) = struct.unpack_from(">h", frame, _HEAD.size)
    reader = Reader(memoryview(frame), HEAD_BYTES)
    if length >= 0:
        reader.take(length)
    if flexible:
        for _ in reader.tagged_fields():
            pass
    return reader.at


def _acknowledges(response: Fields) -> bool:
    return any(not part.get("error_code") for topic in response["responses"] for part in topic["partition_responses"])
