"""gRPC channels by address, the error of each gRPC failure, and how a server refuses a call with one.

Most errors are values in responses. A call ends with a gRPC status instead if the server cannot answer it: its caller
is not identified or not permitted, its request does not parse, or its stream must end. The status' text,
`ClassName: message`, is for people. Its details are for programs, in the form of gRPC's richer error model: a
`google.rpc.Status` in the trailing metadata `grpc-status-details-bin`, with one `raftlog.v1.Error` (docs/protocol.md).
`refuse` writes the details, `refusal_of` reads them. A status without details comes from gRPC itself, a proxy, or an
earlier version.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NoReturn
from urllib.parse import quote

import grpc
from google.protobuf.message import DecodeError
from google.rpc.status_pb2 import Status

from raftlog._client.security import (
    FROM_PLUGIN,
    REFUSES,
    ChannelTls,
    Options,
    PemFiles,
    Sasl,
    dial,
    forget_token,
    named_error,
)
from raftlog.errors import (
    AuthenticationFailed,
    AuthorizationError,
    BrokerOverloaded,
    BrokerUnavailable,
    InternalError,
    InvalidRequestError,
    RaftlogError,
    RequestTimedOut,
    RetriableError,
    ThrottlingQuotaExceeded,
    TokenExpired,
    UnsupportedVersion,
    from_wire,
    to_wire,
)
from raftlog.v1.common_pb2 import Error

CHANNEL_OPTIONS: Final[list[tuple[str, Any]]] = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.max_frame_size", 1 << 20),
]


REFUSED: Final = "connection refused"
_NOT_TRUSTED: Final = "its certificate is not from a CA that is trusted here"
_NAME: Final = "its certificate does not name this address; use a name in it, or issue one with this address"
_EXPIRED: Final = "its certificate has expired"
_NOT_YET: Final = "its certificate is not valid yet; is a clock wrong?"
_NO_TLS: Final = "it does not speak TLS; is security.protocol right, and the port?"
_TLS_TROUBLES: Final = (_NOT_TRUSTED, _NAME, _EXPIRED, _NOT_YET, _NO_TLS)
"""TLS failures that waiting does not change."""
_HOPELESS: Final = (REFUSED, *_TLS_TROUBLES)
REFUSED_GRACE_S: Final = 2.0
"""How long a starting server may take to open its port."""
REPLACED_AFTER_S: Final = 2.0
"""The age at which a channel without a connection is replaced: a new channel resolves the name at once. gRPC retries a
name that it could not resolve after pauses that grow to two minutes. After it has lost a connection, it first tries the
address that it knew, and a pod that is gone does not even refuse the connection."""
_LAST_CALLS_S: Final = 30.0
"""How long calls of a replaced channel may go on: a stopping server accepts no connections, but still answers calls."""
_ASK_AGAIN_S: Final = 10.0
"""How long it counts why a listener has closed new connections. Each question costs it a handshake or two."""
_RESET: Final = "the connection was reset"
_CLOSED: Final = "the connection was closed"
_IN_WORDS: Final = {
    "hostname verification check failed": _NAME,
    "certificate has expired": _EXPIRED,
    "certificate is not yet valid": _NOT_YET,
    "certificate_verify_failed": _NOT_TRUSTED,
    "certificate signature failure": _NOT_TRUSTED,  # of another CA with the same name
    "wrong_version_number": _NO_TLS,
    "http1.x server": "it is a web server, or another program that speaks HTTP/1; is the port right?",
    "connection refused": REFUSED,
    "domain name not found": "the host name is not known",
    "name or service not known": "the host name is not known",
    "no route to host": "no route to host",
    "network is unreachable": "the network is not reachable",
    "connection reset": _RESET,
    "broken pipe": _RESET,
    "socket closed": _CLOSED,
    "connection timed out": "it does not answer",
}
"""gRPC's texts in plain words; the first match counts."""
_CLOSED_AT_ONCE: Final = (
    "it closed the new connection; is the port right? A listener for Kafka clients does that to raftlog's clients "
    "(raftlog up prints both ports), a listener with TLS to plaintext clients (security.protocol) and to clients "
    "without a certificate that it trusts (ssl.certificate.location), another program to any client"
)
_CLOSED_EARLY: Final = (_CLOSED_AT_ONCE, _CLOSED, _RESET)
"""What gRPC makes of a connection that the server closes after the client's part of TLS's handshake."""


