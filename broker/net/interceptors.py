"""Interceptors around the handlers of a gRPC server.

`RequestBounds` bounds requests before they are parsed: protobuf builds an object for every element of a list, so a MiB
of empty elements becomes 36 MiB of objects. Only produce requests carry records; all others are short, and have few
elements. A request with too many bytes or elements, or one that does not parse, ends its call with INVALID_ARGUMENT,
and is logged once a minute for each address and method.

`NodesOnly` admits callers to the inter-node listener by the node ids in their certificates.

`CallTimer` times every unary call. The streams of produce and fetch carry many requests each and time those themselves.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import time
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Collection, Hashable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Final, NamedTuple, NoReturn
from urllib.parse import unquote

import grpc
from google.protobuf.message import DecodeError
from grpc import aio

from broker.net.revocation import LOOK_EVERY_S, RevocationLists, has_expired
from broker.observability.counters import Counters
from raftlog._client.connections import refuse
from raftlog._core.security.acls import canonical_host
from raftlog.errors import (
    AuthenticationFailed,
    ClusterAuthorizationFailed,
    InvalidRequestError,
    RaftlogError,
    from_wire,
)
from raftlog.format.wire import LENGTH_DELIMITED, MANY_REQUESTS, read_varint, skip
from raftlog.v1.common_pb2 import Error
from raftmeta.quorum.peer_identity import NODE_URI, node_ids_of, peer_nodes

logger = logging.getLogger(__name__)


class RewrittenHandlers(aio.ServerInterceptor):
    """Serves the handler that `rewrite` returns; rewrites each handler once, at its first call."""

    def __init__(self) -> None:
        self._rewritten: dict[Any, Any] = {}
        """Rewritten handlers by method and original handler; bounded by the server's methods."""

    @abstractmethod
    def rewrite(self, method: str, handler: Any) -> Any:
        """Return the handler that serves `method` (`/package.Service/Method`): `handler` itself or one around it."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Return the method's handler, rewritten."""
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return None
        key = handler_call_details.method, handler  # two methods may have equal handlers
        rewritten = self._rewritten.get(key)
        if rewritten is None:
            rewritten = self._rewritten[key] = self.rewrite(handler_call_details.method, handler)
        return rewritten  # type: ignore[no-any-return] # grpc's handler is a named tuple that its types do not tell


MAX_REQUEST_BYTES: Final = 1 << 20
"""For a request without records. Room for some 20 000 partitions, or a hundred times every config of a topic."""
LARGE_METHODS: Final = frozenset({"/raftlog.v1.Log/Produce"})
"""Methods that socket.request.max.bytes and `raftlog.format.wire.MAX_PARTS` bound instead."""
MAX_LOGIN_BYTES: Final = 64 << 10
"""For a message of a login; the tokens of issuers have some KiB."""
SHORT_METHODS: Final = frozenset({"/raftlog.v1.Security/Authenticate"})
"""Methods that MAX_LOGIN_BYTES bounds instead."""


MAX_OBJECTS: Final = 20_000
"""For a request, of texts and messages in it: more than its 10,000 partitions or names need."""
MAX_FIELDS: Final = 40_000
"""For a request, of fields of any kind in what is scanned. Scanning so many takes the event loop some ms."""
UNSCANNED_BYTES: Final = 40 << 10
"""A request up to this size is not scanned: a field takes two bytes at least, so it has few enough."""
CALL_BYTES: Final = 4 << 10
"""A longer request counts as one call more for each so many bytes (`calls_of`)."""

_request_bytes: ContextVar[int] = ContextVar("request_bytes", default=0)
"""The size of the unary request that this task serves."""


def calls_of_request() -> int:
    """Return as how many calls the unary request of this task counts."""
    return calls_of(_request_bytes.get())


def calls_of(size: int) -> int:
    """Return as how many calls a message of so many bytes counts: reading a long one takes the loop longer."""
    return 1 + size // CALL_BYTES


LOGGED_EVERY_MS: Final = 60_000.0
MAX_LOGGED: Final = 1_024
"""Keys whose last line is remembered."""


class Rarely:
    """Says whether to log what a client can bring about at will: once a minute for each key."""

    def __init__(self) -> None:
        self._logged_ms: dict[Hashable, float] = {}

    def may_log(self, key: Hashable, now_ms: float) -> bool:
        """Return whether it is time for another line about the key; the caller then logs it. `now_ms` is monotonic."""
        if now_ms - self._logged_ms.get(key, -math.inf) < LOGGED_EVERY_MS:
            return False
        if len(self._logged_ms) >= MAX_LOGGED:
            self._logged_ms.clear()
        self._logged_ms[key] = now_ms
        return True


class MalformedRequest(DecodeError):
    """A request that is too long, or does not parse."""


