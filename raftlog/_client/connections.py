"""gRPC channels by address, and what gRPC's failures mean."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Final

import grpc

from raftlog._client.logins import FROM_PLUGIN, forget_token, named_error
from raftlog._client.pem import PemFiles
from raftlog._client.sasl import Sasl
from raftlog._client.tls import ChannelTls, Options, dial
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
    UnsupportedVersion,
)

CHANNEL_OPTIONS: Final[list[tuple[str, Any]]] = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),  # a connection of its own: no client holds another one back
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 250),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.enable_http_proxy", 0),
    ("grpc.http2.max_frame_size", 1 << 20),
]


REFUSED: Final = "connection refused"
TOKEN_EXPIRED: Final = "TokenExpired: "
"""So a broker begins that wants another login: its tokens do not outlive it, nor a change of the password."""
_NOT_TRUSTED: Final = "its certificate is not of a CA that is trusted here"
_NAME: Final = "its certificate does not name this address; use a name that it has, or issue one with this address"
_EXPIRED: Final = "its certificate has expired"
_NOT_YET: Final = "its certificate does not count yet; is a clock wrong?"
_NO_TLS: Final = "it does not speak TLS; is security.protocol right, and the port?"
_TLS_TROUBLES: Final = (_NOT_TRUSTED, _NAME, _EXPIRED, _NOT_YET, _NO_TLS)
"""Nothing that waiting helps against."""
REFUSED_GRACE_S: Final = 2.0
"""How long a server may take to open its port that is just being started."""
_IN_WORDS: Final = {
    "hostname verification check failed": _NAME,
    "certificate has expired": _EXPIRED,
    "certificate is not yet valid": _NOT_YET,
    "certificate_verify_failed": _NOT_TRUSTED,
    "certificate signature failure": _NOT_TRUSTED,  # of another CA with the same name
    "wrong_version_number": _NO_TLS,
    "connection refused": REFUSED,
    "domain name not found": "the host name is not known",
    "name or service not known": "the host name is not known",
    "no route to host": "no route to host",
    "network is unreachable": "the network is not reachable",
    "connection reset": "the connection was reset",
    "broken pipe": "the connection was reset",
    "socket closed": "the connection was closed",
    "connection timed out": "it does not answer",
}
"""What gRPC's texts come down to; the first that fits."""
_CLOSED_AT_ONCE: Final = (
    "it closed the new connection; a listener with TLS does that to plaintext (security.protocol), and to who shows it "
    "no certificate that it trusts (ssl.certificate.location)"
)


class NobodyListens(BrokerUnavailable):
    """Every address has refused the connection: no server runs there, or not yet. Never travels."""


class TlsFailed(NobodyListens):
    """At every address TLS has failed by what waiting does not change. Never travels."""


def nobody_answers(addresses: Sequence[str], reasons: Sequence[str]) -> BrokerUnavailable:
    """Return the error when all addresses were tried, and what came of each."""
    if reasons and all(reason.endswith(_TLS_TROUBLES) for reason in reasons):
        return TlsFailed(
            f"no broker can be talked to at {', '.join(addresses)}; check the addresses, security.protocol and "
            f"ssl.ca.location ({'; '.join(reasons)})"
        )
    refused = bool(reasons) and all(reason.endswith((REFUSED, *_TLS_TROUBLES)) for reason in reasons)
    return (NobodyListens if refused else BrokerUnavailable)(
        f"no broker answers at {', '.join(addresses)}; check that the cluster runs, that the addresses and ports are "
        f"right and that no firewall is between ({'; '.join(reasons)})"
    )


def in_words(details: str) -> str:
    """Return what gRPC says of a connection in a few words; as it is, where there are none for it."""
    text = details.lower()
    if text.startswith("failed to connect to all addresses") and text.endswith("socket closed"):
        return _CLOSED_AT_ONCE
    return next((words for part, words in _IN_WORDS.items() if part in text), details)