class NobodyListens(BrokerUnavailable):
    """Every address has refused the connection: no server runs there, or not yet. Never sent over the wire."""


class TlsFailed(NobodyListens):
    """TLS has failed at every address for reasons that waiting does not change. Never sent over the wire."""


class CertificateRefused(TlsFailed):
    """A broker refuses the client for its certificate, and no other one takes it. Never sent over the wire.

    `why`: what is wrong with the certificate, "" if the client has none.
    """

    why = ""


def unavailable(addresses: Sequence[str], reasons: Sequence[str]) -> BrokerUnavailable:
    """Return the error after all addresses have failed, with the reason of each."""
    if reasons and all(reason.endswith(_TLS_TROUBLES) for reason in reasons):
        return TlsFailed(
            f"no TLS connection to a broker at {', '.join(addresses)}; check the addresses, security.protocol and "
            f"ssl.ca.location ({'; '.join(reasons)})"
        )
    refused = bool(reasons) and all(reason.endswith(_HOPELESS) for reason in reasons)
    return (NobodyListens if refused else BrokerUnavailable)(
        f"no broker answers at {', '.join(addresses)}; check that the cluster runs, that the addresses and ports are "
        f"right and that no firewall is between ({'; '.join(reasons)})"
    )


def in_words(details: str) -> str:
    """Return gRPC's text about a connection in plain words, or unchanged if there are none for it."""
    text = details.lower()
    if text.startswith("failed to connect to all addresses") and text.endswith("socket closed"):
        return _CLOSED_AT_ONCE
    return next((words for part, words in _IN_WORDS.items() if part in text), details)


def from_grpc(error: grpc.aio.AioRpcError | asyncio.TimeoutError | Exception, address: str) -> RaftlogError:
    """Return the `RaftlogError` for a failed call."""
    if isinstance(error, RaftlogError):
        return error
    if not isinstance(error, grpc.RpcError):
        return BrokerUnavailable(f"the connection to {address} broke: {type(error).__name__}: {error}")
    code = error.code()
    details = error.details() or code.name
    told = refusal_of(error.trailing_metadata()) if isinstance(error, grpc.aio.AioRpcError) else None
    match code:
        case (
            grpc.StatusCode.UNAVAILABLE
            | grpc.StatusCode.CANCELLED
            | grpc.StatusCode.UNKNOWN
            | grpc.StatusCode.INTERNAL  # a reset stream
        ):
            found = named_error(details) if FROM_PLUGIN in details else None  # why the call has no token
            if found is not None and not isinstance(found, RetriableError):
                return found
            return BrokerUnavailable(f"no connection to {address}: {in_words(details)}")
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            more = "" if details == "Deadline Exceeded" else f": {details}"
            return RequestTimedOut(f"{address} did not answer in time{more}")
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            if isinstance(told, ThrottlingQuotaExceeded):
                return told
            return BrokerOverloaded(f"{address}: {details}")
        case grpc.StatusCode.INVALID_ARGUMENT:
            return InvalidRequestError(f"{address}: {details}")
        case grpc.StatusCode.UNAUTHENTICATED:
            return _not_authenticated(details, address, told)
        case grpc.StatusCode.PERMISSION_DENIED:
            found = told or named_error(details)
            return found if isinstance(found, AuthorizationError) else AuthorizationError(f"{address}: {details}")
        case grpc.StatusCode.UNIMPLEMENTED:
            return UnsupportedVersion(
                f"{address} does not know this call: it may be a node's inter.node.listener, while clients connect to "
                f"its listeners, or a server of another version or kind ({details})"
            )
        case _:
            return InternalError(f"{address}: {code.name}: {details}")


def client_id_metadata(client_id: str) -> tuple[tuple[str, str], ...]:
    """Return the metadata of a call by which brokers know the client id, on which quotas may depend."""
    return (("client-id", quote(client_id, safe=" !#$&'()*+,/:;=?@[]")),) if client_id else ()


def _not_authenticated(details: str, address: str, told: RaftlogError | None) -> RaftlogError:
    """Return the error for a refused authentication, and drop the token of the address, if there is one."""
    logged_in = forget_token(address)
    found = told or named_error(details)
    if not isinstance(found, TokenExpired):
        return found if isinstance(found, AuthenticationFailed) else AuthenticationFailed(f"{address}: {details}")
    if logged_in:
        return BrokerUnavailable(f"{address} wants a new login: {found}")
    return AuthenticationFailed(
        f"{address} requires a login: set security.protocol=sasl_ssl, sasl.username and sasl.password.location"
    )