class Unread(NamedTuple):
    """Stands for a malformed request of a unary call until the handler can refuse it."""

    why: str
    too_long: bool
    """Whether it is longer than any request of its method, and was not even parsed."""


class RequestBounds(RewrittenHandlers):
    """Refuses malformed requests, and requests longer than MAX_REQUEST_BYTES; the connection stays open."""

    def __init__(self) -> None:
        super().__init__()
        self._logged = Rarely()

    def rewrite(self, method: str, handler: Any) -> Any:
        """Return the handler with a bounded parser, and with a refusal of what that does not accept."""
        kind = next(kind for kind in _KINDS if getattr(handler, kind) is not None)
        behavior = getattr(handler, kind)
        most_bytes = MAX_LOGIN_BYTES if method in SHORT_METHODS else MAX_REQUEST_BYTES

        async def coroutine(request: Any, context: Any) -> Any:
            if isinstance(request, Unread):
                await self._refuse(method, context, request.why)
            try:
                return await behavior(request, context)
            except MalformedRequest as error:  # of a stream
                await self._refuse(method, context, str(error))

        async def generator(request: Any, context: Any) -> Any:
            if isinstance(request, Unread):
                await self._refuse(method, context, request.why)
            try:
                async for response in behavior(request, context):
                    yield response
            except MalformedRequest as error:
                await self._refuse(method, context, str(error))

        return handler._replace(
            request_deserializer=_bounded(
                handler.request_deserializer,
                None if method in LARGE_METHODS else most_bytes,
                is_stream=handler.request_streaming,
            ),
            **{kind: generator if inspect.isasyncgenfunction(behavior) else coroutine},
        )

    async def _refuse(self, method: str, context: Any, why: str) -> NoReturn:
        """Abort the call, and log it unless the same address and method were logged within a minute."""
        key = host_of(context.peer()), method
        if self._logged.may_log(key, 1_000 * time.monotonic()):
            logger.warning("malformed request refused", extra={"peer": key[0], "method": method, "error": why})
        text = f"malformed request: {why}"
        await refuse(context, grpc.StatusCode.INVALID_ARGUMENT, InvalidRequestError(text), text)


def _bounded(parse: Callable[[bytes], Any], most_bytes: int | None, *, is_stream: bool) -> Callable[[bytes], Any]:
    """Return a parser that checks the length and the number of fields first; in streams it raises `MalformedRequest`.

    A refusal does not hold on to the request. An exception that was raised here would: its traceback may live until the
    next garbage collection, and the request with it.
    """
    descriptor = getattr(getattr(parse, "__self__", None), "DESCRIPTOR", None)
    shape = None if descriptor is None else _Shape.of(descriptor, {})

    def why_too_long(data: bytes) -> str:
        if most_bytes is not None and len(data) > most_bytes:
            return f"the request has {len(data)} bytes, this method takes at most {most_bytes}; split the request"
        if shape is not None and len(data) > UNSCANNED_BYTES and not _has_few_fields(data, shape):
            return f"the request has more than {MAX_OBJECTS} elements, or {MAX_FIELDS} fields; split it"
        return ""

    def parse_bounded(data: bytes) -> Any:
        if not is_stream:
            _request_bytes.set(len(data))
        too_long = False
        try:
            why = why_too_long(data)
            if not why:
                return parse(data)
            too_long = True
        except (DecodeError, RaftlogError) as error:
            why = str(error)
        del data
        if is_stream:
            raise MalformedRequest(why)
        return Unread(why, too_long)

    return parse_bounded


class _Shape:
    """Which fields of a message type have to be scanned, by number: those of types with lists of messages or texts."""

    __slots__ = ("inner",)

    def __init__(self) -> None:
        self.inner: dict[int, _Shape] = {}

    @staticmethod
    def of(descriptor: Any, known: dict[str, _Shape]) -> _Shape:
        """Return the shape of a message type. `known`: those that were made, since types may contain themselves."""
        shape = known.get(descriptor.full_name)
        if shape is None:
            shape = known[descriptor.full_name] = _Shape()
            for each in descriptor.fields:
                if each.message_type is not None and _has_lists(each.message_type, set()):
                    shape.inner[each.number] = _Shape.of(each.message_type, known)
        return shape


def _has_lists(descriptor: Any, seen: set[str]) -> bool:
    """Whether a message type, or one within it, has a list of messages or texts."""
    if descriptor.full_name in seen:
        return False
    seen.add(descriptor.full_name)
    return any(
        (each.is_repeated and each.type in (each.TYPE_MESSAGE, each.TYPE_STRING, each.TYPE_BYTES))
        or (each.message_type is not None and _has_lists(each.message_type, seen))
        for each in descriptor.fields
    )