def from_grpc(error: grpc.aio.AioRpcError | asyncio.TimeoutError | Exception, address: str) -> RaftlogError:
    """Return the error of the tree for a failed call."""
    if isinstance(error, RaftlogError):
        return error
    if not isinstance(error, grpc.RpcError):
        return BrokerUnavailable(f"the connection to {address} broke: {type(error).__name__}: {error}")
    code = error.code()
    details = error.details() or code.name
    match code:
        case (
            grpc.StatusCode.UNAVAILABLE
            | grpc.StatusCode.CANCELLED
            | grpc.StatusCode.UNKNOWN
            | grpc.StatusCode.INTERNAL  # what gRPC says of a stream that was reset
        ):
            found = named_error(details) if FROM_PLUGIN in details else None  # why a call has got no token
            if found is not None and not isinstance(found, RetriableError):
                return found
            return BrokerUnavailable(f"no connection to {address}: {in_words(details)}")
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            more = "" if details == "Deadline Exceeded" else f": {details}"
            return RequestTimedOut(f"{address} did not answer in time{more}")
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return BrokerOverloaded(f"{address}: {details}")
        case grpc.StatusCode.INVALID_ARGUMENT:
            return InvalidRequestError(f"{address}: {details}")
        case grpc.StatusCode.UNAUTHENTICATED:
            return _not_authenticated(details, address)
        case grpc.StatusCode.PERMISSION_DENIED:
            found = named_error(details)
            return found if isinstance(found, AuthorizationError) else AuthorizationError(f"{address}: {details}")
        case grpc.StatusCode.UNIMPLEMENTED:
            return UnsupportedVersion(
                f"{address} does not know this call: it may be a node's inter.node.listener, while clients connect to "
                f"its listeners, or a server of another version or kind ({details})"
            )
        case _:
            return InternalError(f"{address}: {code.name}: {details}")


def _not_authenticated(details: str, address: str) -> RaftlogError:
    """Return what it means that a broker does not know who calls; its token is dropped, if there was one."""
    logged_in = forget_token(address)
    if not details.startswith(TOKEN_EXPIRED):
        found = named_error(details)
        return found if isinstance(found, AuthenticationFailed) else AuthenticationFailed(f"{address}: {details}")
    if logged_in:
        return BrokerUnavailable(f"{address} wants a new login: {details.removeprefix(TOKEN_EXPIRED)}")
    return AuthenticationFailed(
        f"{address} wants to know who calls: set security.protocol=sasl_ssl, sasl.username and sasl.password.location"
    )


OpenChannel = Callable[[str], grpc.aio.Channel]


def _open_insecure(address: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)


_open: OpenChannel = _open_insecure


def open_channel(address: str, tls: ChannelTls | None = None) -> grpc.aio.Channel:
    """Return a new channel to an address, host:port. Every channel of a client to a broker is opened here."""
    return _open(address) if tls is None else tls.open(address, CHANNEL_OPTIONS)


def use_channels(opens: OpenChannel) -> OpenChannel:
    """Have plaintext channels opened another way in this process, for simulations; return what opened them before."""
    global _open
    before, _open = _open, opens
    return before


class Connections:
    """Channels of one client object. A channel reconnects by itself; it is closed with the client.

    When the certificates have changed, channels are opened anew. What goes on over one from before goes on, until they
    change once more.
    """

    def __init__(self, tls: ChannelTls | None = None, options: Options | None = None) -> None:
        """`options` of channels, where they are not a client's."""
        self._tls = tls
        self._options = options
        self._version = tls.version if tls is not None else 0
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._before: list[grpc.aio.Channel] = []
        self._closing: set[asyncio.Task[None]] = set()

    def channel(self, address: str) -> grpc.aio.Channel:
        """Return the channel to an address, made on first use."""
        if self._tls is not None and self._tls.version != self._version:
            self._renew(self._tls.version)
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = self._opened(address)
        return channel

    def _opened(self, address: str) -> grpc.aio.Channel:
        return open_channel(address, self._tls) if self._options is None else dial(address, self._options, self._tls)

    def _renew(self, version: int) -> None:
        self._version = version
        for channel in self._before:
            task = asyncio.ensure_future(channel.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
        self._before, self._channels = list(self._channels.values()), {}

    async def close(self) -> None:
        """Close all channels; calls in progress end."""
        channels, self._channels, self._before = [*self._channels.values(), *self._before], {}, []
        await asyncio.gather(*(channel.close() for channel in channels), *self._closing, return_exceptions=True)


def connections(pem: PemFiles | None, sasl: Sasl | None = None) -> Connections:
    """Return the connections of a client: with TLS and these files, or in plaintext. `sasl`: who logs in.

    Raises:
        InvalidConfig: a file cannot be read, or has something else in it.
    """
    return Connections(ChannelTls(pem, sasl) if pem is not None else None)