OpenChannel = Callable[[str], grpc.aio.Channel]


def _open_insecure(address: str) -> grpc.aio.Channel:
    return dial(address, CHANNEL_OPTIONS, None)


_open: OpenChannel = _open_insecure


def open_channel(address: str, tls: ChannelTls | None = None) -> grpc.aio.Channel:
    """Return a new channel to `host:port`. All channels of clients to brokers come from here."""
    return _open(address) if tls is None else tls.open(address, CHANNEL_OPTIONS)


def use_channels(opens: OpenChannel) -> OpenChannel:
    """Replace how this process opens plaintext channels, for simulations; return the previous function."""
    global _open
    before, _open = _open, opens
    return before


def is_task_cancelled() -> bool:
    """Whether a CancelledError that was caught is this task's own, and not one of a call whose channel was closed."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


class Connections:
    """The channels of one client, or of several that share them. A channel reconnects by itself, and is closed with the
    last client.

    A channel that cannot connect, or has lost its connection, is replaced when the client asks for it. When the
    certificates change, new channels are opened; calls on old channels continue until the next change. A call whose
    channel is closed under it raises CancelledError (`is_task_cancelled`).
    """

    def __init__(self, tls: ChannelTls | None = None, options: Options | None = None) -> None:
        """`options`: channel options other than `CHANNEL_OPTIONS`."""
        self._tls = tls
        self._options = options
        self._version = tls.version if tls is not None else 0
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._opened_s: dict[str, float] = {}
        self._refusals: dict[str, tuple[float, int, str]] = {}
        """By address: when it was asked why it closes connections, the certificates' version, and the answer."""
        self._before: list[grpc.aio.Channel] = []
        self._closing: set[asyncio.Task[None]] = set()
        self._ended = asyncio.Event()
        self._clients = 1
        self._loop: asyncio.AbstractEventLoop | None = None
        """The event loop of shared connections, kept so that no other loop gets its `id`."""

    def channel(self, address: str) -> grpc.aio.Channel:
        """Return the channel to an address; open it on first use."""
        if self._tls is not None and self._tls.version != self._version:
            self._renew(self._tls.version)
        channel = self._channels.get(address)
        if channel is not None and not self._is_unconnected(address, channel):
            return channel
        if channel is not None:
            self._retire(channel, _LAST_CALLS_S)
        channel = self._channels[address] = self._opened(address)
        self._opened_s[address] = time.monotonic()
        return channel

    async def unavailable(self, addresses: Sequence[str], reasons: Sequence[str]) -> BrokerUnavailable:
        """As the function. If a listener with TLS closes new connections, it is asked whether the certificate is why.

        One of them is asked, as clients may have the addresses of very many brokers.
        """
        closed = {f"no connection to {address}: {words}": address for address in addresses for words in _CLOSED_EARLY}
        first = next((reason for reason in reasons if reason in closed), None)
        words = "" if first is None else await self._why_refused(closed[first])
        if not words:
            return unavailable(addresses, reasons)
        told = [
            f"no connection to {closed[first]}: {words}" if each == first else each.replace(_CLOSED_AT_ONCE, _CLOSED)
            for each in reasons
        ]
        if not all(each in closed or each.endswith(_HOPELESS) for each in reasons):
            return unavailable(addresses, told)
        error = CertificateRefused(
            f"no broker at {', '.join(addresses)} takes a connection of this client ({'; '.join(told)})"
        )
        error.why = words.partition(REFUSES)[2]
        return error

    async def _why_refused(self, address: str) -> str:
        """Return why a broker refuses the client's certificate; "": it does not, or the connection is in plaintext."""
        if self._tls is None:
            return ""
        now_s, version = time.monotonic(), self._tls.version
        at_s, of_version, words = self._refusals.get(address, (-math.inf, 0, ""))
        if now_s - at_s >= _ASK_AGAIN_S or of_version != version:
            words = await self._tls.why_refused(address)
            self._refusals[address] = time.monotonic(), version, words
        return words

    def _is_unconnected(self, address: str, channel: grpc.aio.Channel) -> bool:
        return time.monotonic() - self._opened_s[address] >= REPLACED_AFTER_S and channel.get_state() in (
            grpc.ChannelConnectivity.IDLE,
            grpc.ChannelConnectivity.TRANSIENT_FAILURE,
        )

    def _opened(self, address: str) -> grpc.aio.Channel:
        return open_channel(address, self._tls) if self._options is None else dial(address, self._options, self._tls)

    def _renew(self, version: int) -> None:
        self._version = version
        for channel in self._before:
            self._retire(channel, _LAST_CALLS_S)
        self._before, self._channels = list(self._channels.values()), {}

    def _retire(self, channel: grpc.aio.Channel, grace_s: float) -> None:
        task = asyncio.ensure_future(self._close_after(channel, grace_s))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _close_after(self, channel: grpc.aio.Channel, grace_s: float) -> None:
        if grace_s:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    await self._ended.wait()
        await channel.close()

    async def close(self) -> None:
        """Close all channels, unless other clients use them; calls in progress end."""
        self._clients -= 1
        if self._clients > 0:
            return
        channels, self._channels, self._before = [*self._channels.values(), *self._before], {}, []
        self._ended.set()
        await asyncio.gather(*(channel.close() for channel in channels), *self._closing, return_exceptions=True)