def _has_few_fields(data: bytes, shape: _Shape) -> bool:
    """Whether a message is within MAX_OBJECTS and MAX_FIELDS, with its parts of types that have lists.

    Raises:
        DecodeError: it is no message.
    """
    fields = objects = 0
    scans = [(0, len(data), shape)]
    try:
        while scans:
            position, end, shape = scans.pop()
            inner_of = shape.inner.get
            while position < end:  # most tags and lengths have one byte, and need no call
                fields += 1
                if fields > MAX_FIELDS:
                    return False
                tag = data[position]
                position += 1
                if tag >= 0x80:
                    tag, position = read_varint(data, position - 1)
                if tag & 7 != LENGTH_DELIMITED:
                    position = skip(data, tag & 7, position)
                    continue
                objects += 1
                if objects > MAX_OBJECTS:
                    return False
                length = data[position]
                position += 1
                if length >= 0x80:
                    length, position = read_varint(data, position - 1)
                inner = inner_of(tag >> 3)
                if inner is not None:
                    scans.append((position, min(position + length, end), inner))
                position += length
    except (IndexError, ValueError) as error:
        raise DecodeError(f"no valid message: {error}") from None
    return True


_KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")


class _Peer:
    """A connection with open calls. `is_ended`: it was closed since its certificate is revoked."""

    __slots__ = ("calls", "certificate", "is_ended", "nodes")

    def __init__(self, certificate: bytes, nodes: frozenset[int]) -> None:
        self.certificate = certificate
        self.nodes = nodes
        self.calls = 0
        self.is_ended = False


class NodesOnly(RewrittenHandlers):
    """Refuses calls whose certificate names no node, is revoked, or has expired. `watch` runs as a task.

    Handlers read the node ids that it names from `peer_nodes`.
    """

    def __init__(self, revoked: RevocationLists | None = None) -> None:
        super().__init__()
        self._revoked = revoked
        self._peers: dict[str, _Peer] = {}
        """Connections with calls; followed only if certificates may be revoked."""
        self._logged = Rarely()

    @property
    def followed(self) -> int:
        """How many connections with open calls are followed."""
        return len(self._peers)

    def rewrite(self, method: str, handler: Any) -> Any:
        """Return the handler with a check of the certificate before it."""
        return preceded(handler, self._identify)

    async def watch(self, end_connections: Callable[[Collection[str]], Awaitable[None]]) -> None:
        """Read lists that have changed, and close the connections of nodes that they revoke, for ever.

        `end_connections`: closes the connections of peers; raises OSError or RuntimeError if it cannot look for them.
        """
        while self._revoked is not None:
            await asyncio.sleep(LOOK_EVERY_S)
            try:
                await self._revoked.fresh()
                await self.end_revoked(end_connections)
            except (OSError, RuntimeError) as error:  # no descriptor or no thread is left; the next round tries again
                if self._logged.may_log("end", 1_000 * time.monotonic()):
                    logger.error("connections with revoked certificates could not be closed: %s", error)

    async def end_revoked(self, end_connections: Callable[[Collection[str]], Awaitable[None]]) -> None:
        """Close the connections that have open calls and whose certificates are revoked. Log each once."""
        revoked = self._revoked
        if revoked is None:
            return
        found = {name: peer for name, peer in self._peers.items() if revoked.is_revoked(peer.certificate)}
        if not found:
            return
        await end_connections(found)
        new = {name: peer for name, peer in found.items() if not peer.is_ended}
        if new:
            logger.error(
                "closed connections of nodes: their certificates have been revoked",
                extra={
                    "event": "revoked_nodes_disconnected",
                    "nodes": sorted(set().union(*(peer.nodes for peer in new.values()))),
                    "peers": sorted(new),
                },
            )
        for peer in new.values():
            peer.is_ended = True

    async def _identify(self, context: Any) -> None:
        if is_resumed_and_expired(context.auth_context()):
            await self._refuse(context, EXPIRED)
        if self._revoked is not None:
            await self._revoked.fresh()
            certificate = certificate_of(context.auth_context())
            if self._revoked.is_revoked(certificate):
                await self._refuse(context, REVOKED)
            if certificate:
                self._follow(context, certificate)
        await _identify(context)

    async def _refuse(self, context: Any, why: str) -> NoReturn:
        nodes = sorted(node_ids_of(context.auth_context()) or ())
        key = host_of(context.peer()), *nodes
        if self._logged.may_log(key, 1_000 * time.monotonic()):
            short, _, _ = why.partition(";")
            logger.error("refused a call: %s", short, extra={"peer": context.peer(), "nodes": nodes})
        await refuse(context, grpc.StatusCode.UNAUTHENTICATED, AuthenticationFailed(why))

    def _follow(self, context: Any, certificate: bytes) -> None:
        """Count the call among those of its connection until its task ends."""
        name = context.peer()
        peer = self._peers.get(name)
        if peer is None or peer.certificate != certificate:  # of an earlier connection, whose calls are ending
            peer = self._peers[name] = _Peer(certificate, node_ids_of(context.auth_context()) or frozenset())
        peer.calls += 1

        def leave(_: object) -> None:
            peer.calls -= 1
            if not peer.calls and self._peers.get(name) is peer:
                del self._peers[name]

        task = asyncio.current_task()
        assert task is not None, "gRPC serves each call in a task"
        task.add_done_callback(leave)