def connections(pem: PemFiles | None, sasl: Sasl | None = None) -> Connections:
    """Return the connections of a client: with TLS and these files, or in plaintext. `sasl`: the login.

    Raises:
        InvalidConfig: a file cannot be read, or has the wrong content.
    """
    return Connections(ChannelTls(pem, sasl) if pem is not None else None)


_shared: weakref.WeakValueDictionary[tuple[object, ...], Connections] = weakref.WeakValueDictionary()


def shared_connections(loop: asyncio.AbstractEventLoop, pem: PemFiles | None, sasl: Sasl | None = None) -> Connections:
    """As `connections`, but one for all callers of this event loop and process with these settings; each closes it."""
    key = (os.getpid(), id(loop), pem, sasl)
    found = _shared.get(key)
    if found is None or found._clients <= 0:
        found = _shared[key] = connections(pem, sasl)
        found._loop = loop
    else:
        found._clients += 1
    return found


DETAILS: Final = "grpc-status-details-bin"
MAX_MESSAGE_BYTES: Final = 1_500
"""The size limit of the message in the details. Peers accept 8 KiB of metadata; the details travel in base64."""
MAX_TEXT_BYTES: Final = 4_000
"""The size limit of the status' text on the wire, where each byte outside of ASCII takes three."""
assert MAX_MESSAGE_BYTES * 4 // 3 + MAX_TEXT_BYTES < 8_192 - 1_024


async def refuse(context: Any, status: grpc.StatusCode, error: RaftlogError, text: str | None = None) -> NoReturn:
    """End a call with a status that carries the error. `text` replaces `ClassName: message` for people."""
    shown = _cut(f"{type(error).__name__}: {error}" if text is None else text)
    await context.abort(status, shown, trailing_metadata=((DETAILS, status_details(status, error, shown)),))
    raise AssertionError("abort raises")


def status_details(status: grpc.StatusCode, error: RaftlogError, text: str) -> bytes:
    """Return the serialized `google.rpc.Status` with the error."""
    wire = to_wire(error)
    wire.message = wire.message.encode()[:MAX_MESSAGE_BYTES].decode(errors="ignore")
    number: int = status.value[0]
    carrier = Status(code=number, message=text.encode()[:MAX_MESSAGE_BYTES].decode(errors="ignore"))
    carrier.details.add().Pack(wire)
    if carrier.ByteSize() > 2 * MAX_MESSAGE_BYTES:  # the text has nearly the same content
        carrier.message = ""
    serialized: bytes = carrier.SerializeToString()
    return serialized


def refusal_of(trailing_metadata: Iterable[tuple[str, str | bytes]] | None) -> RaftlogError | None:
    """Return the error in the details of a call's status; None if there is none."""
    for name, value in trailing_metadata or ():
        if name != DETAILS or not isinstance(value, bytes):
            continue
        try:
            for each in Status.FromString(value).details:
                wire = Error()
                if each.Unpack(wire):
                    return from_wire(wire)
        except DecodeError:
            return None
    return None


def _cut(text: str) -> str:
    """Return the text, cut so that it takes at most MAX_TEXT_BYTES on the wire."""
    while len(quote(text, safe=" !#$&'()*+,/:;=?@[]\"<>\\^`{|}")) > MAX_TEXT_BYTES:
        text = text[: len(text) * 9 // 10]
    return text