REVOKED: Final = "the certificate has been revoked by its CA; use another one"
EXPIRED: Final = (
    "the certificate has expired since its TLS session began; use a new one, and connect without that session"
)


def certificate_of(auth_context: Mapping[str, Sequence[bytes]]) -> bytes:
    """Return the PEM of the certificate at the other end of a call; b"" without one."""
    (certificate,) = auth_context.get("x509_pem_cert", ()) or (b"",)
    return certificate


def is_resumed_and_expired(auth_context: Mapping[str, Sequence[bytes]]) -> bool:
    """Return whether a call's connection resumed a TLS session, and the certificate of the session has expired.

    A resumed handshake has no certificate: TLS takes the session's, and does not check its dates again. gRPC cannot
    be told to resume none. Tickets count for days, and each use brings a new one.
    """
    return auth_context.get("ssl_session_reused") == [b"true"] and has_expired(certificate_of(auth_context))


def preceded(handler: Any, before: Callable[[Any], Awaitable[None]]) -> Any:
    """Return a handler of any kind of call with `before(context)` run first; `before` may abort the call."""
    kind = next(kind for kind in _KINDS if getattr(handler, kind) is not None)
    behavior = getattr(handler, kind)

    async def coroutine(request: Any, context: Any) -> Any:
        await before(context)
        return await behavior(request, context)

    async def generator(request: Any, context: Any) -> Any:
        await before(context)
        async for response in behavior(request, context):
            yield response

    return handler._replace(**{kind: generator if inspect.isasyncgenfunction(behavior) else coroutine})


async def _identify(context: Any) -> None:
    nodes = node_ids_of(context.auth_context())
    if nodes is not None and not nodes:
        text = (
            f"this listener serves nodes only, and the certificate names no node; for a node, issue a certificate "
            f"with the URI {NODE_URI}ID; a client connects to `listeners` instead"
        )
        await refuse(context, grpc.StatusCode.PERMISSION_DENIED, ClusterAuthorizationFailed(text), text)
    peer_nodes.set(nodes)


_headers_sent: ContextVar[bool] = ContextVar("headers_sent", default=False)


def sends_many_requests(context: Any) -> bool:
    """Whether the client may put several produce requests into a message."""
    return MANY_REQUESTS in tuple(context.invocation_metadata() or ())


async def send_headers(context: Any) -> None:
    """Send the headers of a stream by themselves, once: an interceptor or the handler, whichever comes first.

    They name the features of produce streams that the client asked for and this broker has.
    """
    if not _headers_sent.get():
        _headers_sent.set(True)  # of this call: gRPC serves each in a task of its own
        await context.send_initial_metadata((MANY_REQUESTS,) if sends_many_requests(context) else ())


class CallTimer(RewrittenHandlers):
    """Counts unary calls by method and outcome, and times them."""

    def __init__(self, counters: Counters) -> None:
        super().__init__()
        self._counters = counters

    def rewrite(self, method: str, handler: Any) -> Any:
        """Return the handler with a timer around it."""
        if handler.unary_unary is None:
            return handler
        return handler._replace(unary_unary=self._around(method.rpartition("/")[2], handler.unary_unary))

    def _around(self, name: str, call: Callable[[Any, Any], Awaitable[Any]]) -> Callable[[Any, Any], Awaitable[Any]]:
        counters = self._counters.request(name)

        async def timed(request: Any, context: Any) -> Any:
            started_s = time.monotonic()
            outcome = "ABORTED"
            try:
                response = await call(request, context)
                outcome = _outcome(response)
                return response
            finally:
                counters.outcomes[outcome] += 1
                counters.stages["total"].observe(time.monotonic() - started_s)

        return timed


def _outcome(response: Any) -> str:
    """Return the name of the response's own error, "NONE" without one; errors of its parts do not count."""
    error = getattr(response, "error", None)
    return type(from_wire(error)).__name__ if isinstance(error, Error) and error.code else "NONE"


def host_of(peer: str) -> str:
    """Return the address of a gRPC peer: `ipv4:127.0.0.1:4321`, `ipv6:%5B::1%5D:4321`."""
    _, _, address = unquote(peer).partition(":")
    return canonical_host(address.rpartition(":")[0].strip("[]") or address)
